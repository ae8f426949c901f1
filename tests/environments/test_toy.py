"""The toy world: contract, closed forms against search, strategies that cost what they should, the oracle of waste."""

from __future__ import annotations

import collections
import copy
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from env_contract import assert_contract

from hsg import environments
from hsg.environments import toy
from hsg.protocol import StepResult, Task

SEEDS = range(5)


@pytest.fixture(scope="module")
def task_set() -> toy.ToyTaskSet:
    return environments.make("toy")


@pytest.fixture(scope="module")
def bolted_set() -> toy.ToyTaskSet:
    return environments.make("toy", num_train=24, num_dev=6, num_test=6, bolted_share=1 / 3)


def play(task: Task, actions: list[str] | tuple[str, ...]) -> toy.ToyEnvironment:
    environment = toy.ToyEnvironment(task, seed=0)
    environment.start()
    for action in actions:
        environment.step(action)
    return environment


def fewest_turns(task: Task) -> int:
    """Breadth-first search over every action of the language, with no knowledge of the world but its state."""
    places = [place for places in toy.PLACES.values() for place in places]
    actions = [f"go {area}" for area in toy.AREAS] + [
        f"{verb} {place}" for verb in ("open", "unbolt") for place in places
    ]
    actions += [f"take {goal}" for goal in toy.GOALS]
    frontier, seen = [toy.ToyEnvironment(task, seed=0)], set()
    for turn in range(1, toy.TURN_LIMIT + 1):
        following = []
        for state in frontier:
            for action in actions:
                environment = copy.copy(state)
                environment._tried = set(state._tried)
                if environment.step(action).success:
                    return turn
                key = (environment._area, environment._bolts, frozenset(environment._tried))
                if key not in seen:
                    seen.add(key)
                    following.append(environment)
        frontier = following
    raise AssertionError(f"{task.id} cannot be solved in {toy.TURN_LIMIT} turns")


def test_contract(task_set, bolted_set):
    assert_contract(task_set, num_tasks=12)
    assert_contract(bolted_set, num_tasks=12)


def test_splits_are_disjoint_and_do_not_depend_on_sizes(task_set):
    ids = {split: [task.id for task in task_set.tasks(split)] for split in task_set.splits}
    assert {split: len(names) for split, names in ids.items()} == {"train": 256, "dev": 64, "test": 64}
    assert len(set().union(*ids.values())) == 256 + 64 + 64
    other = environments.make("toy", num_train=40, num_dev=396, num_test=3)
    assert [task.id for task in other.tasks("train")] == ids["train"][:40]
    assert [task.id for task in other.tasks("dev")][:64] == ids["dev"]
    whole = environments.make("toy", num_train=1224, num_dev=396, num_test=396)
    assert len({task.id for split in whole.splits for task in whole.tasks(split)}) == 1224 + 396 + 396


def test_areas_and_places_are_balanced(task_set):
    for split in task_set.splits:
        tasks = task_set.tasks(split)
        places = collections.Counter(task.data["place"] for task in tasks)
        assert len(places) == 12
        assert max(places.values()) - min(places.values()) <= 1
    small = environments.make("toy", num_train=256, num_dev=8, num_test=8)
    assert len({task.data["area"] for task in small.tasks("dev")}) == 4
    # Each four neighbours are of four areas, but not always in the same order.
    areas = [task.data["area"] for task in task_set.tasks("train")]
    assert all(len(set(areas[i : i + 4])) == 4 for i in range(0, 256, 4))
    assert len({tuple(areas[i : i + 4]) for i in range(0, 256, 4)}) > 10


def test_the_closed_form_is_the_optimum(bolted_set):
    for task in bolted_set.tasks("train"):
        assert fewest_turns(task) == toy.optimal_turns(task) == len(bolted_set.expert_actions(task))
        assert play(task, bolted_set.expert_actions(task)).outcome == toy.optimal_outcome(task) == 1.0


def test_expected_optimum_is_the_mean_over_hidden_places(task_set, bolted_set):
    """Search the area of the clue in a fixed order; the hidden place is each of the three once."""
    for area, places in toy.PLACES.items():
        for num_bolts in (0, 2):
            outcomes = []
            for hidden in places:
                data = {"area": area, "place": hidden, "goal": "key", "clue": toy.CLUES[area][:2], "bolts": num_bolts}
                task = Task(id="t", split="train", data=data)
                actions = [f"go {area}"]
                for place in places:
                    actions.append(f"open {place}")
                    if place == hidden:
                        # The bolts show when the place is tried; then it takes one more opening.
                        actions += [f"unbolt {place}"] * num_bolts + [f"open {place}"] * bool(num_bolts) + ["take key"]
                        break
                outcomes.append(play(task, actions).outcome)
            assert min(outcomes) > 0
            assert toy.expected_optimal_outcome(task) == pytest.approx(statistics.mean(outcomes), abs=1e-12)
    assert toy.expected_optimal_outcome(task_set.tasks("train")[0]) == pytest.approx(0.9)


def test_outcome_falls_with_each_turn_and_success_stays(task_set):
    task = task_set.tasks("train")[0]
    outcomes = []
    for num_waits in range(12):
        environment = play(task, ["wait"] * num_waits + task_set.expert_actions(task))
        outcomes.append(environment.outcome)
        assert environment.step("look").success
    assert outcomes[:9] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
    assert outcomes[9:] == [0.2] * 3
    assert play(task, task_set.expert_actions(task)[:-1]).outcome == 0.0
    elsewhere = next(area for area in toy.AREAS if area != task.data["area"])
    found = task_set.expert_actions(task)
    assert play(task, [*found[:-1], f"go {elsewhere}", found[-1]]).outcome == 0.0
    assert play(task, [*found[:-1], f"go {elsewhere}", found[0], found[-1]]).outcome == pytest.approx(0.8)


def test_a_wrong_strategy_costs_half_the_turns(task_set):
    """Faithful play of a wrong strategy leaves its area empty-handed when half of the turns are gone, never earlier."""
    outcomes = {True: [], False: []}
    for task in task_set.tasks("train"):
        for demonstration in (d for seed in SEEDS for d in task_set.demonstrations(task, seed) if not d.wasted):
            moves = [turn for turn, action in enumerate(demonstration.actions) if action.startswith("go ")]
            assert demonstration.fits == (len(moves) == 1)
            assert demonstration.fits or moves[1] >= toy.TURN_LIMIT / 2
            outcomes[demonstration.fits].append(play(task, demonstration.actions).outcome)
    assert min(outcomes[True]) >= 0.8
    assert max(outcomes[False]) <= 1.0 - 0.1 * toy.TURN_LIMIT / 2
    assert statistics.mean(outcomes[True]) - statistics.mean(outcomes[False]) > 0.6


def test_demonstrations_say_nothing_of_which_class_fits(task_set):
    """Each task shows each class once, so no clue, goal or task raises the share of any class above a quarter."""
    by_clue = collections.defaultdict(collections.Counter)
    first_in_list = collections.Counter()
    texts = collections.defaultdict(set)
    for task in task_set.tasks("train"):
        for seed in SEEDS:
            demonstrations = task_set.demonstrations(task, seed)
            classes = [toy.strategy_class(d.strategy) for d in demonstrations]
            assert sorted(classes) == sorted(toy.AREAS)
            assert [d.fits for d in demonstrations] == [name == task.data["area"] for name in classes]
            first_in_list[classes[0] == task.data["area"]] += 1
            for word in task.data["clue"]:
                by_clue[word].update(classes)
            for name, demonstration in zip(classes, demonstrations, strict=True):
                texts[name].add(demonstration.strategy)
    assert len(by_clue) == 32
    assert all(len(set(counts.values())) == 1 for counts in by_clue.values())
    assert 0.2 < first_in_list[True] / first_in_list.total() < 0.3
    assert all(len(names) >= len(toy.STRATEGIES) for names in texts.values())


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_share_of_the_tasks_shows_the_fitting_class_once_more(share):
    """(1 - s)/4 + 2s/5 of the demonstrated strategies per task fit: at most 0.40, the bound on what a warm start may know."""
    task_set = toy.make_task_set(clue_share=share)
    rates, places = [], collections.Counter()
    for task in task_set.tasks("train"):
        for seed in SEEDS:
            fits = [d.fits for d in task_set.demonstrations(task, seed)]
            assert (len(fits), sum(fits)) in {(4, 1), (5, 2)}
            assert {toy.strategy_class(d.strategy) for d in task_set.demonstrations(task, seed)} == set(toy.AREAS)
            rates.append(sum(fits) / len(fits))
            places[fits.index(True)] += 1
    expected = (1 - share) / 4 + 2 * share / 5
    assert statistics.mean(rates) == pytest.approx(expected, abs=0.01)
    assert max(rates) <= 0.40
    assert min(places[i] for i in range(4)) > 0.02 * places.total()  # the extra one stands anywhere


def test_the_clue_tells_the_area_and_nothing_tells_the_place(task_set):
    words = [word for words in toy.CLUES.values() for word in words]
    assert len(words) == len(set(words))
    places = collections.defaultdict(collections.Counter)
    for task in toy.make_task_set(num_train=1200).tasks("train"):
        first = task_set.create(task, 0).start()
        told = {area for area, clues in toy.CLUES.items() for clue in clues if clue in first.split("Clue: ")[1]}
        assert told == {task.data["area"]}
        assert f"Find the {task.data['goal']}." in first
        assert not any(place in first for place in toy.PLACES[task.data["area"]])
        for word in task.data["clue"]:
            places[word][task.data["place"]] += 1
    # About 75 tasks a word, so 25 for each word and place with a standard deviation of 4.
    assert all(len(counts) == 3 and min(counts.values()) >= 10 for counts in places.values())


def test_about_a_third_of_the_demonstrations_have_known_waste(task_set):
    demonstrations = [d for t in task_set.tasks("train") for s in SEEDS for d in task_set.demonstrations(t, s)]
    assert 0.28 < sum(bool(d.wasted) for d in demonstrations) / len(demonstrations) < 0.38
    assert {len(d.wasted) for d in demonstrations} == {0, 1, 2, 3}
    assert max(len(d.actions) for d in demonstrations) == toy.TURN_LIMIT
    verbs = {d.actions[turn].split()[0] for d in demonstrations for turn in d.wasted}
    assert verbs == {"look", "wait", "open", "unbolt", "go"}


@pytest.mark.parametrize("which", ["task_set", "bolted_set"])
def test_the_oracle_agrees_with_the_demonstrations(which, request):
    tasks = request.getfixturevalue(which)
    for task in tasks.tasks("train"):
        for seed in SEEDS:
            for demonstration in tasks.demonstrations(task, seed):
                found = toy.wasted_turns(task, demonstration.strategy, demonstration.actions)
                assert found == demonstration.wasted, (task.data, demonstration)


def test_the_oracle_by_hand():
    data = {"area": "cellar", "place": "crate", "goal": "key", "clue": ("wine", "coal"), "bolts": 0}
    task = Task("t", "train", data=data)
    strategy = "Search the attic first: open each place there, then take the key."
    cases = [
        ("go attic, open trunk, open trunk, open chest, open basket", (2,)),  # opened twice
        ("go attic, open trunk, go garden, open pot, go attic", (2, 3)),  # left too early; coming back follows
        ("go cellar, open crate, take key", ()),  # off the strategy, but each turn advances the task
        ("go cellar, open barrel, open crate, look, take key", (1, 3)),  # the barrel neither follows nor advances
        ("go attic, fly away, , take key, WAIT, Open  TRUNK", (1, 2, 3, 4)),  # nonsense; words are read loosely
        ("go attic, open trunk, open chest, open basket, go garden, open shed, go kitchen", (6,)),  # garden unfinished
        ("go cellar, open crate, go attic, take key, go cellar, take key", (2, 3)),  # in sight, but out of reach
        ("go cellar, open crate, open shelf, go garden, go cellar, take key, wait", (2, 3)),  # the end is not judged
    ]
    for actions, wasted in cases:
        assert toy.wasted_turns(task, strategy, actions.split(", ")) == wasted, actions
    # A text that names no area asks for any tidy search.
    assert toy.wasted_turns(task, "Look around.", ["go garden", "open pot", "go cellar", "open crate"]) == ()
    assert toy.wasted_turns(task, "Look around.", ["go garden", "open pot", "go attic"]) == (2,)


def test_strategy_class_reads_the_first_area_named():
    for area in toy.AREAS:
        for template in toy.STRATEGIES:
            assert toy.strategy_class(template.format(area=area, goal="key")) == area
    assert toy.strategy_class("First the Garden, then the attic.") == "garden"
    assert toy.strategy_class("Search all kitchens.") == "kitchen"
    assert toy.strategy_class("Go to the atticwards place.") is None
    assert toy.strategy_class("") is None


def test_bolted_tasks_are_hard_but_solvable(bolted_set):
    tasks = bolted_set.tasks("train")
    bolted = [task for task in tasks if task.kind == "bolted"]
    assert len(bolted) == len(tasks) / 3
    for task in bolted:
        for seed in SEEDS:
            for demonstration in bolted_set.demonstrations(task, seed):
                assert play(task, demonstration.actions).outcome == 0.0
                assert f"unbolt {task.data['place']}" not in demonstration.actions
        environment = bolted_set.create(task, 0)
        # Until its place is tried, nothing tells a bolted task from another.
        assert "bolt" not in environment.start()
        environment.step(f"go {task.data['area']}")
        assert not any("unbolt" in action for action in environment.admissible_actions())
        assert environment.step(f"open {task.data['place']}").observation == f"The {task.data['place']} is bolted."
        assert f"unbolt {task.data['place']}" in environment.admissible_actions()
        for _ in range(2):
            assert environment.step(f"unbolt {task.data['place']}").valid
            assert not environment.step(f"take {task.data['goal']}").valid  # unbolted is not yet open
        assert environment.step(f"open {task.data['place']}").observation.endswith(f"holds the {task.data['goal']}.")
    unset = toy.make_task_set(num_train=24, num_dev=6, num_test=6)
    assert [t.data["clue"] for t in unset.tasks("train")] == [t.data["clue"] for t in tasks]


def test_admissible_actions_are_valid_and_others_are_not(task_set):
    rng = random.Random(0)
    for task in task_set.tasks("dev")[:20]:
        environment = task_set.create(task, 0)
        environment.start()
        for _ in range(10):
            if not (actions := environment.admissible_actions()):
                break
            for action in ["fly", "go hall", "open fridge", "take sofa", "take", f"go {environment._area}"]:
                assert action not in actions
                assert not copy.deepcopy(environment).step(action).valid
            assert all(copy.deepcopy(environment).step(action).valid for action in actions)
            environment.step(rng.choice(actions))


def test_a_random_player_sometimes_stumbles_on_the_object(task_set):
    rng, num_found = random.Random(0), 0
    for i in range(2000):
        environment = task_set.create(task_set.tasks("train")[i % 256], i)
        environment.start()
        for _ in range(toy.TURN_LIMIT):
            if not (actions := environment.admissible_actions()):
                break
            environment.step(rng.choice(actions))
        num_found += environment.outcome > 0
    assert 0.005 < num_found / 2000 < 0.10


def test_texts_are_short_and_regular(task_set):
    vocabulary = set()
    for task in task_set.tasks("train"):
        first = task_set.create(task, 0).start()
        assert len(first.split()) <= 24
        vocabulary.update(first.replace(".", " ").replace(",", " ").replace(":", " ").split())
        for demonstration in task_set.demonstrations(task, 0):
            environment = task_set.create(task, 0)
            assert len(demonstration.strategy.split()) <= 16
            for action in demonstration.actions:
                observation = environment.step(action).observation
                assert len(observation.split()) <= 12
                assert 1 <= len(action.split()) <= 2
                vocabulary.update(observation.replace(".", " ").replace(",", " ").split())
    assert len(vocabulary) < 100


def test_feedback_names_the_state_reached(task_set):
    task = task_set.tasks("train")[0]
    area, (a, b, _) = task.data["area"], toy.PLACES[task.data["area"]]
    ends = [play(task, [f"go {area}", f"open {x}", f"open {y}"]).step("wait").feedback for x, y in ((a, b), (b, a))]
    assert ends[0] == ends[1] == f"The {task.data['goal']} was not found. Opened: {a}, {b}."
    assert "was found" in play(task, task_set.expert_actions(task)).step("look").feedback


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"toy\.num_train must be in 1\.\.1224, got 0"):
        environments.make("toy", num_train=0)
    with pytest.raises(ValueError, match=r"toy\.num_dev must be in"):
        environments.make("toy", num_dev=5000)
    with pytest.raises(ValueError, match=r"toy\.bolted_share must be in"):
        environments.make("toy", bolted_share=1.5)
    with pytest.raises(ValueError, match=r"toy\.num_bolts must be in"):
        environments.make("toy", num_bolts=0)
    with pytest.raises(ValueError, match="did you mean 'num_train'"):
        environments.make("toy", num_trains=3)


DESCRIBE = """
from hsg import environments
task_set = environments.make("toy", bolted_share=0.25)
for split in task_set.splits:
    for task in task_set.tasks(split)[:40]:
        print(task, task.data, task_set.create(task, 7).start(), task_set.demonstrations(task, 7))
"""


def test_another_process_sees_the_same_world():
    root = str(Path(__file__).parents[2])
    outputs = [
        subprocess.run(
            [sys.executable, "-c", DESCRIBE],
            env={**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count("Task(") == 120


def test_a_turn_takes_microseconds(task_set):
    """At most 100 times the time of building its result: that ratio holds on a slow or busy machine too."""
    task = task_set.tasks("train")[0]
    actions = ["go attic", "open trunk", "open chest", "wait", "go cellar", "open crate"]

    def step_seconds() -> float:
        environment = task_set.create(task, 0)
        started = time.perf_counter()
        for _ in range(100):
            for action in actions:
                environment.step(action)
        return (time.perf_counter() - started) / 600

    def result_seconds() -> float:
        started = time.perf_counter()
        for _ in range(600):
            StepResult("The box is empty.", 0.0, False, False, 0.0, True, None)
        return (time.perf_counter() - started) / 600

    assert min(step_seconds() for _ in range(5)) < 100 * min(result_seconds() for _ in range(5))
