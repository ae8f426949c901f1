"""WebShop: search against Lucene and reward against upstream (with HSG_DATA), everything else on catalogues made here."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
import warnings
from pathlib import Path

import pytest
from env_contract import assert_contract

from hsg import environments

pytest.importorskip("rapidfuzz", reason="rapidfuzz is not installed (pip install hsg[webshop])")

from hsg.environments.webshop import catalogue as catalogue_module
from hsg.environments.webshop import generate, goals, load_catalogue, nouns, pages, purchase_reward, search
from hsg.environments.webshop.analysis import terms, tokens
from hsg.environments.webshop.expert import play_expert
from hsg.environments.webshop.porter import stem
from hsg.environments.webshop.reward import colour_of, fuzzy_ratio, judge_purchase

ROOT = Path(__file__).parents[2]
OFFICIAL = Path(os.environ.get("HSG_DATA", "")) / "webshop" if os.environ.get("HSG_DATA") else None
needs_data = pytest.mark.skipif(OFFICIAL is None, reason="HSG_DATA is not set: no official WebShop data")


def golden(name: str) -> list[dict]:
    return json.loads(gzip.decompress((OFFICIAL / f"{name}.json.gz").read_bytes()))


@pytest.fixture(scope="module")
def official():
    return load_catalogue(OFFICIAL)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("webshop"))


@pytest.fixture(scope="module")
def task_set(cache):
    return environments.make("webshop", data="generated", cache_dir=cache)


RAW = {
    "asin": "B01",
    "name": "Red Cotton Shirt",
    "full_description": "A shirt for work.",
    "small_description": ["Machine washable", "Made of cotton"],
    "pricing": "$10.5",
    "customization_options": {
        "Color": [{"value": " Dark Red "}, {"value": "S/M"}],
        "Size": [{"value": "s | m"}],
        "Fit": None,
    },
    "category": "fashion",
    "query": " Shirts ",
    "product_category": "Clothing › Men › Shirts",
}
FACTS = {
    "attributes": ["long lasting", "machine wash"],
    "instruction": "Find me shirts",
    "instruction_attributes": ["machine wash"],
}


def write_catalogue(
    folder: Path, *changes: dict, facts: dict | None = None, human: dict | None = None, **extra
) -> Path:
    """Products that differ from RAW by `changes`, in upstream's files."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{**RAW, **change} for change in changes]
    contents = {
        "items_shuffle": rows,
        "items_ins_v2": {row["asin"]: FACTS for row in rows} if facts is None else facts,
        "items_human_ins": human or {},
        "title_nouns": {row["name"]: row["name"].lower().split() for row in rows},
        **extra,
    }
    for stem_, content in contents.items():
        (folder / f"{stem_}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


# --- against upstream ----------------------------------------------------------------------------------------------


@needs_data
def test_reward_is_upstreams(official):
    for case in golden("golden_rewards"):
        goal, bought = case["goal"], case["bought"]
        purchase = judge_purchase(official, goal, bought["asin"], bought["price"], bought["options"])
        reward = purchase_reward(official, goal, bought["asin"], bought["price"], bought["options"])
        assert reward == purchase.reward == pytest.approx(case["reward"], abs=1e-9)
        assert purchase.type == case["info"]["r_type"]
        assert purchase.price == case["info"]["r_price"]
        assert purchase.attributes / purchase.num_attributes == pytest.approx(case["info"]["r_att"], abs=1e-9)


@needs_data
def test_search_is_lucenes(official):
    overlap, first, seconds = [], [], []
    for case in golden("golden_search"):
        started = time.process_time()
        found = official.search(case["query"])
        seconds.append(time.process_time() - started)
        expected = case["top"]
        overlap.append(len(set(found[:10]) & set(expected[:10])) / min(10, len(expected)) if expected else 1.0)
        first.append(found[:1] == expected[:1])
    assert statistics.mean(overlap) >= 0.999  # the bar is 0.99
    assert statistics.mean(first) == 1.0  # the bar is 0.98
    assert statistics.median(seconds) < 0.002


@needs_data
def test_goals_and_prices_are_upstreams(official):
    made = goals.make_goals(official, "synthetic")
    assert len(made) == 6910
    assert len({goal["asin"] for goal in made}) == 415
    by_text = {goal["instruction_text"]: goal for goal in made}
    known = [case for case in golden("golden_rewards") if isinstance(case["goal"]["goal_options"], dict)]
    assert len(known) > 250
    for case in known:
        assert official.product(case["bought"]["asin"]).price == case["bought"]["price"]
        goal = by_text[case["goal"]["instruction_text"]]
        assert {name: goal[name] for name in case["goal"]} == {
            **case["goal"],
            "attributes": tuple(case["goal"]["attributes"]),
        }
    assert len(goals.make_goals(official, "human")) == 13
    cut = goals.split_goals(made)
    assert cut["test"] == list(range(500))
    assert cut["dev"] == list(range(500, 1500))
    assert cut["train"][-1] == 6909
    assert 6910 - 1500 - len(cut["train"]) == 3  # equal to a goal of dev or test: a product lists a value twice


@needs_data
def test_official_data_load_quickly_and_pass_the_contract():
    started = time.process_time()
    load_catalogue(OFFICIAL)
    assert time.process_time() - started < 2
    task_set = environments.make("webshop", data=str(OFFICIAL))
    assert_contract(task_set, num_tasks=6)
    scores = [play_expert(task_set.create(task, 0))[1] for task in task_set.tasks("test")[:100]]
    assert statistics.mean(scores) > 0.85


# --- text and search -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "expected"),
    [  # from Porter's paper and his list of what changed later
        ("caresses", "caress"), ("ponies", "poni"), ("cats", "cat"), ("feed", "feed"), ("agreed", "agre"),
        ("plastered", "plaster"), ("bled", "bled"), ("motoring", "motor"), ("sing", "sing"), ("conflated", "conflat"),
        ("hopping", "hop"), ("falling", "fall"), ("filing", "file"), ("happy", "happi"), ("sky", "sky"),
        ("relational", "relat"), ("conditional", "condit"), ("vietnamization", "vietnam"), ("hopefulness", "hope"),
        ("electriciti", "electr"), ("adjustment", "adjust"), ("replacement", "replac"), ("adoption", "adopt"),
        ("rate", "rate"), ("cease", "ceas"), ("controll", "control"), ("roll", "roll"), ("possibly", "possibl"),
        ("apologies", "apolog"), ("hissing", "hiss"), ("fizzed", "fizz"), ("as", "as"), ("toys", "toi"),
    ],
)  # fmt: skip
def test_stems(word, expected):
    assert stem(word) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.5 inch x.y, 1,000 a:b", ["2.5", "inch", "x.y", "1,000", "a:b"]),
        ("T-Shirts (2-pack)", ["T", "Shirts", "2", "pack"]),
        ("women's o’clock 'n' 12'10 12'x'", ["women's", "o’clock", "n", "12'10", "12", "x"]),
        ("a_b _c_ __ 4k v1.2 x.5 5.x", ["a_b", "_c_", "4k", "v1.2", "x", "5", "5", "x"]),
        ("end. Next:now ,3", ["end", "Next:now", "3"]),
        ("heart ❤️ ♡ ✿ 👩‍🚀 👍🏽 ®", ["heart", "❤️", "♡", "👩‍🚀", "👍🏽", "®"]),
        ("锅巴 カタカナ ひら ½ cafe\u0301", ["锅", "巴", "カタカナ", "ひ", "ら", "cafe\u0301"]),
        ("a\u200bb \xad", ["a", "b"]),
        ("", []),
    ],
)
def test_tokens(text, expected):
    assert tokens(text) == expected


def test_terms():
    assert terms("The Women's T-Shirts, for BOYS’ and it's") == ["women", "t", "shirt", "boi"]
    assert tokens("x" * 600) == ["x" * 255, "x" * 255, "x" * 90]


def test_lengths_that_one_byte_keeps():
    """Every length up to 40, then steps of 2, 4, ... : eight values for each power of two above 24."""
    table = search.LENGTHS.tolist()
    assert table[:50] == [*range(40), *range(40, 56, 2), 56, 60]
    assert (table[-1], len(table), sorted(set(table))) == (2013265944, 256, table)
    lengths = [0, 39, 41, 43, 57, 10**6]
    assert search.kept_length(search.np.array(lengths)).tolist() == [0, 39, 40, 42, 56, 983064]


def slow_scores(bags: list[collections.Counter], query: str) -> list[float]:
    """BM25 by its equation, in plain loops, of documents as bags of terms."""
    kept = [max(length for length in search.LENGTHS if length <= sum(bag.values())) for bag in bags]
    mean = sum(sum(bag.values()) for bag in bags) / len(bags)
    scores = [0.0] * len(bags)
    for word in terms(query):
        frequency = sum(word in bag for bag in bags)
        idf = math.log(1 + (len(bags) - frequency + 0.5) / (frequency + 0.5))
        for i, bag in enumerate(bags):
            scores[i] += idf * bag[word] / (bag[word] + 0.9 * (1 - 0.4 + 0.4 * kept[i] / mean))
    return scores


@pytest.mark.parametrize("num_documents", [1, 7, 300, 5000])  # below and above the block search for the best
def test_search_is_the_equation(num_documents):
    rng = random.Random(num_documents)
    words = [f"w{i}" for i in range(40)]
    longest = 90 if num_documents < 1000 else 12
    documents = [" ".join(rng.choices(words, k=rng.randint(1, longest))) for _ in range(num_documents)]
    bags = [collections.Counter(terms(text)) for text in documents]
    builder = search.IndexBuilder()
    for text in documents:
        builder.add(text)
    names = [str(rng.random()) for _ in documents]
    index = builder.build(names)
    for query in ("w1", "w2 w3 w3 w39 unknown", "unknown", "the"):
        scores = slow_scores(bags, query)
        found = index.search(query, 50)
        assert len(found) == min(50, sum(score > 0 for score in scores))
        assert [scores[i] for i in found] == pytest.approx(sorted(scores, reverse=True)[: len(found)], rel=1e-5)
    assert index.search("w1", 0) == []


def test_ties_go_by_name():
    builder = search.IndexBuilder()
    for text in ["red shirt", "blue shirt", "red shirt", "red shirt"]:
        builder.add(text)
    assert builder.build(["D", "A", "C", "B"]).search("red", 2) == [3, 2]


# --- catalogue -----------------------------------------------------------------------------------------------------


def test_products_as_upstream_reads_them(tmp_path):
    changes = (
        {}, {"asin": "nan"}, {"asin": "B0123456789"}, {"name": "again"},
        {"asin": "B02", "small_description": "one", "pricing": "$1,299.00 - $1,500.5", "customization_options": ""},
        {"asin": "B03", "small_description": [], "pricing": ""},
    )  # fmt: skip
    found = load_catalogue(write_catalogue(tmp_path, *changes, facts={"B01": FACTS}))
    assert [product.asin for product in found] == ["B01", "B02", "B03"]
    first, second, third = found
    assert first.options == {"color": ("dark red", "s | m"), "size": ("s | m",)}
    assert (first.query, first.price, first.price_tag, first.attributes) == (
        "shirts",
        10.5,
        "$10.5",
        ("long lasting", "machine wash"),
    )
    assert first.search_text == (
        "red cotton shirt a shirt for work. machine washable color: dark red, s | m, and size: s | m"
    )
    assert (second.bullets, second.options, second.price_tag) == (("one",), {}, "$1299.0 to $1500.5")
    assert 1299 < second.price < 1500.5
    assert (third.price, third.price_tag, third.attributes) == (100.0, "$100.0", ("DUMMY_ATTR",))
    assert "B02" in found
    assert found.search("shirt washable", limit=1) == ["B01"]


@pytest.mark.parametrize("text", ["$19.99 $27.99 $30", "$.5", "19.99", None, "$ - $"])
def test_prices(text):
    expected = {"$19.99 $27.99 $30": [19.99, 27.99], "$.5": [0.5]}
    assert catalogue_module.read_prices(text) == expected.get(text, [100.0])


def test_files_may_be_zipped_and_are_read_in_pieces(tmp_path, monkeypatch):
    changes = [{"asin": f"B{i}", "name": f"Müller “Shirt” {i} {{[,]}}"} for i in range(9)]
    plain = load_catalogue(write_catalogue(tmp_path / "plain", *changes))
    zipped = write_catalogue(tmp_path / "zipped", *changes)
    for path in zipped.glob("*.json"):
        path.with_suffix(".json.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    monkeypatch.setattr(catalogue_module, "CHUNK", 17)
    assert list(load_catalogue(zipped)) == list(plain)
    (zipped / "items_ins_v2.json.gz").write_bytes(gzip.compress(b'{"B1": {"attributes": ['))
    with pytest.raises(ValueError, match=r"whole JSON files, got a broken .*items_ins_v2"):
        load_catalogue(zipped)


def test_small_file_or_all(tmp_path):
    write_catalogue(tmp_path, {}, {"asin": "B02"}, items_shuffle_1000=[RAW])
    assert len(load_catalogue(tmp_path)) == 1
    assert len(load_catalogue(tmp_path, "all")) == 2
    with pytest.raises(ValueError, match=r"got '.*empty' without items_shuffle\*\.json; WebShop's setup\.sh"):
        load_catalogue(tmp_path / "empty")


def test_nouns_are_approximated_once_said(tmp_path):
    folder = write_catalogue(tmp_path, {})
    (folder / "title_nouns.json").unlink()
    source = nouns.Nouns.find(folder, None)
    with pytest.warns(UserWarning, match="nouns of titles are approximated"):
        assert source("The Red 4K Camera for 2 Dogs") == ["4k", "camera", "dogs"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source("Another Title")


def test_nouns_of_a_tagger_are_kept(tmp_path):
    asked = []
    source = nouns.Nouns({}, lambda title: asked.append(title) or ["noun"], tmp_path / "cache" / "n.jsonl")
    assert source("A") == source("A") == ["noun"]
    assert asked == ["A"]
    assert json.loads((tmp_path / "cache" / "n.jsonl").read_text()) == ["A", ["noun"]]


# --- reward --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("title", "change", "expected"),
    [  # the goal's title has ten nouns and another query; two parts of the path agree where it says so
        ("n0 n1 n2", {}, 1.0),
        ("n0 n1", {}, 0.5),
        ("n0 n1", {"query": "Trousers"}, 1.0),
        ("n0 n1", {"product_category": "x › Clothing › Trousers › Clothing"}, 1.0),
        ("n0 n1", {"product_category": "Clothing › Clothing"}, 0.5),
        ("n0", {"query": "Trousers"}, 1.0),
        ("other", {"query": "Trousers", "product_category": "Clothing › Trousers"}, 0.0),
    ],
)
def test_kind_of_product(tmp_path, title, change, expected):
    found = load_catalogue(write_catalogue(tmp_path, {"name": title, "product_category": "else", **change}))
    goal_nouns = [f"n{i}" for i in range(10)]
    found.nouns._known["goal"] = goal_nouns
    goal = {"name": "goal", "query": "trousers", "product_category": "Clothing › Trousers", "attributes": (), "goal_options": [], "price_upper": 20.0}  # fmt: skip
    assert judge_purchase(found, goal, "B01", 10.5, {}).type == expected
    found.nouns._known["goal"] = [*goal_nouns, *["n1"] * 10]  # repeats count: n0 alone is now 1 of 20
    if title == "n0":
        assert judge_purchase(found, goal, "B01", 10.5, {}).type == 0.1


def test_no_nouns_to_compare_count_as_a_fifth(tmp_path):
    found = load_catalogue(write_catalogue(tmp_path, {}, title_nouns={RAW["name"]: ["shirt"], "goal": []}))
    goal = {"name": "goal", "query": "hats", "product_category": "", "attributes": (), "goal_options": [], "price_upper": 20.0}  # fmt: skip
    assert judge_purchase(found, goal, "B01", 10.5, {}).type == 0.5
    assert judge_purchase(found, {**goal, "query": "shirts"}, "B01", 10.5, {}).type == 1.0


def test_attributes_options_and_price(tmp_path):
    found = load_catalogue(write_catalogue(tmp_path, {}))
    goal = {"name": RAW["name"], "query": "shirts", "product_category": "", "price_upper": 10.5}
    # by the product's list (fuzzily), in the bullets, the description, the title, nowhere
    goal["attributes"] = ["washing machine", "of cotton", "for work", "red cotton", "silk"]
    goal["goal_options"] = {"color": "dark red", "size": "large"}
    purchase = judge_purchase(found, goal, "B01", 10.5, {"color": "dark red", "size": "small"})
    assert (purchase.attributes, purchase.options, purchase.price) == (4, 1, True)
    assert purchase.reward == pytest.approx((4 + 1 + 1) / (5 + 2 + 1))
    assert not judge_purchase(found, goal, "B01", 10.51, {}).price
    assert str(purchase).startswith("Attributes found: 4 of 5. Options: 1 of 2. Price within the limit.")


def test_an_option_is_compared_as_a_pair(tmp_path):
    """The pair's text holds the option's name; a colour is seen in it only where an element is just that word."""
    found = load_catalogue(write_catalogue(tmp_path, {}))
    goal = {"name": RAW["name"], "query": "", "product_category": "", "price_upper": 20.0, "attributes": ["x"]}
    for wanted, chosen, count in (
        ({"fit type": "men"}, "fit type", 1),  # the name alone is enough
        (["men"], "fit type", 0),
        ({"color": "dark red"}, "dark red", 1),
        ({"color": "dark red"}, "light red", 0),  # light is none of: color, dark, red
        (["dark red"], "dark pink", 1),  # both are "dark"
    ):
        assert judge_purchase(found, {**goal, "goal_options": wanted}, "B01", 10.5, {"any": chosen}).options == count
    assert colour_of("dark red") == "dark"
    assert colour_of(("color", "dark red")) == ("color", "dark red")
    assert colour_of(("color", "red")) == "red"
    assert fuzzy_ratio("red", ("color", "c5-red")) == 100
    assert fuzzy_ratio("large", ("size", "x-large")) == 100  # quirk: any part of the pair is enough
    assert fuzzy_ratio("café-red", "caf red") == 100  # quirk: Latin-1 letters are dropped
    assert fuzzy_ratio("", "red") == 0


# --- goals ---------------------------------------------------------------------------------------------------------


def test_goals_by_hand(tmp_path):
    human = {"B01": [
        {"instruction": "i want a shirt.", "instruction_attributes": ["soft"], "instruction_options": ["red"]},
        {"instruction": "none", "instruction_attributes": [], "instruction_options": []},
    ]}  # fmt: skip
    facts = {"B01": FACTS, "B02": {**FACTS, "instruction": None}, "B03": FACTS, "B04": FACTS}
    unsorted = {"Size": [{"value": "M"}], "Color": [{"value": "red"}]}
    changes = ({}, {"asin": "B02"}, {"asin": "B03", "pricing": "$985", "customization_options": ""})
    changes += ({"asin": "B04", "customization_options": unsorted},)
    found = load_catalogue(write_catalogue(tmp_path, *changes, facts=facts, human=human))
    made = {goal["id"]: goal for goal in goals.make_goals(found, "synthetic")}
    assert set(made) == {"B01/0", "B01/1", "B03/0", "B04/0"}
    assert made["B04/0"]["instruction_text"].startswith("Find me shirts with color: red, and size: m, and price ")
    goal = made["B01/1"]
    assert goal["goal_options"] == {"color": "s | m", "size": "s | m"}
    assert goal["price_upper"] in (30.0, 40.0, 50.0)
    limit = f", and price lower than {goal['price_upper']:.2f} dollars"
    assert goal["instruction_text"] == "Find me shirts with color: s | m, and size: s | m" + limit
    assert made["B03/0"]["instruction_text"] == "Find me shirts"  # only 990 is above 985, and two are needed
    assert made["B03/0"]["price_upper"] == 1000000
    (goal,) = goals.make_goals(found, "human")
    assert goal["instruction_text"].startswith("i want a shirt, and price lower than ")
    assert (goal["goal_options"], goal["attributes"]) == (["red"], ("soft",))


def test_limit_is_the_larger_of_two_of_the_next_four():
    drawn = collections.Counter(goals.draw_limit(20.0, random.Random(i))[0] for i in range(600))
    assert set(drawn) == {40.0, 50.0, 60.0}  # never 30: another one is larger
    assert drawn[60.0] == pytest.approx(300, abs=50)
    assert goals.draw_limit(20.0, random.Random(0))[1].startswith(", and price lower than ")


def test_splits_never_meet():
    made = [{"id": str(i), "asin": "A", "instruction_text": str(i % 2500)} for i in range(3000)]
    cut = goals.split_goals(made)
    wishes = {split: {made[i]["instruction_text"] for i in indices} for split, indices in cut.items()}
    assert (len(cut["test"]), len(cut["dev"]), len(cut["train"])) == (500, 1000, 1000)
    assert not wishes["test"] & wishes["train"] | wishes["test"] & wishes["dev"] | wishes["dev"] & wishes["train"]
    small = goals.split_goals(made[:13])
    assert {split: len(indices) for split, indices in small.items()} == {"test": 3, "dev": 3, "train": 7}


def test_the_same_splits_in_every_process(task_set, cache):
    code = f"""
from hsg import environments
task_set = environments.make("webshop", data="generated", cache_dir={cache!r})
print([task.id for split in task_set.splits for task in task_set.tasks(split)])
"""
    ids = [[task.id for task in task_set.tasks(split)] for split in task_set.splits]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
        )
        assert result.stdout.strip() == str([one for split in ids for one in split]), result.stderr
    assert len({one for split in ids for one in split}) == sum(map(len, ids))


# --- pages and states ----------------------------------------------------------------------------------------------


@pytest.fixture
def shop(tmp_path):
    """Twelve shirts of which the first has options; one goal each."""
    changes = [{"asin": f"B{i:02d}", "pricing": f"${i + 5}.0"} for i in range(12)]
    for change in changes[1:]:
        change["customization_options"] = ""
    changes[0]["small_description"] = ["one", "", " \n ", "two"]
    write_catalogue(tmp_path, *changes)
    return environments.make("webshop", data=str(tmp_path))


def begin(shop, asin="B00", number=0, **options):
    task = next(task for split in shop.splits for task in shop.tasks(split) if task.id == f"{asin}/{number}")
    episode = shop.create(task, 0)
    return episode, episode.start(), shop.goal(task)["instruction_text"]


def test_pages_word_by_word(shop):
    episode, first, wish = begin(shop)
    assert first == f"WebShop [SEP] Instruction: [SEP] {wish} [SEP] Search"
    assert episode.admissible_actions() == ["search[<your query>]"]

    head = f"Instruction: [SEP] {wish} [SEP] Back to Search [SEP] "
    result = episode.step("search[cotton shirt]")
    products = [f"B{i:02d} [SEP] Red Cotton Shirt [SEP] ${i + 5}.0" for i in range(12)]
    order = [*products[1:], products[0]]  # the one with options is longer, so it fits less
    assert result.observation == head + "Page 1 (Total results: 12) [SEP] Next > [SEP] " + " [SEP] ".join(order[:10])
    assert episode.admissible_actions()[:3] == ["click[back to search]", "click[next >]", "click[b01]"]
    assert episode.step("click[Next >]").observation == (
        head + "Page 2 (Total results: 12) [SEP] < Prev [SEP] Next > [SEP] " + " [SEP] ".join(order[10:])
    )
    assert episode.step("click[next >]").observation == head + "Page 3 (Total results: 12) [SEP] < Prev [SEP] Next >"

    episode.step("click[< prev]")
    item = head + (
        "< Prev [SEP] color [SEP] dark red [SEP] s | m [SEP] size [SEP] s | m [SEP] Red Cotton Shirt [SEP] Price: $5.0 "
        "[SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    assert episode.step("click[B00]").observation == item
    assert episode.admissible_actions() == [
        f"click[{text}]"
        for text in ("back to search", "< prev", "description", "features", "reviews", "buy now", "dark red", "s | m")
    ]
    assert episode.step("click[Dark Red]").observation == item  # no mark
    assert episode.step("click[description]").observation == head + "< Prev [SEP] A shirt for work."
    assert episode.step("click[< prev]").observation == item
    # An empty bullet is an empty place, one of blanks with a line end is dropped, as upstream's HTML makes them.
    assert episode.step("click[features]").observation == head + "< Prev [SEP] one [SEP]  [SEP] two"
    assert not episode.step("click[buy now]").valid
    episode.step("click[< prev]")
    assert episode.step("click[reviews]").observation == head + "< Prev"
    episode.step("click[< prev]")
    result = episode.step("click[buy now]")
    assert result.observation == (
        "Thank you for shopping with us! [SEP] Your code: [SEP] None [SEP] (Paste it in your MTurk interface.) [SEP] "
        'Purchased [SEP] asin [SEP] B00 [SEP] options [SEP] {"color": "dark red"} [SEP] attrs [SEP] None [SEP] category '
        "[SEP] None [SEP] query [SEP] None [SEP] product category [SEP] None [SEP] Target [SEP] asin [SEP] options [SEP] "
        "attrs [SEP] price upper [SEP] instuction text [SEP] category [SEP] product category [SEP] query [SEP] Goal [SEP] "
        f"None [SEP] Reward [SEP] Your score (min 0.0, max 1.0) [SEP] {result.score} [SEP] Reward Details [SEP] None"
    )


def test_odd_texts():
    assert pages._join(["", "a", " ", "\n \t", "\xa0", " b\xa0"]) == "a [SEP]  [SEP]  [SEP] b"
    receipt = pages.done_page("B0", {"size": "5'&<b>é", "color": "a"}, 0.5).text
    assert '{"color": "a", "size": "5\\u0027\\u0026\\u003cb\\u003e\\u00e9"}' in receipt


@pytest.mark.parametrize(
    "action",
    ["buy", "click[b99]", "click[next page]", "search[]", "Search[red]", "click[search] search", "search[a] click[b]", "click[buy now]", "[x]"],
)  # fmt: skip
def test_what_is_not_understood_changes_nothing(shop, action):
    episode, first, _ = begin(shop)
    result = episode.step(action)
    assert (result.observation, result.valid, result.reward, result.done) == (first, False, 0.0, False)


def test_moves_clear_the_options(shop):
    """A value that two options share counts for the later one; a search, a page of results and going back clear them."""
    for leave in ("search[shirt]", "click[< prev]", "click[back to search]"):
        episode, _, _ = begin(shop)
        episode.step("search[dark red]")
        episode.step("click[b00]")
        episode.step("click[dark red]")
        episode.step("click[s | m]")
        assert episode._options == {"color": "dark red", "size": "s | m"}
        episode.step("click[description]")
        episode.step("click[< prev]")
        assert episode._options == {"color": "dark red", "size": "s | m"}
        assert episode.step(leave).valid
        assert (episode._options, episode._asin) == ({}, "")
        if leave != "click[back to search]":
            assert "Page 1 " in episode.step("search[x] ").observation


def test_back_to_the_stored_page(shop):
    episode, _, _ = begin(shop)
    episode.step("search[cotton shirt]")
    second = episode.step("click[next >]").observation
    episode.step("click[b00]")
    assert episode.step("click[< prev]").observation == second
    assert "Page 1 " in episode.step("click[< prev]").observation
    assert "Total results: 0)" in episode.step("search[ ]").observation


def test_attributes_page_only_where_asked(tmp_path):
    write_catalogue(tmp_path, *({"asin": f"B0{i}"} for i in range(3)))
    for shown in (False, True):
        shop = environments.make("webshop", data=str(tmp_path), show_attributes=shown)
        episode, _, wish = begin(shop)
        episode.step("search[red]")
        assert ("Attributes [SEP] Buy Now" in episode.step("click[b00]").observation) is shown
        result = episode.step("click[attributes]")
        assert result.valid is shown
        if shown:
            assert result.observation == (
                f"Instruction: [SEP] {wish} [SEP] Back to Search [SEP] < Prev [SEP] long lasting [SEP] machine wash [SEP] fashion "
                "[SEP] shirts [SEP] Clothing › Men › Shirts"
            )


@pytest.mark.parametrize(("kind", "outcome"), [("score", 0.75), ("success", 0.0)])
def test_reward_for_training_and_score_are_two_things(tmp_path, kind, outcome):
    write_catalogue(tmp_path, *({"asin": f"B0{i}"} for i in range(3)))
    shop = environments.make("webshop", data=str(tmp_path), reward=kind)
    episode, _, _ = begin(shop)
    for action in ("search[red]", "click[b00]", "click[dark red]"):
        assert episode.step(action).reward == episode.outcome == 0.0
    result = episode.step("click[buy now]")
    # machine wash, color and price of four; the size was not chosen
    assert (result.score, result.success, result.done) == (0.75, False, True)
    assert result.reward == episode.outcome == outcome
    assert episode.step("search[red]") == dataclasses.replace(result, reward=0.0)
    assert result.feedback == "Attributes found: 1 of 1. Options: 1 of 2. Price within the limit. Kind of product: 1.0."


def test_copies_of_a_task_start_equal_and_cost_little(task_set):
    task = task_set.tasks("train")[0]
    task_set.create(task, 0).step("search[shirts]")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    copies = [task_set.create(task, seed) for seed in range(32)]
    assert len({copy.start() for copy in copies}) == 1
    assert len({copy.step("search[shirts]").observation for copy in copies}) == 1
    cost = (tracemalloc.get_traced_memory()[0] - before) / 32
    tracemalloc.stop()
    assert cost < 100_000  # bytes; the bar is a megabyte


def test_contract(task_set):
    assert_contract(task_set, num_tasks=6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "generated", "goals": "synthetik"}, "webshop.goals must be one of synthetic, human, got 'synthetik'"),
        ({"data": "generated", "reward": "10"}, "webshop.reward must be one of score, success, got '10'"),
        ({"data": "generated", "size": "large"}, "webshop.size must be one of small, all, got 'large'"),
        ({}, "webshop.data must be a folder with WebShop's files or 'generated', got None; or set WEBSHOP_DATA"),
        ({"data": "nowhere"}, "got 'nowhere' without items_shuffle"),
    ],
)
def test_bad_options(options, message, monkeypatch, cache):
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    with pytest.raises(ValueError) as caught:
        environments.make("webshop", cache_dir=cache, **options)
    assert message in str(caught.value)


def test_a_cache_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"webshop\.cache_dir must be a folder that can be written, got .*file"):
        environments.make("webshop", data="generated", cache_dir=str(tmp_path / "file"))


@pytest.mark.parametrize("products", ['[{"asin": "B1"}]', '["B1"]', '[{"asin": 1}]'])
def test_products_of_another_form(products, tmp_path):
    (tmp_path / "items_shuffle_1000.json").write_text(products)
    (tmp_path / "items_ins_v2_1000.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"webshop\.data must hold WebShop's own products, got another form in items_shuf"
    ):
        environments.make("webshop", data=str(tmp_path))


def test_folder_from_the_environment(monkeypatch, tmp_path):
    write_catalogue(tmp_path, *({"asin": f"B0{i}"} for i in range(3)))
    monkeypatch.setenv("WEBSHOP_DATA", str(tmp_path))
    assert len(environments.make("webshop").catalogue) == 3
    with pytest.raises(ValueError, match="at least 4 goals, got 0 'human' ones"):
        environments.make("webshop", goals="human")


# --- customers, made-up catalogues ---------------------------------------------------------------------------------


def test_expert_reads_pages_only_and_mostly_wins(task_set):
    scores = []
    for task in task_set.tasks("dev")[:60]:
        actions, score = play_expert(task_set.create(task, 0))
        assert len(actions) <= 15
        assert task_set.expert_actions(task) == (actions if score == 1.0 else None)
        scores.append(score)
    assert statistics.mean(scores) > 0.9


def test_expert_goes_on_until_a_product_has_all_options(tmp_path):
    options = {"Color": [{"value": "blue"}], "Size": [{"value": "large"}]}
    changes = [{"asin": "B00", "customization_options": ""}, {"asin": "B01", "customization_options": options}]
    changes += [{"asin": "B02", "customization_options": "", "name": "Hat"}]
    write_catalogue(tmp_path, *changes, facts={"B01": FACTS, "B02": FACTS, "B00": {}})
    catalogue = load_catalogue(tmp_path)
    (goal,) = (goal for goal in goals.make_goals(catalogue, "synthetic") if goal["asin"] == "B01")
    from hsg.environments.webshop.episode import WebShopEpisode

    catalogue._searched = lambda query, limit: ("B00", "B01", "B02")
    actions, score = play_expert(WebShopEpisode(catalogue, goal, False, "score"))
    assert actions[1:] == ["click[B00]", "click[< Prev]", "click[B01]", "click[blue]", "click[large]", "click[Buy Now]"]
    assert score == 1.0


def test_demonstrations_do_what_they_say(task_set):
    tasks = task_set.tasks("train")[:80]
    shown = [(task, item) for task in tasks for item in task_set.demonstrations(task, 0)]
    assert len(shown) == 5 * len(tasks)
    for task, item in shown:
        for actions in (item.actions, [a for turn, a in enumerate(item.actions) if turn not in item.wasted]):
            episode = task_set.create(task, 0)
            episode.start()
            results = [episode.step(action) for action in actions]
            assert results[-1].done
            assert not any(result.done for result in results[:-1])
            assert results[-1].success is item.fits  # a detour changes nothing
        assert ("read its features" in item.strategy) == ("click[Features]" in item.actions)
        assert item.strategy.startswith(
            "Search " + item.actions[item.wasted == (0,)][len("search[") : -1] + ". Open the "
        )
        assert len(item.actions) <= 9
    share = statistics.mean(item.fits for _, item in shown)
    assert 0.3 < share < 0.6
    assert 0.2 < statistics.mean(bool(item.wasted) for _, item in shown) < 0.5


def test_generated_catalogue_repeats_itself(tmp_path):
    for name in ("one", "two"):
        generate.make_files(tmp_path / name, 50, seed=3)
    generate.make_files(tmp_path / "other", 50, seed=4)
    contents = {p.name: {q.name: q.read_bytes() for q in sorted(p.iterdir())} for p in tmp_path.iterdir()}
    assert contents["one"] == contents["two"]
    assert all(contents["one"][name] != contents["other"][name] for name in contents["one"])
    human = environments.make("webshop", data=str(tmp_path / "one"), goals="human")
    assert_contract(human, num_tasks=2)


@pytest.mark.slow
def test_scale_command():
    command = [sys.executable, "-m", "hsg.environments.webshop.scale", "--products", "3000", "--queries", "5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.stdout.startswith("3,000 products: loaded in "), result.stderr


def test_paper_configurations_differ_in_the_model_alone():
    from hsg.config.loading import load_config

    small, large = (load_config(ROOT / f"experiments/configs/webshop_qwen2.5-{size}.yaml") for size in ("1.5b", "7b"))
    assert (small.model.path, large.model.path) == ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct")
    memory = dataclasses.replace(
        small.rollout, max_cache_tokens=large.rollout.max_cache_tokens
    )  # never changes a number
    assert dataclasses.replace(small, model=large.model, rollout=memory) == large
    assert (small.num_strategies, small.num_rollouts, small.sigma, small.delta, small.kappa) == (4, 8, 8, 0.5, 0.1)
    assert (small.rollout.max_turns, small.evaluation.test_split, small.evaluation.num_tasks) == (15, "test", 500)
