"""Which N of C candidate strategies to keep: farthest-point selection on embeddings (StraTA's diverse rollout).

    start = the candidate nearest to the normalised mean            (ours: the paper does not say where to start)
    next  = argmin over unselected c of  max over selected s of  e_c . e_s,        repeated until N are selected

The e are unit vectors, so e . e' is the cosine.  FAISS holds them in float32, where two copies of one text may differ
in the last bits; so FAISS proposes everything near the minimum and float64 decides, ties to the lowest index.
Deliberately absent:
  1. the encoder: embeddings come in, indices go out;
  2. any say in whether a candidate parsed: the caller leaves such candidates out;
  3. an approximate index: C is some dozens, a flat one is exact;
  4. `faiss.omp_set_num_threads`: it may set torch's threads too (which one loaded OpenMP first decides), and we send
     one query at a time, which runs on one thread anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import faiss
import numpy as np
import torch
from torch import Tensor

STARTS = ("centroid", "first", "random")

FLOAT32_MARGIN = 1e-5  # far above the error of a float32 product of unit vectors, about 1e-7
# Cosines closer than this are the same number.  Vectors that come in float32 (or less) carry its rounding with them:
# a text embedded twice, or a scaled copy, lies within two of its steps.
TIE_FLOAT64, TIE_FLOAT32 = 1e-9, 2 * float(np.finfo(np.float32).eps)


def farthest_point_indices(embeddings: Tensor, num_selected: int, *, start: str = "centroid", seed: int = 0) -> Tensor:
    """Indices of num_selected candidates that lie far apart, in selection order, the start first.

    embeddings (..., C, D), of any length -> LongTensor (..., N) with distinct indices, duplicates or not.  A zero
    vector has cosine 0 with every candidate.  start: centroid | first (index 0) | random (drawn with `seed`, for each
    group its own).  ValueError: a number is not finite, C or D is 0, num_selected outside 1..C, unknown start.
    Source: StraTA (arXiv 2605.06642), diverse strategy rollout.
    """
    if start not in STARTS:
        raise ValueError(f"start must be one of {', '.join(STARTS)}, got {start!r}; choose one of them")
    _check_embeddings(embeddings)
    num_candidates = embeddings.shape[-2]
    if num_candidates == 0:
        raise ValueError("embeddings must hold at least one candidate, got C = 0; propose strategies first")
    if not 1 <= num_selected <= num_candidates:
        raise ValueError(
            f"num_selected must be in 1..{num_candidates} (the number of candidates), got {num_selected}; "
            "propose more candidates or keep fewer"
        )
    groups = _unit(embeddings).flatten(0, -3) if embeddings.ndim > 2 else _unit(embeddings)[None]  # (G, C, D)
    tie = TIE_FLOAT64 if embeddings.dtype == torch.float64 else TIE_FLOAT32
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(num_candidates, (len(groups),), generator=generator).tolist()
    selected = [
        _select(group.numpy(), num_selected, draw if start == "random" else 0 if start == "first" else None, tie)
        for group, draw in zip(groups, draws, strict=True)
    ]
    indices = torch.tensor(selected, dtype=torch.long, device=embeddings.device)
    return indices.reshape(*embeddings.shape[:-2], num_selected)


def mean_pairwise_distance(embeddings: Tensor) -> Tensor:
    """Mean of 1 - cosine over the pairs of candidates: 0 = all alike, 1 = orthogonal on average.

    embeddings (..., C, D) -> (...) float64, NaN for fewer than two candidates.  ValueError: a number is not finite.
    """
    _check_embeddings(embeddings)
    units = _unit(embeddings)
    num_candidates = units.shape[-2]
    # |sum of e|^2 holds every ordered pair and each vector with itself; the latter is taken off again.
    all_pairs = units.sum(-2).square().sum(-1) - units.square().sum((-2, -1))
    return (1 - all_pairs / (num_candidates * (num_candidates - 1) or float("nan"))).to(embeddings.device)


def _select(units: np.ndarray, num_selected: int, first: int | None, tie: float) -> list[int]:
    """Farthest points of one group, units (C, D) float64; first None = start at the centroid."""
    index = faiss.IndexFlatIP(units.shape[1])
    index.add(units.astype(np.float32))
    if first is None:
        mean = units.mean(0)
        norm = np.linalg.norm(mean)
        # A mean of almost 0 has no direction, only rounding; as 0 it ties every candidate, and index 0 starts.
        mean = mean / norm if norm > 1e-6 else np.zeros_like(mean)
        first = _first_minimum(-_products(index, mean), lambda rows: -(units[rows] @ mean), tie)
    selected = [first]
    nearest = np.full(len(units), -np.inf)  # max cosine with the selected, float32
    while len(selected) < num_selected:
        nearest = np.maximum(nearest, _products(index, units[selected[-1]]))
        nearest[selected] = np.inf  # A duplicate of a selected candidate is still open; the candidate itself is not.
        selected.append(_first_minimum(nearest, lambda rows: (units[rows] @ units[selected].T).max(1), tie))
    return selected


def _first_minimum(coarse: np.ndarray, exact: Callable[[np.ndarray], np.ndarray], tie: float) -> int:
    """Lowest index of the minimum: float32 values propose, exact(rows) in float64 decides among those close to it."""
    rows = np.flatnonzero(coarse <= coarse.min() + FLOAT32_MARGIN)
    values = exact(rows)
    return int(rows[np.flatnonzero(values <= values.min() + tie)[0]])


def _products(index: faiss.IndexFlatIP, query: np.ndarray) -> np.ndarray:
    """Inner product of one query (D,) with every vector of the index, in index order: (C,) float32."""
    products, labels = index.search(query[None].astype(np.float32), index.ntotal)
    # FAISS fills up with label -1, a valid Python index, where it found no neighbour.
    assert labels.min() >= 0, f"faiss must return every one of {index.ntotal} vectors, got labels {labels[0].tolist()}"
    in_order = np.empty(index.ntotal, dtype=np.float32)
    in_order[labels[0]] = products[0]
    return in_order


def _check_embeddings(embeddings: Tensor) -> None:
    if embeddings.ndim < 2 or embeddings.shape[-1] == 0:
        raise ValueError(
            f"embeddings must be (..., C, D) with D >= 1, got shape {tuple(embeddings.shape)}; one vector each"
        )
    if not embeddings.isfinite().all():
        raise ValueError("embeddings must be finite, got NaN or infinity; check the encoder's output")


def _unit(embeddings: Tensor) -> Tensor:
    """Unit vectors in float64 on the CPU; a zero vector stays zero.  Scaled by its largest part first: no overflow."""
    vectors = embeddings.detach().cpu().double()
    largest = vectors.abs().amax(-1, keepdim=True)
    vectors = vectors / torch.where(largest > 0, largest, 1.0)
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1.0)  # the norm is at least 1 unless it is 0
