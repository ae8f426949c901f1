"""Chat messages to token ids, append-only: what was sampled stays as it is, what is said to it is encoded once.

A conversation is one growing list of ids:

    [ first prompt: template + first user turn + generation header ]      mask 0
    [ response as sampled, its stop token included                 ]      mask 1
    [ what its end lacks + next user turn + generation header      ]      mask 0
    ...

The tokenizer's own chat template is rendered around marks and taken apart once.  What follows a response goes by the id
that it ended on, so that the concatenation equals one full render of the same messages:

    written between two turns    the response ended on     what is appended
    <|im_end|> ...               <|im_end|>                ...                   (ChatML)
    <|im_end|> ...               another eos, or a word    <|im_end|> ...
    <|user|> ...                 <|user|>                  ...                   (GLM: the next role's mark is the end)
    <|end|> ...                  <|return|>                ...                   (gpt-oss: in the last turn written so)

Byte for byte where the template does not rewrite the past: docs/templates.md says what each one does to it.
Deliberately absent: decoding and encoding again of anything sampled; comparing ids with pad or eos to find masks
(they are known by position); a second system prompt.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hsg.text.markers import THOUGHTS
from hsg.types import Tokens

_MARK = "\u2063turn\u2063"  # invisible separators: no template trims or escapes them, no observation contains them
CLOCK = "strftime_now"
"""What a template calls for today's date."""


class _Template:
    """A chat template, rendered around marks and taken apart; all its pieces are text.

    between  from the end of a reply to the next user text      last   behind a reply that nothing follows
    after    from a user text to the response                   lead   blanks that it writes before a reply
    trims    it strips what the user says                      written  all that it writes in two turns
    """

    def __init__(self, tokenizer: Any, date: datetime.date) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "model.path must be a chat model, got a tokenizer without chat_template; use an instruct one"
            )
        self._tokenizer, self._in_parts = tokenizer, False
        text = tokenizer.get_chat_template()
        self._text = _stopped_clock(date) + text if CLOCK in text else text
        user, reply = f"{_MARK}u", f"{_MARK}a"
        try:
            asked = self.render([user, reply, _MARK])
        except ValueError:
            asked = ""
        if any(asked.count(mark) != 1 for mark in (user, reply)) or not asked.count(_MARK):
            self._in_parts = True  # templates of models that see pictures may want {"type": "text", "text": ...}
            asked = self.render([user, reply, _MARK])
        head, found, tail = asked.partition(reply)
        self.between, again, self.after = tail.rpartition(_MARK)
        if not (found and again and user in head):
            raise ValueError(
                "tokenizer.chat_template must show what user and assistant say in turn, got one that leaves it out; "
                "set another"
            )
        try:
            self.last = self.render([user, reply], opened=False).rpartition(reply)[2]
        except ValueError:  # it may refuse to end on an assistant's turn
            self.last = ""
        lead = head.removeprefix(self.render([user]))
        self.lead = "" if lead.strip() else lead
        self.trims = f" {_MARK}" not in self.render([f" {_MARK} "])
        self.written = asked.replace(_MARK, "")

    def render(self, texts: Sequence[str], *, opened: bool = True) -> str:
        """What user and assistant say in turn; `opened`: the next response may begin."""
        said: list[Any] = [[{"type": "text", "text": text}] for text in texts] if self._in_parts else list(texts)
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self._text, tokenize=False, add_generation_prompt=opened
            )
        except Exception as error:  # a template is a stranger's program
            raise ValueError(
                f"tokenizer.chat_template must render what user and assistant say in turn, got "
                f"{type(error).__name__}: {' '.join(str(error).split())[:160]}; set another"
            ) from None


def _stopped_clock(date: datetime.date) -> str:
    """Jinja that puts itself in the place of the template's clock; transformers lets only plain data in from outside."""
    told = "".join(f"|replace({code!r}, {date.strftime(code)!r})" for code in _DATE_CODES)
    # The empty output keeps a line end that the template may begin with.
    return f"{{% macro {CLOCK}(format) %}}{{{{ format{told} }}}}{{% endmacro %}}{{{{ '' }}}}"


_DATE_CODES = [f"%{flag}{letter}" for letter in "YymBbdejAauwHIMSpUWVGFDTcxX" for flag in ("", "-")]


@dataclass(frozen=True)
class _End:
    """How a template ends a reply.

    own    (id, how many characters of `between` are behind it then) of the tokens that end it before a next turn
    last   ids that end it where nothing follows and that `between` has others for, or none
    stop   the id that generation should stop at, None: the template has no token for it
    """

    own: tuple[tuple[int, int], ...]
    last: tuple[int, ...]
    stop: int | None


def _read_end(template: _Template, known: Mapping[str, int], declared: Sequence[int]) -> _End:
    """`known`: texts of tokens that are no ordinary text; `declared`: ids that are known to end a response."""
    before_next, at_last = _leading(template.between, known), _leading(template.last, known)
    num_shared = 0
    while num_shared < min(len(before_next), len(at_last)) and before_next[num_shared][0] == at_last[num_shared][0]:
        num_shared += 1
    # Where both begin alike that is the end, and what follows belongs to the next turn; where the last turn ends on
    # nothing, the next role's mark is the end.
    num_own = num_shared or max(1, len(at_last))
    ends = [i for i, _ in (before_next[:num_shared] or at_last or before_next[:1])]
    stop = next((i for i in ends if i in declared), ends[0] if ends else None)
    return _End(tuple(before_next[:num_own]), () if num_shared else tuple(i for i, _ in at_last), stop)


def _leading(text: str, known: Mapping[str, int]) -> list[tuple[int, int]]:
    """(id, place behind it) of the tokens that a text begins with, blanks between them passed over."""
    found: list[tuple[int, int]] = []
    at = 0
    while True:
        begin = len(text) - len(text[at:].lstrip())
        token = max((t for t in known if text.startswith(t, begin)), key=len, default="")
        if not token:
            return found
        at = begin + len(token)
        found.append((known[token], at))


def _added_tokens(tokenizer: Any) -> dict[str, int]:
    """Tokens that are found in a text before anything else, by their texts; those of blanks are words like others."""
    added = {
        **tokenizer.get_added_vocab(),
        **dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)),
    }
    return {text: i for text, i in added.items() if text.strip()}


def _start_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of a token that takes no blanks of the text behind it with it."""
    added = tokenizer.added_tokens_decoder
    return next((added[i].content for i in ids if i in added and not added[i].rstrip), "")


def with_template_end(tokenizer: Any, declared: Sequence[int]) -> tuple[int, ...]:
    """Ids that end a response: those that are declared, and the one that the chat template ends a turn with.

    A base model's eos ends texts, while the template put on it ends turns with another token. ValueError where the
    template ends them with a mark that is no token: nothing could stop at it.
    """
    if not getattr(tokenizer, "chat_template", None):
        return tuple(declared)
    template = _Template(tokenizer, datetime.date.today())
    return _stop_ids(template, _read_end(template, _added_tokens(tokenizer), declared), declared)


def _stop_ids(template: _Template, end: _End, declared: Sequence[int]) -> tuple[int, ...]:
    mark = template.last.lstrip()
    if end.stop is None and mark.startswith("<|"):
        name = mark[: mark.find(">") + 1] or mark
        raise ValueError(
            f"tokenizer.chat_template must end a turn with one token, got {name!r}, which the tokenizer spells in pieces; "
            "add it to the tokenizer as a special token, or set another template"
        )
    return tuple(dict.fromkeys([*declared, *([] if end.stop is None else [end.stop])]))


class ChatFormat:
    """The chat template of one tokenizer, as a rollout needs it.

    date      what a template that asks the clock is told, "YYYY-MM-DD"; None: today, once for all prompts
    stop_ids  ids that end a response: every eos that the model or the tokenizer declares, then the template's own end
    end_id    the last id of a response as it should be
    asks_the_clock  the template writes the date into its prompts
    thinking  the mark of a thought that the generation header opens (`markers.THOUGHTS`), or ""
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int] = (), date: str | None = None) -> None:
        day = datetime.date.today() if date is None else datetime.date.fromisoformat(date)
        self.tokenizer, self._template = tokenizer, _Template(tokenizer, day)
        self._known = _added_tokens(tokenizer)
        eos = tokenizer.eos_token_id
        declared = list(dict.fromkeys([*stop_ids, *([eos] if eos is not None else [])]))
        self._end = _read_end(self._template, self._known, declared)
        self.stop_ids = _stop_ids(self._template, self._end, declared)
        if not self.stop_ids:
            raise ValueError("tokenizer.eos_token_id must be set, got None; a response could never end")
        self.end_id: int = self.stop_ids[0] if self._end.stop is None else self._end.stop
        self._start = _start_of(tokenizer, [*([] if eos is None else [eos]), self.end_id, *self._known.values()])
        header = self._template.after
        self._header = self._start + header[max([0, *(header.rfind(text) for text in self._known)]) :]
        self.asks_the_clock = CLOCK in tokenizer.get_chat_template()
        self.thinking = next((o for o, c in THOUGHTS if header.rfind(o) > header.rfind(c)), "")
        special = [text for text in getattr(tokenizer, "all_special_tokens", []) if text]
        marks = [text for text in self._known if text in self._template.written and not text.strip()[0].isalnum()]
        self._unsayable = list(dict.fromkeys([*special, *marks]))

    def encode(self, text: str) -> list[int]:
        """Ids of template text from its start, special tokens recognised, none added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _encode_behind(self, before: str, text: str) -> list[int]:
        """Ids of a text that stands behind another one, without those of the other.

        Encoded alone it would not be the same: SentencePiece writes a space before the start of a text, of some models
        also behind every special token, and a special token may take the blanks behind it.
        """
        for stem in (before, f"{self._start}a"):  # where the two would grow together into one token: behind a word
            ids, whole = self.encode(stem), self.encode(stem + text)
            if whole[: len(ids)] == ids:
                return whole[len(ids) :]
        return self.encode(text)

    def _plain(self, text: str) -> str:
        """User text that cannot speak the template's language: its special tokens are broken by a space."""
        for token in self._unsayable:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text.strip() if self._template.trims else text

    def prompt(self, text: str) -> list[int]:
        """Ids of a conversation's first user turn, ready for the first response."""
        return self.encode(self._template.render([self._plain(text)]))

    def reply(self, text: str) -> list[int]:
        """Ids of a response as the policy should emit it, its end token included (for supervised learning)."""
        ids = self._encode_behind(self._header, self._template.lead + self._plain(text))
        ends = [i for i, _ in self._end.own]
        return [*ids, *(ends[: ends.index(self.end_id)] if self.end_id in ends else []), self.end_id]

    def next_user(self, text: str, last: int | None) -> list[int]:
        """Ids from the end of a response to the next one. `last`: the id that the response ended on, None: it is empty.

        What the template's own end lacks behind it comes first; nothing comes twice.
        """
        rest = self._template.between[self._written(last) :] + self._plain(text) + self._template.after
        said = None if last is None else self.tokenizer.convert_ids_to_tokens(last)
        return self._encode_behind(said if said in self._known else f"{self._start}a", rest)

    def _written(self, last: int | None) -> int:
        """How many characters of `between` a response that ended on `last` stands for."""
        own = self._end.own
        if own and last in self._end.last:
            return own[-1][1]
        return next((place for i, place in own if i == last), 0)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a sampled response, without what ends it."""
        kept = list(ids)
        if kept and kept[-1] in self.stop_ids:
            kept.pop()
            while kept and any(kept[-1] == i for i, _ in self._end.own):
                kept.pop()
        return self._decode(kept)

    def reach(self, ids: Sequence[int], num_characters: int) -> int:
        """How many ids of a response its first `num_characters` take; what stands there must be whole characters."""
        text = self.decode(ids)[:num_characters]
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._decode(ids[:middle]).startswith(text) else (middle + 1, high)
        return low

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Conversation:
    """One growing row of ids with the mask, log-prob and temperature of each."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise ValueError("prompt_ids must hold at least one token, got none")
        self.ids: list[int] = list(prompt_ids)
        self.sampled = [False] * len(self.ids)
        self._logprobs = [0.0] * len(self.ids)
        self._temperatures = [1.0] * len(self.ids)
        self.end = len(self.ids)  # how many ids there were when the last response had come
        self.last: int | None = None  # the id that it ended on

    def __len__(self) -> int:
        return len(self.ids)

    def append_context(self, ids: Sequence[int]) -> None:
        """Template bytes and observations: context, never trained."""
        self._extend(ids, False, [0.0] * len(ids), [1.0] * len(ids))

    def append_response(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        temperatures: Sequence[float],
        *,
        num_kept: int | None = None,
    ) -> tuple[int, int]:
        """Sampled tokens. Returns the span [start, stop) in the (T-1)-aligned tensors of those that are trained.

        num_kept  the first of them that are; those behind are context from now on. None: all
        """
        start = len(self.ids) - 1
        kept = len(ids) if num_kept is None else num_kept
        self._extend(ids[:kept], True, logprobs[:kept], temperatures[:kept])
        stop = len(self.ids) - 1
        self.append_context(ids[kept:])
        self.end, self.last = len(self.ids), ids[-1] if ids else None
        return start, stop

    def _extend(
        self, ids: Sequence[int], sampled: bool, logprobs: Sequence[float], temperatures: Sequence[float]
    ) -> None:
        assert len(ids) == len(logprobs) == len(temperatures), (len(ids), len(logprobs), len(temperatures))
        self.ids.extend(ids)
        self.sampled.extend([sampled] * len(ids))
        self._logprobs.extend(logprobs)
        self._temperatures.extend(temperatures)

    def tokens(self, length: int | None = None) -> Tokens:
        """The row so far (its first `length` ids), aligned to input_ids[1:]."""
        stop = len(self.ids) if length is None else length
        return Tokens(
            input_ids=torch.tensor(self.ids[:stop], dtype=torch.long),
            response_mask=torch.tensor(self.sampled[1:stop], dtype=torch.bool),
            logprobs=torch.tensor(self._logprobs[1:stop], dtype=torch.float32),
            temperatures=torch.tensor(self._temperatures[1:stop], dtype=torch.float32),
        )
