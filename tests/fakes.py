"""Fakes in ten lines each: a guessing game that may break in every known way, a scripted policy, tiny models.

    from fakes import GuessTaskSet, ScriptedDecoder, tiny_model, ...

A fake is a small real thing (a game, a decoder that answers from a list, a random model), never a mock.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hsg.engine.generation import Cost, Sampled
from hsg.protocol import Environment, StepResult, StopReason, Task, TaskSet
from hsg.text.chat import ChatFormat, Conversation
from hsg.text.prompts import Prompts, action_response, judgment_response, strategy_response, turn_response
from hsg.types import Strategy, Tokens, Trajectory, Turn

NUMBERS = range(6)
HINTS = ("warm", "cold and wet", "a dry place", "high up")
NEVER = 3600.0  # seconds
HANG = 300.0  # what only waiting for that reaches, on a starved machine too


class GuessEnvironment(Environment):
    """Guess the number: 1 at the first guess, 0.25 less at each later one, at least 0.25. `fault` breaks it."""

    def __init__(self, task: Task, fault: tuple[str, str] | None = None) -> None:
        self.task, self.fault = task, fault
        self.turns, self._outcome, self.closed = 0, 0.0, False

    def _break(self, where: str, healthy: Any) -> Any:
        if self.fault is None or self.fault[0] != where:
            return healthy
        kind = self.fault[1]
        if kind == "raise":
            raise OSError(f"engine died at {where} \ud800")
        if kind == "exit":
            raise SystemExit(3)
        if kind == "hang":
            time.sleep(NEVER)
        values = {"none": None, "bytes": b"x", "huge": "x" * 1_000_001, "surrogate": "\ud800", "nan": float("nan")}
        if not isinstance(healthy, StepResult):
            return values[kind]
        if kind in ("none", "bytes"):
            return values[kind]
        field = "reward" if kind == "nan" else "observation"
        return StepResult(**{**vars(healthy), field: values[kind]})

    def start(self) -> str:
        return self._break("start", f"Guess. It is {self.task.data['hint']}.")

    def step(self, action: str) -> StepResult:
        self.turns += 1
        won, valid = action == str(self.task.data["answer"]), action.isdigit()
        if won:
            self._outcome = max(0.25, 1.25 - 0.25 * self.turns)
        low = valid and int(action) < self.task.data["answer"]
        text = "Right." if won else "Too low, go on." if low else "No."
        result = StepResult(text, self._outcome, won, won, self._outcome, valid)
        return self._break(f"step {self.turns}", result)

    @property
    def outcome(self) -> float:
        return self._break("outcome", self._outcome)

    def admissible_actions(self) -> list[str]:
        return self._break("admissible", [str(n) for n in NUMBERS])

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._break("close", None)


class GuessTaskSet(TaskSet):
    """`faults` maps the number of an episode (in the order of their making) to (where, kind)."""

    name = "guess"
    splits = ("train", "dev", "empty")

    def __init__(
        self, num_tasks: int = 8, faults: Callable[[int], tuple[str, str] | None] = lambda n: None, prefix: str = "g"
    ) -> None:
        self.num_tasks, self.faults, self.prefix = num_tasks, faults, prefix
        self.made: list[GuessEnvironment] = []
        self._lock = threading.Lock()

    def tasks(self, split: str) -> list[Task]:
        if split not in self.splits:
            raise ValueError(f"split must be one of {', '.join(self.splits)}, got {split!r}")
        count = 0 if split == "empty" else self.num_tasks
        return [
            Task(f"{self.prefix}{split}{i}", split, "even" if i % 2 == 0 else "odd",
                 {"answer": NUMBERS[i % len(NUMBERS)], "hint": HINTS[i % len(HINTS)]})
            for i in range(count)
        ]  # fmt: skip

    def create(self, task: Task, seed: int) -> GuessEnvironment:
        with self._lock:
            fault = self.faults(len(self.made))
            self.made.append(GuessEnvironment(task, fault))
            made = self.made[-1]
        made._break("create", None)
        return made


class ScriptedDecoder:
    """Stands in for hsg.engine.generation.Decoder: row r answers `script(r, n)` (ids, closed) to its n-th question.

    The rows of all instances are numbered through, so that a script may speak of "the second trajectory".
    """

    script: Callable[[int, int], tuple[Sequence[int], bool]]
    rows_made = 0

    def __init__(self, model: Any, stop_ids: Sequence[int], prompts: Sequence[Sequence[int]], **options: Any) -> None:
        self.rows = [list(p) for p in prompts]
        self.first = type(self).rows_made
        type(self).rows_made += len(prompts)
        self.asked = [0] * len(prompts)
        self.cost = options.get("cost") or Cost()

    def append(self, row: int, ids: Sequence[int]) -> None:
        self.rows[row].extend(ids)

    def sample(self, rows: Sequence[int], *, temperatures: Sequence[float], **options: Any) -> list[Sampled]:
        answers = []
        for row, heat, limit in zip(rows, temperatures, options["max_new_tokens"], strict=True):
            ids, closed = type(self).script(self.first + row, self.asked[row])
            ids, closed = list(ids)[:limit], closed and len(ids) <= limit
            self.asked[row] += 1
            self.rows[row].extend(ids)
            answers.append(
                Sampled(tuple(ids), tuple(-0.5 - 0.25 * i for i in range(len(ids))), (heat or 1.0,) * len(ids), closed)
            )
        return answers  # fmt: skip


def fake_embed(texts: Sequence[str]) -> torch.Tensor:
    """A direction of its own for every text, the same on every machine and rank."""
    vectors = [list(hashlib.blake2b(t.encode("utf-8", "replace"), digest_size=8).digest()) for t in texts]
    return torch.nn.functional.normalize(torch.tensor(vectors, dtype=torch.float64) - 127.5, dim=-1)


class FakeEncoder:
    """In place of the real encoder, which takes seconds to load."""

    @staticmethod
    def embed(texts: Sequence[str]) -> torch.Tensor:
        return fake_embed(texts)


VOCABULARY = 97


def tiny_model(kind: str, dtype: torch.dtype = torch.float64, *, positions: int = 256, spread: float = 0.3) -> Any:
    """A random causal LM of 97 tokens, 2 layers, 32 wide. Weights are large enough for logits that differ."""
    common = {"vocab_size": VOCABULARY, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    rotary = {
        **common, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": positions, "initializer_range": spread,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if kind == "gpt2":
            model: Any = GPT2LMHeadModel(
                GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=positions, resid_pdrop=0.0, embd_pdrop=0.0,
                           attn_pdrop=0.0, initializer_range=spread, **common)
            )  # fmt: skip
        elif kind == "llama":
            model = LlamaForCausalLM(LlamaConfig(**rotary))
        else:
            model = Qwen2ForCausalLM(Qwen2Config(**rotary))
    return model.to(dtype).eval()


def teach_guessing(folder: str, num_steps: int = 60) -> None:
    """Supervised learning until the model in `folder` answers each prompt of the game in its tags, guessing freely."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat, prompts = ChatFormat(AutoTokenizer.from_pretrained(folder)), Prompts.make("terse")
    turn_prompts = Prompts.make("terse", per_turn=True)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def pick(values: Sequence[Any]) -> Any:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    def said(row: Conversation, text: str) -> None:
        ids = chat.reply(text)
        row.append_response(ids, [0.0] * len(ids), [1.0] * len(ids))

    def make_row() -> Conversation:
        first = f"Guess. It is {pick(HINTS)}."
        shown = pick(["", "", *(prompts.reflection([f"try {n}"], None, success=good) for n in "12" for good in (0, 1))])
        if pick(range(4)) == 0:
            row = Conversation(chat.prompt(turn_prompts.first_action(first, None, reflection=shown)))
            for turn in range(1, pick(range(1, 4)) + 1):
                if turn > 1:
                    text = turn_prompts.next_action(turn, pick(["Too low, go on.", "No."]))
                    row.append_context(chat.next_user(text, chat.end_id))
                number = pick(NUMBERS)
                said(row, turn_response(f"try {number}", str(number)))
            return row
        strategy = pick([None, *(f"try {n}" for n in NUMBERS)])
        if pick(range(4)) == 0:
            row = Conversation(chat.prompt(prompts.strategy(first, shown)))
            said(row, strategy_response(f"try {pick(NUMBERS)}"))
            return row
        row = Conversation(chat.prompt(prompts.first_action(first, strategy)))
        num_turns = pick(range(1, 5))
        for turn in range(1, num_turns + 1):
            if turn > 1:
                text = prompts.next_action(turn, pick(["Too low, go on.", "No."]))
                row.append_context(chat.next_user(text, chat.end_id))
            said(row, action_response(str(pick(NUMBERS))))
        text = prompts.judgment(pick(["Right.", "No."]), num_turns)
        row.append_context(chat.next_user(text, chat.end_id))
        said(row, judgment_response([t for t in range(num_turns) if pick(range(2))]))
        return row

    for _ in range(num_steps):
        rows = [make_row().tokens() for _ in range(16)]
        width = max(len(r.input_ids) for r in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        labels = torch.full((len(rows), width), -100)
        for i, row in enumerate(rows):
            length = len(row.input_ids)
            ids[i, :length] = row.input_ids
            labels[i, 1:length] = torch.where(row.response_mask, row.input_ids[1:], -100)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def make_tokens(*parts: tuple[int, bool], temperature: float = 1.0) -> Tokens:
    """A row of `(how many ids, sampled?)` parts; ids count up from 10, the n-th id has log-prob -n / 100."""
    sampled = [is_sampled for count, is_sampled in parts for _ in range(count)]
    mask = torch.tensor(sampled[1:], dtype=torch.bool)
    logprobs = -torch.arange(1, len(sampled), dtype=torch.float32) / 100
    return Tokens(
        input_ids=torch.arange(10, 10 + len(sampled)),
        response_mask=mask,
        logprobs=torch.where(mask, logprobs, 0.0),
        temperatures=torch.where(mask, temperature, 1.0),
    )


def make_strategy(text: str = "try 1", num_tokens: int = 3, *, parsed: bool = True, token_limit: int = 10) -> Strategy:
    """A strategy whose row has 4 prompt ids."""
    return Strategy(text, parsed, False, make_tokens((4, False), (num_tokens, True)), token_limit)


def make_trajectory(
    outcome: float | None,
    num_tokens: Sequence[int] = (2, 5, 3),
    *,
    reason: StopReason = StopReason.DONE,
    unparsed: Sequence[int] = (),
    invalid: Sequence[int] = (),
    window: bool = False,
    token_limit: int = 10,
    task: str = "t",
) -> Trajectory:
    """Turns of so many sampled tokens; prompt and observations are 4 ids each. outcome None: env_error."""
    turns, parts, rows = [], [], []
    start = 3  # the first sampled id is number 4, which position 3 predicts
    for k, count in enumerate(num_tokens):
        row = 0
        if window:
            row, start = k, 3
            rows.append(make_tokens((4, False), (count, True)))
        parts += [(4, False), (count, True)]
        action = None if k in unparsed else f"act {k}"
        turns.append(
            Turn(f"see {k}", f"say {k}", action, 0.0, action is not None and k not in invalid, False, row, start,
                 start + count, token_limit)
        )  # fmt: skip
        start += count + 4
    if not window and parts:
        rows = [make_tokens(*parts)]
    return Trajectory(
        task=Task(task, "train"), seed=1, strategy_index=0, rollout_index=0, strategy="try 1", turns=tuple(turns),
        rows=tuple(rows), outcome=outcome, score=outcome or 0.0, success=outcome == 1.0,
        stop_reason=StopReason.ENV_ERROR if outcome is None else reason, final_observation="end",
    )  # fmt: skip
