"""Grades a solution: runs it in the sandbox, compares what it returned with what was expected, outside.

    code, cases -> sandbox -> one line per case -> Verdict(compiled, answers)        answer: passed, got, error

The verdict cannot be forged by the solution: it is computed here from plain data, and the process that made the data held
no expected answer.  A solution that lies about its answers only chooses which wrong ones it gives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hsg.environments.coding.problems import Case, Problem
from hsg.environments.coding.sandbox import Sandbox

TIMED_OUT = "Time limit exceeded."
ENDED = "The process ended before it answered."
MAX_SHOWN_CHARS = 1000
_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """What became of one case: passed, or what came instead (`got`, or an error's text)."""

    case: Case
    passed: bool
    got: str = ""
    error: str = ""


@dataclass(frozen=True)
class Verdict:
    """What became of all cases; `error` is of a solution that does not compile."""

    answers: tuple[Answer, ...]
    compiled: bool = True
    error: str = ""

    @property
    def passed(self) -> bool:
        return self.compiled and bool(self.answers) and all(answer.passed for answer in self.answers)

    @property
    def failed(self) -> tuple[int, ...]:
        """1-based numbers of the failing tests."""
        return tuple(number for number, answer in enumerate(self.answers, 1) if not answer.passed)


def grade(sandbox: Sandbox, problem: Problem, code: str, cases: Sequence[Case]) -> Verdict:
    """Run a solution on some of a problem's cases, in one process. EnvironmentFault where the sandbox itself fails."""
    run = sandbox.run(
        {
            "prelude": problem.prelude,
            "entry_point": problem.entry_point,
            "code": code,
            "calls": [case.arguments for case in cases],
        }
    )
    head, *lines = run.lines or ({},)
    if isinstance(head, dict) and head.get("compiled") is False:
        return Verdict(tuple(Answer(case, False) for case in cases), False, _text(head.get("error")))
    answers = []
    for index, case in enumerate(cases):
        if index < len(lines):
            answers.append(_judge(case, lines[index]))
        else:
            answers.append(Answer(case, False, error=TIMED_OUT if run.timed_out else ENDED))
    return Verdict(tuple(answers))


def _judge(case: Case, line: Any) -> Answer:
    if isinstance(line, dict) and "value" in line:
        # Only as deep as the expected answer, however deep the other one is.
        passed = bool(line["value"] == case.expected)
        return Answer(case, passed, "" if passed else _shown(line["value"]))
    return Answer(case, False, error=_text(line.get("error")) if isinstance(line, dict) else ENDED)


def extract_code(action: str, entry_point: str) -> str:
    """The code in an action: the last fenced block that names the entry point, else the last block, else all of it."""
    blocks = _FENCE.findall(action)
    if not blocks:
        return action
    name = re.split(r"\W", entry_point)[0]
    return ([block for block in blocks if name in block] or blocks)[-1]


def show_value(data: Any) -> str:
    """Encoded data (driver.encode) as Python would write it."""
    if isinstance(data, list):
        return f"[{', '.join(map(show_value, data))}]"
    if isinstance(data, dict) and len(data) == 1:
        ((kind, inside),) = data.items()
        if kind == "int":
            return str(inside)
        if kind == "other":
            return f"an object of type {inside}"
        if kind == "dict" and isinstance(inside, list):
            pairs = [f"{show_value(p[0])}: {show_value(p[1])}" for p in inside if isinstance(p, list) and len(p) == 2]
            return f"{{{', '.join(pairs)}}}"
        if isinstance(inside, list):
            return f"{kind}({show_value(inside)})"
    return json.dumps(data) if isinstance(data, dict) else repr(data)


def _shown(data: Any) -> str:
    try:
        return _text(show_value(data))
    except (RecursionError, ValueError):
        return "a value too deep to show"


def _text(value: Any) -> str:
    """Text that may be shown: cut in the middle when too long, without lone surrogates."""
    text = str(value).encode("utf-8", "replace").decode()
    half = MAX_SHOWN_CHARS // 2
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:half]} ... {text[-half:]}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs joined: (1, 2, 3, 7) -> "1-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
