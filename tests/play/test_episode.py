"""One episode by hand: ids that only grow, masks by position, every reason to stop, environments that break."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fakes import HANG, GuessTaskSet

from hsg.config.options import RolloutConfig
from hsg.engine.generation import Sampled
from hsg.play.episode import Episode, Request, results
from hsg.play.pool import Pool
from hsg.protocol import FAULTS, StopReason
from hsg.text.chat import ChatFormat
from hsg.text.prompts import Prompts
from hsg.types import Trajectory

PROMPTS = Prompts.make("terse")
FAR = 10_000  # a context that is never full

CHATML_WITH_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def chat(guesser: Any) -> ChatFormat:
    return guesser.chat


def begin(
    chat: ChatFormat,
    faults: Callable = lambda n: None,
    task_index: int = 3,
    prompts: Prompts = PROMPTS,
    **options: Any,
) -> Episode:
    """An episode of the guessing game; task 3 has the answer 3."""
    options = {"max_turns": 4, "max_action_tokens": 16, "env_timeout_seconds": 5.0, **options}
    task_set = GuessTaskSet(faults=faults)
    config = RolloutConfig(**options)
    pool = Pool(config.env_threads, config.env_timeout_seconds)
    request = Request(task_set.tasks("train")[task_index], 0, 7, 1, 2, ("key",))
    episode = Episode(request, task_set, pool, config, prompts, chat)
    episode.strategy = "try 3"
    return episode


def answer(ids: Sequence[int], *, closed: bool = True) -> Sampled:
    return Sampled(tuple(ids), tuple(-0.1 * (i + 1) for i in range(len(ids))), (0.7,) * len(ids), closed)


def say(chat: ChatFormat, text: str, *, closed: bool = True) -> Sampled:
    ids = chat.encode(text)
    return answer([*ids, chat.end_id] if closed else ids, closed=closed)


def drive(episode: Episode, answers: Sequence[Sampled], limit: int = FAR) -> Trajectory:
    """Give the answers in turn; the episode must end by then."""
    talk(episode, answers, limit)
    return episode.trajectory()


def talk(episode: Episode, answers: Sequence[Sampled], limit: int = FAR) -> None:
    """Give the answers in turn, cut to the room there is, and ask once more."""
    for given in answers:
        episode.wait()
        if not episode.live or episode.ask(limit) is None:
            break
        room = episode.room(limit)
        fits = len(given.ids) <= room
        cut = given if fits else answer(given.ids[:room], closed=False)
        episode.receive(cut)
    episode.wait()
    if episode.live:
        episode.ask(limit)


# ------------------------------------------------------------------------------------------------------------ the ids


@pytest.mark.parametrize("template", [None, CHATML_WITH_SYSTEM])
def test_conversation_is_one_render_of_the_same_messages(chat: ChatFormat, template: str | None) -> None:
    """B04: the newline after the end token is there, the automatic system prompt is there once."""
    if template is not None:
        tokenizer = type(chat.tokenizer)(
            tokenizer_object=chat.tokenizer.backend_tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
        )
        tokenizer.chat_template = template
        chat = ChatFormat(tokenizer)
    episode = begin(chat)
    replies = ["hm <action>0</action>", "<action>5</action>", "nothing"]
    talk(episode, [say(chat, replies[0]), say(chat, replies[1], closed=False), say(chat, replies[2])])
    assert episode.conversation is not None
    seen = ["Guess. It is high up.", "Too low, go on.", "No.", "No action."]
    users = [PROMPTS.first_action(seen[0], "try 3"), *(PROMPTS.next_action(t + 1, seen[t]) for t in (1, 2, 3))]
    messages = []
    for i, text in enumerate(users):
        messages.append({"role": "user", "content": text})
        if i < len(replies):
            messages.append({"role": "assistant", "content": replies[i]})
    whole = chat.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert whole.count("Be good.") == (0 if template is None else 1)
    assert episode.conversation.ids == chat.encode(whole)


def test_masks_are_by_position(chat: ChatFormat) -> None:
    """B01: replies of 2 and 6 ids; both end on the end token, which is in every prompt too; one has the pad id inside."""
    pad, end = chat.tokenizer.pad_token_id, chat.end_id
    assert end in chat.prompt("x")
    word = chat.encode("a")[0]
    first, second, third = [word, end], [word, pad, word, end - 1, pad, end], [word, pad]
    episode = begin(chat, max_turns=3)
    trajectory = drive(episode, [answer(first), answer(second), answer(third, closed=False)])
    (row,) = trajectory.rows
    gap = chat.next_user(PROMPTS.next_action(2, "No action."), chat.end_id)
    later = chat.next_user(PROMPTS.next_action(3, "No action."), chat.end_id)
    prompt = chat.prompt(PROMPTS.first_action("Guess. It is high up.", "try 3"))
    #            prompt .............. | first | gap ..... | second | later ... | third     (the row ends with it)
    parts = [(prompt, False), (first, True), (gap, False), (second, True), (later, False), (third, True)]
    assert row.input_ids.tolist() == [i for ids, _ in parts for i in ids]
    sampled = [mask for ids, mask in parts for _ in ids]
    assert row.response_mask.tolist() == sampled[1:]
    assert row.logprobs[row.response_mask].tolist() == pytest.approx(
        [-0.1 * (i + 1) for ids in (first, second, third) for i in range(len(ids))]
    )
    assert row.logprobs[~row.response_mask].abs().sum() == 0
    assert row.temperatures.tolist() == pytest.approx([0.7 if m else 1.0 for m in sampled[1:]])
    for turn, ids in zip(trajectory.turns, (first, second, third), strict=True):
        assert row.input_ids[turn.start + 1 : turn.stop + 1].tolist() == ids
        assert turn.num_tokens == len(ids)
    assert [t.truncated for t in trajectory.turns] == [False, False, True]


def test_ids_are_only_appended(chat: ChatFormat) -> None:
    episode, before = begin(chat), []
    for given in [say(chat, "<action>0</action>"), say(chat, "x", closed=False), say(chat, "<action>9</action>")]:
        episode.wait()
        ids = episode.ask(FAR)
        assert episode.conversation is not None
        assert episode.conversation.ids == before + ids
        episode.receive(given)
        before = list(episode.conversation.ids)
        assert before[-len(given.ids) :] == list(given.ids)


def test_text_that_would_not_survive_reencoding_stays_as_sampled(chat: ChatFormat) -> None:
    """Half a UTF-8 character, and a pair of ids that the tokenizer would merge."""
    odd = [chat.encode("ä")[0], chat.encode("n")[0], chat.encode("o")[0], chat.end_id]
    assert chat.encode(chat.decode(odd)) != odd[:-1]
    trajectory = drive(begin(chat, max_turns=1), [answer(odd)])
    assert trajectory.rows[0].input_ids[-4:].tolist() == odd


# ------------------------------------------------------------------------------------------------------- turns, stops


def test_record_of_a_game(chat: ChatFormat) -> None:
    episode = begin(chat)
    trajectory = drive(episode, [say(chat, "<action>0</action>"), say(chat, "<action>look</action>"),
                                 say(chat, "<action>3</action>")])  # fmt: skip
    assert trajectory.stop_reason is StopReason.DONE
    assert (trajectory.outcome, trajectory.score, trajectory.success) == (0.5, 0.5, True)
    assert [t.observation for t in trajectory.turns] == ["Guess. It is high up.", "Too low, go on.", "No."]
    assert trajectory.final_observation == "Right."
    assert [t.action for t in trajectory.turns] == ["0", "look", "3"]
    assert [t.valid for t in trajectory.turns] == [True, False, True]
    assert [t.reward for t in trajectory.turns] == [0.0, 0.0, 0.5]
    assert results(trajectory) == [("0", "Too low, go on."), ("look", "No."), ("3", "Right.")]
    assert (trajectory.seed, trajectory.strategy_index, trajectory.rollout_index) == (7, 1, 2)
    assert trajectory.strategy == "try 3"
    assert trajectory.valid


def test_unparseable_action_is_not_sent(chat: ChatFormat) -> None:
    made: list[GuessTaskSet] = []
    episode = begin(chat)
    made.append(episode._task_set)
    trajectory = drive(episode, [say(chat, "3"), say(chat, "<action></action>"), say(chat, "<action>3</action>")])
    assert made[0].made[0].turns == 1  # the environment saw one action in three turns
    assert [t.action for t in trajectory.turns] == [None, None, "3"]
    assert [t.observation for t in trajectory.turns][1:] == ["No action.", "No action."]
    assert [(t.valid, t.parsed, t.reward) for t in trajectory.turns[:2]] == [(False, False, 0.0)] * 2
    assert trajectory.stop_reason is StopReason.DONE
    assert trajectory.outcome == 1.0


NO_ACTION, WRONG = "none", "<action>5</action>"


@pytest.mark.parametrize(
    ("reason", "options", "said", "num_turns"),
    [
        (StopReason.DONE, {}, ["<action>3</action>"], 1),
        (StopReason.MAX_TURNS, {"max_turns": 2}, [WRONG] * 9, 2),
        (StopReason.MAX_TURNS, {"max_turns": 2}, [NO_ACTION] * 9, 2),  # a turn without an action counts
        (StopReason.PARSE_ERROR, {"max_parse_failures": 2}, [NO_ACTION, WRONG, NO_ACTION, WRONG], 3),
        (StopReason.MAX_TOKENS, {"max_tokens": 30, "max_turns": 99}, [WRONG] * 99, None),
        (StopReason.CONTEXT_FULL, {"max_turns": 99}, [WRONG] * 99, None),
    ],
)
@pytest.mark.parametrize("context", ["conversation", "window"])
def test_reasons_to_stop(
    chat: ChatFormat, reason: StopReason, options: dict[str, Any], said: list[str], num_turns: int | None, context: str
) -> None:
    length = len(chat.prompt(PROMPTS.first_action("Guess. It is high up.", "try 3")))
    limit = length + 40 if reason is StopReason.CONTEXT_FULL else FAR
    if reason is StopReason.CONTEXT_FULL and context == "window":
        options, limit = {**options, "window_turns": 99}, length + 20
    trajectory = drive(begin(chat, context=context, **options), [say(chat, text) for text in said], limit)
    assert trajectory.stop_reason is reason
    assert trajectory.outcome == (1.0 if reason is StopReason.DONE else 0.0)
    assert trajectory.error is None
    if num_turns is not None:
        assert len(trajectory.turns) == num_turns
    else:
        assert 1 <= len(trajectory.turns) < 20
    assert all(len(row.input_ids) <= limit for row in trajectory.rows)
    assert len(trajectory.rows) == (len(trajectory.turns) if context == "window" else 1)


def test_first_prompt_that_fills_the_context(chat: ChatFormat) -> None:
    """Nothing was said, yet the episode is over by no fault of the environment: it counts, with outcome 0."""
    trajectory = drive(begin(chat), [], limit=5)
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL
    assert (trajectory.turns, trajectory.rows, trajectory.outcome) == ((), (), 0.0)
    assert trajectory.valid


def test_room_shrinks_with_context_and_tokens(chat: ChatFormat) -> None:
    episode = begin(chat, max_tokens=60, max_action_tokens=12)
    episode.wait()
    prompt = episode.ask(FAR)
    assert prompt is not None
    assert episode.room(FAR) == 12
    assert episode.room(len(prompt) + 3) == 3
    episode.receive(answer([300] * 7))
    episode.wait()
    between = episode.ask(FAR)
    assert between is not None
    assert 60 - 7 - len(between) < 40
    assert episode.room(FAR) == min(12, 60 - 7 - len(between))


# --------------------------------------------------------------------------------------------------- what breaks (B19)

BROKEN = [
    *((where, kind) for where in ("start", "step 1", "step 2") for kind in ("none", "bytes", "huge", "surrogate")),
    *((where, kind) for where in ("create", "start", "step 1", "outcome", "admissible") for kind in ("raise", "exit")),
    ("step 2", "nan"), ("outcome", "nan"), ("outcome", "none"), ("outcome", "bytes"),
    ("admissible", "bytes"), ("admissible", "surrogate"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "kind"), BROKEN)
def test_broken_environment_ends_its_episode_only(chat: ChatFormat, where: str, kind: str) -> None:
    episode = begin(chat, lambda n: (where, kind), admissible_actions=True)
    trajectory = drive(episode, [say(chat, "<action>0</action>")] * 4)
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert trajectory.stop_reason in FAULTS
    assert (trajectory.outcome, trajectory.score, trajectory.success) == (None, 0.0, False)
    assert not trajectory.valid
    assert trajectory.error
    if kind == "raise":
        assert trajectory.error.startswith("OSError: engine died")
    trajectory.error.encode("utf-8")  # it goes into a file
    assert len(trajectory.turns) == (int(where[-1]) if where.startswith("step") else 0)
    assert trajectory.feedback is None or isinstance(trajectory.feedback, str)


@pytest.mark.parametrize("where", ["create", "start", "step 2", "outcome", "admissible"])
def test_environment_that_hangs_is_given_up(chat: ChatFormat, where: str) -> None:
    began = time.monotonic()
    episode = begin(chat, lambda n: (where, "hang"), env_timeout_seconds=0.3, env_threads=1, admissible_actions=True)
    trajectory = drive(episode, [say(chat, "<action>0</action>")] * 4)
    assert time.monotonic() - began < HANG
    assert trajectory.stop_reason is StopReason.ENV_TIMEOUT
    assert trajectory.outcome is None
    assert "0.3 seconds" in (trajectory.error or "")


def test_no_admissible_actions_is_fine(chat: ChatFormat) -> None:
    episode = begin(chat, lambda n: ("admissible", "none"), admissible_actions=True)
    assert drive(episode, [say(chat, "<action>3</action>")]).stop_reason is StopReason.DONE


def test_environment_is_closed_at_the_end(chat: ChatFormat) -> None:
    for said in ("<action>3</action>", "none"):
        episode = begin(chat, max_turns=1)
        drive(episode, [say(chat, said)])
        (made,) = episode._task_set.made
        deadline = time.monotonic() + HANG
        while not made.closed and time.monotonic() < deadline:
            time.sleep(0.01)
        assert made.closed


def test_abandoned_episode_closes_its_environment(chat: ChatFormat) -> None:
    episode = begin(chat)
    episode.wait()
    episode.abandon()
    (made,) = episode._task_set.made
    deadline = time.monotonic() + HANG
    while not made.closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made.closed


# ------------------------------------------------------------------------------------------- window, admissible actions


@pytest.mark.parametrize("window_turns", [0, 1, 2, 3])
def test_window_prompts(chat: ChatFormat, window_turns: int) -> None:
    """The fourth prompt by hand; the first observation stands in it once, whatever the window shows."""
    episode = begin(chat, context="window", window_turns=window_turns, max_turns=9)
    said = ["<action>0</action>", "nothing", "<action>5</action>", "<action>3</action>"]
    prompts = []
    for text in said:
        episode.wait()
        prompts.append(episode.ask(FAR))
        episode.receive(say(chat, text))
    episode.wait()
    history = ["\n1 0", "\n2 nothing", "\n3 5"]
    shown = "".join(history[len(history) - window_turns :])
    expected = f"Guess. It is high up.\n<strategy>try 3</strategy>{shown}\nNo.\n4 <action>?"
    assert prompts[3] == chat.prompt(expected)
    assert prompts[0] == chat.prompt(PROMPTS.first_action("Guess. It is high up.", "try 3"))
    trajectory = episode.trajectory()
    assert [turn.row for turn in trajectory.turns] == [0, 1, 2, 3]
    for turn, row, prompt, text in zip(trajectory.turns, trajectory.rows, prompts, said, strict=True):
        assert row.input_ids.tolist() == [*prompt, *chat.encode(text), chat.end_id]
        assert row.response_mask.tolist() == [False] * (len(prompt) - 1) + [True] * turn.num_tokens


def test_admissible_actions_stand_in_every_prompt(chat: ChatFormat) -> None:
    for context in ("conversation", "window"):
        episode = begin(chat, context=context, admissible_actions=True)
        for turn in range(2):
            episode.wait()
            ids = episode.ask(FAR)
            assert ids is not None
            assert "Actions: 0, 1, 2, 3, 4, 5" in chat.tokenizer.decode(ids), (context, turn)
            episode.receive(say(chat, "<action>0</action>"))


# ------------------------------------------------------------------------------------- thoughts, several actions


def test_an_action_in_a_thought_that_was_cut_off_is_not_played(chat: ChatFormat) -> None:
    """M8"""
    said = "<think>Maybe <action>3</action> would be a mistake, since"
    episode = begin(chat, max_action_tokens=90, max_turns=2)
    trajectory = drive(episode, [say(chat, said, closed=False), say(chat, "<action>5</action>")])
    assert [t.action for t in trajectory.turns] == [None, "5"]
    assert not trajectory.turns[0].parsed
    assert trajectory.turns[1].observation == "No action."
    assert trajectory.outcome == 0.0


def test_a_thought_that_the_header_opened(chat: ChatFormat) -> None:
    tokenizer = type(chat.tokenizer)(
        tokenizer_object=chat.tokenizer.backend_tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML_WITH_SYSTEM.replace("assistant\n", "assistant\n<think>\n")
    thinker = ChatFormat(tokenizer)
    assert (thinker.thinking, chat.thinking) == ("<think>", "")
    replies = ["<action>3</action>", "<action>3</action></think><action>5</action>"]
    trajectory = drive(begin(thinker, max_action_tokens=90, max_turns=2), [say(thinker, text) for text in replies])
    assert [t.action for t in trajectory.turns] == [None, "5"]


@pytest.mark.parametrize("context", ["conversation", "window"])
def test_first_of_several_actions_masks_what_was_invented_behind_it(chat: ChatFormat, context: str) -> None:
    """M11: the invented observation stays in the row, since it was sampled, but is neither trained nor scored."""
    invented = ["<action>5</action>", "\nObservation: Too low.\n<action>3</action>"]
    kept, behind = (chat.encode(text) for text in invented)
    said = answer([*kept, *behind, chat.end_id])
    options: dict[str, Any] = {"max_action_tokens": 90, "max_turns": 2, "context": context}

    first = begin(chat, prompts=Prompts.make("terse", action_block="first"), **options)
    trajectory = drive(first, [said, say(chat, "<action>3</action>")])
    assert [t.action for t in trajectory.turns] == ["5", "3"]
    assert trajectory.outcome == 0.75
    turn, row = trajectory.turns[0], trajectory.rows[0]
    assert turn.response == "".join(invented)
    assert row.input_ids[turn.start + 1 : turn.start + 1 + len(said.ids)].tolist() == list(said.ids)
    masked = slice(turn.stop, turn.stop + turn.num_cut)
    assert row.response_mask[turn.start : turn.stop].all()
    assert not row.response_mask[masked].any()
    assert (turn.num_tokens, turn.num_cut, turn.num_sampled) == (len(kept), len(behind) + 1, len(said.ids))
    assert row.logprobs[masked].tolist() == [0.0] * turn.num_cut
    assert row.temperatures[masked].tolist() == [1.0] * turn.num_cut
    assert row.logprobs[turn.start : turn.stop].tolist() == pytest.approx(said.logprobs[: len(kept)])
    assert [t.several_actions for t in trajectory.turns] == [True, False]
    if context == "conversation":  # what follows is one render as ever: the end that was sampled is not written again
        follows = chat.next_user(PROMPTS.next_action(2, trajectory.turns[1].observation), chat.end_id)
        assert row.input_ids[masked.stop + 1 :][: len(follows)].tolist() == follows

    trajectory = drive(begin(chat, **options), [said])  # the default: the last one, all of it trained
    turn, row = trajectory.turns[0], trajectory.rows[0]
    assert (turn.action, trajectory.outcome, turn.several_actions, turn.num_cut) == ("3", 1.0, True, 0)
    assert row.response_mask[turn.start : turn.stop].all()
    assert turn.num_tokens == len(said.ids)


def test_length_is_measured_by_the_responses_own_limit(chat: ChatFormat) -> None:
    """A short answer near the end of a row, which had room for little more, is not a long one."""
    length = len(chat.prompt(PROMPTS.first_action("Guess. It is high up.", "try 3")))
    episode = begin(chat)
    episode.wait()
    said = say(chat, "ab")
    assert episode.ask(length + len(said.ids)) is not None
    assert episode.room(length + len(said.ids)) == len(said.ids) < 16
    episode.receive(said)
    assert (episode.turns[0].num_sampled, episode.turns[0].token_limit) == (len(said.ids), 16)
