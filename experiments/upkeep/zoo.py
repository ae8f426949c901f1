"""`make zoo`: one tiny random model of each architecture, tried as a run tries its model at the start.

    built from its kind's own defaults, made tiny (hsg/model/twin.py) -> saved -> loaded as a policy -> settings found
    -> greedy tokens against `generate` -> one optimizer step

It prints the table of docs/models.md, a line as soon as it is known; `--write` puts it there.  Deliberately absent: encoders,
models that read pictures or sounds only, weights from a hub.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from hsg.batch import Row
from hsg.config.arguments import Parser
from hsg.config.loading import load_config
from hsg.engine.generation import Decoder
from hsg.engine.seeds import make_generator
from hsg.learner import Learner
from hsg.model.fit import Fit, fit_of
from hsg.model.nano import build_tokenizer
from hsg.model.policy import Policy
from hsg.model.twin import WIDTH, make_twin, random_model, tiny_config
from hsg.ranks.distributed import Distributed
from hsg.run.build import load_policy
from hsg.types import ACTION, Tokens

DOCS = Path(__file__).resolve().parents[2] / "docs" / "models.md"

FAMILIES = {
    "attention that is full and causal": "llama qwen2 qwen3 olmo olmo2 granite smollm3 helium arcee apertus cwm seed_oss glm "
    "glm4 exaone ernie4_5 hunyuan_v1_dense hyperclovax internlm3 jais2 nanochat stablelm nemotron cohere gemma persimmon "
    "diffllama bitnet phi",
    "with windows, chunks, caps or sinks": "mistral ministral ministral3 phi3 starcoder2 gemma2 gemma3_text gemma3n_text "
    "gemma4_text gpt_oss olmo3 cohere2 exaone4 granite_swa mimo_v2_flash vaultgemma llama4_text afmoe",
    "mixtures of experts": "mixtral qwen2_moe qwen3_moe olmoe flex_olmo granitemoe granitemoeshared deepseek_v2 deepseek_v3 "
    "minicpm3 glm4_moe glm4_moe_lite ernie4_5_moe hunyuan_v1_moe exaone_moe minimax_m2 phimoe dots1 solar_open "
    "cohere2_moe youtu jetmoe doge",
    "with states of their own": "mamba mamba2 falcon_mamba falcon_h1 bamba granitemoehybrid jamba nemotron_h qwen3_next "
    "qwen3_5_text qwen3_5_moe_text olmo_hybrid lfm2 lfm3 kimi_linear minimax recurrent_gemma rwkv xlstm",
    "text parts of larger models": "gemma3 qwen3_5",
    "older ones": "gpt2 gpt_neo gpt_neox gpt_neox_japanese gptj gpt_bigcode codegen opt bloom falcon mpt biogpt ctrl xglm "
    "openai-gpt",
}  # fmt: skip

MORE: dict[str, dict[str, Any]] = {
    "ministral": {"head_dim": 16},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gpt_neo": {"window_size": 16},
    "mistral": {"sliding_window": 16},
    "llama4_text": {"attention_chunk_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "jamba": {"use_mamba_kernels": False},
}
"""What the defaults of a kind leave open, or what is worth a look at its true size."""

VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2,
    "num_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": WIDTH,
}  # fmt: skip
"""Sizes of the part of a composite model that sees; nothing here asks it anything."""


@dataclass(frozen=True)
class Found:
    """What became of one architecture. `problem`: the one line that refuses it, or what is wrong with it."""

    name: str
    fit: Fit | None = None
    problem: str = ""
    wrong: bool = False  # not refused, and not right either
    seconds: float = 0.0

    def row(self) -> str:
        """Its line of the table."""
        if self.fit is None:
            return f"| `{self.name}` | {'WRONG' if self.wrong else 'refused'} | | | {_cell(self.problem)} |"
        cache = "on, by tokens" if self.fit.cache == "steps" else self.fit.cache
        noted = "; ".join(re.sub(r"^(\S+) \(", r"`\1` (", reason) for reason in self.fit.passed_over)
        return f"| `{self.name}` | {self.fit.attention} | {cache} | {self.fit.packing} | {_cell(noted)} |"


COLUMNS = ("architecture", "`model.attention`", "`rollout.cache`", "`update.packing`", "what is faster and not right")
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def names() -> list[str]:
    """Every architecture of the table, in its order."""
    return [name for family in FAMILIES.values() for name in family.split()]


def build(name: str, folder: Path) -> Path:
    """A folder with a tiny model of this kind and a chat tokenizer."""
    texts = ["Find the key. <strategy>Search the attic.</strategy> <action>open trunk</action>"] * 9
    build_tokenizer(texts, 300, 512).save_pretrained(folder)
    make_model(name).save_pretrained(folder)
    return folder


def make_model(name: str) -> Any:
    """A tiny random model of this kind; a composite one has all its parts."""
    config = AutoConfig.for_model(name, **MORE.get(name, {}))
    if config.get_text_config() is config:
        return make_twin(config)
    text = tiny_config(config)
    vision = {key: value for key, value in VISION.items() if key in config.vision_config.to_dict()}
    config = AutoConfig.for_model(name, text_config=text.to_dict(), vision_config=vision)
    return random_model(config, "eager")


def examine(name: str, folder: Path) -> Found:
    """One architecture, from building it to an optimizer step."""
    began = time.monotonic()
    config = load_config(None, [f"model.path={build(name, folder / name)}", "loss.kl_coef=0", "optimizer.lr=1e-3"])
    try:
        policy = load_policy(config, config.model.path, "cpu", trains=True)
    except ValueError as error:
        return Found(name, problem=str(error), seconds=time.monotonic() - began)
    problem = greedy_problem(policy) or step_problem(config, policy)
    if problem:
        return Found(name, problem=problem, wrong=True, seconds=time.monotonic() - began)
    return Found(name, fit_of(policy.model), seconds=time.monotonic() - began)


def greedy_problem(policy: Policy, count: int = 12) -> str:
    """ "" where greedy tokens of ragged rows are those that transformers' own `generate` gives each row alone."""
    model = policy.model
    ids = torch.randint(3, 300, (40,), generator=make_generator("zoo")).tolist()
    prompts = [ids, ids[:17]]
    decoder = Decoder(model, (), prompts, **fit_of(model).decoding)
    sampled = decoder.sample(
        [0, 1], temperatures=[0.0, 0.0], generators=[make_generator(i) for i in range(2)], max_new_tokens=[count, count]
    )
    for prompt, mine in zip(prompts, sampled, strict=True):
        with torch.no_grad():
            row = list(prompt)
            for token in mine.ids:
                logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1]
                if float(logits.max() - logits[token]) > 1e-3:  # two that are as likely may change places
                    return (
                        f"its greedy token after {len(row)} is {token}, and {int(logits.argmax())} of the plain forward"
                    )
                row.append(token)
    return ""


def step_problem(config: Any, policy: Policy) -> str:
    """ "" where an optimizer step runs, begins at ratio 1 and changes weights."""
    ids = torch.randint(3, 300, (3, 24), generator=make_generator("zoo", "rows"))
    decoder = Decoder(policy.model, (), ids.tolist(), **fit_of(policy.model).decoding)
    sampled = decoder.sample(
        [0, 1, 2], temperatures=[1.0] * 3, generators=[make_generator(i) for i in range(3)], max_new_tokens=[8, 5, 3]
    )
    rows = []
    for i, (prompt, mine) in enumerate(zip(ids.tolist(), sampled, strict=True)):
        mask = torch.tensor([False] * (len(prompt) - 1) + [True] * len(mine.ids))
        logprobs = torch.tensor([0.0] * (len(prompt) - 1) + list(mine.logprobs))
        tokens = Tokens(torch.tensor(prompt + list(mine.ids)), mask, logprobs, torch.ones(len(mask)))
        rows.append(Row(tokens, torch.where(mask, 1.0 - i, 0.0), ACTION, i))
    learner = Learner(config, policy.model, Distributed(), context_limit=512)
    before = policy.model.get_input_embeddings().weight.detach().clone()
    values = learner.update(rows, 0)
    if values["update/optimizer_steps"] != 1 or torch.equal(before, policy.model.get_input_embeddings().weight):
        return "an optimizer step changed nothing"
    return ""


def tour(asked: Sequence[str]) -> Iterator[Found]:
    """One after the other."""
    with tempfile.TemporaryDirectory() as folder:
        for name in asked:
            try:
                yield examine(name, Path(folder))
            except Exception as error:  # whatever a run would not have said in one line is wrong
                yield Found(name, problem=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}", wrong=True)


def summary(found: Sequence[Found]) -> str:
    refused = sum(f.fit is None and not f.wrong for f in found)
    wrong = sum(f.wrong for f in found)
    return f"{len(found)} architectures: {len(found) - refused - wrong} trained, {refused} refused, {wrong} wrong"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where an architecture is neither right nor refused."""
    parser = Parser(description="Which architectures can be trained, and in which settings.")
    parser.add_argument("names", nargs="*", help="architectures (default: all of the table)")
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    found = {}
    print(HEAD)
    for one in tour(options.names or names()):
        found[one.name] = one
        print(one.row(), flush=True)
    print(summary(list(found.values())))
    if options.write and not options.names:
        DOCS.write_text(with_tables(DOCS.read_text(encoding="utf-8"), found), encoding="utf-8")
    return int(any(one.wrong for one in found.values()))


MARKS = "<!-- make zoo: begin -->\n", "<!-- make zoo: end -->"


def with_tables(text: str, found: dict[str, Found]) -> str:
    """The page with a table for each family between its marks."""
    tables = [f"{summary(list(found.values()))} (transformers {transformers.__version__}).\n"]
    for title, family in FAMILIES.items():
        rows = [found[name].row() for name in family.split()]
        tables.append("\n".join([f"### {title[0].upper()}{title[1:]}\n", HEAD, *rows, ""]))
    begin, end = (text.index(mark) for mark in MARKS)
    return text[: begin + len(MARKS[0])] + "\n" + "\n".join(tables) + "\n" + text[end:]


if __name__ == "__main__":
    sys.exit(main())
