"""Reflection buffers: order, capacity, scope, the draw of the spec, and a restore that goes on alike."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from fakes import make_trajectory

from hsg.config.options import ReflectionConfig
from hsg.engine.seeds import make_generator
from hsg.strategy.reflection import Draw, ReflectionBuffers, attempt_of
from hsg.types import Attempt, Reflection


def attempt(name: object) -> Attempt:
    return Attempt((f"s{name}", "again"), f"f{name}")


def filled(**options: object) -> ReflectionBuffers:
    buffers = ReflectionBuffers(ReflectionConfig(**{"p_bad": 0.25, "p_good": 0.1, **options}))  # type: ignore[arg-type]
    buffers.add("t", [(attempt(i), i % 2 == 0) for i in range(6)])
    buffers.add("other", [(attempt("o"), False)])
    return buffers


def held(buffers: ReflectionBuffers, scope: str, success: bool) -> list[str]:
    return [a.strategies[0] for a in buffers._buffers.get((scope, success), ())]


def test_first_in_first_out_per_task() -> None:
    buffers = filled(capacity=2)
    assert held(buffers, "t", True) == ["s2", "s4"]
    assert held(buffers, "t", False) == ["s3", "s5"]
    assert held(buffers, "other", False) == ["so"]
    assert buffers.sizes() == {"good": 2, "bad": 3}


def test_one_pair_for_all_tasks() -> None:
    buffers = filled(scope="global")
    assert held(buffers, "", False) == ["s1", "s3", "s5", "so"]
    draw = next(d for i in range(99) if (d := buffers.draw("unknown", (i,))).asked == "bad")
    assert draw.shown is not None


def test_the_draw_is_that_of_the_spec() -> None:
    """One uniform u per rollout: u < p_bad negative, u < p_bad + p_good positive, else plain; the item is uniform."""
    buffers, count = filled(), 4000
    draws = [buffers.draw("t", ("rollout", i)) for i in range(count)]
    for i in range(20):
        u = torch.rand(2, generator=make_generator("rollout", i, "reflection"), dtype=torch.float64)[0].item()
        assert draws[i].asked == ("bad" if u < 0.25 else "good" if u < 0.35 else "plain")
    asked = Counter(d.asked for d in draws)
    assert asked["bad"] / count == pytest.approx(0.25, abs=0.03)
    assert asked["good"] / count == pytest.approx(0.10, abs=0.02)
    items = Counter(d.shown.attempt.strategies[0] for d in draws if d.asked == "bad" and d.shown)
    assert set(items) == {"s1", "s3", "s5"}
    assert min(items.values()) > 0.25 * asked["bad"]
    assert all(d.shown.success == (d.asked == "good") for d in draws if d.shown)


def test_an_empty_buffer_means_the_plain_prompt() -> None:
    buffers = ReflectionBuffers(ReflectionConfig(p_bad=1.0))
    assert buffers.draw("t", (1,)) == Draw("bad", None)
    buffers.add("t", [(attempt(1), True)])
    assert buffers.draw("t", (1,)) == Draw("bad", None)  # a success is nothing to criticise
    assert not ReflectionBuffers(ReflectionConfig()).enabled


def test_a_restored_buffer_goes_on_alike() -> None:
    buffers = filled(capacity=3)
    other = ReflectionBuffers(buffers.config)
    other.load_state_dict(json.loads(json.dumps(buffers.state_dict())))
    for one in (buffers, other):
        one.add("t", [(attempt(9), False)])
    assert other.state_dict() == buffers.state_dict()
    assert held(other, "t", False) == ["s3", "s5", "s9"]
    assert [other.draw("t", (i,)) for i in range(50)] == [buffers.draw("t", (i,)) for i in range(50)]


def test_what_is_remembered_of_a_trajectory() -> None:
    whole = replace(make_trajectory(1.0), feedback="found")
    assert attempt_of(whole) == Attempt(("try 1",), "found")
    turns = tuple(replace(t, strategy=s) for t, s in zip(whole.turns, ("a", None, "b"), strict=True))
    assert attempt_of(replace(whole, strategy=None, turns=turns)) == Attempt(("a", "b"), "found")
    assert attempt_of(replace(whole, feedback=None)) == Attempt(("try 1",), "end")  # what the last action brought
    assert attempt_of(replace(whole, strategy=None)) is None  # no strategy was found in any turn
    assert attempt_of(make_trajectory(None)) is None  # the environment broke
    assert Reflection(attempt(1), True) != Reflection(attempt(1), False)
