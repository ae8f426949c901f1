"""Two experts that play a game to its end, inside a worker process.

    planner     fast-downward: it sees the whole room, closed drawers included, and makes nearly the shortest plan
    handcoded   the wheel's rules: search likely places one after another, like a player who knows only what it saw

The handcoded expert of alfworld 0.4.2 speaks half of each language: it wants to read and say "move X to Y" (2.1.2), yet
its memory only notices "put X in/on Y" (2.1.1).  Here it is shown the former and reminded in the latter, whatever the
game speaks, so that it plays games of both formats; its answer is said in the language of the game.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from alfworld.agents.expert import HandCodedTWAgent

_PUT, _MOVE = re.compile(r"put (.+) in/on (.+)"), re.compile(r"move (.+) to (.+)")


def as_move(command: str) -> str:
    """The command in the language of 2.1.2."""
    return _PUT.sub(r"move \1 to \2", command)


def as_put(command: str) -> str:
    """The command in the language of 2.1.1."""
    return _MOVE.sub(r"put \1 in/on \2", command)


def planner(environment: Any, state: Any, turns: int) -> list[str] | None:
    """The plan from the first state if it wins within `turns`, else None."""
    plan = list(state["policy_commands"])
    environment.unwrapped.request_infos.policy_commands = False  # or every step would plan anew
    for index, action in enumerate(plan[:turns]):
        state, _, _ = environment.step(action)
        if state["won"]:
            return plan[: index + 1]
    return None


def handcoded(environment: Any, state: Any, turns: int) -> list[str] | None:
    """What the handcoded expert does until it has won; None where it has not within `turns` or gives up."""
    random.seed("handcoded")  # it picks among equal objects at random; the process is a worker of ours
    agent = HandCodedTWAgent(max_steps=turns)
    agent.reset(environment._gamefile)
    agent.observe(state["feedback"])
    played, action = [], "look"  # the wheel's own first move
    for _ in range(turns):
        state, _, _ = environment.step(action)
        played.append(action)
        if state["won"]:
            return played
        commands = {as_move(command): command for command in state["admissible_commands"]}
        shown = {"feedback": state["feedback"], "facts": state["facts"], "admissible_commands": list(commands)}
        try:
            action = commands.get(as_move(agent.act(shown, 0, False, as_put(action))), "look")
        except Exception:  # it gives up by several exceptions of its own, and by IndexError
            return None
    return None


EXPERTS: dict[str, Callable[[Any, Any, int], list[str] | None]] = {"planner": planner, "handcoded": handcoded}
