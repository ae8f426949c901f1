"""Configuration files: YAML with the differences, --set overrides, near names for typos, the resolved dump.

    defaults  <  the bundle of `algorithm`  <  what strategy.per implies  <  the YAML file  <  --set a.b=c

A section named like the environment (`toy: {num_train: 50}`) is handed to `environments.make` as options.  Where --set
names another `algorithm` for a run's resolved file, what that file owes to its old bundle gives way to the new one.

Deliberately absent: interpolation, includes, environment variables.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from hsg.config.algorithms import ALGORITHMS, IMPLIED, USED_WHEN
from hsg.config.checks import require
from hsg.config.options import Config, EnvironmentConfig
from hsg.crediting.names import ESTIMATOR_NAMES


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run: a YAML file with the differences, then `a.b=c` overrides. ValueError says what is wrong."""
    given: dict[str, Any] = {}
    if path is not None:
        given = read_yaml(Path(path), "--config")
    if any(item.partition("=")[0].strip() == "algorithm" for item in overrides) and is_resolved(given):
        given = _own_choices(given)
    for item in overrides:
        key, sign, text = item.partition("=")
        require(bool(sign) and bool(key), "--set", "of the form section.key=value", item)
        try:
            value = _load_yaml(text)
        except (yaml.YAMLError, ValueError):
            value = text
        _put(given, key.strip(), value)
    return make_config(given)


def make_config(given: Mapping[str, Any]) -> Config:
    """A Config from nested plain values; the bundle of `algorithm` comes before them."""
    given = {key: value for key, value in given.items()}
    algorithm = given.get("algorithm", "strata")
    _check_name("algorithm", algorithm, ALGORITHMS)
    nested: dict[str, Any] = {}
    section = given.get("strategy")
    per = section.get("per") if isinstance(section, Mapping) else None
    implied = IMPLIED.get(per, {}) if isinstance(per, str) else {}
    for key, value in {**ALGORITHMS[algorithm], **implied}.items():
        _put(nested, key, copy.deepcopy(value))  # templates: what is merged into them must not stay in the bundle
    _merge(nested, given)
    _claim_environment_section(nested)
    config = _build(Config, nested, "")
    _check_name("advantage.estimator", config.advantage.estimator, ESTIMATOR_NAMES)
    return config


def is_resolved(given: Mapping[str, Any]) -> bool:
    """Whether a file says everything, as that of a run folder does."""
    return set(given) >= {f.name for f in dataclasses.fields(Config)}


def _own_choices(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a resolved file has beside its own bundle; the rest of it would leave another bundle nothing to set."""
    plain = to_dict(make_config({"algorithm": given["algorithm"]}))

    def differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in mine.items():
            other = theirs.get(key)
            if isinstance(value, Mapping) and isinstance(other, Mapping):
                if inner := differing(value, other):
                    kept[key] = inner
            elif value != other:
                kept[key] = value
        return kept

    return differing(given, plain)


def unused_options(config: Config) -> list[str]:
    """Options that were set away from their algorithm's bundle though this configuration never reads them."""
    plain = _flat(to_dict(make_config({"algorithm": config.algorithm})))
    changed = [key for key, value in _flat(to_dict(config)).items() if value != plain[key]]
    unread = [name for name, used in USED_WHEN.items() if not used(config)]
    return [key for key in changed if any(key == name or key.startswith(f"{name}.") for name in unread)]


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys; mappings whose keys are the user's (environment options, templates, markers) stay whole."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        inner = isinstance(value, dict) and key not in ("options", "templates", "markers")
        flat |= _flat(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return flat


def _check_name(key: str, name: object, known: Mapping[str, Any]) -> None:
    if not isinstance(name, str) or name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        require(False, key, f"one of {', '.join(known)}", name, f"did you mean {near[0]!r}?" if near else "")


def _claim_environment_section(nested: dict[str, Any]) -> None:
    """`toy: {...}` at the top is the options of environment.name: toy."""
    environment = nested.get("environment")
    if environment is None:
        environment = nested["environment"] = {}
    name = environment.get("name", EnvironmentConfig.name) if isinstance(environment, dict) else EnvironmentConfig.name
    known = {f.name for f in dataclasses.fields(Config)}
    if isinstance(name, str) and name in nested and name not in known:
        options = nested.pop(name)
        require(isinstance(options, dict), name, "a mapping of options", options)
        require(isinstance(environment, dict), "environment", "a mapping of keys", environment)
        inner = environment.get("options") or {}
        require(isinstance(inner, dict), "environment.options", "a mapping", inner)
        nested["environment"] = {**environment, "options": {**inner, **options}}


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values of a config, as dumped into the run folder."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    """The same as YAML and JSON give it back: they know lists and no tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def dump_config(config: Config, path: Path) -> None:
    """Write the resolved config; loading it gives an equal Config."""
    path.write_text(yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True), encoding="utf-8")


def read_yaml(path: Path, name: str) -> dict[str, Any]:
    """The mapping that a YAML file holds; `name` is what the one-line ValueError calls it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ValueError(f"{name} must be a readable file, got {str(path)!r}: {reason}") from None
    try:
        given = _load_yaml(text)
    except RecursionError:
        raise ValueError(f"{name} must be valid YAML, got {str(path)!r}: nested too deep") from None
    except ValueError as error:  # a whole number of thousands of digits, which Python does not read
        raise ValueError(f"{name} must be valid YAML, got {str(path)!r}: {error!s:.100}") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ValueError(f"{name} must be valid YAML, got {str(path)!r}:{line} {problem}") from None
    given = {} if given is None else given
    require(isinstance(given, dict), name, "a mapping of sections", type(given).__name__)
    return given


class _Loader(yaml.SafeLoader):
    """Plain YAML, but a key given twice is an error (the first one would be lost), and a date stays the text it is."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _load_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def _put(nested: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        inner = nested.get(section)
        nested[section] = dict(inner) if isinstance(inner, dict) else {}
        nested = nested[section]
    nested[last] = value


def _merge(base: dict[str, Any], given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _build(cls: type, given: Any, prefix: str) -> Any:
    section = prefix.rstrip(".") or "the configuration"
    given = {} if given is None else given
    require(isinstance(given, Mapping), section, "a mapping of keys", given)
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in given.items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), _all_keys() if not prefix else hints, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(prefix + k for k in near)}?" if near else f"known: {', '.join(hints)}"
            raise ValueError(f"{prefix}{key} must be a known key, got {prefix}{key}; {hint}")
        if dataclasses.is_dataclass(hints[key]):
            values[key] = _build(typing.cast(type, hints[key]), value, f"{prefix}{key}.")
        else:
            values[key] = _convert(value, hints[key], prefix + key)
    return cls(**values)


def _all_keys() -> list[str]:
    """Every dotted key, and every top-level one, for near names."""
    keys: list[str] = []

    def walk(cls: type, prefix: str) -> None:
        for name, hint in typing.get_type_hints(cls).items():
            keys.append(prefix + name)
            if dataclasses.is_dataclass(hint):
                walk(typing.cast(type, hint), f"{prefix}{name}.")

    walk(Config, "")
    return keys


def _convert(value: Any, hint: Any, key: str) -> Any:
    """The value in the field's type, or a ValueError with key, rule and value. 1 passes for 1.0, never True for 1."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        inner = next(a for a in typing.get_args(hint) if a is not type(None))
        return _convert(value, inner, key)
    if origin is Literal:
        choices = typing.get_args(hint)
        if isinstance(value, bool) and "off" in choices:  # YAML reads a bare off as a bool, and on
            value = {True: "on", False: "off"}[value]
        near = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1)
        require(
            value in choices,
            key,
            f"one of {', '.join(map(str, choices))}",
            value,
            f"did you mean {near[0]}?" if near else "",
        )
        return value
    if hint is bool:
        require(isinstance(value, bool), key, "true or false", value)
        return value
    if hint is int:
        whole = isinstance(value, float) and value.is_integer()
        require((isinstance(value, int) or whole) and not isinstance(value, bool), key, "a whole number", value)
        return int(value)
    if hint is float:
        if isinstance(value, str):  # YAML 1.1 reads 1e-6 as a string
            try:
                value = float(value)
            except ValueError:
                require(False, key, "a number", value)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # Compared rather than converted: a whole number of 400 digits overflows a float.
        require(number and abs(value) <= sys.float_info.max, key, "a finite number", value)
        return float(value)
    if hint is str:
        # A run may well be named 1 or 2026.
        plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
        require(plain, key, "a text", value)
        return str(value)
    if origin is tuple:
        require(isinstance(value, (list, tuple)), key, "a list", value)
        return tuple(_convert(item, typing.get_args(hint)[0], f"{key}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        require(value is None or isinstance(value, Mapping), key, "a mapping", value)
        require(all(isinstance(name, str) for name in value or {}), key, "a mapping with text keys", value)
        inner_hint = typing.get_args(hint)[1]
        if inner_hint is Any:
            return dict(value or {})
        return {name: _convert(item, inner_hint, f"{key}.{name}") for name, item in (value or {}).items()}
    raise AssertionError(f"no rule for {key}: {hint}")
