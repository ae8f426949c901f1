"""Coding with repair: write Python for a problem, see what the public examples say, repair it (SGE, arXiv 2603.02045).

task_set = environments.make("coding", data="leetcode/", difficulty="Hard")

problems.py   rows of JSON lines -> problems, calls and expected answers
driver.py     what runs inside the sandbox
sandbox.py    one process per run, isolated and limited
grader.py     compares answers, outside the sandbox
episode.py    Environment and TaskSet
problems.jsonl  five small problems of our own, for a first run

The data set of the paper's kind is LeetCodeDataset (newfacade/LeetCodeDataset on the Hugging Face hub): save its files as
train.jsonl and test.jsonl (or .jsonl.gz) in a folder and name that as `data`.  Its test file is 79 Hard, 101 Medium and 48
Easy problems: not the paper's 228 hard ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from hsg.environments.coding.episode import CodingTaskSet
from hsg.environments.coding.problems import DIFFICULTIES, read_problems
from hsg.environments.coding.sandbox import Sandbox

__all__ = ["DIFFICULTIES", "make_task_set"]


def make_task_set(
    data: str | None = None,
    difficulty: str | Sequence[str] = "all",
    num_attempts: int = 2,
    stop_on_success: bool = True,
    sandbox: str = "bwrap",
    limit_seconds: float = 2.0,
    memory_mb: int = 512,
    num_runs: int | None = None,
) -> CodingTaskSet:
    """The task set `coding`.

    data             a folder with train.jsonl, test.jsonl and maybe dev.jsonl (or .jsonl.gz), or one such file whose rows
                     may name a "split"; None = the five packaged problems.  Without dev rows, a fixed tenth of train is dev
    difficulty       "all", or one or more of Easy, Medium, Hard (rows that do not say theirs are then left out)
    num_attempts     turns of an episode
    stop_on_success  an attempt that passes all tests ends the episode; else the last attempt counts
    sandbox          "bwrap"; "rlimit" is weak: the code under test can then read and change your files
    limit_seconds    of one run of all tests; up to 10 seconds of waiting for a busy core do not count
    memory_mb        address space of one run
    num_runs         runs at the same time; None = one per core

    ValueError: a problem's file or form, a number out of range, no problem left, no sandbox (it says what to install).
    """
    for name, value, least in (
        ("num_attempts", num_attempts, 1),
        ("memory_mb", memory_mb, 64),
        ("num_runs", num_runs, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"coding.{name} must be at least {least}, got {value}; leave it out?")
    if not (math.isfinite(limit_seconds) and limit_seconds > 0):
        raise ValueError(f"coding.limit_seconds must be greater than 0, got {limit_seconds}; 2 is the paper's")
    wanted = {difficulty} if isinstance(difficulty, str) else set(difficulty)
    if not wanted or not wanted <= {"all", *DIFFICULTIES}:
        raise ValueError(f"coding.difficulty must be all or some of {', '.join(DIFFICULTIES)}, got {difficulty!r}")
    problems, files = read_problems(data)
    if "all" not in wanted:
        problems = {split: [p for p in listed if p.difficulty in wanted] for split, listed in problems.items()}
        problems = {split: listed for split, listed in problems.items() if listed}
    if "train" not in problems:
        raise ValueError(f"coding.data must hold training problems, got none ({difficulty=}); choose other rows")
    if num_runs is None:
        num_runs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    runner = Sandbox(sandbox, limit_seconds=limit_seconds, memory_mb=memory_mb, num_runs=num_runs, hidden=files)
    return CodingTaskSet(problems, runner, num_attempts=num_attempts, stop_on_success=stop_on_success)
