"""Parsers by the letter of the specification, and templates as replaceable data."""

from __future__ import annotations

import pytest

from hsg.config.loading import make_config
from hsg.text.prompts import (
    STYLES,
    Prompts,
    action_response,
    judgment_response,
    parse_action,
    parse_judgment,
    parse_strategy,
    strategy_response,
)


@pytest.mark.parametrize(
    ("text", "num_turns", "expected"),
    [
        ("<judgment>[2, 5]</judgment>", 6, (1, 4)),
        ("Turn 2 did nothing. <judgment>[2]</judgment> Done.", 6, (1,)),
        ("<judgment>[]</judgment>", 6, ()),
        ("<judgment></judgment>", 6, ()),
        ("<judgment>[ ]</judgment>", 6, ()),
        ("<judgment> 3 , 1 </judgment>", 6, (0, 2)),
        ("<judgment>[5, 2, 5]</judgment>", 6, (1, 4)),
        ("<judgment>[0, 7, -1, 6]</judgment>", 6, (5,)),
        ("<judgment>[1]</judgment> no: <judgment>[4]</judgment>", 6, (3,)),
        ("<judgment>[1]</judgment> then <judgment>[4", 6, (0,)),
        ("<judgment>[1] <judgment>[3]</judgment>", 6, (2,)),
        ("<judgment>[3]</judgment></judgment>", 6, (2,)),
        (f"<judgment>[{'9' * 5000}, 2]</judgment>", 6, (1,)),
        ("<judgment>[2]</judgment>", 0, ()),
        ("<judgment>[2, five]</judgment>", 6, None),
        ("<judgment>[2.5]</judgment>", 6, None),
        ("<judgment>[2,, 3]</judgment>", 6, None),
        ("<judgment>2 5</judgment>", 6, None),
        ("<judgment>none</judgment>", 6, None),
        ("<judgment>[2, 5]", 6, None),
        ("[2, 5]</judgment>", 6, None),
        ("[2, 5]", 6, None),
        ("", 6, None),
    ],
)
def test_parse_judgment(text, num_turns, expected):
    assert parse_judgment(text, num_turns) == expected


def test_a_judgment_or_strategy_in_a_thought_counts_for_nothing():
    """M8: flags from a thought that was cut off would be penalties for turns that nobody found wasted."""
    for opened in ("<think>Maybe ", "[THINK]"):
        assert parse_judgment(f"{opened}<judgment>[2]</judgment> is wrong, since", 6) is None
        assert parse_strategy(f"{opened}<strategy>a</strategy> is wrong, since") is None
    assert parse_judgment("<think><judgment>[2]</judgment></think><judgment>[3]</judgment>", 6) == (2,)
    assert parse_judgment("<judgment>[2]</judgment>", 6, thinking="<think>") is None
    assert parse_judgment("<judgment>[2]</judgment></think><judgment>[]</judgment>", 6, thinking="<think>") == ()
    assert parse_strategy("<strategy>a</strategy>", thinking="<think>") is None
    assert parse_strategy("<strategy>a</strategy></think><strategy>b</strategy>", thinking="<think>") == "b"


def test_actions_and_strategies_take_the_last_complete_block_and_never_an_empty_one():
    assert parse_action("<action>look</action>") == "look"
    assert parse_action("I could <action>wait</action> but <action> go\nattic </action>!") == "go\nattic"
    assert parse_action("<action></action>") is None
    assert parse_action("<action>  </action>") is None
    assert parse_action("<action>look") is None
    assert parse_action("look</action>") is None
    assert parse_action("</action>look<action>") is None
    assert parse_action("<action>look</action></action>") == "look"  # a stray end never becomes part of what is sent
    assert parse_action("<action>look</action> or <action>wait") == "look"
    assert parse_strategy("<strategy>Search <b>first</b>.</strategy>") == "Search <b>first</b>."
    assert parse_strategy("<action>look</action>") is None


def test_responses_are_read_back_as_they_were_written():
    assert parse_action(action_response("go attic")) == "go attic"
    assert parse_strategy(strategy_response("Be quick.")) == "Be quick."
    assert parse_judgment(judgment_response((0, 4)), 5) == (0, 4)
    assert parse_judgment(judgment_response(()), 5) == ()


@pytest.mark.parametrize("style", ["full", "terse"])
def test_every_prompt_holds_what_it_is_about(style):
    prompts = Prompts.make(style)
    assert "SEEN" in prompts.strategy("SEEN")
    first = prompts.first_action("SEEN", "PLAN", ["go a", "go b"])
    assert "SEEN" in first
    assert first.index("SEEN") < first.index("<strategy>PLAN</strategy>")  # strategies of a task share a prefix
    assert "go a, go b" in first
    plain = prompts.first_action("SEEN", None)
    assert "strategy" not in plain
    assert "{" not in plain
    assert "7" in prompts.next_action(7, "SEEN")
    window = prompts.window(9, "FIRST", "PLAN", [(7, "OLD", "did"), (8, "NEWER", "done")], "NOW")
    for part in ("FIRST", "<strategy>PLAN</strategy>", "7", "did", "8", "done", "NOW", "9"):
        assert part in window
    assert "<strategy>" not in prompts.window(1, "FIRST", None, [], "NOW")
    assert "LAST" in prompts.judgment("LAST", 4)
    alone = prompts.judgment_alone("FIRST", "PLAN", [("did", "SAW1"), ("done", "SAW2")])
    for part in ("FIRST", "PLAN", "1", "did", "SAW1", "2", "done", "SAW2"):
        assert part in alone


def test_braces_in_values_are_left_alone():
    prompts = Prompts.make("terse")
    assert "{strategy} {turn} {0}" in prompts.first_action("{strategy} {turn} {0}", "{observation}")
    assert "{observation}" in prompts.first_action("seen", "{observation}")


def test_templates_can_be_replaced_and_are_checked():
    assert Prompts.make("full", {"strategy": "S {observation}"}).strategy("x") == "S x"
    with pytest.raises(ValueError, match="did you mean 'strategy'"):
        Prompts.make("full", {"strategi": "x"})
    with pytest.raises(
        ValueError, match=r"prompts\.templates\.strategy must use fields among observation, reflection, got \{turn\}"
    ):
        Prompts.make("full", {"strategy": "{turn}"})


def test_both_styles_have_the_same_templates_and_fields_known_to_the_full_one():
    assert set(STYLES["full"]) == set(STYLES["terse"])


def test_a_stray_closing_tag_is_not_part_of_the_block() -> None:
    assert parse_action("<action>look</action></action>") == "look"
    assert parse_judgment("<judgment>[1]</judgment> so </judgment>", 3) == (0,)
    assert parse_action("</action><action>look") is None
    assert parse_action("<action>a</action><action>b") == "a"


def test_which_action_counts_is_a_matter_of_the_configuration() -> None:
    text = "<action>3</action><action>5</action>"
    assert Prompts.of(make_config({})).read(text).action == "5"
    assert Prompts.of(make_config({"prompts": {"action_block": "first"}})).read(text).action == "3"
    assert Prompts.of(make_config({})).read(text, thinking="<think>").action is None
