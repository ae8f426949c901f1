"""LangR: skills, goals and partial sight against hand-made houses, the oracle on every split, upstream's files (with HSG_DATA)."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import random
import re
import statistics
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from env_contract import assert_contract

from hsg import environments
from hsg.environments.langr import KINDS, SPLIT_KINDS, TURN_LIMIT, LangRTaskSet
from hsg.environments.langr.demonstrations import _demonstrate, errands_of
from hsg.environments.langr.episode import LangREpisode, read_action
from hsg.environments.langr.expert import reaches_goal, solve
from hsg.environments.langr.files import Categories, EpisodeFile
from hsg.environments.langr.generate import EVALUATION_SIZE, FURNITURE, Generator
from hsg.environments.langr.goals import Expression, holds, parse_goal, parse_predicate, ways
from hsg.environments.langr.texts import REPHRASED_TEXTS, TRAINING_TEXTS
from hsg.environments.langr.words import AREAS, DOORS, HOME_OF, NOVEL, SURFACES, place_name, thing_name
from hsg.environments.langr.world import Episode, House
from hsg.protocol import Task

ROOT = Path(__file__).parents[2]
ARCHIVE = Path(os.environ.get("HSG_DATA", "")) / "langr" / "datasets.tar.xz"
needs_data = pytest.mark.skipif(not os.environ.get("HSG_DATA"), reason="HSG_DATA is not set: no LangR episodes")


@pytest.fixture(scope="module")
def task_set() -> LangRTaskSet:
    return environments.make("langr")


@pytest.fixture(scope="module")
def public_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("langr")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def public(public_folder: Path) -> LangRTaskSet:
    return environments.make("langr", data=str(public_folder))


BRING = Expression("AND", "EXISTS", (("X", "ball"),), (("on_top", "X", "sofa"), ("not_holding",)))


def house_of(**changes: Any) -> Episode:
    """A ball in the sink, a can on the sofa, a cup in the closed fridge, a key in the closed left drawer."""
    given: dict[str, Any] = {
        "instruction": "Bring a ball to the sofa.",
        "instruct_id": "f0917e29",
        "places": ("sofa", "sink", "left counter", "black table", "fridge", "left drawer", "middle drawer"),
        "things": (
            ("ball 1", "ball", "sink"), ("can 1", "can", "sofa"), ("cup 1", "cup", "fridge"), ("key 1", "key", "left drawer"),
        ),
        "opened": frozenset(),
        "goal": BRING,
        "subgoals": (
            (("robot_at", "sink"),),
            (("holding", "ball 1"), ("robot_at", "sink")),
            (("holding", "ball 1"), ("robot_at", "sofa")),
            (("on_top", "ball 1", "sofa"), ("robot_at", "sofa")),
        ),
    }  # fmt: skip
    return Episode(**{**given, **changes})


def play(episode: Episode, *actions: str, allow_invalid: bool = True) -> tuple[LangREpisode, list[Any]]:
    environment = LangREpisode(episode, allow_invalid)
    environment.start()
    return environment, [environment.step(action) for action in actions]


SOLUTION = ("go to sink", "pick up ball", "go to sofa", "place on sofa")


# ---------------------------------------------------------------------- the contract


def test_contract(task_set: LangRTaskSet) -> None:
    assert_contract(task_set, num_tasks=24)


def test_contract_where_an_invalid_action_ends_the_episode() -> None:
    assert_contract(environments.make("langr", kinds=["f0917e29", "2f2d797d"], allow_invalid=False), num_tasks=6)


@needs_data
def test_contract_on_upstreams_episodes(public: LangRTaskSet) -> None:
    assert_contract(public, num_tasks=12)


# ---------------------------------------------------------------------- skills and their preconditions


@pytest.mark.parametrize(
    ("before", "action", "refused"),
    [
        ((), "go to sink", None),
        ((), "go to garden", "nothing of that name"),
        ((), "go to ball", "there is no ball"),
        ((), "pick up ball", "no ball here"),  # it stands elsewhere
        (("go to sink",), "pick up ball", None),
        (("go to left counter",), "pick up ball", "no ball here"),  # beside is not near enough for a thing
        (("go to sink", "pick up ball", "go to sofa"), "pick up can", "you hold the ball"),
        ((), "place on sofa", "you hold nothing"),
        (("go to sink", "pick up ball"), "place on sofa", "not at the sofa"),
        (("go to sink", "pick up ball"), "place on left counter", None),  # the kitchen is one row
        (("go to sink", "pick up ball", "go to middle drawer"), "place on middle drawer", "nothing can be placed"),
        ((), "open fridge", "not at the fridge"),
        (("go to fridge",), "open fridge", None),
        (("go to fridge",), "close fridge", "is closed"),
        (("go to fridge", "open fridge"), "open fridge", "is open"),
        (("go to fridge", "open fridge"), "close fridge", None),
        (("go to sofa",), "open sofa", "no door"),
        (("go to fridge",), "pick up cup", None),  # a closed fridge hides, and does not lock
        (("go to left drawer",), "pick up key", "no key here"),  # a closed drawer does
        (("go to left drawer", "open left drawer"), "pick up key", None),
        ((), "dance", "none of your skills"),
        ((), "goto sink", "none of your skills"),
        ((), "pickle ball", "none of your skills"),
        ((), "opening fridge", "none of your skills"),
        ((), "pick up", "none of your skills"),
    ],
)
def test_preconditions(before: tuple[str, ...], action: str, refused: str | None) -> None:
    environment, results = play(house_of(), *before)
    assert all(result.valid for result in results)
    offered = environment.admissible_actions()
    result = environment.step(action)
    assert result.valid == (refused is None)
    assert (action in offered) == (result.valid and action != "pick up cup"), "what is not seen is not offered"
    if refused is not None:
        assert refused in result.observation
        assert result.observation.startswith("That cannot be done: ")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("go to sink", ("go to", "sink")),
        ("  Go   to the SINK. ", ("go to", "sink")),
        ("navigate to TV stand", ("go to", "tv stand")),
        ("take an apple", ("pick up", "apple")),
        ("put in the fridge", ("place on", "fridge")),
        ("shut fridge", ("close", "fridge")),
        ("go", None),
        ("", None),
        ("gone sink", None),
    ],
)
def test_actions_are_read(text: str, read: tuple[str, str] | None) -> None:
    assert read_action(text) == read


def test_admissible_actions_are_all_that_can_be_done(task_set: LangRTaskSet) -> None:
    """Against every skill on every name, along the oracle's way."""
    for split in task_set.splits:
        task = task_set.tasks(split)[0]
        episode = task_set.episode(task)
        house = House(episode)
        names = [*episode.places, *dict.fromkeys(category for _, category, _ in episode.things)]
        for skill, target in solve(episode) or ():
            every = itertools.product(("go to", "pick up", "place on", "open", "close"), names)
            possible = {(s, t) for s, t in every if house.refusal(s, t) is None and (s, t) != ("go to", house.robot)}
            # What is behind a closed fridge can be taken, and is not listed: it is not seen.
            hidden = house.robot == "fridge" and "fridge" not in house.opened
            assert {a for a in possible if not (hidden and a[0] == "pick up")} == set(house.possible())
            house.do(skill, target)


# ---------------------------------------------------------------------- what is seen


def test_only_what_stands_here_is_seen(task_set: LangRTaskSet) -> None:
    for split in task_set.splits:
        task = task_set.tasks(split)[1]
        episode = task_set.episode(task)
        environment = task_set.create(task, 0)
        first = environment.start().partition("\nPlaces: ")[2]
        everything = {category for _, category, _ in episode.things}
        assert not [c for c in everything if re.search(rf"\b{c}\b", first)]
        for place in episode.places:
            result = environment.step(f"go to {place}")
            if result.done:
                break
            here = [category for _, category, where in episode.things if where == place]
            assert re.search(r"Here: (.*?)\.", result.observation).group(1) == (", ".join(here) or "nothing")


def test_doors_hide_what_is_behind_them() -> None:
    environment, results = play(house_of(), "go to fridge", "open fridge", "close fridge", "go to left drawer")
    assert ["cup" in result.observation for result in results] == [False, True, False, False]
    assert "It is closed. Here: nothing." in results[0].observation
    assert "key" in environment.step("open left drawer").observation


# ---------------------------------------------------------------------- rewards and the end


def test_rewards_are_upstreams() -> None:
    """10 for success, 5 times the gain in the share of four subgoals; an action that cannot be done costs nothing."""
    environment, results = play(house_of(), "pick up ball", *SOLUTION)
    assert [result.reward for result in results] == [0.0, 1.25, 1.25, 1.25, 1.25 + 10.0]
    assert [result.score for result in results] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [result.success for result in results] == [False] * 4 + [True]
    assert environment.outcome == 1.0
    assert results[-1].done


def test_a_subgoal_counts_once() -> None:
    _, results = play(house_of(), "go to sink", "go to sofa", "go to sink")
    assert [result.reward for result in results] == [1.25, 0.0, 0.0]


def test_what_is_true_at_first_is_no_gain() -> None:
    already = house_of(subgoals=((("on_top", "can 1", "sofa"),), (("robot_at", "sink"),)))
    _, results = play(already, "go to sink")
    assert (results[0].reward, results[0].score) == (2.5, 1.0)


def test_32_actions_end_an_episode() -> None:
    environment, results = play(house_of(), *(["go to sink", "go to sofa"] * 16))
    assert TURN_LIMIT == 32
    assert [result.done for result in results] == [False] * 31 + [True]
    assert environment.outcome == 0.0
    assert not results[-1].success
    again = environment.step("go to sink")
    assert again.reward == 0.0
    assert again.observation == results[-1].observation


def test_success_in_the_last_turn_counts() -> None:
    waiting = ["go to black table", "go to left counter"] * 14
    _, results = play(house_of(), *waiting, *SOLUTION)
    assert results[-1].success
    assert results[-1].done


def test_an_invalid_action_ends_the_episode_where_it_is_not_allowed() -> None:
    environment, results = play(house_of(), "go to sink", "open sink", allow_invalid=False)
    assert results[-1].done
    assert not results[-1].success
    assert environment.outcome == 0.0
    assert environment.admissible_actions() == []


def test_feedback_tells_where_it_was() -> None:
    _, results = play(house_of(), "go to sink", "pick up ball")
    assert results[-1].feedback == "The task is not done. You went to: sink. You hold the ball."


# ---------------------------------------------------------------------- goals


def random_goal(rng: random.Random, variables: tuple[str, ...] = (), depth: int = 2) -> Any:
    if depth == 0 or (variables and rng.random() < 0.4):
        thing = rng.choice([*variables, "ball 1", "can 1"])
        return rng.choice(
            [("on_top", thing, rng.choice(("sofa", "sink"))), ("holding", thing), ("opened_fridge", "fridge")]
        )
    quantifier = rng.choice([None, "EXISTS", "FORALL"])
    inputs = ((f"X{depth}", rng.choice(("ball", "can"))),) if quantifier else ()
    inside = (*variables, *(name for name, _ in inputs))
    parts = tuple(random_goal(rng, inside, depth - 1) for _ in range(rng.randint(1, 2)))
    return Expression(rng.choice(("AND", "OR", "NAND", "NOR")), quantifier, inputs, parts)


def spelled_out(goal: Any, house: House, chosen: dict[str, str]) -> bool:
    """A goal's truth in plain loops."""
    if not isinstance(goal, Expression):
        return house.is_true((goal[0], *(chosen.get(a, a) for a in goal[1:])))
    values = []
    for things in itertools.product(*(house.things_of(category) for _, category in goal.inputs)):
        inside = {**chosen, **{name: thing for (name, _), thing in zip(goal.inputs, things, strict=True)}}
        parts = [spelled_out(part, house, inside) for part in goal.parts]
        count = sum(parts)
        values.append(
            {"AND": count == len(parts), "OR": count > 0, "NAND": count < len(parts), "NOR": count == 0}[goal.join]
        )
    return any(values) if goal.quantifier == "EXISTS" else all(values)


def test_goals_and_their_ways_agree_with_plain_loops() -> None:
    """A goal holds exactly where one of its ways does, in random houses."""
    rng = random.Random(0)
    seen = {True: 0, False: 0}
    for _ in range(600):
        things = [(f"{c} {i}", c, rng.choice(("sofa", "sink", "black table"))) for c in ("ball", "can") for i in (1, 2)]
        house = House(house_of(things=tuple(things), opened=frozenset(rng.sample(["fridge"], rng.randint(0, 1)))))
        if rng.random() < 0.5:
            house.do("go to", house.place_of["ball 1"] or "")
            house.do("pick up", "ball")
        goal = random_goal(rng)
        true = spelled_out(goal, house, {})
        seen[true] += 1
        assert holds(goal, house) == true
        for wanted in (True, False):
            found = any(all(house.is_true(p) == w for w, p in way) for way in ways(goal, house, wanted))
            assert found == (true == wanted)
    assert min(seen.values()) > 100


def test_neighbours_count_as_at() -> None:
    house = House(house_of())
    house.do("go to", "left counter")
    assert house.is_true(("robot_at", "sink"))
    assert not house.is_true(("robot_at", "sofa"))
    assert house.is_true(("robot_at", "ball 1")), "a thing is where its place is"


@pytest.mark.parametrize("text", ["on_top(a)", "flies(a, b)", "on_top(a, b", "", 3])
def test_other_predicates_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="a predicate must be one of"):
        parse_predicate(text, frozenset())


@pytest.mark.parametrize(
    "goal",
    [
        {"expr_type": "XOR", "sub_exprs": ["holding(a)"]},
        {"expr_type": "AND"},
        {"expr_type": "AND", "quantifier": "EXISTS", "sub_exprs": ["holding(a)"]},
        {"expr_type": "AND", "inputs": [{"name": "X", "expr_type": "ball"}], "sub_exprs": ["holding(X)"]},
    ],
)
def test_other_goals_are_refused(goal: Any) -> None:
    with pytest.raises(ValueError, match="a goal must"):
        parse_goal(goal, frozenset())


# ---------------------------------------------------------------------- houses of our own


def test_seventeen_kinds_and_ten_splits(task_set: LangRTaskSet) -> None:
    assert len(KINDS) == 17
    assert task_set.splits == tuple(SPLIT_KINDS)
    assert task_set.splits[:2] == ("train", "train_validation")
    assert len(task_set.splits) == 2 + 10
    found = {split: {task.kind for task in task_set.tasks(split)} for split in task_set.splits}
    assert found == {split: set(kinds) for split, kinds in SPLIT_KINDS.items()}
    assert set.union(*found.values()) == set(KINDS)
    assert [len(task_set.tasks(split)) for split in task_set.splits] == [2000] + [EVALUATION_SIZE] * 11
    assert task_set.tasks("dev") == task_set.tasks("train_validation")
    assert task_set.tasks("test") == task_set.tasks("new_scenes")


def test_listing_makes_no_houses(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Episode:
        raise AssertionError("a house was made")

    monkeypatch.setattr(Generator, "episode", never)
    assert len(environments.make("langr", num_generated=50_000).tasks("train")) == 50_000


def test_what_is_new_in_each_split(task_set: LangRTaskSet) -> None:
    for split in task_set.splits:
        for task in task_set.tasks(split)[:60]:
            episode = task_set.episode(task)
            missing = [piece for piece in FURNITURE if piece not in episode.places]
            assert len(missing) <= 1 if split in ("train", "train_validation") else len(missing) == 2
            asked = [category for category in NOVEL if re.search(rf"\b{category}\b", episode.instruction)]
            assert bool(asked) == (split == "novel_objects")
            assert len(episode.things) == 33
            assert all(place in SURFACES for *_, place in episode.things)
            counted = statistics.multimode(category for _, category, _ in episode.things)
            assert (len(counted) == 1) == (split == "multiple_objects")
            assert not reaches_goal(episode, []), "a task that is done from the start"
            assert ("fridge" in episode.opened) == (task.kind in ("6e3da8a1", "5d5460d6"))


def test_rephrased_sentences_are_others() -> None:
    assert set(REPHRASED_TEXTS) == set(SPLIT_KINDS["rephrasing"])
    assert set(TRAINING_TEXTS) == set(KINDS)
    assert not {t for texts in REPHRASED_TEXTS.values() for t in texts} & {
        t for texts in TRAINING_TEXTS.values() for t in texts
    }


def test_things_at_home(task_set: LangRTaskSet) -> None:
    def share_at_home(tidy: float) -> float:
        generator = Generator(num_objects=12, tidy_share=tidy)
        episodes = [generator.episode("train", "f0917e29", i) for i in range(60)]
        pairs = [
            (category, place) for episode in episodes for _, category, place in episode.things if category in HOME_OF
        ]
        return statistics.mean(place in AREAS[HOME_OF[category]] for category, place in pairs)

    assert share_at_home(0.0) < 0.45
    assert share_at_home(1.0) > 0.9


SAME = """
import hashlib
from hsg import environments
task_set = environments.make("langr", num_generated=40)
made = [(t.id, task_set.episode(t), task_set.expert_actions(t), task_set.demonstrations(t, 3))
        for split in task_set.splits for t in task_set.tasks(split)[:8]]
print(hashlib.sha256(repr([(i, e.instruction, e.places, e.things, e.goal, e.subgoals, a, d) for i, e, a, d in made]).encode()).hexdigest())
"""


def test_episodes_do_not_depend_on_the_process() -> None:
    def digest(seed: str) -> str:
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-c", SAME], env=environ, check=True, capture_output=True, text=True
        ).stdout

    assert digest("1") == digest("2")


# ---------------------------------------------------------------------- the oracle


def solved_and_seconds(task_set: LangRTaskSet, split: str, limit: int = 100) -> tuple[list[bool], float, float]:
    """(solved, seconds a turn with the making of the episode and its start, seconds of a plan), processor time."""
    solved, turns, planned, played = [], 0, 0.0, 0.0
    for seed, task in enumerate(task_set.tasks(split)[:limit]):
        begun = time.process_time()
        actions = task_set.expert_actions(task)
        planned += time.process_time() - begun
        assert actions is not None
        assert 1 <= len(actions) <= TURN_LIMIT
        begun = time.process_time()
        environment = task_set.create(task, seed)
        environment.start()
        results = [environment.step(action) for action in actions]
        played += time.process_time() - begun
        turns += len(actions)
        solved.append(results[-1].success and all(result.valid for result in results))
    return solved, played / turns, planned / len(solved)


@pytest.mark.parametrize("split", SPLIT_KINDS)
def test_the_oracle_solves_every_split_in_no_time(task_set: LangRTaskSet, split: str) -> None:
    solved, turn, plan = solved_and_seconds(task_set, split)
    assert all(solved)
    assert turn <= 1e-3
    assert plan <= 5e-3


@needs_data
def test_the_oracle_solves_upstreams_episodes_in_no_time(public: LangRTaskSet) -> None:
    for split in public.splits[1:]:
        solved, turn, plan = solved_and_seconds(public, split)
        assert len(solved) == 100
        assert statistics.mean(solved) >= 0.99
        assert turn <= 1e-3
        assert plan <= 5e-3


def test_the_oracle_opens_what_locks() -> None:
    plan = solve(house_of(goal=("on_top", "key 1", "sofa")))
    assert plan == [
        ("go to", "left drawer"),
        ("open", "left drawer"),
        ("pick up", "key"),
        ("go to", "sofa"),
        ("place on", "sofa"),
    ]
    assert solve(house_of(goal=("on_top", "cup 1", "sofa"))) == [
        ("go to", "fridge"), ("pick up", "cup"), ("go to", "sofa"), ("place on", "sofa"),
    ]  # fmt: skip


def test_no_plan_is_none() -> None:
    assert solve(house_of(goal=("on_top", "ball 1", "garden"))) is None
    assert solve(house_of(goal=Expression("AND", "EXISTS", (("X", "unicorn"),), (("holding", "X"),)))) is None


def test_a_goal_that_is_already_true_takes_one_action() -> None:
    episode = house_of(goal=("on_top", "can 1", "sofa"))
    plan = solve(episode)
    assert plan is not None
    assert len(plan) == 1
    _, results = play(episode, *(f"{skill} {target}" for skill, target in plan))
    assert results[0].success


# ---------------------------------------------------------------------- demonstrations


@pytest.mark.parametrize("split", SPLIT_KINDS)
def test_demonstrations_search_as_their_strategy_says(task_set: LangRTaskSet, split: str) -> None:
    for task in task_set.tasks(split)[:34]:
        episode = task_set.episode(task)
        found = task_set.demonstrations(task, 0)
        searched = [d for d in found if re.search("Search the|Look in the", d.strategy)]
        if searched:  # one begins with each area that the house has, and one more with the one that suits
            firsts = [re.search(r"(?:Search|Look in) the (\w+)", d.strategy).group(1) for d in searched]
            assert set(firsts) == {area for area, places in AREAS.items() if set(places) & set(episode.places)}
            suited = [first for first, demonstration in zip(firsts, found, strict=True) if demonstration.fits]
            assert len(firsts) == len(set(firsts)) + len(set(suited))
            assert len(suited) == 2 * len(set(suited))
        for demonstration in found:
            assert len(demonstration.actions) == len(demonstration.turn_strategies) <= TURN_LIMIT
            environment = task_set.create(task, 0)
            environment.start()
            results = [environment.step(action) for action in demonstration.actions]
            assert results[-1].success
            if demonstration in searched:
                first = AREAS[re.search(r"(?:Search|Look in) the (\w+)", demonstration.strategy).group(1)]
                kept = [a for i, a in enumerate(demonstration.actions) if i not in demonstration.wasted]
                walks = [a.removeprefix("go to ") for a in kept if a.startswith("go to ")]
                if not any(door in episode.instruction for door in DOORS):
                    assert walks[0] in first
                if len(asked := [c for c in {c for _, c, _ in episode.things} if f" {c}" in episode.instruction]) == 1:
                    there = [place for _, category, place in episode.things if category == asked[0]]
                    assert demonstration.fits == bool(set(there) & set(first))


def test_demonstrations_use_no_untold_place() -> None:
    """Two houses that differ in where the ball is: the play is the same until the robot sees it."""

    def plays(place: str, order: tuple[str, ...]) -> list[str]:
        episode = house_of(things=(("ball 1", "ball", place), ("can 1", "can", "sofa")), places=(*SURFACES, "fridge"))
        made = _demonstrate(episode, errands_of(episode), order, random.Random(5), allow_invalid=True)
        return [action for i, action in enumerate(made.actions) if i not in made.wasted]

    for order in itertools.permutations(AREAS):
        parting = next(
            pair for pair in zip(plays("sink", order), plays("black table", order), strict=False) if len({*pair}) == 2
        )
        assert "pick up ball" in parting, "they part where one of them sees the ball"


def test_wasted_turns_lead_nowhere(task_set: LangRTaskSet) -> None:
    with_waste = 0
    for task in task_set.tasks("train")[:80]:
        episode = task_set.episode(task)
        for demonstration in task_set.demonstrations(task, 1):
            if not demonstration.wasted or demonstration.actions[-1].startswith("go to"):
                continue
            with_waste += 1
            kept = [a for i, a in enumerate(demonstration.actions) if i not in demonstration.wasted]
            _, results = play(episode, *kept)
            assert results[-1].success, "without them the task is done as well"
    assert with_waste > 20


# ---------------------------------------------------------------------- upstream's files


def raw_episode(index: int = 0, **changes: Any) -> dict[str, Any]:
    """An episode of upstream's form with made-up contents; numbers point into NAMES."""
    given = {
        "instruction": f"Deliver a ball, please, {index}",
        "instruct_id": "f0917e29_abc",
        "sampled_entities": {},
        "goal_preds": {
            "expr_type": "AND",
            "quantifier": "EXISTS",
            "inputs": [{"name": "X", "expr_type": "ball"}],
            "sub_exprs": ["on_top(X, receptacle_aabb_Sofa_frl_apartment_sofa)", "not_holding()"],
        },
        "subgoals": [
            ["robot_at(receptacle_aabb_sink_kitchen_counter)"],
            ["holding(056_tennis_ball_:0000)"],
            ["on_top(056_tennis_ball_:0000,receptacle_aabb_Sofa_frl_apartment_sofa)"],
            [],
        ],
        "start_preds": ["opened_fridge(fridge_push_point)"],
        "name_to_receptacle": np.array([[0, 2], [1, 2]]),
        "markers": np.array([[3, 0, 0, 0, 0]]),
        "rigid_objs": np.zeros((2, 3)),
        "scene": "v3_sc0",
    }
    return {**given, **changes}


NAMES = {
    0: "056_tennis_ball_:0000",
    1: "024_bowl_:0001",
    2: "receptacle_aabb_sink_kitchen_counter",
    3: "fridge_push_point",
}


def write_file(path: Path, *episodes: dict[str, Any], names: dict[int, str] = NAMES) -> Path:
    path.write_bytes(
        pickle.dumps({"all_eps": list(episodes), "idx_to_name": names, "all_transforms": np.zeros((1, 4))})
    )
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    write_file(tmp_path / "new_scenes.pickle", raw_episode())
    task_set = environments.make("langr", data=str(tmp_path))
    assert task_set.splits == ("train", "new_scenes")
    (task,) = task_set.tasks("new_scenes")
    assert (task.id, task.kind, task.data["instruct_id"]) == ("new_scenes/0", "f0917e29", "f0917e29_abc")
    episode = task_set.episode(task)
    # The ball is called as the goal calls it, the bowl, of which no goal speaks, by its id.
    assert episode.things == (("056_tennis_ball_:0000", "ball", "sink"), ("024_bowl_:0001", "bowl", "sink"))
    assert episode.opened == {"fridge"}
    assert len(episode.subgoals) == 3
    assert task_set.expert_actions(task) == ["go to sink", "pick up ball", "go to sofa", "place on sofa"]
    assert task_set.tasks("train")[0].id == "train/42f1b012-0", "without train.pickle the generated houses"
    furnished = {category for _, category, _ in task_set.episode(task_set.tasks("train")[1]).things}
    assert furnished <= {"ball", "bowl", *NOVEL}, "with what theirs are"


def test_a_training_file_is_the_training_split_and_waits_until_asked_for(tmp_path: Path) -> None:
    write_file(tmp_path / "new_scenes.pickle", raw_episode())
    train = write_file(tmp_path / "train.pickle", raw_episode(1), raw_episode(2))
    whole = train.read_bytes()
    train.write_bytes(b"not yet")
    task_set = environments.make("langr", data=str(tmp_path))
    train.write_bytes(whole)
    assert task_set.splits == ("train", "new_scenes")
    assert [task.id for task in task_set.tasks("train")] == ["train/0", "train/1"]
    assert "please, 2" in task_set.create(task_set.tasks("train")[1], 0).start()


def test_names_do_not_change_when_the_training_file_is_read(tmp_path: Path) -> None:
    other = {**raw_episode()["goal_preds"], "inputs": [{"name": "X", "expr_type": "sphere"}]}
    write_file(tmp_path / "new_scenes.pickle", raw_episode())
    write_file(tmp_path / "train.pickle", *(raw_episode(i, goal_preds=other) for i in range(3)))
    task_set = environments.make("langr", data=str(tmp_path))
    (task,) = task_set.tasks("new_scenes")
    before = task_set.episode(task).things
    assert task_set.episode(task_set.tasks("train")[0]).things[0][1] == "ball"
    assert task_set.episode(task).things == before
    (tmp_path / "new_scenes.pickle").unlink()
    alone = environments.make("langr", data=str(tmp_path))
    assert alone.splits == ("train",)
    assert alone.episode(alone.tasks("train")[0]).things[0][1] == "sphere"


def test_a_kind_of_a_file_can_be_chosen(tmp_path: Path) -> None:
    write_file(tmp_path / "train.pickle", raw_episode(), raw_episode(instruct_id="12345678_x"))
    task_set = environments.make("langr", data=str(tmp_path), kinds="12345678")
    assert [task.id for task in task_set.tasks("train")] == ["train/1"]


class _Asks:
    """Pickled, a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


class _Persistent(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return "elsewhere" if obj == "me" else None


@pytest.mark.parametrize(
    ("function", "argument", "named"),
    [
        (os.system, "touch {mark}", "system"),
        (eval, "open('{mark}', 'w')", "builtins.eval"),
        (exec, "open('{mark}', 'w')", "builtins.exec"),
        (getattr, "x", "builtins.getattr"),
        (open, "{mark}", "io.open"),
        (Path, "{mark}", "pathlib"),
        (np.fromfile, "{mark}", "fromfile"),
    ],
)
def test_a_file_that_asks_for_more_than_data_is_refused(
    tmp_path: Path, function: Any, argument: str, named: str
) -> None:
    mark = tmp_path / "mark"
    hostile = raw_episode(scene=_Asks(function, argument.format(mark=mark)))
    write_file(tmp_path / "new_scenes.pickle", hostile)
    with pytest.raises(ValueError, match=r"langr\.data must hold pickles of numpy arrays and plain data") as refusal:
        environments.make("langr", data=str(tmp_path))
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not mark.exists(), "nothing of it ran"


def test_a_persistent_id_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "new_scenes.pickle").open("wb") as file:
        _Persistent(file).dump({"all_eps": ["me"]})
    with pytest.raises(ValueError, match="a persistent id"):
        environments.make("langr", data=str(tmp_path))


def test_plain_containers_and_numpy_are_data(tmp_path: Path) -> None:
    data = {1, frozenset({2}), 1 + 2j, b"x", (None, True)}
    more = [bytearray(b"y"), np.float32(1.5), np.int64(3), np.arange(3), np.array(["a"], dtype=object)]
    write_file(tmp_path / "new_scenes.pickle", raw_episode(sampled_entities={"a": data, "b": more}))
    assert len(environments.make("langr", data=str(tmp_path)).tasks("new_scenes")) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "EOFError"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n", "Git LFS"),
        (pickle.dumps(None), "TypeError"),
        (pickle.dumps([1, 2]), "TypeError"),
        (pickle.dumps({"all_eps": []}), "KeyError"),
        (pickle.dumps({"all_eps": [], "idx_to_name": {}}), "no episode"),
        (pickle.dumps({"all_eps": [{}], "idx_to_name": {}}), "instruction"),
        (pickle.dumps({"all_eps": [raw_episode()], "idx_to_name": {}}), "KeyError"),
        (pickle.dumps({"all_eps": [raw_episode()], "idx_to_name": NAMES})[:-20], "download it again"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "new_scenes.pickle").write_bytes(content)
    with pytest.raises(ValueError, match=r"langr\.data must hold") as refusal:
        environments.make("langr", data=str(tmp_path))
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_episode_of_another_form_is_named(tmp_path: Path) -> None:
    path = write_file(tmp_path / "x.pickle", raw_episode(), raw_episode(goal_preds={"expr_type": "MAYBE"}))
    file = EpisodeFile(path)
    assert file.episode(0, Categories(())).instruct_id == "f0917e29_abc"
    with pytest.raises(ValueError, match="episode 1: a goal must be a predicate") as refusal:
        file.episode(1, Categories(()))
    assert "\n" not in str(refusal.value)


def test_a_goal_without_a_bottom_is_one_line(tmp_path: Path) -> None:
    endless: dict[str, Any] = {"expr_type": "AND"}
    endless["sub_exprs"] = [endless]
    file = EpisodeFile(write_file(tmp_path / "x.pickle", raw_episode(goal_preds=endless)))
    with pytest.raises(ValueError, match="episode 0: maximum recursion"):
        file.episode(0, Categories(()))
    with pytest.raises(ValueError, match="episode 0: maximum recursion"):
        list(file.mentions())


def test_names_in_words() -> None:
    assert place_name("receptacle_aabb_Tbl1_Top1_frl_apartment_table_01") == "black table"
    assert (
        place_name("fridge_push_point")
        == place_name("receptacle_aabb_middle_topfrl_apartment_refrigerator")
        == "fridge"
    )
    assert place_name("cab_push_point_7") == "left drawer"
    assert place_name("receptacle_aabb_shelf_03") == "shelf"
    assert thing_name("065-d_cups_:0000") == "cups"
    assert thing_name("frl_apartment_book_03_:0001") == "book"


@needs_data
def test_upstreams_files_are_splits_of_their_names(public_folder: Path, public: LangRTaskSet) -> None:
    names = sorted(path.stem for path in public_folder.glob("*.pickle"))
    assert public.splits == ("train", *names)
    assert len(names) == 5
    assert {task.id.split("/")[0] for task in public.tasks("context")} == {"context"}
    found = {task.kind for name in names for task in public.tasks(name)}
    assert found <= set(KINDS)
    assert len(found) == 11
    for name in names:
        for task in public.tasks(name):
            episode = public.episode(task)
            categories = {category for _, category, _ in episode.things}
            assert len(episode.things) in (34, 35, 36)
            assert len(categories) == 33
            assert not [c for c in categories if re.search(r"[\d_]", c)], "an id instead of a category"


@needs_data
def test_one_public_goal_is_true_at_the_start(public: LangRTaskSet) -> None:
    true = [t.id for name in public.splits[1:] for t in public.tasks(name) if reaches_goal(public.episode(t), [])]
    assert len(true) == 1
    assert true[0].startswith("train_validation/")


@needs_data
def test_no_sentence_of_ours_is_upstreams(public: LangRTaskSet, task_set: LangRTaskSet) -> None:
    names = sorted({name.lower() for split in public.splits[1:] for task in public.tasks(split)
                    for _, category, place in public.episode(task).things for name in (category, place)}, key=len, reverse=True)  # fmt: skip
    blanks = re.compile(rf"\b(?:(?:an?|the) )?(?:{'|'.join(map(re.escape, names))})\b")

    def form(instruction: str) -> str:
        """A sentence without its names, articles and stops."""
        return re.sub(r"[^a-z_ ]", "", blanks.sub("_", instruction.lower())).strip()

    def forms(of: LangRTaskSet, splits: tuple[str, ...]) -> set[str]:
        return {form(of.episode(task).instruction) for split in splits for task in of.tasks(split)[:400]}

    theirs = forms(public, public.splits[1:])
    assert len(theirs) > 60
    assert not theirs & forms(task_set, task_set.splits)


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kinds": "walk"}, "langr.kinds must be all or some of"),
        ({"kinds": []}, "langr.kinds must be all or some of"),
        ({"kinds": "21e2ce5f"}, "langr.kinds must name a kind that the training split has"),
        ({"num_generated": 0}, "langr.num_generated must be at least 1"),
        ({"num_objects": 34}, "langr.num_objects must be in 8..33"),
        ({"tidy_share": 1.5}, "langr.tidy_share must be in"),
        ({"tidy_share": math.nan}, "langr.tidy_share must be in"),
        ({"data": "/nowhere"}, "langr.data must be a folder with episode files"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as refusal:
        environments.make("langr", **options)
    assert "\n" not in str(refusal.value)


def test_kinds_choose_tasks_and_splits() -> None:
    task_set = environments.make("langr", kinds=["f0917e29", "21e2ce5f"])
    assert {task.kind for task in task_set.tasks("train")} == {"f0917e29"}
    assert "context" in task_set.splits
    assert "multiple_objects" not in task_set.splits


@pytest.mark.parametrize("task_id", ["train/42f1b012", "train/nope-1", "garden/42f1b012-1", "context/42f1b012-1", "x", "train/42f1b012-²"])  # fmt: skip
def test_other_tasks_are_refused(task_set: LangRTaskSet, task_id: str) -> None:
    with pytest.raises(ValueError, match=r"task\.id must be"):
        task_set.create(Task(task_id, "train"), 0)
