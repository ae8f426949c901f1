"""Seconds, FLOPs and memory that the metrics report."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import torch
from tiny import tiny_model

from hsg.measure.speed import Arithmetic, Clock, matmul_rate


def test_clock_adds_up_a_phase_and_counts_one_that_raised():
    clock = Clock()
    for _ in range(2):
        with clock("a"):
            time.sleep(0.01)
    try:
        with clock("b"):
            time.sleep(0.01)
            raise KeyError
    except KeyError:
        pass
    assert 0.02 <= clock.seconds["a"] <= clock.total() - clock.seconds["b"]
    assert clock.seconds["b"] >= 0.01


def test_flops_of_a_model_by_hand():
    model = tiny_model("llama")  # hidden 32, intermediate 48, 2 layers, 4 heads of 8, vocabulary 97
    body = 2 * (4 * 32 * 32 + 3 * 32 * 48)
    head = 32 * 97
    work = Arithmetic(model)
    assert work.flops(forwarded=1, sampled=0, trained=0, headed=0) == 2 * body
    assert work.flops(forwarded=5, sampled=3, trained=7, headed=2) == 2 * (body * (5 + 21) + head * (3 + 6))


def test_positions_are_looked_up_and_cost_no_product():
    body = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128)  # per layer: queries, keys, values; output; 4 x 32 wide and back
    assert Arithmetic(tiny_model("gpt2")).flops(forwarded=1, sampled=0, trained=0, headed=0) == 2 * body


def test_rate_is_of_this_machine():
    slow, quick = (matmul_rate(torch.device("cpu"), dtype) for dtype in (torch.float64, torch.float32))
    assert slow > 1e8
    assert 1e8 < quick < 1e14


def test_peak_memory_rises_with_what_is_held():
    code = """
        import torch
        from hsg.measure.speed import peak_memory_mb
        before = peak_memory_mb(torch.device("cpu"))
        held = torch.ones(40, 2**20)
        print(peak_memory_mb(torch.device("cpu")) - before)
    """  # in a process of its own: this one may have held more before
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).parents[2])  # fmt: skip
    assert 120 < float(done.stdout) < 240  # 160 MiB
