"""New ALFWorld games of all six types, for users without the data and for training tasks without end.

    python -m hsg.environments.alfworld.generate --out DIR --num 100 --seed 0 [--types pick_two_obj_and_place ...]

A game: a room of the wheel, own objects in own places, a goal of the wheel's library, kept if the planner solves it.

    DIR/<split>/<type>-<object>-None-<receptacle>-<room>/trial_S<seed>_<number>/    as in the official data, format 2.1.2

The same arguments give the same bytes, however many workers there are (but for a game at the edge of PLAN_SECONDS); more
games are the same ones and further ones.
train and valid_seen share rooms, yet no (type, object, receptacle, room) is ever in both, whatever the seed: its hash
says to which of them it belongs.  valid_unseen has rooms of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hsg.environments.alfworld import games, rooms
from hsg.environments.alfworld.pool import Pool
from hsg.protocol import EnvironmentFault

VERSION = 1  # raise it when the same seed gives other games
SEEN_SHARE = 5  # one in so many tasks of a room belongs to valid_seen
MAX_ATTEMPTS = 200
MAX_TURNS = 30  # longer plans are left out: the benchmark gives 50 turns
PLAN_SECONDS = 120.0  # for what takes one second as a rule; one game in some hundreds would take many minutes
TOOLS = {
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge"),
}
"""Task type -> what its object must be, and the receptacle that makes it so."""

LOOK, TWO = "look_at_obj_in_light", "pick_two_obj_and_place"
NEEDED_TYPES = {"rtype": ("SinkBasin", "Microwave", "Fridge"), "otype": ("Knife", "ButterKnife")}
"""The rules name these types, so every game has to declare them."""


@dataclass(frozen=True)
class Goal:
    """What is to be done with `obj`: `target` is the receptacle, or the lamp it is looked at under."""

    kind: str
    obj: str
    target: str
    room: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.obj}-None-{self.target}-{self.room}"

    @property
    def is_seen(self) -> bool:
        """Whether a task of a training room belongs to valid_seen."""
        return hashlib.sha256(self.name.encode()).digest()[0] % SEEN_SHARE == 0


def draw_goal(kind: str, split: str, rng: random.Random) -> Goal | None:
    """A goal that its room allows and that belongs to the split, or None: try again."""
    room = rooms.load_room(rng.choice(rooms.UNSEEN_ROOMS if split == "valid_unseen" else rooms.SEEN_ROOMS))
    ability, tool = TOOLS.get(kind, (None, None))
    if (tool is not None and tool not in room.types) or (kind == LOOK and not room.has_lamp):
        return None
    options = []
    for obj in room.objects:
        if ability is None or obj in rooms.able(ability):
            holders = sorted({r.type for r in room.holders(obj)})
            targets = [rooms.LAMP] if kind == LOOK else [t for t in holders if t != tool and len(holders) > 1]
            options += [Goal(kind, obj, target, room.number) for target in targets]
    if split != "valid_unseen":
        options = [goal for goal in options if goal.is_seen == (split == "valid_seen")]
    return rng.choice(options) if options else None


def furnish(goal: Goal, rng: random.Random) -> dict[str, tuple[str, rooms.Receptacle]]:
    """Object id -> (kind, where it lies); the goal's object is never where it is wanted."""
    room = rooms.load_room(goal.room)
    placed: dict[str, tuple[str, rooms.Receptacle]] = {}

    def place(thing: str, holders: Sequence[rooms.Receptacle]) -> None:
        holder = rng.choice(holders)
        _, x, y, z = holder.id.split("|")[:4]
        name = ""
        while not name or name in placed:
            name = "|".join(
                [thing, f"{float(x) + rng.uniform(-0.3, 0.3):+06.2f}", y, f"{float(z) + rng.uniform(-0.3, 0.3):+06.2f}"]
            )
        placed[name] = (thing, holder)

    for _ in range(rng.choice((2, 3)) if goal.kind == TWO else rng.choice((1, 1, 2))):
        place(goal.obj, [r for r in room.holders(goal.obj) if r.type != goal.target])
    if room.has_lamp:
        place(rooms.LAMP, room.holders(rooms.LAMP))
    for thing in room.objects:
        if thing != goal.obj:
            for _ in range(rng.choice((0, 1, 1, 2))):
                place(thing, room.holders(thing))
    return placed


def write_problem(goal: Goal, placed: dict[str, tuple[str, rooms.Receptacle]]) -> str:
    """The room, its objects and the goal in PDDL."""
    room = rooms.load_room(goal.room)
    kinds = sorted({kind for kind, _ in placed.values()} | set(NEEDED_TYPES["otype"]))
    types = sorted(room.types | set(NEEDED_TYPES["rtype"]))
    locations = sorted({room.start} | {r.location for r in room.receptacles})
    declared = [
        "agent1 - agent",
        *(f"{mangle(name)} - object" for name in placed),
        *(f"{kind}Type - otype" for kind in kinds),
        *(f"{mangle(r.id)} - receptacle" for r in room.receptacles),
        *(f"{kind}Type - rtype" for kind in types),
        *(f"{mangle(location)} - location" for location in locations),
    ]
    facts = [f"atLocation agent1 {mangle(room.start)}"]
    for r in room.receptacles:
        place = mangle(r.id)
        facts += [f"receptacleType {place} {r.type}Type", f"receptacleAtLocation {place} {mangle(r.location)}"]
        facts += [f"openable {place}"] if r.type in rooms.openable() else []
    for kind in types:
        facts += [f"canContain {kind}Type {thing}Type" for thing in kinds if thing in rooms.contents(kind)]
    marks = {"Heatable": "heatable", "Coolable": "coolable", "Cleanable": "cleanable", "Sliceable": "sliceable"}
    for name, (kind, holder) in placed.items():
        thing = mangle(name)
        facts += [f"objectType {thing} {kind}Type", f"inReceptacle {thing} {mangle(holder.id)}"]
        facts += [f"objectAtLocation {thing} {mangle(holder.location)}"]
        facts += [f"toggleable {thing}" if kind == rooms.LAMP else f"pickupable {thing}"]
        facts += [f"isReceptacleObject {thing}"] if kind in rooms.movable_receptacles() else []
        facts += [f"{mark} {thing}" for ability, mark in marks.items() if kind in rooms.able(ability)]
    wanted, _ = rooms.goal(goal.kind)
    lines = "\n        ".join
    return (
        f"(define (problem {goal.name})\n(:domain alfred)\n(:objects\n        {lines(declared)}\n)\n"
        f"(:init\n        {lines(f'({fact})' for fact in facts)}\n)\n"
        + wanted.format(obj=goal.obj, recep=goal.target, toggle=goal.target)
    )


def say(goal: Goal, rng: random.Random) -> str:
    """A sentence of the library for the goal: "heat some apple and put it in fridge"."""
    _, templates = rooms.goal(goal.kind)
    target = goal.target.lower()
    return rng.choice(templates).format(obj=goal.obj.lower(), recep=target, toggle=target)


def mangle(name: str) -> str:
    """An id as PDDL can spell it and ALFWorld's demangler reads it back."""
    for sign, word in (("|", "_bar_"), ("-", "_minus_"), ("+", "_plus_"), (".", "_dot_")):
        name = name.replace(sign, word)
    return name


def make_game(pool: Pool, out: Path, seed: int, split: str, kind: str, number: int) -> Path:
    """Write game `number` of a type and give its folder. RuntimeError where no attempt can be solved."""
    for attempt in range(MAX_ATTEMPTS):
        rng = random.Random(f"alfworld {VERSION}/{seed}/{split}/{kind}/{number}/{attempt}")
        goal = draw_goal(kind, split, rng)
        if goal is None:
            continue
        folder = out / split / goal.name / f"trial_S{seed}_{number:05d}"
        if folder.is_dir():
            return folder
        game: dict[str, Any] = {
            "pddl_domain": rooms.domain(),
            "grammar": rooms.grammar().replace("UNKNOWN GOAL", say(goal, rng)),
            "pddl_problem": write_problem(goal, furnish(goal, rng)),
        }
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=out))
        try:
            path = draft / "game.tw-pddl"
            path.write_text(json.dumps(game), encoding="utf-8")
            if plan := solve(pool, path):
                path.write_text(json.dumps(game | {"solvable": True, "walkthrough": plan}), encoding="utf-8")
                (draft / "traj_data.json").write_text(json.dumps(_trajectory(goal, folder.name)), encoding="utf-8")
                draft.chmod(0o755)
                os.replace(draft, folder)
                return folder
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    raise RuntimeError(f"no solvable game of type {kind} for split {split} in {MAX_ATTEMPTS} attempts (seed {seed})")


def solve(pool: Pool, path: Path) -> list[str] | None:
    """The planner's winning actions, or None where it finds none in PLAN_SECONDS or cannot read the game."""
    worker, episode = pool.acquire(str(path))
    try:
        asked = {"kind": "planner", "game": str(path), "turns": MAX_TURNS}
        return worker.request("expert", timeout=PLAN_SECONDS, **asked)["actions"]
    except EnvironmentFault as fault:
        if not worker.alive and not isinstance(fault.__cause__, TimeoutError):
            raise
        return None
    finally:
        pool.release(worker, episode)


def _trajectory(goal: Goal, name: str) -> dict[str, Any]:
    """traj_data.json, as far as ALFWorld reads it in text games."""
    lamp = goal.kind == LOOK
    targets = {"parent_target": "" if lamp else goal.target, "toggle_target": goal.target if lamp else ""}
    params = {"object_target": goal.obj, **targets, "mrecep_target": "", "object_sliced": False}
    scene = {"scene_num": goal.room, "floor_plan": f"FloorPlan{goal.room}"}
    return {"task_id": name, "task_type": goal.kind, "pddl_params": params, "scene": scene}


def make_games(
    out: Path, splits: dict[str, int], kinds: Sequence[str], seed: int, num_workers: int, quiet: bool = False
) -> None:
    """`splits[name]` games of every split, types in turn, in `num_workers` processes. Games that exist are kept."""
    jobs = [(split, kinds[i % len(kinds)], i // len(kinds)) for split, number in splits.items() for i in range(number)]
    out.mkdir(parents=True, exist_ok=True)
    pool = Pool(num_workers)
    try:
        with ThreadPoolExecutor(num_workers) as threads:
            made = threads.map(lambda job: make_game(pool, out, seed, *job), jobs)
            for _ in tqdm(made, total=len(jobs), desc="generate ALFWorld games", unit="game", disable=quiet or None):
                pass
    finally:
        pool.close()


def cached_games(cache: Path, num_train: int, kinds: Sequence[str], num_workers: int) -> Path:
    """The folder of `data: generated`; made now unless it is there. Valid splits get a fourth as many games each."""
    key = hashlib.sha256(json.dumps([VERSION, num_train, list(kinds)]).encode()).hexdigest()[:12]
    folder = cache / f"generated-{num_train}-{key}"
    if not folder.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=cache))
        except OSError as error:
            raise ValueError(
                f"alfworld.cache_dir must be a folder that can be written, got {str(cache)!r}: {error.strerror}"
            ) from None
        few = max(len(kinds), num_train // 4)
        try:
            make_games(draft, {"train": num_train, "valid_seen": few, "valid_unseen": few}, kinds, 0, num_workers)
            draft.chmod(0o755)
            os.rename(draft, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the games, as alfworld.data takes it")
    parser.add_argument("--num", type=int, default=100, help="games, the types in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--types", nargs="+", default=["all"], help="task types")
    parser.add_argument("--split", default="train", choices=games.SPLITS)
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes")
    options = parser.parse_args(arguments)
    try:
        for name in ("num", "workers"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}; leave it out?")
        kinds = games.select_kinds(options.types, "--types")
        make_games(options.out, {options.split: options.num}, kinds, options.seed, options.workers)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {options.num} games in {options.split}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
