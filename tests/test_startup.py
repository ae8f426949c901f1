"""What a command imports before it has something to compute; modules are counted, not seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "accelerate", "peft", "matplotlib", "safetensors", "numpy")

PROGRAM = """
import json, sys
from hsg.experiments.cli import main
try:
    status = main(sys.argv[2:])
except SystemExit as left:
    status = left.code
print(json.dumps([status, [name for name in sys.argv[1].split() if name in sys.modules]]))
"""

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "vocab_size": 100,
}  # fmt: skip


def command(*arguments: str) -> tuple[int, list[str], str]:
    """(exit status, heavy modules that were imported, standard error) of `hsg` in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, " ".join(HEAVY), *arguments], capture_output=True, text=True, timeout=120
    )
    status, imported = json.loads(run.stdout.splitlines()[-1])
    return status, imported, run.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--set", "typo=1"], "typo must be a known key"),
        (["train", "--set", "advantage.estimator=groop"], "advantage.estimator must be one of "),
        (["train", "--set", "num_tasks=0"], "num_tasks must be "),
        (["train", "--config", "no/such.yaml"], "--config must be "),
        (["plan", "--set", "typo=1"], "typo must be a known key"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_said_before_anything_is_loaded(arguments: list[str], said: str) -> None:
    status, imported, error = command(*arguments)
    assert (status, imported) == (2, [])
    assert said in error


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_loads_nothing(arguments: list[str]) -> None:
    assert command(*arguments)[:2] == (0, [])


@pytest.mark.parametrize("model", ["nano", "Qwen/Qwen2.5-7B-Instruct", "folder"])
def test_a_plan_of_a_known_model_loads_nothing(model: str, tmp_path: Path) -> None:
    if model == "folder":
        (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
        model = str(tmp_path)
    status, imported, error = command("plan", "--tflops", "100", "--set", f"model.path={model}")
    assert (status, imported) == (0, []), error


def test_what_counts_as_heavy_is_found_where_it_is_imported(tmp_path: Path) -> None:
    """A plan of a model that no formula knows: else the tests above could pass by looking at nothing."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": 8, "n_head": 2}', encoding="utf-8")
    status, imported, _ = command("plan", "--tflops", "100", "--set", f"model.path={tmp_path}")
    assert status == 0
    assert {"torch", "transformers"} <= set(imported)


def test_the_names_known_without_torch_are_those_there_are() -> None:
    """Read before the functions are imported, in a process where no test has added one of its own."""
    program = """
from hsg.crediting.names import ESTIMATOR_NAMES
before = dict(ESTIMATOR_NAMES)
from hsg.crediting.estimators import ESTIMATORS
assert list(before) == list(ESTIMATORS), (before, list(ESTIMATORS))
assert before == ESTIMATOR_NAMES, (before, ESTIMATOR_NAMES)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
