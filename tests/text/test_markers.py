"""Markers: what is strategy and action of a response, and the end of a segment seen on ids that cut the marker anywhere."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from hsg.text.markers import (
    MARKERS,
    THOUGHTS,
    Markers,
    SegmentEnd,
    make_markers,
    parse_action,
    parse_turn_strategy,
    read_response,
)


class Pieces:
    """A tokenizer whose ids stand for texts of any length; like SentencePiece, it drops a space at the start of a text."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = ["a", *texts]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert text == "a"
        return [0]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self.texts[i] for i in ids).removeprefix(" ")


def first_end(text_pieces: list[str], marker: str) -> int | None:
    """After which piece the marker is complete: the slow twin."""
    for count in range(1, len(text_pieces) + 1):
        if marker in "".join(text_pieces[:count]):
            return count
    return None


def seen_end(text_pieces: list[str], marker: str) -> int | None:
    finder = SegmentEnd(Pieces(text_pieces), marker)
    state, found = SegmentEnd.START, None
    for place in range(len(text_pieces)):
        state = finder.step(state, place + 1)
        if state == finder.END and found is None:
            found = place + 1
    return found


@pytest.mark.parametrize(
    "pieces",
    [
        ["plan", "</strategy>", "x"], ["plan</str", "ategy", "> more"], list("go</strategy><action>"),
        ["</</strategy>"], ["</strat", "</strategy>"], ["</strategy", " >", "</strategy>"], ["nothing", " here"], ["", "</strategy>"],
    ],
)  # fmt: skip
def test_the_end_is_seen_wherever_tokens_cut_it(pieces: list[str]) -> None:
    assert seen_end(pieces, "</strategy>") == first_end(pieces, "</strategy>")


def test_the_end_equals_the_slow_twin_on_every_cut_of_random_texts() -> None:
    """Few letters and a marker that repeats itself: here a matcher that forgets its borders goes wrong."""
    rng = random.Random(0)
    for marker, letters in (("aab", "ab"), ("abab", "ab"), ("### C", "# C"), ("x", "xy")):
        for _ in range(200):
            pieces = ["".join(rng.choices(letters, k=rng.randint(0, 4))) for _ in range(6)]
            assert seen_end(pieces, marker) == first_end(pieces, marker), (marker, pieces)


def test_a_space_before_the_token_is_its_own_text() -> None:
    assert seen_end(["###", " Code"], "### Code") == 2
    assert seen_end(["###", "Code"], "### Code") is None


@pytest.mark.parametrize("name", ["guesser_folder", "smollm2"])
def test_a_real_tokenizer_ends_where_its_text_does(name: str, request: Any) -> None:
    from transformers import AutoTokenizer

    if name == "smollm2":
        from hsg.model.models import load_tokenizer

        tokenizer = load_tokenizer("smollm2")
    else:
        tokenizer = AutoTokenizer.from_pretrained(request.getfixturevalue(name))
    for markers, text in itertools.product(
        MARKERS.values(), ["look.{}x", "a b\n{}\n", "é 门{}", "{}", "#{}", "<{}> </strategy </think", " {}"]
    ):
        marker = markers.strategy_end
        ids = tokenizer.encode(text.format(marker) + " and on", add_special_tokens=False)
        finder, state, count = SegmentEnd(tokenizer, marker), SegmentEnd.START, 0
        while state != finder.END:
            state = finder.step(state, ids[count])
            count += 1
        assert marker in tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False)
        assert marker not in tokenizer.decode(ids[: count - 1], clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    ("name", "text", "strategy", "action"),
    [
        ("tags", "<strategy> s </strategy> hm <action> go </action>", "s", "go"),
        ("tags", "<action>go</action>", None, "go"),
        ("tags", "<strategy>s</strategy> hm", "s", None),
        ("tags", "<strategy></strategy><action>go</action>", None, "go"),
        ("tags", "<strategy>s <action>go</action>", None, "go"),
        ("tags", "</strategy><strategy>s</strategy><action>go</action>", None, "go"),
        ("tags", "<strategy>a <strategy>b</strategy><action>go</action>", "b", "go"),
        (
            "coding",
            "### Strategy\nSort.\n### Code\n```python\n### Code\nx\n```",
            "Sort.",
            "```python\n### Code\nx\n```",
        ),
        ("coding", "### Strategy\nSort, then", None, None),
        ("coding", "### Code\nx", None, "x"),
        ("langr", "### Strategy\nlook\n### Action\npick(1)", "look", "pick(1)"),
        ("androidworld", "<strategy>s</strategy><tool_call>{}</tool_call>", "s", "{}"),
        ("appworld", "first a, then b</think>\nprint(1)", "first a, then b", "print(1)"),
        ("appworld", "never ends", None, None),
    ],
)
def test_parsing(name: str, text: str, strategy: str | None, action: str | None) -> None:
    assert parse_turn_strategy(text, MARKERS[name]) == strategy
    assert parse_action(text, MARKERS[name]) == action


def test_single_markers_can_be_replaced_and_are_checked() -> None:
    assert make_markers("tags", {"action": "[", "action_end": "]"}) == Markers(action="[", action_end="]")
    with pytest.raises(ValueError, match="prompts.markers must be a mapping with keys among strategy, strategy_end"):
        make_markers("tags", {"acton": "["})
    for bad in ("", " ", "é", "a\nb"):
        with pytest.raises(ValueError, match="prompts.markers.strategy_end must be printable ASCII text"):
            make_markers("tags", {"strategy_end": bad})
    assert make_markers("coding", {"strategy": ""}).strategy_form == "before ### Code"


CUT = "<think>Maybe <action>open trunk</action> would be a mistake, since"


@pytest.mark.parametrize(
    ("name", "text", "strategy", "action"),
    [
        ("tags", CUT, None, None),
        ("tags", f"{CUT} x</think> <action>look</action>", None, "look"),
        ("tags", f"<action>look</action> {CUT}", None, "look"),
        ("tags", "<think>a</think><think><action>b</action>", None, None),
        ("tags", "<think>1 <think>2</think> <action>b</action>", None, "b"),  # models do not nest them
        ("tags", "<think><action>a</think>b</action>", None, None),
        ("tags", "<think><strategy>s</strategy></think><strategy>t</strategy><action>a</action>", "t", "a"),
        ("tags", "<think><strategy>s</strategy><action>a</action>", None, None),
        ("tags", "<action>say <think> aloud</action>", None, "say <think> aloud"),
        ("tags", "<action>print('<think>')</action> then <action>b</action>", None, "b"),
        ("tags", "<strategy>no <think> here</strategy><action>b</action>", "no <think> here", "b"),
        ("coding", "<think>### Code\nx = 1", None, None),
        ("coding", "<think>### Code\nx = 1</think>### Strategy\nSort.\n### Code\ny = 2", "Sort.", "y = 2"),
        ("coding", "### Strategy\nSort.\n### Code\nprint('<think>')", "Sort.", "print('<think>')"),
        ("androidworld", "<think><tool_call>{}</tool_call>", None, None),
        ("appworld", "<think>first a</think>\nprint(1)", "<think>first a", "print(1)"),  # its thought is the strategy
    ],
)
def test_what_is_only_thought_counts_for_nothing(
    name: str, text: str, strategy: str | None, action: str | None
) -> None:
    """M8: in a thought that a token limit cut off, or one that was closed."""
    assert parse_action(text, MARKERS[name]) == action
    assert parse_action(text, MARKERS[name], block="first") in (action, "print('<think>')")
    assert parse_turn_strategy(text, MARKERS[name]) == strategy


@pytest.mark.parametrize(("opening", "closing"), THOUGHTS)
def test_every_mark_of_a_thought(opening: str, closing: str) -> None:
    assert parse_action(f"{opening}<action>a</action>") is None
    assert parse_action(f"{opening}x{closing}<action>a</action>") == "a"
    # The prompt's header has opened it already.
    assert parse_action("<action>a</action>", thinking=opening) is None
    assert parse_action(f"<action>a</action>{closing} <action>b</action>", thinking=opening) == "b"
    assert parse_turn_strategy(f"<strategy>s</strategy>{closing}", thinking=opening) is None


INVENTED = "<action>3</action>\nObservation: Too low.\n<action>5</action>"


def test_first_or_last_action() -> None:
    """M11: with `first` the response ends where its first action does; with `last` all of it counts."""
    last, first = read_response(INVENTED), read_response(INVENTED, block="first")
    assert (last.action, last.num_actions, last.end) == ("5", 2, len(INVENTED))
    assert (first.action, first.num_actions, INVENTED[: first.end]) == ("3", 2, "<action>3</action>")
    alone = read_response("<action>3</action>\nYou see a key.", block="first")
    assert (alone.num_actions, alone.end) == (1, len("<action>3</action>"))  # nobody had said so either
    for whole in ("hm <action>3</action>", "hm <action>3</action> \n", "hm", "<action>3", "<think><action>3</action>x"):
        assert read_response(whole, block="first") == read_response(whole)
        assert read_response(whole, block="first").end == len(whole)
    # An empty first one is still the first; a strategy behind the end is invented too.
    assert read_response("<action> </action><action>5</action>", block="first").action is None
    told = read_response("<action>3</action><strategy>s</strategy>", block="first")
    assert (told.action, told.strategy) == ("3", None)
    thought = read_response("<think><action>1</action></think><action>3</action><action>5</action>", block="first")
    assert (thought.action, thought.num_actions) == ("3", 2)
    headline = read_response("### Code\nx\n### Code\ny", MARKERS["coding"], block="first")
    assert (headline.action, headline.num_actions) == ("x\n### Code\ny", 1)
