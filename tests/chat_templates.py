"""How public models write a chat, as data in our own words, and small tokenizers that read it.

    start  [user[0] TEXT user[1]  reply[0] TEXT reply[1]] ...  user[0] TEXT user[1]  header -> the response begins

Written after the formats that the models document; no template of theirs is copied.  `Format.tokenizer()` is a real
tokenizer of a few hundred tokens with such a template, of the kind that the model has: bytes, or SentencePiece with or
without a space before a text.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Kind = Literal["bytes", "first", "always", "never", "prepend"]
Note = Literal["", "other end", "extra end", "thought", "blank before the end", "blank of the header"]
SAYINGS = [
    "Find the key. You are in the hall. Ways: attic, cellar. <strategy>Search the attic first.</strategy>",
    "The trunk is empty. 2 <action>open trunk</action> system user assistant User: Assistant: Today Date",
] * 9
DATE = "{date}"


@dataclass(frozen=True)
class Format:
    """One public format. Empty fields: there is nothing there.

    user, reply   what stands before and behind the text
    last          behind a reply that nothing follows; None: what stands behind every reply
    header        what the prompt ends on; None: reply[0].  What `reply[0]` has beyond it the model samples itself
    start         before the first turn; {date} in it is today's by the template's clock
    tokens        texts that are one token; rstrip: they take the blanks behind them
    eos           what the tokenizer says ends a text; `declared`: other ends that the generation config lists
    end           what a response ends on as it should
    trims         the template strips texts; `strict`: turns must alternate; `refuses_system`: no system turn;
    in_parts      a text must come as a list of parts; `forgets`: thoughts of earlier replies are left out
    note          what of a row differs from one render, as docs/templates.md has it
    """

    name: str
    user: tuple[str, str]
    reply: tuple[str, str]
    tokens: str
    eos: str
    end: str = ""
    start: str = ""
    last: str | None = None
    header: str | None = None
    declared: str = ""
    kind: Kind = "bytes"
    rstrip: bool = False
    trims: bool = False
    strict: bool = False
    refuses_system: bool = False
    in_parts: bool = False
    forgets: bool = False
    note: Note = ""

    @property
    def response_end(self) -> str:
        return self.end or self.eos

    @property
    def opened(self) -> str:
        return self.reply[0] if self.header is None else self.header

    @property
    def lead(self) -> str:
        """What the model samples before its reply."""
        return "" if self.note == "thought" else self.reply[0].removeprefix(self.opened)

    @property
    def template(self) -> str:
        """Jinja."""
        start = " ~ ".join(["strftime_now('%d %b %Y')" if part == DATE else repr(part) for part in _cut(self.start)])
        text = "message.content" if not self.in_parts else "message.content[0].text"
        said = f"({text} | trim)" if self.trims else text
        replied = f"{said}.split('</think>')[-1]" if self.forgets else said
        behind = repr(self.reply[1])
        if self.last is not None:
            behind = f"({self.last!r} if loop.last else {self.reply[1]!r})"
        system = "{{ raise_exception('no system turn') }}" if self.refuses_system else f"{{{{ {text} }}}}"
        turn = "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}"
        return (
            f"{{{{ {start or repr('')} }}}}{{% for message in messages %}}{turn if self.strict else ''}"
            f"{{% if message.role == 'system' %}}{system}"
            f"{{% elif message.role == 'user' %}}{{{{ {self.user[0]!r} + {said} + {self.user[1]!r} }}}}"
            f"{{% else %}}{{{{ {self.reply[0]!r} + {replied} + {behind} }}}}{{% endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {self.opened!r} }}}}{{% endif %}}"
        )

    def tokenizer(self) -> Any:
        backend = Tokenizer.from_str(_backend(self.kind))
        backend.add_special_tokens([AddedToken(t, normalized=False, rstrip=self.rstrip) for t in self.tokens.split()])
        made = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=self.eos, additional_special_tokens=self.tokens.split(),
            clean_up_tokenization_spaces=False,
        )  # fmt: skip
        made.chat_template = self.template
        return made


def _cut(text: str) -> list[str]:
    before, found, behind = text.partition(DATE)
    return [part for part in (before, found, behind) if part]


@functools.cache
def _backend(kind: Kind) -> str:
    """A tokenizer without special tokens, as JSON."""
    backend = Tokenizer(models.BPE(byte_fallback=kind != "bytes", fuse_unk=True, unk_token=None))
    if kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        if kind == "prepend":  # as Llama's was written before Metaspace could say when
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        strip = [] if kind == "never" else [decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        alphabet = [chr(i) for i in range(32, 127)] + ["\n", "▁"]
    special = [] if kind == "bytes" else [f"<0x{i:02X}>" for i in range(256)]
    words = [w for text in SAYINGS for w in text.split()]
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(special) + 60,
        initial_alphabet=alphabet,
        special_tokens=special,
        show_progress=False,
    )
    backend.train_from_iterator(words, trainer)
    return _without_added(backend.to_str())


def _without_added(text: str) -> str:
    """Bytes that stand for what no token has are no special tokens."""
    import json

    plain = json.loads(text)
    plain["added_tokens"] = []
    return json.dumps(plain)


def _chatml(name: str, eos: str = "<|im_end|>", **more: Any) -> Format:
    more = {"tokens": "<|endoftext|> <|im_start|> <|im_end|>", **more}
    return Format(
        name,
        ("<|im_start|>user\n", "<|im_end|>\n"),
        ("<|im_start|>assistant\n", "<|im_end|>\n"),
        eos=eos,
        end="<|im_end|>",
        **more,
    )


_SYSTEM = "<|im_start|>system\nBe helpful.<|im_end|>\n"
FORMATS: tuple[Format, ...] = (
    _chatml("qwen2.5", start=_SYSTEM),
    _chatml("qwen2.5-base", eos="<|endoftext|>", start=_SYSTEM),
    _chatml("qwen3", forgets=True),
    _chatml("qwen3-thinking", header="<|im_start|>assistant\n<think>\n", forgets=True, note="thought"),
    _chatml("qwen3-no-thoughts", header="<|im_start|>assistant\n<think>\n\n</think>\n\n", forgets=True, note="thought"),
    _chatml("lfm2", start="<|startoftext|>", tokens="<|startoftext|> <|endoftext|> <|im_start|> <|im_end|>"),
    _chatml("smollm2", start=_SYSTEM),
    _chatml("smollm3", start="<|im_start|>system\nToday Date: {date}\nReasoning: on<|im_end|>\n"),
    _chatml("olmo3", eos="<|endoftext|>", declared="<|im_end|>", start=_SYSTEM),
    _chatml("internlm2", start="<s>", kind="prepend", tokens="<s> </s> <|im_start|> <|im_end|>", declared="</s>"),
    _chatml("yi", kind="never", trims=False, tokens="<|endoftext|> <|im_start|> <|im_end|>"),
    _chatml("smolvlm", in_parts=True),
    Format("llama2", ("<s>[INST] ", " [/INST]"), (" ", " </s>"), "<s> </s>", "</s>", header="", kind="prepend", trims=True,
           strict=True, note="blank before the end"),
    Format("llama3.1", ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
           ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
           "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|>", "<|eot_id|>",
           start="<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: {date}\n\n<|eot_id|>",
           declared="<|end_of_text|> <|eom_id|>", trims=True),
    Format("llama4", ("<|header_start|>user<|header_end|>\n\n", "<|eot|>"),
           ("<|header_start|>assistant<|header_end|>\n\n", "<|eot|>"),
           "<|begin_of_text|> <|end_of_text|> <|header_start|> <|header_end|> <|eot|> <|eom|>", "<|eot|>",
           start="<|begin_of_text|>", declared="<|end_of_text|> <|eom|>", trims=True),
    Format("mistral-v1", ("[INST] ", " [/INST]"), ("", "</s>"), "<s> </s>", "</s>", start="<s>", kind="prepend", strict=True,
           refuses_system=True),
    Format("mistral-v3", ("[INST] ", "[/INST]"), (" ", "</s>"), "<s> </s> [INST] [/INST]", "</s>", start="<s>", header="",
           kind="always", strict=True),
    Format("mistral-tekken", ("[INST]", "[/INST]"), ("", "</s>"), "<s> </s> [INST] [/INST]", "</s>", start="<s>", strict=True),
    Format("gemma2", ("<start_of_turn>user\n", "<end_of_turn>\n"), ("<start_of_turn>model\n", "<end_of_turn>\n"),
           "<bos> <eos> <start_of_turn> <end_of_turn>", "<eos>", "<end_of_turn>", start="<bos>", kind="never", trims=True,
           strict=True, refuses_system=True),
    Format("gemma3", ("<start_of_turn>user\n", "<end_of_turn>\n"), ("<start_of_turn>model\n", "<end_of_turn>\n"),
           "<bos> <eos> <start_of_turn> <end_of_turn>", "<eos>", "<end_of_turn>", start="<bos>", declared="<end_of_turn>",
           kind="never", trims=True, strict=True),
    Format("gemma4", ("<|turn>user\n", "<turn|>\n"), ("<|turn>model\n", "<turn|>\n"),
           "<bos> <eos> <|turn> <turn|> <|channel> <channel|>", "<eos>", "<turn|>", start="<bos>", declared="<turn|>",
           kind="never", trims=True, forgets=True),
    Format("phi-3", ("<|user|>\n", "<|end|>\n"), ("<|assistant|>\n", "<|end|>\n"),
           "<s> <|endoftext|> <|user|> <|assistant|> <|end|>", "<|endoftext|>", "<|end|>", last="<|end|>\n<|endoftext|>",
           kind="prepend", rstrip=True),
    Format("phi-4", ("<|im_start|>user<|im_sep|>", "<|im_end|>"), ("<|im_start|>assistant<|im_sep|>", "<|im_end|>"),
           "<|endoftext|> <|im_start|> <|im_sep|> <|im_end|>", "<|im_end|>"),
    Format("glm-4", ("<|user|>\n", ""), ("<|assistant|>\n", ""), "<|endoftext|> [gMASK] <sop> <|user|> <|assistant|> <|observation|>",
           "<|endoftext|>", "<|user|>", start="[gMASK]<sop>", header="<|assistant|>", declared="<|user|> <|observation|>"),
    Format("glm-4.5", ("<|user|>\n", ""), ("<|assistant|>\n<think></think>\n", ""), "<|endoftext|> [gMASK] <sop> <|user|> "
           "<|assistant|> <|observation|> <think> </think>", "<|endoftext|>", "<|user|>", start="[gMASK]<sop>",
           header="<|assistant|>", declared="<|user|> <|observation|>", forgets=True),
    Format("gpt-oss", ("<|start|>user<|message|>", "<|end|>"), ("<|start|>assistant<|channel|>final<|message|>", "<|end|>"),
           "<|startoftext|> <|endoftext|> <|return|> <|call|> <|start|> <|message|> <|channel|> <|end|>", "<|return|>",
           start="<|start|>system<|message|>Today Date: {date}<|end|>", last="<|return|>", header="<|start|>assistant",
           declared="<|endoftext|> <|call|>", note="other end"),
    Format("deepseek-v2", ("User: ", "\n\n"), ("Assistant: ", "<｜end▁of▁sentence｜>"),
           "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", start="<｜begin▁of▁sentence｜>", header="Assistant:"),
    Format("deepseek-v3", ("<｜User｜>", ""), ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
           "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>", "<｜end▁of▁sentence｜>", start="<｜begin▁of▁sentence｜>"),
    Format("deepseek-r1", ("<｜User｜>", ""), ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
           "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>", "<｜end▁of▁sentence｜>", start="<｜begin▁of▁sentence｜>",
           header="<｜Assistant｜><think>\n", forgets=True, note="thought"),
    Format("command-r", ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
           ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
           "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
           start="<BOS_TOKEN>", trims=True, strict=True),
    Format("command-r7b", ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
           ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
           "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|START_RESPONSE|> "
           "<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>", start="<BOS_TOKEN>", header="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
    Format("olmo2", ("<|user|>\n", "\n"), ("<|assistant|>\n", "<|endoftext|>\n"), "<|endoftext|>", "<|endoftext|>",
           start="<|endoftext|>", last="<|endoftext|>"),
    Format("exaone3.5", ("[|user|]", "\n"), ("[|assistant|]", "[|endofturn|]\n"),
           "[BOS] [|system|] [|user|] [|assistant|] [|endofturn|]", "[|endofturn|]", start="[|system|]Be helpful.[|endofturn|]\n"),
    Format("granite3", ("<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>\n"),
           ("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"), "<|end_of_text|> <|start_of_role|> <|end_of_role|>",
           "<|end_of_text|>", start="<|start_of_role|>system<|end_of_role|>Today Date: {date}.<|end_of_text|>\n"),
    Format("zephyr", ("<|user|>\n", "</s>\n"), ("<|assistant|>\n", "</s>\n"), "<s> </s>", "</s>", kind="first"),
    Format("tinyllama", ("<|user|>\n", "</s>\n"), ("<|assistant|>\n", "</s>\n"), "<s> </s>", "</s>", kind="first",
           header="<|assistant|>"),
    Format("openchat", ("GPT4 Correct User: ", "<|end_of_turn|>"), ("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
           "<s> </s> <|end_of_turn|>", "<|end_of_turn|>", start="<s>", header="GPT4 Correct Assistant:", kind="first"),
    Format("vicuna", ("USER: ", " "), ("ASSISTANT: ", "</s>"), "<s> </s>", "</s>", start="<s>A chat. ", header="ASSISTANT:",
           kind="first"),
    Format("falcon", ("User: ", "\n\n"), ("Assistant: ", "\n\n"), "<|endoftext|>", "<|endoftext|>", header="Assistant:",
           note="extra end"),
    Format("falcon3", ("<|user|>\n", "\n"), ("<|assistant|>\n", "<|endoftext|>\n"), "<|endoftext|>", "<|endoftext|>",
           last="<|endoftext|>"),
    Format("nemotron-mini", ("<extra_id_1>User\n", "\n"), ("<extra_id_1>Assistant\n", "\n"), "<s> </s> <extra_id_0> <extra_id_1>",
           "</s>", "<extra_id_1>", start="<extra_id_0>System\n\n", kind="always", trims=True, note="blank before the end"),
    Format("ernie4.5", ("User: ", "\n"), ("Assistant: ", "<|end_of_sentence|>"), "<s> </s> <|begin_of_sentence|> <|end_of_sentence|>",
           "</s>", "<|end_of_sentence|>", start="<|begin_of_sentence|>", kind="first", note="blank of the header"),
    Format("hunyuan", ("<｜hy_User｜>", ""), ("<｜hy_Assistant｜>", "<｜hy_place▁holder▁no▁2｜>"),
           "<｜hy_begin▁of▁sentence｜> <｜hy_User｜> <｜hy_Assistant｜> <｜hy_place▁holder▁no▁2｜>", "<｜hy_place▁holder▁no▁2｜>",
           start="<｜hy_begin▁of▁sentence｜>"),
    Format("seed-oss", ("<seed:bos>user\n", "<seed:eos>"), ("<seed:bos>assistant\n", "<seed:eos>"), "<seed:bos> <seed:eos>",
           "<seed:eos>"),
)  # fmt: skip
