"""What places and things are called: upstream's ids in plain words, and the nouns of our own houses.

    receptacle_aabb_Tbl1_Top1_frl_apartment_table_01 -> black table      fridge_push_point -> fridge
    070-a_colored_wood_blocks_:0000                  -> colored wood blocks, a block where a file says so

Upstream (apple/ml-llarp) knows a drawer by two ids, the point to push at and the space within; both are one place here.
Ids that stand in no table get a name made of their own letters.  Deliberately absent: categories of upstream's objects;
they are read from the files (files.py), for a category is what goals call a thing.
"""

from __future__ import annotations

import re

PLACES = {
    "receptacle_aabb_Chr1_Top1_frl_apartment_chair_01": "chair",
    "receptacle_aabb_Tbl1_Top1_frl_apartment_table_01": "black table",
    "receptacle_aabb_Tbl2_Top1_frl_apartment_table_02": "brown table",
    "receptacle_aabb_TvStnd1_Top1_frl_apartment_tvstand": "TV stand",
    "receptacle_aabb_Sofa_frl_apartment_sofa": "sofa",
    "receptacle_aabb_sink_kitchen_counter": "sink",
    "receptacle_aabb_counter_left_kitchen_counter": "left counter",
    "receptacle_aabb_counter_right_kitchen_counter": "right counter",
    "receptacle_aabb_middle_topfrl_apartment_refrigerator": "fridge",
    "fridge_push_point": "fridge",
    "receptacle_aabb_drawer_left_top_frl_apartment_kitchen_counter": "left drawer",
    "cab_push_point_7": "left drawer",
    "cab_push_point_6": "middle drawer",
    "receptacle_aabb_drawer_right_top_frl_apartment_kitchen_counter": "right drawer",
    "cab_push_point_5": "right drawer",
    "cab_push_point_4": "bottom drawer",
}
SURFACES = (
    "black table",
    "brown table",
    "TV stand",
    "sofa",
    "left counter",
    "sink",
    "right counter",
)  # things stand here
DRAWERS = ("left drawer", "middle drawer", "right drawer", "bottom drawer")
DOORS = ("fridge", *DRAWERS)
ROOM = ("chair", *SURFACES, *DOORS)  # every place of a house, upstream's and the largest of ours
NO_SPACE = frozenset({"middle drawer", "bottom drawer"})  # upstream opens these and has no space within them
AREAS = {  # where a thing may have to be searched
    "kitchen": ("left counter", "sink", "right counter"),
    "tables": ("black table", "brown table"),
    "seats": ("sofa", "TV stand"),
}
# Places that count as reached together: upstream measures metres (2 to stand at a place), and the kitchen is one row.
BESIDE = {
    frozenset(pair)
    for pair in (
        ("left counter", "sink"), ("sink", "right counter"), ("fridge", "left counter"),
        ("left drawer", "left counter"), ("left drawer", "sink"), ("left drawer", "fridge"),
        ("middle drawer", "sink"), ("middle drawer", "right counter"), ("middle drawer", "right drawer"),
        ("right drawer", "sink"), ("right drawer", "right counter"), ("right drawer", "bottom drawer"),
        ("bottom drawer", "right counter"), ("middle drawer", "bottom drawer"),
        ("chair", "sofa"), ("chair", "TV stand"), ("chair", "black table"), ("chair", "brown table"),
    )
}  # fmt: skip

# Our own houses: the area where a thing is at home (option `tidy_share`).
HOMES = {
    "kitchen": ("apple", "pear", "plum", "peach", "lemon", "banana", "strawberry", "plate", "bowl", "cup", "spoon"),
    "tables": ("book", "scissors", "box", "can", "knife", "spatula", "sponge", "cleanser", "padlock"),
    "seats": ("ball", "lego", "block", "cube", "hammer", "screwdriver", "drill", "clamp", "remote"),
}
HOME_OF = {thing: area for area, things in HOMES.items() for thing in things}
TRAINED = tuple(HOME_OF)
NOVEL = ("mug", "orange", "lid", "toy airplane", "wrench")  # asked for in the split novel_objects alone
REFERRED = {
    "plum": "the small dark purple fruit",
    "lemon": "the sour yellow fruit",
    "banana": "the long bent fruit",
    "apple": "the crisp round fruit",
    "strawberry": "the little red berry",
}
PURPOSES = {
    "ball": "a thing to throw and catch",
    "screwdriver": "what tightens a loose screw",
    "scissors": "what cuts paper",
    "cleanser": "what helps against a stain",
    "book": "something to read",
    "spoon": "what one eats soup with",
}
SPATIAL = {  # the kitchen is one row
    "sink": ("the place right of the left counter", "the place left of the right counter"),
    "left counter": ("the place left of the sink",),
    "right counter": ("the place right of the sink",),
}
_KNOWN = frozenset(ROOM)


def place_name(identifier: str) -> str:
    """A place in words; upstream's ids and our own names are both understood."""
    if identifier in _KNOWN:
        return identifier
    name = PLACES.get(identifier)
    return name if name is not None else _plain(identifier.removeprefix("receptacle_aabb_"))


def thing_name(identifier: str) -> str:
    """An object's id without its numbers, in words: "065-d_cups_:0000" -> "cups"."""
    return _plain(re.sub(r"(_:\d+|\.object_config\.json)$", "", identifier))


def _plain(identifier: str) -> str:
    text = re.sub(r"^\d+(-[a-z])?_", "", identifier.replace("frl_apartment_", ""))
    return re.sub(r"_\d+$", "", text).strip("_").replace("_", " ").strip() or identifier
