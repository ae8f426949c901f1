"""Tokens as a record keeps them: the sampler's log-probs, and the trainer's under a name of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fakes import make_tokens

from hsg.run.records import TOKEN_FIELDS, _token_record


def test_the_trainers_logprobs_do_not_replace_the_samplers() -> None:
    sampled = make_tokens((2, False), (3, True))
    advantages = torch.zeros(4)
    assert tuple(_token_record(sampled, advantages, True)) == TOKEN_FIELDS  # none known, no key
    both = replace(sampled, trainer_logprobs=torch.tensor([9.0, -1.0, -2.0, -3.0]))
    record = _token_record(both, advantages, True)
    assert record["old_logprobs"] == pytest.approx([0.0, -0.02, -0.03, -0.04])
    assert record["trainer_logprobs"] == [0.0, -1.0, -2.0, -3.0]  # nothing where nothing was sampled
    assert _token_record(both, advantages, False)["trainer_logprobs"] == [0.0] * 4  # a row that is not trained
