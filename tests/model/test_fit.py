"""Settings found at the start: what is right is taken, what is not is passed over or refused in one line."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hsg.config.loading import load_config
from hsg.experiments.upkeep.zoo import build, make_model
from hsg.model import fit as fit_module
from hsg.model import probe as probe_module
from hsg.model.fit import Fit, asked_again, expected_fit, find_fit, fit_of, use_fit
from hsg.model.models import load_model
from hsg.model.probe import attention_of, shallow
from hsg.model.twin import make_twin, random_model
from hsg.run.build import load_policy


@pytest.fixture(autouse=True)
def nothing_found_before():
    fit_module._FOUND.clear()


def model_of(kind: str, attention: str = "sdpa", **more: Any) -> Any:
    config = AutoConfig.for_model(kind, **more)
    try:
        return make_twin(config, attention)
    except ValueError:
        return make_twin(config, "eager")


def options(*overrides: str) -> Any:
    return load_config(None, list(overrides))


@pytest.mark.parametrize(
    ("kind", "attention", "cache", "packing"),
    [
        ("llama", "sdpa", "on", "prefix"),
        ("gemma2", "eager", "on", "prefix"),  # its soft cap is no kernel's
        ("gpt_neo", "eager", "off", "off"),
        ("mpt", "eager", "on", "off"),
        ("bloom", "eager", "off", "off"),
        ("mixtral", "sdpa", "on", "prefix"),
        ("falcon_h1", "sdpa", "on", "off"),
        ("mamba", "eager", "steps", "off"),
    ],
)
def test_fastest_right_settings(kind, attention, cache, packing):
    fit = find_fit(model_of(kind), options())
    assert (fit.attention, fit.cache, fit.packing) == (attention, cache, packing)
    assert fit.gap < 1e-4
    # Whatever was passed over is said with its reason.
    for key, fastest in (("rollout.cache", "on"), ("update.packing", "prefix")):
        assert (fit.options[key] != fastest) == any(p.startswith(f"{key}={fastest} (") for p in fit.passed_over)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            "rollout.cache=on",
            r"rollout.cache must be a setting that is right for BloomForCausalLM, got on \(.*\); what was tried and works: "
            "model.attention=eager rollout.cache=off update.packing=off$",
        ),
        (
            "update.packing=plain",
            r"update.packing must be a setting .* got plain .*rollout.cache=off update.packing=off$",
        ),
        ("model.attention=sdpa", r"model.attention must be a setting .* got sdpa .* works: model.attention=eager "),
    ],
)
def test_what_is_asked_for_and_wrong_is_refused_with_what_works(asked, message):
    with pytest.raises(ValueError, match=message) as error:
        find_fit(model_of("bloom"), options(asked))
    assert "\n" not in str(error.value)


def test_what_is_asked_for_and_right_is_taken():
    fit = find_fit(model_of("llama"), options("rollout.cache=off", "update.packing=plain", "model.attention=eager"))
    assert str(fit) == "model.attention=eager rollout.cache=off update.packing=plain"
    assert fit.passed_over == ()


def test_without_training_packing_is_not_looked_at():
    fit = find_fit(model_of("bloom"), options("update.packing=prefix"), trains=False)
    assert fit.packing is None
    assert "packing" not in str(fit)


def plant(monkeypatch: Any, fault: str) -> None:
    """One fault of each kind that the probe is there for."""
    if fault == "cache":  # as if a key behind the query were seen
        from hsg.engine import generation

        right = generation.row_masks
        monkeypatch.setattr(generation, "row_masks", lambda *given: right(*given) * 0)
    elif fault == "packing":
        from hsg.engine import packing

        right_layer = packing._attention
        wrong = lambda *given, **more: (right_layer(*given, **more)[0] * 1.1, None)  # noqa: E731
        packing.AttentionInterface.register(packing.NAME, wrong)
        monkeypatch.setattr(packing, "_attention", right_layer)
    else:
        from hsg.engine import packing

        backward = packing._JoinedAttention.backward

        def doubled(ctx: Any, grad: torch.Tensor) -> Any:
            query, *others = backward(ctx, grad)
            return (query * 2, *others)

        monkeypatch.setattr(packing._JoinedAttention, "backward", staticmethod(doubled))


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("cache", "rollout.cache=off update.packing=prefix"),
        ("packing", "rollout.cache=on update.packing=off"),
        ("gradient", "rollout.cache=on update.packing=off"),
    ],
)
def test_a_fault_is_seen_where_it_is(monkeypatch, fault, expected):
    from hsg.engine import packing

    plant(monkeypatch, fault)
    try:
        fit = find_fit(model_of("llama"), options())
    finally:
        packing.AttentionInterface.register(packing.NAME, packing._attention)
    assert str(fit) == f"model.attention=sdpa {expected}"
    wrong = {"cache": "its log-probs are", "packing": "its log-probs are", "gradient": "its gradient is"}[fault]
    assert f"({wrong} not th" in fit.passed_over[0]


def test_packing_is_not_for_models_that_do_not_follow_it():
    """An attention that drops what it does not know; a layer that looks along the sequence outside attention."""
    model = model_of("qwen2")
    layer = model.base_model.layers[0].self_attn
    forward = layer.forward
    layer.forward = lambda *args, layout=None, **kwargs: forward(*args, **kwargs)
    assert str(find_fit(model, options())).endswith("rollout.cache=on update.packing=off")
    fit_module._FOUND.clear()
    mixed = model_of("qwen2")
    mixed.base_model.layers[0].mlp.down_proj.register_forward_hook(lambda m, args, out: out.cumsum(1))
    assert str(find_fit(mixed, options())).endswith("rollout.cache=off update.packing=off")


@pytest.mark.parametrize("kind", ["mistral", "llama4_text"])
def test_long_windows_are_narrowed_for_the_probe_and_come_back(monkeypatch, kind):
    """A window of 4,096 that is not obeyed is seen on rows of 50 tokens."""
    from hsg.engine import generation
    from hsg.engine.reach import FULL

    model = model_of(kind)
    before = model.config.to_json_string()
    assert find_fit(model, options()).cache == "on"
    assert model.config.to_json_string() == before
    fit_module._FOUND.clear()
    monkeypatch.setattr("hsg.engine.reach.kind_reach", lambda config, kind: FULL)
    monkeypatch.setattr(generation, "row_masks", generation.row_masks)
    assert find_fit(model, options()).cache == "off"


def test_model_comes_back_as_it_was():
    model = model_of("qwen2").train()
    model.compute_dtype = torch.bfloat16
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    find_fit(model, options())
    assert torch.equal(torch.rand(3), expected), "the process's random numbers are not used"
    assert model.training
    assert model.compute_dtype == torch.bfloat16
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "olmo3", "jamba"])
def test_first_layers_answer_for_a_large_model(monkeypatch, kind):
    """A model of many layers, cut: the settings of the whole, every kind of layer in it, and nothing left changed."""
    model = model_of(kind)
    many = make_deep(model)
    layers = list(many.model.layers)
    with shallow(many) as cut:
        assert cut
        kinds = {type(m).__name__ for layer in layers for m in layer.modules()}
        assert {type(m).__name__ for layer in many.model.layers for m in layer.modules()} == kinds
        assert many.config.num_hidden_layers == len(many.model.layers) < len(layers)
    assert list(many.model.layers) == layers
    assert many.config.num_hidden_layers == len(layers)
    whole = find_fit(many, options())
    fit_module._FOUND.clear()
    monkeypatch.setattr(fit_module, "SMALL", 0)
    assert str(find_fit(many, options())) == str(whole)


def make_deep(model: Any) -> Any:
    """The same kind with three times the layers."""
    config = model.config
    values = config.to_dict() | {"num_hidden_layers": 3 * config.num_hidden_layers}
    for name, value in list(values.items()):
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            values[name] = value * 3
    return random_model(type(config).from_dict(values), str(config._attn_implementation))


def test_two_of_a_kind_are_tried_once(monkeypatch):
    """A run's reference and critic are its policy once more."""
    found = find_fit(model_of("llama"), options())
    monkeypatch.setattr(fit_module, "_search", lambda *given: pytest.fail("searched again"))
    assert find_fit(model_of("llama"), options()) is found


def test_fit_stays_with_its_model():
    model = model_of("llama")
    assert fit_of(model, options("rollout.cache=off")).decoding == {"use_cache": False, "stepwise": False}
    assert fit_of(model).decoding == {"use_cache": True, "stepwise": False}
    use_fit(model, Fit("eager", "steps", "off"))
    assert model.config._attn_implementation == "eager"
    assert fit_of(model, options()).decoding == {"use_cache": True, "stepwise": True}
    assert fit_of(model, options("rollout.cache=on")).decoding == {"use_cache": True, "stepwise": True}
    assert fit_of(model, options("rollout.cache=off")).decoding == {"use_cache": False, "stepwise": False}
    assert fit_of(model, options()).packing == "off"
    assert fit_of(model, options("update.packing=plain")).packing == "plain"


def test_line_says_settings_gap_and_what_was_passed_over():
    line = Fit("eager", "steps", "off", 2e-6, ("update.packing=prefix (why)",)).line("some/model")
    assert line == (
        "some/model runs with model.attention=eager rollout.cache=on update.packing=off (context token by token), tried now: "
        "log-probs within 2e-06 nats of its plain forward; not update.packing=prefix (why)"
    )


def test_kept_settings_are_asked_for_again():
    """What a resumed run does: not the fastest of this machine, but what it began with."""
    kept = Fit("eager", "off", "plain").options
    config = asked_again(options(), kept)
    assert str(find_fit(model_of("llama"), config)) == "model.attention=eager rollout.cache=off update.packing=plain"
    assert asked_again(config, None) is config
    # What the user sets now stays; flash-attention may be missing here.
    own = options("rollout.cache=on")
    assert asked_again(own, kept).rollout.cache == "on"
    assert asked_again(options(), {**kept, "model.attention": "flash_attention_2"}).model.attention == "auto"


def test_every_decoder_decodes_as_its_model_was_found_right() -> None:
    """A forgotten `fit` is silently wrong for models whose states take one token at a time."""
    root = Path(fit_module.__file__).parents[2]
    calls = [
        call
        for folder in ("hsg", "experiments")
        for path in (root / folder).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Decoder"
    ]
    assert len(calls) >= 4
    assert all("decoding" in ast.unparse(call) or "use_cache" in ast.unparse(call) for call in calls)


def test_unknown_attention_falls_back_at_loading_and_is_refused_by_name(tmp_path: Path):
    """`auto` finds eager; sdpa by name is refused with what works."""
    folder = build("gpt_neo", tmp_path / "gpt_neo")
    policy = load_policy(options(f"model.path={folder}"), folder, "cpu", trains=True)
    assert policy.model.config._attn_implementation == "eager"
    with pytest.raises(
        ValueError, match="model.attention must be a setting .* got sdpa .* works: model.attention=eager"
    ):
        load_policy(options(f"model.path={folder}", "model.attention=sdpa"), folder, "cpu")


def test_flash_attention_that_is_not_here_is_one_line(tmp_path: Path):
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("it is here")
    folder = build("llama", tmp_path / "llama")
    with pytest.raises(ValueError, match="got flash_attention_2 .* works: model.attention=sdpa") as error:
        load_policy(options(f"model.path={folder}", "model.attention=flash_attention_2"), folder, "cpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["llama", "bloom", "mamba", "mistral", "gemma3", "gpt2"])
def test_plan_expects_what_training_finds(tmp_path: Path, kind):
    """From a configuration alone: its twin's answer, and the same line where it is refused."""
    folder = build(kind, tmp_path / kind)
    for overrides in ([], ["update.packing=prefix"], ["rollout.cache=on"]):
        config = options(f"model.path={folder}", *overrides)
        answers = []
        for ask in (
            lambda config=config: expected_fit(AutoConfig.from_pretrained(folder), config),
            lambda config=config: find_fit(load_model(config.model)[0], config),
        ):
            fit_module._FOUND.clear()
            try:
                found = ask()
                answers.append((str(found), found.passed_over))
            except ValueError as error:
                answers.append(str(error))
        assert answers[0] == answers[1]


def test_plan_expects_nothing_of_what_it_cannot_make_tiny():
    class Strange:
        def get_text_config(self) -> Any:
            raise TypeError

    assert expected_fit(Strange(), options()) is None


def test_attention_of_a_model_comes_back_after_an_error():
    model = make_model("llama")
    with contextlib.suppress(RuntimeError), attention_of(model, "sdpa"):
        raise RuntimeError
    assert model.config._attn_implementation == "eager"


def test_probe_is_short():
    """A few short forwards: no row is longer than what is documented, whatever the windows are."""
    for kind in ("llama", "mistral", "gpt_neo"):
        plan = probe_module._Plan.of(model_of(kind))
        assert plan.prompt + 2 * plan.more + 9 <= probe_module.LONGEST
