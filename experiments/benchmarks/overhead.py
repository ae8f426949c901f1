"""`make bench-overhead`: what StraTA costs on top of our own GRPO at a group of 32, phase by phase.

    GRPO    one task, one flat group of 32 trajectories
    StraTA  one task, N x M = 4 x 8: 32 candidate strategies of 32 tokens, embedded by the encoder, 4 selected; the same 32
            trajectories under them; a judgment of 16 tokens of each

Both by Trainer.iterate, in turns, on the scripted workload; the first iteration is warm-up.  CPU seconds.

One stream, since the scripted environment answers at once: a second one would only halve StraTA's batch (GRPO's single
group is never split).  Deliberately absent: environments that take time, evaluation, checkpoints.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoTokenizer

from hsg import collector
from hsg.config.loading import make_config
from hsg.experiments.benchmarks import workload as w
from hsg.experiments.benchmarks.bench import machine
from hsg.experiments.benchmarks.compare import ROOT
from hsg.experiments.benchmarks.meter import Meter
from hsg.experiments.benchmarks.ours import OPTIONS
from hsg.experiments.benchmarks.scripted import ScriptedTasks, scripted
from hsg.model.models import load_model
from hsg.ranks.distributed import Distributed
from hsg.run import build
from hsg.trainer import Trainer

N, M = 4, 8
STRATEGY_TOKENS, JUDGMENT_TOKENS = 32, 16
PHASES = ("strategies", "selection", "rollout", "judgment", "update", "rest")
TEMPLATES = {**OPTIONS["prompts"]["templates"], "action_first": "{observation}\nFollow this strategy:\n{strategy}"}


def measure(turns: int, reps: int, size: str) -> dict[str, list[dict[str, float]]]:
    """algorithm -> one dict of CPU seconds by phase per repetition."""
    tokenizer = AutoTokenizer.from_pretrained(w.MODEL)
    spec = w.Spec(G=N * M, turns=turns, spread=turns // 4)
    script = [w.make_rows(spec, k, tokenizer) for k in range(reps + 1)]
    said = [[[tokenizer(a)["input_ids"] for a in row.actions] for row in rows] for rows in script]
    words = w.final_words(tokenizer)

    def responses(*key: Any) -> list[list[int]]:
        """Of a key ("rollout", seed, iteration, task, n, m, "response" | "judgment") or (..., task, "strategy", c)."""
        if key[-1] == "response":
            return said[key[2]][key[4] * M + key[5]]
        num_tokens = JUDGMENT_TOKENS if key[-1] == "judgment" else STRATEGY_TOKENS
        return [tokenizer(w.plain_text(random.Random(repr(key)), words, num_tokens))["input_ids"]]

    def policy(config: Any, path: Any, device: Any) -> tuple[Any, Any]:
        """SmolLM2's weights read the small tokenizer's ids, so that the work is the same but for the model's size."""
        return load_model(config, "smollm2" if size == "135m" else path, device)[0], tokenizer

    spent: dict[str, list[dict[str, float]]] = {"grpo": [], "strata": []}
    with ExitStack() as stack:
        stack.enter_context(scripted(responses))
        stack.enter_context(patch.object(build, "load_model", policy))
        runs = {}
        for algorithm in spent:
            trainer = _trainer(algorithm, script, spec)
            runs[algorithm] = trainer, (meter := Meter(trainer.model))
            trainer.collector.rollout.play = meter.of("play", trainer.collector.rollout.play)  # type: ignore[method-assign]
            trainer.learner.update = meter.of("update", trainer.learner.update)  # type: ignore[method-assign]
            if trainer.collector.judge is not None:
                trainer.collector.judge.judge = meter.of("judgment", trainer.collector.judge.judge)  # type: ignore[method-assign]
                stack.enter_context(patch.object(collector, "propose", meter.of("strategies", collector.propose)))
                stack.enter_context(patch.object(collector, "select", meter.of("selection", collector.select)))
        for k in range(reps + 1):
            for algorithm, (trainer, meter) in list(runs.items())[:: -1 if k % 2 else 1]:
                meter.spent.clear()
                meter.of("all", trainer.iterate)(k)
                if k > 0:
                    spent[algorithm].append(_phases(meter.spent))
        for trainer, _ in runs.values():
            trainer.close()
    return spent


def _trainer(algorithm: str, script: Sequence[Sequence[w.Row]], spec: w.Spec) -> Trainer:
    options = {
        **OPTIONS,
        "algorithm": algorithm,
        "num_strategies": N,
        "num_rollouts": M,
        "prompts": {"templates": TEMPLATES},
        "train": {"iterations": len(script)},
        "update": {"microbatch_tokens": w.microbatch_tokens(spec.turns)},
        "strategy": {"max_tokens": STRATEGY_TOKENS},
        "judge": {"max_tokens": JUDGMENT_TOKENS},
        "rollout": {"max_action_tokens": spec.A, "max_turns": 10**6, "env_threads": 1, "streams": 1},
    }
    if algorithm == "grpo":  # the bundle of the flat method says what it has no strategies and no judge for
        del options["strategy"], options["judge"]
    return Trainer(make_config(options), ScriptedTasks(script), str(w.MODEL), Distributed(), None)


def _phases(spent: Mapping[str, float]) -> dict[str, float]:
    cpu = {name: spent.get(f"{name}_cpu", 0.0) for name in ("strategies", "selection", "judgment", "update")}
    cpu["rollout"] = spent["play_cpu"] - cpu["judgment"]
    return cpu | {"rest": spent["all_cpu"] - sum(cpu.values()), "total": spent["all_cpu"]}


def line(turns: int, spent: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """Table cells of one size: medians, and the ratio of each repetition's pair."""
    pairs = [s["total"] / g["total"] - 1 for s, g in zip(spent["strata"], spent["grpo"], strict=True)]
    flat = statistics.median(g["total"] for g in spent["grpo"])
    asked = statistics.median(s["selection"] + s["judgment"] for s in spent["strata"]) / flat
    cells = []
    for algorithm in ("strata", "grpo"):
        medians = {name: statistics.median(run[name] for run in spent[algorithm]) for name in (*PHASES, "total")}
        ratio = [f"{statistics.median(pairs):+.1%} ({min(pairs):+.1%} to {max(pairs):+.1%})", f"{asked:.1%}"]
        numbers = [f"{medians[name]:.2f}" for name in (*PHASES, "total")]
        cells.append([str(turns), algorithm, *numbers, *(ratio if algorithm == "strata" else ["", ""])])
    return ["| " + " | ".join(row) + " |" for row in cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", default="8,16,32", help="mean turns, with commas")
    parser.add_argument("--reps", type=int, default=3, help="pairs of iterations after the first")
    parser.add_argument(
        "--size", choices=("1m", "135m"), default="1m", help="the bench model or SmolLM2-135M's weights"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench")
    given = parser.parse_args()
    torch.set_num_threads(1)
    head = ("turns", "algorithm", *PHASES, "CPU s / iteration", "over GRPO", "selection + judgment / GRPO")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    runs = {}
    start = machine({"ours": sys.executable})
    for turns in map(int, given.turns.split(",")):
        runs[turns] = measure(turns, given.reps, given.size)
        lines += line(turns, runs[turns])
        print("\n".join(lines[-2:]), file=sys.stderr, flush=True)
    title = f"# StraTA over GRPO, group of {N * M}, {given.size} parameters, {given.reps} pairs of iterations, medians"
    text = "\n\n".join([title, start, "\n".join(lines)]) + "\n"
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"overhead-{given.size}.md").write_text(text, encoding="utf-8")
    (given.out / f"overhead-{given.size}.json").write_text(json.dumps(runs), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
