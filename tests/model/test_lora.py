"""Adapters: nothing at first, off is the reference, merged is the policy; what is frozen stays in every bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fakes import FakeEncoder, GuessTaskSet
from processes import run_ranks
from safetensors.torch import load_file
from test_resume import OPTIONS, assert_close_run, assert_same_run
from tiny import batch_of, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

import hsg.collector
from hsg.config.loading import make_config
from hsg.config.options import Config, LoraConfig
from hsg.model.lora import adapters_off, add_adapters, check_peft, frozen_line, frozen_share, merged
from hsg.model.models import score
from hsg.ranks.distributed import Distributed
from hsg.run.checkpoint import newest_checkpoint, read_state
from hsg.run.tracking import RunFolder
from hsg.trainer import Trainer

pytest.importorskip("peft")

LORA = {"rank": 4, "alpha": 8.0}


def changed(model: Any) -> Any:
    """Adapters that do something."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2"])
def test_off_is_the_base_and_merged_is_the_policy(kind: str) -> None:
    """GPT-2 keeps its matrices transposed."""
    plain, model = tiny_model(kind), tiny_model(kind)
    ids = torch.randint(97, (2, 9))
    add_adapters(model, LoraConfig(**LORA), seed=3)
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)  # B is 0
    policy = changed(model)(input_ids=ids).logits
    assert (policy - plain(input_ids=ids).logits).abs().max() > 1e-3
    with adapters_off(model):
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert torch.equal(model(input_ids=ids).logits, policy)
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())
    again = tiny_model(kind, seed=5)
    again.load_state_dict(merged(model, model.state_dict()))
    torch.testing.assert_close(again(input_ids=ids).logits, policy, rtol=1e-9, atol=1e-9)


def test_only_the_layers_that_are_named() -> None:
    one, two = tiny_model("qwen2"), tiny_model("qwen2")
    for model in (one, two):
        add_adapters(model, LoraConfig(**LORA, targets=("q_proj", "down_proj")), seed=7)
    names = {name.split(".")[-4] for name, p in one.named_parameters() if p.requires_grad}
    assert names == {"q_proj", "down_proj"}
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    every = tiny_model("qwen2")
    add_adapters(every, LoraConfig(**LORA), seed=7)
    names = {name.split(".")[-4] for name, p in every.named_parameters() if p.requires_grad}
    assert names == {f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")}


@pytest.mark.parametrize(
    "wrong",
    [
        "no_proj",
        "lm_head",
        "embed_tokens",
        "layers",
        "mlp",
        "self_attn",
        "input_layernorm",
        "proj",
        "layers.9.self_attn.q_proj",
    ],
)
def test_a_name_that_is_of_no_linear_layer_is_refused(wrong: str) -> None:
    """Alone or beside a good one: peft would say so at length, or train without it and say nothing."""
    for targets in ((wrong,), ("q_proj", wrong)):
        with pytest.raises(ValueError, match=f"^model.lora.targets must be names of .* got \\['{wrong}'\\]"):
            add_adapters(tiny_model("qwen2"), LoraConfig(**LORA, targets=targets), seed=0)


def test_a_layer_by_its_whole_name() -> None:
    model = tiny_model("qwen2")
    add_adapters(model, LoraConfig(**LORA, targets=("layers.0.self_attn.q_proj",)), seed=0)
    assert [n.split(".lora_")[0] for n, p in model.named_parameters() if p.requires_grad] == [
        "model.layers.0.self_attn.q_proj"
    ] * 2


def test_without_peft_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_peft(LoraConfig())
    with pytest.raises(ValueError, match=r"model.lora.rank must be 0 without peft, got 4; pip install hsg\[peft\]"):
        check_peft(LoraConfig(**LORA))


def test_gradients_reach_the_adapters_alone() -> None:
    model = changed(tiny_model("qwen2"))
    add_adapters(model, LoraConfig(**LORA), seed=3)
    logprobs, _ = score(changed(model), batch_of([[1, 2, 3, 4]], [[False, True, True]]))
    logprobs.sum().backward()
    assert all((p.grad is not None) == ("lora_" in name) for name, p in model.named_parameters())


def moe(kind: str, seed: int = 0) -> Any:
    """A tiny mixture of experts whose matrices stand in one tensor."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 16,
        "initializer_range": 0.3, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **sizes)
    # The grouped product of the other way to compute experts knows no float64.
    ways = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_config(config, **ways).to(torch.float64).eval()


EXPERTS = ["mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "olmoe"]


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_adapted_too(kind: str) -> None:
    """Each expert of a fused tensor by its own two matrices: against the weights that a slow loop adds up."""
    plain, model = moe(kind), moe(kind)
    ids = torch.randint(97, (2, 9))
    add_adapters(model, LoraConfig(**LORA), seed=3)
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    policy = changed(model)(input_ids=ids).logits
    adapted = {name.split(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert any("experts" in name for name in adapted)
    with adapters_off(model):
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    whole = merged(model, model.state_dict())
    again = moe(kind, seed=5)
    again.load_state_dict(whole)
    torch.testing.assert_close(again(input_ids=ids).logits, policy, rtol=1e-9, atol=1e-9)
    moved = [
        n for n, p in plain.named_parameters() if ".experts." in n and p.ndim == 3 and not torch.equal(p, whole[n])
    ]
    assert len(moved) == 4  # two tensors of experts' matrices in two layers
    assert all((plain.get_parameter(n)[e] != whole[n][e]).any() for n in moved for e in range(4))


@pytest.mark.parametrize("kind", EXPERTS)
def test_what_no_adapter_reaches_is_told(kind: str) -> None:
    """Routers alone: a few numbers per expert."""
    model = moe(kind)
    add_adapters(model, LoraConfig(**LORA), seed=3)
    share, names = frozen_share(model)
    matrices = {n: p.numel() for n, p in moe(kind).named_parameters() if p.ndim > 1 and not n.endswith("bias")}
    inner = {n: size for n, size in matrices.items() if "embed" not in n and "lm_head" not in n}
    routers = sum(size for n, size in inner.items() if n.endswith(("mlp.gate.weight", "router.weight")))
    assert routers
    assert share == pytest.approx(routers / sum(inner.values()))
    assert names in (["mlp.gate"], ["mlp.router"])
    only = moe(kind)
    add_adapters(only, LoraConfig(targets=("q_proj",), **LORA), seed=3)
    share, names = frozen_share(only)
    assert share > 0.6
    assert any("experts" in name for name in names)
    assert f"; {share:.1%} stay frozen: self_attn.k_proj, " in frozen_line(only)


def test_of_a_dense_model_nothing_is_left_out() -> None:
    model = tiny_model("llama")
    add_adapters(model, LoraConfig(**LORA), seed=3)
    assert frozen_share(model) == (0.0, [])
    assert frozen_line(model) == ""


# ------------------------------------------------------------------------------------------------------------ whole runs


def options(folder: Path, guesser_folder: Path, **more: Any) -> dict[str, Any]:
    own = {"model": {"path": str(guesser_folder), "lora": LORA}, "run": {"dir": str(folder)}}
    short = {"train": {"iterations": 2}, "evaluation": {}, "optimizer": {"lr": 0.05}}
    return {**OPTIONS, **short, **own, **more}


def trainer_of(config: Config, run: RunFolder | None, path: str, resume: Path | None = None) -> Trainer:
    return Trainer(config, GuessTaskSet(), path, Distributed(), run, resume=resume)


@pytest.mark.parametrize("judge", ["self", "reference"])
def test_a_run_trains_the_adapters_alone(
    judge: str, guesser_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a KL to the model without them; what is saved is one model, and the run goes on exactly."""
    monkeypatch.setattr(hsg.collector, "load_encoder", lambda *_: FakeEncoder())
    given = options(tmp_path, guesser_folder, judge={"max_tokens": 12, "model": judge})
    config = make_config(given)
    run = RunFolder(config, "r")
    trainer = trainer_of(config, run, str(guesser_folder))
    assert trainer.reference is not None
    assert trainer.reference.model is trainer.model  # no second copy
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert trainer.train() == 2
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    assert set(trainer.learner.state_dict()["moments"]) == {name for name in before if "lora_" in name}

    checkpoint = newest_checkpoint(run.path, ("adapters",))
    assert checkpoint is not None
    ids = torch.tensor([[5, 6, 7, 8]])
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint / "model").eval()
    torch.testing.assert_close(loaded(input_ids=ids).logits, trainer.model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    assert not any("lora" in name for name in load_file(checkpoint / "model" / "model.safetensors"))

    middle = run.path / "checkpoints" / "iteration_000001"
    resumed = trainer_of(config, None, str(guesser_folder), middle)
    assert resumed.train() == 2
    for (name, one), other in zip(trainer.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert set(read_state(checkpoint)["adapters"]) == {name for name in before if "lora_" in name}
    for each in (trainer, resumed):
        each.close()


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["gathered", "sharded"])
def test_sharded_ranks_do_what_one_does_and_go_on(weights: str, guesser_folder: Path, tmp_path: Path) -> None:
    """Two ranks with FSDP2 against one; killed in the second iteration and resumed, every bit is as if nothing had happened."""
    given = options(
        tmp_path,
        guesser_folder,
        judge={"max_tokens": 12, "model": "reference"},
        train={"iterations": 6},
        evaluation={"final": True, "num_tasks": 4},
    )
    given["model"]["dtype"] = "float64"
    given["optimizer"] = {"lr": 1e-3}  # larger steps make other trajectories of a rounding
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(given))

    def run(name: str, *overrides: str, resume: str = "none", **more: Any) -> Any:
        sets = [part for item in (f"run.name={name}", *overrides) for part in ("--set", item)]
        return run_ranks(["--config", str(tmp_path / "c.yaml"), *sets, "--resume", resume], tmp_path, **more)

    sharded = ["distributed.sharding=full", f"rollout.weights={weights}"]
    assert run("alone").status == [0]
    done = run("two", *sharded, num_ranks=2)
    assert done.status == [0, 0], done.output[-3000:]
    assert_close_run(tmp_path / "alone", tmp_path / "two")
    assert run("killed", *sharded, num_ranks=2, kill=("optimizer_step", 6)).status[0] == -9
    done = run("killed", *sharded, num_ranks=2, resume="auto")
    assert done.status == [0, 0], done.output[-3000:]
    assert_same_run(tmp_path / "two", tmp_path / "killed")
