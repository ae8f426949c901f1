"""The training loop, top to bottom: one iteration is a rollout and an update.

    collect      tasks -> strategies -> trajectories -> judgments -> returns -> advantages -> rows       (collector.py)
    update       epochs x mini-batches x micro-batches of ONE loss, global denominators                 (learner.py)
    log, evaluate, save

What has to survive the process is in `Trainer.checkpoints.parts`.  Deliberately absent: replay of old iterations, any
mention of an algorithm's name.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hsg.batch import Row
from hsg.collector import Collector
from hsg.config.options import Config
from hsg.learner import Learner, UpdateCosts
from hsg.learning.underway import Collected
from hsg.measure import metrics as mx
from hsg.measure.evaluation import evaluate, evaluation_tasks
from hsg.measure.speed import Arithmetic, Clock, matmul_rate, peak_memory_mb
from hsg.protocol import TaskSet
from hsg.ranks import stopping
from hsg.ranks.distributed import Distributed
from hsg.run.build import make_reference, make_trained
from hsg.run.checkpoint import Adapters, Checkpoints
from hsg.run.console import Console
from hsg.run.tracking import RunFolder


class Trainer:
    """One run: `train()` goes through `train.iterations` iterations. `model_path` is the policy that the run began with.

    distributed  None: the ranks that the launcher has started, or this process alone
    run          the folder that is written; None: nothing is
    resume       the checkpoint to go on from
    """

    def __init__(
        self,
        config: Config,
        task_set: TaskSet,
        model_path: str,
        distributed: Distributed | None = None,
        run: RunFolder | None = None,
        *,
        resume: Path | None = None,
    ) -> None:
        distributed = distributed or Distributed(config.distributed)
        self.config, self.task_set, self.distributed, self.run = config, task_set, distributed, run
        self.console = Console(config, is_main=distributed.is_main)
        self.evaluation_tasks = evaluation_tasks(config, task_set)
        # A checkpoint's model has its adapters merged in; the run goes on with the base, and with theirs (`adapters`).
        path = resume / "model" if resume and not config.model.lora.rank else model_path
        self.policy = make_trained(config, path, distributed.device)
        self.model = self.policy.model
        self.reference = make_reference(config, model_path, self.policy, distributed)
        self._arithmetic = Arithmetic(self.model)
        self._matmul_rate = matmul_rate(distributed.device, self.model.compute_dtype)
        self.environment_turns = 0  # played in all, dropped ones too
        self.learner = Learner(
            config,
            self.model,
            distributed,
            context_limit=self.policy.context_limit,
            reference=None if self.reference is None else self.reference.model,
        )
        self.collector = Collector(
            config, task_set, self.policy, distributed, self.console, self.learner.settle_logprobs,
            model_path=model_path, reference=self.reference,
        )  # fmt: skip
        self.iteration, self.model_path = 0, model_path
        self._evaluated = 0  # the iteration after which the last evaluation was
        self._seconds, self._late = 0.0, False
        self._began: float | None = None
        self._collected: Collected | None = None  # of the iteration whose update is under way
        self.checkpoints = Checkpoints(config.checkpoint.keep, distributed)
        # Whatever else has a state (a buffer, a curriculum, another network's optimizer) adds itself here.
        self.checkpoints.parts |= {"trainer": self, "learner": self.learner}
        self.checkpoints.parts |= {"reflection": self.collector.reflection, "companions": self.collector.companions}
        if config.model.lora.rank:
            self.checkpoints.parts["adapters"] = Adapters(self.model, distributed)
        if resume:
            self.iteration = self.checkpoints.load(resume)

    def state_dict(self) -> dict[str, Any]:
        """What the loop itself has to remember. The tasks follow from the seed and the iteration."""
        state: dict[str, Any] = {"model_path": self.model_path, "seconds": self.seconds, "evaluated": self._evaluated}
        state |= {"environment_turns": self.environment_turns, "fit": self.model.fit.options}
        if self._collected is not None:
            state["collected"] = self.distributed.gather([self._collected.state_dict()])
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seconds, self._evaluated = state["seconds"], state["evaluated"]
        self.environment_turns = state["environment_turns"]
        self._late = self._has_had_its_share()
        if "collected" in state:
            self._collected = Collected.join(self.distributed.share(state["collected"]))

    @property
    def seconds(self) -> float:
        """Wall time of all iterations so far, those before a resume too."""
        return self._seconds + (0.0 if self._began is None else time.monotonic() - self._began)

    # ------------------------------------------------------------------------------------------------------ the loop

    def train(self) -> int:
        """The iterations that are left, with evaluations and checkpoints as the config asks. Returns how many there were.

        Asked to stop, it saves and raises `Stopped`.
        """
        self._began = time.monotonic()
        try:
            with stopping.patience():
                if self.iteration:
                    self._evaluate_and_save()  # where a resumed run was stopped before it could
                elif self.config.checkpoint.initial:
                    self.save()
                while not self._over():
                    values = self.iterate(self.iteration)
                    self.iteration += 1
                    self.environment_turns += int(values["cost/environment_turns"])
                    self._late = self.distributed.from_main(self._has_had_its_share())
                    if self.run is not None:
                        self.run.metrics(self.iteration - 1, values)
                        self.console.line(self.iteration, values, spent=self.seconds, played=self.environment_turns)
                    self._evaluate_and_save()
                    self.distributed.stop_together()
        except stopping.Stopped:
            self.save()
            raise
        self._seconds, self._began = self.seconds, None
        self.collector.abandon()  # they would hold their engines while the last evaluations play
        return self.iteration

    def _over(self) -> bool:
        return self._late or self.iteration >= self.config.train.iterations or not self.config.train.enabled

    def _has_had_its_share(self) -> bool:
        """Whether the run has used up its time or its environment turns."""
        limits = (self.config.train.max_seconds, self.config.train.max_environment_turns)
        spent = (self.seconds, self.environment_turns)
        return any(limit is not None and used >= limit for limit, used in zip(limits, spent, strict=True))

    def _evaluate_and_save(self) -> None:
        """What is due between two iterations."""
        every = self.config.evaluation.every
        if every and self.iteration % every == 0 and self._evaluated != self.iteration:
            self.evaluate(self.iteration, "training")
            self._evaluated = self.iteration
        every = self.config.checkpoint.every
        if self._over() or (every and self.iteration % every == 0):
            self.save()

    def iterate(self, iteration: int) -> dict[str, float]:
        """One iteration; returns its metrics."""
        clock = Clock()
        rows: list[Row] | None = None  # the update goes on where a checkpoint was written
        if self._collected is None:
            rows, self._collected = self.collector.collect(iteration, clock)
        collected = self._collected
        if iteration + 1 < self.config.train.iterations:
            self.collector.begin(iteration + 1)  # the environments' cores are idle while the model learns
        to_learn = None if rows is None else self.config.update.epochs * len(rows)
        with (
            clock("update"),
            self.checkpoints.rows_dumped(self.run, iteration, self.model, self.policy.tokenizer),
            self.console.bar(f"iteration {iteration + 1}, update", to_learn, "row") as bar,
        ):
            update_values = self.learner.update(rows, iteration, on_rows=bar.update)
        self._collected = None
        with clock("records"):
            records = self.distributed.gather(collected.records)
            if self.run is not None:
                self.run.trajectories(iteration, records)

        spent, self.learner.costs = self.learner.costs, UpdateCosts()
        drawn = self.collector.own_costs(collected.costs)
        sums = collected.sums | mx.update_costs(vars(spent))
        sums |= mx.speed_metrics(drawn, vars(spent), self._arithmetic, self._matmul_rate, clock.total())
        sums["time/processor_seconds"] = (clock.processor(), 0.0)
        merged = mx.merge(self.distributed.gather([sums]))
        pool = self.collector.rollout.pool
        waited, pool.waited_seconds = pool.waited_seconds, 0.0
        times = {f"time/{name}_seconds": seconds for name, seconds in clock.seconds.items()}
        times |= {"time/iteration_seconds": clock.total(), "time/environment_wait_seconds": waited}
        times["memory/peak_mb"] = self.distributed.max(peak_memory_mb(self.distributed.device))
        return {**mx.finish(merged), **update_values, **times}

    # ------------------------------------------------------------------------------------------- evaluating and saving

    def evaluate(self, iteration: int, label: str, **options: Any) -> dict[str, Any]:
        """Evaluate the current policy on the fixed tasks and write it down."""
        tasks = options.pop("tasks", self.evaluation_tasks)
        given = (self.config, self.policy, self.task_set, tasks, self.distributed)
        record = evaluate(*given, label=label, iteration=iteration, **options)
        if self.run is not None:
            self.run.evaluation(record)
            self.console.evaluation(record)
        return record

    def save(self) -> None:
        """Write a checkpoint of the current policy, and of all that the run needs to go on."""
        steps = self.learner.underway.num_done if self.learner.underway else 0
        self.checkpoints.save(self.run, self.iteration, self.model, self.policy.tokenizer, steps=steps)

    def close(self) -> None:
        """Let the environments go."""
        self.collector.close()
