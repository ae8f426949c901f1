"""The benchmark programs do what they say: the scripted words, the product's own work, and honest tables."""

import json
import math

import pytest
import torch
from tiny import tiny_model

from hsg import collector
from hsg.config.loading import make_config
from hsg.engine import generation, seeds
from hsg.engine.layout import make_layout
from hsg.engine.packing import packed_attention, packed_hidden
from hsg.experiments.benchmarks import ours, overhead
from hsg.experiments.benchmarks import workload as w
from hsg.experiments.benchmarks.build_model import build, tool_calls
from hsg.experiments.benchmarks.compare import Comparison, Size, growth, table
from hsg.experiments.benchmarks.meter import Meter
from hsg.experiments.benchmarks.scripted import ToolChat, scripted
from hsg.play import episode
from hsg.run.build import make_trained

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The bench's kind of model, smaller, with a template of its own: no TRL needed."""
    path = tmp_path_factory.mktemp("bench") / "model"
    texts = [*tool_calls(1000), *[" " + " ".join(w.OBSERVATION_WORDS)] * 50]
    build(path, texts, TEMPLATE, vocab_size=500, hidden_size=32)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_ours_says_the_script_and_joins_the_protocol(folder, tokenizer, capsys, monkeypatch):
    make_trained(make_config(ours.OPTIONS), folder, "cpu")  # its check, which samples too, is remembered
    sampled = []
    real = generation.sample_tokens
    monkeypatch.setattr(generation, "sample_tokens", lambda *a: sampled.append(len(a[0])) or real(*a))
    size = Size(turns=3, spread=1, steps=2, G=5)
    ours.main([*size.arguments(), "--model", str(folder)])
    printed = json.loads(capsys.readouterr().out)

    script = [w.tokenise(w.make_rows(w.Spec(5, 3, 1), k, tokenizer), tokenizer, 16) for k in range(2)]
    assert printed["digests"] == [w.script_digest(segments) for segments in script]
    assert printed["digests"][0] != printed["digests"][1]
    actions = [sum(sampled for row in segments for _, sampled in row) for segments in script]
    assert sum(sampled) == 16 * sum(actions)  # every scripted token was paid for by a sampled one
    assert all(norm > 0 and math.isfinite(norm) for norm in printed["grad_norm"])
    floor = printed["analytic"]
    assert floor["action_tokens"] == 16 * actions[0]
    for step in printed["steps"]:
        assert {"wall", "cpu", "rollout_cpu", "train_cpu", "pairs_rollout", "pairs_train"} <= set(step)
    first = printed["steps"][0]
    assert floor["once_rollout"] <= first["pos_rollout"] <= 1.2 * floor["once_rollout"]
    assert floor["floor_trie"] - 5 <= first["pos_train"] <= floor["floor_trie"]  # every token once, but for last ones
    assert first["lm_head_train"] == floor["action_tokens"]
    assert printed["rss_mb"] > 0
    assert generation.sample_tokens is not real, "the spy is back in its place"
    assert episode.make_generator is seeds.make_generator


def test_the_script_replaces_the_token_and_keeps_its_logprob():
    logits = torch.randn(2, 7)
    with scripted(lambda *key: {"a": [[3, 1], [6]], "b": [[5]]}[key[0]]):
        a, b = episode.make_generator("a"), episode.make_generator("b")
        first, second = (torch.rand(n, generator=a, dtype=torch.float64) for n in (2, 1))
        other = torch.rand(1, generator=b, dtype=torch.float64)
        drawn = []
        for uniforms in ([first[0], other[0]], [second[0], first[1]]):
            ids, logprobs = generation.sample_tokens(logits, torch.ones(2), torch.stack(uniforms))
            drawn.append(ids.tolist())
            expected = logits.log_softmax(-1)[torch.arange(2), ids]
            torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)
    assert drawn == [[3, 5], [6, 1]]


def test_the_chat_speaks_as_trl_does(tokenizer):
    chat = ToolChat(tokenizer)
    assert chat.prompt(w.TASK) == w.prompt_ids(tokenizer)
    assert chat.next_user("the box", chat.end_id) == w.suffix_ids(tokenizer, "the box")


def test_counts_by_hand():
    segments = [[([1, 2], True), ([3], False), ([4, 2], True)], [([1, 2], True)]]  # prompt [9, 8, 7]
    counts = w.counts([9, 8, 7], segments)
    assert counts["once_rollout"] == 3 + 4 + 1  # the last token of a row is never fed
    assert counts["once_train"] == 3 + 5 + 2
    assert counts["rows_train"] == 8 + 5
    assert counts["floor_trie"] == 3 + 5  # the short row is the beginning of the long one
    assert counts["action_tokens"] == 6
    assert counts["trl_rollout_positions"] == 2 * (3 + 1) + (6 + 1)
    assert counts["trl_train_positions"] == 2 * 8


def test_pairs_of_packed_rows_are_those_of_their_paths():
    model = tiny_model("qwen2")
    meter = Meter(model)
    layout = make_layout(torch.tensor([[1, 2, 3, 4], [1, 2, 5, 0]]), [4, 3])
    with packed_attention(model):
        meter.of("train", lambda: packed_hidden(model, layout))()
    assert meter.spent["train_positions"] == 5
    assert meter.spent["train_pairs"] == (1 + 2 + 3 + 4) + 3  # the 5 sees 1, 2 and itself


def a_run(cpu, digest="d", norm=1.0, positions=30):
    step = dict.fromkeys(("wall", "rollout_cpu", "train_cpu", "pos_train", "lm_head_train"), 1.0)
    warm = {**step, "cpu": 99.0, "pos_rollout": positions}
    steps = [warm, {**step, "cpu": cpu, "pos_rollout": 1000}]
    analytic = {"once_rollout": 20, "once_train": 1}
    return {"steps": steps, "digests": [digest], "grad_norm": [norm], "rss_mb": 100.0 * cpu, "analytic": analytic}


def test_a_comparison_pairs_runs_and_leaves_out_the_warm_up():
    c = Comparison(Size(), {"trl": [a_run(8.0), a_run(20.0), a_run(9.0)], "ours": [a_run(2.0), a_run(4.0), a_run(3.0)]})
    assert c.ratios("trl", "ours", "cpu") == [4.0, 5.0, 3.0]
    assert c.median("ours", "cpu") == 3.0
    assert c.same_tokens()
    assert c.same_gradients()
    text = table([c])
    assert "4.00x (3.00-5.00)" in text
    assert "30 (1.50)" in text  # positions of the step that the floor is counted for
    larger = Comparison(Size(turns=16), {"trl": [a_run(9.0)] * 3, "ours": [a_run(12.0)] * 3})
    assert "| ours, CPU s | 1.00x | 4.00x |" in growth([c, larger], "turns")


@pytest.mark.parametrize("change", [{"digest": "e"}, {"norm": 1.01}])
def test_other_work_is_noticed(change):
    c = Comparison(Size(), {"trl": [a_run(8.0)], "ours": [a_run(2.0, **change)]})
    assert not (c.same_tokens() and c.same_gradients())


@pytest.mark.slow
def test_overhead_splits_an_iteration(folder, monkeypatch):
    class Encoder:
        def embed(self, texts):
            assert len(set(texts)) == 32
            return torch.nn.functional.normalize(torch.randn(len(texts), 8), dim=-1)

    monkeypatch.setattr(w, "MODEL", folder)
    monkeypatch.setattr(collector, "load_encoder", lambda *a: Encoder())
    spent = overhead.measure(turns=4, reps=1, size="1m")
    (strata,), (grpo,) = spent["strata"], spent["grpo"]
    assert all(strata[name] > 0 for name in ("strategies", "selection", "judgment", "rollout", "update"))
    assert grpo["strategies"] == grpo["selection"] == grpo["judgment"] == 0
    for run in (strata, grpo):
        assert sum(run[name] for name in overhead.PHASES) == pytest.approx(run["total"])
        assert run["rest"] >= 0
    assert len(overhead.line(4, spent)) == 2
