"""Rooms to build new games in: the layouts of 120 rooms that the alfworld wheel ships, and what may stand where in them.

    FloorPlan7-openable.json   "Drawer|+00.95|+00.22|-02.20": [x, z, rotation, horizon]   receptacles, seen from where
    FloorPlan7-objects.json    ["Plate", "StoveBurner", ...]                              kinds of things in the room
    FloorPlan7-layout.npy      (x, z) of every place where one can stand

    rooms 7-30 (+ 200, 300, 400)   train and valid_seen          rooms 1-6 (+ 200, 300, 400)   valid_unseen

Stove burners and a few other receptacles have no place in the layouts; they get one on free ground.  Deliberately absent:
sliced objects, objects inside movable objects, furniture that no command can touch.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PLACELESS = {
    "StoveBurner": 4,
    "CoffeeMachine": 1,
    "Toaster": 1,
    "TowelHolder": 1,
    "HandTowelHolder": 2,
    "ToiletPaperHanger": 1,
}
"""Receptacles without a place in the layouts -> how many a room that names them gets."""

LAMP = "DeskLamp"
LAMP_STANDS = ("Desk", "SideTable", "Dresser", "Shelf", "CoffeeTable", "DiningTable")
SEEN_ROOMS = tuple(offset + number for offset in (0, 200, 300, 400) for number in range(7, 31))
UNSEEN_ROOMS = tuple(offset + number for offset in (0, 200, 300, 400) for number in range(1, 7))


@dataclass(frozen=True)
class Receptacle:
    """id "Drawer|+00.95|+00.22|-02.20", its type, and the location "loc|6|-4|2|30" one stands at to use it."""

    id: str
    type: str
    location: str


@dataclass(frozen=True)
class Room:
    number: int
    receptacles: tuple[Receptacle, ...]
    objects: tuple[str, ...]  # kinds that can be picked up here
    start: str  # a location away from every receptacle
    has_lamp: bool

    @property
    def types(self) -> set[str]:
        return {receptacle.type for receptacle in self.receptacles}

    def holders(self, thing: str) -> list[Receptacle]:
        """Receptacles of this room that can hold a kind of thing."""
        if thing == LAMP:
            return [r for r in self.receptacles if r.type in LAMP_STANDS]
        return [r for r in self.receptacles if thing in contents(r.type)]


def wheel() -> Path:
    """The folder of the installed package alfworld; importing it would make folders in the user's home."""
    spec = importlib.util.find_spec("alfworld")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("alfworld must be installed, got no such package; pip install hsg[alfworld]")
    return Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def _module(name: str) -> Any:
    """A module of the wheel by its file, without its package; the two used import the standard library only."""
    spec = importlib.util.spec_from_file_location(f"_alfworld_{name}", wheel() / "gen" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contents(receptacle: str) -> set[str]:
    """Kinds of things that a kind of receptacle can hold (slices left out)."""
    held = _module("constants").VAL_RECEPTACLE_OBJECTS.get(receptacle, ())
    return {thing for thing in held if not thing.endswith("Sliced")}


def able(action: str) -> set[str]:
    """Kinds of things that are Heatable, Coolable, Cleanable, Sliceable or Toggleable."""
    return _module("constants").VAL_ACTION_OBJECTS[action]


def openable() -> set[str]:
    """Kinds of receptacles with a door or lid."""
    return set(_module("constants").OPENABLE_CLASS_LIST)


def movable_receptacles() -> set[str]:
    """Kinds of things that can be picked up and hold others."""
    return set(_module("constants").MOVABLE_RECEPTACLES)


def goal(kind: str) -> tuple[str, list[str]]:
    """(PDDL of the goal with {obj}, {recep}, {toggle}; sentences that say it) of a task type."""
    entry = _module("goal_library").gdict[kind]
    return entry["pddl"].replace("#", "-"), entry["templates"]


def domain() -> str:
    return (wheel() / "data" / "alfred.pddl").read_text(encoding="utf-8")


def grammar() -> str:
    return (wheel() / "data" / "alfred.twl2").read_text(encoding="utf-8")


@functools.cache
def load_room(number: int) -> Room:
    """One room of the wheel's layouts."""
    stem = str(wheel() / "gen" / "layouts" / f"FloorPlan{number}")
    named = set(json.loads(Path(f"{stem}-objects.json").read_text(encoding="utf-8")))
    placed = json.loads(Path(f"{stem}-openable.json").read_text(encoding="utf-8"))
    ground = [(float(x), float(z)) for x, z in np.load(f"{stem}-layout.npy")]
    receptacles = [Receptacle(name, _type(name), _location(*pose)) for name, pose in sorted(placed.items())]
    taken = {(pose[0], pose[1]) for pose in placed.values()}
    free = [point for point in sorted(ground) if point not in taken]
    for kind, number_of_them in PLACELESS.items():
        if kind in named and kind not in {r.type for r in receptacles}:
            for _ in range(number_of_them):
                x, z = free.pop(len(free) // 2)
                receptacles.append(Receptacle(f"{kind}|{x:+06.2f}|+00.90|{z:+06.2f}", kind, _location(x, z, 0, 30)))
    objects = set().union(*(contents(r.type) for r in receptacles)) & named
    start = _location(*free[0], 0, 30)
    has_lamp = LAMP in named and any(r.type in LAMP_STANDS for r in receptacles)
    return Room(number, tuple(receptacles), tuple(sorted(objects)), start, has_lamp)


def _type(name: str) -> str:
    """ "Sink|-01.42|+00.84|+01.78|SinkBasin" -> "SinkBasin"."""
    parts = name.split("|")
    return parts[4] if len(parts) > 4 else parts[0]


def _location(x: float, z: float, rotation: float, horizon: float) -> str:
    return f"loc|{round(x * 4)}|{round(z * 4)}|{round(rotation / 90) % 4}|{round(horizon)}"
