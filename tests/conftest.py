"""Shared fixtures: one torch thread, and a nano model that has learned to play the guessing game of fakes.py."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def guesser_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, warm-started in a few seconds: it answers in tags and guesses at random."""
    from fakes import HINTS, NUMBERS, teach_guessing

    from hsg.config.options import NanoConfig
    from hsg.model.nano import build_nano

    texts = [f"Guess. It is {hint}." for hint in HINTS] + ["Too low, go on.", "No.", "Right.", "Actions: 0, 1, 2"]
    texts += [f"try {n}\n<strategy>?\n{n} <action>?<judgment>?" for n in NUMBERS]
    nano = NanoConfig(vocab_size=360, hidden_size=32, num_layers=2, num_heads=2, num_key_value_heads=1,
                      intermediate_size=64, max_position_embeddings=512)  # fmt: skip
    folder = build_nano(texts, nano, tmp_path_factory.mktemp("guesser") / "model")
    teach_guessing(str(folder))
    return folder


@pytest.fixture(scope="session")
def guesser(guesser_folder: Path) -> Any:
    """The same as a Policy in float64. Do not train it."""
    from dataclasses import replace

    from hsg.config.options import Config, ModelConfig
    from hsg.run.build import load_policy

    return load_policy(replace(Config(), model=ModelConfig(dtype="float64")), str(guesser_folder), "cpu")
