"""The `hsg` command: one word for each program of experiments/, with the same options.

    hsg train ...     is     python experiments/run.py ...

Deliberately absent: logic of its own, shell completion.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from hsg import __version__
from hsg.config.arguments import refuse


class Command(NamedTuple):
    module: str  # its main(arguments) -> exit status
    duty: str
    example: str


COMMANDS = {
    "train": Command("hsg.experiments.run", "train a policy", "hsg train --config my.yaml --set seed=1"),
    "evaluate": Command(
        "hsg.experiments.evaluate",
        "success, pass@k and comparisons on fixed tasks",
        "hsg evaluate runs/a --split test --num-samples 16 --k 1,4,16",
    ),
    "warmstart": Command(
        "hsg.experiments.warmstart", "supervised training on expert play", "hsg warmstart --config my.yaml"
    ),
    "view": Command("hsg.experiments.view", "look at runs in a browser", "hsg view runs/a runs/b"),
    "analysis": Command(
        "hsg.experiments.reading.analysis", "was the judge right, what are strategies worth", "hsg analysis runs/a"
    ),
    "plan": Command(
        "hsg.planning.plan", "memory and time before anything is loaded", "hsg plan --config my.yaml --gpus 8"
    ),
    "check-env": Command(
        "hsg.experiments.upkeep.check_env", "say what is wrong with an environment", "hsg check-env toy"
    ),
}


def available() -> dict[str, Command]:
    """The commands whose program is there."""
    return {name: command for name, command in COMMANDS.items() if find_spec(command.module) is not None}


def overview() -> str:
    """What `hsg` alone prints."""
    commands = available()
    lines = [
        "Train language-model agents with strategies.",
        "",
        "usage: hsg COMMAND [options]        hsg COMMAND --help",
        "",
    ]
    lines += [f"  {name:<12}{command.duty}" for name, command in commands.items()]
    lines += ["", "examples:", *(f"  {command.example}" for command in commands.values())]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: its own; 2 and one line where there is none of that name."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(overview())
        return 0
    if given[0] in ("-V", "--version"):
        print(f"hsg {__version__}")
        return 0
    name, *rest = given
    commands = available()
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(commands)}"
        return refuse(ValueError(f"COMMAND must be a command of hsg, got {name!r}; {hint}"))
    sys.argv[0] = f"hsg {name}"  # what --help calls the program
    return importlib.import_module(commands[name].module).main(rest)


if __name__ == "__main__":
    sys.exit(main())
