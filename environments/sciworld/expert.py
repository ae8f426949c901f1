"""Make the packaged expert actions: short, winning, and grounded in what the agent has read.

    python -m hsg.environments.sciworld.expert --out environments/sciworld/experts.jsonl.gz

    gold path    open door to hallway, go to hallway, ..., look around, focus on parrot, ...
    shortened    teleport to outside, look around, focus on parrot, ...

The engine's gold paths walk through doors and speak in names that no text shows ("egg turtle" for "turtle egg").
Each list here (1) is the gold path with walks replaced by teleports, (2) loses every action that it wins without,
(3) gets back a "look around" before an action that names a thing not read so far, (4) calls things what the text
calls them, so that a pupil can know what the teacher knows, and (5) is played once more: only wins are written.
Of tasks that ask for evidence (is it a conductor?) only walks and looks are dropped: without the test the answer
would be a guess that the teacher alone gets right.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import multiprocessing
import re
from pathlib import Path

from hsg.environments.sciworld import catalog
from hsg.environments.sciworld.engine import Engine, Pool
from hsg.environments.sciworld.gold import GOLD_SECONDS, PACKAGED_SIMPLIFICATIONS
from hsg.protocol import EnvironmentFault

# kind -> most variations of (train, dev). The other kinds take 20 actions and more, or minutes to shorten.
PLAN = {
    "find-living-thing": (100, 30),
    "find-non-living-thing": (100, 30),
    "find-plant": (100, 30),
    "find-animal": (100, 30),
    "lifespan-longest-lived": (62, 31),
    "lifespan-shortest-lived": (62, 31),
    "lifespan-longest-lived-then-shortest-lived": (62, 31),
    "chemistry-mix-paint-secondary-color": (18, 9),
    "chemistry-mix-paint-tertiary-color": (18, 9),
    "chemistry-mix": (16, 8),
    "use-thermometer": (30, 15),
    "test-conductivity": (20, 10),
}
PACKAGED_KINDS = [*catalog.GROUPS["Find"], *catalog.GROUPS["Lifespan"]]
EVIDENCE = ("use-thermometer", "test-conductivity")

LOOK = "look around"
_WALK = ("go to ", "teleport to ", "open door", "close door", LOOK)
_VERBS = re.compile(
    r"^(focus on|pick up|put down|drop|look at|look in|move|pour|mix|examine|activate|deactivate|open|close|use|connect"
    r"|disconnect|read|eat|flush|dunk)\s+(.+)$"
)
_PARTS = re.compile(r"(\s+(?:to|into|on|with)\s+)")
_ARTICLE = re.compile(r"\b(?:an?|the) (?=[a-z])")
_NAME_END = re.compile(r" \(|[.,):\n]| in the | titled | which |$")


def split_action(action: str) -> list[str]:
    """["move ", thing, " to ", thing]: things at odd places; one element where the action names none."""
    match = _VERBS.match(action)
    if not match or action.startswith(_WALK):
        return [action]
    return [match[1] + " ", *_PARTS.split(match[2])]


def core(thing: str) -> str:
    """ "cup containing nothing in table" -> "cup"."""
    return re.sub(r" (containing|in) .*$", "", thing)


def names_in(text: str) -> list[str]:
    """What a text calls things: the words after an article, most recent first, each once."""
    names = (text[found.end() : _NAME_END.search(text, found.end()).start()] for found in _ARTICLE.finditer(text))  # type: ignore[union-attr]
    return list(dict.fromkeys(reversed([name.removeprefix("substance called ") for name in names])))


def related(thing: str, name: str) -> bool:
    """Whether the text's `name` may be the gold path's `thing`: one has all the words of the other."""
    words, read = set(core(thing).split()), set(name.split())
    return words <= read or (read <= words and len(read) > 1)


def candidates(thing: str, text: str, earlier: list[str]) -> list[str]:
    """Names that may stand for `thing`, best first: the same words, what earlier actions said, related ones."""
    names = names_in(text)
    same = [name for name in names if set(name.split()) == set(core(thing).split())]
    said = [name for name in reversed(earlier) if related(thing, name) or core(thing) == "living thing"]
    near = [name for name in names if related(thing, name)]
    within = re.search(r" in ([a-z0-9 ]+)$", thing)
    inside = re.findall(rf"{within[1]} \(containing an? ([a-z ]+?)(?: in the |[,)])", text)[-1:] if within else []
    return list(dict.fromkeys([*same, *said[:2], *inside, *near[:3], core(thing)]))


def with_teleports(actions: list[str], dropped: tuple[str, ...]) -> list[str]:
    """Walks become one teleport; actions that begin with one of `dropped` go."""
    out: list[str] = []
    for action in actions:
        if action.startswith(("go to ", "teleport to ")):
            if out and out[-1].startswith("teleport to "):
                out.pop()
            out.append("teleport to " + action.split(" to ", 1)[1])
        elif not action.startswith(("open door", "close door", *dropped)):
            out.append(action)
    return out


class Player:
    """Plays lists of actions of one task on one engine and remembers all it has read."""

    def __init__(self, engine: Engine, episode: int, task: tuple[str, int, str]):
        self.engine, self.episode, self.task = engine, episode, task
        self._texts: dict[tuple[str, ...], str] = {}  # after these actions, in lower case

    def win(self, actions: list[str]) -> list[str] | None:
        """The actions up to the win, None where they do not win."""
        text = self.engine.request("L", self.episode, *self.task, timeout=GOLD_SECONDS).text.lower()
        self._texts[()] = text
        for index, action in enumerate(actions):
            answer = self.engine.request("S", self.episode, action, timeout=GOLD_SECONDS)
            text += "\n" + answer.text.lower()
            self._texts[tuple(actions[: index + 1])] = text
            if answer.completed:
                return actions[: index + 1] if round(100 * answer.score) == 100 else None
        return None

    def read(self, actions: list[str]) -> str:
        """All text that the agent has read after these actions, in lower case."""
        if tuple(actions) not in self._texts:
            self.win(actions)
        return self._texts[tuple(actions)]


def shorten(player: Player, gold: list[str]) -> list[str] | None:
    """A list that wins without any action that it wins without; None where the gold path does not win."""
    evidence = player.task[0] in EVIDENCE
    best = None
    for dropped in ((LOOK,), ()) if evidence else ((LOOK, "wait", "examine"), (LOOK,), ()):
        if best := player.win(with_teleports(gold, dropped)):
            break
    best = best or player.win(gold)
    if best is None:
        return None
    index = len(best) - 2  # the last one has just won
    while index >= 0:
        if best[index].startswith(_WALK) or not (evidence or best[index].startswith("focus on")):
            best = player.win(best[:index] + best[index + 1 :]) or best
        index = min(index, len(best) - 1) - 1
    return best


def ground(player: Player, actions: list[str]) -> list[str]:
    """The list with a look before each action that names a thing nobody has read of, and with the names as read."""
    index = 0
    while index < len(actions):
        parts = split_action(actions[index])
        known = names_in(player.read(actions[:index]))
        unread = [thing for thing in parts[1::2] if thing.lower() not in known]
        if unread and actions[:index][-1:] != [LOOK]:
            new = set(names_in(player.read([*actions[:index], LOOK]))) - set(known)
            looking = [*actions[:index], LOOK, *actions[index:]]
            if any(related(thing.lower(), name) for thing in unread for name in new):
                actions = looking
                continue
        earlier = [thing for action in actions[:index] for thing in split_action(action)[1::2]]
        for place in range(1, len(parts), 2):
            thing = parts[place].lower()
            if thing in known or parts[0].startswith(("connect", "disconnect")):
                continue
            for name in candidates(thing, player.read(actions[:index]), earlier):
                changed = "".join([*parts[:place], name, *parts[place + 1 :]])
                if changed == actions[index]:
                    break
                if won := player.win([*actions[:index], changed, *actions[index + 1 :]]):
                    actions, parts = won, split_action(changed)
                    break
        index += 1
    return actions


def make(task_id: str) -> tuple[str, list[str] | None]:
    """(task id, expert actions or None), in a worker process."""
    global _pool
    if _pool is None:
        _pool = Pool(num_engines=1, heap_mb=768)
    kind, _, variation = task_id.rpartition("/")
    task = (kind, int(variation), PACKAGED_SIMPLIFICATIONS)
    engine, episode = _pool.acquire()
    try:
        gold = engine.request("G", episode, *task, timeout=GOLD_SECONDS).text.split("\n")
        player = Player(engine, episode, task)
        actions = shorten(player, gold)
        return task_id, actions and (player.win(ground(player, actions)) or actions)
    except EnvironmentFault:
        return task_id, None
    finally:
        _pool.release(engine, episode)


_pool: Pool | None = None


def main() -> None:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl.gz file; lists in it are kept")
    parser.add_argument("--tasks", nargs="+", default=PACKAGED_KINDS, choices=list(PLAN))
    parser.add_argument("--limit", type=int, default=None, help="at most so many variations per task and split")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()

    made = read_lists(options.out) if options.out.exists() else {}
    task_ids = [
        f"{kind}/{variation}"
        for kind in options.tasks
        for split, most in zip(("train", "dev"), PLAN[kind], strict=True)
        for variation in catalog.spread(catalog.variations(kind, split), min(most, options.limit or most))
    ]
    task_ids = [task_id for task_id in task_ids if task_id not in made]
    with multiprocessing.get_context("spawn").Pool(options.processes) as workers:
        for count, (task_id, actions) in enumerate(
            tqdm(workers.imap(make, task_ids), total=len(task_ids), unit="task")
        ):
            if actions is None:
                tqdm.write(f"{task_id}: no list that wins; left out")
            else:
                made[task_id] = actions
            if count % 50 == 49:
                write_lists(options.out, made)
    write_lists(options.out, made)
    print_lengths(made)
    print(f"{options.out}: {len(made)} lists, {options.out.stat().st_size:,} bytes")


def read_lists(path: Path) -> dict[str, list[str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return {row["task"]: row["actions"] for row in map(json.loads, file)}


def write_lists(path: Path, lists: dict[str, list[str]]) -> None:
    """Sorted and without a time stamp, so that the same lists give the same bytes."""
    order = {kind: index for index, kind in enumerate(catalog.TASKS)}
    keys = sorted(lists, key=lambda task_id: (order[task_id.rpartition("/")[0]], int(task_id.rpartition("/")[2])))
    part = path.with_suffix(".part")
    with open(part, "wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as file:
        for key in keys:
            file.write(json.dumps({"task": key, "actions": lists[key]}).encode() + b"\n")
    part.replace(path)


def print_lengths(lists: dict[str, list[str]]) -> None:
    lengths = collections.defaultdict(list)
    for task_id, actions in lists.items():
        lengths[task_id.rpartition("/")[0]].append(len(actions))
    print(f"{'task':45} {'lists':>5} {'mean':>6} {'max':>4}   actions")
    for kind, numbers in lengths.items():
        print(f"{kind:45} {len(numbers):5} {sum(numbers) / len(numbers):6.1f} {max(numbers):4}")


if __name__ == "__main__":
    main()
