"""Every rule of the configuration says key, rule and value; typos get near names; what is dumped loads equal."""

from __future__ import annotations

import dataclasses
import math
import typing
from pathlib import Path
from typing import Any

import pytest

from hsg.config.algorithms import ALGORITHMS, USED_WHEN
from hsg.config.loading import _all_keys, dump_config, load_config, make_config, to_dict, unused_options
from hsg.config.options import Config


def error(path: Path | None = None, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# key, bad values, values at the edge that are allowed
RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("num_tasks", [0, -1], [1]), ("num_strategies", [0], [1]), ("num_rollouts", [0], [1]),
    ("sigma", [0, -1, 1e308], [1]), ("delta", [0, 1.1, -0.5], [1, 0.01]), ("kappa", [-0.1], [0, 3]),
    ("seed", [-1, 2**63], [0, 2**63 - 1]),
    ("run.name", ["a/b", "..", "../x", "", "a\nb", "a\0b", "a\udcff"], ["a.b", "x" * 200, "ünï 门"]),
    ("run.dir", ["a\0b", "a\nb"], ["a b"]),
    ("model.lora.rank", [-1], [0, 8]), ("model.lora.alpha", [0, -1], [0.5]),
    ("temperature.strategy", [0, -1, 100], [0.01, 99]), ("temperature.action", [0, 100], [2]),
    ("strategy.max_tokens", [0], [1]), ("reflection.capacity", [0], [1]),
    ("reflection.p_bad", [-0.1, 1.1], [0, 1]), ("reflection.p_good", [-0.1, 1.1], [0, 1]),
    ("rollout.max_turns", [0], [1]), ("rollout.max_action_tokens", [0], [1]), ("rollout.env_threads", [0], [1]),
    ("rollout.streams", [0], [1]), ("rollout.max_cache_tokens", [0], [1]), ("rollout.window_turns", [-1], [0]),
    ("rollout.env_retries", [-1], [0]), ("distributed.timeout_seconds", [0, -1, 1e300], [0.1]),
    ("rollout.env_timeout_seconds", [0, -1, 1e300], [0.1]), ("rollout.max_error_fraction", [-0.1, 1.1], [0, 1]),
    ("rollout.max_tokens", [0], [1, None]), ("rollout.max_parse_failures", [0], [1, None]),
    ("rollout.max_logprob_gap", [0, -1], [1e-6, None]),
    ("judge.temperature", [-0.1, 100], [0]), ("judge.max_tokens", [0], [1]),
    ("reward.format_penalty", [-1], [0, 1]), ("reward.invalid_action_penalty", [-1], [0]),
    ("reward.length_penalty_start", [-0.1, 1], [0, 0.99]), ("reward.scale", [0, -1], [10]),
    ("advantage.eps", [0, -1], [1e-12]),
    ("advantage.gamma", [-0.1, 1.1], [0, 1]), ("advantage.entropy_bonus", [-1], [0]), ("advantage.entropy_cap", [-1], [0]),
    ("strategy.dropout", [-0.1, 1], [0, 0.99]), ("rollout.turns_per_stage", [0], [1, None]),
    ("rollout.iterations_per_stage", [0], [1]), ("rollout.max_refills", [-1], [0]),
    ("gigpo.omega", [-1], [0]), ("critic.lam", [-0.1, 1.1], [0, 1]), ("critic.lr", [0], [1]),
    ("critic.value_clip", [0], [0.1, None]), ("critic.epochs", [0], [1]), ("critic.max_grad_norm", [0], [1]),
    ("rnd.weight", [-1], [0]), ("rnd.hidden_size", [0], [1]), ("rnd.output_size", [0], [1]), ("rnd.lr", [0], [1]),
    ("rnd.epochs", [0], [1]), ("train.max_environment_turns", [0], [1, None]),
    ("loss.clip_low", [0, 1.1], [1]), ("loss.clip_high", [0], [5]), ("loss.importance_cap", [1, 1e6], [1.5, 10]), ("loss.strategy_weight", [-1], [0]),
    ("loss.action_weight", [-1], [0]), ("loss.kl_coef", [-1], [0]), ("loss.token_limit", [0], [1, None]),
    ("update.epochs", [0], [1]), ("update.microbatch_tokens", [0], [1]),
    ("update.minibatch_trajectories", [0], [1, None]), ("update.minibatch_turns", [0], [None]),
    ("optimizer.lr", [0, -1], [1e-9]), ("optimizer.max_grad_norm", [0], [1e9]), ("optimizer.beta1", [-0.1, 1], [0]),
    ("optimizer.beta2", [-0.1, 1], [0]), ("optimizer.weight_decay", [-1], [0]), ("optimizer.warmup_steps", [-1], [0]),
    ("optimizer.max_nonfinite", [0], [1]),
    ("train.iterations", [-1], [0]), ("train.max_seconds", [0, -1], [None, 0.1]),
    ("evaluation.every", [-1], [0]), ("evaluation.num_tasks", [0], [1, None]), ("evaluation.batch_size", [0], [1]),
    ("evaluation.temperature", [-0.1, 100], [0, None]),
    ("checkpoint.every", [-1], [0]), ("checkpoint.keep", [0], [1, None]),
    ("warmstart.num_tasks", [0], [1]), ("warmstart.batch_tokens", [0], [1]), ("warmstart.patience", [0], [1]),
    ("warmstart.seconds", [0], [0.1]), ("warmstart.epochs", [0], [0.1]), ("warmstart.lr", [0], [0.1]),
    ("warmstart.nano.vocab_size", [299], [300]), ("warmstart.nano.hidden_size", [127, 0, 20], [64]),
    ("warmstart.nano.num_heads", [0, -2], [2]), ("warmstart.nano.num_layers", [0], [1]),
    ("warmstart.nano.intermediate_size", [0], [1]), ("warmstart.nano.max_position_embeddings", [0], [1]),
    ("warmstart.max_turns", [0, -1], [1, None]),
    ("warmstart.nano.num_key_value_heads", [3, 0], [4]),
]  # fmt: skip


def nested(key: str, value: Any) -> dict[str, Any]:
    out: Any = value
    for part in reversed(key.split(".")):
        out = {part: out}
    return out


@pytest.mark.parametrize(("key", "bad", "good"), RANGES, ids=[r[0] for r in RANGES])
def test_range(key: str, bad: list[Any], good: list[Any]) -> None:
    for value in bad:
        with pytest.raises(ValueError) as caught:
            make_config(nested(key, value))
        message = str(caught.value)
        assert message.startswith(f"{key} must be "), message
        assert f"got {value!r}" in message or f"got {float(value)!r}" in message
        assert "\n" not in message
    for value in good:
        make_config(nested(key, value))


def numeric_keys(cls: type = Config, prefix: str = "") -> set[str]:
    keys = set()
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            keys |= numeric_keys(typing.cast(type, hint), f"{prefix}{name}.")
        elif {int, float} & {hint, *typing.get_args(hint)}:
            keys.add(prefix + name)
    return keys


def test_every_number_has_a_rule() -> None:
    """A new option without a range shows up here; the named ones really take any number."""
    free = {"warmstart.seed", "warmstart.max_turns", "warmstart.weight_decay"}
    free |= {key for key in numeric_keys() if key.startswith(("warmstart.share_", "warmstart.nano."))}
    assert numeric_keys() - {key for key, _, _ in RANGES} - free == set()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sigma": 0.5}, r"sigma \* num_strategies must be >= num_strategies \(4\) candidates, got 2"),
        ({"update": {"minibatch_trajectories": 2, "minibatch_turns": 2}}, r"update.minibatch_turns must be null when"),
        ({"update": {"minibatch_turns": 2}}, r"update.minibatch_turns must be null in conversation context"),
        (
            {"algorithm": "gigpo", "advantage": {"unit": "token"}},
            r"advantage.unit must be turn with the estimator gigpo",
        ),
    ],
)
def test_rules_between_keys(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(given)


def test_flat_method_needs_no_candidates() -> None:
    assert make_config({"algorithm": "grpo", "sigma": 0.5}).group_shape == (1, 32)
    assert make_config({}).group_shape == (4, 8)
    assert make_config({}).num_candidates == 32


# --------------------------------------------------------------------------------------------------------- wrong types


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_tasks=many", "num_tasks must be a whole number, got 'many'"),
        ("num_tasks=1.5", "num_tasks must be a whole number, got 1.5"),
        ("num_tasks=true", "num_tasks must be a whole number, got True"),
        ("num_tasks=", "num_tasks must be a whole number, got None"),
        ("optimizer.lr=fast", "optimizer.lr must be a number, got 'fast'"),
        ("optimizer.lr=.nan", "optimizer.lr must be a finite number, got nan"),
        ("optimizer.lr=inf", "optimizer.lr must be a finite number, got inf"),
        ("optimizer.lr=.inf", "optimizer.lr must be a finite number, got inf"),
        ("optimizer.lr=[1]", "optimizer.lr must be a finite number, got [1]"),
        ("judge.enabled=1", "judge.enabled must be true or false, got 1"),
        ("judge.enabled=maybe", "judge.enabled must be true or false, got 'maybe'"),
        ("model.path=[a]", "model.path must be a text, got ['a']"),
        ("model.dtype=float23", "model.dtype must be one of auto, float32, bfloat16, float64, got 'float23'; did you"),
        ("model.dtype=[float32]", "model.dtype must be one of auto, float32, bfloat16, float64, got ['float32']"),
        ("log.wandb=off", "log.wandb must be one of offline, online, disabled, got False"),
        ("rollout=5", "rollout must be a mapping of keys, got 5"),
        ("rollout=[a]", "rollout must be a mapping of keys, got ['a']"),
        ("rollout.max_turns.x=5", "rollout.max_turns must be a whole number, got {'x': 5}"),
        ("environment.options=3", "environment.options must be a mapping, got 3"),
        ("environment.options={1: 2}", "environment.options must be a mapping with text keys, got {1: 2}"),
        ("environment.name=[toy]", "environment.name must be a text, got ['toy']"),
        ("environment=toy", "environment must be a mapping of keys, got 'toy'"),
        ("toy=3", "toy must be a mapping of options, got 3"),
        ("warmstart.nano.marks=a", "warmstart.nano.marks must be a list, got 'a'"),
        ("warmstart.nano.marks=[a, [b]]", "warmstart.nano.marks[1] must be a text, got ['b']"),
        ("warmstart.nano.marks=[a, a]", "warmstart.nano.marks must be texts of at least one letter, each once, got"),
        ("warmstart.nano.marks=['']", "warmstart.nano.marks must be texts of at least one letter, each once, got ['']"),
        ("algorithm=[grpo]", f"algorithm must be one of {', '.join(ALGORITHMS)}, got ['grpo']"),
        ("algorithm=grbo", f"algorithm must be one of {', '.join(ALGORITHMS)}, got 'grbo'; did you mean 'grpo'?"),
        ("advantage.estimator=gigbo", "advantage.estimator must be one of group, rloo, reinforce++, gigpo, gae, got 'gigbo'; did you mean 'gigpo'?"),
    ],
)  # fmt: skip
def test_wrong_type(override: str, message: str) -> None:
    assert error(None, override).startswith(message)


def test_options_that_are_never_read_are_named() -> None:
    """Set away from the bundle, and of no use to this method; an option of the bundle itself is never named."""
    given = {"kappa": 0.3, "sigma": 2, "gigpo": {"omega": 2}, "judge": {"max_tokens": 5}}
    assert unused_options(make_config({"algorithm": "grpo", **given})) == [
        "sigma",
        "kappa",
        "judge.max_tokens",
        "gigpo.omega",
    ]
    assert unused_options(make_config({"algorithm": "gigpo", **given})) == ["sigma", "kappa", "judge.max_tokens"]
    assert unused_options(make_config({**given, "judge": {"enabled": True}})) == ["gigpo.omega"]
    # What divides by a std reads eps: groups of actions or strategies (unless std is none), and whitening.
    eps = {"advantage": {"eps": 1e-3}, "loss": {"action_weight": 2}}
    named = {"rloo": True, "dr_grpo": True, "grpo": False, "gigpo": False, "ppo": False, "reinforce++": False}
    for algorithm, unread in named.items():
        expected = ["advantage.eps"] * unread + ["loss.action_weight"]  # one level: there is nothing to weigh
        assert unused_options(make_config({"algorithm": algorithm, **eps})) == expected, algorithm
    assert unused_options(make_config(eps)) == []
    assert (
        unused_options(make_config({"advantage": {"estimator": "rloo", "eps": 1e-3}})) == []
    )  # the strategies' groups
    for algorithm in ALGORITHMS:
        assert unused_options(make_config({"algorithm": algorithm})) == []
    assert unused_options(make_config({"prompts": {"markers": {"action": "<do>"}}})) == []


def test_what_decides_whether_an_option_is_read_exists() -> None:
    keys = set(_all_keys())
    assert set(USED_WHEN) <= keys
    for algorithm, bundle in ALGORITHMS.items():
        assert set(bundle) <= keys, algorithm


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("num_task=3", "num_tasks"), ("rollout.max_turn=3", "rollout.max_turns"), ("optimiser.lr=1", "optimizer.lr"),
        ("optimizer.learning_rate=1", "known: lr, beta1"), ("warmstart.nano.hidden=3", "warmstart.nano.hidden_size"),
        ("max_turns=3", "rollout.max_turns"), ("temprature.action=1", "temperature"), ("zzz=1", "known: algorithm"),
    ],
)  # fmt: skip
def test_unknown_key_gets_near_names(override: str, near: str) -> None:
    key = override.partition("=")[0]
    message = error(None, override)
    assert message.split()[0] in (key, key.split(".")[0])
    assert "must be a known key" in message
    assert near in message


@pytest.mark.parametrize("item", ["num_tasks", "=3", "", "num_tasks 3"])
def test_set_needs_key_and_value(item: str) -> None:
    assert error(None, item) == f"--set must be of the form section.key=value, got {item!r}"


# ---------------------------------------------------------------------------------------------------------------- files


def write(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_numbers_as_yaml_writes_them(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-6 as a string; 1 passes for 1.0, 4.0 for 4."""
    config = load_config(write(tmp_path, "optimizer: {lr: 1e-6}\nsigma: 2\nnum_tasks: 4.0\nadvantage: {eps: 1E-8}\n"))
    assert (config.optimizer.lr, config.sigma, config.num_tasks, config.advantage.eps) == (1e-6, 2.0, 4, 1e-8)
    assert isinstance(config.sigma, float)
    assert isinstance(config.num_tasks, int)
    assert math.isclose(load_config(None, ["optimizer.lr=3e-4"]).optimizer.lr, 3e-4)


def test_order_of_precedence(tmp_path: Path) -> None:
    path = write(tmp_path, "algorithm: grpo\nnum_tasks: 7\nnum_rollouts: 3\njudge: {max_tokens: 5}\n")
    config = load_config(path, ["num_tasks=9", "num_tasks=11", "judge.enabled=true"])
    assert (config.num_tasks, config.num_rollouts) == (11, 3)
    assert (config.judge.enabled, config.judge.max_tokens) == (True, 5)
    assert (config.loss.level_reduction, config.advantage.turn_baseline) == ("joint", "trajectory")
    assert load_config(path).judge.enabled is False
    assert load_config(path, ["algorithm=strata"]).judge.enabled is True


def test_set_values_are_yaml() -> None:
    overrides = ["run.name=2026", "rollout.max_tokens=null", "prompts.templates={parse_error: 'a=b'}", "seed=3"]
    config = load_config(None, overrides)
    assert (config.run.name, config.rollout.max_tokens, config.seed) == ("2026", None, 3)
    assert config.prompts.templates == {"parse_error": "a=b"}
    assert load_config(None, ["run.name=a: b: c"]).run.name == "a: b: c"  # no YAML, so it is a text
    assert load_config(None, ["run.name=2026-11-29"]).run.name == "2026-11-29"


def test_environment_section(tmp_path: Path) -> None:
    path = write(tmp_path, "environment: {name: toy}\ntoy: {num_train: 50}\n")
    assert load_config(path).environment.options == {"num_train": 50}
    assert load_config(path, ["toy.num_dev=9"]).environment.options == {"num_train": 50, "num_dev": 9}
    assert load_config(None, ["toy.num_train=5"]).environment.options == {"num_train": 5}
    assert error(None, "environment.name=sciworld", "toy.num_train=5").startswith("toy must be a known key")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dump_loads_equal(tmp_path: Path, algorithm: str) -> None:
    overrides = ["run.name=007", "optimizer.lr=1e-7", "toy.num_train=50", "prompts.templates={window: 'ä\n{turn}'}"]
    config = load_config(None, [f"algorithm={algorithm}", *overrides, "judge.enabled=true"])
    dump_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert to_dict(config)["judge"]["enabled"] is True


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_another_algorithm_for_a_resolved_file(tmp_path: Path, algorithm: str) -> None:
    """As if the run had been started with it: its own choices stay, what came with the old bundle goes."""
    choices = ["kappa=0.7", "toy.num_train=50", "prompts.templates={parse_error: again}"]
    dump_config(load_config(None, ["algorithm=dapo", *choices]), tmp_path / "config.yaml")
    got = load_config(tmp_path / "config.yaml", [f"algorithm={algorithm}", "num_tasks=3"])
    assert got == load_config(None, [f"algorithm={algorithm}", *choices, "num_tasks=3"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", "--config must be valid YAML, got"),
        ("- a\n- b\n", "--config must be a mapping of sections, got 'list'"),
        ("just words", "--config must be a mapping of sections, got 'str'"),
        ("? [a]\n: 1\n", "--config must be valid YAML"),
        ("seed: !!python/object:os.system x\n", "--config must be valid YAML"),
        ("seed: \x07\n", "--config must be valid YAML"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    assert error(write(tmp_path, text)).startswith(message)


def test_empty_file_and_empty_sections_are_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")) == load_config(write(tmp_path, "rollout:\njudge: {}\n")) == Config()


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert error(tmp_path / "no.yaml").startswith("--config must be a readable file")
    assert error(tmp_path).startswith("--config must be a readable file")
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"run: {name: \xff}\n")
    assert error(path).endswith("not UTF-8 text")


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rollout: {max_turns: 3}\nrollout: {streams: 1}\n", "rollout is given twice"),
        ("seed: 1\nseed: 2\n", "line 2 seed is given twice"),
        ("seed: " + "9" * 5000, "--config must be valid YAML"),
        ("seed: " + "[" * 20_000 + "]" * 20_000, "nested too deep"),
        ("environment: {name: toy, options: 5}\ntoy: {num_train: 9}\n", "environment.options must be a mapping, got 5"),
        ("prompts: {templates: {strategy: [a]}}", "prompts.templates.strategy must be a text, got ['a']"),
        ("prompts: {templates: {strategy: }}", "prompts.templates.strategy must be a text, got None"),
        ("prompts: {date: 2026-02-30}", "prompts.date must be a date as YYYY-MM-DD, or null, got '2026-02-30'"),
        ("prompts: {date: 20260230}", "prompts.date must be a date as YYYY-MM-DD, or null, got '20260230'"),
        ("prompts: {action_block: middle}", "prompts.action_block must be "),
    ],
)
def test_what_yaml_reads_and_python_trips_over(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    message = error(tmp_path / "c.yaml")
    assert says in message
    assert len(message) < 400


def test_an_environment_section_without_keys_keeps_the_options_beside_it(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("environment:\ntoy: {num_train: 9}\n")
    assert load_config(tmp_path / "c.yaml").environment.options == {"num_train": 9}


def test_numbers_too_large_for_their_type() -> None:
    assert error(None, "sigma=" + "9" * 400).startswith("sigma must be a finite number, got 999")
    assert error(None, "num_tasks=" + "9" * 5000).startswith("num_tasks must be a whole number, got '999")


def test_a_date_is_a_text() -> None:
    for name in ("2026-11-29", "2026-13-45", "2026-11-29 10:00:00"):
        assert load_config(None, [f"run.name={name}"]).run.name == name


def test_a_merge_key_may_be_overridden(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("optimizer: &a {lr: 0.1}\nrollout: {}\n")
    (tmp_path / "d.yaml").write_text("update: &u {epochs: 2}\nreward: {scale: 2, <<: {scale: 3}}\n")
    assert load_config(tmp_path / "c.yaml").optimizer.lr == 0.1
    assert load_config(tmp_path / "d.yaml").reward.scale == 2


def test_a_run_name_that_no_file_system_takes() -> None:
    for name in ("x" * 201, "门" * 67):
        assert error(None, f"run.name={name}").startswith("run.name must be at most 200 bytes long, got ")


def test_what_is_given_stays_out_of_the_bundle() -> None:
    """A bundle may hold a mapping; one run's template must not reach the next one."""
    before = dict(ALGORITHMS["react"]["prompts.templates"])
    assert (
        make_config({"algorithm": "react", "prompts": {"templates": {"parse_error": "x"}}}).prompts.templates != before
    )
    assert ALGORITHMS["react"]["prompts.templates"] == before
    assert make_config({"algorithm": "react"}).prompts.templates == before
