"""Faster TextWorld without other text: pure functions of the engine remember what they have already worked out.

    bare engine, one step   55-80 ms   85 % of it parses the same grammar templates again
    with `install()`         1-5 ms    the engine's own code runs as before; only the functions below remember

Each of them depends on its arguments alone, so text and admissible commands stay byte-identical (a test compares both
engines).  What is remembered, and who asks again and again:

    parsed templates    the grammar derives every command and every feedback from its source text
    parsed conditions   of grammar rules and of lists in them
    parsed games        rules and grammar: the same text in every game but for the sentence that names the task
    translated games    PDDL to SAS, twice in `load` and twice in `reset`, 0.2-0.4 s each time
    command texts       of actions whose template asks only for facts that no action changes

Deliberately absent: any change to the installed packages (the functions are replaced in this process, which is a worker
of our own), a cache on disk (a training run meets most games once).
"""

from __future__ import annotations

import functools
import re
import weakref
from typing import Any

import fast_downward
from textworld.envs.pddl import logic, textgen
from textworld.logic import Rule

REMEMBERED_GAMES = 16
"""Translated games kept per process (about 6 MB each); the oldest ones are forgotten."""


@functools.cache
def install() -> None:
    """Replace the engine's functions in this process. Calling it twice changes nothing."""
    parse_template, derive = textgen._parse_and_convert, textgen.ContextSensitiveGrammar.derive
    remembered_template = functools.cache(parse_template)
    # Symbols carry a context while a text is derived from them, so every caller gets symbols of its own.
    textgen._parse_and_convert = lambda *args, **options: fresh(remembered_template(*args, **options))
    textgen.deepcopy = fresh
    textgen.copy_context = copied_context
    Rule.parse_conjunctive_query = staticmethod(functools.cache(Rule.parse_conjunctive_query))
    logic._parse_and_convert = functools.lru_cache(REMEMBERED_GAMES)(logic._parse_and_convert)
    translate = functools.lru_cache(2 * REMEMBERED_GAMES)(fast_downward.pddl2sas)
    fast_downward.pddl2sas = lambda domain, problem, verbose=False, optimize=False: translate(
        domain, problem, verbose, optimize
    )
    textgen.ContextSensitiveGrammar.derive = lambda grammar, start, context: _derive(grammar, derive, start, context)


def fresh(value: Any) -> Any:
    """Symbols of a grammar without their context; as deep as the grammar changes them."""
    if isinstance(value, list):
        return [fresh(item) for item in value]
    copy = object.__new__(type(value))
    copy.__dict__.update(value.__dict__, context={})
    if isinstance(value, textgen.ListSymbol):
        copy.symbol = fresh(value.symbol)
    return copy


def copied_context(context: dict[str, Any]) -> dict[str, Any]:
    """A context whose variables can be rebound. The engine copies the variables too, which nobody changes."""
    return context | {"variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


_TEXTS: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], str]] = weakref.WeakKeyDictionary()
"""Translated game -> (template, entities) -> command text."""

_WORD = re.compile(r"\w+")
_PLACEHOLDER = re.compile(r"(\w+):\w+")


def _derive(grammar: Any, derive: Any, start: str, context: dict[str, Any]) -> str:
    """The text of `start`; remembered per game where no action can change it."""
    task = context["state"].task
    if "#" in start or not _asks_only_constants(start, task):
        return derive(grammar, start, context)
    bound = {placeholder.name: variable.name for placeholder, variable in context["mapping"].items()}
    if bound.keys() >= set(_PLACEHOLDER.findall(start)):  # then entities that the template does not name cannot matter
        bound = {name: bound[name] for name in _WORD.findall(start) if name in bound}
    texts = _TEXTS.setdefault(task, {})
    key = (start, *bound.items())
    if key not in texts:
        texts[key] = derive(grammar, start, context)
    return texts[key]


@functools.lru_cache(REMEMBERED_GAMES * 16)
def _asks_only_constants(template: str, task: Any) -> bool:
    """Whether a template names no fact that an action or a derivation rule of the game can change."""
    changed = {effect.literal.predicate for action in task.actions for effect in action.effects}
    changed |= {axiom.name for axiom in task.axioms}
    return not changed & {name.removeprefix("not_") for name in re.findall(r"(\w+)\(", template)}
