"""One coding episode (two attempts at one problem) and the set of problems, behind hsg.protocol.

    start -> the problem, its starter code
    step  -> an attempt: all tests decide the reward (0 or 1), the public examples make the observation
             solved: done; else what the public examples brought: a trace, the failing ones, or only that others fail

Two processes per failed attempt: what is shown comes from one that never knew the other tests, not even their inputs.
A failing test that is not public is never shown, only its number, as `feedback` (which no agent sees during the episode).
Source: SGE (arXiv 2603.02045), Coding: two turns, a new process, 2 seconds, reward 1 exactly when all tests pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hsg.environments.coding.grader import Verdict, extract_code, grade, ranges, show_value
from hsg.environments.coding.problems import Problem
from hsg.environments.coding.sandbox import Sandbox
from hsg.protocol import Demonstration, Environment, StepResult, Task, TaskSet

TASK = "Solve this problem in Python. You have {attempts}.\n\n{description}"
STARTER = "\n\nComplete this code (the usual imports are made already):\n```python\n{code}\n```"
SOLVED = "All tests pass."
MAX_SHOWN_FAILURES = 3
MAX_STRATEGY_CHARS = 400


class CodingEpisode(Environment):
    """The attempts at one problem. The seed changes nothing: a problem is what it is."""

    def __init__(self, problem: Problem, sandbox: Sandbox, *, num_attempts: int, stop_on_success: bool):
        self._problem, self._cases, self._sandbox = problem, problem.cases, sandbox
        self._num_attempts, self._stop_on_success = num_attempts, stop_on_success
        self._attempt = 0
        self._outcome = 0.0
        self._last: StepResult | None = None

    def start(self) -> str:
        attempts = "one attempt" if self._num_attempts == 1 else f"{self._num_attempts} attempts"
        text = TASK.format(attempts=attempts, description=self._problem.description)
        return text + (STARTER.format(code=self._problem.starter_code) if self._problem.starter_code else "")

    def step(self, action: str) -> StepResult:
        if self._last is not None and self._last.done:
            return replace(self._last, reward=0.0)
        problem, code = self._problem, extract_code(action, self._problem.entry_point)
        verdict = grade(self._sandbox, problem, code, self._cases)
        self._attempt += 1
        last = self._attempt >= self._num_attempts
        # The last attempt is the answer; a success that ends the episode is the last attempt.
        gain, self._outcome = verdict.passed - self._outcome, float(verdict.passed)
        done = last or (verdict.passed and self._stop_on_success)
        if done and verdict.passed:
            observation = SOLVED
        else:
            observation = self._report(code)
        self._last = StepResult(
            observation=observation,
            reward=gain,
            done=done,
            success=done and verdict.passed,
            score=self._outcome,
            valid=verdict.compiled,
            feedback=failing_tests(verdict),
        )
        return self._last

    @property
    def outcome(self) -> float:
        return self._outcome

    def _report(self, code: str) -> str:
        """What the public examples say; nothing in it comes from the other tests but that they do not all pass."""
        public = [case for case in self._cases if case.public]
        shown = grade(self._sandbox, self._problem, code, public)
        if not shown.compiled:
            return f"The code does not compile.\n{shown.error}"
        failures = [answer for answer in shown.answers if not answer.passed]
        if not failures:
            passing = "The public examples pass" if public else "There are no public examples to run"
            # Without stop_on_success an episode goes on after a success too, and must not tell which it was.
            return f"{passing}, but other tests fail." if self._stop_on_success else f"{passing}."
        parts = [f"{len(failures)} of {len(public)} public examples fail."]
        for answer in failures[:MAX_SHOWN_FAILURES]:
            came = answer.error or f"Returned: {answer.got}"
            parts.append(f"Input: {answer.case.arguments}\nExpected: {show_value(answer.case.expected)}\n{came}")
        return "\n\n".join(parts)


def failing_tests(verdict: Verdict) -> str:
    """The set of failing tests as a text: equal exactly for equal sets, so that distinct outcomes can be counted."""
    number = len(verdict.answers)
    if verdict.passed:
        return f"All {number} tests pass."
    return f"Failing tests (of {number}): {ranges(verdict.failed)}."


class CodingTaskSet(TaskSet):
    """All problems of a file or folder, in its splits. Task.kind is the difficulty, where the row says it."""

    name = "coding"

    def __init__(
        self, problems: Mapping[str, Sequence[Problem]], sandbox: Sandbox, *, num_attempts: int, stop_on_success: bool
    ):
        self._problems = {problem.id: problem for split in problems.values() for problem in split}
        self._tasks = {
            split: [Task(problem.id, split, kind=problem.difficulty) for problem in listed]
            for split, listed in problems.items()
        }
        self._sandbox, self._num_attempts, self._stop_on_success = sandbox, num_attempts, stop_on_success

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    def tasks(self, split: str) -> list[Task]:
        """The problems in the order of their file."""
        if split not in self._tasks:
            raise ValueError(f"split must be one of {', '.join(self.splits)}, got {split!r}; see TaskSet.splits")
        return list(self._tasks[split])

    def create(self, task: Task, seed: int) -> CodingEpisode:
        return CodingEpisode(
            self._problem(task),
            self._sandbox,
            num_attempts=self._num_attempts,
            stop_on_success=self._stop_on_success,
        )

    def expert_actions(self, task: Task) -> list[str] | None:
        """The canonical solution, as one attempt (as often as there are attempts where a success does not end them)."""
        solution = self._problem(task).solution
        if solution is None:
            return None
        return [fenced(solution)] * (1 if self._stop_on_success else self._num_attempts)

    def demonstrations(self, task: Task, seed: int) -> list[Demonstration]:
        """The row's strategy with a repair (its broken attempt, then the solution) and without one.

        A row with neither but with a `response` in words and code: its first sentences are the strategy, its code the
        play, if that passes (it is run here: 0.1 s).  Else [].
        """
        problem = self._problem(task)
        row, solution = problem.row, problem.solution
        if row.get("strategy") and solution:
            found = [Demonstration(row["strategy"], (fenced(solution),))]
            if row.get("attempt") and self._num_attempts > 1:
                found.append(Demonstration(row["strategy"], (fenced(row["attempt"]), fenced(solution))))
            return found
        strategy, code = strategy_of(str(row.get("response") or ""), problem.entry_point)
        if not strategy or not grade(self._sandbox, problem, code, problem.cases).passed:
            return []
        return [Demonstration(strategy, (fenced(code),))]

    def _problem(self, task: Task) -> Problem:
        if task.id not in self._problems:
            raise ValueError(
                f"task.id must be a problem of coding.data, got {task.id!r}; take tasks from TaskSet.tasks()"
            )
        return self._problems[task.id]


def fenced(code: str) -> str:
    """Code as an attempt is best written."""
    return f"```python\n{code.strip()}\n```"


def strategy_of(response: str, entry_point: str) -> tuple[str, str]:
    """(strategy, code) of an answer in words and code: the words before the code, whole sentences, without headlines."""
    words, fence, _ = response.partition("```")
    if not fence:
        return "", ""
    lines = [
        line for line in words.split("\n") if not line.lstrip().startswith("#") and not line.rstrip().endswith(":")
    ]
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(" ".join(lines).split()))
    strategy = ""
    for sentence in sentences:
        if len(strategy) + len(sentence) >= MAX_STRATEGY_CHARS:
            break
        strategy = f"{strategy} {sentence}".strip()
    return strategy, extract_code(response, entry_point)
