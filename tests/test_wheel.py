"""What `pip install hsg` brings: one name, with all its files, beside a project whose folders bear the names of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MINE = """
from hsg.protocol import Environment, StepResult, Task, TaskSet


class Door(Environment):
    outcome = 0.0

    def start(self):
        return "A door."

    def step(self, action):
        gain = float(action == "open") * (1.0 - self.outcome)
        self.outcome += gain
        done = self.outcome == 1.0
        return StepResult("Open." if done else "Shut.", gain, done, done, self.outcome)


class Doors(TaskSet):
    name, splits = "doors", ("train", "dev")

    def tasks(self, split):
        if split not in self.splits:
            raise ValueError(f"split must be one of {', '.join(self.splits)}, got {split!r}")
        return [Task(f"door-{split}-{i}", split) for i in range(3)]

    def create(self, task, seed):
        return Door()


def make_task_set():
    return Doors()
"""
TRAIN = """
environment: {name: toy}
num_tasks: 2
num_strategies: 2
num_rollouts: 2
sigma: 1.5
prompts: {style: terse}
strategy: {max_tokens: 6}
rollout: {max_turns: 2, max_action_tokens: 6}
judge: {max_tokens: 6}
train: {iterations: 2}
evaluation: {num_tasks: 2}
log: {wandb: disabled, quiet: true}
warmstart: {num_tasks: 8, seconds: 3600, epochs: 0.1,
            nano: {vocab_size: 400, hidden_size: 32, num_layers: 1, num_heads: 2, num_key_value_heads: 1, intermediate_size: 64}}
"""


def run(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """With nothing of this checkout in sight."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    settings = {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}
    return subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the tracked files alone: what an older build left in build/lib would slip in."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("the sources stand in no git repository")
    for name in filter(None, listed.stdout.split("\0")):
        if os.path.lexists(ROOT / name):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    out = source.parent / "dist"
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
    done = run(pip, source)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def project(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a student's folder, the bin of a venv that has the wheel and our dependencies, but not the editable project)."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("environments", "experiments"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("MINE = True\n")
    (folder / "environments" / "doors.py").write_text(MINE)
    (folder / "mine.yaml").write_text(TRAIN)
    venv = folder / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = Path(next(venv.glob("lib/python*/site-packages")))
    # A path in a .pth file is searched, but the .pth files in there (the editable install is one) are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python")]
    done = run([*pip, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)], folder)
    assert done.returncode == 0, done.stderr
    return folder, venv / "bin"


@pytest.mark.slow
def test_a_wheel_occupies_one_name_and_has_every_file(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"hsg"}
    listed = subprocess.run(["git", "ls-files", "hsg", "environments", "experiments"], cwd=ROOT, capture_output=True)
    tracked = {name for name in listed.stdout.decode().splitlines() if (ROOT / name).is_file()}
    wanted = {name if name.startswith("hsg/") else f"hsg/{name}" for name in tracked}
    assert sorted(wanted - set(names) - {"hsg/experiments/benchmarks/README.md"}) == []


@pytest.mark.slow
def test_a_project_with_folders_of_our_names_is_left_alone(project: tuple[Path, Path]) -> None:
    folder, programs = project
    said = run([str(programs / "python"), "-c", "import environments, experiments, hsg; print(environments.MINE, "
                "experiments.MINE, hsg.__file__)"], folder)  # fmt: skip
    assert said.stdout.startswith("True True "), said.stderr
    assert str(folder / ".venv") in said.stdout, "the editable checkout must not be what is tested"
    own = run([str(programs / "hsg"), "check-env", "environments.doors"], folder, PYTHONPATH=".")
    assert (own.returncode, own.stdout) == (0, "environments.doors: nothing is wrong\n"), own.stderr
    ours = run([str(programs / "hsg"), "check-env", "toy"], folder)
    assert (ours.returncode, ours.stdout) == (0, "toy: nothing is wrong\n"), ours.stderr


@pytest.mark.slow
def test_the_installed_command_trains_beside_it(project: tuple[Path, Path]) -> None:
    folder, programs = project
    trained = run([str(programs / "hsg"), "train", "--config", "mine.yaml", "--set", "run.name=a"], folder)
    assert trained.returncode == 0, trained.stderr
    launch = [str(programs / "python"), "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "-m"]
    launched = run(
        [*launch, "hsg.experiments.run", "--config", "mine.yaml", "--set", "run.name=b"], folder, PYTHONPATH="."
    )
    assert launched.returncode == 0, launched.stderr
    for name in ("a", "b"):
        assert len((folder / "runs" / name / "metrics.jsonl").read_text().splitlines()) == 2
