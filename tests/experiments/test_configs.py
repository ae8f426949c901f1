"""Every file in experiments/ loads, and each configuration holds only what differs from the defaults."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from hsg import environments
from hsg.config.loading import load_config, make_config, to_dict
from hsg.planning import plan

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
CONFIGS = sorted((EXPERIMENTS / "configs").glob("*.yaml"))
SPOKEN = {"environment.name", "algorithm"}  # what a file is about may be said even where it is the default


def given(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def flatten(nested: dict, prefix: str = "") -> dict[str, object]:
    """Dotted keys; the open mappings (environment options, templates) stay whole."""
    flat: dict[str, object] = {}
    for key, value in nested.items():
        if isinstance(value, dict) and prefix + key not in ("environment.options", "prompts.templates"):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def restated(nested: dict) -> list[str]:
    """Keys of a file whose value is what they would be without it: the defaults and the bundle of its algorithm."""
    without = flatten(to_dict(make_config({"algorithm": nested.get("algorithm", "strata")})))
    with_it = flatten(to_dict(make_config(nested)))
    return [key for key in flatten(nested) if key in without and key not in SPOKEN and with_it[key] == without[key]]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_loads_with_options_its_environment_knows(path):
    config = load_config(path)
    module = environments._MODULES[config.environment.name]
    known = inspect.signature(importlib.import_module(module).make_task_set).parameters
    assert set(config.environment.options) <= set(known)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_holds_only_differences(path):
    assert restated(given(path)) == []


def test_a_restated_default_is_found():
    nested = {"algorithm": "grpo", "judge": {"enabled": False}, "kappa": 0.1, "sigma": 2, "rollout": {"max_turns": 5}}
    assert restated(nested) == ["judge.enabled", "kappa"]


def test_paper_scale_is_the_papers():
    config = load_config(EXPERIMENTS / "configs" / "sciworld_qwen2.5-7b.yaml")
    assert (config.num_strategies, config.num_rollouts, config.num_candidates) == (4, 8, 32)
    assert (config.sigma, config.delta, config.kappa) == (8, 0.5, 0.1)
    assert (config.reward.format_penalty, config.reward.length_penalty) == (1.0, True)
    assert (config.rollout.max_turns, config.environment.options["simplifications"]) == (20, "")


@pytest.mark.parametrize("size", ["1.5b", "7b"])
def test_alfworld_at_paper_scale(size):
    config = load_config(EXPERIMENTS / "configs" / f"alfworld_qwen2.5-{size}.yaml")
    assert (config.num_strategies, config.num_rollouts, config.num_candidates) == (4, 8, 32)
    assert (config.sigma, config.delta, config.kappa) == (8, 0.5, 0.1)
    assert (config.reward.format_penalty, config.reward.length_penalty) == (1.0, True)
    assert (config.rollout.max_turns, config.rollout.admissible_actions) == (50, True)
    assert (config.evaluation.split, config.evaluation.test_split) == ("valid_seen", "valid_unseen")
    assert config.evaluation.num_tasks is None  # all 140, all 134
    assert size in config.model.path.lower()


def test_sge_on_langr_is_the_papers():
    """The paper's table; its defaults (epochs, learning rate, clip, KL) are hsg's, and its reflection is the bundle's."""
    config = load_config(EXPERIMENTS / "configs" / "langr_sge_qwen3-4b.yaml")
    assert (config.temperature.strategy, config.temperature.action) == (1.0, 0.6)
    assert config.num_strategies * config.num_rollouts == 16
    assert config.num_tasks * config.num_strategies * config.num_rollouts == 512
    assert (config.update.minibatch_turns, config.update.epochs) == (128, 1)
    assert (config.rollout.max_action_tokens, config.optimizer.lr) == (520, 1e-6)
    assert (config.reflection.p_bad, config.reflection.p_good, config.reflection.capacity) == (0.25, 0.1, 32)
    assert (config.loss.clip_low, config.loss.clip_high, config.loss.kl_coef) == (0.2, 0.2, 0.0)
    assert (config.prompts.format, config.strategy.per, config.model.path) == (
        "langr",
        "turn",
        "Qwen/Qwen3-4B-Instruct-2507",
    )
    assert config.rollout.max_turns == importlib.import_module("hsg.environments.langr").TURN_LIMIT
    assert config.rollout.window_turns == config.rollout.max_turns - 1, "nothing that was seen is forgotten"
    assert config.rollout.max_tokens == config.rollout.max_turns * config.rollout.max_action_tokens, "cuts nothing"


@pytest.mark.parametrize("world", ["coding", "langr"])
def test_grpo_as_sges_baseline_differs_in_temperature_and_reflection_alone(world):
    sge, grpo = (
        to_dict(load_config(EXPERIMENTS / "configs" / f"{world}_{name}_qwen3-4b.yaml")) for name in ("sge", "grpo")
    )
    for config in (sge, grpo):
        for of_the_method in ("algorithm", "reflection"):
            config.pop(of_the_method)
    assert len(set(grpo.pop("temperature").values())) == 1
    sge.pop("temperature")
    assert sge == grpo


@pytest.mark.parametrize("method", ["sge", "grpo"])
def test_sge_on_langr_fits_eight_gpus(method, capsys):
    path = EXPERIMENTS / "configs" / f"langr_{method}_qwen3-4b.yaml"
    plan.main(["--config", str(path), "--gpus", "8"])
    assert re.search(r"peak +[\d.]+ GiB +fits into 72\.0 GiB", capsys.readouterr().out)


def test_toy_baseline_differs_in_the_method_alone():
    strata, grpo = (given(EXPERIMENTS / "configs" / f"toy_{name}.yaml") for name in ("strata", "grpo"))
    assert grpo.pop("algorithm") == "grpo"
    for only_with_strategies in ("sigma", "strategy", "judge"):
        strata.pop(only_with_strategies)
    assert strata == grpo
    flat, two_level = (load_config(EXPERIMENTS / "configs" / f"toy_{name}.yaml") for name in ("grpo", "strata"))
    assert flat.group_shape == (1, 16)
    assert two_level.group_shape == (4, 4)


@pytest.mark.parametrize("path", sorted((EXPERIMENTS / "accelerate").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_launcher_reads(path):
    """Accelerate refuses unknown keys of the file, and drops unknown keys of its sections in silence."""
    config = load_config_from_file(str(path))
    text = (Path(importlib.util.find_spec("accelerate").origin).parent / "commands" / "launch.py").read_text()
    for key in config.fsdp_config:
        assert f'"--{key}"' in text
    assert config.num_processes == {"cpu": 1, "cpu2": 2, "gpu1": 1, "fsdp": 8, "multinode": 16}[path.stem]
