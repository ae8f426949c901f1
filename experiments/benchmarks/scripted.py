"""The script of `workload.py` put into hsg: the same loop, the same compute, other words.

    sampler   every token is really sampled, with a uniform number of its trajectory's own generator; which numbers will
              come is known beforehand, so that each of them names the scripted token that replaces the sampled one
    chat      the tool-calling form of the tokenizer's own template; hsg's parsers get a response in their tags
    tasks     an environment that answers with the script's observations

Deliberately absent: a decoding loop, a batch or a loss of its own, options in hsg that only a benchmark would set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

from hsg.engine import generation, seeds
from hsg.experiments.benchmarks import workload as w
from hsg.play import episode
from hsg.protocol import Environment, StepResult, Task, TaskSet
from hsg.run import build
from hsg.strategy import judge
from hsg.strategy import propose as strategies
from hsg.text.chat import ChatFormat


class ToolChat(ChatFormat):
    """The first turn with the template's list of tools, every later one as a tool's answer."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int] = (), date: str | None = None) -> None:
        super().__init__(tokenizer, stop_ids, date)
        before, self._template.after = tokenizer.decode(w.suffix_ids(tokenizer, "MARK")).split("MARK")
        self._template.between = tokenizer.decode([self.end_id]) + before

    def prompt(self, text: str) -> list[int]:
        return w.prompt_ids(self.tokenizer, text)

    def decode(self, ids: Sequence[int]) -> str:
        text = super().decode(ids)
        return f"<strategy>{text}</strategy><action>{text}</action><judgment>[1]</judgment>"


class ScriptedEnvironment(Environment):
    def __init__(self, row: w.Row) -> None:
        self.row, self.turn = row, 0

    def start(self) -> str:
        return w.TASK

    def step(self, action: str) -> StepResult:
        self.turn += 1
        done = self.turn > len(self.row.observations)
        return StepResult("" if done else self.row.observations[self.turn - 1], 0.0, done, False, 0.0)

    @property
    def outcome(self) -> float:
        return self.row.reward


class ScriptedTasks(TaskSet):
    """One task. The only environment thread makes the episodes in their order, which is that of the rows."""

    name, splits = "scripted", ("train",)

    def __init__(self, steps: Sequence[Sequence[w.Row]]) -> None:
        self._rows = iter([row for rows in steps for row in rows])

    def tasks(self, split: str) -> list[Task]:
        return [Task("house", "train")]

    def create(self, task: Task, seed: int) -> Environment:
        return ScriptedEnvironment(next(self._rows))


@contextlib.contextmanager
def scripted(responses: Callable[..., list[list[int]]]) -> Iterator[None]:
    """hsg with a generator of `key` that leads to `responses(*key)`: one list of ids per call that samples with it."""
    make, sample = seeds.make_generator, generation.sample_tokens
    token: dict[float, int] = {}

    def make_generator(*key: object) -> torch.Generator:
        twin = make(*key)
        for ids in responses(*key):
            token.update(zip(torch.rand(len(ids), generator=twin, dtype=torch.float64).tolist(), ids, strict=True))
        return make(*key)

    def sample_tokens(logits: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sampled = sample(logits, *rest)
        said = [token.get(u) for u in rest[-1].tolist()]
        if set(said) == {None}:  # the check at the start of a run, whose rows are its own
            return sampled
        ids = torch.tensor(said, device=logits.device)
        return ids, logits.gather(-1, ids[:, None])[:, 0] - logits.logsumexp(-1)  # all temperatures are 1

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(generation, "sample_tokens", sample_tokens))
        stack.enter_context(patch.object(build, "ChatFormat", ToolChat))
        for module in (episode, judge, strategies):
            stack.enter_context(patch.object(module, "make_generator", make_generator))
        yield
