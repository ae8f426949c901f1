"""Chat messages to token ids, append-only: what was sampled stays as it is, what is said to it is encoded once.

A conversation is one growing list of ids:

    [ first prompt: template + first user turn + generation header ]      mask 0
    [ response as sampled, stop token included                     ]      mask 1
    [ closing bytes + next user turn + generation header           ]      mask 0
    ...

`ChatFormat` finds the bytes between two turns by rendering the tokenizer's own chat template around a marker, so the
concatenation equals one full render of the same messages (byte for byte where the template does not rewrite the past).

Deliberately absent: decoding and encoding again of anything sampled; comparing ids with pad or eos to find masks
(they are known by position); a second system prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hsg.types import Tokens

_MARK = "\u2063turn\u2063"  # invisible separators: no template trims or escapes them, no observation contains them


class ChatFormat:
    """The chat template of one tokenizer, taken apart once.

    stop_ids  ids that end a response: every eos that the model or the tokenizer declares.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int] = ()) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "model.path must be a chat model, got a tokenizer without chat_template; use an instruct one"
            )
        self.tokenizer = tokenizer
        end = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([*stop_ids, *([end] if end is not None else [])]))
        if not self.stop_ids:
            raise ValueError("tokenizer.eos_token_id must be set, got None; a response could never end")
        assistant = f"{_MARK}a"
        said = [{"role": "user", "content": f"{_MARK}u"}, {"role": "assistant", "content": assistant}]
        asked = [*said, {"role": "user", "content": _MARK}]
        text = self._render(asked, add_generation_prompt=True)
        before, after = text.rsplit(_MARK, 1)
        between = before.rsplit(assistant, 1)[1]  # from the end of the reply to the start of the next user text
        # The template's own end-of-reply token: generation emits it, so it belongs to the response.
        self.end_text, self.end_id = self._leading_stop(between)
        self._before = between[len(self.end_text) :]
        self._after = after
        self._trims = f" {_MARK}" not in self._render([{"role": "user", "content": f" {_MARK} "}])
        self._special = [t for t in getattr(tokenizer, "all_special_tokens", []) if t]

    def _render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    def _leading_stop(self, text: str) -> tuple[str, int]:
        for stop in self.stop_ids:
            token = self.tokenizer.decode([stop])
            if token and text.startswith(token):
                return token, stop
        return "", self.stop_ids[0]

    def encode(self, text: str) -> list[int]:
        """Ids of template text, special tokens recognised, none added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _plain(self, text: str) -> str:
        """User text that cannot speak the template's language: its special tokens are broken by a space."""
        for token in self._special:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text.strip() if self._trims else text

    def prompt(self, text: str) -> list[int]:
        """Ids of a conversation's first user turn, ready for the first response."""
        messages = [{"role": "user", "content": self._plain(text)}]
        return self.encode(self._render(messages, add_generation_prompt=True))

    def reply(self, text: str) -> list[int]:
        """Ids of a response as the policy should emit it, its end token included (for supervised learning)."""
        return [*self.encode(self._plain(text)), self.end_id]

    def next_user(self, text: str, *, closed: bool) -> list[int]:
        """Ids from the end of a response to the next one; `closed` False also closes a reply that was cut off."""
        ids = self.encode(self._before + self._plain(text) + self._after)
        return ids if closed else [self.end_id, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a sampled response, without its stop token."""
        kept = list(ids)
        if kept and kept[-1] in self.stop_ids:
            kept.pop()
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Conversation:
    """One growing row of ids with the mask, log-prob and temperature of each."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise ValueError("prompt_ids must hold at least one token, got none")
        self.ids: list[int] = list(prompt_ids)
        self.sampled = [False] * len(self.ids)
        self._logprobs = [0.0] * len(self.ids)
        self._temperatures = [1.0] * len(self.ids)
        self.closed = True  # the last response ended with a stop token

    def __len__(self) -> int:
        return len(self.ids)

    def append_context(self, ids: Sequence[int]) -> None:
        """Template bytes and observations: context, never trained."""
        self._extend(ids, False, [0.0] * len(ids), [1.0] * len(ids))

    def append_response(
        self, ids: Sequence[int], logprobs: Sequence[float], temperatures: Sequence[float], *, closed: bool
    ) -> tuple[int, int]:
        """Sampled tokens. Returns their span [start, stop) in the (T-1)-aligned tensors."""
        start = len(self.ids) - 1
        self._extend(ids, True, logprobs, temperatures)
        self.closed = closed
        return start, len(self.ids) - 1

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
