"""ALFWorld: files, rooms and sentences without an engine, then (slow) the real engine on generated and official games."""

from __future__ import annotations

import collections
import functools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tarfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from env_contract import assert_contract, running, suspend

from hsg import environments
from hsg.environments.alfworld import KINDS, games
from hsg.environments.alfworld.pool import Worker
from hsg.protocol import EnvironmentFault, StepResult, Task

pytest.importorskip("alfworld", reason="alfworld is not installed (pip install hsg[alfworld])")
from hsg.environments.alfworld import generate, rooms
from hsg.environments.alfworld.demonstrations import Errand, kind_of, places_in

ROOT = Path(__file__).parents[2]
LOAD = 600.0  # seconds; a starved machine


@pytest.fixture(scope="module")
def official(tmp_path_factory) -> Path:
    """The official games that HSG_DATA holds, unpacked (200 of train, all of valid_seen, 12 of valid_unseen)."""
    archive = Path(os.environ.get("HSG_DATA", "")) / "alfworld" / "json_2.1.1.tar.xz"
    if "HSG_DATA" not in os.environ or not archive.is_file():
        pytest.skip("HSG_DATA must hold alfworld/json_2.1.1.tar.xz")
    folder = tmp_path_factory.mktemp("alfworld")
    with tarfile.open(archive) as file:
        for member in file:
            if member.name.endswith((".tw-pddl", "traj_data.json")):
                file.extract(member, folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def generated(tmp_path_factory) -> Path:
    """One training game of every type and one game per other split, made by the generator."""
    folder = tmp_path_factory.mktemp("games")
    splits = {"train": len(KINDS), "valid_seen": 1, "valid_unseen": 1}
    generate.make_games(folder, splits, KINDS, seed=0, num_workers=1, quiet=True)
    return folder


@pytest.fixture(scope="module")
def task_set(generated, tmp_path_factory):
    made = environments.make(
        "alfworld", data=str(generated), num_workers=1, cache_dir=str(tmp_path_factory.mktemp("cache"))
    )
    yield made
    made.close()


def fake_game(root: Path, split: str, name: str, **game: object) -> None:
    folder = root / split / name / "trial_T1"
    folder.mkdir(parents=True)
    (folder / "game.tw-pddl").write_text(json.dumps({"pddl_problem": "x" * 20_000, **game}))


# --- without an engine ---------------------------------------------------------------------------------------------


def test_games_are_chosen_as_the_wheel_chooses(tmp_path):
    root = tmp_path / "json_2.1.1"
    for number in range(3):
        fake_game(root, "train", f"pick_and_place_simple-Mug-None-Shelf-{number}", solvable=True)
    fake_game(root, "train", "pick_two_obj_and_place-CD-None-Safe-1", solvable=True, walkthrough=["look"] * 5_000)
    fake_game(root, "train", "pick_two_obj_and_place-CD-None-Safe-2", solvable=False)
    fake_game(root, "train", "pick_two_obj_and_place-CD-None-Safe-3")
    fake_game(root, "train", "pick_two_obj_and_place-AppleSliced-None-Safe-4", solvable=True)
    fake_game(root, "train", "pick_and_place_with_movable_recep-Mug-Pan-Shelf-5", solvable=True)
    task_set = environments.make("alfworld", data=str(tmp_path))
    assert task_set.splits == ("train",)
    tasks = task_set.tasks("train")
    assert [(task.kind, task.id.split("-")[-1]) for task in tasks] == [
        ("pick_and_place_simple", "0/trial_T1"),
        ("pick_two_obj_and_place", "1/trial_T1"),
        ("pick_and_place_simple", "1/trial_T1"),
        ("pick_and_place_simple", "2/trial_T1"),
    ]
    assert tasks[0].id == "train/pick_and_place_simple-Mug-None-Shelf-0/trial_T1"
    for split in ("dev", "valid_unseen"):  # a missing split is an error only when asked for
        with pytest.raises(ValueError, match=r"must have games.*alfworld-download"):
            task_set.tasks(split)
    with pytest.raises(ValueError, match="valid_seen.*got 'validation'"):
        task_set.tasks("validation")
    with pytest.raises(ValueError, match="got 'train/none/none'"):
        task_set.create(Task("train/none/none", "train"), 0)
    few = environments.make("alfworld", data=str(root), tasks="pick_and_place_simple", max_games_per_type=2)
    assert [task.id for task in few.tasks("train")] == [tasks[0].id, tasks[2].id]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "/nowhere"}, "alfworld-download, or take data: generated"),
        ({"tasks": ["pick_two"]}, "did you mean 'pick_two_obj_and_place'"),
        ({"tasks": []}, "at least one"),
        ({"expert": "human"}, "planner, handcoded, got 'human'"),
        ({"num_workers": 0}, "num_workers must be an integer of at least 1, got 0"),
        ({"step_seconds": 0}, "step_seconds must be > 0"),
        ({"game": 3}, "got 'game'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        environments.make("alfworld", **options)


@pytest.mark.parametrize("text", ["not json", "[]"])
def test_a_broken_game_file(text, tmp_path):
    game = tmp_path / "train" / "pick_and_place_simple-Mug-None-Shelf-0" / "trial_T1" / "game.tw-pddl"
    game.parent.mkdir(parents=True)
    game.write_text(text)
    with pytest.raises(ValueError, match=r"alfworld\.data must hold whole games, got a broken .*game\.tw-pddl"):
        environments.make("alfworld", data=str(tmp_path)).tasks("train")


def test_a_cache_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"alfworld\.cache_dir must be a folder that can be written, got .*file"):
        environments.make("alfworld", data="generated", cache_dir=str(tmp_path / "file"))


def test_every_room_can_be_used():
    assert len(rooms.SEEN_ROOMS) + len(rooms.UNSEEN_ROOMS) == 120
    assert not set(rooms.SEEN_ROOMS) & set(rooms.UNSEEN_ROOMS)
    for number in rooms.SEEN_ROOMS + rooms.UNSEEN_ROOMS:
        room = rooms.load_room(number)
        assert len({r.id for r in room.receptacles}) == len(room.receptacles) >= 3
        assert room.start not in {r.location for r in room.receptacles}
        assert all(room.holders(thing) for thing in room.objects)
        assert not room.types & (set(room.objects) | {rooms.LAMP})  # no name may be object and receptacle
    kitchen = rooms.load_room(7)
    assert {"Fridge", "Microwave", "SinkBasin", "StoveBurner"} <= kitchen.types


def test_goals_of_the_splits_never_meet():
    names = collections.defaultdict(set)
    for split in games.SPLITS:
        for kind in KINDS:
            for seed in range(60):
                if goal := generate.draw_goal(kind, split, random.Random(seed)):
                    names[split].add(goal.name)
                    assert (goal.room in rooms.UNSEEN_ROOMS) == (split == "valid_unseen")
                    ability, tool = generate.TOOLS.get(kind, (None, None))
                    assert ability is None or goal.obj in rooms.able(ability)
                    assert goal.target != tool
    assert [len(names[split]) > 50 for split in games.SPLITS] == [True] * 3
    assert not names["train"] & names["valid_seen"]
    assert not (names["train"] | names["valid_seen"]) & names["valid_unseen"]


def test_a_furnished_room_does_not_solve_its_goal():
    for seed in range(40):
        rng = random.Random(seed)
        kind = rng.choice(KINDS)
        goal = generate.draw_goal(kind, "train", rng)
        if goal is None:
            continue
        placed = generate.furnish(goal, rng)
        wanted = [holder for thing, holder in placed.values() if thing == goal.obj]
        assert len(wanted) >= (2 if kind == "pick_two_obj_and_place" else 1)
        assert all(holder.type != goal.target for holder in wanted)
        assert all(holder in rooms.load_room(goal.room).holders(thing) for thing, holder in placed.values())
        problem = generate.write_problem(goal, placed)
        declared = re.findall(r"^ +(\S+) - (\w+)$", problem, flags=re.MULTILINE)
        assert len({name for name, _ in declared}) == len(declared)
        for name in ("SinkBasin", "Microwave", "Fridge", "Knife", "ButterKnife"):
            assert f"{name}Type" in dict(declared)


@pytest.mark.parametrize("kind", KINDS)
def test_sentences_of_the_goal_library_are_read(kind):
    for template in rooms.goal(kind)[1]:
        text = template.format(obj="mug", recep="shelf", toggle="desklamp")
        target = "desklamp" if kind == "look_at_obj_in_light" else "shelf"
        assert Errand.read(kind, f"...\n\nYour task is to: {text}.") == Errand(kind, "mug", target)
    assert Errand.read(kind, "Your task is to: Move the cup to where it belongs.") is None


def test_places_and_kinds():
    text = "Welcome! ... you see a shelf 10, a shelf 2, and a garbagecan 1.\n\nYour task is to: put a mug in shelf."
    assert places_in(text) == ["shelf 10", "shelf 2", "garbagecan 1"]
    assert kind_of("shelf 10") == "shelf"


def test_official_splits(official):
    task_set = environments.make("alfworld", data=str(official))
    assert [len(task_set.tasks(split)) for split in games.SPLITS] == [200, 140, 12]
    assert task_set.tasks("dev") == task_set.tasks("valid_seen")
    counts = collections.Counter(task.kind for task in task_set.tasks("valid_seen"))
    assert [counts[kind] for kind in KINDS] == [35, 13, 27, 16, 25, 24]  # as published with ALFWorld
    assert {task.kind for task in task_set.tasks("valid_seen")[:6]} == set(KINDS)


# --- the real engine -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_contract(task_set):
    assert_contract(task_set, num_tasks=1)


@pytest.mark.slow
def test_generated_games_are_the_same_bytes_again(generated, tmp_path):
    generate.make_games(tmp_path, {"train": 2}, KINDS[:2], seed=0, num_workers=2, quiet=True)
    again = sorted(path.relative_to(tmp_path) for path in tmp_path.glob("*/*/*/*"))
    assert len(again) == 4
    for path in again:
        assert (tmp_path / path).read_bytes() == (generated / path).read_bytes()
    assert not list(tmp_path.glob(".draft*"))
    pids = [child for child in Path("/proc").glob("[0-9]*") if is_worker_of_mine(child)]
    assert len(pids) <= 1  # the one of `task_set`


@pytest.mark.slow
def test_a_game_that_keeps_the_planner_busy_is_left_out_and_a_dead_worker_is_not_taken_for_one(generated, monkeypatch):
    pool = generate.Pool(1)
    try:
        game = next((generated / "train").glob("*/*/game.tw-pddl"))
        with monkeypatch.context() as patch:
            patch.setattr(generate, "PLAN_SECONDS", 1e-3)
            assert generate.solve(pool, game) is None
        assert pool.pids == []
        assert generate.solve(pool, game)
    finally:
        pool.close()
    broken = generate.Pool(1)
    broken._start = lambda: Worker((sys.executable, "-c", ""))  # ends at once
    with pytest.raises(EnvironmentFault, match="gone"):
        generate.solve(broken, game)


@pytest.mark.slow
def test_generated_data_is_made_once(tmp_path, monkeypatch):
    def make():
        return environments.make(
            "alfworld", data="generated", tasks=KINDS[0], num_generated=2, num_workers=1, cache_dir=str(tmp_path)
        )

    ids = [[task.id for task in make().tasks(split)] for split in ("train", "dev", "test")]
    assert [len(one) for one in ids] == [2, 1, 1]
    assert len({task_id.partition("/")[2] for one in ids for task_id in one}) == 4  # without the name of the split
    monkeypatch.setattr(generate, "make_games", None)  # the second time nothing may be made
    assert [[task.id for task in make().tasks(split)] for split in ("train", "dev", "test")] == ids
    assert len(list(tmp_path.iterdir())) == 1


def is_worker_of_mine(process: Path) -> bool:
    try:
        parent = process.joinpath("stat").read_text().rpartition(")")[2].split()[1]
        return parent == str(os.getpid()) and b"alfworld.worker" in process.joinpath("cmdline").read_bytes()
    except OSError:
        return False


def won_by(task_set, task: Task) -> list[StepResult]:
    episode = task_set.create(task, seed=0)
    episode.start()
    results = [episode.step(action) for action in task_set.expert_actions(task)]
    episode.close()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("expert", ["planner", "handcoded"])
def test_experts_win_in_the_language_of_format_2_1_2(task_set, expert, generated, tmp_path):
    task = task_set.tasks("train")[0]
    own = environments.make("alfworld", data=str(generated), expert=expert, num_workers=1, cache_dir=str(tmp_path))
    results = won_by(own, task)
    actions = own.expert_actions(task)  # from the cache now
    own.close()
    assert [result.success for result in results] == [False] * (len(results) - 1) + [True]
    assert re.fullmatch(r"move \w+ \d+ to \w+ \d+", actions[-1])
    assert results[-1] == StepResult(results[-1].observation, 1.0, True, True, 1.0)
    assert results[-1].observation.startswith("You move the ")


@pytest.mark.slow
@pytest.mark.parametrize("expert", ["planner", "handcoded"])
def test_experts_win_in_the_language_of_format_2_1_1(official, tmp_path, expert):
    own = environments.make("alfworld", data=str(official), expert=expert, num_workers=1, cache_dir=str(tmp_path))
    task = next(task for task in own.tasks("valid_seen") if task.kind == "pick_two_obj_and_place")
    results = won_by(own, task)
    actions = own.expert_actions(task)
    demonstration = own.demonstrations(task, seed=0)[0]
    own.close()
    assert results[-1].success
    for said in (actions, demonstration.actions):
        assert any(re.fullmatch(r"put \w+ \d+ in/on \w+ \d+", action) for action in said)
        assert not any(action.startswith("move ") for action in said)


@pytest.mark.slow
def test_every_generated_type_is_won_by_the_planner(task_set):
    tasks = task_set.tasks("train")
    assert [task.kind for task in tasks] == list(KINDS)
    for task in tasks:
        results = won_by(task_set, task)
        assert results[-1].success
        assert not any(result.success for result in results[:-1])
        assert all(result.valid for result in results)


@pytest.mark.slow
def test_nothing_happens_and_the_end_is_latched(task_set):
    task = task_set.tasks("train")[0]
    episode = task_set.create(task, seed=0)
    first = episode.start()
    assert first.startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room.")
    commands = episode.admissible_actions()
    assert commands == sorted(commands)
    assert episode.step("dance") == StepResult("Nothing happens.", 0.0, False, False, 0.0, valid=False)
    assert episode.admissible_actions() == commands
    assert episode.step(commands[0].upper()).valid
    assert episode.admissible_actions() != commands
    for action in task_set.expert_actions(task):
        last = episode.step(action)
    assert last.success
    assert episode.outcome == 1.0
    assert episode.step("look") == StepResult(last.observation, 0.0, True, True, 1.0)
    episode.close()
    with pytest.raises(RuntimeError, match="not closed"):
        episode.step("look") if not last.done else episode.admissible_actions()


@pytest.mark.slow
def test_demonstrations_search_where_the_strategy_says(task_set):
    fitting = 0
    for task in task_set.tasks("train")[:3]:
        made = task_set.demonstrations(task, seed=0)
        assert len(made) == 5
        for shown in made:
            named = re.search(r"every (\w+), then", shown.strategy).group(1)
            visited = [
                kind_of(action.removeprefix("go to ")) for action in shown.actions if action.startswith("go to ")
            ]
            assert visited[0] == named
            taken = next((action for action in shown.actions if action.startswith("take ")), "")
            assert not shown.fits or kind_of(taken.rpartition(" from ")[2]) == named
            assert all(shown.actions[turn] in ("look", "inventory") for turn in shown.wasted)
            fitting += shown.fits
    assert fitting == 9


@pytest.mark.slow
def test_steps_equal_the_bare_engine_and_take_less(official):
    """12 games x 30 steps: the same answers, at no more than 25 / 80 of the bare engine's time (median over pairs in turns)."""
    # The bare one only translates a game once instead of four times: what is compared is the play.
    code = """
        import functools, fast_downward
        from hsg.environments.alfworld import speed, worker
        speed.install = lambda: None
        fast_downward.pddl2sas = functools.cache(fast_downward.pddl2sas)
        worker.main()
    """
    bare, ours = Worker([sys.executable, "-c", textwrap.dedent(code)]), Worker()
    tasks = environments.make("alfworld", data=str(official)).tasks("valid_seen")
    by_kind = collections.defaultdict(list)
    for task in tasks:
        by_kind[task.kind].append(task.data["game"])
    paths = [path for kind in KINDS for path in sorted(by_kind[kind], key=os.path.getsize)[:2]]  # small ones load fast
    seconds = []
    rng = random.Random(0)
    for number, path in enumerate(paths):
        with ThreadPoolExecutor(2) as threads:
            start = functools.partial(Worker.request, do="start", episode=number, game=path, timeout=LOAD)
            one, other = threads.map(start, (bare, ours))
        assert one == other
        for _ in range(30):
            action = rng.choice([*one["commands"], "dance"])
            times = [time.perf_counter()]
            answers = []
            for worker in (bare, ours):
                answers.append(worker.request("step", episode=number, action=action, timeout=LOAD))
                times.append(time.perf_counter())
            one, other = answers
            assert one == other, (path, action)
            seconds.append((times[1] - times[0], times[2] - times[1]))
        for worker in (bare, ours):
            worker.request("forget", episode=number, timeout=LOAD)
    bare.close()
    ours.close()
    medians = [1000 * statistics.median(pair[i] for pair in seconds) for i in (0, 1)]
    print(f"\nms per step: bare {medians[0]:.1f}, ours {medians[1]:.1f}")
    assert len(seconds) == 12 * 30
    assert statistics.median(mine / theirs for theirs, mine in seconds) <= 25 / 80


@pytest.mark.slow
def test_copies_of_a_task_start_equal_and_load_once(generated, tmp_path):
    task_set = environments.make("alfworld", data=str(generated), num_workers=2, cache_dir=str(tmp_path))
    other = task_set.create(task_set.tasks("train")[0], 0)
    other.start()  # so that the worker runs before anything is timed
    other.close()
    task = task_set.tasks("dev")[0]
    alone = task_set.create(task, 0)
    began = time.perf_counter()
    first = alone.start()
    cold = time.perf_counter() - began
    alone.close()
    warm = []
    for seed in range(3):
        episode = task_set.create(task, seed)
        began = time.perf_counter()
        episode.start()
        warm.append(time.perf_counter() - began)
        episode.close()
    assert min(warm) < cold / 3
    copies = [task_set.create(task, seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as threads:
        assert set(threads.map(lambda episode: episode.start(), copies)) == {first}
        assert len(task_set.worker_pids) == 2
        commands = copies[0].admissible_actions()
        # Every copy goes its own way: none may see what another one did.
        went = list(threads.map(lambda pair: pair[0].step(pair[1]).observation, zip(copies, commands, strict=False)))
    for episode, command, text in zip(copies, commands, went, strict=False):
        lone = task_set.create(task, 0)
        lone.start()
        assert lone.step(command).observation == text
        lone.close()
        episode.close()
    task_set.close()
    with pytest.raises(EnvironmentFault, match="closed"):
        task_set.create(task, 0).start()


@pytest.mark.slow
def test_a_killed_worker_costs_its_episodes_only(generated, tmp_path):
    task_set = environments.make("alfworld", data=str(generated), num_workers=2, cache_dir=str(tmp_path))
    episodes = [task_set.create(task, seed=0) for task in task_set.tasks("train")[:3]]
    for episode in episodes:
        episode.start()
    victim, other = task_set.worker_pids
    os.kill(victim, signal.SIGKILL)
    outcomes = []
    for episode in episodes:
        try:
            outcomes.append(episode.step("look").valid)
        except EnvironmentFault:
            outcomes.append("fault")
    assert outcomes == ["fault", True, "fault"]
    fresh = [task_set.create(task_set.tasks("train")[0], seed=0) for _ in range(2)]
    assert fresh[0].start() == fresh[1].start()
    assert len(task_set.worker_pids) == 2
    assert other in task_set.worker_pids
    for episode in episodes + fresh:
        episode.close()
    task_set.close()


@pytest.mark.slow
def test_a_hung_worker_is_killed_and_a_bad_game_is_a_fault(generated, tmp_path):
    bad = tmp_path / "train" / "pick_and_place_simple-Mug-None-Shelf-7" / "trial_T1"
    bad.mkdir(parents=True)
    game = json.loads(next(generated.glob("train/*/*/game.tw-pddl")).read_text())
    (bad / "game.tw-pddl").write_text(json.dumps(game | {"pddl_problem": "(define (problem"}))
    good = next(generated.glob("train/*/*"))
    good_copy = tmp_path / "train" / good.parent.name / good.name
    good_copy.parent.mkdir()
    good_copy.symlink_to(good)
    task_set = environments.make("alfworld", data=str(tmp_path), num_workers=1, cache_dir=str(tmp_path / "cache"))
    by_name = {task.id: task for task in task_set.tasks("train")}
    broken = task_set.create(by_name["train/pick_and_place_simple-Mug-None-Shelf-7/trial_T1"], 0)
    with pytest.raises(EnvironmentFault, match="ALFWorld failed"):
        broken.start()
    broken.close()
    episode = task_set.create(by_name[f"train/{good.parent.name}/{good.name}"], 0)
    episode.start()
    (pid,) = task_set.worker_pids  # the bad game did not cost the worker
    suspend(pid)  # stopped, it cannot answer, however quick the machine
    episode._step_seconds = 0.2
    with pytest.raises(EnvironmentFault, match="no answer in time"):
        episode.step("look")
    assert task_set.worker_pids == []
    assert not running(pid)
    episode.close()
    task_set.close()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["return", "raise", "kill"])
def test_no_process_is_left(ending, generated):
    code = """
        import sys, time
        from hsg import environments
        task_set = environments.make("alfworld", data=sys.argv[2], num_workers=1)
        task_set.create(task_set.tasks("train")[0], 0).start()
        print(*task_set.worker_pids, flush=True)
        if sys.argv[1] == "raise":
            raise SystemError
        if sys.argv[1] == "kill":
            time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), ending, str(generated)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    (pid,) = [int(word) for word in parent.stdout.readline().split()]
    if ending == "kill":
        assert running(pid)
        parent.kill()
    parent.wait(timeout=300)
    deadline = time.monotonic() + 300
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(pid)
