"""One worker process: games and episodes behind a pipe, one JSON line per request and per answer.

    {"do": "start", "episode": 7, "game": PATH}           -> {"text", "commands", "won", "valid"}
    {"do": "step", "episode": 7, "action": "look"}        -> the same
    {"do": "forget", "episode": 7}                        -> {}
    {"do": "expert", "kind": "planner", "game": PATH, "turns": 50}  -> {"actions": [...] or null}
                                                          any of them -> {"error": TEXT}

The planner's library holds one state per loaded copy, swaps stdout and sys.argv while it translates, and is not
thread-safe: hence processes, one request at a time, and a copy of the library per living episode (3 MB, used again when
the episode is over).  Deliberately absent: seeds (a game has no chance in it), files written, any wish to survive the
parent (the end of stdin is the end of the worker).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import fast_downward
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
from textworld.envs import PddlEnv

from hsg.environments.alfworld import experts, speed

_idle_libraries: list[Any] = []


def open_game(path: str, **infos: bool) -> tuple[Any, Any]:
    """An environment as ALFWorld builds it and its first state; `infos` are further fields of textworld.EnvInfos."""
    wanted = textworld.EnvInfos(won=True, admissible_commands=True, **infos)
    environment = AlfredInfos(AlfredDemangler(PddlEnv(wanted), shuffle=False))
    environment.load(path)
    return environment, environment.reset()


def close_game(environment: Any) -> None:
    """Give the library of an episode to the next one."""
    _idle_libraries.append(environment.unwrapped.downward_lib)


class Worker:
    """The living episodes of this process, by number."""

    def __init__(self) -> None:
        self._episodes: dict[int, Any] = {}

    def start(self, episode: int, game: str) -> dict[str, Any]:
        self._episodes[episode], state = open_game(game)
        return _answer(state)

    def step(self, episode: int, action: str) -> dict[str, Any]:
        state, _, _ = self._episodes[episode].step(action)
        return _answer(state)

    def forget(self, episode: int) -> dict[str, Any]:
        if episode in self._episodes:
            close_game(self._episodes.pop(episode))
        return {}

    def expert(self, kind: str, game: str, turns: int) -> dict[str, Any]:
        environment, state = open_game(game, policy_commands=kind == "planner", facts=kind == "handcoded")
        actions = experts.EXPERTS[kind](environment, state, turns)
        close_game(environment)
        return {"actions": actions}


def _answer(state: Any) -> dict[str, Any]:
    return {
        "text": state["feedback"],
        "commands": state["admissible_commands"],
        "won": bool(state["won"]),
        "valid": state["feedback"] != "Nothing happens.",
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the planner prints
    speed.install()
    load_library = fast_downward.load_lib
    fast_downward.load_lib = lambda: _idle_libraries.pop() if _idle_libraries else load_library()
    worker = Worker()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except (Exception, SystemExit) as error:  # the translator leaves by sys.exit on a malformed game
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
