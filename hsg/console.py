"""What a person at the terminal sees of a run: a bar while episodes are played, a line when an iteration is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

SHOWN = {
    "outcome": "reward/outcome", "success": "reward/success", "turns": "rollout/turns", "dead": "advantage/dead_groups",
    "flagged": "judge/flagged_share", "kl": "update/approx_kl", "entropy": "update/entropy", "clip": "update/clip_fraction",
}  # fmt: skip


def episode_bar(description: str, total: int, *, quiet: bool) -> Any:
    """A progress bar, where stderr is a terminal."""
    return tqdm(total=total, desc=description, unit="episode", leave=False, disable=True if quiet else None)


def print_line(iteration: int, num_iterations: int, values: Mapping[str, float]) -> None:
    """One iteration's numbers, beside the bar and not through it."""
    parts = [f"{label} {values[name]:.3f}" for label, name in SHOWN.items() if name in values]
    seconds = values["time/iteration_seconds"]
    tqdm.write(f"iteration {iteration}/{num_iterations}  {'  '.join(parts)}  {seconds:.1f}s")
