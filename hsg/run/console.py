"""What a person at the terminal sees of a run: bars while episodes are played and rows are learned from, and one line when an
iteration or an evaluation is over.

    at a terminal    iteration  outcome  success   dead  ...   under a heading that comes back, in aligned columns
    log.quiet, logs  iteration 3/100  outcome 0.372  success 0.177  ...  10.3s (rollout 4.1, update 2.1)  eta 0:16

Deliberately absent: colours that mean something (a line is read by scripts too), screens that are redrawn.
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from hsg.config.options import Config
from hsg.measure.intervals import wilson_interval
from hsg.measure.progress import duration, progress

SHOWN = {
    "outcome": "reward/outcome", "success": "reward/success", "turns": "rollout/turns", "dead": "advantage/dead_groups",
    "flagged": "judge/flagged_share", "kl": "update/approx_kl", "entropy": "update/entropy", "clip": "update/clip_fraction",
}  # fmt: skip
PHASES = {
    "start": "time/environment_start_seconds", "strategies": "time/strategies_seconds", "select": "time/selection_seconds",
    "rollout": "time/rollout_seconds", "update": "time/update_seconds",
}  # fmt: skip
HEADING_EVERY = 20  # lines
RECENT = 10  # iterations whose mean time says how long the rest will take


class Console:
    """Bars and lines of one run. `interactive` None: whether standard output is a terminal."""

    def __init__(self, config: Config, *, is_main: bool = True, interactive: bool | None = None) -> None:
        self._num_iterations, self._max_seconds = config.train.iterations, config.train.max_seconds
        self._max_turns = config.train.max_environment_turns
        self._is_main, self._quiet = is_main, config.log.quiet
        wide = sys.stdout.isatty() if interactive is None else interactive
        self._columns = wide and not config.log.quiet
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._recent_turns: deque[float] = deque(maxlen=RECENT)
        self._spent, self._played = 0.0, 0
        self._lines = 0

    def bar(self, description: str, total: int | None, unit: str = "episode") -> Any:
        """A progress bar where standard error is a terminal, gone when it is full; a line a minute elsewhere."""
        return progress(total if self._is_main else None, description, unit, quiet=self._quiet)

    def line(self, iteration: int, values: Mapping[str, float], *, spent: float, played: int) -> None:
        """The numbers of a finished iteration (the first is 1), beside the bar and not through it.

        spent, played  seconds and environment turns of the run so far, what was before a resume included
        """
        self._recent.append(values["time/iteration_seconds"])
        self._recent_turns.append(values.get("cost/environment_turns", 0.0))
        self._spent, self._played = spent, played
        if self._columns and self._lines % HEADING_EVERY == 0:
            tqdm.write(_dim(heading(values)))
        self._lines += 1
        format_line = columns if self._columns else plain
        tqdm.write(format_line(iteration, self._num_iterations, values, self.remaining(iteration)))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """One line for an evaluation, between those of the iterations."""
        tqdm.write(evaluated(record))

    def remaining(self, iteration: int) -> float:
        """Seconds until the last iteration is over, at the pace of the last ones.

        `train.max_seconds` may end it before, or `train.max_environment_turns`: after the iteration that reaches them.
        """
        left: float = self._num_iterations - iteration
        per_iteration = sum(self._recent_turns) / len(self._recent_turns)
        if self._max_turns is not None and per_iteration > 0:
            left = min(left, max(0, math.ceil((self._max_turns - self._played) / per_iteration)))
        rest = left * sum(self._recent) / len(self._recent)
        return rest if self._max_seconds is None else max(0.0, min(rest, self._max_seconds - self._spent))


def plain(iteration: int, num_iterations: int, values: Mapping[str, float], remaining: float) -> str:
    """Names and numbers, for logs: `iteration 3/4  outcome 0.198  ...  2.2s (rollout 1.2, update 0.7)  eta 0:02`."""
    parts = [f"iteration {iteration}/{num_iterations}"]
    parts += [f"{label} {values[name]:.3f}" for label, name in SHOWN.items() if name in values]
    parts.append(f"{values['time/iteration_seconds']:.1f}s" + _phases(values))
    return "  ".join([*parts, f"eta {duration(remaining)}"])


def evaluated(record: Mapping[str, Any]) -> str:
    """`evaluation at iteration 5 (training): dev, 20 tasks, success 0.450 [0.26, 0.66], score 0.512, 6.2 turns`.

    In brackets: Wilson's 95 % interval of the success over tasks.
    """
    counted = record["num_tasks"] - record["num_failed"]
    head = f"evaluation at iteration {record['iteration']} ({record['label']}): {record['split']}, {counted} tasks"
    if "success" not in record:
        return f"{head}, every episode failed"
    low, high = wilson_interval(record["success"], counted)
    return (
        f"{head}, success {record['success']:.3f} [{low:.2f}, {high:.2f}], score {record['score']:.3f}, "
        f"{record['turns']:.1f} turns"
    )


def heading(values: Mapping[str, float]) -> str:
    """The names above the columns of what this run measures."""
    names = "".join(f"{label:>9}" for label, name in SHOWN.items() if name in values)
    return f"{'iteration':>11}{names}{'seconds':>10}{'left':>9}   where the time went"


def columns(iteration: int, num_iterations: int, values: Mapping[str, float], remaining: float) -> str:
    """The numbers under `heading`."""
    numbers = "".join(f"{_number(values[name]):>9}" for name in SHOWN.values() if name in values)
    place = f"{iteration}/{num_iterations}"
    seconds = f"{values['time/iteration_seconds']:.1f}"
    return f"{place:>11}{numbers}{seconds:>10}{duration(remaining):>9}   {_phases(values).strip(' ()')}"


def _number(value: float) -> str:
    """Three decimals, and what rounds to nothing in powers of ten."""
    return f"{value:.0e}" if 0 < abs(value) < 0.0005 else f"{value:.3f}"


def _phases(values: Mapping[str, float]) -> str:
    """` (rollout 4.1, update 2.1)`: phases that took more than a twentieth of the iteration, longest first."""
    least = values["time/iteration_seconds"] / 20
    spent = sorted(((values.get(name, 0.0), label) for label, name in PHASES.items()), reverse=True)
    shown = [f"{label} {seconds:.1f}" for seconds, label in spent if seconds > least]
    return f" ({', '.join(shown)})" if shown else ""


def _dim(text: str) -> str:
    return text if "NO_COLOR" in os.environ else f"\x1b[2m{text}\x1b[0m"
