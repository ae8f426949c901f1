"""hsg.losses against numbers worked out by hand, a slow twin, finite differences by autograd, and properties."""

import itertools
import math

import pytest
import reference
import torch
from reference import T

from hsg.losses import (
    AGGREGATIONS,
    LEVEL_REDUCTIONS,
    count_denominators,
    finish_metrics,
    importance_weights,
    merge_metrics,
    policy_loss,
)

B = 6
COMBINATIONS = list(itertools.product(AGGREGATIONS, LEVEL_REDUCTIONS))


def tensor(values, **kwargs):
    return torch.tensor(values, dtype=torch.float64, **kwargs)


def close(actual, expected, tolerance=1e-7):
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=0,
        atol=tolerance,
    )


@pytest.fixture
def batch():
    """Rows of unequal length, two of strategy tokens only, one that holds both levels, one without any token."""
    g = torch.Generator().manual_seed(1)

    def normal():
        return torch.randn(B, T, generator=g, dtype=torch.float64)

    logprobs = -normal().abs()
    mask = torch.rand(B, T, generator=g) < 0.7
    mask[4] = False
    levels = torch.ones(B, T, dtype=torch.long)
    levels[:2] = 0
    levels[3, :4] = 0
    mask[:, 0] = mask[:, 5] = torch.arange(B) != 4
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.3 * normal(),
        "advantages": normal(),
        "response_mask": mask,
        "levels": levels,
        "ref_logprobs": logprobs + 0.3 * normal(),
        "entropy": normal().abs(),
    }


def loss_and_gradient(batch, **options):
    logprobs = batch["logprobs"].clone().requires_grad_()
    loss, metrics = policy_loss(**{**batch, "logprobs": logprobs}, **options)
    loss.backward()
    return loss.detach(), logprobs.grad, metrics


# ------------------------------------------------------------------------------------------------------------ goldens


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "gradient"),
    [
        # -min(r A, clip(r) A) with clip [0.8, 1.3]; its gradient in logprobs is -r A, or 0 on the clipped side.
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.5, 2.0, -2.6, 0.0),  # min(3, 2.6)
        (1.5, -2.0, 3.0, 3.0),  # min(-3, -2.6): a bad token that became likelier is not held back
        (0.5, 2.0, -1.0, -1.0),  # min(1, 1.6): a good token that became rarer is not held back
        (0.5, -2.0, 1.6, 0.0),  # min(-1, -1.6)
        (1.25, 2.0, -2.5, -2.5),  # inside the clip
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_one_token_by_hand(ratio, advantage, expected, gradient):
    logprobs = tensor([[math.log(ratio)]], requires_grad=True)
    one = torch.ones(1, 1)
    loss, metrics = policy_loss(logprobs, torch.zeros(1, 1), advantage * one, one, clip_low=0.2, clip_high=0.3)
    loss.backward()
    close(loss.detach(), expected)
    close(logprobs.grad, [[gradient]])
    finished = finish_metrics(metrics)
    assert finished["clip_fraction"] == float(gradient == 0 and advantage != 0)
    assert finished["ratio"] == pytest.approx(ratio)
    assert finished["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio))
    assert finished["log_ratio_max"] == pytest.approx(abs(math.log(ratio)))


@pytest.mark.parametrize(
    ("estimator", "expected", "gradient"),
    [
        # d = ref - logprobs = log 2.  k3 = 2 - log 2 - 1, gradient 1 - exp(d) = -1; k2 = log(2)^2 / 2, gradient -d.
        ("k3", 1 - math.log(2), -1.0),
        ("k2", math.log(2) ** 2 / 2, -math.log(2)),
    ],
)
def test_kl_by_hand(estimator, expected, gradient):
    logprobs = tensor([[-math.log(2)]], requires_grad=True)
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    loss, metrics = policy_loss(
        logprobs, logprobs.detach(), zero, one, ref_logprobs=zero, kl_coef=0.5, kl_estimator=estimator
    )
    loss.backward()
    close(loss.detach(), 0.5 * expected)
    close(logprobs.grad, [[0.5 * gradient]])
    assert finish_metrics(metrics)["kl"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("aggregation", "separate", "joint"),
    [
        # At ratio 1 the token losses are -A:   row 0, strategy: 1 2      row 1, action: 3 _      row 2, action: 4 8
        #                                                                                        row 3: no token
        ("token-mean", 3 / 2 + 10 * 15 / 3, 18 / 5),
        ("seq-mean-token-mean", 1.5 + 10 * (3 + 6) / 2, (1.5 + 3 + 6) / 3),
        ("seq-mean-token-sum", 3 + 10 * (3 + 12) / 2, (3 + 3 + 12) / 3),
        ("seq-mean-token-sum-norm", 3 / 4 + 10 * (3 + 12) / 2 / 4, (3 + 3 + 12) / 3 / 4),  # token_limit 4
    ],
)
def test_reductions_by_hand(aggregation, separate, joint):
    advantages = -tensor([[1, 2], [3, 99], [4, 8], [99, 99]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]])
    levels = torch.tensor([[0, 0], [1, 1], [1, 1], [1, 1]])
    zero = torch.zeros(4, 2, dtype=torch.float64)
    options = {"aggregation": aggregation, "token_limit": 4, "action_weight": 10.0}
    for reduction, expected in (("separate", separate), ("joint", joint)):
        loss, _ = policy_loss(zero, zero, advantages, mask, levels=levels, level_reduction=reduction, **options)
        close(loss, expected)
    close(policy_loss(zero, zero, advantages, mask, **options)[0], joint)  # one level: the weights do not apply


def test_token_limit_is_the_padded_width_by_default():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    loss, _ = policy_loss(
        torch.zeros(2, 4), torch.zeros(2, 4), -torch.ones(2, 4), mask, aggregation="seq-mean-token-sum-norm"
    )
    close(loss, (2 / 4 + 1 / 4) / 2)


def test_entropy_is_a_bonus_with_gradient():
    zero, mask = torch.zeros(1, 2), torch.tensor([[1, 0]])
    entropy = torch.tensor([[3.0, math.inf]], requires_grad=True)
    loss, metrics = policy_loss(zero, zero, zero, mask, entropy=entropy, entropy_coef=0.1)
    loss.backward()
    close(loss.detach(), -0.3)
    close(entropy.grad, [[-0.1, 0.0]])
    assert finish_metrics(metrics)["entropy"] == 3.0


# --------------------------------------------------------------------------------------------------------- slow twin


@pytest.mark.parametrize(("aggregation", "level_reduction"), COMBINATIONS)
@pytest.mark.parametrize("kl_estimator", ["k3", "k2"])
def test_loss_equals_loops(batch, aggregation, level_reduction, kl_estimator):
    options = {
        "clip_low": 0.1,
        "clip_high": 0.25,
        "kl_coef": 0.3,
        "kl_estimator": kl_estimator,
        "aggregation": aggregation,
        "level_reduction": level_reduction,
        "token_limit": 11,
    }
    actual, _, _ = loss_and_gradient(batch, **options, strategy_weight=0.7, action_weight=1.9)
    lists = {name: value.tolist() for name, value in batch.items() if name != "entropy"}
    mask = lists.pop("response_mask")
    close(actual, reference.policy_loss(mask=mask, level_weights=(0.7, 1.9), **lists, **options))


@pytest.mark.parametrize(("aggregation", "level_reduction"), COMBINATIONS)
@pytest.mark.parametrize("importance", ["truncated", "masked"])
def test_weighed_loss_equals_loops(batch, aggregation, level_reduction, importance):
    batch["sampled_logprobs"] = batch["old_logprobs"] + torch.randn(
        B, T, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    options = {
        "clip_low": 0.1,
        "clip_high": 0.25,
        "kl_coef": 0.3,
        "kl_estimator": "k3",
        "aggregation": aggregation,
        "level_reduction": level_reduction,
        "token_limit": 11,
        "importance": importance,
        "importance_cap": 1.5,
    }
    actual, _, metrics = loss_and_gradient(batch, **options, strategy_weight=0.7, action_weight=1.9)
    assert 0.2 < finish_metrics(metrics)["importance_cut"] < 0.9  # both sides of the cap are there
    lists = {name: value.tolist() for name, value in batch.items() if name != "entropy"}
    mask = lists.pop("response_mask")
    close(actual, reference.policy_loss(mask=mask, level_weights=(0.7, 1.9), **lists, **options))


# --------------------------------------------------------------------------------------------------------- properties


@pytest.mark.parametrize(
    ("gap", "truncated", "masked"),
    [
        (0.0, 1.0, 1.0),
        (math.log(1.9), 1.9, 1.9),
        (math.log(2.1), 2.0, 0.0),  # past the cap: cut, or left out
        (math.log(1 / 1.9), 1 / 1.9, 1 / 1.9),
        (math.log(1 / 2.1), 1 / 2.1, 0.0),  # a token the trainer finds rare has a small weight, or none
        (1000.0, 2.0, 0.0),
        (-1000.0, 0.0, 0.0),
        (math.inf, 2.0, 0.0),
    ],
)
def test_importance_weights_by_hand(gap, truncated, masked):
    close(importance_weights(tensor([gap]), "truncated", 2.0), [truncated])
    close(importance_weights(tensor([gap]), "masked", 2.0), [masked])


@pytest.mark.parametrize("importance", ["truncated", "masked"])
def test_a_gap_counts_once(batch, importance):
    """As a constant weight of the first gradient, -w A / tokens: neither in the ratio, nor in the clip, nor in the KL."""
    mask = batch["response_mask"]
    gap = torch.randn(B, T, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    batch["old_logprobs"] = batch["logprobs"]
    batch["sampled_logprobs"] = batch["logprobs"] - gap
    _, gradient, metrics = loss_and_gradient(batch, level_reduction="joint", importance=importance)
    weight = importance_weights(gap, importance, 2.0)
    close(gradient, torch.where(mask, -weight * batch["advantages"], 0.0) / mask.sum())
    finished = finish_metrics(metrics)
    assert finished["clip_fraction"] == 0.0
    assert finished["ratio"] == 1.0
    assert finished["approx_kl"] == 0.0
    assert finished["importance"] == pytest.approx(weight[mask].mean().item())


@pytest.mark.parametrize("importance", ["truncated", "masked"])
def test_a_sampler_without_a_gap_changes_no_bit(batch, importance):
    loss, gradient, _ = loss_and_gradient(batch)
    batch["sampled_logprobs"] = batch["old_logprobs"]
    weighed, its_gradient, _ = loss_and_gradient(batch, importance=importance)
    assert torch.equal(loss, weighed)
    assert torch.equal(gradient, its_gradient)


def test_first_update_has_the_gradient_of_the_policy_gradient(batch):
    batch["old_logprobs"] = batch["logprobs"]
    _, gradient, metrics = loss_and_gradient(batch, level_reduction="joint")
    mask = batch["response_mask"]
    close(gradient, torch.where(mask, -batch["advantages"], 0.0) / mask.sum())
    assert finish_metrics(metrics)["ratio"] == 1.0
    assert finish_metrics(metrics)["approx_kl"] == 0.0


@pytest.mark.parametrize(("aggregation", "level_reduction"), COMBINATIONS)
def test_zero_advantages_give_exactly_zero_gradient(batch, aggregation, level_reduction):
    batch["advantages"] = torch.zeros(B, T, dtype=torch.float64)
    batch["old_logprobs"][0, 0] = -2000.0  # its ratio overflows
    loss, gradient, _ = loss_and_gradient(batch, aggregation=aggregation, level_reduction=level_reduction)
    assert loss == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize(("aggregation", "level_reduction"), COMBINATIONS)
def test_nothing_at_masked_places_is_read(batch, aggregation, level_reduction):
    options = {"aggregation": aggregation, "level_reduction": level_reduction, "kl_coef": 0.1, "entropy_coef": 0.1}
    loss, gradient, metrics = loss_and_gradient(batch, **options)
    hidden = ~batch["response_mask"]
    for filler in (math.nan, math.inf, -math.inf, 1e4, -1e4):
        for name in ("logprobs", "old_logprobs", "advantages", "ref_logprobs", "entropy"):
            changed = {**batch, name: torch.where(hidden, filler, batch[name])}
            assert_same(loss_and_gradient(changed, **options), (loss, gradient, metrics))
        everywhere = {k: torch.where(hidden, filler, v) if v.dtype == torch.float64 else v for k, v in batch.items()}
        everywhere["levels"] = torch.where(hidden, -7, batch["levels"])
        assert_same(loss_and_gradient(everywhere, **options), (loss, gradient, metrics))
    assert (gradient[hidden] == 0).all()


def assert_same(actual, expected):
    assert actual[0].equal(expected[0])
    assert actual[1].equal(expected[1])
    assert finish_metrics(actual[2]) == finish_metrics(expected[2])


def test_padding_filler_rows_and_row_order_change_nothing(batch):
    loss, gradient, metrics = loss_and_gradient(batch, aggregation="seq-mean-token-mean", kl_coef=0.1)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(0))
    padded = {k: torch.cat([v, torch.zeros(B, 3, dtype=v.dtype)], 1)[order] for k, v in batch.items()}
    padded = {k: torch.cat([v, torch.zeros(2, T + 3, dtype=v.dtype)]) for k, v in padded.items()}
    padded_loss, padded_gradient, padded_metrics = loss_and_gradient(
        padded, aggregation="seq-mean-token-mean", kl_coef=0.1
    )
    close(padded_loss, loss, 1e-12)
    close(padded_gradient[:B, :T], gradient[order], 1e-12)
    assert finish_metrics(padded_metrics) == pytest.approx(finish_metrics(metrics))


@pytest.mark.parametrize(("aggregation", "level_reduction"), COMBINATIONS)
@pytest.mark.parametrize("with_levels", [True, False])
@pytest.mark.parametrize("split", [[1] * 6, [2, 2, 2], [1, 5], [3, 2, 1]])
def test_micro_batches_add_up(batch, aggregation, level_reduction, with_levels, split):
    # B15.  Some micro-batches here hold no token, or none of one level.
    options = {"aggregation": aggregation, "level_reduction": level_reduction}
    shared = {"kl_coef": 0.1, "entropy_coef": 0.01, "token_limit": T, "strategy_weight": 0.5, **options}
    if not with_levels:
        batch["levels"] = None
    loss, gradient, metrics = loss_and_gradient(batch, **shared)
    for order in (torch.arange(B), torch.arange(B).flip(0)):
        parts = [{k: v if v is None else v[rows] for k, v in batch.items()} for rows in order.split(split)]
        counts = sum(count_denominators(p["response_mask"], levels=p["levels"], **options) for p in parts)
        results = [loss_and_gradient(part, **shared, denominators=counts) for part in parts]
        close(sum(result[0] for result in results), loss, 1e-12)
        close(torch.cat([result[1] for result in results]), gradient[order], 1e-12)
        merged = merge_metrics(result[2] for result in results)
        assert finish_metrics(merged) == pytest.approx(finish_metrics(metrics))


def test_denominators_of_any_form_and_below_one(batch):
    # Two ranks whose gradients are averaged: the total is divided by 2, and one strategy row becomes 0.5.
    options = {"aggregation": "seq-mean-token-sum"}
    loss, gradient, _ = loss_and_gradient(batch, **options)
    counts = count_denominators(batch["response_mask"], levels=batch["levels"], **options)
    assert counts.tolist() == [3, 3]  # rows 0 1 3, and 2 3 5: row 3 holds both levels
    for given in (counts / 8, (counts / 8).tolist(), tuple(counts / 8)):
        scaled_loss, scaled_gradient, _ = loss_and_gradient(batch, **options, denominators=given)
        close(scaled_loss, 8 * loss, 1e-12)
        close(scaled_gradient, 8 * gradient, 1e-12)
    joint, _, _ = loss_and_gradient(batch, level_reduction="joint")
    assert count_denominators(batch["response_mask"]).tolist() == [batch["response_mask"].sum()]
    close(loss_and_gradient(batch, level_reduction="joint", denominators=1.0)[0], joint * batch["response_mask"].sum())


@pytest.mark.parametrize(("aggregation", "level_reduction"), COMBINATIONS)
def test_packed_rows_equal_padded_rows(batch, aggregation, level_reduction):
    options = {"aggregation": aggregation, "level_reduction": level_reduction, "token_limit": T, "kl_coef": 0.1}
    loss, gradient, _ = loss_and_gradient(batch, **options)
    lengths = torch.tensor([7, 6, 7, 6, 0, 6])  # position 6 of some rows is filler that packing drops
    keep = torch.arange(T) < lengths.unsqueeze(1)
    batch["response_mask"] = batch["response_mask"] & keep
    loss, gradient, _ = loss_and_gradient(batch, **options)
    packed = {name: value[keep].unsqueeze(0) for name, value in batch.items()}
    row_ids = (torch.arange(B) * 10).unsqueeze(1).expand(B, T)[keep].unsqueeze(0)
    packed_loss, packed_gradient, _ = loss_and_gradient(packed, **options, row_ids=row_ids)
    close(packed_loss, loss, 1e-12)
    close(packed_gradient.squeeze(0), gradient[keep], 1e-12)
    counted = {"aggregation": aggregation, "level_reduction": level_reduction}
    padded_counts = count_denominators(batch["response_mask"], levels=batch["levels"], **counted)
    packed_counts = count_denominators(packed["response_mask"], levels=packed["levels"], row_ids=row_ids, **counted)
    assert packed_counts.equal(padded_counts)


@pytest.mark.parametrize(("aggregation", "level_reduction"), COMBINATIONS)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_a_batch_without_tokens_gives_zero_and_can_be_backpropagated(aggregation, level_reduction, shape):
    logprobs = torch.full(shape, math.nan, requires_grad=True)
    mask, levels = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.long)
    loss, metrics = policy_loss(
        logprobs, logprobs, logprobs, mask, levels=levels, aggregation=aggregation, level_reduction=level_reduction
    )
    loss.backward()
    assert loss == 0
    assert logprobs.grad.equal(torch.zeros(shape))
    assert finish_metrics(metrics) == {}


def test_an_empty_level_leaves_the_other_alone(batch):
    batch["levels"] = torch.ones_like(batch["levels"])
    loss, gradient, metrics = loss_and_gradient(batch)
    joint_loss, joint_gradient, _ = loss_and_gradient(batch, level_reduction="joint")
    close(loss, joint_loss, 1e-12)
    close(gradient, joint_gradient, 1e-12)
    assert "loss_strategy" not in finish_metrics(metrics)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_clipped_token_may_overflow(dtype):
    # exp(2000) is infinite in any dtype; the token is clipped, so its loss is -(1 + clip_high) A and its gradient 0.
    logprobs = torch.tensor([[0.0, -1.0]], dtype=dtype, requires_grad=True)
    old_logprobs = torch.tensor([[-2000.0, -1.0]], dtype=dtype)
    loss, _ = policy_loss(logprobs, old_logprobs, torch.ones(1, 2), torch.ones(1, 2))
    loss.backward()
    close(loss.detach(), -(1.2 + 1) / 2, 1e-6)
    close(logprobs.grad, [[0.0, -0.5]])
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_float32_equals_float64(batch):
    options = {"kl_coef": 0.1, "aggregation": "seq-mean-token-mean"}
    expected, _, _ = loss_and_gradient(batch, **options)
    single = {name: value.float() if value.dtype == torch.float64 else value for name, value in batch.items()}
    single["advantages"] = batch["advantages"]  # float64, as hsg.crediting.advantages returns them
    actual, _, _ = loss_and_gradient(single, **options)
    assert actual.dtype == torch.float32
    close(actual, expected, 1e-5)


def test_only_logprobs_and_entropy_get_a_gradient(batch):
    names = ("old_logprobs", "advantages", "ref_logprobs", "logprobs")
    leaves = {name: batch[name].clone().requires_grad_() for name in names}
    policy_loss(**{**batch, **leaves}, kl_coef=0.1)[0].backward()
    assert [name for name in names if leaves[name].grad is not None] == ["logprobs"]


def test_metrics_of_levels_by_hand():
    # Strategy tokens at ratio 1 and 2 (clipped), action tokens at 2 (A < 0: free) and 0.5 (A < 0: clipped).
    old = torch.zeros(2, 2)
    logprobs = torch.tensor([[1.0, 2.0], [2.0, 0.5]]).log()
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    levels = torch.tensor([[0, 0], [1, 1]])
    finished = finish_metrics(policy_loss(logprobs, old, advantages, torch.ones(2, 2), levels=levels)[1])
    assert finished["clip_fraction_strategy"] == finished["clip_fraction_action"] == finished["clip_fraction"] == 0.5
    assert finished["loss_strategy"] == pytest.approx(-(1 + 1.2) / 2)
    assert finished["loss_action"] == pytest.approx((2 + 0.8) / 2)
    assert finished["ratio"] == pytest.approx(5.5 / 4)
    assert finished["log_ratio_max"] == pytest.approx(math.log(2))


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_estimator": "k1"}, "k1 as a term of the reward"),
        ({"kl_estimator": "k4"}, "kl_estimator must be one of k3, k2"),
        ({"aggregation": "mean"}, "aggregation must be one of token-mean"),
        ({"level_reduction": "both"}, "level_reduction must be one of separate, joint"),
        ({"kl_coef": 0.1, "ref_logprobs": None}, "ref_logprobs must be given"),
        ({"entropy_coef": 0.1, "entropy": None}, "entropy must be given"),
        ({"clip_low": -0.1}, "clip_low and clip_high must be"),
        ({"token_limit": 0}, "token_limit must be"),
        ({"advantages": torch.zeros(B)}, r"advantages must have the shape of logprobs \(6, 7\), got \(6,\)"),
        ({"levels": torch.zeros(B, 1)}, "levels must have the shape"),
        ({"logprobs": torch.zeros(T)}, r"logprobs must be \(B, T-1\)"),
        ({"levels": torch.full((B, T), 2)}, r"levels must be 0 \(strategy\) or 1 \(action\)"),
        ({"denominators": [3.0]}, "denominators must be 2 finite"),
        ({"denominators": [3.0, math.nan]}, "denominators must be 2 finite"),
        ({"denominators": [3.0, 0.0]}, "denominators must be > 0 for a level with tokens"),
        ({"row_ids": torch.zeros(B, T), "aggregation": "seq-mean-token-sum-norm"}, "token_limit must be given"),
    ],
)
def test_refusals_name_the_argument(batch, options, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(**{**batch, **options})


def test_clip_bounds_of_a_float64_loss_are_float64() -> None:
    for ratio, advantage, bound in ((2.0, 1e6, 1.2), (0.1, -1e6, 0.8)):
        log_ratio, one = torch.tensor([[ratio]], dtype=torch.float64).log(), torch.ones(1, 1, dtype=torch.float64)
        loss, _ = policy_loss(log_ratio, 0 * one, advantage * one, one)
        assert loss.item() == pytest.approx(-bound * advantage, rel=1e-15)
