"""Many episodes at once: neither parts nor threads nor portions change what is sampled; what breaks breaks alone."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fakes import HANG, GuessTaskSet, ScriptedDecoder

import hsg.rollout
import hsg.strategy.judge
from hsg.config.loading import make_config
from hsg.config.options import Config, JudgeConfig
from hsg.engine.generation import Cost, Decoder
from hsg.model.fit import Fit
from hsg.model.policy import Policy
from hsg.play.episode import Request
from hsg.play.faults import fault_metrics
from hsg.protocol import FAULTS, StopReason
from hsg.rollout import Rollout, RolloutCosts
from hsg.strategy.judge import Judge
from hsg.types import Judgment, Trajectory


def configure(**rollout: Any) -> Config:
    options = {"max_turns": 4, "max_action_tokens": 8, "env_timeout_seconds": 20.0, **rollout}
    return make_config({"prompts": {"style": "terse"}, "rollout": options, "judge": {"max_tokens": 12}})


def requests(
    task_set: GuessTaskSet, num_tasks: int = 3, num_strategies: int = 2, num_rollouts: int = 2
) -> list[Request]:
    tasks = task_set.tasks("train")
    return [
        Request(tasks[p], p, 11, n, m, ("rollout", tasks[p].id, n, m))
        for p in range(num_tasks) for n in range(num_strategies) for m in range(num_rollouts)
    ]  # fmt: skip


def play(
    policy: Policy,
    config: Config,
    task_set: GuessTaskSet | None = None,
    make_judge: Callable[[Rollout], Judge] | None = None,
    costs: RolloutCosts | None = None,
    chosen: slice = slice(None),
    **shape: int,
) -> tuple[list[Trajectory], list[Judgment]]:
    task_set = task_set or GuessTaskSet()
    rollout = Rollout(config, policy, task_set)
    try:
        episodes = rollout.begin(requests(task_set, **shape)[chosen])
        for episode in episodes:
            episode.strategy = f"try {episode.request.strategy_index}"
        judge = make_judge(rollout) if make_judge else None
        return rollout.play(episodes, temperature=1.3, costs=costs or RolloutCosts(), judge=judge)
    finally:
        rollout.close()


def self_judge(policy: Policy, *, on_cache: bool = True, limit: int | None = None, **options: Any) -> Callable:
    def make(rollout: Rollout) -> Judge:
        config = JudgeConfig(max_tokens=12, **options)
        where = policy.context_limit if limit is None else limit
        return Judge(config, rollout.prompts, policy.model, policy.chat, context_limit=where, on_cache=on_cache)

    return make


def essence(played: list[Trajectory]) -> list[Any]:
    return [
        (t.task.id, t.strategy_index, t.rollout_index, t.outcome, t.stop_reason, t.turns,
         [row.input_ids.tolist() for row in t.rows])
        for t in played
    ]  # fmt: skip


def assert_same(some: list[Trajectory], others: list[Trajectory]) -> None:
    assert essence(some) == essence(others)
    for a, b in zip(some, others, strict=True):
        for one, other in zip(a.rows, b.rows, strict=True):
            assert one.logprobs.tolist() == pytest.approx(other.logprobs.tolist(), abs=1e-6)


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_parts_threads_and_portions_change_nothing(guesser: Policy, context: str) -> None:
    expected, _ = play(guesser, configure(context=context, streams=1, env_threads=1, cache="off"))
    assert len({t.stop_reason for t in expected}) > 1
    assert len({turn.response for t in expected for turn in t.turns}) > 3
    for options in (
        {"streams": 1}, {"streams": 5, "env_threads": 3}, {"max_cache_tokens": 1}, {"max_cache_tokens": 5 * 512, "streams": 2},
    ):  # fmt: skip
        got, _ = play(guesser, configure(context=context, **options))
        assert_same(got, expected)
    alone = [play(guesser, configure(context=context), chosen=slice(i, i + 1))[0][0] for i in range(0, 12, 5)]
    assert_same(alone, expected[::5])


def test_order_is_that_of_the_requests(guesser: Policy) -> None:
    played, judgments = play(guesser, configure(streams=3))
    assert [(t.task.id, t.strategy_index, t.rollout_index) for t in played] == [
        (r.task.id, r.strategy_index, r.rollout_index) for r in requests(GuessTaskSet())
    ]
    assert judgments == [Judgment(None)] * 12
    assert all(t.strategy == f"try {t.strategy_index}" and t.seed == 11 for t in played)


def test_costs_are_counted_by_purpose(guesser: Policy) -> None:
    costs = RolloutCosts()
    played, _ = play(guesser, configure(), costs=costs, make_judge=self_judge(guesser))
    assert costs.rollout.sampled == sum(row.num_sampled for t in played for row in t.rows)
    assert costs.rollout.positions > costs.rollout.sampled > 0
    assert costs.judge.sampled > 0
    assert costs.strategy.positions == 0


# ------------------------------------------------------------------------------------------------------ scripted policy


def scripted(monkeypatch: pytest.MonkeyPatch, script: Callable[[int, int], tuple[list[int], bool]]) -> None:
    class Decoder(ScriptedDecoder):
        rows_made = 0

    Decoder.script = staticmethod(script)
    monkeypatch.setattr(hsg.rollout, "Decoder", Decoder)


def test_scripted_game(monkeypatch: pytest.MonkeyPatch, guesser: Policy) -> None:
    """Row r guesses r, r + 1, ...: the second task's answer is 1, so that row 1 wins at once and row 0 a turn later."""
    chat = guesser.chat
    scripted(monkeypatch, lambda r, n: ([*chat.encode(f"<action>{r + n}</action>"), chat.end_id], True))
    task_set = GuessTaskSet()
    one_task = slice(4, 8)
    played, _ = play(guesser, configure(streams=1), task_set, chosen=one_task)
    assert [t.outcome for t in played] == [0.75, 1.0, 0.0, 0.0]
    assert [len(t.turns) for t in played] == [2, 1, 4, 4]
    assert [t.action for t in played[2].turns] == ["2", "3", "4", "5"]


def test_script_with_pad_and_end_ids_inside(monkeypatch: pytest.MonkeyPatch, guesser: Policy) -> None:
    """B01, B02: what was sampled is known by position; the decoder alone says whether a reply was closed."""
    pad, end = guesser.chat.tokenizer.pad_token_id, guesser.chat.end_id
    word = guesser.chat.encode("a")[0]
    replies = {0: ([word, pad, word, end], True), 1: ([pad, pad], False)}
    scripted(monkeypatch, lambda r, n: replies[r % 2])
    played, _ = play(guesser, configure(streams=1, max_turns=2))
    for r, trajectory in enumerate(played):
        (row,) = trajectory.rows
        assert row.input_ids[1:][row.response_mask].tolist() == replies[r % 2][0] * 2
        assert [t.truncated for t in trajectory.turns] == [not replies[r % 2][1]] * 2


# ------------------------------------------------------------------------------------------------------- faults (B19)


def test_two_of_four_break_and_the_others_go_on(guesser: Policy) -> None:
    """One raises at its second step, one hangs at its first; the two others play the same game as without them."""
    shape = {"num_tasks": 1, "num_strategies": 2, "num_rollouts": 3}
    healthy, _ = play(guesser, configure(), **shape)
    long = [i for i, t in enumerate(healthy) if len(t.turns) > 1]
    raises, hangs = long[0], long[-1]
    assert raises != hangs
    faults = {raises: ("step 2", "raise"), hangs: ("step 1", "hang")}
    config = configure(env_timeout_seconds=2.0, env_threads=1)
    began = time.monotonic()
    broken, _ = play(guesser, config, GuessTaskSet(faults=faults.get), **shape)
    assert time.monotonic() - began < HANG
    rest = [i for i in range(6) if i not in faults]
    assert_same([broken[i] for i in rest], [healthy[i] for i in rest])
    assert broken[hangs].stop_reason is StopReason.ENV_TIMEOUT
    assert broken[raises].stop_reason is StopReason.ENV_ERROR
    for i in faults:
        assert (broken[i].outcome, broken[i].valid) == (None, False)
    assert len(broken[raises].turns) == 2
    assert len(broken[hangs].turns) == 1


@pytest.mark.parametrize("fault", [("start", "raise"), ("step 1", "hang"), ("create", "hang"), ("close", "hang")])
@pytest.mark.parametrize("env_threads", [1, 2])
def test_all_break_and_the_rollout_ends_on_time(guesser: Policy, fault: tuple[str, str], env_threads: int) -> None:
    began = time.monotonic()
    seconds = 0.5 if fault[0] == "close" else 0.1  # before that all calls are whole, and a busy machine may delay them
    config = configure(env_timeout_seconds=seconds, env_threads=env_threads, max_turns=1)
    played, judgments = play(
        guesser, config, GuessTaskSet(faults=lambda n: fault), self_judge(guesser), num_tasks=2, num_rollouts=1
    )
    assert time.monotonic() - began < HANG
    if fault[0] == "close":  # the episodes themselves are over by then
        assert all(t.valid for t in played)
    else:
        assert all(t.stop_reason in FAULTS and t.outcome is None for t in played)
        assert judgments == [Judgment(None)] * 4


@pytest.mark.parametrize("fault", [("step 1", "raise"), ("start", "none"), ("step 1", "nan"), ("create", "raise")])
def test_broken_rollout_is_played_again(guesser: Policy, fault: tuple[str, str]) -> None:
    """Two of six break at first; played again in whole worlds, they are what they would have been at once."""
    shape = {"num_tasks": 1, "num_strategies": 2, "num_rollouts": 3}
    healthy, said = play(guesser, configure(env_threads=1), make_judge=self_judge(guesser), **shape)
    world = GuessTaskSet(faults=lambda n: fault if n in (1, 4) else None)
    played, judged = play(guesser, configure(env_threads=1, env_retries=1), world, self_judge(guesser), **shape)
    assert_same(played, healthy)
    assert judged == said
    assert len(world.made) == 6 + 2


def test_broken_rollout_is_played_again_under_its_own_turn_cap(guesser: Policy) -> None:
    """Training may begin episodes with a lower cap than `rollout.max_turns` (ScalingInter)."""
    for faults in (lambda n: None, lambda n: ("step 1", "raise") if n < 6 else None):
        task_set = GuessTaskSet(faults=faults)
        rollout = Rollout(configure(env_threads=1, env_retries=1), guesser, task_set)
        try:
            episodes = rollout.begin(requests(task_set, 1, 2, 3), max_turns=2)
            played, _ = rollout.play(episodes, temperature=1.3, costs=RolloutCosts())
        finally:
            rollout.close()
        assert all(t.valid for t in played)
        assert max(len(t.turns) for t in played) == 2


def test_rollout_that_goes_on_breaking_is_given_up_and_counted(guesser: Policy) -> None:
    """The first and both retries of one rollout break, one of them in another way; every attempt counts."""
    task_set = GuessTaskSet(
        faults=lambda n: {1: ("start", "raise"), 3: ("start", "bytes"), 4: ("start", "raise")}.get(n)
    )
    rollout = Rollout(configure(env_threads=1, env_retries=2), guesser, task_set)
    try:
        episodes = rollout.begin(requests(task_set, 1, 1, 3))
        played, judged = rollout.play(episodes, temperature=1.3, costs=RolloutCosts())
    finally:
        rollout.close()
    assert [t.valid for t in played] == [True, False, True]
    assert judged == [Judgment(None)] * 3
    assert [fault_metrics(rollout.errors)[f"fault/{kind}"][0] for kind in ("raised", "nonsense", "timeout")] == [
        2,
        1,
        0,
    ]


# ---------------------------------------------------------------------------------------------------------- the judge


@pytest.mark.parametrize(("temperature", "max_action_tokens"), [(0.0, 8), (1.0, 8), (0.0, 3)])
def test_judge_on_the_cache_equals_a_fresh_prompt(guesser: Policy, temperature: float, max_action_tokens: int) -> None:
    """The conversation's own ids and the question, forwarded anew, are answered with the same tokens.

    With 3 tokens every response is cut off, so that the question has to close the last one.
    """
    asked: list[list[int]] = []

    class Spy(Judge):
        def judge(self, episodes: Any, cost: Cost, decoder: Decoder | None = None, rows: Any = ()) -> list[Judgment]:
            said = super().judge(episodes, cost, decoder, rows)
            assert decoder is not None
            asked.extend(decoder.rows[row] for row in rows)
            for episode, row, judgment in zip(episodes, rows, said, strict=True):
                text = self.prompts.judgment(episode.observation, len(episode.turns))
                question = self.chat.next_user(text, last=episode.conversation.last)
                stem = episode.conversation.ids[: episode.turns[-1].stop + 1] + question
                at = episode.turns[-1].stop + (0 if episode.conversation.last == self.chat.end_id else 1)
                assert stem[at] == self.chat.end_id
                assert decoder.rows[row][: len(stem)] == stem
                fresh = Decoder(self.model, self.chat.stop_ids, [stem], use_cache=False)
                answer = fresh.sample(
                    [0], temperatures=[self.config.temperature], max_new_tokens=[self.config.max_tokens],
                    generators=[hsg.strategy.judge.make_generator(*episode.request.key, "judgment")],
                )[0]  # fmt: skip
                assert decoder.rows[row] == stem + list(answer.ids)
                assert judgment.text == self.chat.decode(answer.ids)
            return said

    def make(rollout: Rollout) -> Judge:
        config = JudgeConfig(max_tokens=12, temperature=temperature)
        return Spy(config, rollout.prompts, guesser.model, guesser.chat, context_limit=512, on_cache=True)

    played, judgments = play(guesser, configure(max_action_tokens=max_action_tokens), make_judge=make)
    assert len(asked) == len(played) == 12
    assert any(j.flagged for j in judgments) or max_action_tokens == 3
    assert max_action_tokens == 8 or all(t.turns[-1].truncated for t in played)
    assert all(k < len(t.turns) for t, j in zip(played, judgments, strict=True) for k in j.flagged)
    # Its tokens are no part of any trajectory.
    assert all(row.response_mask[-1] for t in played for row in t.rows)


@pytest.mark.parametrize("stop", [{"max_tokens": 40}, {"max_parse_failures": 1}, {"max_turns": 2}])
def test_judge_follows_the_last_response_whatever_ended_it(guesser: Policy, stop: dict[str, int]) -> None:
    played, judgments = play(guesser, configure(**stop), make_judge=self_judge(guesser))
    assert all(j.text is not None and not j.skipped for j in judgments)
    assert any(t.stop_reason is not StopReason.DONE for t in played)


def test_judge_without_room_flags_nothing_and_is_counted(guesser: Policy) -> None:
    for on_cache in (True, False):
        _, judgments = play(guesser, configure(), make_judge=self_judge(guesser, limit=20, on_cache=on_cache))
        assert judgments == [Judgment(None, (), skipped=True)] * 12


@pytest.mark.parametrize("cache", ["on", "steps", "off"])
def test_rollouts_and_judges_decode_as_their_model_can(
    monkeypatch: pytest.MonkeyPatch, guesser: Policy, cache: str
) -> None:
    made = []

    class Spy(Decoder):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            made.append((self.use_cache, self.stepwise))

    monkeypatch.setattr(hsg.rollout, "Decoder", Spy)
    monkeypatch.setattr(hsg.strategy.judge, "Decoder", Spy)
    monkeypatch.setattr(guesser.model, "fit", Fit("sdpa", cache, "off"), raising=False)
    play(guesser, configure(), make_judge=self_judge(guesser, on_cache=False))
    assert len(made) > 2
    assert set(made) == {(cache != "off", cache == "steps")}


@pytest.mark.parametrize("text", ["<think>Not <judgment>[1]</judgment>, since", "<judgment>[1]</judgment>"])
def test_a_judgment_that_is_only_thought_flags_nothing(
    monkeypatch: pytest.MonkeyPatch, guesser: Policy, text: str
) -> None:
    """M8: the thought was cut off; the second text counts unless the template's header has opened one."""
    for thinking in ("", "<think>"):
        chat = copy.copy(guesser.chat)
        chat.thinking = thinking
        said = [*chat.encode(text), chat.end_id]

        class Reader(ScriptedDecoder):
            rows_made = 0
            script = staticmethod(lambda r, n, said=said: (said, True))

        monkeypatch.setattr(hsg.strategy.judge, "Decoder", Reader)
        thinker = replace(guesser, chat=chat)
        make = self_judge(thinker, on_cache=False)

        def long_judge(rollout: Rollout, make: Callable[[Rollout], Judge] = make) -> Judge:
            judge = make(rollout)
            judge.config = replace(judge.config, max_tokens=60)
            return judge

        _, judgments = play(guesser, configure(streams=1), make_judge=long_judge, num_tasks=1)
        counts = not thinking and not text.startswith("<think>")
        assert {(j.flagged, j.parsed) for j in judgments} == {((0,), True) if counts else ((), False)}


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_judge_that_reads_the_turns(monkeypatch: pytest.MonkeyPatch, guesser: Policy, context: str) -> None:
    """Any other judge gets one prompt: task, strategy, numbered turns with their results. The last block counts."""
    chat, prompts = guesser.chat, []

    class Reader(ScriptedDecoder):
        rows_made = 0

        def __init__(self, model: Any, stop_ids: Any, asked: Any, **options: Any) -> None:
            super().__init__(model, stop_ids, asked, **options)
            prompts.extend(chat.tokenizer.decode(ids) for ids in asked)

    texts = ["<judgment>[1]</judgment>x<judgment>[2, 9, 2]</judgment>", "none"]
    Reader.script = staticmethod(lambda r, n: ([*chat.encode(texts[r % 2]), chat.end_id], True))
    monkeypatch.setattr(hsg.strategy.judge, "Decoder", Reader)
    make = self_judge(guesser, on_cache=False)

    def long_judge(rollout: Rollout) -> Judge:
        judge = make(rollout)
        judge.config = replace(judge.config, max_tokens=60)
        return judge

    config = configure(context=context, streams=1)
    played, judgments = play(guesser, config, make_judge=long_judge, num_tasks=1)
    for i, (trajectory, judgment, prompt) in enumerate(zip(played, judgments, prompts, strict=True)):
        seen = [*(t.observation for t in trajectory.turns[1:]), trajectory.final_observation]
        lines = "".join(
            f"{k + 1} {t.action or t.response}: {result}\n"
            for k, (t, result) in enumerate(zip(trajectory.turns, seen, strict=True))
        )
        expected = f"Guess. It is warm.\n<strategy>{trajectory.strategy}</strategy>\n{lines}<judgment>?"
        assert expected in prompt
        two = (1,) if len(trajectory.turns) >= 2 else ()
        assert (judgment.flagged, judgment.parsed) == ((two, True) if i % 2 == 0 else ((), False))
