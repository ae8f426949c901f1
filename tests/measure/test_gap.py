"""The gap between sampler and training forward: its numbers by hand, what it may be, and faults that must not pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import tiny_model

from hsg.batch import Row
from hsg.config.loading import make_config
from hsg.engine.generation import Decoder
from hsg.engine.precision import compute_weights
from hsg.engine.seeds import make_generator
from hsg.learner import Learner
from hsg.measure import gap as gap_module
from hsg.measure.gap import GapCheck, Spread, gap_of, importance_of
from hsg.ranks.distributed import Distributed
from hsg.types import ACTION, Tokens


def check(model: Any = None, **given: Any) -> GapCheck:
    model = tiny_model("qwen2", dtype=torch.float32) if model is None else model
    return GapCheck(make_config(given), model, Distributed())


def half_model(kind: str = "qwen2") -> Any:
    model = tiny_model(kind, dtype=torch.float32)
    model.compute_dtype = torch.bfloat16
    return model


def test_numbers_by_hand() -> None:
    """Gaps ln 2, -ln 4, 0, 0 in two parts: ratios 2, 1/4, 1, 1; two of four past a clip of 0.2.

    Weights cut at 2: 2, 1/4, 1, 1, so that the tokens are worth (17/4)^2 / (4 + 1/16 + 2) of 4.
    """
    two, four = torch.tensor(2.0).log(), torch.tensor(4.0).log()
    one = check(loss={"clip_low": 0.2, "clip_high": 0.2}, rollout={"max_logprob_gap": 9.0})
    found = one([torch.tensor([two, -four]), torch.zeros(2)])
    assert found["rollout/logprob_gap_mean"] == pytest.approx((two + four).item() / 4)
    assert found["rollout/logprob_gap_max"] == pytest.approx(four.item())
    assert found["rollout/logprob_gap_clipped"] == 0.5
    assert found["rollout/logprob_gap_ess"] == pytest.approx(4.25**2 / (6.0625 * 4))
    masked = check(loss={"importance": "masked"}, rollout={"max_logprob_gap": 9.0, "logprobs": "recomputed"})
    found = masked([torch.tensor([two * 0.99, -four]), torch.zeros(2)])
    weight = 2**0.99
    assert found["rollout/logprob_gap_ess"] == pytest.approx((weight + 2) ** 2 / ((weight**2 + 2) * 4))


def test_where_the_forward_is_not_finite_another_rule_holds() -> None:
    nan = float("nan")
    mask = torch.tensor([True, True, True, False])
    gap = gap_of(torch.tensor([nan, -1.0, -2.0, -3.0]), torch.tensor([-1.0, nan, -1.5, -9.0]), mask)
    assert gap.tolist() == [float("inf"), -0.5]


def test_no_tokens_no_gap() -> None:
    found = check()([])
    assert (found["rollout/logprob_gap_mean"], found["rollout/logprob_gap_max"]) == (0.0, 0.0)
    assert "rollout/logprob_gap_ess" not in found


@pytest.mark.parametrize(
    ("half", "noise", "stops_above"),
    [
        (False, 0.0, 4e-4),
        (False, 3e-4, 12e-4),
        (False, 1.0, 4e-3),
        (True, 0.0, 0.24),  # both forwards were one: nobody knows what rounding makes
        (True, 0.01, 0.1),
        (True, 0.03, 0.12),
        (True, 1.0, 0.4),
    ],
)
def test_the_bound_is_four_times_the_noise_between_floor_and_ceiling(
    half: bool, noise: float, stops_above: float
) -> None:
    """Floors 1e-4 and 0.025; no noise counts for more than 1e-3 and 0.1, or two wrong forwards would allow a third."""
    one = check(half_model() if half else None)
    one.noise = Spread(mean=noise, p99=noise)
    one([torch.full((5,), 0.99 * stops_above)])
    with pytest.raises(RuntimeError, match=r"must agree within rollout.max_logprob_gap = .*: one of them is another"):
        one([torch.full((5,), 1.01 * stops_above)])


@pytest.mark.parametrize(("noise", "sound", "masked"), [(0.0301, 0.0257, 0.148), (0.0335, 0.0363, 0.161)])
def test_what_was_measured_on_a_real_model_falls_on_the_right_side(noise: float, sound: float, masked: float) -> None:
    """smollm2 in bfloat16, T = 0.7 and 1: a sampler that does not see 8 tokens is 4.8 times the noise, a sound one 1.1."""
    one = check(half_model())
    one.noise = Spread(mean=noise, p99=0.17)
    one([torch.full((5,), sound)])
    with pytest.raises(RuntimeError, match="one of them is another distribution"):
        one([torch.full((5,), masked)])


def test_one_warning_above_three_times_the_noise(capsys: pytest.CaptureFixture[str]) -> None:
    one = check(half_model())
    one.noise = Spread(mean=0.1, p99=0.12)
    one([torch.full((5,), 0.35)])
    assert capsys.readouterr().err == ""
    for _ in range(2):
        one([torch.full((5,), 0.37)])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "differ by 0.37 nats at the 99th percentile" in said


@pytest.mark.parametrize(
    ("rollout", "advice"),
    [
        ({}, "ratios begin with it; rollout.logprobs=auto and loss.importance=truncated would weigh it instead"),
        ({"logprobs": "recomputed"}, "the update leaves it out of account; loss.importance=truncated would weigh it"),
    ],
)
def test_the_warning_says_what_the_update_makes_of_the_gap(
    rollout: dict[str, str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = check(rollout=rollout | {"max_logprob_gap": 9.0})
    one([torch.full((5,), 1.0)])
    assert advice in capsys.readouterr().err


def test_auto_weighs_in_bfloat16_where_the_trainers_logprobs_are_known() -> None:
    full, half = tiny_model("qwen2", dtype=torch.float32), half_model()
    assert importance_of(make_config({}), full) == "none"
    assert importance_of(make_config({}), half) == "truncated"
    several = make_config({"update": {"epochs": 2}, "rollout": {"logprobs": "sampled"}})
    assert importance_of(several, half) == "none"
    with pytest.raises(ValueError, match=r"rollout.logprobs must be auto or recomputed where .*would count twice"):
        make_config({"update": {"epochs": 2}, "rollout": {"logprobs": "sampled"}, "loss": {"importance": "masked"}})


# ------------------------------------------------------------------------------------ sound runs pass, planted faults stop


def sampled_rows(model: Any, temperature: float, *, weights: Any = None) -> list[Tokens]:
    """Rows of 24 sampled tokens each, in the rollout's weights."""
    prompts = [[5, 6, 7, 8, 9, 10 + row] for row in range(12)]
    with compute_weights(model):
        decoder = Decoder(model, (), prompts)
        places = list(range(len(prompts)))
        responses = decoder.sample(
            places,
            temperatures=[temperature] * len(places),
            generators=[make_generator("gap", row) for row in places],
            max_new_tokens=[24] * len(places),
        )
    rows = []
    for prompt, response in zip(prompts, responses, strict=True):
        before = len(prompt) - 1
        mask = torch.tensor([False] * before + [True] * len(response.ids))
        logprobs = torch.cat([torch.zeros(before), torch.as_tensor(response.logprobs, dtype=torch.float32)])
        rows.append(
            Tokens(
                torch.tensor([*prompt, *response.ids]), mask, logprobs,
                torch.where(mask, torch.tensor(temperature), torch.tensor(1.0)),
            )
        )  # fmt: skip
    return rows


def settle(model: Any, rows: list[Tokens]) -> Learner:
    config = make_config({"rollout": {"logprobs": "recomputed"}, "update": {"microbatch_tokens": 512}})
    learner = Learner(config, model, Distributed(), context_limit=64)
    learner.settle_logprobs(rows)
    return learner


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "llama"])
def test_a_sound_sampler_is_not_warned_of(kind: str, half: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = half_model(kind) if half else tiny_model(kind, dtype=torch.float32)
    for temperature in (0.7, 1.0):
        learner = settle(model, sampled_rows(model, temperature))
        assert learner.gap.noise is not None
    assert "another distribution" not in capsys.readouterr().err


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "llama"])
def test_planted_faults_stop(kind: str, half: bool) -> None:
    model = half_model(kind) if half else tiny_model(kind, dtype=torch.float32)
    rows = sampled_rows(model, 0.7)
    wrong_temperature = [replace(row, temperatures=torch.ones_like(row.temperatures)) for row in rows]
    shifted = [
        replace(row, input_ids=torch.cat([row.input_ids[1:2], row.input_ids[1:]])) for row in rows
    ]  # another prompt
    for faulty in (wrong_temperature, shifted):
        with pytest.raises(RuntimeError, match="one of them is another distribution"):
            settle(model, faulty)


def test_the_probe_is_made_once_packed_in_master_weights_and_padded_in_the_samplers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = half_model()
    rows, scored = sampled_rows(model, 1.0), []
    real = gap_module.score

    def score(model: Any, batch: Any, **options: Any) -> Any:
        scored.append((options.get("layout") is not None, {p.dtype for p in model.parameters()}))
        return real(model, batch, **options)

    monkeypatch.setattr(gap_module, "score", score)
    one = check(model, update={"microbatch_tokens": 512})
    for _ in range(2):
        one.probe(model, rows)
    assert scored == [(True, {torch.float32}), (False, {torch.bfloat16})]


def test_the_gap_is_that_of_the_first_step_alone() -> None:
    """Behind it the weights have moved, and the distance is what was learned."""
    model = tiny_model("qwen2", dtype=torch.float32)
    config = make_config(
        {
            "rollout": {"logprobs": "sampled"}, "update": {"epochs": 3, "microbatch_tokens": 512},
            "optimizer": {"lr": 0.05}, "loss": {"importance": "none"},
        }
    )  # fmt: skip
    learner = Learner(config, model, Distributed(), context_limit=64)
    tokens = learner.settle_logprobs(sampled_rows(model, 1.0))
    advantages = [torch.where(t.response_mask, 1.0 - 2 * (i % 2), 0.0) for i, t in enumerate(tokens)]
    values = learner.update([Row(t, a, ACTION, i) for i, (t, a) in enumerate(zip(tokens, advantages, strict=True))], 0)
    assert values["rollout/logprob_gap_max"] < 1e-4
    assert values["update/log_ratio_max"] > 0.1
