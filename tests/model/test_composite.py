"""Composite checkpoints: the text part says what the whole says, is trained alone, and is saved as the whole again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fakes import FakeEncoder, GuessTaskSet
from safetensors.torch import load_file
from test_resume import OPTIONS
from transformers import AutoModelForCausalLM, AutoTokenizer

import hsg.collector
from hsg.config.loading import make_config
from hsg.config.options import LoraConfig, ModelConfig
from hsg.model.composite import text_part
from hsg.model.lora import add_adapters, merged
from hsg.model.models import load_model
from hsg.ranks.distributed import Distributed
from hsg.run.checkpoint import newest_checkpoint, save_model
from hsg.run.tracking import RunFolder
from hsg.trainer import Trainer

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.3,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2, "intermediate_size_mlp": 48,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2,
    "num_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 32, "vision_output_dim": 32, "head_dim": 8,
}  # fmt: skip
KINDS = {
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text"),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral"),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl_text"),  # its text part is no class of transformers
}
AUTO = ("gemma3", "qwen3_5")
"""Those that transformers' AutoModelForCausalLM knows; of the others it refuses the hub's own folder, too."""


def composite(kind: str, vocab_size: int, seed: int = 0) -> Any:
    """A tiny random model of that kind, images and all."""
    name, text = KINDS.get(kind, ("Llama4ForConditionalGeneration", "llama4_text"))
    cls = getattr(transformers, name)
    torch.manual_seed(seed)
    config = cls.config_class(
        text_config={**TEXT, "model_type": text, "vocab_size": vocab_size}, vision_config=dict(VISION)
    )
    return cls(config).float().eval()


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(kind: str, guesser_folder: Path, tmp_path: Path) -> Path:
    """A hub folder of that kind: the whole model, a chat tokenizer, and the file that prepares images."""
    tokenizer = AutoTokenizer.from_pretrained(guesser_folder)
    model = composite(kind, len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path / "hub")
    tokenizer.save_pretrained(tmp_path / "hub")
    (tmp_path / "hub" / "preprocessor_config.json").write_text('{"image_mean": [0.5]}', encoding="utf-8")
    return tmp_path / "hub"


def loaded(cls: Any, folder: Path) -> Any:
    """A model of that class, with no key missing and none too many."""
    model, told = cls.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    return model.eval()


def check_checkpoint(kind: str, folder: Path, saved: Path, text: Any) -> None:
    """The class that the hub folder names loads it, it says what the trained text part says, and sees as before."""
    (name,) = json.loads((saved / "config.json").read_text(encoding="utf-8"))["architectures"]
    assert name == KINDS[kind][0]
    ids = torch.tensor([[5, 6, 7, 8]])
    whole = loaded(getattr(transformers, name), saved)
    torch.testing.assert_close(
        whole(input_ids=ids, use_cache=False).logits, text(input_ids=ids).logits, rtol=1e-4, atol=1e-4
    )
    if kind in AUTO:
        auto = loaded(AutoModelForCausalLM, saved)
        torch.testing.assert_close(
            auto(input_ids=ids, use_cache=False).logits, text(input_ids=ids).logits, rtol=1e-4, atol=1e-4
        )
    before, after = load_file(folder / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys()
    carried = [key for key in before if "vis" in key or "projector" in key]
    assert carried
    assert all(torch.equal(before[key], after[key]) for key in carried)
    assert (saved / "preprocessor_config.json").read_text(encoding="utf-8") == '{"image_mean": [0.5]}'


def test_the_text_part_is_the_whole_without_images(kind: str, folder: Path) -> None:
    whole = loaded(getattr(transformers, KINDS[kind][0]), folder)
    text, _ = load_model(ModelConfig(path=str(folder)))
    ids = torch.tensor([[5, 6, 7, 8, 9, 4]])
    assert torch.equal(text(input_ids=ids).logits, whole(input_ids=ids, use_cache=False).logits)
    assert text.config.get_text_config() is text.config
    assert all(p.requires_grad for p in text.parameters())
    assert not any("vis" in name for name, _ in text.named_parameters())


def test_what_is_saved_loads_as_the_hub_says(kind: str, folder: Path, tmp_path: Path) -> None:
    text, tokenizer = load_model(ModelConfig(path=str(folder)))
    with torch.no_grad():
        for parameter in text.parameters():
            parameter.mul_(1.1)
    save_model(tmp_path / "saved", text, tokenizer)
    check_checkpoint(kind, folder, tmp_path / "saved", text)


def test_adapters_are_merged_into_the_whole(kind: str, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    text, tokenizer = load_model(ModelConfig(path=str(folder)))
    add_adapters(text, LoraConfig(rank=2, alpha=4.0), seed=1)
    with torch.no_grad():
        for name, parameter in text.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    save_model(tmp_path / "saved", text, tokenizer, weights=merged(text, text.state_dict()))
    check_checkpoint(kind, folder, tmp_path / "saved", text)


def test_a_whole_causal_model_inside_is_taken_as_it_is() -> None:
    """Llama 4's language model has a head of its own."""
    whole = composite("llama4", 97)
    text = text_part(whole)
    assert type(text).__name__ == "Llama4ForCausalLM"
    assert text is whole.language_model
    assert text.whole.prefixes == [("", "language_model")]


def test_a_plain_model_is_no_composite() -> None:
    config = transformers.LlamaConfig(**{**TEXT, "vocab_size": 97})
    model = transformers.LlamaForCausalLM(config)
    assert text_part(model) is model
    assert not hasattr(model, "whole")


@pytest.mark.parametrize("kind", ["mistral3"])
def test_a_run_trains_the_text_alone(kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it saves is the whole, and a second run goes on from that."""
    monkeypatch.setattr(hsg.collector, "load_encoder", lambda *_: FakeEncoder())
    own = {"model": {"path": str(folder)}, "run": {"dir": str(tmp_path)}, "train": {"iterations": 1}}
    config = make_config({**OPTIONS, "evaluation": {}, **own})
    run = RunFolder(config, "r")
    trainer = Trainer(config, GuessTaskSet(), str(folder), Distributed(), run)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert trainer.train() == 1
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    checkpoint = newest_checkpoint(run.path)
    assert checkpoint is not None
    check_checkpoint(kind, folder, checkpoint / "model", trainer.model)
    again, _ = load_model(ModelConfig(path=str(checkpoint / "model")))
    for (name, one), other in zip(trainer.model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name
    trainer.close()
