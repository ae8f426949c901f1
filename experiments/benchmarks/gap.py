"""`python -m hsg.experiments.benchmarks.gap --model smollm2`: the sampler's log-probs against those of the update.

    rows    conversations of two turns, sampled by the rollout's own decoder, in its weights
    gap     the update's own packed forward less the sampler's log-probs
    noise   the probe of gap.py on the same rows

Prints one JSON line: nats and what the bound of gap.py says to them.  `--fault` plants an error that the bound is there for:

    mask         the sampler does not see the first tokens        positions  ... counts them anew in the second turn
    temperature  the update scores all tokens at T = 1            weights    ... has moved on by some optimizer steps

Deliberately absent: training; the weights are those of the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import torch

from hsg.batch import Row
from hsg.config.loading import make_config
from hsg.engine import generation
from hsg.engine.generation import Decoder
from hsg.engine.precision import compute_weights
from hsg.engine.seeds import make_generator
from hsg.learner import Learner
from hsg.measure.gap import gap_of
from hsg.model.fit import fit_of
from hsg.model.policy import Policy
from hsg.ranks.distributed import Distributed
from hsg.run.build import load_policy
from hsg.text.chat import Conversation
from hsg.types import ACTION, Tokens

QUESTIONS = (
    "You are in a house with many rooms and look for a key. Say what you would do first, and why.",
    "Explain to a child how a lock works.",
    "Write a short story about a lamp that nobody could switch off.",
    "List ten things that a traveller should not forget, each with a reason.",
    "Which is larger, the sum or the product of 3, 4 and 5? Show every step.",
    "Describe the way from the hall to the attic of an old house.",
)
OBSERVATION = "The trunk in the attic is empty, and the ladder is broken. What now?"
FAULTS = ("none", "mask", "temperature", "positions", "weights")
HIDDEN, STALE_STEPS, STALE_LR = 8, 4, 1e-4


def sample_rows(policy: Policy, num_rows: int, tokens: int, temperature: float) -> list[Tokens]:
    """Rows of two turns of at most `tokens` sampled tokens each."""
    talks = [Conversation(policy.chat.prompt(QUESTIONS[row % len(QUESTIONS)])) for row in range(num_rows)]
    generators = [make_generator("gap", row) for row in range(num_rows)]
    decoder = Decoder(policy.model, policy.chat.stop_ids, [talk.ids for talk in talks], **fit_of(policy.model).decoding)
    for turn in range(2):
        if turn:
            for row, talk in enumerate(talks):
                ids = policy.chat.next_user(OBSERVATION, talk.last)
                talk.append_context(ids)
                decoder.append(row, ids)
        said = decoder.sample(
            range(num_rows),
            temperatures=[temperature] * num_rows,
            generators=generators,
            max_new_tokens=[tokens] * num_rows,
        )
        for talk, response in zip(talks, said, strict=True):
            talk.append_response(response.ids, response.logprobs, response.temperatures)
    return [talk.tokens() for talk in talks]


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """A sampler with one of the faults."""
    masks, forward = generation.row_masks, Decoder._logits

    def blind(*given: Any) -> torch.Tensor:
        mask = masks(*given)
        mask[..., : min(HIDDEN, mask.shape[-1] - 1)] = -torch.inf
        return mask

    def anew(decoder: Decoder, ids: Any, positions: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        begin = max(map(len, decoder.rows)) * 2 // 3
        return forward(decoder, ids, torch.where(positions > begin, positions - begin, positions), *given, **more)

    seen = patch.object(generation, "row_masks", blind if fault == "mask" else masks)
    counted = patch.object(Decoder, "_logits", anew if fault == "positions" else forward)
    with seen, counted:
        yield


def move_on(learner: Learner, rows: Sequence[Tokens]) -> None:
    """Some optimizer steps towards what was sampled, of which the sampler does not hear."""
    for group in learner.optimizer.param_groups:
        group["lr"] = STALE_LR
    taught = [Row(row, torch.zeros(len(row.response_mask)), ACTION, i) for i, row in enumerate(rows)]
    for _ in range(STALE_STEPS):
        with learner._attention(learner.model):
            _, logprobs, _ = learner.score(learner.model, taught)
            (-logprobs.sum() / max(1, sum(row.num_sampled for row in rows))).backward()
        learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    given = {"path": options.model, "dtype": options.dtype, "attention": options.attention}
    config = make_config({"model": given, "rollout": {"logprobs": "recomputed"}, "update": {"microbatch_tokens": 2048}})
    torch.manual_seed(0)
    distributed = Distributed()
    policy = load_policy(config, device=distributed.device)
    learner = Learner(config, policy.model, distributed, context_limit=policy.context_limit)
    began = time.perf_counter()
    with compute_weights(policy.model), planted(options.fault):
        rows = sample_rows(policy, options.rows, options.tokens, options.temperature)
    seconds = time.perf_counter() - began
    if options.fault == "temperature":
        rows = [replace(row, temperatures=torch.ones_like(row.temperatures)) for row in rows]
    if options.fault == "weights":
        move_on(learner, rows)
    said, values = "nothing", {}
    try:
        scored = learner.settle_logprobs(rows)
        values = learner._gap_values or {}
        gaps = [
            gap_of(s.trainer_logprobs, s.logprobs, s.response_mask) for s in scored if s.trainer_logprobs is not None
        ]
        said = "a warning" if learner.gap._warned else said
    except RuntimeError as error:
        said, gaps = f"stop: {error}", []
    num_sampled = sum(row.num_sampled for row in rows)
    return {
        "model": options.model, "dtype": str(policy.model.compute_dtype), "temperature": options.temperature,
        "fault": options.fault, "tokens": num_sampled, "noise": asdict(learner.gap.noise or learner.gap.spread([])),
        **values, "bias": float(torch.cat(gaps).mean()) if gaps else None, "said": said,
        "sampling_seconds": round(seconds, 1),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as model.path")
    parser.add_argument("--dtype", default="bfloat16", help="as model.dtype")
    parser.add_argument("--attention", default="auto", help="as model.attention")
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48, help="of each of two responses, at most")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--fault", choices=FAULTS, nargs="+", default=["none"])
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for fault in options.fault:
        for temperature in options.temperature:
            one = argparse.Namespace(**{**vars(options), "fault": fault, "temperature": temperature})
            print(json.dumps(measure(one)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
