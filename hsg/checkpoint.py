"""Checkpoints that another program can load: a Hugging Face folder, whole or not there.

    checkpoints/iteration_000010/model      weights (safetensors), config and tokenizer
    checkpoints/iteration_000010/state.json iteration and optimizer steps

Written aside and renamed, so a process killed half-way leaves the older checkpoints as they were.
Deliberately absent for now: optimizer state and resume.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def save_checkpoint(
    run: Path, iteration: int, model: Any, tokenizer: Any, state: dict[str, Any], keep: int | None
) -> Path:
    """Save under checkpoints/iteration_<n> and forget the oldest beyond `keep`. Returns the checkpoint's folder."""
    folder = run / "checkpoints" / f"iteration_{iteration:06d}"
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    save_model(temporary / "model", model, tokenizer)
    (temporary / "state.json").write_text(json.dumps({"iteration": iteration, **state}), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    if keep is not None:
        # The initial policy is what the first records were sampled from; it is not one of the newest.
        others = sorted(p for p in folder.parent.glob("iteration_*") if p.name != "iteration_000000")
        for old in others[:-keep]:
            shutil.rmtree(old)
    return folder


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """A folder that AutoModelForCausalLM.from_pretrained loads, tokenizer beside the weights."""
    folder.mkdir(parents=True)
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
