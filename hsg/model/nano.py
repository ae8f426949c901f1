"""Build the nano model from texts: a small byte-level BPE tokenizer and a Qwen2 model of random weights.

    texts -> tokenizer (256 bytes, 5 special tokens, 6 tags, merges) -> Qwen2 of NanoConfig -> Hugging Face folder

Turns are ChatML, but each header ("<|im_start|>user" and its newline) is one token: at a dozen tokens a turn, spelling
headers out would be a fifth of all the work.

The folder loads like any other model.  Deliberately absent: training (experiments/warmstart.py does that), a default
system prompt, an architecture of our own.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils.logging import disable_progress_bar

from hsg.config.options import NanoConfig

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
HEADERS = (f"{START}user\n", f"{START}assistant\n")
TAGS = tuple(f"<{slash}{name}>" for name in ("strategy", "action", "judgment") for slash in ("", "/"))
"""One token each, yet ordinary text: the policy writes them, and decoding keeps them."""

PHRASE = re.compile(r"[^\n.,:()]*[\n.,:()]+\s*|[^\n.,:()]+$")
"""Up to the next punctuation mark, line end or end of text: what an engine says again and again then costs few tokens."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int, num_phrases: int = 0, marks: Sequence[str] = ()
) -> Any:
    """A byte-level BPE tokenizer with ChatML turns, trained on `texts`; the same texts give the same tokenizer.

    num_phrases   how many of the most frequent phrases become one token each (added tokens, `vocab_size` not counted)
    marks         texts that are one token each too, and between which phrases stand
    """
    texts = list(texts)
    backend = Tokenizer(models.BPE())
    # AutoTokenizer gives a folder with a Qwen2 model Qwen2's rules, whatever the folder says; so they are the rules here.
    rules = Qwen2Tokenizer().backend_tokenizer
    backend.normalizer, backend.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=[PAD, START, END, *HEADERS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Tags are tokens already, so merges across or inside them would be wasted.
    backend.train_from_iterator(_pieces(texts, marks), trainer)
    own = [*TAGS, *marks, *frequent_phrases(texts, num_phrases, marks)]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START, *HEADERS],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def frequent_phrases(texts: Iterable[str], num_phrases: int, marks: Sequence[str] = ()) -> list[str]:
    """The phrases that stand for the most text: count times length, ties in alphabetical order."""
    counts = Counter(phrase for piece in _pieces(texts, marks) for phrase in PHRASE.findall(piece) if len(phrase) > 3)
    often = [phrase for phrase, count in counts.items() if count > 2]
    return sorted(often, key=lambda phrase: (-counts[phrase] * len(phrase), phrase))[:num_phrases]


def _pieces(texts: Iterable[str], marks: Sequence[str]) -> Iterator[str]:
    """What stands between tokens of their own."""
    own_tokens = re.compile("|".join(map(re.escape, (PAD, START, END, *TAGS, *marks))))
    return (piece for text in texts for piece in own_tokens.split(text))


def build_nano(texts: Iterable[str], nano: NanoConfig, folder: str | Path, *, seed: int = 0) -> Path:
    """Write tokenizer and randomly initialised model into `folder` and return it. Same arguments, same bytes."""
    folder = Path(folder)
    tokenizer = build_tokenizer(texts, nano.vocab_size, nano.max_position_embeddings, nano.num_phrases, nano.marks)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=nano.hidden_size,
        intermediate_size=nano.intermediate_size,
        num_hidden_layers=nano.num_layers,
        num_attention_heads=nano.num_heads,
        num_key_value_heads=nano.num_key_value_heads,
        max_position_embeddings=nano.max_position_embeddings,
        tie_word_embeddings=True,
        # The usual 0.02 is made for wide models; at 64 it keeps attention from copying (a strategy, say) for minutes.
        initializer_range=0.5 / math.sqrt(nano.hidden_size),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    disable_progress_bar()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
