"""Coding: rows, answers and options; then, in the sandbox, attempts, probes of the grader, and what a run leaves behind."""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from env_contract import assert_contract

from hsg import environments
from hsg.environments.coding import sandbox as sandbox_module
from hsg.environments.coding.driver import encode
from hsg.environments.coding.episode import fenced, strategy_of
from hsg.environments.coding.grader import ENDED, TIMED_OUT, extract_code, grade, ranges, show_value
from hsg.environments.coding.problems import Problem, read_problems
from hsg.environments.coding.sandbox import Sandbox, seccomp_filter
from hsg.protocol import EnvironmentFault, Task

ROOT = Path(__file__).parents[2]
LEETCODE = Path(os.environ.get("HSG_DATA", "no data")) / "leetcode"

# The hidden tests are the third and the fourth; the numbers in them are found nowhere else.
ROW = {
    "task_id": "add",
    "difficulty": "Easy",
    "problem_description": "Add a to b.\n\nExample 1:\n\nInput: a = 1, b = 2\nOutput: 3\n\nInput: a = -1, b = 1\nOutput: 0\n",
    "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ",
    "prompt": "from typing import *\n",
    "entry_point": "Solution().add",
    "test": (
        "def check(candidate):\n    assert candidate(a=1, b=2) == 3\n    assert candidate(a=-1, b=1) == 0\n"
        "    assert candidate(a=70707, b=1) == 70708\n    assert candidate(a=60606, b=2) == 60608\n"
    ),
    "completion": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b\n",
}
RIGHT = ROW["completion"]
PROBLEM = Problem("add", "train", ROW)


def method(body: str, before: str = "") -> str:
    """A solution whose method has this body."""
    return (
        textwrap.dedent(before)
        + "\nclass Solution:\n    def add(self, a, b):\n"
        + textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8)
    )


def write_rows(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps({**ROW, **row}) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@functools.cache
def make_sandbox(mode: str) -> Sandbox:
    return Sandbox(mode, limit_seconds=2.0, memory_mb=512, num_runs=2)


try:
    make_sandbox("bwrap")
except ValueError as error:  # the product refuses there too, and says this
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(params=["bwrap", "rlimit"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return make_sandbox(request.param)


@pytest.fixture
def bwrap() -> Sandbox:
    return make_sandbox("bwrap")


# --- rows and answers ----------------------------------------------------------------------------------------------


def cases_of(*asserts: str, description: str = "") -> list[tuple]:
    test = "def check(candidate):\n" + "".join(f"    assert {line}\n" for line in asserts)
    problem = Problem("p", "train", {**ROW, "test": test, "problem_description": description})
    return [(case.arguments, case.expected) for case in problem.cases]


def test_every_form_of_assert() -> None:
    assert cases_of("candidate(nums = [3,3], target = 6) == [0,1]") == [("nums=[3, 3], target=6", [0, 1])]
    assert cases_of("candidate('19:34') == '19:39'") == [("'19:34'", "19:39")]
    assert cases_of("candidate(n=1) == -inf", "candidate(n=2) == -2.5") == [("n=1", -float("inf")), ("n=2", -2.5)]
    assert cases_of("candidate(n=1) is None") == [("n=1", None)]
    tree = "candidate(root=tree_node([5, None, 3]))"
    assert cases_of(f"{tree} == True") == [("root=tree_node([5, None, 3])", True)]
    same = f"is_same_tree({tree}, tree_node([1, None, 2, None, None, 9]))"
    assert cases_of(same) == [("root=tree_node([5, None, 3])", {"tree_node": [1, None, 2]})]
    same = "is_same_list(candidate(l=list_node([])), list_node([7, 0]))"
    assert cases_of(same, same.replace("7, 0", "")) == [
        ("l=list_node([])", {"list_node": [7, 0]}),
        ("l=list_node([])", None),
    ]


@pytest.mark.parametrize(
    "line", ["candidate(1) > 3", "abs(candidate(1) - 3) < 1", "helper(1) == 3", "candidate(1)", "candidate(1) == x"]
)
def test_other_asserts_are_refused_by_name(line: str) -> None:
    with pytest.raises(ValueError, match="coding.data must hold asserts .* got problem 'p'"):
        cases_of(line)


def test_public_examples_are_the_tests_in_the_description() -> None:
    assert [case.public for case in PROBLEM.cases] == [True, True, False, False]
    # null, true and the bare list of a tree, as descriptions write them; another name for an argument
    test = "def check(candidate):\n    assert candidate(root=tree_node([1, None, 2]), x=True) == 3\n    assert candidate(root=tree_node([1]), x=True) == 3\n"
    text = "Input: root = [1,null,2], flag = true\nOutput: 3\nExplanation: it is 3."
    problem = Problem("p", "train", {**ROW, "test": test, "problem_description": text})
    assert [case.public for case in problem.cases] == [True, False]


class _Pair:
    def __init__(self, **fields: object) -> None:
        vars(self).update(fields)


def test_encode_tells_values_apart_as_python_does() -> None:
    class Sly(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    for value in (None, True, 3, -(2**63), 2.5, float("-inf"), "ä\ud800", [1, [2]], 2**70):
        assert json.loads(json.dumps(encode(value))) == encode(value)
    assert encode(1) == encode(1.0) == encode(True)
    assert encode((1, 2)) != encode([1, 2])
    assert encode(float("nan")) != encode(float("nan"))
    assert encode({1: "a", 2: "b"}) == encode({2: "b", 1: "a"})
    assert encode({3, 1, 2}) == encode({1, 2, 3}) != encode([1, 2, 3])
    assert (type(encode(Sly(3))), encode(Sly(3))) == (int, 3)
    assert encode(2**70) != encode(2**70 + 1)
    assert encode(object()) == {"other": "object"}
    two = _Pair(val=1, next=_Pair(val=2, next=None))
    assert encode(two) == {"list_node": [1, 2]}
    leaf = _Pair(val=3, left=None, right=None)
    assert encode(_Pair(val=1, left=None, right=leaf)) == {"tree_node": [1, None, 3]}
    two.next.next = two
    with pytest.raises(ValueError, match="circle"):
        encode(two)
    endless: list = []
    endless.append(endless)
    with pytest.raises(ValueError, match="at most 100 levels deep"):
        encode(endless)


def test_code_in_an_action() -> None:
    assert extract_code("x = 1", "Solution().f") == "x = 1"
    assert extract_code("Here:\n```python\nx = 1\n```\nDone.", "Solution().f") == "x = 1\n"
    assert extract_code("```\nx = 1", "Solution().f") == "x = 1"  # cut off before its end
    two = "```python\nclass Solution: pass\n```\nUse it:\n```python\nprint(1)\n```"
    assert extract_code(two, "Solution().f") == "class Solution: pass\n"
    assert extract_code(two, "g") == "print(1)\n"
    assert extract_code(fenced("y = 2"), "f") == "y = 2\n"


def test_texts() -> None:
    assert ranges((1, 2, 3, 7, 9, 10)) == "1-3, 7, 9-10"
    assert ranges(()) == ""
    assert show_value(encode([(1, "a"), {2: None}])) == "[tuple([1, 'a']), {2: None}]"
    words = "### Plan\nUse a dictionary. It holds what was seen.\nHere is the code:\n```python\nx\n```"
    assert strategy_of(words, "f") == ("Use a dictionary. It holds what was seen.", "x\n")
    assert strategy_of("no code at all", "f") == ("", "")


# --- data and options ----------------------------------------------------------------------------------------------


def test_packaged_problems() -> None:
    problems, files = read_problems(None)
    assert {split: len(listed) for split, listed in problems.items()} == {"train": 3, "dev": 1, "test": 1}
    assert [file.name for file in files] == ["problems.jsonl"]
    for problem in (p for listed in problems.values() for p in listed):
        assert [case.public for case in problem.cases] == [True, True, False, False, False], problem.id


def test_folder_with_a_fixed_dev_share(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", *({"task_id": f"p{i}"} for i in range(100)))
    write_rows(tmp_path / "test.jsonl", {"task_id": "t"})
    problems, _ = read_problems(str(tmp_path))
    assert list(problems) == ["train", "dev", "test"]
    assert {p.split for p in problems["dev"]} == {"dev"}
    assert 3 <= len(problems["dev"]) <= 20
    assert len(problems["train"]) + len(problems["dev"]) == 100
    # More rows move no problem from one split to the other.
    write_rows(tmp_path / "train.jsonl", *({"task_id": f"p{i}"} for i in range(200)))
    more, _ = read_problems(str(tmp_path))
    assert {p.id for p in problems["dev"]} == {p.id for p in more["dev"]} & {f"p{i}" for i in range(100)}
    write_rows(tmp_path / "dev.jsonl", {"task_id": "d"})
    assert [p.id for p in read_problems(str(tmp_path))[0]["dev"]] == ["d"]


def test_difficulty_filter(tmp_path: Path) -> None:
    rows = [{"task_id": str(i), "difficulty": d} for i, d in enumerate(["Easy", "Hard", "", "Hard"])]
    data = write_rows(tmp_path / "all.jsonl", *rows)
    task_set = environments.make("coding", data=data, difficulty="Hard")
    assert [(task.id, task.kind) for task in task_set.tasks("train")] == [("1", "Hard"), ("3", "Hard")]
    assert len(environments.make("coding", data=data, difficulty=["Easy", "Hard"]).tasks("train")) == 3
    with pytest.raises(ValueError, match="coding.data must hold training problems, got none"):
        environments.make("coding", data=data, difficulty="Medium")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "/no/such/file"}, "coding.data must be a file .* no such path"),
        ({"difficulty": "hard"}, "coding.difficulty must be all or some of Easy, Medium, Hard, got 'hard'"),
        ({"num_attempts": 0}, "coding.num_attempts must be at least 1, got 0"),
        ({"limit_seconds": 0.0}, "coding.limit_seconds must be greater than 0, got 0.0"),
        ({"memory_mb": 1}, "coding.memory_mb must be at least 64, got 1"),
        ({"sandbox": "docker"}, "coding.sandbox must be one of bwrap, rlimit, got 'docker'"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        environments.make("coding", **options)


def test_bad_rows(tmp_path: Path) -> None:
    for rows, message in (
        ([{"task_id": "a"}, {"task_id": "a"}], "must name each problem once, got 'a' again"),
        ([{"test": ""}], "must give every row a test, got none at rows.jsonl:1"),
        ([{"split": "valid"}], "must use the splits train, dev, test, got 'valid'"),
    ):
        with pytest.raises(ValueError, match=message):
            read_problems(write_rows(tmp_path / "rows.jsonl", *rows))
    (tmp_path / "rows.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"must be JSON lines, got rows\.jsonl:1"):
        read_problems(str(tmp_path / "rows.jsonl"))


def test_refuses_without_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make = lambda: Sandbox("bwrap", limit_seconds=2.0, memory_mb=512, num_runs=1)  # noqa: E731
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: str(broken))
    with pytest.raises(
        ValueError, match="No permissions to create a new namespace; install bubblewrap .* sandbox: rlimit"
    ) as raised:
        make()
    assert "\n" not in str(raised.value)
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: None)
    monkeypatch.setattr(sandbox_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="hsg\\[coding\\]"):
        make()
    found = {"sortedcontainers": sandbox_module.Path("/usr/lib")}
    with pytest.raises(ValueError, match="there is no bwrap; install bubblewrap .* sandbox: rlimit, which is weak"):
        sandbox_module._bubblewrap(found, [])


# --- attempts ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_contract() -> None:
    assert_contract(environments.make("coding"), num_tasks=2)


def make_task_set(tmp_path: Path, **options: object) -> environments.TaskSet:
    return environments.make("coding", data=write_rows(tmp_path / "rows.jsonl", {}), **options)


def test_repair(tmp_path: Path) -> None:
    task_set = make_task_set(tmp_path)
    (task,) = task_set.tasks("train")
    episode = task_set.create(task, 0)
    first = episode.start()
    assert "You have 2 attempts." in first
    assert "def add(self, a: int, b: int) -> int:" in first
    bad = episode.step(fenced(method("return a / (b - 1)")))
    assert (bad.reward, bad.done, bad.success, bad.score, bad.valid) == (0.0, False, False, 0.0, True)
    assert "2 of 2 public examples fail." in bad.observation
    assert "Input: a=1, b=2\nExpected: 3\nReturned: 1.0" in bad.observation
    assert "ZeroDivisionError" in bad.observation
    assert "return a / (b - 1)" in bad.observation  # the line itself, as a trace shows it
    assert bad.feedback == "Failing tests (of 4): 1-4."
    good = episode.step(RIGHT)  # without a fence
    assert (good.reward, good.done, good.success, episode.outcome) == (1.0, True, True, 1.0)
    assert good.observation == "All tests pass."
    assert episode.step(RIGHT).reward == 0.0


def test_hidden_tests_decide_and_are_never_shown(tmp_path: Path) -> None:
    """A solution that knows the public examples fails; one that spies can say only what the public run holds."""
    task_set = make_task_set(tmp_path)
    task = Task("add", "train")
    episode = task_set.create(task, 0)
    table = episode.step(method("return {1: 3, -1: 0}[a]"))
    assert table.observation == "The public examples pass, but other tests fail."
    assert (table.reward, table.feedback) == (0.0, "Failing tests (of 4): 3-4.")
    spy = """
        import gc, sys, os
        def spy():
            frame, found = sys._getframe(), []
            while frame:
                found.append(repr(frame.f_locals)[:10000])
                frame = frame.f_back
            return found + [repr(o)[:1000] for o in gc.get_objects() if type(o) in (list, dict)][-200:]
        def forge(what):
            for fd in range(3, 32):
                try:
                    os.pwrite(fd, what, 0)
                except OSError:
                    pass
    """
    for body in (
        "raise ValueError(spy())",
        "return spy()",
        # rewriting the first line, so that a trace of the run with all tests would be shown
        "[forge((l['head'] + '{\"compiled\": false, \"error\": \"' + str(l['job']['calls']) + '\"}\\n').encode()) "
        "for l in [f.f_locals for f in [sys._getframe(2)]] if 'job' in l]",
    ):
        result = task_set.create(task, 0).step(method(body, spy))
        said = result.observation + str(result.feedback)
        assert result.reward == 0.0
        assert "70707" not in said
        assert "60606" not in said


def test_a_syntax_error_is_an_invalid_attempt(tmp_path: Path) -> None:
    task_set = make_task_set(tmp_path)
    episode = task_set.create(Task("add", "train"), 0)
    result = episode.step("class Solution:\n  def add(self, a, b)\n    return a")
    assert (result.valid, result.done, result.feedback) == (False, False, "Failing tests (of 4): 1-4.")
    assert "does not compile" in result.observation
    assert "line 2" in result.observation
    last = episode.step("")
    assert (last.valid, last.done, last.success) == (True, True, False)
    assert "NameError" in last.observation


def test_without_stop_on_success_the_last_attempt_counts(tmp_path: Path) -> None:
    task_set = make_task_set(tmp_path, stop_on_success=False)
    task = Task("add", "train")
    episode = task_set.create(task, 0)
    first = episode.step(RIGHT)
    assert (first.reward, first.done, first.success) == (1.0, False, False)
    # It must not tell whether the other tests pass, or repairing what is right would be found out by a look.
    assert first.observation == "The public examples pass."
    second = episode.step(method("return {1: 3, -1: 0}[a]"))
    assert (second.reward, second.done, second.success, episode.outcome) == (-1.0, True, False, 0.0)
    assert task_set.expert_actions(task) == [fenced(RIGHT)] * 2


def test_one_attempt(tmp_path: Path) -> None:
    episode = make_task_set(tmp_path, num_attempts=1).create(Task("add", "train"), 0)
    assert "You have one attempt." in episode.start()
    assert episode.step("pass").done


def test_demonstrations_do_what_they_say() -> None:
    task_set = environments.make("coding")
    for task in (task for split in task_set.splits for task in task_set.tasks(split)):
        straight, repair = task_set.demonstrations(task, seed=0)
        assert straight.strategy == repair.strategy
        assert (len(straight.actions), len(repair.actions)) == (1, 2)
        for demonstration in (straight, repair):
            episode = task_set.create(task, 0)
            rewards = [episode.step(action).reward for action in demonstration.actions]
            assert rewards == [0.0] * (len(rewards) - 1) + [1.0], task.id


def test_demonstration_of_an_answer_in_words(tmp_path: Path) -> None:
    rows = [
        {"task_id": "good", "response": f"Add both numbers. Return the sum.\n{fenced(RIGHT)}"},
        {"task_id": "wrong", "response": f"Take the first.\n{fenced(method('return a'))}"},
        {"task_id": "none"},
    ]
    task_set = environments.make("coding", data=write_rows(tmp_path / "rows.jsonl", *rows))
    found = [task_set.demonstrations(task, 0) for task in task_set.tasks("train")]
    assert [len(one) for one in found] == [1, 0, 0]
    assert found[0][0].strategy == "Add both numbers. Return the sum."


# --- probes of the grader: every one must score 0, in both modes -----------------------------------------------------

PROBES = {
    "SystemExit(0)": method("raise SystemExit(0)"),
    "SystemExit(0) at import": "raise SystemExit(0)",
    "os._exit(0)": method("import os\nos._exit(0)"),
    "os._exit(0) at import": "import os\nos._exit(0)",
    "prints what is expected": method("print(a + b)"),
    "prints a result line": method("print('{\"value\": 3}')\nimport os\nos.write(1, b'{\"value\": 3}')"),
    "always equal": method(
        "return Yes()",
        "class Yes:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    __hash__ = None\n",
    ),
    "always equal, an int": method("return Yes(-5)", "class Yes(int):\n    def __eq__(self, other): return True\n"),
    "always equal, a str": method("return Yes()", "class Yes(str):\n    def __eq__(self, other): return True\n"),
    "an int that converts as it likes": method(
        "return Yes(-5)",
        "class Yes(int):\n    def __index__(self): return 3\n    __int__ = __add__ = __repr__ = __index__\n",
    ),
    "patches builtins": method(
        "return None",
        """
        import builtins
        builtins.all = builtins.any = builtins.bool = builtins.isinstance = lambda *a, **k: True
        builtins.compile = builtins.eval = builtins.exec = lambda *a, **k: True
        builtins.AssertionError = BaseException
        """,
    ),
    "patches json": method("return None", "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\n"),
    "patches operator": method("return None", "import operator\noperator.eq = lambda a, b: True\n"),
    "replaces sys.stdout": method("return None", "import sys, io\nsys.stdout = sys.stderr = io.StringIO('passed')\n"),
    "changes the driver": method(
        "return None",
        """
        import sys
        driver = sys.modules['__main__']
        driver.encode = lambda value: True
        driver.describe = lambda error: {'value': True, 'passed': True}
        """,
    ),
    "writes to every file": method(
        """
        import os
        for fd in range(32):
            try:
                os.write(fd, b'passed {"compiled": true, "value": true, "passed": true}' + bytes([10]))
            except OSError:
                pass
        """
    ),
    "empties its answers": method(
        "import os\nfor fd in range(32):\n    try:\n        os.ftruncate(fd, 0)\n    except OSError:\n        pass"
    ),
    "forges lines with the nonce": method(
        """
        import os, sys
        frame = sys._getframe()
        while 'head' not in frame.f_locals:
            frame = frame.f_back
        line = (frame.f_locals['head'] + '{"value": true, "passed": true}\\n') * 9
        os.pwrite(frame.f_locals['results'], line.encode(), 0)
        os._exit(0)
        """
    ),
    "asks the frames for the answers": method(
        """
        import sys
        frame = sys._getframe()
        while frame:
            for value in list(frame.f_locals.values()):
                if isinstance(value, dict):
                    for key in ('expected', 'answers', 'test', 'cases'):
                        if key in value:
                            return value[key]
            frame = frame.f_back
        """
    ),
    "asks the garbage collector": method(
        """
        import gc, re
        for thing in gc.get_objects():
            if isinstance(thing, (dict, list, tuple)):
                for number in re.findall('[67]0[0-9]{3}', repr(thing)[:5000]):
                    if number not in ('70707', '60606'):  # the inputs, which it is given
                        return int(number)
        """
    ),
    "rewrites the tests": method(
        """
        for name in ('tests.py', 'driver.py', 'prelude.py', 'solution.py', 'json.py', 'problems.jsonl'):
            open(name, 'w').write('raise SystemExit(0)')
        """
    ),
    "alters its caller's list": method(
        "import sys\nframe = sys._getframe(1)\nwhile frame:\n    for v in list(frame.f_locals.values()):\n"
        "        if isinstance(v, dict) and 'calls' in v: v['calls'].clear()\n    frame = frame.f_back"
    ),
    "exits later": method("return None", "import atexit, os\natexit.register(os._exit, 0)\n"),
    "traces": method("return None", "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\n"),
    "raises what cannot be shown": method(
        "raise Odd()", "class Odd(BaseException):\n    def __str__(self): raise SystemExit(0)\n    __repr__ = __str__\n"
    ),
    "a child that survives": method(
        "import os\nif os.fork() == 0:\n    os.setsid()\n    import time\n    time.sleep(60)\nreturn None"
    ),
    "a thread": method("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"),
    "kills its parent": method("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)"),
    "kills everyone": method("import os, signal\nos.kill(-1, signal.SIGKILL)"),
    "2 GB": method("x = bytearray(2 * 10**9)\nreturn a + b"),
    "raises its own limits": method(
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nx = bytearray(2 * 10**9)\nreturn a + b"
    ),
    "10 MB of output": method(
        "import os\nfor fd in (0, 1, 2, 3, 4, 5):\n    try:\n        os.write(fd, b'x' * 10**7)\n    except OSError: pass"
    ),
    "10 MB returned": method("return 'x' * 10**7"),
    "a list in itself": method("x = []\nx.append(x)\nreturn x"),
    "a very deep list": method("x = []\nfor _ in range(10**5): x = [x]\nreturn x"),
    "a crash": method("import ctypes\nctypes.string_at(0)"),
    "never a number": method("return float('nan')"),
    "a null byte": "\x00",
    "a lone surrogate": "x = '\ud800'",
}


# Not to be tried where only a filter stands before the machine; and root can raise its limits again, as the mode says.
TOO_STRONG = {"kills its parent", "kills everyone"} | ({"raises its own limits"} if os.geteuid() == 0 else set())


@pytest.mark.parametrize(
    ("mode", "name"),
    [(mode, name) for mode in ("bwrap", "rlimit") for name in PROBES if mode == "bwrap" or name not in TOO_STRONG],
)
def test_probes_score_nothing(mode: str, name: str) -> None:
    sandbox = make_sandbox(mode)
    verdict = grade(sandbox, PROBLEM, PROBES[name], PROBLEM.cases)
    assert not verdict.passed
    assert verdict.failed == (1, 2, 3, 4)


def test_the_right_solution_passes_and_one_test_alone_can_fail(sandbox: Sandbox) -> None:
    assert grade(sandbox, PROBLEM, RIGHT, PROBLEM.cases).passed
    assert not grade(sandbox, PROBLEM, RIGHT, []).passed  # nothing was shown
    verdict = grade(sandbox, PROBLEM, method("return a + b if a != 70707 else 0"), PROBLEM.cases)
    assert verdict.failed == (3,)
    verdict = grade(sandbox, PROBLEM, method("import os\nreturn a + b if a < 60000 else os._exit(0)"), PROBLEM.cases)
    assert (verdict.failed, verdict.answers[2].error) == ((3, 4), ENDED)


def test_time_limit(sandbox: Sandbox) -> None:
    """A loop and a sleeper are stopped; the tests before keep their verdicts; waiting for a core is not counted."""
    for body in ("while a > 60000: pass\nreturn a + b", "import time\ntime.sleep(a > 60000 and 60)\nreturn a + b"):
        begin = time.monotonic()
        verdict = grade(sandbox, PROBLEM, method(body), PROBLEM.cases)
        used = time.monotonic() - begin
        assert (verdict.failed, verdict.answers[2].error) == ((3, 4), TIMED_OUT)
        assert 2.0 <= used < 30.0


def test_what_a_bubblewrapped_solution_sees(bwrap: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    problem = Problem(
        "p", "train", {**ROW, "entry_point": "look", "test": "def check(candidate):\n    assert candidate() == 0\n"}
    )

    def look(code: str) -> object:
        job = {
            "prelude": "",
            "code": f"import os\ndef look():\n    return {code}",
            "entry_point": "look",
            "calls": [""],
        }
        return bwrap.run(job).lines[1].get("value")

    assert look("os.getuid(), os.getgid(), os.getpid()") == {"tuple": [65534, 65534, 1]}
    assert look(f"os.path.exists({str(secret)!r}), os.path.exists('/etc'), os.path.exists('/proc/1')") == {
        "tuple": [False] * 3
    }
    assert look(f"os.path.exists({str(ROOT / 'environments')!r})") is False
    assert set(look("sorted(os.environ)")) <= {"LC_CTYPE", "PWD", "PYTHONHASHSEED"}
    assert look("__import__('sortedcontainers').SortedList([2, 1]).index(2)") == 1
    assert look("open('/usr/x', 'w')") is None  # an error: read-only
    assert look("open('/x', 'w')") is None
    assert look("open('/tmp/x', 'w').write('ab')") == 2
    assert look("os.listdir('/tmp')") == []  # every run has its own
    assert grade(bwrap, problem, "def look(): return 0", problem.cases).passed


def test_runs_repeat(sandbox: Sandbox) -> None:
    """The order of sets and random numbers are the same in every run, so that an attempt earns the same twice."""
    code = "import random\ndef f():\n    return list({'a', 'b', 'c', 'd', 'e'}), random.random()"
    job = {"prelude": "", "code": code, "entry_point": "f", "calls": [""]}
    runs = [sandbox.run(job).lines[1]["value"] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


def test_no_process_no_thread_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        for code in ("os.fork()", "subprocess.run(['/bin/true'])", "threading.Thread(target=print).start()",
                     f"socket.create_connection({address!r})"):  # fmt: skip
            code = f"import os, socket, subprocess, threading\ndef f():\n    {code}\n    return 'done'"
            job = {"prelude": "", "code": code, "entry_point": "f", "calls": [""]}
            assert sandbox.run(job).lines[1].get("kind") in ("PermissionError", "BlockingIOError", "RuntimeError"), code


def test_hidden_files_are_empty_inside() -> None:
    """Packaged problems may lie in the interpreter's own folder, which is mounted."""
    this = Path(os.path.realpath(os.__file__)).with_name("this.py")
    for hidden, expected in (([], True), ([this], False)):
        sandbox = Sandbox("bwrap", limit_seconds=5.0, memory_mb=512, num_runs=1, hidden=hidden)
        job = {"prelude": "", "entry_point": "f", "calls": [""]}
        job["code"] = f"def f():\n    return len(open({str(this)!r}).read()) > 0"
        assert sandbox.run(job).lines[1].get("value", False) is expected


def test_a_broken_sandbox_is_a_fault_and_not_a_zero(bwrap: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bwrap, "_command", [*bwrap._command[:-1], "raise SystemExit('no driver')"])
    with pytest.raises(EnvironmentFault, match="the sandbox did not start: no driver"):
        grade(bwrap, PROBLEM, RIGHT, PROBLEM.cases)


def test_seccomp_filter_by_hand() -> None:
    """Two calls: the jumps must reach `refuse` from each test, and `allow` after the last."""
    program = seccomp_filter("x86_64")
    steps = [program[i : i + 8] for i in range(0, len(program), 8)]
    assert steps[-1] == bytes.fromhex("0600000001000500")  # return ERRNO | EPERM
    assert steps[-2] == bytes.fromhex("060000000000ff7f")  # return ALLOW
    for index, step in enumerate(steps[4:-2], 4):
        assert index + 1 + step[2] == len(steps) - 1, index
    assert seccomp_filter("a machine without a table") == b""


# --- what runs leave behind ----------------------------------------------------------------------------------------

LEFTOVERS = """
import ctypes, os, sys, threading
from concurrent.futures import ThreadPoolExecutor
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # every orphan becomes a child of this process
from hsg.environments.coding.sandbox import EnvironmentFault, Sandbox
sandbox = Sandbox(sys.argv[1], limit_seconds=0.5, memory_mb=256, num_runs=4)
files = sorted(os.listdir("/proc/self/fd"))
codes = ["def f(x): return x", "import os\\nos._exit(0)", "def f(x): import os; os.fork()",
         "def f(x):\\n    import os\\n    os.setsid()\\n    open('left', 'w').write('x')", "def f(x):\\n    while True: pass"]
def run(i):
    code = codes[4 if i % 25 == 24 else i % 4]
    try:
        sandbox.run({"prelude": "", "code": code, "entry_point": "f", "calls": ["1"]})
    except EnvironmentFault:  # stopped before its start, on a busy machine; it must leave nothing either
        pass
for i in range(50): run(i)
with ThreadPoolExecutor(8) as pool: list(pool.map(run, range(150)))
threads = [threading.Thread(target=run, args=(i,)) for i in range(10)]
[t.start() for t in threads]; [t.join() for t in threads]
try:
    left = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    print("a child is left", left)
except ChildProcessError:
    print("no child")
print("files", sorted(os.listdir("/proc/self/fd")) == files)
"""


def script_environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bwrap", "rlimit"])
def test_two_hundred_runs_leave_nothing(mode: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFTOVERS, mode],
        env=script_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.stdout.split("\n")[:2] == ["no child", "files True"], done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def descendants(pid: int) -> set[int]:
    found, todo = set(), [pid]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            children = [int(child) for child in task.read_text().split()]
            found.update(children)
            todo += children
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("mode", ["bwrap", "rlimit"])
def test_a_killed_trainer_takes_its_runs_along(mode: str, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom environments.coding.sandbox import Sandbox\n"
        "s = Sandbox(sys.argv[1], limit_seconds=120.0, memory_mb=256, num_runs=1)\nprint('ready', flush=True)\n"
        "s.run({'prelude': '', 'code': 'import time\\ntime.sleep(100)', 'entry_point': 'f', 'calls': []})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, mode], env=script_environment(tmp_path), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    wanted = 2 if mode == "bwrap" else 1
    deadline = time.monotonic() + 60
    while len(started := descendants(process.pid)) < wanted and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)  # past the driver's own start
    assert len(started) >= wanted
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    while any(map(is_running, started)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, started))


def test_ten_runs_a_second_on_two_cores(bwrap: Sandbox) -> None:
    """In processor time, which a busy machine hardly changes: at most 0.2 s a run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(10):
        assert grade(bwrap, PROBLEM, RIGHT, PROBLEM.cases).passed
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 10
    assert 0 < seconds < 0.2


def test_runs_at_the_same_time_are_bounded(bwrap: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, lock = [0], [0], threading.Lock()
    original = bwrap._run_in_bubblewrap

    def counted(files: object) -> bool:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        try:
            return original(files)  # type: ignore[arg-type]
        finally:
            with lock:
                running[0] -= 1

    monkeypatch.setattr(bwrap, "_run_in_bubblewrap", counted)
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda _: grade(bwrap, PROBLEM, RIGHT, PROBLEM.cases).passed, range(16)))
    assert verdicts == [True] * 16
    assert most == [2]


# --- golden: LeetCodeDataset -----------------------------------------------------------------------------------------

needs_data = pytest.mark.skipif(not LEETCODE.is_dir(), reason="HSG_DATA/leetcode is not there")


@needs_data
@pytest.mark.slow
def test_leetcode_rows() -> None:
    problems, _ = read_problems(str(LEETCODE))
    assert {split: len(listed) for split, listed in problems.items()} == {"train": 1713, "dev": 177, "test": 228}
    kinds = [problem.difficulty for problem in problems["test"]]
    assert [kinds.count(kind) for kind in ("Hard", "Medium", "Easy")] == [79, 101, 48]
    read = [problem for split in ("train", "test") for problem in problems[split][::7]]
    for problem in read:
        assert problem.cases, problem.id
        assert problem.description, problem.id
        assert problem.starter_code, problem.id
    # Five rows of all have no example in words, or one that is not among their tests.
    assert sum(not any(case.public for case in problem.cases) for problem in read) <= 2


@needs_data
@pytest.mark.slow
def test_canonical_solutions_pass_and_others_do_not() -> None:
    """Every 12th test problem, those that need sortedcontainers, and trees and lists of the training rows."""
    problems, files = read_problems(str(LEETCODE))
    # Not the paper's limit: nine of the 228 canonical solutions need more than 2 seconds for all their tests.
    sandbox = Sandbox("bwrap", limit_seconds=20.0, memory_mb=512, num_runs=2, hidden=files)
    sample = problems["test"][::12] + [p for p in problems["test"] if "SortedList" in str(p.solution)]
    nodes = [p for p in problems["train"] if "is_same_" in p.row["test"]]
    assert len(nodes) > 20
    for problem in sample + nodes[::6]:
        assert problem.solution is not None
        verdict = grade(sandbox, problem, problem.solution, problem.cases)
        assert verdict.passed, (problem.id, verdict.failed, verdict.error)
        assert not grade(sandbox, problem, problem.starter_code + "pass", problem.cases).passed, problem.id
