"""Public chat templates: prompt, sampled reply and next turn are one render of the same messages, id for id."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import FORMATS, Format

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
    text = tokenizer.apply_chat_template(
        messages, chat_template=stopped, tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def sampled_text(tokenizer: Any, chat: ChatFormat, form: Format, text: str) -> list[int]:
    """A reply without its end, as the model samples it behind the prompt's last bytes."""
    before = form.response_end + form.user[1] + form.opened
    if form.opened.endswith(" "):  # in a render the blank is part of the reply's first word
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
    mark, header = (
        tokenizer.encode(text, add_special_tokens=False) for text in (form.reply[0], form.header or "")
    )
    places = [i for i in range(len(ids)) if ids[i : i + len(mark)] == mark]
    for at in reversed(places[:-1]):
        ids[at : at + len(mark)] = header
    return ids


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_reply_cut_off_is_closed_as_the_template_closes_it(form: Format) -> None:
    tokenizer, chat = made(form)
    row = chat.prompt(USERS[0])
    for reply, user in zip(REPLIES, USERS[1:], strict=True):
        ids = sampled_text(tokenizer, chat, form, reply)
        row += ids + chat.next_user(user, ids[-1])
    texts = [USERS[0], REPLIES[0], USERS[1], REPLIES[1], USERS[2]]
    assert tokenizer.decode(row) == tokenizer.decode(expected(tokenizer, form, texts))
    if not form.opened.endswith(" "):
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
        if form.reply[1].startswith(" "):  # Llama 2 writes a blank before the end, which this reply has not
            own_end = [end]
        row += [*ids, *own_end, *chat.next_user(user, end)]
        assert chat.decode([*ids, *own_end]).strip() == (form.lead + reply).strip()
        cut += ids + chat.next_user(user, ids[-1])
    if form.note == "extra end":  # the template writes no end at all
        assert [i for i in row if i != end] == cut
    elif form.note == "other end":  # in history it writes another one
        replaced = tokenizer.convert_tokens_to_ids("<|end|>")
        assert [replaced if i == end else i for i in row] == cut
    elif form.name == "llama2":
        assert len(row) == len(cut) - len(REPLIES)
        assert tokenizer.decode(row) == tokenizer.decode(cut).replace(" </s>", "</s>")
    elif form.name == "nemotron-mini":  # the blank line before the next role's mark is gone likewise
        assert tokenizer.decode(row).replace("\n<extra_id_1>", "<extra_id_1>") == tokenizer.decode(cut).replace(
            "\n<extra_id_1>", "<extra_id_1>"
        )
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
    elif form.name in ("llama2", "nemotron-mini"):  # blanks before the end
        told, whole = (text.replace(f" {form.response_end}", form.response_end) for text in (told, whole))
        told, whole = (text.replace(f"\n{form.response_end}", form.response_end) for text in (told, whole))
    if mark:
        whole = whole.replace(form.reply[0], form.opened)
    assert told == whole
