"""The scripted workload that every program of the comparison handles: what is said at each turn, by (seed, step, row).

One optimizer step = one task, G trajectories. Row i has T_i actions (A tokens each, the last token is <|im_end|>) and
T_i - 1 observations. The last action is plain text (no tool call), which is how TRL's loop ends a trajectory.
No torch and no hsg in here: TRL's venv imports it too.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parents[2] / ".cache" / "bench" / "tiny_tool_model"
_WORDS = "look go take open read list north south east west door lamp box key left right up down red blue"
_OBSERVATION_WORDS = (
    "the you see a room with old table and small window on it there is nothing here but dust file path value "
    "line error name return class self object string list number data first last open read write"
)
WORDS, OBSERVATION_WORDS = _WORDS.split(), _OBSERVATION_WORDS.split()
TASK = (
    "You are in a house with many rooms. Find the key, open the box and read the note. "
    "Use the tool to act; every call takes one command of three words. When you are done, say so in plain words."
)

Segments = list[list[tuple[list[int], bool]]]
"""Per row: (ids, sampled by the policy), from the end of the prompt on."""


def act(cmd: str) -> str:  # type: ignore[empty-body]
    """
    Run one command in the house.

    Args:
        cmd: The command to run, three words.

    Returns:
        What you see after the command.
    """


@dataclass
class Row:
    """One trajectory: `actions` of exactly A tokens each, end token included, and the observations between them."""

    actions: list[str]
    observations: list[str]
    reward: float


@dataclass
class Spec:
    """The size of the workload: turns per row ~ U[turns - spread, turns + spread]."""

    G: int = 32
    turns: int = 8
    spread: int = 2
    A: int = 16
    obs_min: int = 26  # words per observation (with the template about 60 tokens)
    obs_max: int = 38
    seed: int = 0


def action_text(words: Sequence[str]) -> str:
    """A tool call of three words."""
    return f"<tool_call>{call_json(words)}</tool_call><|im_end|>"


def call_json(words: Sequence[str]) -> str:
    """The call alone."""
    return '{"name":"act","arguments":{"cmd":"' + " ".join(words) + '"}}'


def make_rows(spec: Spec, step: int, tok: Any) -> list[Row]:
    """What is said in one optimizer step."""
    rng = random.Random(f"{spec.seed}/{step}")
    first = [x for x in WORDS if len(tok(action_text([x, "go", "go"]))["input_ids"]) == spec.A]
    later = [x for x in WORDS if len(tok(action_text([first[0], x, x]))["input_ids"]) == spec.A]
    assert len(first) >= 8 and len(later) >= 8, (first, later, spec.A)
    final = final_words(tok)
    rows = []
    for _ in range(spec.G):
        turns = rng.randint(spec.turns - spec.spread, spec.turns + spec.spread)
        actions = [action_text([rng.choice(first), rng.choice(later), rng.choice(later)]) for _ in range(turns - 1)]
        actions.append(plain_text(rng, final, spec.A))
        observations = [
            " ".join(rng.choice(OBSERVATION_WORDS) for _ in range(rng.randint(spec.obs_min, spec.obs_max)))
            for _ in range(turns - 1)
        ]
        rows.append(Row(actions, observations, rng.random()))
    return rows


def final_words(tok: Any) -> list[str]:
    """Words that are one token each behind a space."""
    return [x for x in OBSERVATION_WORDS if len(tok(" " + x)["input_ids"]) == 1]


def plain_text(rng: random.Random, words: Sequence[str], num_tokens: int) -> str:
    """A response without a tool call, of so many tokens with its end."""
    return "".join(" " + rng.choice(words) for _ in range(num_tokens - 1)) + "<|im_end|>"


def suffix_ids(tok: Any, text: str) -> list[int]:
    """Tokens the template puts between <|im_end|> of a tool call and the next assistant turn (TRL's rule)."""
    call = {"type": "function", "function": {"name": "act", "arguments": {}}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "dummy"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    answered = [*said, {"role": "tool", "name": "act", "content": text}]
    before = tok.apply_chat_template(said, tokenize=True, return_dict=False)
    full = tok.apply_chat_template(answered, tokenize=True, add_generation_prompt=True, return_dict=False)
    end = max(i for i, t in enumerate(before) if t == tok.eos_token_id) + 1
    assert full[:end] == before[:end]
    return full[end:]


def prompt_messages(text: str = TASK) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def prompt_ids(tok: Any, text: str = TASK) -> list[int]:
    """The first turn with the list of tools, ready for the first response."""
    return tok.apply_chat_template(
        [prompt_messages(text)], tools=[act], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"][0]


def tokenise(rows: Sequence[Row], tok: Any, A: int) -> Segments:
    """All rows as ids."""
    out = []
    for row in rows:
        segments = []
        for turn, text in enumerate(row.actions):
            ids = tok(text)["input_ids"]
            assert len(ids) == A and ids[-1] == tok.eos_token_id, (text, len(ids))
            segments.append((ids, True))
            if turn < len(row.observations):
                segments.append((suffix_ids(tok, row.observations[turn]), False))
        out.append(segments)
    return out


def digest(completions: Iterable[Iterable[int]], masks: Iterable[Iterable[int]]) -> str:
    """Equal digests: the same ids behind the prompt, and the same of them trained."""
    rows = [(list(map(int, c)), list(map(int, m))) for c, m in zip(completions, masks, strict=True)]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def script_digest(segments: Segments) -> str:
    """The digest that a program must reach."""
    ids = [[t for part, _ in row for t in part] for row in segments]
    return digest(ids, [[sampled for part, sampled in row for _ in part] for row in segments])


def microbatch_tokens(turns: int) -> int:
    """What hsg forwards at once: about five rows, so that they share a prompt, in the memory that rows of that length need."""
    return 400 * turns


def unique_tokens(rows: Iterable[Sequence[int]]) -> int:
    """Nodes of the prefix tree of the rows."""
    return len({h for row in rows for h in _prefix_hashes(row)})


def _prefix_hashes(row: Sequence[int]) -> Iterator[int]:
    seen = 0
    for token in row:
        seen = hash((seen, token))
        yield seen


def counts(prompt: Sequence[int], segments: Segments) -> dict[str, float]:
    """Token positions of one step in closed form: the floors, and what TRL's plain path forwards."""
    P, G, A = len(prompt), len(segments), len(segments[0][0][0])
    rows = [[*prompt, *(t for ids, _ in row for t in ids)] for row in segments]
    lengths = [len(row) for row in rows]
    turns = [sum(sampled for _, sampled in row) for row in segments]
    rollout = rollout_real = 0
    for k in range(max(turns)):
        live = [i for i in range(G) if turns[i] > k]
        history = [P + sum(len(ids) for ids, _ in segments[i][: 2 * k]) for i in live]
        rollout += len(live) * (max(history) + A - 1)
        rollout_real += sum(history) + len(live) * (A - 1)
    return {
        "P": P,
        "turns_mean": sum(turns) / G,
        "turns_max": max(turns),
        "len_mean": sum(lengths) / G,
        "len_max": max(lengths),
        "floor_trie": unique_tokens(rows),
        "once_rollout": P + sum(n - P - 1 for n in lengths),  # prompt once, later tokens once, the last is never fed
        "once_train": P + sum(n - P for n in lengths),
        "rows_train": sum(lengths),  # without a shared prompt
        "action_tokens": sum(turns) * A,
        "trl_rollout_positions": rollout,
        "trl_rollout_real": rollout_real,
        "trl_train_positions": G * max(lengths),
        "trl_train_real": sum(lengths),
    }
