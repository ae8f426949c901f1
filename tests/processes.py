"""Whole runs of the guessing game in processes of their own, as many ranks as wanted, that may be killed anywhere.

    done = run_ranks(["--config", ...], folder, num_ranks=2, kill=("optimizer_step", 5))

The processes are forked from a server that has imported everything, so that each starts in a moment.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["processes", "hsg.trainer", "hsg.experiments.run", "hsg.experiments.reading.resume", "matplotlib.figure"]
)

POINTS = {
    "save": ("hsg.run.checkpoint", "save_file"),  # after half of the file
    "rollout": ("hsg.rollout", "_Stream.turn"),
    "optimizer_step": ("hsg.learner", "Learner.optimizer_step"),
    "evaluation": ("hsg.measure.evaluation", "play_once"),
}
"""Where a process can be ended: a function of the product, right before one of its calls."""


@dataclass
class Done:
    status: list[int]  # per rank; minus the signal where one killed it
    output: str  # of all ranks


def _wrap(point: str, act: Callable[[int, tuple[Any, ...]], None]) -> None:
    """Call `act(n, arguments)` before the n-th call (from 0) of the function at a point."""
    import importlib

    module, path = POINTS[point]
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    function, calls = getattr(owner, name), iter(range(10**9))

    def wrapped(*arguments: Any, **options: Any) -> Any:
        act(next(calls), arguments)
        return function(*arguments, **options)

    setattr(owner, name, wrapped)


def _child(
    arguments: list[str], log: str, env: dict[str, str], act: tuple[str, int, int, int] | None, setup: Any
) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(env)
    import torch
    from fakes import FakeEncoder, GuessTaskSet

    import hsg.collector
    import hsg.experiments.run
    import hsg.trainer
    from hsg import environments

    torch.set_num_threads(1)
    hsg.collector.load_encoder = lambda *_: FakeEncoder()  # type: ignore[assignment, return-value]
    environments.make = lambda name, **options: GuessTaskSet(**options)  # type: ignore[assignment]
    if setup is not None:
        setup()
    if act is not None:
        point, number, rank, sent = act

        def do(call: int, given: tuple[Any, ...]) -> None:
            if call == number and int(env.get("RANK", "0")) == rank:
                if point == "save":
                    Path(given[1]).write_bytes(b"\\x08" * 100)
                os.kill(os.getpid(), sent)

        _wrap(point, do)
    sys.argv = ["run.py", *arguments]
    status = hsg.experiments.run.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as the interpreter would, but for what the forked server had registered


def run_ranks(
    arguments: list[str],
    folder: Path,
    *,
    num_ranks: int = 1,
    kill: tuple[str, int] | None = None,
    send: int = signal.SIGKILL,
    to: int = 0,
    setup: Callable[[], None] | None = None,
    env: dict[str, str] | None = None,
    stop_at_failure: bool = False,
    limit_seconds: float = 900.0,
    kill_after_seconds: float | None = None,
    watch: Callable[[list[int]], None] = lambda pids: None,
) -> Done:
    """Run the command on some ranks. `kill`: (point, n) at which rank `to` is sent `send`; a rank that is killed takes the
    others with it, as a launcher would see to (`stop_at_failure`: one that fails, too). `setup` is called in each process first.

    `kill_after_seconds`: all ranks are killed then, wherever they are. `watch` is called now and then with their ids.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = folder / f"log-{time.monotonic_ns()}.txt"
    ranks = []
    for rank in range(num_ranks):
        given = {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})}
        if num_ranks > 1:
            given |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
                      "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        act = None if kill is None else (*kill, to, send)
        process = _CONTEXT.Process(target=_child, args=(arguments, str(log), given, act, setup))
        process.start()
        ranks.append(process)
    began = time.monotonic()
    pids = [p.pid for p in ranks if p.pid is not None]
    while any(p.is_alive() for p in ranks) and time.monotonic() < began + limit_seconds:
        watch(pids)
        if kill_after_seconds is not None and time.monotonic() > began + kill_after_seconds:
            for p in ranks:
                p.kill()
        if any(p.exitcode is not None and (p.exitcode < 0 or (p.exitcode and stop_at_failure)) for p in ranks):
            for p in ranks:
                p.kill()
        time.sleep(0.02)
    hung = [rank for rank, p in enumerate(ranks) if p.is_alive()]
    for p in ranks:
        p.kill()
        p.join()
    output = log.read_text(encoding="utf-8", errors="replace")
    assert not hung, f"ranks {hung} did not end:\n{output[-3000:]}"
    return Done([p.exitcode for p in ranks], output)
