"""Every text the agent is asked with, and the parsers of what it answers.

    strategy   first observation                                     -> <strategy>...</strategy>
    action     first observation, strategy, then one user turn each  -> <action>...</action>
    turn       the same without a strategy given                     -> <strategy>...</strategy> ... <action>...</action>
    judgment   the numbered turns, in the conversation or rewritten  -> <judgment>[2, 5]</judgment>

Structure after StraTA (2605.06642), the strategy of every turn and the reflections after SGE (2603.02045), wording ours.
Templates are data: `prompts.templates` replaces any of them by name; what stands around a strategy and an action
(`markers.py`) is data too.  The task and the first observation come first and the strategy or reflection after them, so
that the rollouts of a task share a prefix.

Deliberately absent: system prompts (a chat template brings its own), few-shot examples, JSON answers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hsg.config.options import Config
from hsg.text.markers import MARKERS, ActionBlock, Markers, Response, last_block, make_markers, read_response
from hsg.text.markers import parse_action as parse_action  # every parser under one name
from hsg.text.markers import parse_turn_strategy as parse_turn_strategy

_FULL = {
    "strategy": (
        "You are about to carry out a task in a text environment. The task and what you see at first:\n\n"
        "{observation}{reflection}\n\n"
        "Before you act, write one strategy that will guide the whole episode. It stays fixed: make it specific enough "
        "to be followed at every turn, and feasible given what you know now. Think first, then give the strategy "
        "between <strategy> and </strategy>."
    ),
    "action_first": (
        "You are carrying out a task in a text environment. Turn 1. The task and what you see:\n\n"
        "{observation}{admissible}\n\n"
        "Follow this strategy throughout:\n<strategy>{strategy}</strategy>\n\n"
        "{ask}"
    ),
    "action_first_plain": (
        "You are carrying out a task in a text environment. Turn 1. The task and what you see:\n\n"
        "{observation}{admissible}{reflection}\n\n"
        "{ask}"
    ),
    "action_next": "Turn {turn}.\n{observation}{admissible}\n\n{ask_next}",
    "window": (
        "You are carrying out a task in a text environment. The task and what you saw at first:\n\n"
        "{first_observation}{strategy_part}{reflection}{history}\n\n"
        "Turn {turn}. You see now:\n{observation}{admissible}\n\n"
        "{ask}"
    ),
    "window_strategy": "\n\nFollow this strategy throughout:\n<strategy>{strategy}</strategy>",
    "window_turn": "\n\nTurn {turn}. {observation}\nYou did: {action}",
    "ask": "Think briefly, then give exactly one action {action_form}.",
    "ask_next": "Give the next action {action_form}.",
    "ask_turn": (
        "First write a strategy for what to do from here {strategy_form}: a high-level description of the way to the "
        "goal. Then think briefly, and give exactly one action {action_form}."
    ),
    "ask_turn_next": "Give your strategy from here {strategy_form}, then the next action {action_form}.",
    "admissible": "\nAdmissible actions: {actions}",
    "parse_error": "No action was found: it must stand {action_form}. Nothing was done.",
    "reflect_bad": (
        "\n\nAn earlier attempt at this task failed. These were its strategies:\n{strategies}{feedback}\n\n"
        "First criticise them precisely and say how to fix them. Then give a better, detailed strategy that is easy to "
        "carry out."
    ),
    "reflect_good": (
        "\n\nAn earlier attempt at this task succeeded. These were its strategies:\n{strategies}{feedback}\n\n"
        "Let them inspire your own."
    ),
    "reflect_strategy": "{turn}. {strategy}\n",
    "reflect_feedback": "What the environment said in the end: {feedback}",
    "judgment": (
        "{observation}\n\nThe episode is over. Look back at your {num_turns} turns. Which of them both ignored the "
        "strategy and did not advance the task? Give your reasons first, then the numbers of those turns as a list, "
        "for example <judgment>[2, 5]</judgment>, or <judgment>[]</judgment> if there are none."
    ),
    "judgment_alone": (
        "An agent carried out a task in a text environment. The task and what it saw at first:\n\n{observation}\n\n"
        "It was to follow this strategy:\n<strategy>{strategy}</strategy>\n\nIts turns:\n{turns}\n\n"
        "Which of the {num_turns} turns both ignored the strategy and did not advance the task? Give your reasons "
        "first, then the numbers of those turns as a list, for example <judgment>[2, 5]</judgment>, or "
        "<judgment>[]</judgment> if there are none."
    ),
    "judgment_turn": "{turn}. {action} -> {result}\n",
}

# A nano model spends its few tokens on the world, not on being told the rules: the tags alone tell it what is asked.
_TERSE = {
    "strategy": "{observation}{reflection}\n<strategy>?",
    "action_first": "{observation}{admissible}\n<strategy>{strategy}</strategy>\n1 {ask}",
    "action_first_plain": "{observation}{admissible}{reflection}\n1 {ask}",
    "action_next": "{observation}{admissible}\n{turn} {ask_next}",
    "window": "{first_observation}{strategy_part}{reflection}{history}\n{observation}{admissible}\n{turn} {ask}",
    "window_strategy": "\n<strategy>{strategy}</strategy>",
    "window_turn": "\n{turn} {action}",
    "ask": "{action_mark}?",
    "ask_next": "{action_mark}?",
    "ask_turn": "{strategy_mark}?",
    "ask_turn_next": "{strategy_mark}?",
    "admissible": "\nActions: {actions}",
    "parse_error": "No action.",
    "reflect_bad": "\n- {strategies}{feedback}",
    "reflect_good": "\n+ {strategies}{feedback}",
    "reflect_strategy": "{strategy} ",
    "reflect_feedback": "{feedback}",
    "judgment": "{observation}\n<judgment>?",
    "judgment_alone": "{observation}\n<strategy>{strategy}</strategy>\n{turns}<judgment>?",
    "judgment_turn": "{turn} {action}: {result}\n",
}

_MARKER_FIELDS = ("strategy_mark", "action_mark", "strategy_form", "action_form")
_ASKING = ("ask", "ask_next", "ask_turn", "ask_turn_next", "parse_error")
STYLES: dict[str, dict[str, str]] = {"full": _FULL, "terse": _TERSE}
_FIELD = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True)
class Prompts:
    """The templates of one run, filled in by name. Braces in the values are left alone.

    per_turn      every response is to hold a strategy of its own before its action
    action_block  which of several actions in one response counts
    """

    templates: Mapping[str, str]
    markers: Markers = MARKERS["tags"]
    per_turn: bool = False
    action_block: ActionBlock = "last"

    @classmethod
    def make(
        cls,
        style: str = "full",
        replace: Mapping[str, str] | None = None,
        *,
        markers: Markers = MARKERS["tags"],
        per_turn: bool = False,
        action_block: ActionBlock = "last",
    ) -> Prompts:
        """Templates of one style with some replaced. A replacement may only use the fields of what it replaces."""
        templates = {**STYLES[style], **(replace or {})}
        for name, text in (replace or {}).items():
            if name not in _FULL:
                near = difflib.get_close_matches(name, _FULL, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_FULL)}"
                raise ValueError(f"prompts.templates must name a template, got {name!r}; {hint}")
            allowed = set(_FIELD.findall(_FULL[name])) | set(_FIELD.findall(STYLES[style][name]))
            if name in _ASKING:
                allowed |= set(_MARKER_FIELDS)
            for used in _FIELD.findall(text):
                if used not in allowed:
                    known = ", ".join(sorted(allowed)) or "none"
                    raise ValueError(f"prompts.templates.{name} must use fields among {known}, got {{{used}}}")
        return cls(templates, markers, per_turn, action_block)

    @classmethod
    def of(cls, config: Config) -> Prompts:
        """The prompts that a configuration describes. ValueError says which template or marker is wrong."""
        options = config.prompts
        markers = make_markers(options.format, options.markers)
        return cls.make(
            options.style,
            options.templates,
            markers=markers,
            per_turn=config.strategy.per == "turn",
            action_block=options.action_block,
        )

    def _fill(self, name: str, **values: object) -> str:
        return _FIELD.sub(
            lambda m: str(values[m.group(1)]) if m.group(1) in values else m.group(0), self.templates[name]
        )

    def strategy(self, observation: str, reflection: str = "") -> str:
        """The request for one strategy of the whole episode; `reflection`: an earlier attempt, from `reflection()`."""
        return self._fill("strategy", observation=observation, reflection=reflection)

    def first_action(
        self, observation: str, strategy: str | None, admissible: Sequence[str] | None = None, reflection: str = ""
    ) -> str:
        """The first user turn of an episode; `strategy` None: none is given."""
        listed, ask = self._admissible(admissible), self._ask("ask")
        if strategy is None:
            return self._fill(
                "action_first_plain", observation=observation, admissible=listed, reflection=reflection, ask=ask
            )
        return self._fill("action_first", observation=observation, strategy=strategy, admissible=listed, ask=ask)

    def next_action(self, turn: int, observation: str, admissible: Sequence[str] | None = None) -> str:
        """A later user turn; `turn` counts from 1."""
        listed, ask = self._admissible(admissible), self._ask("ask", "_next")
        return self._fill("action_next", turn=turn, observation=observation, admissible=listed, ask_next=ask)

    def window(
        self,
        turn: int,
        first_observation: str,
        strategy: str | None,
        history: Sequence[tuple[int, str, str]],
        observation: str,
        admissible: Sequence[str] | None = None,
        reflection: str = "",
    ) -> str:
        """A prompt rebuilt for a turn after the first; `history` holds (turn, observation, action) of the last turns."""
        # What turn 1 saw is the first observation, which stands in the prompt already.
        shown = [
            self._fill("window_turn", turn=t, observation="" if t == 1 else seen, action=did)
            for t, seen, did in history
        ]
        return self._fill(
            "window",
            first_observation=first_observation,
            strategy_part="" if strategy is None else self._fill("window_strategy", strategy=strategy),
            reflection=reflection,
            history="".join(shown),
            turn=turn,
            observation=observation,
            admissible=self._admissible(admissible),
            ask=self._ask("ask"),
        )

    def parse_error(self) -> str:
        """The observation after a response without an action."""
        return self._fill("parse_error", **self._marks())

    def reflection(self, strategies: Sequence[str], feedback: str | None, *, success: bool) -> str:
        """What is said of an earlier attempt at the task: its strategies in turn order and the environment's last word."""
        lines = [self._fill("reflect_strategy", turn=i + 1, strategy=text) for i, text in enumerate(strategies)]
        told = "" if feedback is None else self._fill("reflect_feedback", feedback=feedback)
        return self._fill("reflect_good" if success else "reflect_bad", strategies="".join(lines), feedback=told)

    def judgment(self, observation: str, num_turns: int) -> str:
        """The question appended to the conversation itself, after the last result."""
        return self._fill("judgment", observation=observation, num_turns=num_turns)

    def judgment_alone(self, observation: str, strategy: str | None, turns: Sequence[tuple[str, str]]) -> str:
        """The question with the (action, result) of every turn, for a judge that has not seen the conversation."""
        lines = [self._fill("judgment_turn", turn=i + 1, action=a, result=r) for i, (a, r) in enumerate(turns)]
        return self._fill(
            "judgment_alone",
            observation=observation,
            strategy=strategy or "",
            turns="".join(lines),
            num_turns=len(turns),
        )

    def read(self, text: str, *, thinking: str = "") -> Response:
        """Action and strategy of a response; `thinking`: the mark of a thought that its prompt has opened already."""
        return read_response(text, self.markers, block=self.action_block, thinking=thinking)

    def _ask(self, name: str, suffix: str = "") -> str:
        return self._fill(name + ("_turn" if self.per_turn else "") + suffix, **self._marks())

    def _marks(self) -> dict[str, str]:
        marks = self.markers
        return dict(zip(_MARKER_FIELDS, (marks.strategy or marks.strategy_end, marks.action, marks.strategy_form,
                                         marks.action_form), strict=True))  # fmt: skip

    def _admissible(self, actions: Sequence[str] | None) -> str:
        return "" if not actions else self._fill("admissible", actions=", ".join(actions))


def parse_strategy(text: str, *, thinking: str = "") -> str | None:
    """The strategy of the whole episode in a response, or None: no complete block outside thoughts, or an empty one."""
    return last_block(text, "<strategy>", "</strategy>", thinking=thinking) or None


def parse_judgment(text: str, num_turns: int, *, thinking: str = "") -> tuple[int, ...] | None:
    """0-based turns that a judgment lists (1-based in the text), ascending, out-of-range numbers dropped.

    Of several blocks the last counts. None: no complete block, or something in it that is no list of whole numbers.
    thinking  as in `markers.parse_action`
    """
    inside = last_block(text, "<judgment>", "</judgment>", thinking=thinking)
    if inside is None:
        return None
    if inside.startswith("[") and inside.endswith("]"):
        inside = inside[1:-1]
    numbers = [item.strip() for item in inside.split(",")] if inside.strip() else []
    if not all(re.fullmatch(r"[+-]?[0-9]+", item) for item in numbers):
        return None
    # A number of a thousand digits is out of range; int() would refuse to read it.
    turns = {int(item) - 1 for item in numbers if len(item) < 20}
    return tuple(sorted(t for t in turns if 0 <= t < num_turns))


def strategy_response(text: str) -> str:
    """A strategy as the policy should write it (for supervised learning)."""
    return f"<strategy>{text}</strategy>"


def action_response(action: str, markers: Markers = MARKERS["tags"]) -> str:
    """An action as the policy should write it."""
    return f"{markers.action}{action}{markers.action_end}"


def turn_response(strategy: str, action: str, markers: Markers = MARKERS["tags"]) -> str:
    """A strategy and the action under it as the policy should write them in one response."""
    if markers.strategy_end == markers.action:
        return f"{markers.strategy}\n{strategy}\n{markers.action}\n{action}"
    return f"{markers.strategy}{strategy}{markers.strategy_end}{action_response(action, markers)}"


def judgment_response(turns: Sequence[int]) -> str:
    """A judgment of 0-based turns as the policy should write it."""
    return f"<judgment>[{', '.join(str(t + 1) for t in turns)}]</judgment>"
