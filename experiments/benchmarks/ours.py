"""hsg on the scripted workload of `workload.py`: the product's own loop over the very tokens that TRL handles.

    Trainer.iterate = Rollout.play -> assign_credit -> build_rows -> Learner.update           none of it is replaced

Prints one JSON line of the protocol in README.md. GRPO as TRL's defaults have it: advantages over the standard deviation
of the sample plus 1e-4, one mean over all trained tokens (TRL's loss_type "dapo"), one optimizer step per iteration.
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from hsg.config.loading import make_config
from hsg.experiments.benchmarks import workload as w
from hsg.experiments.benchmarks.meter import Meter
from hsg.experiments.benchmarks.scripted import ScriptedTasks, scripted
from hsg.ranks.distributed import Distributed
from hsg.trainer import Trainer

OPTIONS: dict[str, Any] = {
    "num_tasks": 1,
    "optimizer": {"lr": 1e-4, "max_grad_norm": 1.0},
    "advantage": {"std": "sample", "eps": 1e-4},
    "prompts": {"templates": {"action_first_plain": "{observation}", "action_next": "{observation}"}},
    "log": {"quiet": True},
}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"turns": 8, "spread": 2, "steps": 3, "G": 32, "A": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default=str(w.MODEL))
    parser.add_argument("--profile", type=Path, help="write FILE.rollout.prof and FILE.train.prof of the last step")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    rollout = {"max_action_tokens": given.A, "max_turns": 10**6, "env_threads": 1}
    update = {"microbatch_tokens": w.microbatch_tokens(given.turns)}
    options = {
        "algorithm": "grpo",
        "update": update,
        "num_strategies": 1,
        "num_rollouts": given.G,
        "train": {"iterations": given.steps},
    }
    config = make_config({**OPTIONS, **options, "rollout": rollout})
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    script = [
        w.make_rows(w.Spec(given.G, given.turns, given.spread, given.A), k, tokenizer) for k in range(given.steps)
    ]
    said = [[[tokenizer(a)["input_ids"] for a in row.actions] for row in rows] for rows in script]
    steps, digests, norms = [], [], []
    # A generator's key is (kind, seed, iteration, task, n, m, what it samples).
    with scripted(lambda *key: said[int(key[2])][int(key[5])]):
        trainer = Trainer(config, ScriptedTasks(script), given.model, Distributed(), None)
        meter, played = Meter(trainer.model, given.profile), []
        play = trainer.collector.rollout.play
        trainer.collector.rollout.play = meter.of("rollout", lambda *a, **o: played.append(play(*a, **o)) or played[-1])  # type: ignore
        trainer.learner.update = meter.of("train", trainer.learner.update)  # type: ignore
        prompt = w.prompt_ids(tokenizer)
        for k in range(given.steps):
            meter.spent.clear()
            values = meter.of("all", trainer.iterate, outer=True)(k)
            s = meter.spent
            counted = values["cost/rollout_positions"]
            assert counted == s["rollout_positions"], f"hsg must count every position it forwards, got {counted}"
            steps.append({name: s[name] for name in ("rollout", "train", "rollout_cpu", "train_cpu")} | {
                "wall": s["all"], "cpu": s["all_cpu"], "pos_rollout": counted, "pos_train": s["train_positions"],
                "pairs_rollout": s["rollout_pairs"], "pairs_train": s["train_pairs"],
                "lm_head_rollout": s["rollout_head"], "lm_head_train": s["train_head"],
            })  # fmt: skip
            rows = [trajectory.rows[0] for trajectory in played[-1][0]]
            start = len(prompt)
            assert all(row.input_ids[:start].tolist() == prompt for row in rows), "the prompt must be TRL's"
            digests.append(w.digest([r.input_ids[start:] for r in rows], [r.response_mask[start - 1 :] for r in rows]))
            norms.append(values["update/grad_norm"])
        trainer.close()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {"bench": "ours", "args": {k: str(v) for k, v in vars(given).items()}, "steps": steps, "digests": digests,
              "grad_norm": norms, "rss_mb": memory,
              "analytic": w.counts(prompt, w.tokenise(script[0], tokenizer, given.A))}  # fmt: skip
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
