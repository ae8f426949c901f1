"""Goals and subgoals: predicates joined by AND, OR, NAND and NOR, with things that EXIST or ALL of a category.

    on_top(X, sofa)              ("on_top", "X", "sofa")
    EXISTS X: ball, AND (...)    Expression("AND", "EXISTS", (("X", "ball"),), (("on_top", "X", "sofa"), ("not_holding",)))

A quantifier is read as habitat's PDDL reads it: EXISTS is OR, FORALL is AND, over the whole expression with each choice put
in.  So NAND with EXISTS means that some thing is not there, which for two of a kind is less than "none is there".

Deliberately absent: other predicates than upstream's, functions, time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hsg.environments.langr.words import place_name

Predicate = tuple[str, ...]  # its name, then its arguments: things, places or variables
LYING = ("on_top", "in", "at")  # a thing, then a place
STANDING = ("robot_at", "robot_at_obj", "robot_at_closest")  # a thing or a place
_ARITY = {
    **dict.fromkeys(LYING, 2),
    **dict.fromkeys(STANDING, 1),
    **dict.fromkeys(("opened_fridge", "closed_fridge", "opened_cab", "closed_cab", "holding"), 1),
    "not_holding": 0,
}
_FORM = re.compile(r"\s*(\w+)\s*\(([^()]*)\)\s*")
JOINS = ("AND", "OR", "NAND", "NOR")


@dataclass(frozen=True)
class Expression:
    """join: one of JOINS; quantifier: EXISTS, FORALL or None; inputs: (variable, category) of the quantifier."""

    join: str
    quantifier: str | None
    inputs: tuple[tuple[str, str], ...]
    parts: tuple[Expression | Predicate, ...]


class Facts(Protocol):
    """What an expression is held against."""

    def is_true(self, predicate: Predicate) -> bool: ...

    def things_of(self, category: str) -> Sequence[str]: ...


def parse_predicate(text: str, things: frozenset[str], variables: Sequence[str] = ()) -> Predicate:
    """A predicate from its text, places in words. ValueError where it is none of upstream's or names nothing known."""
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    name = match.group(1) if match else ""
    arguments = [a.strip() for a in match.group(2).split(",") if a.strip()] if match else []
    if name not in _ARITY or len(arguments) != _ARITY[name]:
        raise ValueError(f"a predicate must be one of {', '.join(_ARITY)} with its arguments, got {text!r}")
    named = [a if a in things or a in variables else place_name(a) for a in arguments]
    return (name, *named)


def parse_goal(given: Any, things: frozenset[str], variables: Sequence[str] = ()) -> Expression | Predicate:
    """An expression from upstream's nested dictionaries. ValueError says what is wrong with it."""
    if isinstance(given, str):
        return parse_predicate(given, things, variables)
    if not isinstance(given, dict) or given.get("expr_type") not in JOINS or not given.get("sub_exprs"):
        raise ValueError(f"a goal must be a predicate or {', '.join(JOINS)} of sub_exprs, got {given!r:.80}")
    quantifier = given.get("quantifier")
    inputs = tuple((item["name"], item["expr_type"]) for item in given.get("inputs") or ())
    if quantifier not in (None, "EXISTS", "FORALL") or (quantifier is None) != (not inputs):
        raise ValueError(f"a goal must have inputs and EXISTS or FORALL, or neither, got {quantifier!r} of {inputs}")
    inside = (*variables, *(name for name, _ in inputs))
    parts = tuple(parse_goal(part, things, inside) for part in given["sub_exprs"])
    return Expression(given["expr_type"], quantifier, inputs, parts)


def holds(goal: Expression | Predicate, facts: Facts, chosen: Mapping[str, str] | None = None) -> bool:
    """Whether a goal is true; `chosen`: the thing that stands for each variable."""
    chosen = chosen or {}
    if not isinstance(goal, Expression):
        return facts.is_true((goal[0], *(chosen.get(a, a) for a in goal[1:])))
    if goal.quantifier is None:
        return _joined(goal.join, (holds(part, facts, chosen) for part in goal.parts))
    whole = (_joined(goal.join, (holds(p, facts, c) for p in goal.parts)) for c in _choices(goal, facts, chosen))
    return any(whole) if goal.quantifier == "EXISTS" else all(whole)


def _joined(join: str, parts: Iterator[bool]) -> bool:
    value = all(parts) if join in ("AND", "NAND") else any(parts)
    return value != join.startswith("N")


def _choices(goal: Expression, facts: Facts, chosen: Mapping[str, str]) -> Iterator[dict[str, str]]:
    things = [facts.things_of(category) for _, category in goal.inputs]
    names = [name for name, _ in goal.inputs]
    for choice in itertools.product(*things):
        yield {**chosen, **dict(zip(names, choice, strict=True))}


Wish = tuple[bool, Predicate]  # (True, p): p shall be true; (False, p): it shall not


def ways(
    goal: Expression | Predicate, facts: Facts, wanted: bool = True, chosen: Mapping[str, str] | None = None
) -> Iterator[tuple[Wish, ...]]:
    """Each way in which a goal comes true (`wanted` False: fails to), as wishes that together are enough."""
    chosen = chosen or {}
    if not isinstance(goal, Expression):
        yield ((wanted, (goal[0], *(chosen.get(a, a) for a in goal[1:]))),)
        return
    if goal.quantifier is None:
        yield from _ways_joined(goal, facts, wanted, [chosen])
        return
    choices = list(_choices(goal, facts, chosen))
    if wanted == (goal.quantifier == "EXISTS"):  # one choice is enough
        for choice in choices:
            yield from _ways_joined(goal, facts, wanted, [choice])
    else:
        yield from _ways_joined(goal, facts, wanted, choices)


def _ways_joined(
    goal: Expression, facts: Facts, wanted: bool, choices: Sequence[Mapping[str, str]]
) -> Iterator[tuple[Wish, ...]]:
    """Ways in which the joined parts come out as wanted for every one of the choices."""
    inner = wanted != goal.join.startswith("N")
    every = inner == (goal.join in ("AND", "NAND"))  # else one of the parts is enough
    per_choice = []
    for choice in choices:
        parts = [list(ways(part, facts, inner, choice)) for part in goal.parts]
        if every:
            per_choice.append([tuple(itertools.chain(*combo)) for combo in itertools.product(*parts)])
        else:
            per_choice.append(list(itertools.chain(*parts)))
    for combo in itertools.product(*per_choice):
        yield tuple(dict.fromkeys(itertools.chain(*combo)))
