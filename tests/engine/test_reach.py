"""Which keys a query sees: by hand, in plain loops, and as transformers' own masks have it for every kind of layer."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from tiny import WINDOW, WINDOWED, windowed_model
from transformers.masking_utils import create_masks_for_generate

from hsg.engine import layout as layouts
from hsg.engine.attention import trunk
from hsg.engine.layout import make_layout
from hsg.engine.reach import FULL, Reach, kind_reach, layer_kinds, layer_reach, narrowed, row_masks

REACHES = [FULL, Reach(window=1), Reach(window=5), Reach(window=7), Reach(chunk=1), Reach(chunk=5), Reach(chunk=7)]


def sees(reach: Reach, query: int, key: int) -> bool:
    """The definition."""
    if reach.window is not None:
        return 0 <= query - key < reach.window
    if reach.chunk is not None:
        return key <= query and key // reach.chunk == query // reach.chunk
    return key <= query


def test_who_sees_whom_by_hand() -> None:
    queries = keys = torch.arange(6)
    window = Reach(window=3).seen(queries, keys).int().tolist()
    assert window == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 1],
    ]
    chunk = Reach(chunk=4).seen(queries, keys).int().tolist()
    assert chunk[3:] == [[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1]]


@pytest.mark.parametrize("reach", REACHES)
def test_rows_of_different_lengths(reach: Reach) -> None:
    positions = torch.tensor([[0, 1, 2], [9, 10, 11], [4, 5, 6]])
    seen = reach.seen(positions, torch.arange(12))  # (3, 3, 12)
    for row, places in enumerate(positions.tolist()):
        for q, place in enumerate(places):
            assert seen[row, q].tolist() == [sees(reach, place, key) for key in range(12)]
    for length in range(1, 12):
        missed = any(not sees(reach, q, k) for q in range(length) for k in range(q + 1))
        assert reach.hides(length) == missed


@pytest.mark.parametrize("kind", sorted(WINDOWED))
def test_masks_are_those_of_transformers(kind: str) -> None:
    config = windowed_model(kind).config
    config._attn_implementation = "eager"
    length = 3 * WINDOW + 1
    embeddings = torch.zeros(2, length, 4)
    positions = torch.arange(length).expand(2, -1)
    theirs: Any = create_masks_for_generate(config, embeddings, None, None, positions)
    mine = row_masks(config, positions, length, torch.float32)
    if not isinstance(mine, dict):
        theirs, mine = ({"all": next(iter(m.values())) if isinstance(m, dict) else m} for m in (theirs, mine))
    assert len(set(layer_kinds(config))) == len(theirs)
    for name, mask in theirs.items():
        assert torch.equal(mine[name] == 0, (mask == 0).expand_as(mine[name])), name


def test_a_layer_is_asked_by_its_own_kind() -> None:
    model = windowed_model("gemma2")
    found = [layer_reach(layer.self_attn) for layer in model.base_model.layers]
    assert found == [Reach(window=WINDOW), FULL, Reach(window=WINDOW)]
    alone = windowed_model("mistral")
    assert [layer_reach(layer.self_attn) for layer in alone.base_model.layers] == [Reach(window=WINDOW)] * 3
    assert kind_reach(windowed_model("llama4_text").config, "chunked_attention") == Reach(chunk=WINDOW)


def test_one_mask_where_all_layers_see_alike() -> None:
    """As it was for models without windows: no dictionary, and the numbers of a triangle."""
    config = windowed_model("llama", num_hidden_layers=2).config
    positions = torch.tensor([[2, 3]])
    mask = row_masks(config, positions, 4, torch.float32)
    inf = float("inf")
    assert mask.tolist() == [[[[0, 0, 0, -inf], [0, 0, 0, 0]]]]


@pytest.mark.parametrize(("kind", "narrow"), [("gemma3_text", Reach(window=2)), ("llama4_text", Reach(chunk=2))])
def test_narrow_windows_last_as_long_as_they_are_asked_for(kind: str, narrow: Reach) -> None:
    model = windowed_model(kind)

    def reaches() -> list[Reach]:
        return [layer_reach(layer.self_attn) for layer in trunk(model).layers]

    before = reaches()
    with contextlib.suppress(RuntimeError), narrowed(model, 2):
        assert reaches() == [narrow, FULL, narrow]
        raise RuntimeError("the model could not do it")
    assert reaches() == before != [narrow, FULL, narrow]


@pytest.mark.parametrize("step", [4, 192])
@pytest.mark.parametrize("reach", REACHES)
def test_calls_hold_every_pair_that_is_seen_once_and_no_other(
    reach: Reach, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "STEP", step)
    stem = list(range(10, 23))
    rows = [stem + [30 + i for i in range(9)], [*stem, 40], [*stem[:6], 50, 51, 52], [*stem, 30, 31, 60, 61], [70, 71]]
    ids = torch.tensor([row + [0] * (22 - len(row)) for row in rows])
    read = torch.zeros(ids.shape, dtype=torch.bool)
    read[0, [3, 20]] = read[2, 7] = read[3, 16] = True
    layout = make_layout(ids, list(map(len, rows)), read=read)
    expected = set()
    for i, row in enumerate(rows):
        path = layout.index[i, : len(row)].tolist()
        expected |= {(path[q], path[k]) for q in range(len(row)) for k in range(len(row)) if sees(reach, q, k)}
    assert layout.read is not None
    for asked in (False, True):
        places = layout.read.tolist() if asked else list(range(len(layout)))
        found = []
        for call in layout.within(reach, read=asked):
            if not call.causal:
                assert call.keys[0] < call.keys[1]
            for q in range(*call.queries):
                mine = []
                for k in range(*call.keys):
                    hidden = call.causal and k > places[q]
                    if call.hidden is not None:
                        hidden = bool(call.hidden[q - call.queries[0], k - call.keys[0]])
                    if not hidden:
                        mine.append((places[q], k))
                assert mine, "a query that sees no key of a call would be divided by nothing"
                found += mine
        assert len(found) == len(set(found))
        assert set(found) == {pair for pair in expected if pair[0] in set(places)}
