"""bfloat16: what is rounded and what is not, one copy of the weights per phase, nothing cast per token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import batch_of, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from hsg.engine.generation import Decoder
from hsg.engine.precision import autocast, compute_weights, head_product
from hsg.engine.seeds import make_generator
from hsg.model.models import head_logits, score


def half_model(kind: str = "qwen2", **options: Any) -> Any:
    model = tiny_model(kind, dtype=torch.float32, **options)
    model.compute_dtype = torch.bfloat16
    return model


class Casts(TorchDispatchMode):
    """Counts what is cast to another dtype and is as large as some weight of the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.storages = {p.data_ptr() for p in model.parameters()}
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.storages:
            self.count += 1
        return function(*args, **(kwargs or {}))


def decode(model: Any, num_tokens: int, outer: Any = None) -> int:
    """Casts of weights while `num_tokens` are decoded for two rows."""
    with compute_weights(model) if outer is None else outer:
        decoder = Decoder(model, (), [[5, 6, 7], [8, 9]])
        with Casts(model) as casts:
            decoder.sample(
                [0, 1],
                temperatures=[1.0, 0.7],
                generators=[make_generator("a"), make_generator("b")],
                max_new_tokens=[num_tokens] * 2,
            )
    return casts.count


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_no_weight_is_cast_per_decoded_token(kind: str) -> None:
    model = half_model(kind)
    assert decode(model, 3) == decode(model, 30) == 0


def test_the_counter_sees_what_autocast_alone_does() -> None:
    """The broken function that the test above is there for: weights in float32, cast again for each token."""
    model = half_model()
    with torch.no_grad(), autocast(model), Casts(model) as casts:
        for _ in range(3):
            model(torch.tensor([[3, 4]]))
    assert casts.count >= 3 * sum(p.ndim > 1 for p in model.model.layers.parameters())


def test_keys_and_values_are_kept_in_the_compute_dtype() -> None:
    model = half_model()
    with compute_weights(model):
        decoder = Decoder(model, (), [[5, 6, 7]])
        decoder.sample([0], temperatures=[1.0], generators=[make_generator("a")], max_new_tokens=[3])
    assert {layer.keys.dtype for layer in decoder.cache.layers} == {torch.bfloat16}


def test_masters_come_back_bit_for_bit_also_after_an_error() -> None:
    model = half_model()
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}

    def whole() -> bool:
        now = dict(model.named_parameters())
        return all(now[n].data_ptr() == at and torch.equal(now[n], value) for n, (at, value) in before.items())

    with compute_weights(model):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        with compute_weights(model, model):  # nested, and twice the same
            pass
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert whole()
    with pytest.raises(KeyError), compute_weights(model):
        raise KeyError
    assert whole()
    tied = half_model("gpt2")
    assert tied.lm_head.weight is tied.transformer.wte.weight
    with compute_weights(tied):
        assert tied.lm_head.weight.data_ptr() == tied.transformer.wte.weight.data_ptr()


def test_a_float32_model_is_left_alone() -> None:
    model = tiny_model("qwen2", dtype=torch.float32)
    ids = torch.tensor([[3, 4, 5]])
    with compute_weights(model), autocast(model):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        inside = model(ids).logits
    assert torch.equal(inside, model(ids).logits)
    assert "forward" not in vars(model.lm_head)


def exact(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product of the rounded factors in float64."""
    return hidden.bfloat16().double() @ weight.bfloat16().double().T


def test_the_heads_product_is_of_rounded_factors_and_not_rounded_itself() -> None:
    """Logits of about 20: a step of bfloat16 is 1/8 there, one of float32 2e-6."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 3, 64) * 3, torch.randn(50, 64)
    logits = head_product(hidden, weight)
    assert logits.dtype == torch.float32
    truth = exact(hidden.flatten(0, 1), weight).unflatten(0, (2, 3))
    torch.testing.assert_close(logits.double(), truth, rtol=0, atol=2e-4)
    assert (logits.bfloat16().double() - truth).abs().max() > 0.02  # what a head in bfloat16 would hand out
    bias = torch.randn(50)
    torch.testing.assert_close(head_product(hidden, weight, bias), logits + bias)


def test_the_heads_gradients_are_those_of_the_rounded_product() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 16).requires_grad_(), torch.randn(11, 16).requires_grad_()
    seed = torch.randn(7, 11)
    (head_product(hidden, weight) * seed).sum().backward()
    half = seed.bfloat16().double()
    torch.testing.assert_close(hidden.grad.double(), half @ weight.detach().bfloat16().double(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(weight.grad.double(), half.T @ hidden.detach().bfloat16().double(), rtol=2e-2, atol=2e-2)


def test_a_head_with_a_forward_of_its_own_keeps_it() -> None:
    class Normalised(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(hidden, torch.nn.functional.normalize(self.weight))

    model, ids = half_model(), torch.tensor([[3, 4, 5]])
    head = Normalised(32, 97, bias=False)
    head.weight, model.lm_head = model.lm_head.weight, head
    with torch.no_grad(), autocast(model):
        half = model(ids).logits.float()
    with torch.no_grad():
        assert (half - model(ids).logits).abs().max() < 0.1


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_sampling_and_scoring_read_logits_of_one_precision(kind: str) -> None:
    """`head_logits`, the model's own forward and `score` agree to float32; with a bfloat16 head they are far apart."""
    model = half_model(kind)
    rows, masks = [[3, 4, 5, 6, 7]], [[False, True, True, True]]
    ids = torch.tensor(rows)
    with torch.no_grad():
        with autocast(model):
            own = model(ids).logits
            hidden = model.get_decoder()(ids).last_hidden_state if kind != "gpt2" else model.transformer(ids)[0]
            ours = head_logits(model, hidden)
        assert own.dtype == torch.float32
        torch.testing.assert_close(own, ours, rtol=0, atol=1e-5)
        logprobs, _ = score(model, batch_of(rows, masks))
        expected = own.double().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        torch.testing.assert_close(logprobs[0, 1:].double(), expected[0, 1:], rtol=0, atol=1e-5)
        del model.lm_head.forward  # the head as transformers has it
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (model(ids).logits.double() - own.double()).abs().max() > 1e-3
