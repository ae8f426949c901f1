"""One episode while it is played: the environment on one side, the conversation with the policy on the other.

    begin -> observation -> ask -> (policy answers) -> receive -> step -> observe -> ask -> ...

It holds everything that becomes one `Trajectory`, and decides when and why the episode ends.  It does no batching and
touches no model: `rollout.py` drives many of these in lockstep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hsg.config.options import RolloutConfig
from hsg.engine.generation import Sampled
from hsg.engine.seeds import make_generator
from hsg.play.pool import Call, CallTimeout, Pool
from hsg.protocol import (
    FAULTS,
    Environment,
    StepResult,
    StopReason,
    Task,
    TaskSet,
    check_observation,
    check_outcome,
    check_step,
)
from hsg.text.chat import ChatFormat, Conversation
from hsg.text.prompts import Prompts
from hsg.types import Reflection, Tokens, Trajectory, Turn


class NonsenseError(Exception):
    """The environment answered with something that the protocol forbids."""


@dataclass(frozen=True)
class Request:
    """Which episode to play. `seed` is the environment's; the policy's own random numbers come from `key`."""

    task: Task
    task_index: int
    seed: int
    strategy_index: int
    rollout_index: int
    key: tuple[object, ...]


@dataclass(frozen=True)
class _Answer:
    """What one environment call brought, gathered in its own thread."""

    result: StepResult | None
    observation: str
    outcome: float
    admissible: list[str] | None


class Episode:
    """The state of one rollout. `conversation` is its training row (conversation context) or its last prompt (window)."""

    def __init__(
        self, request: Request, task_set: TaskSet, pool: Pool, config: RolloutConfig, prompts: Prompts, chat: ChatFormat
    ) -> None:
        self.request, self.config, self.prompts, self.chat = request, config, prompts, chat
        self._task_set, self._pool = task_set, pool
        self.generator = make_generator(*request.key, "response")
        self._environment: Environment | None = None
        self.strategy: str | None = None  # of the whole episode; None: there is none
        self.reflection: Reflection | None = None  # an earlier attempt that the prompts of this episode show
        self._prompt = ""
        self.first_observation: str | None = None  # None: the environment did not start
        self.observation = ""
        self.admissible: list[str] | None = None
        self.conversation: Conversation | None = None
        self.rows: list[Tokens] = []  # window context only
        self.turns: list[Turn] = []
        self.stop_reason: StopReason | None = None
        self.error: str | None = None
        self.outcome, self.score, self.success = 0.0, 0.0, False
        self.feedback: str | None = None
        self._prompt_length = 0
        self._parse_failures = 0
        self._pending: Call | None = pool.submit(self._open)

    # -- the environment's side; the two methods below run in a worker thread ------------------------------------------

    def _open(self) -> _Answer:
        environment = self._task_set.create(self.request.task, self.request.seed)
        self._environment = environment
        if not self.live:  # the episode was given up while its environment was still being made
            environment.close()
            return _Answer(None, "", 0.0, None)
        observation = environment.start()
        if not self.live:  # nobody waited so long, and nobody else will close it
            environment.close()
            return _Answer(None, "", 0.0, None)
        if problem := check_observation(observation):
            raise NonsenseError(problem)
        return self._look(environment, None, observation)

    def _act(self, action: str) -> _Answer:
        environment = self._environment
        assert environment is not None
        result = environment.step(action)
        if not self.live:
            environment.close()
            return _Answer(None, "", 0.0, None)
        if problem := check_step(result):
            raise NonsenseError(problem)
        return self._look(environment, result, result.observation)

    def _look(self, environment: Environment, result: StepResult | None, observation: str) -> _Answer:
        outcome = environment.outcome
        if problem := check_outcome(outcome):
            raise NonsenseError(problem)
        listed = None
        if self.config.admissible_actions and (result is None or not result.done):
            listed = environment.admissible_actions()
            good = listed is None or (isinstance(listed, list) and not any(map(check_observation, listed)))
            if not good:
                raise NonsenseError(f"admissible_actions() must return a list of str or None, got {listed!r:.80}")
        return _Answer(result, observation, float(outcome), listed)

    # -- the policy's side ---------------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        return self.stop_reason is None

    def wait(self) -> None:
        """Take in what the pending environment call brought, if there is one."""
        call, self._pending = self._pending, None
        if call is None or not self.live:
            return
        try:
            answer: _Answer = self._pool.result(call)
        except CallTimeout as error:
            self._fail(StopReason.ENV_TIMEOUT, f"timeout: {error}")
            return
        except Exception as error:  # an environment is a stranger: whatever it raises ends its own episode only
            self._fail(StopReason.ENV_ERROR, f"{type(error).__name__}: {_text(error)}")
            return
        self.outcome, self.admissible, self.observation = answer.outcome, answer.admissible, answer.observation
        if answer.result is None:
            self.first_observation = answer.observation
            return
        result = answer.result
        self.score, self.success = float(result.score), result.success
        self.feedback = result.feedback if result.feedback is not None else self.feedback
        self.turns[-1] = _with(self.turns[-1], reward=float(result.reward), valid=result.valid)
        if result.done:
            self._end(StopReason.DONE)
        else:
            self._check_turns()

    def ask(self, context_limit: int) -> list[int] | None:
        """Ids to append before the next response (the whole prompt where a new one begins), or None: no room left."""
        turn = len(self.turns) + 1
        if self.config.context == "window" and turn > 1:
            past = [(i + 1, t.observation, t.action or t.response) for i, t in enumerate(self.turns)]
            history = past[-self.config.window_turns :] if self.config.window_turns else []
            text = self.prompts.window(
                turn,
                self.first_observation or "",
                self.strategy,
                history,
                self.observation,
                self.admissible,
                self._reflected(),
            )
            ids = self.chat.prompt(text)
            self.conversation = Conversation(ids)
        elif self.conversation is None:
            self._prompt = self.prompts.first_action(
                self.observation, self.strategy, self.admissible, self._reflected()
            )
            ids = self.chat.prompt(self._prompt)
            self.conversation = Conversation(ids)
            self._prompt_length = len(ids)
        else:
            text = self.prompts.next_action(turn, self.observation, self.admissible)
            ids = self.chat.next_user(text, self.conversation.last)
            if len(self.conversation) + len(ids) >= context_limit:
                self._end(StopReason.CONTEXT_FULL)
                return None
            self.conversation.append_context(ids)
        if len(self.conversation) >= context_limit:
            self._end(StopReason.CONTEXT_FULL)
            return None
        limit = self.config.max_tokens
        if limit is not None and self._num_tokens() >= limit:
            self._end(StopReason.MAX_TOKENS)
            return None
        return ids

    def _reflected(self) -> str:
        return "" if self.reflection is None or self.strategy is not None else reflected(self.prompts, self.reflection)

    def room(self, context_limit: int) -> int:
        """How many tokens the next response may have."""
        assert self.conversation is not None
        room = min(self.config.max_action_tokens, context_limit - len(self.conversation))
        if self.config.max_tokens is not None:
            room = min(room, self.config.max_tokens - self._num_tokens())
        return room

    def _num_tokens(self) -> int:
        """Tokens of the trajectory so far, its first prompt not counted (in window context: what was sampled)."""
        assert self.conversation is not None
        if self.config.context == "window":
            return sum(turn.num_sampled for turn in self.turns)
        return len(self.conversation) - self._prompt_length

    def receive(self, sampled: Sampled) -> None:
        """Take a response: read it, send its action, remember the turn."""
        assert self.conversation is not None
        text = self.chat.decode(sampled.ids)
        read = self.prompts.read(text, thinking=self.chat.thinking)
        whole = read.end == len(text)  # its stop token included
        num_kept = len(sampled.ids) if whole else self.chat.reach(sampled.ids, read.end)
        start, stop = self.conversation.append_response(
            sampled.ids, sampled.logprobs, sampled.temperatures, num_kept=num_kept
        )
        per_turn = self.prompts.per_turn
        strategy = read.strategy if per_turn else None
        row = 0
        if self.config.context == "window":
            row = len(self.rows)
            self.rows.append(self.conversation.tokens())
        self.turns.append(
            Turn(
                self.observation,
                text,
                read.action,
                0.0,
                False,
                not sampled.closed,
                row,
                start,
                stop,
                self.config.max_action_tokens,
                strategy=strategy,
                num_strategy_tokens=min(sampled.num_first, num_kept),
                strategy_missing=per_turn and strategy is None,
                several_actions=read.num_actions > 1,
                num_cut=len(sampled.ids) - num_kept,
            )
        )
        if read.action is not None:
            self._pending = self._pool.submit(self._act, read.action)
            return
        self._parse_failures += 1
        self.observation = self.prompts.parse_error()
        allowed = self.config.max_parse_failures
        if allowed is not None and self._parse_failures >= allowed:
            self._end(StopReason.PARSE_ERROR)
        else:
            self._check_turns()

    def _check_turns(self) -> None:
        if len(self.turns) >= self.config.max_turns:
            self._end(StopReason.MAX_TURNS)

    def _fail(self, reason: StopReason, error: str) -> None:
        self.error = error.encode("utf-8", "replace").decode()[:2000]
        self._end(reason)

    def _end(self, reason: StopReason) -> None:
        self.stop_reason = reason
        environment, self._environment = self._environment, None
        if environment is not None and reason is not StopReason.ENV_TIMEOUT:
            self._pool.submit(environment.close)

    def abandon(self) -> None:
        """Close the environment of an episode that is not played to its end."""
        if self.live:
            self._end(StopReason.ENV_ERROR)

    def trajectory(self) -> Trajectory:
        """The finished record."""
        assert self.stop_reason is not None, "an episode that still runs has no trajectory"
        if self.config.context == "window":
            rows = tuple(self.rows)
        else:  # cut after the last response: what follows it predicts nothing
            rows = (
                ()
                if not self.turns or self.conversation is None
                else (self.conversation.tokens(self.conversation.end),)
            )
        failed = self.stop_reason in FAULTS
        return Trajectory(
            task=self.request.task,
            seed=self.request.seed,
            strategy_index=self.request.strategy_index,
            rollout_index=self.request.rollout_index,
            strategy=self.strategy,
            turns=tuple(self.turns),
            rows=rows,
            outcome=None if failed else self.outcome,
            score=0.0 if failed else self.score,
            success=False if failed else self.success,
            stop_reason=self.stop_reason,
            final_observation=self.observation,
            feedback=self.feedback,
            error=self.error,
            prompt=self._prompt,
            reflection=self.reflection,
        )


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # a stranger's class may fail at this too
        return "(its text cannot be had)"


def _with(turn: Turn, **changes: object) -> Turn:
    return Turn(**{**vars(turn), **changes})  # type: ignore[arg-type]


def reflected(prompts: Prompts, reflection: Reflection) -> str:
    """What a prompt says of an earlier attempt."""
    attempt = reflection.attempt
    return prompts.reflection(attempt.strategies, attempt.feedback, success=reflection.success)


def first_observation(group: Sequence[Episode]) -> str | None:
    """What the first episode of a task that starts at all shows; all of them show the same. None: no one starts."""
    for episode in group:
        episode.wait()
        if episode.first_observation is not None:
            return episode.first_observation
    return None


def results(episode: Episode | Trajectory) -> Sequence[tuple[str, str]]:
    """(action, result) of every turn, for a judge that has not seen the conversation."""
    last = episode.observation if isinstance(episode, Episode) else episode.final_observation
    seen = [turn.observation for turn in episode.turns[1:]] + [last]
    return [(turn.action or turn.response, result) for turn, result in zip(episode.turns, seen, strict=True)]
