"""The nano model and its tokenizer."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import NANO, TEXTS, nano_folder

from hsg.config.options import ModelConfig, NanoConfig
from hsg.model.models import load_model, load_tokenizer
from hsg.model.nano import TAGS, build_nano, build_tokenizer

MESSAGES = [
    {"role": "user", "content": "Find the key.\n1 <action>?"},
    {"role": "assistant", "content": "<action>open trunk</action>"},
    {"role": "user", "content": "The trunk is empty."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return nano_folder(tmp_path_factory.mktemp("nano"))


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(folder).iterdir()}


def test_the_same_texts_give_the_same_bytes_and_another_seed_other_weights(folder, tmp_path):
    assert digests(nano_folder(tmp_path / "again")) == digests(folder)
    other = digests(build_nano(TEXTS, NANO, tmp_path / "other", seed=1))
    assert {name for name in other if other[name] != digests(folder)[name]} == {"model.safetensors"}


@pytest.mark.slow
def test_the_same_texts_give_the_same_bytes_in_another_process(folder, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from tiny import nano_folder; "
    subprocess.run([sys.executable, "-c", code + f"nano_folder({str(tmp_path)!r})"], check=True)
    assert digests(tmp_path) == digests(folder)


def test_pad_is_not_end_and_every_tag_is_one_ordinary_token(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    for tag in TAGS:
        assert len(tokenizer.encode(tag)) == 1
        assert tag not in tokenizer.all_special_tokens
        assert tokenizer.decode(tokenizer.encode(tag), skip_special_tokens=True) == tag


def test_any_text_survives_the_tokenizer(folder):
    tokenizer = load_tokenizer(folder)
    for text in ["", "  two  spaces ", "naïve 東京 🙂\t\n", "<action>go</action>", "it 's , fine ."]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_chat_template_is_chatml_without_a_system_prompt_and_each_header_is_one_token(folder):
    tokenizer = load_tokenizer(folder)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nFind the key.\n1 <action>?<|im_end|>\n"
        "<|im_start|>assistant\n<action>open trunk</action><|im_end|>\n"
        "<|im_start|>user\nThe trunk is empty.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(tokenizer.encode("<|im_start|>assistant\n")) == 1


def test_model_has_the_configured_shape_and_no_unused_embeddings(folder):
    model, tokenizer = load_model(ModelConfig(path=str(folder)))
    assert model.config.model_type == "qwen2"
    assert model.get_input_embeddings().weight.shape == (len(tokenizer), NANO.hidden_size)
    assert len(tokenizer) <= NANO.vocab_size
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id]


def test_vocabulary_is_filled_when_the_texts_are_rich_enough():
    texts = ["".join(random.Random(i).choices("abcdefgh ", k=40)) for i in range(500)]
    assert len(build_tokenizer(texts, 600, 128)) == 600
    with pytest.raises(ValueError, match=r"warmstart\.nano\.vocab_size"):
        NanoConfig(vocab_size=200)


def test_a_mark_is_one_token_and_what_stands_between_marks_is_spelled_the_same():
    marks = (" [SEP] ", "click[", "]")
    names = ["".join(random.Random(i).choices("BDKLMAEO", k=6)) for i in range(40)]
    texts = [f"Page [SEP] {name} [SEP] red lamp [SEP] $5<action>click[{name}]</action>" for name in names for _ in "ab"]
    marked, plain = build_tokenizer(texts, 400, 128, marks=marks), build_tokenizer(texts, 400, 128)
    assert [len(marked.encode(mark)) for mark in marks] == [1, 1, 1]
    assert len(plain.encode(" [SEP] ")) > 1
    for name in names:
        between = marked.encode(name)
        assert marked.encode(f"Page [SEP] {name} [SEP] red")[2 : 2 + len(between)] == between
        assert marked.encode(f"click[{name}]")[1:-1] == between
    spelled = [plain.encode(f" {name} ") == plain.encode(f"[{name}]") for name in names]
    assert not any(spelled)
    phrases = build_tokenizer([texts[0]] * 9, 400, 128, num_phrases=3, marks=marks)
    assert {phrase for phrase in phrases.get_added_vocab() if phrase not in marks} >= {names[0], "red lamp", "Page"}
    assert "Page [SEP] " not in phrases.get_added_vocab()
