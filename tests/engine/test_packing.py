"""Packed forward and backward passes against padded ones, which forward every row by itself."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from tiny import batch_of, tiny_model
from transformers import MistralConfig, MistralForCausalLM

from hsg.batch import Row, collate, microbatches
from hsg.config.options import Config, LossConfig, UpdateConfig
from hsg.engine import layout as layouts
from hsg.engine import packing
from hsg.engine.layout import make_layout
from hsg.engine.packing import packed_attention, packed_hidden
from hsg.learner import Learner
from hsg.losses import AGGREGATIONS
from hsg.measure.gap import GapCheck
from hsg.measure.speed import num_unique_tokens
from hsg.model.models import score
from hsg.ranks.distributed import Distributed
from hsg.types import ACTION, STRATEGY, Tokens


def ragged_rows(vocab_size: int = 97, seed: int = 0) -> list[list[int]]:
    """Two prompts, one of them with many rows; rows that share sampled tokens too, one twice, one a beginning of another."""
    rng = random.Random(seed)

    def draw(n):
        return [rng.randrange(vocab_size) for _ in range(n)]

    prompt, other = draw(9), draw(4)
    rows = [prompt + draw(n) for n in (5, 17, 2, 11)]
    rows.append(rows[1][:20] + draw(6))
    rows += [rows[3][:], rows[1][:15], other + draw(3), other + draw(8), [*draw(1), 1]]
    rng.shuffle(rows)
    return rows


def padded(rows: list[list[int]]) -> torch.Tensor:
    out = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out


@pytest.mark.parametrize("share", [True, False])
def test_layout_holds_each_token_at_its_place_and_every_pair_once(share):
    rows = ragged_rows()
    layout = make_layout(padded(rows), list(map(len, rows)), share=share)
    prefixes = {tuple(row[: t + 1]) for row in rows for t in range(len(row))}
    assert len(layout) == (len(prefixes) if share else sum(map(len, rows)))
    for i, row in enumerate(rows):
        places = layout.index[i, : len(row)]
        assert layout.input_ids[places].tolist() == row
        assert layout.positions[places].tolist() == list(range(len(row)))
    seen: dict[int, list[int]] = {}
    for call in layout.calls:
        for q in range(*call.queries):
            seen.setdefault(q, []).extend(k for k in range(*call.keys) if not call.causal or k <= q)
    for i, row in enumerate(rows):
        for t in range(len(row)):
            path = layout.index[i, : t + 1].tolist()
            assert sorted(seen[path[-1]]) == sorted(path)
    if share:  # every rollout of one prompt asks it in one call
        assert len(layout.calls) < sum(len(row) > 0 for row in rows) * 2


def test_long_stretches_look_back_in_steps(monkeypatch):
    """The same pairs, each once, whatever the steps of the kernel are."""
    monkeypatch.setattr(layouts, "STEP", 4)
    test_layout_holds_each_token_at_its_place_and_every_pair_once(False)
    layout = make_layout(torch.arange(11)[None], [11])
    assert [call.queries for call in layout.calls if call.causal] == [(0, 3), (3, 7), (7, 11)]


def read_mask(rows: list[list[int]]) -> torch.Tensor:
    """Every fourth token, and the third of every row: shared ones and each row's own."""
    ids = padded(rows)
    columns = torch.arange(ids.shape[1])
    real = columns[None] < torch.tensor(list(map(len, rows)))[:, None]
    return real & ((columns % 4 == 1) | (columns == 2))[None]


@pytest.mark.parametrize("step", [4, 192])
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_tokens_that_nobody_reads_do_not_look_back_in_the_last_layer(kind, step, monkeypatch):
    monkeypatch.setattr(layouts, "STEP", step)
    model, rows = tiny_model(kind), ragged_rows()
    read = read_mask(rows)
    layout = make_layout(padded(rows), list(map(len, rows)), read=read)
    assert layout.read is not None
    assert len(layout.read) == len(set(layout.index[read].tolist()))
    asked = sum((c.queries[1] - c.queries[0]) for c in layout.read_calls if c.causal)
    assert asked == len(layout.read) < len(layout) / 2  # each once, and in the last layer nobody else
    weights = torch.randn(int(read.sum()), 32, dtype=torch.float64)
    results = []
    for one in (replace(layout, read=None), layout):
        model.zero_grad()
        with packed_attention(model):
            hidden = packed_hidden(model, one)
            got = hidden[one.index[read]]
            (got * weights).sum().backward()
        results.append((hidden, got, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (whole, expected, gradients), (part, got, mine) = results
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    tolerance = 1e-9 if kind == "gpt2" else 1e-4
    for a, b in zip(mine, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    unread = sorted(set(range(len(layout))) - set(layout.read.tolist()))
    assert not torch.allclose(whole[unread], part[unread]), "the last layer must have left them out"


def test_where_most_tokens_are_read_all_look_back():
    layout = make_layout(torch.arange(8)[None], [8], read=torch.ones(1, 8, dtype=torch.bool))
    assert layout.read is None
    assert layout.read_calls == ()


WAYS = [(kind, way) for kind in ("qwen2", "llama", "gpt2") for way in ("joined", "path", "varlen")]
WAYS += [("mistral", "path"), ("mistral", "varlen")]


def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                           window_size):  # fmt: skip
    """What flash-attention documents, in plain PyTorch: causal from the end of each row, a window to the left."""
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    pieces = []
    for (a, b), (c, d) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        assert b - a <= max_seqlen_q
        assert d - c <= max_seqlen_k
        places = torch.arange(d - c)
        asked = places[d - c - (b - a) :, None]
        seen = places[None] <= asked
        if window_size[0] >= 0:
            seen &= places[None] >= asked - window_size[0]
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * softmax_scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        pieces.append(torch.einsum("hqk,khd->qhd", weights, v[c:d]))
    return torch.cat(pieces)


@pytest.mark.parametrize(("kind", "way"), WAYS)
@pytest.mark.parametrize("share", [True, False])
def test_hidden_states_and_gradients_are_those_of_padded_rows(kind, share, way, monkeypatch):
    monkeypatch.setattr(packing, "_use_joined", lambda *given: way == "joined")
    monkeypatch.setattr(packing, "_use_varlen", lambda *given: way == "varlen")
    stand_in = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)  # type: ignore[arg-type]
    if kind == "mistral":
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        torch.manual_seed(0)
        config = MistralConfig(vocab_size=97, sliding_window=6, initializer_range=0.3, num_key_value_heads=2, **shape)
        model = MistralForCausalLM(config).double().eval()
    else:
        model = tiny_model(kind)
    rows = ragged_rows()
    ids, lengths = padded(rows), list(map(len, rows))
    real = torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]
    weights = torch.randn(int(real.sum()), 32, dtype=torch.float64)

    expected = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[real]
    (expected * weights).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    layout = make_layout(ids, lengths, share=share)
    with packed_attention(model):
        got = packed_hidden(model, layout)[layout.index[real]]
        (got * weights).sum().backward()
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    tolerance = 1e-9 if kind == "gpt2" else 1e-4  # the norms of the others work in float32 whatever the weights are
    for mine, theirs in zip([p.grad for p in model.parameters() if p.grad is not None], gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def training_rows(dtype=torch.float32) -> list[Row]:
    """Rows of both levels with prompts, several turns, temperatures and old log-probs of their own."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for i, ids in enumerate(ragged_rows(seed=4)):
        input_ids = torch.tensor(ids)
        mask = torch.rand(len(ids) - 1, generator=generator) < 0.5
        mask[:3] = False
        mask[-1] = True
        level = STRATEGY if i % 4 == 0 else ACTION
        noise = torch.rand(len(mask), generator=generator)
        tokens = Tokens(input_ids, mask, torch.where(mask, -3 - 2 * noise, 0.0), torch.where(mask, 0.7 + noise, 1.0))
        rows.append(Row(tokens, torch.where(mask, noise * 2 - 1, 0.0), level, i))
    return rows


def learner(model, **update) -> Learner:
    update, loss = dict(update), {}
    for name in ("aggregation", "level_reduction"):
        if name in update:
            loss[name] = update.pop(name)
    config = replace(Config(), update=UpdateConfig(**update), loss=LossConfig(token_limit=20, **loss))
    config = replace(config, optimizer=replace(config.optimizer, max_grad_norm=1e9))
    return Learner(config, model, Distributed(), context_limit=64)


@pytest.mark.parametrize("level_reduction", ["separate", "joint"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_and_gradients_equal_those_of_padded_rows(aggregation, level_reduction):
    found = {}
    for packing_mode, size in (("off", 10**6), ("plain", 40), ("prefix", 30)):
        model = tiny_model("qwen2", dtype=torch.float32)
        # More than one micro-batch, each with its part of a shared prompt.
        one = learner(
            model,
            packing=packing_mode,
            microbatch_tokens=size,
            aggregation=aggregation,
            level_reduction=level_reduction,
        )
        metrics, norm = one.optimizer_step(training_rows(), {})
        losses = {k: (v[0] / v[1]).item() for k, v in metrics.items() if k.startswith("loss")}
        found[packing_mode] = (losses, norm, [p.grad.clone() for p in model.parameters()])
    expected, norm, gradients = found["off"]
    assert norm > 0.01
    for packing_mode in ("plain", "prefix"):
        losses, got_norm, got = found[packing_mode]
        assert losses == pytest.approx(expected, abs=1e-5)
        assert got_norm == pytest.approx(norm, rel=1e-5)
        for mine, theirs in zip(got, gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_score_with_a_layout_equals_score_without(checkpointing):
    rows = ragged_rows()
    masks = [[False] * (len(row) - 2) + [True] for row in rows]
    batch = batch_of(rows, masks, temperatures=[0.5 + 0.1 * i for i in range(len(rows))])
    model = tiny_model("gpt2")
    expected, entropy = score(model, batch, with_entropy=True)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    if checkpointing:
        model.train()
        model.activation_checkpointing_enable({"use_reentrant": False})
    layout = make_layout(batch.input_ids, [len(row) - 1 for row in rows])
    with packed_attention(model):
        got, got_entropy = score(model, batch, layout=layout, with_entropy=True)
        got.sum().backward()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(got_entropy, entropy)
    for p, theirs in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, theirs)


def test_counters_are_what_the_model_and_its_head_really_got():
    model = tiny_model("qwen2", dtype=torch.float32)
    forwarded, headed = [], []
    model.base_model.embed_tokens.register_forward_hook(lambda m, args, out: forwarded.append(args[0].numel()))
    model.lm_head.register_forward_hook(lambda m, args, out: headed.append(args[0].shape[0]))
    rows = training_rows()
    rows[2] = replace(rows[2], advantages=torch.zeros(len(rows[2]) - 1))  # pulls nowhere
    one = with_rollout(learner(model, packing="prefix", microbatch_tokens=10**6), max_logprob_gap=100.0)
    forwarded.clear(), headed.clear()  # the check of the model itself
    values = one.update(rows, 0)
    live = [row for row in rows if row is not rows[2]]
    prefixes = {tuple(r.tokens.input_ids[: t + 1].tolist()) for r in live for t in range(len(r) - 1)}
    assert one.costs.update_positions == sum(forwarded) == len(prefixes)
    assert one.costs.head_positions == sum(headed) == one.costs.trained_tokens
    assert one.costs.trained_tokens == sum(r.tokens.num_sampled for r in live)
    assert (
        one.costs.update_positions <= one.costs.update_unique_tokens == num_unique_tokens(live, one.config.group_shape)
    )
    assert values["update/grad_norm"] > 0


@pytest.mark.parametrize("limit", [12, 30, 10**6])
@pytest.mark.parametrize("mode", ["off", "plain", "prefix"])
def test_microbatches_keep_every_row_and_their_limit(mode, limit):
    rows = training_rows()
    parts = list(microbatches(rows, limit, packing=mode))
    assert sorted(r.trajectory for part in parts for r in part) == list(range(len(rows)))
    for part in parts:
        ids, lengths = collate(part).input_ids, list(map(len, part))
        size = ids.numel() if mode == "off" else len(make_layout(ids, lengths, share=mode == "prefix"))
        assert len(part) == 1 or size <= limit
    if limit == 30 and mode == "prefix":
        assert len(parts) < len(list(microbatches(rows, limit, packing="plain")))


def test_unique_tokens_count_a_prompt_once_per_group():
    def row(ids, prompt, trajectory, level=ACTION):
        mask = torch.arange(len(ids) - 1) >= prompt - 1
        tokens = Tokens(torch.tensor(ids), mask, torch.zeros(len(mask)), torch.ones(len(mask)))
        return Row(tokens, torch.ones(len(mask)), level, trajectory)

    group = [row([1, 2, 3, 4, 5], 3, 0), row([1, 2, 3, 4, 5, 6], 3, 1)]
    assert num_unique_tokens(group, (2, 2)) == 3 + 2 + 3
    assert num_unique_tokens([*group, row([1, 2, 3, 9], 3, 2)], (2, 2)) == 3 + 2 + 3 + (3 + 1)  # the next group
    assert num_unique_tokens([*group, row([1, 2, 3, 9], 3, 3)], (1, 4)) == 3 + 2 + 3 + 1
    strategies = [row([1, 2, 8], 2, 0, STRATEGY), row([1, 2, 7], 2, 2, STRATEGY), row([1, 2, 7], 2, 4, STRATEGY)]
    assert num_unique_tokens(strategies, (2, 2)) == 2 + 1 + 1 + (2 + 1)


def with_rollout(one: Learner, **options) -> Learner:
    one.config = replace(one.config, rollout=replace(one.config.rollout, **options))
    one.gap = GapCheck(one.config, one.model, one.distributed)
    return one


def test_recomputed_logprobs_are_the_training_forwards_and_sampled_ones_stay():
    model = tiny_model("qwen2", dtype=torch.float32)
    tokens = [r.tokens for r in training_rows()]
    one = with_rollout(learner(model, packing="prefix"), logprobs="recomputed", max_logprob_gap=100.0)
    got = one.settle_logprobs(tokens)
    for before, after in zip(tokens, got, strict=True):
        row = Row(before, torch.zeros(len(before.logprobs)), ACTION, 0)
        expected, _ = score(model, collate([row]))
        torch.testing.assert_close(after.trainer_logprobs, expected[0].detach(), rtol=0, atol=1e-5)
        assert after.input_ids is before.input_ids
        assert after.logprobs is before.logprobs
    assert one.costs.score_positions > 0
    assert one.costs.update_positions == 0
    gaps = torch.cat([(b.trainer_logprobs - b.logprobs)[b.response_mask].abs() for b in got])
    rows = [replace(row, tokens=t) for row, t in zip(training_rows(), got, strict=True)]
    values = one.update(rows, 0)
    assert values["rollout/logprob_gap_max"] == pytest.approx(gaps.max().item(), abs=1e-5)
    assert gaps.median() < values["rollout/logprob_gap_p99"] <= values["rollout/logprob_gap_max"]
    assert values["update/log_ratio_max"] < 1e-5


@pytest.mark.parametrize("mode", ["off", "prefix"])
def test_rows_without_a_sampled_token_change_nothing(mode):
    """With a KL every row is forwarded, those too."""
    empty = [
        Row(Tokens(torch.arange(3, 3 + n), torch.zeros(n - 1) > 0, torch.zeros(n - 1), torch.ones(n - 1)),
            torch.zeros(n - 1), ACTION, 90 + n)
        for n in (1, 3)
    ]  # fmt: skip
    found = []
    for rows in (training_rows(), training_rows() + empty):
        one = learner(tiny_model("qwen2", dtype=torch.float32), packing=mode)
        one.config = replace(one.config, loss=replace(one.config.loss, kl_coef=0.1))
        one.reference = tiny_model("qwen2", seed=1, dtype=torch.float32)
        one.optimizer_step(one._with_reference(rows), {})
        found.append([p.grad.clone() for p in one.model.parameters()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["sampled", "recomputed"])
def test_a_sampler_of_nothing_finite_stops_the_run(mode):
    one = with_rollout(learner(tiny_model("qwen2", dtype=torch.float32)), logprobs=mode)
    rows = training_rows()
    broken = [replace(row.tokens, logprobs=row.tokens.logprobs * torch.nan) for row in rows]
    with pytest.raises(RuntimeError, match="must agree within rollout.max_logprob_gap .* got inf"):
        one.update([replace(r, tokens=t) for r, t in zip(rows, one.settle_logprobs(broken), strict=True)], 0)


def test_where_old_logprobs_come_from():
    tokens = [r.tokens for r in training_rows()]

    def kept(mode, **update):
        one = with_rollout(
            learner(tiny_model("qwen2", dtype=torch.float32), **update), logprobs=mode, max_logprob_gap=9.0
        )
        return all(a is b for a, b in zip(tokens, one.settle_logprobs(tokens), strict=True))

    assert kept("sampled", epochs=2)
    assert kept("auto")  # one optimizer step for all
    assert not kept("auto", epochs=2)
    assert not kept("auto", minibatch_trajectories=4)
    assert not kept("recomputed")


@pytest.mark.parametrize("mode", ["sampled", "recomputed"])
def test_a_sampler_that_disagrees_stops_the_run_before_a_weight_moves(mode):
    model = tiny_model("qwen2", dtype=torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    one = with_rollout(learner(model), logprobs=mode)
    with pytest.raises(RuntimeError, match=r"must agree within rollout.max_logprob_gap = 0.0004 nats.* got [0-9.]+"):
        one.update(
            [
                replace(r, tokens=t)
                for r, t in zip(training_rows(), one.settle_logprobs([r.tokens for r in training_rows()]), strict=True)
            ],
            0,
        )
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
