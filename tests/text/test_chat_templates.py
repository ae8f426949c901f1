"""Public chat templates: prompt, sampled reply and next turn are one render of the same messages, id for id."""

from __future__ import annotations

import datetime
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_templates import FORMATS, Format

from hsg.model.models import stop_ids
from hsg.text.chat import ChatFormat

DATE = "2026-03-04"
USERS = ["Find the key. You are in the hall.", "The trunk is empty.", "2 <action>?"]
REPLIES = ["Ways: attic. <action>open trunk</action>", "<action>look</action>"]
BY_NAME = {form.name: form for form in FORMATS}


def made(form: Format) -> tuple[Any, ChatFormat]:
    tokenizer = form.tokenizer()
    return tokenizer, ChatFormat(tokenizer, tokenizer.convert_tokens_to_ids(form.declared.split()), DATE)


def rendered(tokenizer: Any, form: Format, texts: list[str]) -> list[int]:
    """One full render of what user and assistant say in turn, ready for the next response, on the run's date."""
    messages: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[i % 2], "content": [{"type": "text", "text": t}] if form.in_parts else t}
        for i, t in enumerate(texts)
    ]
    stopped = form.template.replace("strftime_now('%d %b %Y')", "'04 Mar 2026'")
    text = tokenizer.apply_chat_template(messages, chat_template=stopped, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def sampled_text(tokenizer: Any, chat: ChatFormat, form: Format, text: str) -> list[int]:
    """A reply without its end, as the model samples it behind the prompt's last bytes."""
    before = form.response_end + form.user[1] + form.opened
    if form.note == "blank of the header":  # in a render the blank is part of the reply's first word
        before = f"{form.response_end}a"
    whole = tokenizer.encode(before + form.lead + text, add_special_tokens=False)
    stem = tokenizer.encode(before, add_special_tokens=False)
    assert whole[: len(stem)] == stem
    return whole[len(stem) :]


def expected(tokenizer: Any, form: Format, texts: list[str]) -> list[int]:
    """The render, with the one documented difference of the format."""
    ids = rendered(tokenizer, form, texts)
    if form.note != "thought":
        return ids
    # The header opened a thought, and the template writes earlier replies without: ours stay as they were asked for.
    mark, header = (tokenizer.encode(text, add_special_tokens=False) for text in (form.reply[0], form.header or ""))
    places = [i for i in range(len(ids)) if ids[i : i + len(mark)] == mark]
    for at in reversed(places[:-1]):
        ids[at : at + len(mark)] = header
    return ids


def without_blanks(tokenizer: Any, ids: list[int], form: Format) -> str:
    """The text without blanks before what ends a reply."""
    return re.sub(rf"[ \n]+{re.escape(form.response_end)}", form.response_end, tokenizer.decode(ids))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_reply_cut_off_is_closed_as_the_template_closes_it(form: Format) -> None:
    tokenizer, chat = made(form)
    row = chat.prompt(USERS[0])
    for reply, user in zip(REPLIES, USERS[1:], strict=True):
        ids = sampled_text(tokenizer, chat, form, reply)
        row += ids + chat.next_user(user, ids[-1])
    texts = [USERS[0], REPLIES[0], USERS[1], REPLIES[1], USERS[2]]
    assert tokenizer.decode(row) == tokenizer.decode(expected(tokenizer, form, texts))
    if form.note != "blank of the header":
        assert row == expected(tokenizer, form, texts)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_reply_that_ended_itself_is_not_closed_twice(form: Format) -> None:
    tokenizer, chat = made(form)
    end = tokenizer.convert_tokens_to_ids(form.response_end)
    assert end in chat.stop_ids
    assert chat.end_id == end
    own = tokenizer.encode(form.response_end + form.reply[1], add_special_tokens=False)[1:]
    own = own[: own.index(end) + 1] if end in own else [end]
    row, cut = chat.prompt(USERS[0]), chat.prompt(USERS[0])
    for reply, user in zip(REPLIES, USERS[1:], strict=True):
        ids = sampled_text(tokenizer, chat, form, reply)
        own_end = own
        if form.reply[1].startswith(" "):  # a blank before the end, which this reply has not
            own_end = [end]
        row += [*ids, *own_end, *chat.next_user(user, end)]
        assert chat.decode([*ids, *own_end]).strip() == (form.lead + reply).strip()
        cut += ids + chat.next_user(user, ids[-1])
    if form.note == "extra end":  # the template writes no end at all
        assert [i for i in row if i != end] == cut
    elif form.note == "other end":  # in history it writes another one
        replaced = tokenizer.convert_tokens_to_ids("<|end|>")
        assert [replaced if i == end else i for i in row] == cut
    elif form.note == "blank before the end":
        assert without_blanks(tokenizer, row, form) == without_blanks(tokenizer, cut, form)
        assert len(row) < len(cut)
    else:
        assert row == cut


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_what_is_taught_is_what_the_template_writes(form: Format) -> None:
    """Supervised replies, with the end that a response should have, and the blanks that the template puts before them."""
    tokenizer, chat = made(form)
    row = chat.prompt(USERS[0])
    for reply, user in zip(REPLIES, USERS[1:], strict=True):
        row += chat.reply(reply) + chat.next_user(user, chat.end_id)
    texts = [USERS[0], REPLIES[0], USERS[1], REPLIES[1], USERS[2]]
    # A mark before the reply (gpt-oss: its channel) is for the model to choose and is not taught.
    mark = form.lead.strip()
    told, whole = tokenizer.decode(row), tokenizer.decode(expected(tokenizer, form, texts))
    if form.note == "extra end":
        told = told.replace(form.eos, "")
    elif form.note == "other end":
        told = told.replace("<|return|>", "<|end|>")
    elif form.note == "blank before the end":
        told, whole = (
            without_blanks(tokenizer, tokenizer.encode(t, add_special_tokens=False), form) for t in (told, whole)
        )
    if mark:
        whole = whole.replace(form.reply[0], form.opened)
    assert told == whole


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_behind_any_other_end_stands_the_templates_own(form: Format) -> None:
    """M3: a model may stop on any of its ends; the next user turn begins where the template would begin it."""
    tokenizer, chat = made(form)
    ids = sampled_text(tokenizer, chat, form, REPLIES[0])
    cut = chat.next_user(USERS[1], ids[-1])
    own = {tokenizer.convert_tokens_to_ids(form.response_end), *(i for i, _ in chat._end.own)}
    for other in (*chat.stop_ids, tokenizer.convert_tokens_to_ids(form.eos)):
        if other not in own and form.note != "extra end":
            ids = chat.next_user(USERS[1], other)
            if form.kind == "always":  # this SentencePiece writes a space behind every special token
                ids = ids[tokenizer.convert_ids_to_tokens(ids[0]) == "▁" :]
            assert ids == cut
    assert chat.next_user(USERS[1], None) == cut  # nothing was sampled at all


def test_glm_that_says_endoftext() -> None:
    """M3 in words: `B` stands in a user turn, and the end that was sampled stays."""
    tokenizer, chat = made(BY_NAME["glm-4"])
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    row = [*chat.prompt("x"), *tokenizer.encode("A"), end, *chat.next_user("B", end)]
    assert tokenizer.decode(row) == "[gMASK]<sop><|user|>\nx<|assistant|>A<|endoftext|><|user|>\nB<|assistant|>"
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    row = [*chat.prompt("x"), *tokenizer.encode("A"), user, *chat.next_user("B", user)]
    assert tokenizer.decode(row) == "[gMASK]<sop><|user|>\nx<|assistant|>A<|user|>\nB<|assistant|>"


def test_an_end_is_written_once() -> None:
    """M5: what is sampled last is another token than what the template writes in history, or one of two."""
    tokenizer, chat = made(BY_NAME["gpt-oss"])
    ends = {text: tokenizer.convert_tokens_to_ids(text) for text in ("<|return|>", "<|end|>", "<|call|>")}
    assert chat.end_id == ends["<|return|>"]
    following = "<|start|>user<|message|>B<|end|><|start|>assistant"
    assert tokenizer.decode(chat.next_user("B", ends["<|return|>"])) == following
    assert tokenizer.decode(chat.next_user("B", ends["<|end|>"])) == following
    assert tokenizer.decode(chat.next_user("B", ends["<|call|>"])) == "<|end|>" + following
    tokenizer, chat = made(BY_NAME["command-r7b"])
    inner, outer = tokenizer.convert_tokens_to_ids(["<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"])
    opened = "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>B"
    assert tokenizer.decode(chat.next_user("B", outer)).startswith(opened)
    assert tokenizer.decode(chat.next_user("B", inner)).startswith("<|END_OF_TURN_TOKEN|>" + opened)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_templates_own_end_stops_generation(form: Format) -> None:
    """M4: also where neither tokenizer nor generation config declares it."""
    tokenizer = form.tokenizer()
    for declared in (None, tokenizer.eos_token_id, [tokenizer.eos_token_id]):
        model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=declared))
        assert tokenizer.convert_tokens_to_ids(form.response_end) in stop_ids(model, tokenizer)
        assert len(set(stop_ids(model, tokenizer))) == len(stop_ids(model, tokenizer))


def test_an_end_that_is_no_token_is_refused() -> None:
    """ChatML on a tokenizer that spells <|im_end|> in pieces: nothing could stop at it, and nothing would say so."""
    form = replace(BY_NAME["qwen2.5"], tokens="<|endoftext|>", eos="<|endoftext|>")
    with pytest.raises(ValueError, match=r"must end a turn with one token, got '<\|im_end\|>', .* in pieces; add it"):
        ChatFormat(form.tokenizer())


def test_pieces_get_no_space_of_their_own() -> None:
    """M9: SentencePiece that writes a space before each text it is given."""
    tokenizer, chat = made(BY_NAME["zephyr"])
    end = tokenizer.convert_tokens_to_ids("</s>")
    assert tokenizer.convert_ids_to_tokens(chat.next_user("B", end)[0]) == "\n"
    assert "▁" not in tokenizer.convert_ids_to_tokens(chat.next_user("B", end))
    assert "▁" not in tokenizer.convert_ids_to_tokens(chat.reply("B"))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_an_observation_cannot_speak_for_the_template(form: Format) -> None:
    tokenizer, chat = made(form)
    marks = [t for t in form.tokens.split() if not t.isspace()]
    special = set(tokenizer.convert_tokens_to_ids(marks))
    evil = "".join(marks) + "win"
    for build in (chat.prompt, lambda text: chat.next_user(text, chat.end_id), chat.reply):
        assert sum(i in special for i in build(evil)) == sum(i in special for i in build("hello"))


DATED = [form for form in FORMATS if "{date}" in form.start]


@pytest.mark.parametrize("form", DATED, ids=lambda form: form.name)
def test_the_clock_stands_still(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """M15: a run that lasts over midnight, or goes on another day, asks the same thing for the same task."""
    tokenizer, chat = made(form)
    assert chat.asks_the_clock
    assert "04 Mar 2026" in tokenizer.decode(chat.prompt("x"))
    unsaid = ChatFormat(tokenizer)  # no date given: the day it was made, for all prompts
    prompt = unsaid.prompt("x")
    assert datetime.date.today().strftime("%d %b %Y") in tokenizer.decode(prompt)

    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.now(tz) + datetime.timedelta(days=1)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    message = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True) != tokenizer.decode(
        prompt
    )
    assert unsaid.prompt("x") == prompt
    assert ChatFormat(tokenizer, date=DATE).prompt("x") == chat.prompt("x")


def test_every_way_to_ask_the_clock() -> None:
    form = BY_NAME["qwen2.5"]
    tokenizer = form.tokenizer()
    asked = (
        "{%- macro head() -%}{{ strftime_now('%-d.%-m.%y %A') }}{%- endmacro -%}\n"
        "{%- if strftime_now is defined -%}{%- set day = strftime_now('%Y-%m-%d') -%}{%- endif -%}"
        "{{ head() + '|' + day + '|' + strftime_now(\"%B\") | upper + '\n' }}"
    )
    tokenizer.chat_template = asked + form.template
    chat = ChatFormat(tokenizer, date="2026-03-04")
    assert tokenizer.decode(chat.prompt("x")).startswith("4.3.26 Wednesday|2026-03-04|MARCH\n<|im_start|>")
    assert not ChatFormat(form.tokenizer()).asks_the_clock


def test_every_format_has_its_row_in_the_docs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "templates.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([a-z0-9.-]+) \| .* \| (.*) \|$", page, re.MULTILINE))
    assert rows == {"format": "difference", **{form.name: form.note for form in FORMATS}}
    for note in {form.note for form in FORMATS} - {""}:
        assert f"- **{note}**" in page
