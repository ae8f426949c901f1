"""Every return and advantage of every method, once more from the lines of the run folder alone, in plain loops.

The trajectories are made up: random outcomes, gains, flags, penalties, values and bonuses at odd sizes.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import make_strategy, make_trajectory

from hsg.config.algorithms import ALGORITHMS
from hsg.config.loading import make_config, to_dict
from hsg.config.options import Config
from hsg.credit import Signals, assign_credit
from hsg.crediting.names import ESTIMATOR_NAMES
from hsg.run.records import iteration_records
from hsg.types import Candidates, Judgment, Trajectory

Record = dict[str, Any]
TRAINED = [name for name in ALGORITHMS if name not in ("prompting", "react")]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in TRAINED],
    ("strata", {"advantage": {"turn_baseline": "trajectory", "std": "sample"}}),
    ("reinforce++", {"reinforce": {"baseline": "group"}, "reward": {"turns": "dense"}, "advantage": {"gamma": 0.9}}),
    ("ppo", {"advantage": {"unit": "token", "gamma": 0.9}, "critic": {"lam": 0.8}}),
    ("gigpo", {"gigpo": {"episode_baseline": "turn", "omega": 0.5}, "advantage": {"std": "none"}}),
    ("rnd", {"advantage": {"estimator": "gae", "whiten": True}}),
]
PENALTIES = ("format_penalty", "length_penalty", "invalid_action_penalty", "bonus")


def normal(value: float, members: list[float], options: Record) -> float:
    if not members or max(members) == min(members):
        return 0.0
    mean = sum(members) / len(members)
    if options["std"] == "none":
        return value - mean
    squares = sum((m - mean) ** 2 for m in members) / (len(members) - (options["std"] == "sample"))
    return (value - mean) / (math.sqrt(squares) + options["eps"])


def shares(t: Record, config: Record) -> list[float]:
    """What each turn has of the scaled outcome."""
    total = config["reward"]["scale"] * t["outcome"]
    gains = [turn["reward"] for turn in t["turns"]]
    if config["reward"]["turns"] == "dense" and sum(gains) > 0:
        return [g * total / sum(gains) for g in gains]
    return [0.0] * (len(gains) - 1) + [total] if gains else []


def extras(turn: Record, config: Record) -> float:
    return sum(turn.get(name, 0.0) for name in PENALTIES) - config["kappa"] * turn["flagged"]


def discounted(deltas: list[float], factor: float) -> list[float]:
    """sum_l factor^l delta_k+l."""
    return [sum(d * factor**i for i, d in enumerate(deltas[k:])) for k in range(len(deltas))]


def generalised(rewards: list[float], values: list[float], config: Record) -> list[float]:
    gamma = config["advantage"]["gamma"]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, [*values, 0.0][1:], strict=True)]
    return discounted(deltas, gamma * config["critic"]["lam"])


def sampled(t: Record, name: str) -> list[list[float]]:
    """The numbers of each turn's sampled tokens: one stretch of the row for each turn, or a row of its own."""
    if "input_ids" not in t:
        return [[v for m, v in zip(turn["response_mask"], turn[name], strict=True) if m] for turn in t["turns"]]
    stretches: list[list[float]] = []
    before = 0
    for mask, value in zip(t["response_mask"], t[name], strict=True):
        if mask and not before:
            stretches.append([])
        if mask:
            stretches[-1].append(value)
        before = mask
    return stretches


def seen(t: Record) -> list[str]:
    """The observation of each turn; after a response without an action the world is where it was."""
    states: list[str] = []
    for k, turn in enumerate(t["turns"]):
        again = k > 0 and t["turns"][k - 1]["action"] is None
        states.append(states[-1] if again else turn["observation"])
    return states


def credited(group: list[Record], config: Record) -> list[list[tuple[float, float, bool]]]:
    """(return, advantage, whitening may move it) of every unit of every trajectory of one group, before whitening."""
    options, name = config["advantage"], config["advantage"]["estimator"]
    more = [[extras(turn, config) for turn in t["turns"]] for t in group]
    returns = [[config["reward"]["scale"] * t["outcome"] + x for x in xs] for t, xs in zip(group, more, strict=True)]
    rewards = [[r + x for r, x in zip(shares(t, config), xs, strict=True)] for t, xs in zip(group, more, strict=True)]
    novel = [sum(turn.get("bonus", 0.0) for turn in t["turns"]) / max(1, len(t["turns"])) for t in group]
    outcomes = [config["reward"]["scale"] * t["outcome"] + b for t, b in zip(group, novel, strict=True)]
    mean, mixed = sum(outcomes) / len(outcomes), max(outcomes) > min(outcomes)
    togo = [discounted(rs, options["gamma"]) for rs in rewards]
    if name == "gae":
        found = []
        for t, rs in zip(group, rewards, strict=True):
            values = [turn["value"] for turn in t["turns"]]
            if options["unit"] == "token":
                of_turns = sampled(t, "values")
                assert [of[0] for of in of_turns] == values
                values = [v for of in of_turns for v in of]
                rs = [x for r, of in zip(rs, of_turns, strict=True) for x in [0.0] * (len(of) - 1) + [r]]
            gains = generalised(rs, values, config)
            found.append([(a + v, a, True) for a, v in zip(gains, values, strict=True)])
        return found
    if name == "reinforce++" and config["reinforce"]["baseline"] == "none":
        return [[(g, g, True) for g in gs] for gs in togo]
    if name == "group" or name == "gigpo":
        over_turns = options["turn_baseline"] == "pooled" if name == "group" else (
            config["gigpo"]["episode_baseline"] == "turn"
        )  # fmt: skip
        members = [r for rs in returns for r in rs] if over_turns else outcomes
        live = max(members) > min(members)
        values = [[normal(r, members, options) if live else 0.0 for r in rs] for rs in returns]
        if name == "gigpo":
            states = [seen(t) for t in group]
            likes = defaultdict(list)
            for ss, gs in zip(states, togo, strict=True):
                for s, g in zip(ss, gs, strict=True):
                    likes[s].append(g)
            for i, ss in enumerate(states):
                for k, s in enumerate(ss):
                    values[i][k] += config["gigpo"]["omega"] * normal(togo[i][k], likes[s], options)
            returns = togo
    elif name == "rloo":
        rest = [(sum(outcomes) - o) / max(1, len(outcomes) - 1) for o in outcomes]
        values = [[(r - b) * mixed for r in rs] for rs, b in zip(returns, rest, strict=True)]
    else:
        assert name == "reinforce++"
        returns, values = togo, [[(g - mean) * mixed for g in gs] for gs in togo]
    live = any(v != 0 for vs in values for v in vs)
    return [[(r, v, live) for r, v in zip(*pair, strict=True)] for pair in zip(returns, values, strict=True)]


def made_up(config: Config, rng: random.Random) -> list[list[list[Trajectory]]]:
    """(P, N, M) trajectories of 0 to 4 turns; one in nine is broken, some outcomes are 0, some observations alike."""
    window = config.rollout.context == "window"

    def one(n: int, m: int) -> Trajectory:
        outcome = None if rng.random() < 1 / 9 else rng.choice((0.0, 0.25, 1.0))
        sizes = [rng.randint(1, 10) for _ in range(rng.choice((0, 1, 2, 4, 4)))]
        odd = [rng.choice("uvvv..") for _ in sizes]
        trajectory = make_trajectory(
            outcome,
            sizes,
            window=window,
            unparsed=[k for k, c in enumerate(odd) if c == "u"],
            invalid=[k for k, c in enumerate(odd) if c == "v"],
        )
        turns = [
            replace(turn, observation=f"room {rng.randint(0, 2)}", reward=rng.choice((0.0, 0.5, -0.25)))
            for turn in trajectory.turns
        ]
        hidden = rng.random() < config.strategy.dropout or config.strategy.per != "episode"
        shown = None if hidden else "try 1"
        return replace(trajectory, turns=tuple(turns), strategy=shown, strategy_index=n, rollout_index=m)

    num_strategies, num_rollouts = config.group_shape
    return [[[one(n, m) for m in range(num_rollouts)] for n in range(num_strategies)] for _ in range(3)]


def lines(config: Config, seed: int) -> list[Record]:
    """The records of a made-up iteration, as strict JSON gives them back."""
    rng = random.Random(seed)
    trajectories = made_up(config, rng)
    flat = [t for task in trajectories for group in task for t in group]
    judged = [
        [
            [
                Judgment("x", tuple(k for k in range(len(t.turns)) if config.judge.enabled and rng.random() < 0.3))
                for t in group
            ]
            for group in task
        ]
        for task in trajectories
    ]
    candidates = None
    if config.strategy.per == "episode":
        drawn = [
            [make_strategy(num_tokens=rng.randint(1, 10), parsed=rng.random() < 0.7) for _ in range(2)]
            for _ in range(3)
        ]
        candidates = [Candidates(tuple(row), (1, 0), 0.0, 0.0) for row in drawn]
    values = bonuses = None
    if ESTIMATOR_NAMES[config.advantage.estimator]:
        values = [torch.tensor([rng.random() for turn in t.turns for _ in range(turn.num_tokens)]) for t in flat]
    if config.rnd.weight > 0:
        bonuses = [torch.tensor([rng.random() for _ in t.turns], dtype=torch.float64) for t in flat]
    strategies = None if candidates is None else [c.kept for c in candidates]
    credit = assign_credit(config, strategies, trajectories, judged, Signals(values, bonuses))
    records = iteration_records(config, 0, candidates, trajectories, judged, credit)
    return [json.loads(json.dumps(record, allow_nan=False)) for record in records]


@pytest.mark.parametrize(
    ("algorithm", "given"), VARIANTS, ids=[f"{name}{''.join(f'-{k}' for k in given)}" for name, given in VARIANTS]
)
def test_every_return_and_advantage_follows_from_the_records(algorithm: str, given: dict[str, Any]) -> None:
    reward = {"format_penalty": 0.5, "length_penalty": True, "invalid_action_penalty": 0.125, "scale": 2.0}
    options = {"algorithm": algorithm, "kappa": 0.3, "num_tasks": 3, "num_strategies": 2, "num_rollouts": 5, **given}
    made = make_config({**options, "reward": reward | given.get("reward", {}), "log": {"tokens": True}})
    config = to_dict(made)
    kinds: set[str] = set()
    moved = 0
    for seed in range(3):
        records = lines(made, seed)
        groups = defaultdict(list)
        for p, n, record in ((r["task_index"], r["strategy_index"], r) for r in records if r["kind"] == "trajectory"):
            if record["outcome"] is not None:
                groups[p, n].append(record)
        pairs = [pair for group in groups.values() for pair in zip(group, credited(group, config), strict=True)]
        everything = [a for _, units in pairs for _, a, _ in units]
        for t, units in pairs:
            if config["advantage"]["whiten"]:
                white = {"std": "population", "eps": config["advantage"]["eps"]}
                units = [(r, normal(a, everything, white) if live else 0.0, live) for r, a, live in units]
            if config["advantage"]["unit"] == "token":
                held = [a for of in sampled(t, "advantages") for a in of]
                assert held == pytest.approx([a for _, a, _ in units], abs=1e-5)
            else:
                assert [turn["return"] for turn in t["turns"]] == pytest.approx([r for r, _, _ in units], abs=1e-6)
                assert [turn["advantage"] for turn in t["turns"]] == pytest.approx([a for _, a, _ in units], abs=1e-6)
            told = [s + extras(turn, config) for s, turn in zip(shares(t, config), t["turns"], strict=True)]
            assert [turn["credited"] for turn in t["turns"]] == pytest.approx(told, abs=1e-6)
            moved += any(a != 0 for _, a, _ in units)
            kinds |= {name for turn in t["turns"] for name in (*PENALTIES, "value", "flagged") if turn.get(name)}
        check_strategies(records, config)
    assert moved > 0
    expected = {"format_penalty", "length_penalty", "invalid_action_penalty"}
    expected |= {"value"} if config["advantage"]["estimator"] == "gae" else set()
    expected |= {"bonus"} if config["rnd"]["weight"] > 0 else set()
    assert kinds == expected | ({"flagged"} if config["judge"]["enabled"] else set())


def check_strategies(records: list[Record], config: Record) -> None:
    """The mean of the best share of those rollouts that were shown it, then its own penalties; compared in its task."""
    for p in range(3):
        kept = [r for r in records if r["kind"] == "strategy" and r["task_index"] == p]
        for strategy in kept:
            shown = [
                config["reward"]["scale"] * r["outcome"]
                for r in records
                if r["kind"] == "trajectory" and r["task_index"] == p and r["outcome"] is not None
                if r["strategy_index"] == strategy["strategy_index"] and r["strategy"] is not None
            ]
            best = sorted(shown, reverse=True)[: max(1, math.floor(config["delta"] * len(shown) + 1e-9))]
            value = sum(best) / len(best) + strategy["format_penalty"] + strategy["length_penalty"] if best else None
            assert strategy["return"] == (None if value is None else pytest.approx(value, abs=1e-9))
        members = [s["return"] for s in kept if s["return"] is not None]
        for strategy in kept:
            same = strategy["return"] is None or max(members) - min(members) < 1e-12
            told = 0.0 if same else normal(strategy["return"], members, config["advantage"])
            assert strategy["advantage"] == pytest.approx(told, abs=1e-6)


@pytest.mark.parametrize("window", [False, True])
def test_values_of_a_critic_stand_at_their_tokens(window: bool) -> None:
    given = {
        "algorithm": "ppo",
        "log": {"tokens": True},
        "rollout": {"context": "window" if window else "conversation"},
    }
    config = make_config({**given, "num_strategies": 1, "num_rollouts": 2})
    group = [make_trajectory(1.0, (2, 3), window=window), make_trajectory(None, (1,), window=window)]
    signals = Signals([torch.tensor([0.5, 0.25, 1.0, 2.0, 4.0]), torch.zeros(0)])
    judged = [[[Judgment(None)] * 2]]
    credit = assign_credit(config, None, [[group]], judged, signals)
    one, broken = iteration_records(config, 0, None, [[group]], judged, credit)
    assert [turn["value"] for turn in one["turns"]] == [0.5, 1.0]
    assert sampled(one, "values") == [[0.5, 0.25], [1.0, 2.0, 4.0]]
    owner = one["turns"][1] if window else one
    assert len(owner["values"]) == len(owner["response_mask"]) == len(owner["input_ids"]) - 1
    assert sum(v != 0 for v in owner["values"]) == (3 if window else 5)
    assert broken["turns"][0]["value"] == 0.0
    plain = make_config({**given, "algorithm": "grpo"})
    credit = assign_credit(plain, None, [[group]], judged)
    for record in iteration_records(plain, 0, None, [[group]], judged, credit):
        assert not {"values"} & record.keys()
        assert not any({"value", "values", "bonus"} & turn.keys() for turn in record["turns"])


def test_no_penalty_is_minus_zero() -> None:
    config = make_config({"algorithm": "grpo", "num_strategies": 1, "num_rollouts": 1})
    group = [make_trajectory(1.0, unparsed=(0,), invalid=(1,))]
    judged = [[[Judgment(None)]]]
    (record,) = iteration_records(config, 0, None, [[group]], judged, assign_credit(config, None, [[group]], judged))
    assert "-0.0" not in json.dumps(record)
