"""Demonstrations, played in the real environment and written as the very rows a rollout would sample.

    TaskSet.demonstrations -> play -> Played (cached on disk) -> rows of ids, each token with the form it teaches

    strategy   first observation                                      -> <strategy>..</strategy>
    action     conversation (or window prompts) with a strategy       -> <action>..</action> each turn
    plain      the same play without a strategy: what the strategies average to, so that no method has a head start
    judgment   the question after such play, in the conversation or standing alone -> <judgment>[..]</judgment>
    turn       the same play with a strategy in every response        -> <strategy>..</strategy><action>..</action>
    reflection turn or strategy, once more, after an earlier attempt at the task that failed or succeeded

Wasted turns, put in on purpose, are shown but never taught; the judgment that names them is.  Deliberately absent:
training (warmstart.py), text that no prompt of `hsg.text.prompts` asks for.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hsg.config.options import Config
from hsg.measure.progress import progress
from hsg.protocol import Demonstration, EnvironmentFault, Task, TaskSet
from hsg.ranks import stopping
from hsg.run.files import write_whole
from hsg.text.chat import ChatFormat
from hsg.text.prompts import Prompts, action_response, judgment_response, strategy_response, turn_response

Result = TypeVar("Result")
FORMS = ("strategy", "action", "plain", "judgment", "turn", "reflection")
CONTEXT = -1  # `Row.forms` of a token that is not taught
ALONE_SHARE = 0.25  # of the judgments are asked outside the conversation too (in window context all are)
VERSION = 2  # raise it when the meaning of cached data changes


@dataclass(frozen=True)
class Played:
    """One demonstration and what the environment said to it.

    observations  (K + 1)  the first one, then the result of every action
    admissible    (K)      admissible actions before every action, or None
    turn_strategies (K)    what guides each turn by itself
    feedback               the environment's last one
    """

    task_id: str
    strategy: str
    actions: tuple[str, ...]
    observations: tuple[str, ...]
    wasted: tuple[int, ...]
    fits: bool
    success: bool
    admissible: tuple[tuple[str, ...], ...] | None = None
    turn_strategies: tuple[str, ...] = ()
    feedback: str | None = None


@dataclass(frozen=True)
class Row:
    """ids (T); forms (T - 1): which form the token ids[t + 1] teaches, an index into FORMS, or CONTEXT."""

    task_id: str
    ids: list[int]
    forms: list[int]


def digest(value: Any) -> str:
    """A short name for a value made of plain JSON things."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def collect(config: Config, task_set: TaskSet) -> tuple[list[Played], str]:
    """Played demonstrations of `warmstart.num_tasks` training tasks and the key they are cached under.

    The key covers the files of the environment's module too. ValueError if the environment knows neither
    demonstrations nor expert actions.
    """
    settings, name = config.warmstart, config.environment.name
    asked = {
        "version": VERSION,
        "environment": [name, config.environment.options, config.environment.train_split, _code(task_set)],
        "num_tasks": settings.num_tasks,
        "max_turns": settings.max_turns or config.rollout.max_turns,
        "seed": settings.seed,
        "admissible": config.rollout.admissible_actions,
    }
    key = digest(asked)
    path = Path(settings.cache_dir) / f"played-{key}.json"
    if path.is_file():
        return [_from_json(item) for item in json.loads(path.read_text(encoding="utf-8"))], key
    tasks = choose_tasks(task_set.tasks(config.environment.train_split), settings.num_tasks, settings.seed)
    played = play_demonstrations(config, task_set, tasks)
    if not played:
        raise ValueError(
            f"environment.name must have demonstrations for a warm start, got {name!r}; "
            "give its task set expert_actions (hsg/protocol.py) or set model.path to a trained model"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps([dataclasses.asdict(p) for p in played]))
    return played, key


def _code(task_set: TaskSet) -> str:
    """A digest of the files beside the task set's module: other code or data may mean other demonstrations."""
    folder = Path(inspect.getfile(type(task_set))).parent
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def choose_tasks(tasks: Sequence[Task], num_tasks: int, seed: int) -> list[Task]:
    """Random tasks, as many of every kind as there are."""
    by_kind: dict[str, list[Task]] = {}
    for task in random.Random(f"tasks/{seed}").sample(list(tasks), len(tasks)):
        by_kind.setdefault(task.kind, []).append(task)
    rounds = itertools.zip_longest(*(by_kind[kind] for kind in sorted(by_kind)))
    return [task for one in rounds for task in one if task is not None][:num_tasks]


def play_demonstrations(config: Config, task_set: TaskSet, tasks: Sequence[Task]) -> list[Played]:
    """Every demonstration of the tasks, played in threads; those that the environment broke twice are left out.

    RuntimeError where it broke them all: then it is the engine that does not work.
    """
    max_turns = config.warmstart.max_turns or config.rollout.max_turns
    seed, listed = config.warmstart.seed, config.rollout.admissible_actions

    faults: list[EnvironmentFault] = []

    def attempt(make: Callable[[], Result]) -> Result | None:
        for _ in range(2):  # an engine that died is replaced, and what is cached must not depend on such luck
            try:
                return make()
            except EnvironmentFault as fault:
                faults.append(fault)
        return None

    def shown_of(task: Task) -> list[Demonstration]:
        return attempt(lambda: task_set.demonstrations(task, seed)) or []

    def play_one(task: Task, shown: Demonstration, generic: bool) -> Played | None:
        played = attempt(lambda: play(task_set, task, shown, seed, max_turns, listed))
        if played is None:
            return None
        # An expert that no longer succeeds was broken by a turn put in: that turn did matter.
        cut = len(played.actions) == max_turns
        return None if generic and shown.fits and not played.success and not cut else played

    def own(task: Task) -> list[Played]:
        # Whoever is asked to stop waits for what is being played, and for nothing behind it.
        plays = (None if stopping.received() else play_one(task, shown, False) for shown in shown_of(task))
        return [played for played in plays if played is not None]

    quiet, found = config.log.quiet, []
    pool = ThreadPoolExecutor(config.rollout.env_threads)
    try:
        with progress(len(tasks), "play demonstrations", "task", quiet=quiet, delay=2) as bar:
            for played in pool.map(own, tasks):
                found += played
                bar.update()
        have = {item.task_id for item in found}
        pairs = expert_demonstrations(task_set, [task for task in tasks if task.id not in have], seed)
        with progress(len(pairs), "play experts", "task", quiet=quiet, delay=2) as bar:
            for one in pool.map(lambda pair: play_one(pair[0], pair[1], True), pairs):
                found += [one] if one is not None else []
                bar.update()
    finally:  # asked to stop, only those that are being played are waited for
        pool.shutdown(cancel_futures=True)
    if faults and not found:
        raise RuntimeError(f"demonstrations must be played for a warm start, got none: {faults[-1]}") from faults[-1]
    return found


def _from_json(item: dict[str, Any]) -> Played:
    for name in ("actions", "observations", "wasted", "turn_strategies"):
        item[name] = tuple(item[name])
    if item["admissible"] is not None:
        item["admissible"] = tuple(tuple(actions) for actions in item["admissible"])
    return Played(**item)


def play(
    task_set: TaskSet, task: Task, shown: Demonstration, seed: int, max_turns: int, list_admissible: bool = False
) -> Played:
    """Do what a demonstration does, until the environment is done or `max_turns` actions were taken."""
    environment = task_set.create(task, seed)
    observations: list[str] = []
    actions: list[str] = []
    admissible: list[tuple[str, ...]] = []
    success, feedback = False, None
    try:
        observations.append(environment.start())
        for action in shown.actions[:max_turns]:
            if list_admissible:
                admissible.append(tuple(environment.admissible_actions() or ()))
            result = environment.step(action)
            actions.append(action)
            observations.append(result.observation)
            success, feedback = result.success, result.feedback if result.feedback is not None else feedback
            if result.done:
                break
    finally:
        environment.close()
    return Played(
        task_id=task.id,
        strategy=shown.strategy,
        actions=tuple(actions),
        observations=tuple(observations),
        wasted=tuple(turn for turn in shown.wasted if turn < len(actions)),
        fits=shown.fits,
        success=success,
        admissible=tuple(admissible) if list_admissible else None,
        turn_strategies=(shown.turn_strategies or (shown.strategy,) * len(actions))[: len(actions)],
        feedback=feedback,
    )


def expert_demonstrations(task_set: TaskSet, tasks: Sequence[Task], seed: int) -> list[tuple[Task, Demonstration]]:
    """Demonstrations made of expert actions alone: for environments that have no strategies of their own.

    A strategy names the four actions of the expert that the fewest other tasks need. One task in three is also played
    after another task's strategy, and one in three has foreign actions put in at random turns.
    """
    experts = {task.id: list(task_set.expert_actions(task) or []) for task in tasks}
    known = [task for task in tasks if experts[task.id]]
    common = Counter(action for task in known for action in set(experts[task.id]))
    pairs = []
    for task in known:
        rng = random.Random(f"expert/{task.id}/{seed}")
        own = experts[task.id]
        foreign = [action for other in known for action in experts[other.id] if action not in own]
        actions = list(own)
        wasted: list[int] = []
        if foreign and rng.random() < 1 / 3:
            for place in sorted(rng.choices(range(len(own)), k=rng.randint(1, 3)), reverse=True):
                actions.insert(place, rng.choice(foreign))
                wasted = [place, *(turn + 1 for turn in wasted)]
        pairs.append((task, Demonstration(_summary(own, common), tuple(actions), tuple(wasted))))
        others = [other for other in known if experts[other.id] != own]
        if others and rng.random() < 1 / 3:
            other = experts[rng.choice(others).id]
            pairs.append((task, Demonstration(_summary(other, common), tuple(other), fits=False)))
    return pairs


def _summary(actions: Sequence[str], common: Counter[str]) -> str:
    rarest = set(sorted(dict.fromkeys(actions), key=lambda action: common[action])[:4])
    keys = [action for action in dict.fromkeys(actions) if action in rarest]
    return f"First {', then '.join(keys)}."


def make_rows(
    config: Config, played: Sequence[Played], form: ChatFormat, max_length: int, *, alone_share: float = ALONE_SHARE
) -> list[Row]:
    """Rows of all forms, no longer than `max_length` ids (a longer conversation ends a turn earlier)."""
    settings = config.warmstart
    windowed = config.rollout.context == "window"
    # Plain rows repeat the same play, so only as many are made as their share of the loss is worth.
    plain_share = min(1.0, settings.share_plain / settings.share_action) if settings.share_action else 1.0
    turn_share = min(1.0, settings.share_turn / settings.share_action) if settings.share_action else 1.0
    writer = _Writer(Prompts.of(config), form, max_length, config.rollout.window_turns)
    rng = random.Random(f"rows/{settings.seed}")
    more = random.Random(f"rows/more/{settings.seed}")
    by_task: dict[str, list[Played]] = {}
    for item in played:
        by_task.setdefault(item.task_id, []).append(item)
    rows: list[Row] = []
    for item in played:
        use_plain, alone = rng.random() < plain_share, rng.random() < alone_share
        if settings.share_strategy:
            rows += writer.strategy(item)
        if settings.share_action or settings.share_judgment:
            rows += writer.play(item, "action", windowed)
        if settings.share_plain and use_plain:
            rows += writer.play(item, "plain", windowed)
        if settings.share_turn and more.random() < turn_share:
            rows += writer.play(item, "turn", windowed)
        # Nobody learns from what did not work: the play that is taught after an earlier attempt fits the task.
        earlier = more.choice(by_task[item.task_id])
        if settings.share_reflection and item.fits and (item is not earlier or not item.wasted):
            of_turns = more.random() < 0.5
            reflected = writer.reflected(earlier, of_turns)
            if of_turns:
                rows += writer.play(item, "reflection", windowed, reflected)
            else:
                rows += writer.strategy(item, "reflection", reflected)
        if settings.share_judgment and (alone or windowed):
            rows += writer.judgment_alone(item)
    return rows


class _Writer:
    """One played demonstration to rows, in the token format of the rollout."""

    def __init__(self, prompts: Prompts, form: ChatFormat, max_length: int, window_turns: int) -> None:
        self._prompts = dataclasses.replace(prompts, per_turn=False)
        self._turn_prompts = dataclasses.replace(prompts, per_turn=True)
        self._max_length, self._window_turns = max_length, window_turns
        # The same words come back in thousands of turns, and encoding is most of the cost of a row.
        self._prompt, self._reply = functools.cache(form.prompt), functools.cache(form.reply)
        self._next_user = functools.cache(functools.partial(form.next_user, last=form.end_id))

    def _one(self, item: Played, prompt: str, answer: str, form: str) -> list[Row]:
        ids, reply = self._prompt(prompt), self._reply(answer)
        if len(ids) + len(reply) > self._max_length:
            return []
        return [Row(item.task_id, ids + reply, [CONTEXT] * (len(ids) - 1) + [FORMS.index(form)] * len(reply))]

    def strategy(self, item: Played, form: str = "strategy", reflected: str = "") -> list[Row]:
        prompt = self._prompts.strategy(item.observations[0], reflected)
        return self._one(item, prompt, strategy_response(item.strategy), form)

    def reflected(self, earlier: Played, of_turns: bool) -> str:
        """What a prompt says of an earlier attempt, its strategies those of the turns or of the episode."""
        strategies = earlier.turn_strategies if of_turns else (earlier.strategy,)
        return self._prompts.reflection(strategies, earlier.feedback, success=earlier.success)

    def play(self, item: Played, form: str, windowed: bool, reflected: str = "") -> list[Row]:
        """The turns of a demonstration, as `form` (action, plain, turn, or reflection of turns) teaches them."""
        per_turn = form in ("turn", "reflection")
        prompts = self._turn_prompts if per_turn else self._prompts
        strategy = item.strategy if form == "action" else None
        replies = [
            turn_response(own, action, prompts.markers) if per_turn else action_response(action, prompts.markers)
            for own, action in zip(item.turn_strategies, item.actions, strict=True)
        ]
        write = self._windows if windowed else self._conversation
        return write(item, prompts, strategy, replies, form, reflected)

    def judgment_alone(self, item: Played) -> list[Row]:
        turns = list(zip(item.actions, item.observations[1:], strict=True))
        prompt = self._prompts.judgment_alone(item.observations[0], item.strategy, turns)
        return self._one(item, prompt, judgment_response(item.wasted), "judgment")

    def _conversation(
        self, item: Played, prompts: Prompts, strategy: str | None, replies: Sequence[str], form: str, reflected: str
    ) -> list[Row]:
        ids = self._prompt(prompts.first_action(item.observations[0], strategy, _listed(item, 0), reflected))
        forms = [CONTEXT] * (len(ids) - 1)
        taught = FORMS.index(form)
        for turn, text in enumerate(replies):
            asked: list[int] = []
            if turn > 0:
                asked = self._next_user(prompts.next_action(turn + 1, item.observations[turn], _listed(item, turn)))
            reply = self._reply(text)
            if len(ids) + len(asked) + len(reply) > self._max_length:
                return [Row(item.task_id, ids, forms)] if turn > 0 else []
            ids = ids + asked + reply
            forms += [CONTEXT] * len(asked) + [CONTEXT if turn in item.wasted else taught] * len(reply)
        if form == "action":
            question = prompts.judgment(item.observations[-1], len(item.actions))
            asked, reply = self._next_user(question), self._reply(judgment_response(item.wasted))
            if len(ids) + len(asked) + len(reply) <= self._max_length:
                ids = ids + asked + reply
                forms += [CONTEXT] * len(asked) + [FORMS.index("judgment")] * len(reply)
        return [Row(item.task_id, ids, forms)]

    def _windows(
        self, item: Played, prompts: Prompts, strategy: str | None, replies: Sequence[str], form: str, reflected: str
    ) -> list[Row]:
        rows: list[Row] = []
        first = item.observations[0]
        for turn, text in enumerate(replies):
            if turn in item.wasted:
                continue
            listed = _listed(item, turn)
            if turn == 0:
                prompt = prompts.first_action(first, strategy, listed, reflected)
            else:
                past = range(max(0, turn - self._window_turns), turn)
                history = [(t + 1, item.observations[t], item.actions[t]) for t in past]
                seen = item.observations[turn]
                prompt = prompts.window(turn + 1, first, strategy, history, seen, listed, reflected)
            rows += self._one(item, prompt, text, form)
        return rows


def _listed(item: Played, turn: int) -> Sequence[str] | None:
    return None if item.admissible is None else item.admissible[turn]
