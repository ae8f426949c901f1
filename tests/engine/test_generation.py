"""The decoder: sampler equals scorer, the cache equals its slow twin, a row alone equals the row in a batch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import VOCABULARY, tiny_model
from transformers import AutoTokenizer, Qwen2ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from hsg.batch import Row, collate
from hsg.config.options import Config
from hsg.engine.generation import Cost, Decoder, Sampled, sample_tokens
from hsg.engine.seeds import derive_seed, make_generator
from hsg.model.models import score
from hsg.run.build import load_policy
from hsg.text.chat import Conversation
from hsg.text.markers import SegmentEnd
from hsg.text.prompts import Prompts
from hsg.types import ACTION

KINDS = ("qwen2", "llama", "gpt2")
LENGTHS = (3, 12, 5, 7)  # of the prompts
STOPS = tuple(range(2, 12))
# Which rows sample in each turn: they leave and come back, and some wait for several turns.
TURNS = ((0, 1, 2, 3), (1, 3), (0, 1, 2, 3), (2,), (3, 0), (0, 1, 2, 3))


def prompt(row: int) -> list[int]:
    return [(7 * row + 3 * i) % 80 + 10 for i in range(LENGTHS[row])]


def words(row: int, turn: int) -> list[int]:
    return [(11 * row + 5 * turn + i) % 80 + 10 for i in range(1 + (row + 2 * turn) % 6)]


def play(
    model: Any, rows: tuple[int, ...] = (0, 1, 2, 3), **options: Any
) -> tuple[dict[int, list[Sampled]], list[list[int]]]:
    """A conversation of several turns over some of the rows: what each sampled, and each row as it ended."""
    place = {row: i for i, row in enumerate(rows)}
    decoder = Decoder(model, STOPS, [prompt(r) for r in rows], **options)
    generators = {row: make_generator("row", row) for row in rows}
    said: dict[int, list[Sampled]] = {row: [] for row in rows}
    for turn, asked in enumerate(TURNS):
        here = [row for row in asked if row in place]
        for row in here if turn else []:
            decoder.append(place[row], words(row, turn))
        answers = decoder.sample(
            [place[r] for r in here],
            temperatures=[0.5 + 0.5 * (r % 3) for r in here],
            generators=[generators[r] for r in here],
            max_new_tokens=[2 + (r + turn) % 4 for r in here],
        )
        for row, answer in zip(here, answers, strict=True):
            said[row].append(answer)
    return said, decoder.rows


def assert_same(some: dict[int, list[Sampled]], others: dict[int, list[Sampled]], tolerance: float) -> None:
    for row in some:
        assert [a.ids for a in some[row]] == [b.ids for b in others[row]], f"row {row}"
        assert [a.closed for a in some[row]] == [b.closed for b in others[row]]
        for a, b in zip(some[row], others[row], strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_cache_equals_slow_twin(kind: str) -> None:
    model = tiny_model(kind)
    fast, slow = play(model), play(model, use_cache=False)
    assert_same(fast[0], slow[0], 1e-9)
    assert fast[1] == slow[1]
    assert any(s.closed for row in fast[0].values() for s in row), "the test needs a response that ends by itself"


@pytest.mark.parametrize("kind", KINDS)
def test_row_alone_equals_row_in_batch(kind: str) -> None:
    """B09: GPT-2 has learned positions, which show what rotary ones hide."""
    model = tiny_model(kind)
    together, _ = play(model)
    for row in range(4):
        alone, _ = play(model, rows=(row,))
        assert_same(alone, {row: together[row]}, 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_prefixes_change_nothing(kind: str) -> None:
    model = tiny_model(kind)
    stem = [20, 21, 22, 23, 24]
    # Equal prompts, a prompt that is a prefix of another, a common stem, and nothing in common under one label.
    prompts = [[*stem, 30, 31], [*stem, 30, 31], stem, [*stem, 40], [50, 51], [*stem, 30, 31], [50]]
    labels = ["a", "a", "a", "a", "b", "b", "c"]

    def sample(**options: Any) -> list[Sampled]:
        decoder = Decoder(model, STOPS, prompts, **options)
        count = len(prompts)
        first = decoder.sample(
            list(range(count)),
            temperatures=[1.0] * count,
            generators=[make_generator(i) for i in range(count)],
            max_new_tokens=[4] * count,
        )
        decoder.append(2, [60, 61])
        second = decoder.sample(
            [2, 0], temperatures=[1.0, 1.0], generators=[make_generator("x"), make_generator("y")],
            max_new_tokens=[3, 3],
        )  # fmt: skip
        return first + second

    expected = sample(use_cache=False)
    for options in ({}, {"shared": labels}, {"shared": [0] * len(prompts)}):
        got = sample(**options)
        assert [s.ids for s in got] == [s.ids for s in expected], options
        for a, b in zip(got, expected, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-9)


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_attention_of_any_kind_obeys_the_rows_own_mask(attention: str) -> None:
    """eager adds the mask to its scores, flash-attention cannot read it: both must sample as sdpa does."""
    expected, _ = play(tiny_model("qwen2", torch.float64))
    model = tiny_model("qwen2", torch.float64)
    model.config._attn_implementation = attention
    got, _ = play(model)
    assert_same(got, expected, 1e-5)  # eager takes its softmax in float32
    assert model.config._attn_implementation == attention  # scoring is as configured


def test_shared_prompts_are_forwarded_once() -> None:
    model, cost = tiny_model("qwen2"), Cost()
    Decoder(model, STOPS, [[10, 11, 12, 13]] * 8, cost=cost)
    assert cost.positions == 3  # all but the last token, which every row forwards when it samples


def test_sample_tokens_is_the_softmax() -> None:
    """Chi-square over 7 tokens at temperature 0.7: 6 degrees of freedom, 99.9 % of samples stay below 22.5."""
    logits = torch.tensor([[1.0, -0.5, 0.3, 2.0, -1.0, 0.0, -3.0]], dtype=torch.float64)
    count = 20_000
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids, logprobs = sample_tokens(logits.expand(count, -1), torch.full((count,), 0.7), uniforms)
    expected = torch.softmax(logits[0] / 0.7, dim=-1)
    observed = torch.bincount(ids, minlength=7).double()
    assert ((observed - count * expected).square() / (count * expected)).sum() < 22.5
    assert torch.allclose(logprobs, expected.log()[ids], atol=1e-12)


def test_sample_tokens_never_picks_a_token_without_mass() -> None:
    logits = torch.tensor([[-1e9, 0.0, -1e9, 0.0, -1e9]], dtype=torch.float64)
    uniforms = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0 - 2**-53], dtype=torch.float64)
    ids, logprobs = sample_tokens(logits.expand(5, -1), torch.ones(5), uniforms)
    assert ids.tolist() == [1, 1, 3, 3, 3]
    assert logprobs.tolist() == pytest.approx([-0.6931471805599453] * 5)


def test_temperature_zero_is_greedy_and_recorded_at_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]] * 2, dtype=torch.float64)
    ids, logprobs = sample_tokens(logits, torch.tensor([0.0, 0.5]), torch.tensor([0.999, 0.999]))
    assert ids[0] == 1
    assert logprobs[0].item() == pytest.approx(torch.log_softmax(logits[0], -1)[1].item())
    # The other row of the batch keeps its own temperature.
    assert logprobs[1].item() == pytest.approx(torch.log_softmax(logits[1] / 0.5, -1)[ids[1]].item())
    sampled = Decoder(tiny_model("qwen2"), STOPS, [[10, 11]]).sample(
        [0], temperatures=[0.0], generators=[make_generator(0)], max_new_tokens=[3]
    )[0]
    assert set(sampled.temperatures) == {1.0}


def test_seeds_are_of_the_parts_only() -> None:
    assert derive_seed("a", 1) == derive_seed("a", 1) != derive_seed("a1")
    assert derive_seed("a", "b") != derive_seed("ab") != derive_seed("a", "b", "")
    assert derive_seed("task \ud800") >= 0  # a lone surrogate in a task id is no reason to stop


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_recorded_logprobs_are_those_of_the_scorer(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    """B07, B08: three rows at T = 0.5, 1.0, 1.5 in one batch, without an update."""
    model = tiny_model(kind, dtype)
    heat = [0.5, 1.0, 1.5]
    conversations = [Conversation(prompt(row)) for row in range(3)]
    decoder = Decoder(model, STOPS, [prompt(row) for row in range(3)])
    generators = [make_generator("scored", row) for row in range(3)]
    exact: list[list[float]] = [[], [], []]
    for turn in range(3):
        for row, conversation in enumerate(conversations if turn else []):
            conversation.append_context(words(row, turn))
            decoder.append(row, words(row, turn))
        answers = decoder.sample([0, 1, 2], temperatures=heat, generators=generators, max_new_tokens=[6, 4, 5])
        for row, (conversation, answer) in enumerate(zip(conversations, answers, strict=True)):
            conversation.append_response(answer.ids, answer.logprobs, answer.temperatures)
            exact[row] += answer.logprobs
    rows = [Row(c.tokens(), torch.zeros(len(c) - 1), ACTION, i) for i, c in enumerate(conversations)]
    batch = collate(rows)
    with torch.no_grad():
        together, _ = score(model, batch)  # (B, T-1)
    for row in range(3):
        mask = batch.response_mask[row]
        assert batch.temperatures[row][mask].unique().tolist() == [heat[row]]
        assert together[row][mask].tolist() == pytest.approx(exact[row], abs=tolerance)
        with torch.no_grad():
            alone, _ = score(model, collate([rows[row]]))
        assert alone[0][rows[row].tokens.response_mask].tolist() == pytest.approx(exact[row], abs=tolerance)


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 0.1, "temperature": 0.01}, None])
def test_model_folder_does_not_truncate(settings: dict[str, Any] | None, guesser_folder: Path, tmp_path: Path) -> None:
    """B08: tokens outside the 50 most likely ones come up as often as the softmax says, whatever the folder says."""
    folder = tmp_path / "model"
    shutil.copytree(guesser_folder, folder)
    (folder / "generation_config.json").unlink()
    if settings is not None:
        text = json.dumps({"do_sample": True, "eos_token_id": 2, **settings})
        (folder / "generation_config.json").write_text(text, encoding="utf-8")
    policy = load_policy(Config(), str(folder), "cpu")
    ids, count, heat = policy.chat.prompt("hello"), 600, 4.0
    decoder = Decoder(policy.model, policy.chat.stop_ids, [ids] * count)
    sampled = decoder.sample(
        list(range(count)),
        temperatures=[heat] * count,
        generators=[make_generator("full", i) for i in range(count)],
        max_new_tokens=[1] * count,
    )
    with torch.no_grad():
        chances = torch.softmax(policy.model(torch.tensor([ids])).logits[0, -1].double() / heat, -1)
    tail = chances.argsort(descending=True)[50:]
    expected = chances[tail].sum().item()
    observed = sum(s.ids[0] in set(tail.tolist()) for s in sampled) / count
    assert expected > 0.1, "the test needs a distribution with a tail"
    assert abs(observed - expected) < 4 * (expected * (1 - expected) / count) ** 0.5
    assert sampled[0].logprobs[0] == pytest.approx(chances[sampled[0].ids[0]].log().item(), abs=1e-4)


class ScriptedModel(Qwen2ForCausalLM):
    """Says `script[p]` after position p, whatever the prompt: a real causal LM for `generate`, a stub inside."""

    script: tuple[int, ...] = ()

    def forward(self, input_ids: Any, position_ids: Any, logits_to_keep: Any, cache: Any = None, **rest: Any) -> Any:
        if cache is not None:
            super().forward(input_ids, position_ids=position_ids, cache=cache, **rest)  # writes the cache
        wanted = torch.tensor([self.script[p] for p in position_ids[:, logits_to_keep].flatten().tolist()])
        logits = torch.full((wanted.numel(), VOCABULARY), -1e4).scatter(1, wanted[:, None], 0.0)
        return CausalLMOutputWithPast(logits=logits.view(len(input_ids), -1, VOCABULARY))


def test_template_end_that_no_config_declares_ends_a_reply(guesser_folder: Path, tmp_path: Path) -> None:
    """M4: a base model's eos ends texts, and the template put on it ends turns with another token."""
    shutil.copytree(guesser_folder, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(guesser_folder)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path / "base")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((tmp_path / "base" / name).read_text())
        settings["eos_token_id"] = tokenizer.eos_token_id
        (tmp_path / "base" / name).write_text(json.dumps(settings))
    policy = load_policy(Config(), tmp_path / "base", "cpu")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert policy.chat.stop_ids == (tokenizer.eos_token_id, end)
    assert policy.model.generation_config.eos_token_id == [tokenizer.eos_token_id, end]
    prompt = policy.chat.prompt(Prompts.make("terse").first_action("Guess. It is high up.", "try 3"))
    decoder = Decoder(policy.model, policy.chat.stop_ids, [prompt])
    (said,) = decoder.sample([0], temperatures=[0.0], generators=[make_generator(0)], max_new_tokens=[20])
    assert said.closed
    assert said.ids[-1] == end
    assert len(said.ids) < 20


@pytest.mark.parametrize("use_cache", [True, False])
def test_second_end_token_ends_a_reply(use_cache: bool) -> None:
    """B01, B02: the reply `7 0 5` holds the pad id in its middle and ends on the second end token."""
    model = ScriptedModel(tiny_model("qwen2").config).eval()
    model.script = (0, 7, 0, 5, 9, 9)
    decoder = Decoder(model, (2, 5), [[10, 11], [12, 13]], use_cache=use_cache)
    said = decoder.sample(
        [0, 1], temperatures=[1.0, 1.0], generators=[make_generator(0), make_generator(1)], max_new_tokens=[4, 2]
    )
    assert said[0].ids == (7, 0, 5)
    assert said[0].closed
    assert said[1].ids == (7, 0)
    assert not said[1].closed
    conversation = Conversation([10, 11])
    conversation.append_response(said[0].ids, said[0].logprobs, said[0].temperatures)
    assert conversation.tokens().response_mask.tolist() == [False, True, True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_reach_the_last_position_of_the_context(kind: str) -> None:
    """A short row that is fed beside one near the limit is padded past the last position; nobody may notice."""
    model = tiny_model(kind, positions=32)

    def sample(rows: tuple[int, ...], **options: Any) -> list[Sampled]:
        prompts = [[20 + i % 50 for i in range(4)], [15 + i % 50 for i in range(20)]]
        decoder = Decoder(model, (), [prompts[r] for r in rows], **options)
        out = []
        for extra in ((20, 1), (0, 3)):
            for i, row in enumerate(rows):
                if extra[row]:
                    decoder.append(i, [30 + j for j in range(extra[row])])
            limits = [min(4, 32 - len(decoder.rows[i])) for i in range(len(rows))]
            out += decoder.sample(
                list(range(len(rows))), temperatures=[1.0] * len(rows),
                generators=[make_generator(extra, row) for row in rows], max_new_tokens=limits,
            )  # fmt: skip
        return out

    together, slow = sample((0, 1)), sample((0, 1), use_cache=False)
    assert [s.ids for s in together] == [s.ids for s in slow]
    assert together[3].ids == sample((1,))[1].ids
    assert [len(s.ids) for s in together] == [4, 4, 4, 4]


def test_cost_counts_what_was_forwarded() -> None:
    model = tiny_model("qwen2")

    def cost(prompts: list[list[int]], grown: list[int]) -> Cost:
        counted = Cost()
        decoder = Decoder(model, (), prompts, cost=counted)
        everyone = list(range(len(prompts)))
        for turn in range(2):
            for row in everyone if turn else []:
                decoder.append(row, [40] * grown[row])
            decoder.sample(
                everyone, temperatures=[1.0] * len(prompts), generators=[make_generator(turn, r) for r in everyone],
                max_new_tokens=[3] * len(prompts),
            )  # fmt: skip
        return counted

    # Four prompt ids, two turns of three sampled tokens, two ids of context in between; the last token of a row is
    # never forwarded, and of two equal prompts three ids are forwarded once: 3 + 2 * (1 + 3 + 2 + 3 - 1).
    even = cost([[10, 11, 12, 13]] * 2, [2, 2])
    assert (even.positions, even.sampled) == (19, 12)
    ragged = cost([[10, 11, 12, 13], [20 + i for i in range(9)]], [2, 20])
    needed = (4 + 3 + 2 + 3 - 1) + (9 + 3 + 20 + 3 - 1)
    assert needed <= ragged.positions <= needed + 64


@pytest.mark.slow
def test_nothing_is_printed(guesser_folder: Path) -> None:
    """No deprecation, no advice: neither on stderr nor as a warning, in a process of its own."""
    code = (
        "import warnings; warnings.simplefilter('always', FutureWarning)\n"
        "import sys, torch\n"
        "from hsg.config.options import Config\n"
        "from hsg.run.build import load_policy\n"
        "from hsg.engine.generation import Decoder\n"
        "from hsg.engine.seeds import make_generator\n"
        "from hsg.run.checkpoint import save_model\n"
        "from pathlib import Path\n"
        "p = load_policy(Config(), sys.argv[1], 'cpu')\n"
        "d = Decoder(p.model, p.chat.stop_ids, [p.chat.prompt('a'), p.chat.prompt('a b c')])\n"
        "for n in range(2):\n"
        "    d.append(0, p.chat.next_user('b', p.chat.end_id))\n"
        "    d.sample([0, 1], temperatures=[1.0, 0.0], generators=[make_generator(n), make_generator(-n)],\n"
        "             max_new_tokens=[5, 6])\n"
        "save_model(Path(sys.argv[2]), p.model, p.tokenizer)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(guesser_folder), str(guesser_folder.parent / "saved")],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --------------------------------------------------------------------------------------------------- mixed temperatures


class Letters:
    """Token n reads as the n-th character of a small alphabet, over and over."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [0]

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join("abc>"[i % 4] for i in ids)


def two_segments(first: float, then: float, *, marker: str | None = ">", **options: Any) -> list[Sampled]:
    """Six responses of a random model, of which most have a marker somewhere."""
    rows = list(range(6))
    decoder = Decoder(tiny_model("llama"), STOPS, [[20 + row, 30] for row in rows], **options)
    return decoder.sample(
        rows,
        temperatures=[then] * 6,
        generators=[make_generator("mixed", row) for row in rows],
        max_new_tokens=[12, 12, 3, 12, 1, 12],
        first_segment=None if marker is None else SegmentEnd(Letters(), marker),
        first_temperatures=[first] * 6,
    )


@pytest.mark.parametrize("options", [{}, {"use_cache": False}])
def test_temperature_changes_after_the_marker(options: dict[str, Any]) -> None:
    sampled = two_segments(1.5, 0.5, **options)
    ended = 0
    for answer in sampled:
        text = Letters().decode(answer.ids)
        length = text.find(">") + 1 or len(text)  # the marker's own token still belongs to the first segment
        assert answer.num_first == length
        assert answer.temperatures == (1.5,) * length + (0.5,) * (len(text) - length)
        ended += length < len(text)
    assert ended >= 2, "some rows must go on after their marker"
    assert any(">" not in Letters().decode(a.ids) for a in sampled), "one must run to its limit before it"


def test_log_probs_are_those_of_each_tokens_own_temperature() -> None:
    model = tiny_model("llama")
    for row, answer in enumerate(two_segments(1.5, 0.5)):
        ids = torch.tensor([[20 + row, 30, *answer.ids]])
        logits = model(ids).logits[0, 1:-1].double()
        heat = torch.tensor(answer.temperatures, dtype=torch.float64)
        logprobs = torch.log_softmax(logits / heat[:, None], -1)
        expected = logprobs.gather(1, torch.tensor(answer.ids)[:, None]).squeeze(1)
        assert answer.logprobs == pytest.approx(expected.tolist(), abs=1e-6)


def test_one_shared_temperature_is_plain_sampling_token_for_token() -> None:
    mixed, plain = two_segments(0.9, 0.9), two_segments(0.0, 0.9, marker=None)
    assert [(a.ids, a.logprobs, a.temperatures, a.closed) for a in mixed] == [
        (a.ids, a.logprobs, a.temperatures, a.closed) for a in plain
    ]
    assert all(a.num_first == 0 for a in plain)


def test_greedy_first_segment_is_recorded_at_temperature_one() -> None:
    for answer in two_segments(0.0, 0.7):
        assert set(answer.temperatures[: answer.num_first]) == {1.0}
        assert set(answer.temperatures[answer.num_first :]) <= {0.7}


def test_keys_and_values_are_gone_with_the_decoder() -> None:
    """At once, not when Python looks for circles: the caches of several iterations were held, gigabytes in an hour."""
    import gc
    import weakref

    model = tiny_model("qwen2")
    gc.collect()
    gc.disable()
    try:
        decoder = Decoder(model, frozenset({0}), [[1, 2, 3]])
        decoder.sample([0], temperatures=[1.0], generators=[make_generator("gone")], max_new_tokens=[2])
        assert decoder.cache is not None
        cache = weakref.ref(decoder.cache)
        del decoder
        assert cache() is None
    finally:
        gc.enable()
