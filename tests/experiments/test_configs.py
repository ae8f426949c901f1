"""Every file in experiments/ loads, and each configuration holds only what differs from the defaults."""

import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from hsg import environments
from hsg.config.loading import load_config, make_config, to_dict

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
