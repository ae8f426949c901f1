"""FSDP2 on one process: what goes into a forward comes out of the wrapping as it went in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from tiny import batch_of, tiny_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hsg.model.models as models
from hsg.batch import Row, row_layout
from hsg.engine.packing import packed_attention
from hsg.model.models import score
from hsg.model.sharding import shard
from hsg.types import ACTION, Tokens

ROWS = [[3, 4, 5, 6, 7, 8], [3, 4, 5, 9, 10]]
MASKS = [[False, False, True, True, True], [False, True, True, True]]
TEMPERATURES = [0.7, 1.3]  # in bfloat16 0.6992 and 1.2969


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def half_model() -> Any:
    model = tiny_model("qwen2", dtype=torch.float32)
    model.compute_dtype = torch.bfloat16
    return model


def given() -> tuple[Any, Any]:
    batch = batch_of(ROWS, MASKS, TEMPERATURES)
    rows = []
    for i, ids in enumerate(ROWS):
        kept = slice(len(ids) - 1)
        mask, temperatures = batch.response_mask[i, kept], batch.temperatures[i, kept]
        tokens = Tokens(torch.tensor(ids), mask, torch.zeros(len(mask)), temperatures)
        rows.append(Row(tokens, torch.ones(len(mask)), ACTION, i))
    return batch, row_layout(rows, batch, "prefix")


def test_temperatures_are_not_rounded(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (batch, layout) = half_model(), given()
    shard(model, mesh)
    seen = []
    chunk = models._chunk

    def looked_at(*args: Any) -> Any:
        seen.append(args[4])
        return chunk(*args)

    monkeypatch.setattr(models, "_chunk", looked_at)
    with torch.no_grad(), packed_attention(model):
        score(model, batch, layout=layout)
    temperatures = torch.cat(seen)
    assert temperatures.dtype == torch.float32
    assert torch.equal(temperatures, batch.temperatures[batch.response_mask])


def test_every_layer_gets_the_one_layout_that_was_built(mesh: DeviceMesh) -> None:
    model, (batch, layout) = half_model(), given()
    shard(model, mesh)
    handed = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda m, args, kw: handed.append(kw["layout"]), with_kwargs=True)
    with torch.no_grad(), packed_attention(model):
        score(model, batch, layout=layout)
    assert len(handed) == len(model.model.layers)
    assert all(one is layout for one in handed)


def test_a_sharded_model_scores_what_it_scores_alone(mesh: DeviceMesh) -> None:
    """Not bit for bit: its hidden states are bfloat16 between layers, those of autocast float32."""
    model, (batch, layout) = half_model(), given()
    with torch.no_grad(), packed_attention(model):
        alone, _ = score(model, batch, layout=layout)
    shard(model, mesh)
    with torch.no_grad(), packed_attention(model):
        sharded, _ = score(model, batch, layout=layout)
    gap = (alone - sharded)[batch.response_mask].abs()
    assert sharded.dtype == torch.float32
    assert gap.mean() < 0.1
