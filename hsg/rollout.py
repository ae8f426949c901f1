"""Play many episodes at once: the policy answers in one batch, the environments work in threads.

    episodes  begin all at once, their environments start while the strategies are drawn
    streams   the batch is cut into `rollout.streams` parts that take turns on the model: while one decodes, the
              environments of the others step
    turn      wait for the part's environments -> append observations -> sample one response per live row -> send actions

Every trajectory has its own random generator and every environment its own seed, so that neither the parts nor the ranks
change what is sampled.  The judgment is asked here, since it continues on the cache that would otherwise be gone.

Deliberately absent: advantages and anything else that looks at more than one trajectory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hsg.config.options import Config
from hsg.engine.generation import Cost, Decoder
from hsg.model.fit import fit_of
from hsg.model.policy import Policy
from hsg.play.episode import Episode, Request
from hsg.play.pool import Pool
from hsg.protocol import FAULTS, TaskSet
from hsg.ranks import stopping
from hsg.strategy.judge import Judge
from hsg.text.markers import SegmentEnd
from hsg.text.prompts import Prompts
from hsg.types import Judgment, Trajectory


@dataclass
class RolloutCosts:
    """Positions forwarded, by purpose."""

    strategy: Cost = field(default_factory=Cost)
    rollout: Cost = field(default_factory=Cost)
    judge: Cost = field(default_factory=Cost)


class Rollout:
    """Plays requests with one policy on one task set. Close it to let the environment threads go."""

    def __init__(self, config: Config, policy: Policy, task_set: TaskSet) -> None:
        self.config, self.policy, self.task_set = config, policy, task_set
        self.prompts = Prompts.of(config)
        # Where every response begins with a strategy, this is how its end is seen while it is sampled.
        per_turn = config.strategy.per == "turn"
        self.first_segment = SegmentEnd(policy.tokenizer, self.prompts.markers.strategy_end) if per_turn else None
        self.pool = Pool(config.rollout.env_threads, config.rollout.env_timeout_seconds)
        self.errors: list[str] = []  # one per rollout that broke, those played again too, until someone takes them

    def close(self) -> None:
        self.pool.close()

    def begin(self, requests: Sequence[Request], max_turns: int | None = None) -> list[Episode]:
        """Start the environments of all requests; nobody waits for them yet. `max_turns` None: `rollout.max_turns`."""
        config = replace(self.config.rollout, max_turns=max_turns or self.config.rollout.max_turns)
        return [Episode(r, self.task_set, self.pool, config, self.prompts, self.policy.chat) for r in requests]

    def play(
        self,
        episodes: Sequence[Episode],
        *,
        temperature: float,
        strategy_temperature: float | None = None,
        costs: RolloutCosts | None = None,
        judge: Judge | None = None,
        on_progress: Callable[[int], None] = lambda finished: None,
    ) -> tuple[list[Trajectory], list[Judgment]]:
        """Play begun episodes to their ends. Returns trajectories and judgments in the order of the episodes.

        Those that their environment broke are played again, up to `rollout.env_retries` times, with the same seeds: a world
        that works this time gives what it would have given at once.
        strategy_temperature  of the strategy that begins a response (`strategy.per: turn`); None: `temperature`
        costs                 what is forwarded is added there
        """
        costs = costs or RolloutCosts()
        first = temperature if strategy_temperature is None else strategy_temperature
        trajectories, judgments = self._play(episodes, (first, temperature), costs, judge, on_progress)
        for attempt in range(1 + self.config.rollout.env_retries):
            broken = [i for i, t in enumerate(trajectories) if t.stop_reason in FAULTS]
            self.errors += [trajectories[i].error or "" for i in broken]
            if not broken or attempt == self.config.rollout.env_retries:
                break
            # As long as they were begun for: training's turn cap may be below `rollout.max_turns`.
            again = self.begin([episodes[i].request for i in broken], episodes[broken[0]].config.max_turns)
            for i, episode in zip(broken, again, strict=True):
                episode.strategy, episode.reflection = episodes[i].strategy, episodes[i].reflection
            played, judged = self._play(again, (first, temperature), costs, judge, lambda finished: None)
            for i, trajectory, judgment in zip(broken, played, judged, strict=True):
                trajectories[i], judgments[i] = trajectory, judgment
        return trajectories, judgments

    def _play(
        self,
        episodes: Sequence[Episode],
        temperatures: tuple[float, float],
        costs: RolloutCosts,
        judge: Judge | None,
        on_progress: Callable[[int], None],
    ) -> tuple[list[Trajectory], list[Judgment]]:
        judgments: dict[int, Judgment] = {}
        finished = 0
        for portion in self._portions(episodes):
            parts = _split(portion, self.config.rollout.streams)
            streams = [_Stream(self, part, temperatures, costs) for part in parts]
            while streams:
                for stream in streams:
                    stream.turn()
                for stream in [s for s in streams if not s.live]:
                    streams.remove(stream)
                    for episode, judgment in zip(stream.episodes, stream.judge(judge), strict=True):
                        judgments[id(episode)] = judgment
                now = finished + sum(not e.live for e in portion)
                on_progress(now)
                stopping.check()
            finished += len(portion)
        return [e.trajectory() for e in episodes], [judgments[id(e)] for e in episodes]

    def _portions(self, episodes: Sequence[Episode]) -> Iterator[list[Episode]]:
        """As many episodes at once as the cache may hold, in order, so that rows with one strategy stay together."""
        longest = self.policy.context_limit
        if self.config.rollout.max_tokens is not None:
            longest = min(longest, 2 * self.config.rollout.max_tokens)
        size = max(1, self.config.rollout.max_cache_tokens // longest)
        for begin in range(0, len(episodes), size):
            yield list(episodes[begin : begin + size])


def _split(episodes: Sequence[Episode], num_parts: int) -> list[list[Episode]]:
    """Contiguous parts, cut where a new strategy begins, so that a shared prompt is forwarded in one part only."""
    groups: list[list[Episode]] = []
    for episode in episodes:
        key = (episode.request.task_index, episode.request.strategy_index)
        if groups and (groups[-1][0].request.task_index, groups[-1][0].request.strategy_index) == key:
            groups[-1].append(episode)
        else:
            groups.append([episode])
    num_parts = min(num_parts, len(groups))
    bounds = [round(i * len(groups) / num_parts) for i in range(num_parts + 1)]
    return [[e for group in groups[a:b] for e in group] for a, b in itertools.pairwise(bounds)]


class _Stream:
    """One part of the batch: its episodes in lockstep turns over one decoder."""

    def __init__(
        self, rollout: Rollout, episodes: Sequence[Episode], temperatures: tuple[float, float], costs: RolloutCosts
    ) -> None:
        self.rollout, self.episodes, self.costs = rollout, list(episodes), costs
        self.strategy_temperature, self.temperature = temperatures
        self.decoder: Decoder | None = None
        self._row: dict[int, int] = {}  # id(episode) -> row of the decoder

    @property
    def live(self) -> bool:
        return any(e.live for e in self.episodes)

    def turn(self) -> None:
        """One turn of every live episode."""
        for episode in self.episodes:
            episode.wait()
        limit = self.rollout.policy.context_limit
        asked = [(e, ids) for e in self.episodes if e.live and (ids := e.ask(limit)) is not None]
        if not asked:
            return
        self._feed(asked)
        assert self.decoder is not None
        responses = self.decoder.sample(
            [self._row[id(e)] for e, _ in asked],
            temperatures=[self.temperature] * len(asked),
            generators=[e.generator for e, _ in asked],
            max_new_tokens=[e.room(limit) for e, _ in asked],
            first_segment=self.rollout.first_segment,
            first_temperatures=[self.strategy_temperature] * len(asked),
        )
        for (episode, _), response in zip(asked, responses, strict=True):
            episode.receive(response)

    def _feed(self, asked: Sequence[tuple[Episode, list[int]]]) -> None:
        """Hand the new ids to the decoder; the first turn, and every turn of window context, starts a new one."""
        if self.decoder is not None and self.rollout.config.rollout.context == "conversation":
            for episode, ids in asked:
                self.decoder.append(self._row[id(episode)], ids)
            return
        self._row = {id(episode): row for row, (episode, _) in enumerate(asked)}
        self.decoder = Decoder(
            self.rollout.policy.model,
            self.rollout.policy.chat.stop_ids,
            [ids for _, ids in asked],
            shared=[e.request.task_index for e, _ in asked],
            cost=self.costs.rollout,
            **fit_of(self.rollout.policy.model, self.rollout.config).decoding,
        )

    def judge(self, judge: Judge | None) -> list[Judgment]:
        """Ask for the judgment of every finished episode that counts; an empty one for the others."""
        judgments = [Judgment(None)] * len(self.episodes)
        if judge is not None:
            asked = [i for i, e in enumerate(self.episodes) if e.turns and e.error is None]
            rows = [self._row.get(id(self.episodes[i]), -1) for i in asked]
            answers = judge.judge([self.episodes[i] for i in asked], self.costs.judge, self.decoder, rows)
            for i, answer in zip(asked, answers, strict=True):
                judgments[i] = answer
        self.decoder = None  # the cache is the largest thing a rollout holds
        return judgments
