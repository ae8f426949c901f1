"""The planner: formulas against hand arithmetic, sizes against real models, memory against peaks measured on the CPU."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import nano_folder
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)  # fmt: skip

from hsg.batch import Row
from hsg.config.loading import load_config, make_config
from hsg.config.options import LoraConfig
from hsg.engine.generation import Decoder
from hsg.engine.seeds import make_generator
from hsg.experiments.upkeep.zoo import build
from hsg.learner import Learner
from hsg.model.folder import require_rows
from hsg.model.lora import add_adapters
from hsg.model.models import load_model
from hsg.planning.architecture import read_architecture
from hsg.planning.footprint import (
    Lengths,
    Setting,
    cache_bytes,
    footprint,
    layer_activations,
    lora_parameters,
    rows_of,
    setting_of,
    work,
)
from hsg.planning.plan import largest, main, make_plan
from hsg.planning.sizes import Architecture
from hsg.ranks.distributed import Distributed
from hsg.run.build import make_trained
from hsg.types import ACTION, Tokens

# D 8, I 16, 4 query heads and 2 key heads of size 2, V 100
SMALL = Architecture(3, 8, 16, 4, 2, 2, 100, 64, tied=True, qkv_bias=True)
LAYER = 8 * (8 + 4 + 4) + 8 * 8 + (8 + 4 + 4) + 3 * 8 * 16 + 2 * 8
ROOT = 100 * 8 + 8
ONE, EIGHT = Setting(1, 1, half=False), Setting(8, 8, half=True)


def test_sizes_by_hand() -> None:
    assert (SMALL.layer, SMALL.root, SMALL.parameters) == (LAYER, ROOT, 3 * LAYER + ROOT)
    assert replace(SMALL, tied=False).parameters == SMALL.parameters + 800
    for name, parameters in {
        "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304, "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512, "Qwen/Qwen3-4B": 4_022_468_096,
        "smollm2": 134_515_008,
    }.items():  # fmt: skip
        assert read_architecture(make_config({"model": {"path": name}})).parameters == parameters


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_sizes_are_those_of_the_models(kind: str) -> None:
    shape: dict[str, Any] = {
        "vocab_size": 90, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 3, "tie_word_embeddings": kind == "qwen2",
    }  # fmt: skip
    make: Any = {
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**shape)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=8)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**shape)),
    }
    model = make[kind]()
    found = Architecture.from_config(model.config.to_dict(), kind)
    assert found.parameters == sum(p.numel() for p in model.parameters())


def test_bytes_by_hand() -> None:
    """One process in float32, then eight ranks in bfloat16 with a reference."""
    given = {
        "rollout": {"max_cache_tokens": 200, "max_tokens": 16},
        "update": {"microbatch_tokens": 50},
        "num_tasks": 2,
    }
    config = make_config(
        {**given, "algorithm": "grpo", "num_strategies": 2, "num_rollouts": 3, "judge": {"enabled": False}}
    )
    size, parameters = footprint(SMALL, config, ONE), 3 * LAYER + ROOT
    assert (size.weights, size.gradients, size.moments) == (4 * parameters, 4 * parameters, 8 * parameters)
    assert (size.reference, size.critic, size.gathered, size.borrowed) == (0, 0, 0, 0)
    # Two times sixteen tokens a row, six of twelve rows at once; keys and values of 2 heads of size 2 in 3 layers.
    rows = rows_of(config, SMALL, 1, Lengths())
    assert (rows.at_once, rows.waves, rows.drawn) == (6, 2, 0)
    assert size.cache == 6 * 32 * 3 * (2 * 2) * (4 + 4)
    # Norms: 3 D each; q, attention, attention once more, k, v; log-sum-exp; 4 I. All float32.
    assert layer_activations(SMALL, ONE) == 4 * (2 * 3 * 8 + 3 * 8 + 2 * 4 + 4 + 4 * 16)
    assert size.activations == 50 * (3 * layer_activations(SMALL, ONE) + 2 * 4 * 8)
    assert size.flowing == 16 * 50 * 100 + 50 * 4 * 8 + 4 * 800  # logits, hidden states, the head's gradient
    assert size.held == 12 * parameters
    assert size.update == size.held + 4 * parameters + size.activations + size.flowing
    assert size.step == size.held + 2 * 4 * parameters
    assert size.peak == max(size.rollout, size.update, size.step)

    config = make_config({**given, "loss": {"kl_coef": 0.1}, "model": {"gradient_checkpointing": True}})
    size = footprint(SMALL, config, EIGHT)
    assert (size.weights, size.reference, size.moments) == (parameters // 2, parameters // 2, parameters)
    assert size.gathered == 2 * parameters
    assert cache_bytes(SMALL, EIGHT) == 3 * 4 * (2 + 2)
    assert size.activations == 50 * (2 * 8 * 3 + 2 * 2 * 8)
    assert size.borrowed == max(2 * (ROOT + 2 * LAYER) + 2 * ROOT + 6 * LAYER, 8 * ROOT)


def test_options_count() -> None:
    """Each option that has to do with memory shows in its part."""
    base = make_config({})

    def of(setting: Setting = EIGHT, **given: Any) -> Any:
        return footprint(SMALL, make_config(given), setting)

    assert of(distributed={"cpu_offload": True}).held == 0
    assert of(rollout={"weights": "sharded"}).gathered == 2 * (ROOT + 2 * LAYER)
    drawn = rows_of(base, SMALL, 2, Lengths(prompt=20)).drawn
    assert drawn == 2 * 32 * 64  # two tasks, sigma N candidates; a prompt of 20 and 64 new tokens stop at the context
    few = make_config({"num_tasks": 3, "num_strategies": 4, "num_rollouts": 4})
    # Whole tasks on 2 ranks, teams of two ranks on 6 and on 7 (one of three), of five on 16.
    assert [rows_of(few, SMALL, n, Lengths()).trajectories for n in (2, 3, 6, 7, 16)] == [32, 16, 8, 8, 4]
    short = make_config({"rollout": {"max_cache_tokens": 1}, "evaluation": {"final": True, "num_tasks": 9}})
    assert rows_of(short, SMALL, 2, Lengths()).at_once == 1
    assert footprint(SMALL, short, Setting(2, 2, half=True)).cache == 32 * 64 * cache_bytes(SMALL, EIGHT)
    tested = make_config({"num_rollouts": 1, "num_strategies": 1, "evaluation": {"final": True, "num_tasks": 90}})
    assert rows_of(tested, SMALL, 2, Lengths()).at_once == 45
    assert of(judge={"model": "reference"}).gathered == 2 * of().gathered
    body = 3 * LAYER + 800 + 8
    assert of(algorithm="ppo").critic == 16 * (body + 9)  # not sharded
    lora = make_config({"model": {"lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}}, "loss": {"kl_coef": 1.0}})
    assert lora_parameters(lora, SMALL) == 2 * 3 * ((8 + 8) + (16 + 8))
    size = footprint(SMALL, lora, ONE)
    assert (size.gradients, size.moments, size.reference) == (4 * 240, 8 * 240, 0)
    assert setting_of(base, 16) == Setting(16, 16, half=True)
    assert setting_of(make_config({"distributed": {"sharding": "hybrid"}}), 16).shards == 8
    assert setting_of(make_config({"distributed": {"sharding": "none"}}), 16, device="cpu") == Setting(
        16, 1, half=False
    )


def test_work_by_hand() -> None:
    config = make_config({
        "algorithm": "grpo", "num_tasks": 1, "num_strategies": 2, "num_rollouts": 1, "judge": {"enabled": False},
        "rollout": {"max_turns": 2, "max_action_tokens": 5, "max_tokens": 16, "streams": 1},
    })  # fmt: skip
    matrices = 3 * SMALL.layer_matrices
    done = work(SMALL, config, ONE)
    assert done.rollout_flops == 2 * matrices * 2 * 32 + 2 * 800 * 2 * 10
    assert done.update_flops == 3 * 2 * matrices * 2 * 32 + 3 * 2 * 800 * 2 * 10
    assert done.decode_bytes == 10 * (4 * (3 * LAYER + 800) + 2 * 16 * cache_bytes(SMALL, ONE))
    # An embedding that is not the head is not read; 2^24 logits and more are made twice; frozen weights cost one pass less.
    assert work(replace(SMALL, tied=False), config, ONE).decode_bytes == done.decode_bytes
    many = replace(SMALL, vocabulary=2**14)
    assert work(many, config, ONE).update_flops == 3 * 2 * matrices * 2 * 32 + 4 * 2 * 8 * 2**14 * 2 * 10
    lora = replace(config, model=replace(config.model, lora=LoraConfig(rank=2)))
    assert work(SMALL, lora, ONE).update_flops == 2 * (done.update_flops // 3)
    again = work(SMALL, replace(config, model=replace(config.model, gradient_checkpointing=True)), ONE)
    assert again.update_flops - done.update_flops == 2 * matrices * 2 * 32
    assert done.seconds(1e-12, 1e9) == (done.rollout_flops, done.update_flops)
    assert done.seconds(1e9, 1e-12)[0] == done.decode_bytes


def test_largest_that_fits() -> None:
    assert [largest(limit.__ge__, 1000) for limit in (0, 1, 7, 1000, 5000)] == [None, 1, 7, 1000, 1000]
    setting, lengths = Setting(1, 1, half=True), Lengths(turn=4)

    def planned(memory: float, **options: Any) -> Any:
        """The plan with these options beside max_tokens."""
        rollout = {"max_tokens": 8, **options.pop("rollout", {})}
        return make_plan(SMALL, make_config({"rollout": rollout, **options}), setting, memory, lengths)

    found = planned(4e6).microbatch
    for tokens, fits in ((found, True), (found + 1, False)):
        assert (planned(4e6, update={"microbatch_tokens": tokens}).bytes.update <= 4e6) == fits
    found = planned(4e5).cache_tokens
    for tokens, fits in ((found, True), (found + 1, False)):
        assert (planned(4e5, rollout={"max_cache_tokens": tokens}).bytes.rollout <= 4e5) == fits


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without weights: from a config.json, from a known name; what cannot be planned is one line."""
    config = Qwen2Config(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ["--tflops", "100", "--set"]
    assert main([*given, f"model.path={tmp_path}"]) == 0
    assert main([*given, f"model.path={tmp_path / 'config.json'}"]) == 0
    assert main([*given, "model.path=Qwen/Qwen2.5-7B-Instruct", "--gpus", "8", "--row-tokens", "8192"]) == 0
    shown = capsys.readouterr().out
    assert "Qwen/Qwen2.5-7B-Instruct: 7.62 B parameters, 8 GPUs, sharded over 8, bfloat16" in shown
    assert re.search(r"weights +3\.55 GiB", shown)  # 4 x 7.6156e9 / 8 / 2^30
    assert re.search(r"gathered +14\.19 GiB", shown)
    assert main([*given, "model.path=nano", "--gpus", "1", "8"]) == 0
    assert capsys.readouterr().out.count("\n") == 4
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": 8}')
    for bad, words in (
        ([f"model.path={tmp_path}"], "model.path must be a model that transformers can load"),
        (["model.path=./no/such/model"], "model.path must be an existing folder, a hub id or one of nano, smollm2"),
        (["model.path=nano", "--gpus", "0"], "--gpus must be > 0, got 0"),
        (["model.path=nano", "--reserve", "1"], "--reserve must be in [0, 1), got 1.0"),
        (["model.path=nano", "--no-such"], "unrecognized arguments: --no-such"),
    ):
        assert main([*given, *bad]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def test_the_rate_of_a_processor_is_not_taken_for_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--set", "model.path=Qwen/Qwen2.5-7B-Instruct"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no time of an iteration: this machine has no GPU to time; --tflops")
    assert main(["--set", "model.path=Qwen/Qwen2.5-7B-Instruct", "--tflops", "300"]) == 0
    assert "300 TFLOP/s, as given" in capsys.readouterr().out.splitlines()[-1]


def test_tables_of_the_docs_are_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(root)
    text = (root / "docs" / "scaling.md").read_text(encoding="utf-8")
    commands = re.findall(r"^(?:python -m hsg.planning.plan|\$ hsg plan) (.*)$", text, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        assert main(command.split()) == 0
        assert capsys.readouterr().out.strip() in text, command


# -------------------------------------------------------------------------------------------------- measured on the CPU


class Live(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes, until the last tensor on it is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._held: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._held:
                    self._hold(storage)
        return out

    def _hold(self, storage: Any) -> None:
        size, key = storage.nbytes(), storage._cdata

        def gone(_: Any) -> None:
            self.now -= size
            del self._held[key]

        self._held[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def measured_peak(function: Callable[[], Any]) -> int:
    """The most bytes of tensors within the call, over what was there before.

    Not torch's profiler: on a busy machine it loses some of its events.
    """
    with Live() as live:
        function()
    return live.peak


def make_model(half: bool, checkpointing: bool = False) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.compute_dtype = torch.bfloat16 if half else torch.float32
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(("half", "rank"), [(False, 0), (True, 0), (False, 4), (True, 4)])
def test_update_peaks_within_15_percent(half: bool, rank: int, checkpointing: bool) -> None:
    """An optimizer step of two micro-batches: gradients of the first are there while the second goes. rank: of adapters."""
    tokens, length = 1024, 256
    model = make_model(half, checkpointing)
    architecture = Architecture.from_config(model.config.to_dict(), "qwen2")
    if rank:
        pytest.importorskip("peft")
        add_adapters(model, LoraConfig(rank=rank), seed=0)
    config = make_config(
        {
            "update": {"microbatch_tokens": tokens},
            "rollout": {"max_logprob_gap": 100.0},
            "model": {"gradient_checkpointing": checkpointing, "lora": {"rank": rank}},
        }
    )
    learner = Learner(config, model, Distributed(), context_limit=512)
    learner._gaps = None
    mask = torch.arange(length - 1) >= 4
    zeros, ones = torch.zeros(length - 1), torch.ones(length - 1)
    rows = [
        Row(Tokens(torch.randint(1024, (length,)), mask, zeros - 7, ones), mask.float(), ACTION, i)
        for i in range(2 * tokens // length)
    ]
    model.train()
    peak = measured_peak(lambda: learner.optimizer_step(rows, {"update/skipped_nonfinite": 0.0}))
    planned = footprint(architecture, config, Setting(1, 1, half), Lengths(row=length), foreach=False)
    # The weights were there before; moments are made at the end.
    expected = planned.update - planned.weights - planned.moments
    print(f"measured {peak / 1e6:.2f} MB, planned {expected / 1e6:.2f} MB: {expected / peak:.3f}")
    assert expected == pytest.approx(peak, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [8, 24])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_rollout_peaks_within_15_percent(half: bool, num_rows: int) -> None:
    """Rows that fill the context, turn by turn: 64 ids, then 32 sampled and 96 observed."""
    model = make_model(half).eval()
    context, turn = 512, 96

    def play() -> None:
        decoder = Decoder(model, [], [[(i + k) % 1024 for k in range(64)] for i in range(num_rows)])
        rows = range(num_rows)
        while (length := len(decoder.rows[0])) < context:
            decoder.sample(
                rows,
                temperatures=[1.0] * num_rows,
                generators=[make_generator(i, length) for i in rows],
                max_new_tokens=[min(32, context - length)] * num_rows,
            )
            for row in rows if len(decoder.rows[0]) + turn < context else ():
                decoder.append(row, [(row + k) % 1024 for k in range(turn)])

    peak = measured_peak(play)
    config = make_config({"num_tasks": 1, "num_strategies": 1, "num_rollouts": num_rows, "rollout": {"streams": 1}})
    architecture = Architecture.from_config(model.config.to_dict(), "qwen2")
    planned = footprint(architecture, config, Setting(1, 1, half), Lengths(turn=turn, prompt=64))
    expected = planned.rollout - planned.held
    print(f"measured {peak / 1e6:.2f} MB, planned {expected / 1e6:.2f} MB: {expected / peak:.3f}")
    assert expected == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize(("text", "said"), [
    ('{"text_config": 3}', "model.path must be a model's config.json"),
    ("[" * 100_000, "model.path must be a model's config.json"),
    ({"num_attention_heads": 0}, "num_attention_heads of model.path must be a whole number > 0, got 0"),
    ({"hidden_size": -1}, "hidden_size of model.path must be a whole number > 0"),
    ({"num_hidden_layers": True}, "num_hidden_layers of model.path must be a whole number > 0"),
    ({"num_key_value_heads": "x"}, "num_key_value_heads of model.path must be a whole number > 0"),
    ({"head_dim": 1.5}, "head_dim of model.path must be a whole number > 0"),
    ({"max_position_embeddings": -1}, "max_position_embeddings of model.path must be a whole number > 0"),
])  # fmt: skip
def test_odd_sizes_are_one_line(
    text: str | dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(text if isinstance(text, str) else json.dumps({**plain, **text}))
    assert main(["--tflops", "1", "--set", f"model.path={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "gemma3_text": {"sliding_window": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1": {
        "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
    },
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
}  # fmt: skip
SIZES = {
    "vocab_size": 330, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 2,
    "bos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_model_of_another_kind_is_counted(kind: str, tmp_path: Path) -> None:
    """Exactly as many numbers as it has; adapters of rank 3 as many as a run would train."""
    of = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    of.save_pretrained(tmp_path)
    config = make_config({"model": {"path": str(tmp_path), "lora": {"rank": 3}}})
    planned = read_architecture(config)
    made = AutoModelForCausalLM.from_config(of)
    assert planned.parameters == sum(p.numel() for p in made.parameters())
    assert planned.num_layers == 3
    assert 0 < planned.used_matrices <= planned.layer_matrices
    assert (planned.used_matrices < planned.layer_matrices) == (kind in ("qwen3_moe", "mixtral"))
    add_adapters(made, config.model.lora, seed=0)
    assert lora_parameters(config, planned) == sum(p.numel() for p in made.parameters() if p.requires_grad)


def test_a_composite_checkpoint_is_planned_as_its_text_part(tmp_path: Path) -> None:
    text = {**SIZES, "model_type": "gemma3_text"}
    Gemma3Config(text_config=text).save_pretrained(tmp_path)
    planned = read_architecture(make_config({"model": {"path": str(tmp_path)}}))
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text))
    assert planned.parameters == sum(p.numel() for p in made.parameters())


def test_what_a_run_refuses_a_plan_refuses_with_the_same_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders that are no models, without a tokenizer, with one that is too large; kinds that transformers lacks."""
    tokenizer = AutoTokenizer.from_pretrained(nano_folder(tmp_path / "nano"))
    small = Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "vocab_size": 300}))
    small.save_pretrained(tmp_path / "alone")
    small.save_pretrained(tmp_path / "larger")
    tokenizer.save_pretrained(tmp_path / "larger")
    for folder in ("run/checkpoints/iteration_000002/model", "run/checkpoints/iteration_000010/model", "unknown"):
        small.save_pretrained(tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder)
    (tmp_path / "run" / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "nobody_knows"}')
    (tmp_path / "empty").mkdir()
    newest = tmp_path / "run" / "checkpoints" / "iteration_000010"
    for name, said in (
        ("alone", "model.path must be a model with its tokenizer, got "),
        ("larger", "model.path must be a model with a row of its embedding for every token, got 300 rows and token "),
        ("run", f"name a model in it, '{newest / 'model'}'"),
        ("run/checkpoints/iteration_000010", f"name the model in it, '{newest / 'model'}'"),
        ("unknown", "model.path must be a model that transformers can load, got "),
        ("empty", "without config.json; name the folder inside"),
    ):
        path = str(tmp_path / name)
        with pytest.raises(ValueError) as caught:
            load_model(make_config({"model": {"path": path}}).model)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
        assert main(["--tflops", "1", "--set", f"model.path={path}"]) == 2
        planned = capsys.readouterr().err.strip().removeprefix("error: ")
        assert planned == str(caught.value)


def test_an_end_that_the_embedding_lacks_is_refused_and_an_image_that_nobody_says_is_not() -> None:
    """Gemma 3 1B: 262,144 rows, and a token for images of just that number."""
    words = {"a": 0, "b": 1, "<end>": 2, "<image>": 3}
    require_rows(3, words, ["<end>", "<image>"], "{{ content }}<end>")
    for rows, spoken in ((3, "<image>"), (2, "<end>"), (1, "<end>")):
        with pytest.raises(ValueError, match="^model.path must be a model with a row of its embedding for every token"):
            require_rows(rows, words, ["<end>", "<image>"], spoken)


def test_numbers_are_finite(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("--tflops", "--bandwidth", "--gpu-memory"):
        assert main(["--tflops", "1", name, "inf"]) == 2
        assert f"error: {name} must be > 0 and finite, got inf" in capsys.readouterr().err


def test_adapters_of_no_layer_are_refused_and_of_one_layer_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """They would be planned as a run that trains all weights."""
    rank = ["--tflops", "1", "--set", "model.lora.rank=4", "--set"]
    for wrong in ("no_proj", "lm_head", "layers.99.self_attn.q_proj"):
        assert main([*rank, f"model.lora.targets=[q_proj,{wrong}]"]) == 2
        assert (
            f"model.lora.targets must be names of the model's linear layers, got ['{wrong}']" in capsys.readouterr().err
        )

    def count(*targets: str) -> int:
        config = make_config({"model": {"lora": {"rank": 4, "targets": list(targets)}}})
        return lora_parameters(config, read_architecture(config))

    nano = read_architecture(make_config({}))
    assert count("q_proj") == 4 * nano.num_layers * (nano.hidden_size + nano.query_size)
    assert count("layers.0.self_attn.q_proj") == 4 * (nano.hidden_size + nano.query_size)


@pytest.mark.parametrize(
    ("kind", "refused"), [("bloom", "rollout.cache=on"), ("falcon_h1", "update.packing=prefix"), ("mamba2", "update.packing=plain")]
)  # fmt: skip
def test_settings_that_a_run_refuses_a_plan_refuses_with_the_same_line(
    kind: str, refused: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """M14: without them both say what a run chooses."""
    folder = build(kind, tmp_path / kind)
    given = ["--tflops", "1", "--set", f"model.path={folder}"]
    config = load_config(None, [f"model.path={folder}", refused])
    with pytest.raises(ValueError) as caught:
        make_trained(config, folder, "cpu")
    assert main([*given, "--set", refused]) == 2
    assert capsys.readouterr().err.strip().removeprefix("error: ") == str(caught.value)
    assert main(given) == 0
    policy = make_trained(load_config(None, [f"model.path={folder}"]), folder, "cpu")
    assert f"expected: {policy.model.fit}, asked of a tiny twin" in capsys.readouterr().out
