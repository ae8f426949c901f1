"""Where the strategy of a response ends and its action begins: the markers, their parser, and the same end found on ids.

    <strategy>look for the key first</strategy> The hall is empty. <action>go attic</action>
    ------------- sampled at tau_s -----------><----------- sampled at tau ---------------->

SGE (arXiv 2603.02045) samples the strategy of a turn at one temperature and everything after it at another, within one
response.  So the end of the strategy has to be seen while the tokens come: `SegmentEnd` reads the text of one token after
the other and knows the marker also where it begins in the middle of one token and ends in the middle of another.

What is only thought counts for nothing: every parser reads the text without it, whether the thought was ever closed or not.

    <think>Maybe <action>open trunk</action> would be a mistake</think> <action>look</action>
    ------------------------- blanked, place by place ----------------- --- the only action ---

Deliberately absent: a closing tag that is written by us instead of the policy (it would not be the policy's sample);
markers outside ASCII (a token may hold half a character, and has no text of its own then).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hsg.config.checks import require

THOUGHTS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),  # DeepSeek R1, Qwen 3, SmolLM 3, GLM 4.5, Hunyuan, Phi 4 reasoning, Nemotron
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),  # taught by many recipes
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|channel|>analysis", "<|end|>"),  # gpt-oss
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi
)
"""What public models write around a thought."""

ActionBlock = Literal["first", "last"]


@dataclass(frozen=True)
class Markers:
    """What stands around the strategy and the action of a response.

    strategy      empty: the strategy begins with the response (a chat template may have opened the block already)
    strategy_end  also ends the segment that is sampled at the strategy's temperature, its own tokens included
    action_end    empty: the action goes on to the end of the response
    """

    strategy: str = "<strategy>"
    strategy_end: str = "</strategy>"
    action: str = "<action>"
    action_end: str = "</action>"

    def __post_init__(self) -> None:
        for name, text in vars(self).items():
            optional = name in ("strategy", "action_end")
            rule = "printable ASCII text" + (" or empty" if optional else "")
            good = text.isascii() and text.isprintable() and (bool(text.strip()) or (optional and not text))
            require(good, f"prompts.markers.{name}", rule, text)

    @property
    def strategy_form(self) -> str:
        """How a prompt asks for the strategy's place."""
        if not self.strategy:
            return f"before {self.strategy_end}"
        if self.strategy_end == self.action:  # headlines: the next one ends what stands under the first
            return f"under the line {self.strategy}"
        return f"between {self.strategy} and {self.strategy_end}"

    @property
    def action_form(self) -> str:
        """How a prompt asks for the action's place."""
        return f"between {self.action} and {self.action_end}" if self.action_end else f"under the line {self.action}"


MARKERS: dict[str, Markers] = {
    "tags": Markers(),
    "coding": Markers("### Strategy", "### Code", "### Code", ""),
    "langr": Markers("### Strategy", "### Action", "### Action", ""),
    "androidworld": Markers("<strategy>", "</strategy>", "<tool_call>", "</tool_call>"),
    "appworld": Markers("", "</think>", "</think>", ""),
}
"""Markers by name; all but tags are SGE's own (arXiv 2603.02045), for its four environments."""


def make_markers(name: str, changes: Mapping[str, str]) -> Markers:
    """The markers of that name with some of them replaced. ValueError for an unknown name or marker, or a bad text."""
    known = list(vars(MARKERS["tags"]))
    for key in changes:
        require(key in known, "prompts.markers", f"a mapping with keys among {', '.join(known)}", key)
    return replace(MARKERS[name], **changes)


def last_block(text: str, opening: str, closing: str, *, thinking: str = "") -> str | None:
    """What stands in the last complete opening...closing outside thoughts, stripped; None where there is none."""
    found = _blocks(_spoken(text, [(opening, closing)], thinking=thinking), opening, closing)
    return found[-1][0] if found else None


def parse_action(
    text: str, markers: Markers = MARKERS["tags"], *, block: ActionBlock = "last", thinking: str = ""
) -> str | None:
    """The action of a response, or None: no complete block, or an empty one. Of several blocks the `block` one counts.

    thinking  the mark of a thought (of `THOUGHTS`) that the prompt has opened already
    """
    return read_response(text, markers, block=block, thinking=thinking).action


def parse_turn_strategy(text: str, markers: Markers = MARKERS["tags"], *, thinking: str = "") -> str | None:
    """The strategy of a response that also holds an action: it ends where its temperature does, at the first end marker.

    None: there is no end marker, nothing before it that opens a strategy, or nothing in between.
    """
    return _turn_strategy(_spoken_of(text, markers, thinking), markers)


@dataclass(frozen=True)
class Response:
    """What was read in the text of a response."""

    action: str | None  # None: no complete block, or an empty one
    strategy: str | None  # the turn's own, if there is one
    num_actions: int  # complete blocks; 1 under a headline, which reaches to the end
    end: int  # characters that count: with the first of several blocks, what stands behind it was invented


def read_response(
    text: str, markers: Markers = MARKERS["tags"], *, block: ActionBlock = "last", thinking: str = ""
) -> Response:
    """Action and strategy of a response, and where it ends; arguments as in `parse_action`."""
    spoken = _spoken_of(text, markers, thinking)
    if not markers.action_end:
        # Under a headline the action may itself hold the headline's words, as a comment in code: the first one counts.
        _, found, action = spoken.partition(markers.action)
        return Response(action.strip() or None, _turn_strategy(spoken, markers), int(bool(found)), len(text))
    blocks = _blocks(spoken, markers.action, markers.action_end)
    if not blocks:
        return Response(None, _turn_strategy(spoken, markers), 0, len(text))
    action, end = blocks[-1 if block == "last" else 0]
    if block == "last" or not text[end:].strip():  # a line end behind the action was not invented
        end = len(text)
    return Response(action or None, _turn_strategy(spoken[:end], markers), len(blocks), end)


def _blocks(text: str, opening: str, closing: str) -> list[tuple[str, int]]:
    """(what stands in it, stripped, and the place behind it) of every complete block, innermost ones only."""
    # A stray second closing mark is not part of what the first one closed, nor an opening one of what came after it.
    return [(m.group(1).strip(), m.end()) for m in re.finditer(_block(opening, closing), text, re.DOTALL)]


def _block(opening: str, closing: str) -> str:
    return f"{re.escape(opening)}((?:(?!{re.escape(opening)}).)*?){re.escape(closing)}"


def _turn_strategy(spoken: str, markers: Markers) -> str | None:
    inside, end, _ = spoken.partition(markers.strategy_end)
    opened = bool(end)
    if markers.strategy:
        _, opening, inside = inside.rpartition(markers.strategy)
        opened = opened and bool(opening)
    return inside.strip() or None if opened else None


def _spoken_of(text: str, markers: Markers, thinking: str) -> str:
    if not markers.action_end:
        return _spoken(text, [(markers.strategy, markers.strategy_end)], headline=markers.action, thinking=thinking)
    blocks = [(markers.strategy, markers.strategy_end), (markers.action, markers.action_end)]
    return _spoken(text, blocks, thinking=thinking)


def _spoken(text: str, blocks: Sequence[tuple[str, str]], *, headline: str = "", thinking: str = "") -> str:
    """The text with spaces in place of its thoughts, closed or not, so that every place stays where it was.

    A mark of thought inside a complete block, or under the headline, is the block's own text; marks that are also
    markers of the format (appworld's) open no thought.
    """
    own = {headline, *(mark for pair in blocks for mark in pair)}
    closing = {opening: end for opening, end in THOUGHTS if not own & {opening, end}}
    opening = thinking if thinking in closing else ""
    if not opening and not any(mark in text for mark in closing):
        return text
    literal = [re.escape(headline)] if headline else [_block(*pair) for pair in blocks if pair[0]]
    marks = re.compile("|".join([*literal, *map(re.escape, closing)]), re.DOTALL)
    spoken, begin, at = "", 0, 0  # text[begin:at] is part of the thought that is open
    while True:
        if opening:
            end = text.find(closing[opening], at)
            at = len(text) if end < 0 else end + len(closing[opening])
            spoken += " " * (at - begin)
        match = marks.search(text, at)
        if match is None or match.group() == headline:
            return spoken + text[at:]
        opening = match.group() if match.group() in closing else ""
        begin = match.start() if opening else match.end()
        spoken += text[at:begin]
        at = match.end()


class SegmentEnd:
    """Sees on ids, one at a time, when the text of a response has come to the end of `marker` for the first time.

    A Knuth-Morris-Pratt automaton over characters, stepped by whole tokens; each (state, id) is worked out once.
    """

    START = 0

    def __init__(self, tokenizer: Any, marker: str) -> None:
        self._tokenizer, self._marker = tokenizer, marker
        self.END = len(marker)  # a state is how many characters of the marker have been seen
        self._fallback = _borders(marker)
        self._next: dict[tuple[int, int], int] = {}
        # Some tokenizers drop a space at the start of a text: what a token adds to this one is its own text.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._before_text = self._decode(self._before)

    def step(self, state: int, token: int) -> int:
        """The state after one more token; `END`: the marker is complete, and stays so."""
        if state == self.END:
            return state
        key = (state, token)
        if key not in self._next:
            self._next[key] = self._read(state, self._decode([*self._before, token])[len(self._before_text) :])
        return self._next[key]

    def _read(self, state: int, text: str) -> int:
        for character in text:
            while state and self._marker[state] != character:
                state = self._fallback[state]
            state += self._marker[state] == character
            if state == self.END:
                break
        return state

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _borders(marker: str) -> list[int]:
    """borders[s]: the longest proper beginning of the marker that its first s characters end with."""
    borders = [0, 0]
    for s in range(1, len(marker)):
        b = borders[s]
        while b and marker[b] != marker[s]:
            b = borders[b]
        borders.append(b + (marker[b] == marker[s]))
    return borders
