"""States of recurrent layers by row: ragged rows, shared prompts, rows that stop and come back, as without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hsg.engine.generation import Decoder
from hsg.engine.seeds import make_generator
from hsg.engine.states import StateCache, has_states
from hsg.model.twin import make_twin

KINDS = {
    "mamba": {}, "mamba2": {}, "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "qwen3_next": {}, "jamba": {"use_mamba_kernels": False},
}  # fmt: skip
STEPWISE = ("mamba", "jamba")
"""Those whose code takes several tokens only at the beginning of a state."""


def played(model: Any, **options: Any) -> tuple[list[list[int]], list[float]]:
    """Rows and all sampled log-probs of three turns: 3 rows of 5, of two prompts, in other orders, with other lengths."""
    prompts = [[10, 11, 12, 13, 14]] * 2 + [[10, 11, 12, 7]] + [[20, 21]] * 2
    decoder = Decoder(model, (), prompts, shared=[0, 0, 0, 1, 1], **options)
    generators = [make_generator("states", row) for row in range(5)]
    logprobs: list[float] = []
    for turn, asked in enumerate(((0, 1, 2, 3, 4), (4, 1, 2), (2, 0, 4, 3))):
        for row in asked if turn else ():
            decoder.append(row, list(range(30, 31 + (row + turn) % 4)))
        sampled = decoder.sample(
            asked,
            temperatures=[0.8] * len(asked),
            generators=[generators[row] for row in asked],
            max_new_tokens=[1 + (row + turn) % 4 for row in asked],
        )
        logprobs += [value for one in sampled for value in one.logprobs]
    assert options.get("use_cache") is False or isinstance(decoder.cache, StateCache)
    return decoder.rows, logprobs


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_states_are_sampled_as_without_a_cache(kind: str) -> None:
    model = make_twin(AutoConfig.for_model(kind, **KINDS[kind]))
    assert has_states(model)
    rows, logprobs = played(model, stepwise=kind in STEPWISE)
    slow_rows, slow_logprobs = played(model, use_cache=False)
    assert rows == slow_rows
    assert logprobs == pytest.approx(slow_logprobs, abs=1e-4)


def test_states_are_copied_swapped_and_stay_with_their_rows() -> None:
    model = make_twin(AutoConfig.for_model("mamba2"))
    cache = StateCache(model, 3, model.config.num_hidden_layers, 8, model.device)
    layer = cache._states[0]
    layer.stored["recurrent", 0] = torch.tensor([[1.0], [2.0], [3.0]])
    cache.copy([0], [2], 5)
    assert layer.stored["recurrent", 0].flatten().tolist() == [1, 2, 1]
    cache.swap(0, 1, 5)
    assert layer.stored["recurrent", 0].flatten().tolist() == [2, 1, 1]


def test_a_model_without_states_has_the_plain_cache() -> None:
    model = make_twin(AutoConfig.for_model("llama"))
    assert not has_states(model)
    assert not isinstance(Decoder(model, (), [[1, 2]]).cache, StateCache)
