"""Environments by name: `make("toy", **options)` -> TaskSet. Each one imports its engine only when made.

To add one: a module or folder here with `make_task_set(**options) -> TaskSet`, and a line in `_MODULES`.  One that stands
elsewhere needs no line: its name is the dotted path of its module, found where Python finds modules (`mylab.greenhouse`).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import typing
from collections.abc import Sequence
from typing import Any

from hsg.protocol import TaskSet

_MODULES = {
    "toy": "hsg.environments.toy",
    "sciworld": "hsg.environments.sciworld",
    "coding": "hsg.environments.coding",
    "webshop": "hsg.environments.webshop",
    "alfworld": "hsg.environments.alfworld",
    "langr": "hsg.environments.langr",
}

_KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def available() -> tuple[str, ...]:
    """Names that `make` knows."""
    return tuple(_MODULES)


def module_of(name: str) -> str:
    """The importable module of an environment: an analysis asks it for what only that environment knows."""
    if name in _MODULES:
        return _MODULES[name]
    if "." in str(name):
        return name
    near = difflib.get_close_matches(str(name), _MODULES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "your own is named by its dotted path, as in mylab.guess"
    raise ValueError(f"environment.name must be one of {', '.join(_MODULES)}, got {name!r}; {hint}")


def make(name: str, /, **options: Any) -> TaskSet:
    """The task set of one environment, by its name or the dotted path of a module with `make_task_set`.

    Unknown name or option: ValueError that names the known ones. What such a module raises while it loads is raised here.
    """
    make_task_set = _load(name)
    parameters = inspect.signature(make_task_set).parameters
    known = list(parameters)
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known) or 'none'}"
            raise ValueError(f"{name}.{key} must be an option of environment {name!r}, got {key!r}; {hint}")
    hints = typing.get_type_hints(make_task_set)
    for key, value in options.items():
        choices = [kind for kind in typing.get_args(hints.get(key)) or (hints.get(key),) if kind is not type(None)]
        kind = choices[0] if len(choices) == 1 else None
        # A text or a list of texts: neither a number nor a mapping may pass for a list.
        if str in choices and any(typing.get_origin(choice) is Sequence for choice in choices):
            texts = isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
            if not texts and not isinstance(value, str):
                raise ValueError(
                    f"{name}.{key} must be a text or a list of texts, got {value!r}; see its documentation"
                )
        if kind in _KINDS and not (value is None and type(None) in typing.get_args(hints[key])):
            fits = isinstance(value, (int, float) if kind is float else kind)
            fits = fits and (kind is bool or not isinstance(value, bool))
            if not fits:
                raise ValueError(f"{name}.{key} must be {_KINDS[kind]}, got {value!r}; options are checked by type")
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [key for key, p in parameters.items() if p.default is p.empty and p.kind in named]
    if lacking := [key for key in required if key not in options]:
        raise ValueError(f"{name}.{lacking[0]} must be given, got none; set the option of environment {name!r}")
    try:
        task_set = make_task_set(**options)
    except ValueError as error:
        if name in _MODULES:
            raise
        raise ValueError(f"{name}: {error}") from error  # raised here, it counts as one in words for a user
    if not (hasattr(task_set, "tasks") and hasattr(task_set, "create")):
        raise ValueError(f"make_task_set of {name} must return a TaskSet, got {task_set!r:.80}; see hsg/protocol.py")
    return task_set


def _load(name: str) -> Any:
    """The function `make_task_set` of an environment."""
    path = module_of(name)
    rule = "environment.name must be a module with make_task_set"
    try:
        module = importlib.import_module(path)
    except (ModuleNotFoundError, TypeError) as error:  # TypeError: a path that begins with a dot
        # A module that is missing further in is a fault of that code, and its traceback says where.
        if isinstance(error, ModuleNotFoundError) and not f"{path}.".startswith(f"{error.name}."):
            raise
        remedy = "put the folder it is found from into PYTHONPATH (PYTHONPATH=. for here)"
        raise ValueError(f"{rule}, got {name!r}: {error}; {remedy}") from None
    if not callable(getattr(module, "make_task_set", None)):
        raise ValueError(f"{rule}, got {name!r}, which has none; write make_task_set(**options) -> TaskSet there")
    return module.make_task_set
