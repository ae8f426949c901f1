"""Two and three real processes: sharded or not, they do what one does; unequal work and slow worlds never hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import Done, run_ranks
from test_resume import OPTIONS, assert_close_run

TWO = {
    **OPTIONS, "train": {"iterations": 2}, "evaluation": {"every": 1, "num_tasks": 5, "final": True, "without_strategy": True},
    "temperature": {"strategy": 0.9, "action": 1.2},
}  # fmt: skip
ITERATIONS = 2


@pytest.fixture(scope="module")
def root(guesser_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    options = {**TWO, "model": {"path": str(guesser_folder), "dtype": "float64"}, "run": {"dir": str(folder)}}
    (folder / "c.yaml").write_text(yaml.safe_dump(options))
    return folder


def run(root: Path, name: str, *overrides: str, resume: str = "none", **given: Any) -> Done:
    sets = [part for item in (f"run.name={name}", *overrides) for part in ("--set", item)]
    return run_ranks(["--config", str(root / "c.yaml"), *sets, "--resume", resume], root, **given)


def alone(root: Path, *overrides: str) -> Path:
    """The run of one process."""
    folder = root / ("alone" + "".join(c if c.isalnum() else "-" for c in "".join(overrides)))
    if not folder.exists():
        done = run(root, folder.name, *overrides)
        assert done.status == [0], done.output[-3000:]
    return folder


SHARDED = ["distributed.sharding=full"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("weights", ["", "gathered", "sharded"])
def test_any_number_of_ranks_does_what_one_does(root: Path, num_ranks: int, weights: str) -> None:
    """Three tasks on two ranks, five evaluations on three: unequal work. Records, metrics, evaluations and weights agree."""
    overrides = [*SHARDED, f"rollout.weights={weights}"] if weights else []
    name = f"ranks{num_ranks}{weights}"
    done = run(root, name, *overrides, num_ranks=num_ranks)
    assert done.status == [0] * num_ranks, done.output[-3000:]
    assert_close_run(alone(root), root / name, ITERATIONS)
