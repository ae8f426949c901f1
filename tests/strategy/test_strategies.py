"""Candidates and the choice among them: parsed ones first, whole responses as a last resort, seeds, distinct indices."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fakes import fake_embed, make_strategy
from torch import Tensor

from hsg.config.loading import make_config
from hsg.config.options import Config
from hsg.engine.generation import Cost, Decoder
from hsg.model.policy import Policy
from hsg.strategy.propose import propose, select
from hsg.text.prompts import Prompts, parse_strategy
from hsg.types import Candidates, Strategy

PROMPTS = Prompts.make("terse")
FIRST = ["Guess. It is warm.", "Guess. It is cold and wet.", "Guess. It is warm."]
KEYS = [("it", 0, name) for name in ("a", "b", "c")]


def draw(
    policy: Policy, observations: Sequence[str] = FIRST, keys: Sequence[tuple] = KEYS, **given: Any
) -> list[list[Strategy]]:
    config = make_config(
        {
            "prompts": {"style": "terse"},
            "strategy": {"max_tokens": given.pop("max_tokens", 10)},
            "rollout": {"max_cache_tokens": given.pop("max_cache_tokens", 10**6)},
        }
    )
    options = {"num_candidates": 5, "temperature": 1.0, "cost": Cost(), **given}
    return propose(config, policy, PROMPTS, observations, keys, **options)


def essence(drawn: list[list[Strategy]]) -> list[Any]:
    return [[(s.text, s.parsed, s.tokens.input_ids.tolist()) for s in row] for row in drawn]


def test_candidates_are_rows_of_their_own(guesser: Policy) -> None:
    drawn = draw(guesser)
    assert [len(row) for row in drawn] == [5, 5, 5]
    for observation, row in zip(FIRST, drawn, strict=True):
        prompt = guesser.chat.prompt(PROMPTS.strategy(observation))
        for strategy in row:
            tokens = strategy.tokens
            assert tokens.input_ids[: len(prompt)].tolist() == prompt
            assert tokens.response_mask.tolist() == [False] * (len(prompt) - 1) + [True] * strategy.num_tokens
            text = guesser.chat.decode(tokens.input_ids[len(prompt) :].tolist())
            assert strategy.text == (parse_strategy(text) if strategy.parsed else text)
            assert strategy.token_limit == 10
            assert strategy.truncated == (tokens.input_ids[-1] != guesser.chat.end_id)
    assert {s.text for row in drawn for s in row if s.parsed} > {"try 1"}


def test_no_more_at_once_than_the_cache_may_hold(guesser: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tasks, one by one where even a task's candidates are too many; the same strategies come out."""
    sizes: list[int] = []

    def counted(model: Any, stop_ids: Any, rows: Sequence[Any], **options: Any) -> Any:
        sizes.append(len(rows))
        return Decoder(model, stop_ids, rows, **options)

    whole = draw(guesser)
    longest = max(len(guesser.chat.prompt(PROMPTS.strategy(text))) for text in FIRST) + 10
    monkeypatch.setattr("hsg.strategy.propose.Decoder", counted)
    for tokens, expected in ((15 * longest, [15]), (15 * longest - 1, [10, 5]), (1, [5, 5, 5])):
        sizes.clear()
        assert essence(draw(guesser, max_cache_tokens=tokens)) == essence(whole)
        assert sizes == expected


def test_seed_decides_and_neighbours_do_not(guesser: Policy) -> None:
    drawn = draw(guesser)
    assert essence(drawn) == essence(draw(guesser))
    assert essence(drawn[1:2]) == essence(draw(guesser, FIRST[1:2], KEYS[1:2]))
    assert essence([row[:2] for row in drawn]) == essence(draw(guesser, num_candidates=2))
    assert essence(drawn) != essence(draw(guesser, keys=[("it", 1, name) for name in ("a", "b", "c")]))
    assert essence(drawn)[0] != essence(drawn)[2]  # the same prompt under two keys


def test_token_limit_cuts(guesser: Policy) -> None:
    cut = [s for row in draw(guesser, max_tokens=2) for s in row]
    assert not any(s.parsed for s in cut)
    assert all(s.truncated == (s.tokens.input_ids[-1] != guesser.chat.end_id) for s in cut)
    assert {s.num_tokens for s in cut if s.truncated} == {2}


def test_a_strategys_limit_is_its_own_not_the_room_that_its_prompt_left(guesser: Policy) -> None:
    longest = max(len(guesser.chat.prompt(PROMPTS.strategy(observation))) for observation in FIRST)
    short = Policy(guesser.model, guesser.tokenizer, guesser.chat, longest + 3)
    drawn = [s for row in draw(short) for s in row]
    assert {s.token_limit for s in drawn} == {10}
    assert min(s.num_tokens for s in drawn if s.truncated) == 3  # there was no more room


def test_a_strategy_in_a_thought_that_the_header_opened_counts_for_nothing(guesser: Policy) -> None:
    chat = copy.copy(guesser.chat)
    chat.thinking = "<think>"
    assert any(s.parsed for row in draw(guesser) for s in row)
    assert not any(s.parsed for row in draw(Policy(guesser.model, guesser.tokenizer, chat, 512)) for s in row)


def test_prompt_without_room_is_refused(guesser: Policy) -> None:
    short = Policy(guesser.model, guesser.tokenizer, guesser.chat, 8)
    with pytest.raises(ValueError, match="must leave room in the context of 8 tokens"):
        draw(short)


# ---------------------------------------------------------------------------------------------------------- selection


def configure(num_strategies: int, sigma: float, start: str = "first") -> Config:
    return make_config({"num_strategies": num_strategies, "sigma": sigma, "selector": {"start": start}})


def on_axes(texts: Sequence[str]) -> Tensor:
    """'3' stands on axis 3; text that is no number on axis 0."""
    return torch.eye(8, dtype=torch.float64)[[int(t) if t.isdigit() else 0 for t in texts]]


def pick(texts: str, *, num_strategies: int, start: str = "first", unparsed: str = "") -> Candidates:
    made = [make_strategy(t, parsed=t not in unparsed) for t in texts]
    return select(configure(num_strategies, len(texts) / num_strategies, start), made, on_axes, ("key",))


def test_farthest_points_in_selection_order() -> None:
    """Starts at the first '1'; the other '1' is nearest, so '2' and '3' come before it."""
    assert pick("1123", num_strategies=3).selected == (0, 2, 3)
    assert [s.text for s in pick("1123", num_strategies=3).kept] == ["1", "2", "3"]


def test_only_parsed_ones_while_there_are_enough() -> None:
    chosen = pick("ab3456", num_strategies=3, unparsed="ab")
    assert chosen.selected == (2, 3, 4)
    assert all(s.parsed for s in chosen.kept)


def test_unparsed_ones_fill_up() -> None:
    assert pick("a3b4", num_strategies=3, unparsed="ab").selected == (1, 3, 0)
    assert pick("abcd", num_strategies=3, unparsed="abcd").selected == (0, 1, 2)


def test_duplicates_still_give_distinct_indices() -> None:
    assert sorted(pick("1111", num_strategies=4, start="centroid").selected) == [0, 1, 2, 3]


def test_sigma_one_keeps_all() -> None:
    chosen = pick("3142", num_strategies=4, start="random")
    assert sorted(chosen.selected) == [0, 1, 2, 3]
    assert chosen.distance_before == pytest.approx(chosen.distance_after) == pytest.approx(1.0)


def test_distances_are_those_of_all_and_of_the_kept() -> None:
    """Of '1123' the pairs are one equal and five orthogonal: 5 / 6; of the kept 1, 2, 3 all are orthogonal."""
    chosen = pick("1123", num_strategies=3)
    assert chosen.distance_before == pytest.approx(5 / 6)
    assert chosen.distance_after == pytest.approx(1.0)
    assert pick("1", num_strategies=1).distance_before == 0.0
    assert pick("12", num_strategies=1).distance_after == 0.0


def test_random_start_comes_from_the_key() -> None:
    made = [make_strategy(str(i)) for i in range(8)]
    starts = {select(configure(2, 4, "random"), made, fake_embed, ("key", n)).selected[0] for n in range(12)}
    assert len(starts) > 2
    one, other = (select(configure(2, 4, "random"), made, fake_embed, ("key", 5)).selected for _ in range(2))
    assert one == other
