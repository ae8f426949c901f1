"""What a warm-started model can do, per prompt form: score, parse rates, judge precision and recall.

    play with its own strategies      parse rates of strategy and action, score; self-judgments of that play
    play without a strategy           parse rate, score
    play with a strategy every turn   the same, and of strategies after an earlier attempt the parse rate
    demonstrations of held-out tasks  judgments of play whose wasted turns are known, in and outside the conversation;
                                      what it is worth (nats an action) to be given the strategy that is followed

Sampled as in training (temperatures of the config), greedy for judgments as `judge.temperature` says.  Deliberately
absent: any use of the test split.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from hsg.config.options import Config, ReflectionConfig
from hsg.engine.generation import Cost, Decoder
from hsg.engine.seeds import derive_seed, make_generator
from hsg.experiments.imitation.demonstrations import FORMS, Played, choose_tasks, make_rows, play_demonstrations
from hsg.experiments.imitation.supervised import nll_by_form
from hsg.measure.evaluation import evaluation_tasks
from hsg.model.fit import fit_of
from hsg.model.policy import Policy
from hsg.play.episode import Request
from hsg.protocol import TaskSet
from hsg.rollout import Rollout, RolloutCosts
from hsg.run.build import load_policy, make_judge
from hsg.run.files import write_whole
from hsg.strategy.propose import propose
from hsg.text.prompts import Prompts, parse_judgment
from hsg.types import Attempt, Judgment, Reflection, Trajectory


def report(
    config: Config, task_set: TaskSet, folder: str | Path, *, num_tasks: int = 32, num_demonstrated: int = 16
) -> dict[str, float]:
    """Flat metrics "form/name" of the model in `folder` on `num_tasks` tasks of `evaluation.split`.

    Judge metrics count turns: precision = wasted among flagged, recall = flagged among wasted. A metric without cases
    is left out.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = load_policy(config, folder, device)
    found = _play(config, policy, task_set, num_tasks, "episode") | _play(config, policy, task_set, num_tasks, "none")
    if config.warmstart.share_turn:
        found |= _play(config, policy, task_set, num_tasks, "turn")
    tasks = choose_tasks(task_set.tasks(config.evaluation.split), num_demonstrated, seed=0)
    played = play_demonstrations(config, task_set, tasks)
    if config.warmstart.share_reflection:
        found |= _reflect(config, policy, played)
    return found | _demonstrated(config, policy, played)


def cached_report(config: Config, task_set: TaskSet, folder: Path) -> dict[str, float]:
    """The report of a warm-started folder, made once and kept beside the weights."""
    path = folder / "report.json"
    if not path.is_file():
        write_whole(path, json.dumps(report(config, task_set, folder), indent=1))
    return json.loads(path.read_text(encoding="utf-8"))


def _play(config: Config, policy: Policy, task_set: TaskSet, num_tasks: int, per: str) -> dict[str, float]:
    tasks = evaluation_tasks(config, task_set)[:num_tasks]
    with_strategy = per == "episode"
    config = _with_strategies(config, per)
    keys = [("report", per, task.id) for task in tasks]
    rollout = Rollout(config, policy, task_set)
    found: dict[str, float] = {}
    try:
        requests = [
            Request(task, i, derive_seed("environment", "report", task.id), 0, 0, keys[i])
            for i, task in enumerate(tasks)
        ]
        episodes = rollout.begin(requests)
        judge = None
        if with_strategy:
            for episode in episodes:
                episode.wait()
            firsts = [episode.first_observation or "" for episode in episodes]
            drawn = propose(
                config, policy, rollout.prompts, firsts, keys,
                num_candidates=1, temperature=config.temperature.strategy, cost=Cost(),
            )  # fmt: skip
            for episode, (strategy,) in zip(episodes, drawn, strict=True):
                episode.strategy = strategy.text
            found["strategy/parse_rate"] = _mean([strategy.parsed for (strategy,) in drawn])
            judge = make_judge(config, rollout, policy)
        costs = RolloutCosts()
        played, judgments = rollout.play(
            episodes, temperature=config.temperature.action, strategy_temperature=config.temperature.strategy,
            costs=costs, judge=judge,
        )  # fmt: skip
    finally:
        rollout.close()
    form = {"episode": "action", "none": "plain", "turn": "turn"}[per]
    found |= _play_metrics(form, [t for t in played if t.valid])
    if with_strategy:
        found |= _self_judgment_metrics([j for j in judgments if j.text is not None])
    return found


def _with_strategies(config: Config, per: str) -> Config:
    """The same config with a strategy for the episode, for every turn, or none."""
    loss = dataclasses.replace(
        config.loss, level_reduction="joint"
    )  # allowed with any of them; nothing is trained here
    strategy = dataclasses.replace(config.strategy, per=per)  # type: ignore[arg-type]
    return dataclasses.replace(config, strategy=strategy, loss=loss, reflection=ReflectionConfig())


def _reflect(config: Config, policy: Policy, played: Sequence[Played]) -> dict[str, float]:
    """Whether a strategy is written after an earlier attempt was shown, for each of the demonstrations as that attempt."""
    drawn = propose(
        config, policy, Prompts.of(config), [item.observations[0] for item in played],
        [("report", "reflection", i) for i in range(len(played))],
        num_candidates=1, temperature=config.temperature.strategy, cost=Cost(),
        reflections=[Reflection(Attempt((item.strategy,), item.feedback), item.success) for item in played],
    )  # fmt: skip
    return {"reflection/parse_rate": _mean([strategy.parsed for (strategy,) in drawn])} if drawn else {}


def _play_metrics(form: str, played: Sequence[Trajectory]) -> dict[str, float]:
    if not played:
        return {}
    turns = [turn for trajectory in played for turn in trajectory.turns]
    return {
        f"{form}/parse_rate": _mean([turn.parsed for turn in turns]),
        f"{form}/valid_rate": _mean([turn.valid for turn in turns]),
        f"{form}/score": _mean([t.score for t in played]),
        f"{form}/success": _mean([t.success for t in played]),
        f"{form}/turns": len(turns) / len(played),
    }


def _self_judgment_metrics(judgments: Sequence[Judgment]) -> dict[str, float]:
    if not judgments:
        return {}
    return {
        "judgment/parse_rate": _mean([j.parsed for j in judgments]),
        "judgment/share_flagged": _mean([bool(j.flagged) for j in judgments]),
    }


def _demonstrated(config: Config, policy: Policy, played: Sequence[Played]) -> dict[str, float]:
    """Judgments of held-out demonstrations, and what following a given strategy is worth."""
    settings = config.warmstart
    others = {f"share_{form}": 0.0 for form in FORMS}
    judged = dataclasses.replace(settings, **{**others, "share_judgment": 1.0})  # type: ignore[arg-type]
    found: dict[str, float] = {}
    cases: dict[str, list[tuple[list[int], Played]]] = {"judgment_conversation": [], "judgment_alone": []}
    for item in played:
        one = dataclasses.replace(config, warmstart=judged)
        for row in make_rows(one, [item], policy.chat, policy.context_limit, alone_share=1.0):
            if FORMS.index("judgment") in row.forms:
                start = row.forms.index(FORMS.index("judgment")) + 1
                in_conversation = FORMS.index("action") in row.forms[:start]
                cases["judgment_conversation" if in_conversation else "judgment_alone"].append((row.ids[:start], item))
    for name, asked in cases.items():
        found |= _judge_cases(config, policy, name, asked)
    exchanged = [
        dataclasses.replace(item, strategy=other.strategy)
        for item, other in zip(played, [*played[1:], *played[:1]], strict=True)
        if other.strategy != item.strategy and other.task_id == item.task_id
    ]
    if exchanged:
        right = [
            item for item in played if any(item.actions == e.actions and item.task_id == e.task_id for e in exchanged)
        ]
        losses = [
            nll_by_form(policy.model, make_rows(config, items, policy.chat, policy.context_limit), settings)["action"]
            for items in (right, exchanged)
        ]
        found["action/nll"] = losses[0]
        found["action/nll_with_another_strategy"] = losses[1]
    return found


def _judge_cases(
    config: Config, policy: Policy, name: str, asked: Sequence[tuple[list[int], Played]]
) -> dict[str, float]:
    if not asked:
        return {}
    decoder = Decoder(policy.model, policy.chat.stop_ids, [ids for ids, _ in asked], **fit_of(policy.model).decoding)
    answers = decoder.sample(
        list(range(len(asked))),
        temperatures=[config.judge.temperature] * len(asked),
        generators=[make_generator("report", name, i) for i in range(len(asked))],
        max_new_tokens=[config.judge.max_tokens] * len(asked),
    )
    read = [
        parse_judgment(policy.chat.decode(answer.ids), len(item.actions), thinking=policy.chat.thinking)
        for answer, (_, item) in zip(answers, asked, strict=True)
    ]
    pairs = [(set(turns or ()), set(item.wasted)) for turns, (_, item) in zip(read, asked, strict=True)]
    hits = sum(len(flagged & wasted) for flagged, wasted in pairs)
    num_flagged, num_wasted = (sum(len(pair[i]) for pair in pairs) for i in (0, 1))
    found = {f"{name}/parse_rate": _mean([turns is not None for turns in read])}
    if num_flagged:
        found[f"{name}/precision"] = hits / num_flagged
    if num_wasted:
        found[f"{name}/recall"] = hits / num_wasted
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def print_report(found: dict[str, float]) -> None:
    """One line per form."""
    forms: dict[str, list[str]] = {}
    for key, value in found.items():
        form, name = key.split("/")
        forms.setdefault(form, []).append(f"{name} {value:.3f}")
    for form, parts in forms.items():
        print(f"{form:<24}{'  '.join(parts)}")
