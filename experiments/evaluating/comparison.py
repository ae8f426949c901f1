"""Two evaluations side by side: may they be compared at all, in what else do they differ, is the difference one?

    episodes    which they are and where they end (WORLDS): the same in both, else the comparison is refused
    the rest    temperature, prompts, algorithm ...: named beside the figures, which are then not of the weights alone

Deliberately absent: playing anything, comparisons of means of different tasks.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hsg.config.checks import require
from hsg.experiments.evaluating.samples import is_count, is_share, is_text
from hsg.measure.intervals import paired_test

WORLDS = (
    "environment.name", "environment.options", "seed", "rollout.max_turns", "rollout.max_tokens",
    "rollout.max_parse_failures",
)  # fmt: skip
"""Settings that decide what an episode is; its task is matched by name."""
WEIGHTS = ("model.path", "model.identity")
"""What a comparison is of, so that no word is lost on it."""


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Paired comparison of two summaries on the tasks that both have: mean differences (one - other) and p-values.

    ValueError where they share no task.
    """
    theirs = {task["task_id"]: task for task in other["tasks"] if task["num_samples"]}
    pairs = [
        (task, theirs[task["task_id"]]) for task in one["tasks"] if task["num_samples"] and task["task_id"] in theirs
    ]
    if not pairs:
        raise ValueError("--compare must have played tasks of this split, got none; evaluate it on the same split")
    result: dict[str, Any] = {"num_tasks": len(pairs)}
    for name in ("success", "score"):
        differences = [a[name] - b[name] for a, b in pairs]
        result[name] = {
            "difference": statistics.fmean(differences), "p_value": paired_test(differences),
            "better": sum(d > 0 for d in differences), "worse": sum(d < 0 for d in differences),
        }  # fmt: skip
    return result


def check_worlds(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """ValueError where samples of two settings did not meet the same episodes: their differences would not be the models'."""
    for key in WORLDS:
        section = key.partition(".")[0]
        if section == "rollout" and section not in theirs:  # a result of an older hsg; the comparison says so
            continue
        require(
            _at(theirs, key) == _at(mine, key),
            "--compare",
            f"played with {key} {_at(mine, key)!r}",
            _at(theirs, key),
            "evaluate it with that, by --set",
        )


def other_settings(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, list[Any]] | None:
    """Dotted name -> [mine, theirs] of all else that differs, the weights aside; None where a result does not say."""
    if "rollout" not in theirs:
        return None
    return {key: [a, b] for key, a, b in _differing(mine, theirs) if key not in WEIGHTS}


def told(differing: Mapping[str, list[Any]] | None) -> str:
    """What `other_settings` found, in one line; long values are not shown."""
    if differing is None:
        return "unknown; the other result, of an older version, says environment and seed alone"
    short = {key: [repr(value) for value in both] for key, both in differing.items()}
    return ", ".join(
        key + (f" {mine} (theirs {theirs})" if max(len(mine), len(theirs)) <= 40 else "")
        for key, (mine, theirs) in short.items()
    )


def _at(settings: Any, key: str) -> Any:
    for name in key.split("."):
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings


def _differing(mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key in sorted({*mine, *theirs}):
        a, b = mine.get(key), theirs.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _differing(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key}", a, b


def read_result(path: Path) -> dict[str, dict[str, Any]]:
    """Split -> tasks and settings of a file that `hsg evaluate` wrote. ValueError for a file that it has not."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        problem = _problem(summary)
    except (OSError, ValueError, RecursionError) as error:
        problem = str(getattr(error, "strerror", None) or error)
    if problem is not None:
        raise ValueError(f"--compare must be a result of hsg evaluate, got {str(path)!r}: {problem}; evaluate it again")
    settings = summary.get("settings", summary.get("worlds"))  # `worlds`: environment and seed, all that was kept once
    return {summary["split"]: {"tasks": summary["tasks"], "settings": settings}}


def _problem(summary: Any) -> str | None:
    """What is wrong with a result, or None: what is read here is used in figures."""
    if not isinstance(summary, dict):
        return "it holds no mapping"
    if not is_text(summary.get("split")):
        return f"its split is {summary.get('split')!r:.100}"
    if not isinstance(summary.get("settings", summary.get("worlds")), dict):
        return "its settings are missing"
    tasks = summary.get("tasks")
    if not isinstance(tasks, list):
        return f"its tasks are {tasks!r:.100}"
    rules = {"task_id": is_text, "num_samples": is_count, "success": is_share, "score": is_share}
    seen = set()
    for number, task in enumerate(tasks, 1):
        if not isinstance(task, dict):
            return f"task {number} is {task!r:.100}"
        for name, holds in rules.items():
            broken = (
                name in ("success", "score") and task["num_samples"] == 0
            )  # all its samples: no figure, not compared
            if not holds(task.get(name)) and not broken:
                return f"{name} of task {number} is {task.get(name)!r:.100}"
        if task["task_id"] in seen:
            return f"task_id of task {number} is {task['task_id']!r:.100}, which is there already"
        seen.add(task["task_id"])
    return None
