"""SGE in the loop: a strategy in every turn, temperatures by segment, reflection in the prompt that is trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import GuessTaskSet
from test_trainer import BASE, Make, make, rows_of  # noqa: F401 - `make` is a fixture

from hsg.batch import collate
from hsg.config.loading import make_config
from hsg.model.models import score
from hsg.text.markers import MARKERS, parse_turn_strategy
from hsg.trainer import Trainer

SGE: dict[str, Any] = {"algorithm": "sge", "rollout": {"max_turns": 3, "max_action_tokens": 24}}
EAGER = {"p_bad": 0.6, "p_good": 0.4}


def run(trainer: Trainer, iterations: int = 2) -> Iterator[tuple[dict[str, float], list[dict[str, Any]]]]:
    """(metrics, records) of iterations; the trainer needs a run folder."""
    for i in range(iterations):
        values = trainer.iterate(i)
        assert trainer.run is not None
        path = trainer.run.path / "trajectories" / f"iteration_{i:06d}.jsonl"
        yield values, [json.loads(line) for line in path.read_text().splitlines()]


def test_the_bundle_is_that_of_the_paper() -> None:
    config = make_config({"algorithm": "sge"})
    assert config.group_shape == (1, config.num_strategies * config.num_rollouts)
    assert (config.temperature.strategy, config.temperature.action) == (1.2, 0.7)
    assert (config.reflection.p_bad, config.reflection.p_good, config.reflection.capacity) == (0.25, 0.1, 32)
    assert (config.loss.clip_low, config.loss.clip_high, config.loss.kl_coef) == (0.2, 0.2, 0.0)
    assert config.loss.aggregation == "token-mean"
    assert not config.judge.enabled
    # A strategy of every turn implies the joint reduction under any algorithm, and nothing else is accepted.
    assert make_config({"strategy": {"per": "turn"}}).loss.level_reduction == "joint"
    with pytest.raises(
        ValueError, match="loss.level_reduction must be joint where strategy.per is turn, got 'separate'"
    ):
        make_config({"algorithm": "sge", "loss": {"level_reduction": "separate"}})
    with pytest.raises(ValueError, match="strategy.per must be episode or turn with reflection, got 'none'"):
        make_config({"algorithm": "grpo", "reflection": {"p_bad": 0.5}})


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_records_of_a_strategy_in_every_turn(make: Make, tmp_path: Path, context: str) -> None:  # noqa: F811
    rollout = {**SGE["rollout"], "context": context}
    trainer = make(run_name="sge", run={"dir": str(tmp_path)}, **{**SGE, "rollout": rollout})
    (_, records), *_ = run(trainer, 1)
    assert {r["kind"] for r in records} == {"trajectory"}
    assert all(r["strategy"] is None and r["strategy_index"] == 0 for r in records)
    for p in range(BASE["num_tasks"]):
        group = [r["rollout_index"] for r in records if r["task_index"] == p]
        assert group == list(range(BASE["num_strategies"] * BASE["num_rollouts"]))
    turns = [turn for r in records for turn in r["turns"]]
    for turn in turns:
        assert turn["strategy"] == parse_turn_strategy(turn["response"])
    assert any(turn["strategy"] for turn in turns)
    assert any(turn["action"] for turn in turns)


@pytest.mark.parametrize("context", ["conversation", "window"])
@pytest.mark.parametrize("heats", [(1.4, 0.6), (0.5, 1.5), (1.0, 1.0)])
def test_first_ratio_is_one_at_any_mix(make: Make, context: str, heats: tuple[float, float]) -> None:  # noqa: F811
    """Log-probs of the old and the new policy are scaled by the temperature each token was sampled at (SGE)."""
    trainer = make(
        **{**SGE, "rollout": {**SGE["rollout"], "context": context}},
        temperature=dict(zip(("strategy", "action"), heats, strict=True)),
    )
    rows = rows_of(trainer)
    batch = collate(rows)
    used = batch.temperatures[batch.response_mask]
    assert {round(t, 3) for t in used.unique().tolist()} == set(heats)
    trainer.model.train()
    logprobs, _ = score(trainer.model, batch)
    assert (logprobs - batch.old_logprobs)[batch.response_mask].abs().max() < 1e-6
    values = trainer.learner.update(rows, 0)
    assert values["update/log_ratio_max"] == pytest.approx(0.0, abs=1e-6)
    if heats[0] != heats[1]:  # were they scored at one temperature, the ratios would be far from 1
        flat = collate(rows)
        flat.temperatures[:] = heats[1]
        wrong, _ = score(trainer.model, flat)
        assert (wrong - batch.old_logprobs)[batch.response_mask].abs().max() > 0.05


def test_every_strategy_token_up_to_its_end_is_hot_and_no_other(make: Make) -> None:  # noqa: F811
    trainer = make(**SGE)
    decode = trainer.policy.tokenizer.decode
    mixed = 0
    for row in rows_of(trainer):
        ids, heats = row.tokens.input_ids[1:], row.tokens.temperatures
        for begin, end in spans(row.tokens.response_mask):
            hot = int((heats[begin:end] > 1).sum())
            text = decode(ids[begin:end], clean_up_tokenization_spaces=False)
            head = decode(ids[begin : begin + hot], clean_up_tokenization_spaces=False)
            assert heats[begin : begin + hot].min() > 1
            if "</strategy>" in text:
                assert head.count("</strategy>") == 1
                assert "</strategy>" not in decode(ids[begin : begin + hot - 1], clean_up_tokenization_spaces=False)
                mixed += hot < end - begin
            else:
                assert hot == end - begin
    assert mixed > 5


def spans(mask: torch.Tensor) -> list[tuple[int, int]]:
    """[begin, end) of each run of True."""
    edges = torch.diff(mask.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    return list(zip((edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist(), strict=True))


def test_one_temperature_without_reflection_is_grpo_with_the_strategy_prompt(make: Make) -> None:  # noqa: F811
    """The paper's baseline: the same prompt, one temperature, no reflection, the same rows."""
    same = {"temperature": {"strategy": 0.9, "action": 0.9}, "rollout": SGE["rollout"]}
    ours = rows_of(make(algorithm="sge", reflection={"p_bad": 0, "p_good": 0}, **same))
    grpo = rows_of(make(algorithm="grpo", strategy={"per": "turn"}, **same))
    assert len(ours) == len(grpo) > 0
    for a, b in zip(ours, grpo, strict=True):
        assert torch.equal(a.tokens.input_ids, b.tokens.input_ids)
        assert torch.equal(a.advantages, b.advantages)


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_the_gradient_conditions_on_the_prompt_with_the_reflection(make: Make, tmp_path: Path, context: str) -> None:  # noqa: F811
    trainer = make(
        GuessTaskSet(num_tasks=2), run_name="sge", run={"dir": str(tmp_path)}, reflection=EAGER,
        **{**SGE, "rollout": {**SGE["rollout"], "context": context}},
    )  # fmt: skip
    decode = trainer.policy.tokenizer.decode
    shown = 0
    for i, (values, records) in enumerate(run(trainer, 4)):
        for record in records:
            rows = record["turns"] if context == "window" else [record]
            for row in rows:
                prompt = decode(row["input_ids"][: row["response_mask"].index(1) + 1])
                if record["reflection"] is None:
                    assert "\n- " not in prompt
                    assert "\n+ " not in prompt
                    continue
                shown += 1
                mark = "\n+ " if record["reflection"]["success"] else "\n- "
                assert mark + record["reflection"]["strategies"][0] in prompt
            if record["reflection"] is None:
                assert record["prompt"].count("\n- ") == 0
            else:
                assert record["prompt"] in decode(rows[0]["input_ids"])
        assert values["reflection/bad_share"] + values["reflection/good_share"] <= 1
        if i == 0:  # nothing was played before
            assert values["reflection/empty_share"] == 1.0
            assert "reflection/success_with" not in values
    assert shown > 0


def test_buffers_hold_what_was_played_in_order(make: Make, tmp_path: Path) -> None:  # noqa: F811
    trainer = make(run_name="sge", run={"dir": str(tmp_path)}, **SGE)
    (_, records), *_ = run(trainer, 1)
    state = trainer.collector.reflection.state_dict()["buffers"]
    for item in state:
        expected = [
            [turn["strategy"] for turn in r["turns"] if turn["strategy"]]
            for r in records
            if r["task_id"] == item["scope"] and r["success"] == item["success"]
        ]
        assert [a["strategies"] for a in item["attempts"]] == [tuple(e) for e in expected if e]
    assert sum(len(item["attempts"]) for item in state) > 0


def test_strata_reflects_before_its_candidates(make: Make, tmp_path: Path) -> None:  # noqa: F811
    """With a strategy per episode: one draw per task, the same prompt for all its candidates."""
    trainer = make(GuessTaskSet(num_tasks=2), run_name="s", run={"dir": str(tmp_path)}, reflection=EAGER)
    shown = 0
    for _, records in run(trainer, 4):
        for p in range(BASE["num_tasks"]):
            mine = [r for r in records if r["task_index"] == p]
            strategies = [r for r in mine if r["kind"] == "strategy"]
            assert len({json.dumps(s["reflection"]) for s in strategies}) == 1
            assert len({s["prompt"] for s in strategies}) == 1
            for s in strategies:
                asked = trainer.policy.tokenizer.decode(s["input_ids"][: s["response_mask"].index(1) + 1])
                assert s["prompt"] in asked
                if s["reflection"] is not None:
                    shown += 1
                    assert len(s["reflection"]["strategies"]) == 1
                    assert s["reflection"]["strategies"][0] in s["prompt"]
            assert all(r["reflection"] is None for r in mine if r["kind"] == "trajectory")
    assert shown > 0


def test_markers_of_another_environment(make: Make) -> None:  # noqa: F811
    """Headlines instead of tags: the nano model was never taught them, so all of a response is a strategy that never ends."""
    trainer = make(**{**SGE, "prompts": {"format": "coding"}})
    assert trainer.collector.rollout.prompts.markers == MARKERS["coding"]
    assert "### Strategy" in trainer.collector.rollout.prompts.first_action("x", None)
    batch = collate(rows_of(trainer))
    assert batch.temperatures[batch.response_mask].min() > 1
