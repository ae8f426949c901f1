"""hsg.strategy.selector against points whose distances are known, and a slow twin in plain loops."""

import itertools
import math

import faiss
import pytest
import reference
import torch

from hsg.strategy.selector import farthest_point_indices, mean_pairwise_distance

C, D = 8, 5


def directions(*degrees):
    radians = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], dim=-1)


def test_selection_order_by_hand():
    # Starting at 0 degrees: the farthest is 180, then 90 (90 away from both), then 45 (45 from 0 and 90) before 10.
    points = directions(0, 10, 90, 180, 45)
    assert farthest_point_indices(points, 5, start="first").tolist() == [0, 3, 2, 4, 1]
    assert farthest_point_indices(points, 2, start="first").tolist() == [0, 3]


def test_the_centroid_is_nearest_to_the_mean_of_unit_vectors():
    # Units at 0, 40 and 50 degrees: the mean points to 30.3, nearest 40.  Unnormalised, the long one pulls it to 0.
    points = directions(0, 50, 40) * torch.tensor([[100.0], [1.0], [1.0]])
    assert farthest_point_indices(points, 3).tolist() == [2, 0, 1]


def test_selection_minimises_the_largest_cosine_not_the_mean():
    # Selected 0 and 180.  80 degrees: cosines 0.17 and -0.17; 90: 0 and 0.  A mean would call them equal.
    points = directions(0, 180, 80, 90)
    assert farthest_point_indices(points, 3, start="first").tolist() == [0, 1, 3]


def test_equal_largest_cosines_tie_whatever_the_other_cosines_are():
    # Cosines with 0 and 1, which lie at 120 degrees: candidate 2 has 0.3 and 0, candidate 3 has 0.3 and -0.5.
    s = 3**0.5 / 2
    plane = torch.tensor([[1.0, 0.0], [-0.5, s], [0.3, 0.15 / s], [0.3, -0.35 / s]], dtype=torch.float64)
    points = torch.cat([plane, (1 - plane.square().sum(-1, keepdim=True)).clamp(min=0).sqrt()], dim=-1)
    assert farthest_point_indices(points, 3, start="first").tolist() == [0, 1, 2]


@pytest.mark.parametrize("start", ["centroid", "first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e-15, 1e15])
def test_equals_loops_on_every_group(start, dtype, scale):
    g = torch.Generator().manual_seed(3)
    embeddings = torch.randn(3, 2, C, D, generator=g).to(dtype) * scale
    embeddings[1, 1, 4:] = embeddings[1, 1, :4]  # duplicates
    actual = farthest_point_indices(embeddings, 6, start=start)
    assert actual.shape == (3, 2, 6)
    assert actual.dtype == torch.int64
    for p, n in itertools.product(range(3), range(2)):
        units = (embeddings[p, n].double() / scale).tolist()
        assert actual[p, n].tolist() == reference.farthest_points(units, 6, 0 if start == "first" else None)


def test_copies_tie_exactly_and_the_lowest_index_wins():
    # Scaled copies differ in the last bits after normalising; the first of them comes first all the same.
    g = torch.Generator().manual_seed(0)
    for size in (3, 16, 384):
        for _ in range(20):
            a, b = torch.randn(2, size, generator=g)
            factors = torch.rand(5, generator=g) * 10 + 0.1
            embeddings = torch.stack(
                [a, b * factors[0], b * factors[1], a * factors[2], b * factors[3], b * factors[4]]
            )
            assert farthest_point_indices(embeddings, 6, start="first").tolist() == [0, 1, 2, 3, 4, 5]


def test_near_copies_are_told_apart_below_float32_resolution():
    points = directions(0, 0.01, 0.03, 0.02)  # 1 - 1.5e-8, 1 - 1.4e-7, 1 - 6e-8: one float32 step is 6e-8
    assert farthest_point_indices(points, 4, start="first").tolist() == [0, 2, 1, 3]


def test_duplicates_still_give_distinct_indices():
    assert farthest_point_indices(torch.ones(5, 3), 5).tolist() == [0, 1, 2, 3, 4]
    assert farthest_point_indices(torch.ones(5, 3), 3, start="random", seed=1).unique().numel() == 3


def test_a_mean_without_direction_starts_at_the_lowest_index():
    for dtype in (torch.float32, torch.float64):
        for turn in range(10):
            points = directions(turn, 120 + turn, 240 + turn).to(dtype)  # sums to rounding noise
            assert farthest_point_indices(points, 1).tolist() == [0]
    assert farthest_point_indices(directions(10, 190), 2).tolist() == [0, 1]


def test_a_zero_vector_has_cosine_zero_with_everything():
    points = torch.cat([directions(0, 60), torch.zeros(1, 2, dtype=torch.float64)])
    assert farthest_point_indices(points, 3, start="first").tolist() == [0, 2, 1]  # cosine 0 is farther than 0.5
    assert farthest_point_indices(torch.zeros(4, 2), 4).tolist() == [0, 1, 2, 3]
    close = mean_pairwise_distance(points)
    assert close.item() == pytest.approx((0.5 + 1 + 1) / 3)


def test_random_start_follows_the_seed_and_differs_between_groups():
    embeddings = torch.randn(40, C, D, generator=torch.Generator().manual_seed(0))
    draws = [farthest_point_indices(embeddings, 3, start="random", seed=seed) for seed in (0, 0, 1)]
    assert draws[0].equal(draws[1])
    assert not draws[0].equal(draws[2])
    assert draws[0][:, 0].unique().numel() == C
    state = torch.get_rng_state()
    farthest_point_indices(embeddings, 3, start="random")
    assert torch.get_rng_state().equal(state)


def test_shapes_without_groups():
    assert farthest_point_indices(torch.zeros(0, 4, 2), 3).shape == (0, 3)
    assert farthest_point_indices(torch.ones(2, 1), 1).tolist() == [0]
    assert farthest_point_indices(torch.tensor([[1, 0], [0, 1]]), 2).tolist() == [0, 1]


def test_missing_neighbours_of_faiss_are_caught(monkeypatch):
    search = faiss.IndexFlatIP.search

    def forgetful(self, query, k):
        products, labels = search(self, query, k)
        labels[:, -1] = -1
        return products, labels

    monkeypatch.setattr(faiss.IndexFlatIP, "search", forgetful)
    with pytest.raises(AssertionError, match="faiss must return every one"):
        farthest_point_indices(torch.eye(3), 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: farthest_point_indices(torch.eye(3) * math.nan, 2), "embeddings must be finite"),
        (lambda: farthest_point_indices(torch.tensor([[math.inf, 1.0]]), 1), "embeddings must be finite"),
        (lambda: farthest_point_indices(torch.zeros(0, 3), 0), "at least one candidate, got C = 0"),
        (lambda: farthest_point_indices(torch.zeros(0, 3), 1), "at least one candidate, got C = 0"),
        (lambda: farthest_point_indices(torch.zeros(2, 0), 1), "with D >= 1"),
        (lambda: farthest_point_indices(torch.zeros(3), 1), r"embeddings must be \(\.\.\., C, D\)"),
        (lambda: farthest_point_indices(torch.eye(3), 4), r"num_selected must be in 1\.\.3 .*got 4"),
        (lambda: farthest_point_indices(torch.eye(3), 0), r"num_selected must be in 1\.\.3 .*got 0"),
        (lambda: farthest_point_indices(torch.eye(3), 1, start="last"), "start must be one of centroid, first, random"),
        (lambda: mean_pairwise_distance(torch.eye(3) / 0), "embeddings must be finite"),
    ],
)
def test_refusals_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_mean_pairwise_distance_by_hand():
    # Pairs of 0, 60 and 180 degrees: 1 - 0.5, 1 + 1, 1 + 0.5.  Lengths do not matter.
    points = directions(0, 60, 180) * torch.tensor([[3.0], [1.0], [0.2]])
    assert mean_pairwise_distance(points).item() == pytest.approx(4 / 3)
    assert mean_pairwise_distance(torch.ones(2, 4, 3)).tolist() == pytest.approx([0.0, 0.0])
    assert mean_pairwise_distance(torch.ones(2, 1, 3)).isnan().tolist() == [True, True]
