"""The contract that every environment here keeps; each environment's test module calls it.

from env_contract import assert_contract
def test_contract():
    assert_contract(environments.make("toy"), num_tasks=6)
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from hsg.protocol import Environment, StepResult, TaskSet, check_environment


def assert_contract(task_set: TaskSet, *, num_tasks: int = 3) -> None:
    """Fails with every sentence of `check_environment`; also when the protocol's own types are not the ones in use."""
    findings = check_environment(task_set, num_tasks=num_tasks)
    assert findings == [], "\n".join(findings)
    assert isinstance(task_set, TaskSet)
    environment = task_set.create(task_set.tasks(task_set.splits[0])[0], 0)
    try:
        assert isinstance(environment, Environment)
        environment.start()
        assert isinstance(environment.step("look"), StepResult)
    finally:
        environment.close()


def suspend(pid: int, *, seconds: float = 30.0) -> None:
    """Stop a process and wait until each of its threads has stopped: SIGSTOP alone lets others run on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + seconds
    while {_state(stat) for stat in Path(f"/proc/{pid}/task").glob("*/stat")} != {"T"}:
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.01)


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


def running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return _state(Path(f"/proc/{pid}/stat")) != "Z"
    except FileNotFoundError:
        return False
