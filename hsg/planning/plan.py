"""Memory and time of a configuration before anything is loaded: `hsg plan --config X --gpus 8 --gpu-memory 80`.

    config.json + options ── footprint ──> bytes per rank, by purpose
                          ── work ───────> FLOPs and bytes ──> the fewest seconds that an iteration can take
                          ── fit ────────> the largest micro-batch and cache that leave `--reserve` of the memory free

Deliberately absent: what was measured on GPUs (nothing was), time of environments, of Python and between GPUs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hsg.config.arguments import Parser, refuse
from hsg.config.checks import require
from hsg.config.loading import load_config
from hsg.config.options import Config
from hsg.planning.architecture import read_architecture
from hsg.planning.footprint import (
    Footprint,
    Lengths,
    Rows,
    Setting,
    Work,
    footprint,
    microbatch_tokens,
    rows_of,
    setting_of,
    work,
)
from hsg.planning.sizes import Architecture

GIB = 2**30
MEANINGS = {
    "weights": "float32 master weights",
    "gradients": "update: float32, given back before the next rollout",
    "moments": "AdamW's two",
    "reference": "the initial policy, for KL or judgment",
    "critic": "whole on each rank, with its gradients and moments",
    "gathered": "rollout: whole weights in the compute dtype",
    "cache": "rollout: keys and values, of rows or of all candidates",
    "forward": "rollout: one forward of a stream",
    "borrowed": "update: weights in the compute dtype, gradients on their way",
    "activations": "update: kept for the backward pass of a micro-batch",
    "flowing": "update: a chunk of logits, or gradients in a layer",
    "scratch": "optimizer step",
}
PHASES = {
    "held": "all the time", "rollout": "held + gathered + cache + forward",
    "update": "held + gradients + borrowed + activations + flowing", "step": "held + gradients + scratch",
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Everything that the table says."""

    model: Architecture
    config: Config
    setting: Setting
    bytes: Footprint
    rows: Rows
    work: Work
    memory: float  # bytes of a GPU that may be used
    microbatch: int | None  # the largest update.microbatch_tokens that fits
    cache_tokens: int | None  # the largest rollout.max_cache_tokens that fits


def make_plan(model: Architecture, config: Config, setting: Setting, memory: float, lengths: Lengths) -> Plan:
    """The plan for GPUs with `memory` usable bytes."""

    def with_microbatch(tokens: int) -> Footprint:
        changed = replace(config, update=replace(config.update, microbatch_tokens=tokens))
        return footprint(model, changed, setting, lengths)

    def with_cache(tokens: int) -> Footprint:
        changed = replace(config, rollout=replace(config.rollout, max_cache_tokens=tokens))
        return footprint(model, changed, setting, lengths)

    return Plan(
        model,
        config,
        setting,
        footprint(model, config, setting, lengths),
        rows_of(config, model, setting.gpus, lengths),
        work(model, config, setting, lengths),
        memory,
        largest(lambda tokens: with_microbatch(tokens).update <= memory, 2**24),
        largest(lambda tokens: with_cache(tokens).rollout <= memory, 2**34),
    )


def largest(fits: Callable[[int], bool], limit: int) -> int | None:
    """The largest number from 1 to `limit` that fits, where smaller ones do too; None: not even 1."""
    if not fits(1):
        return None
    low, high = 1, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def table(plan: Plan) -> list[tuple[str, str, str]]:
    """(what, how much, meaning) line by line."""
    kept = [(name, count) for name, count in plan.bytes.items() if count]
    lines = [(name, f"{count / GIB:.2f} GiB", MEANINGS[name]) for name, count in kept]
    lines += [(name, f"{getattr(plan.bytes, name) / GIB:.2f} GiB", meaning) for name, meaning in PHASES.items()]
    word = "fits" if plan.bytes.peak <= plan.memory else "DOES NOT FIT"
    lines.append(("peak", f"{plan.bytes.peak / GIB:.2f} GiB", f"{word} into {plan.memory / GIB:.1f} GiB"))
    return lines


def advice(plan: Plan) -> list[str]:
    """The largest options that fit, in sentences."""
    rows, config = plan.rows, plan.config
    said = []
    used = microbatch_tokens(config, rows)
    if plan.microbatch is None or plan.microbatch < rows.length:
        said.append(
            f"no update fits: one row of {rows.length:,} tokens is a micro-batch of its own; more GPUs, "
            "model.gradient_checkpointing, distributed.cpu_offload, model.lora.rank or a lower rollout.max_tokens"
        )
    else:
        said.append(f"largest update.microbatch_tokens that fits: {_capped(plan.microbatch, 2**24)} (now {used:,})")
    if plan.cache_tokens is None:
        said.append(
            "no rollout fits, not even of one row: more GPUs, rollout.weights=sharded, model.lora.rank, or fewer "
            "candidates at once (num_tasks, sigma)"
        )
    else:
        fitting = replace(config, rollout=replace(config.rollout, max_cache_tokens=plan.cache_tokens))
        at_once = rows_of(fitting, plan.model, plan.setting.gpus, Lengths(rows.length)).at_once
        said.append(
            f"largest rollout.max_cache_tokens that fits: {_capped(plan.cache_tokens, 2**34)} (now "
            f"{config.rollout.max_cache_tokens:,}): {at_once} trajectories at once"
        )
    return said


def _capped(number: int, limit: int) -> str:
    return "any" if number == limit else f"{number:,}"


def show(plan: Plan, tflops: float | None, bandwidth: float, told: str) -> str:
    """The whole answer as text; without a rate, `told` says why there is no time in it."""
    setting, rows = plan.setting, plan.rows
    spread = f"sharded over {setting.shards}" if setting.sharded else "whole on each"
    dtype = "bfloat16" if setting.half else "float32"
    lines = [
        f"{plan.config.model.path}: {plan.model.parameters / 1e9:.2f} B parameters, {setting.gpus} GPUs, {spread}, {dtype}",
        f"{rows.trajectories} trajectories a rank and iteration, {rows.at_once} at once, rows of up to {rows.length:,} tokens",
        "",
    ]
    if plan.model.settings:
        lines.insert(
            1, f"expected: {plan.model.settings}, asked of a tiny twin; memory is counted as with cache and packing"
        )
    entries = table(plan)
    width = max(len(amount) for _, amount, _ in entries)
    for name, amount, meaning in entries:
        lines += [""] if name == "held" else []
        lines.append(f"  {name:<12}{amount:>{width}}   {meaning}")
    lines += ["", *advice(plan), ""]
    if tflops is None:
        return "\n".join([*lines, f"no time of an iteration: {told}"])
    rollout, update = plan.work.seconds(tflops, bandwidth)
    lines.append(
        f"an iteration takes at least {_time(rollout)} of rollout and {_time(update)} of update with rows that long and "
        f"responses at their limit ({told}; environments, Python and links come on top)"
    )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    for limit, unit, name in ((600, 1, "s"), (36000, 60, "min")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 3600:.0f} h"


COLUMNS = (
    "GPUs", "held", "gathered", "cache", "rollout", "update", "peak", "fits", "largest `update.microbatch_tokens`",
    "largest `rollout.max_cache_tokens`",
)  # fmt: skip
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def markdown(plan: Plan) -> str:
    """One line of the tables in docs/scaling.md: GiB on the fullest rank, and the largest options that fit."""
    size = plan.bytes
    cells = [size.held, size.gathered, size.cache, size.rollout, size.update, size.peak]
    batch = "none" if plan.microbatch is None or plan.microbatch < plan.rows.length else _capped(plan.microbatch, 2**24)
    cache = "none" if plan.cache_tokens is None else _capped(plan.cache_tokens, 2**34)
    fits = "yes" if size.peak <= plan.memory else "no"
    numbers = " | ".join(f"{cell / GIB:.1f}" for cell in cells)
    return f"| {plan.setting.gpus} | {numbers} | {fits} | {batch} | {cache} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, also where nothing fits; 2 bad input."""
    try:
        print(_answer(arguments))
    except ValueError as error:
        return refuse(error)
    return 0


def _answer(arguments: Sequence[str] | None) -> str:
    parser = Parser(
        description="Memory and time of a configuration on GPUs, before anything is loaded.",
        epilog="example: hsg plan --config experiments/configs/sciworld_qwen2.5-7b.yaml --gpus 8 --gpu-memory 80",
    )
    parser.add_argument("--config", help="YAML with the differences from defaults")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one key; repeatable")
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=[1], help="ranks; several numbers: a table in Markdown, in GiB"
    )
    parser.add_argument("--gpus-per-host", type=int, default=8, help="for distributed.sharding=hybrid (8)")
    parser.add_argument("--gpu-memory", type=float, default=80.0, help="GiB of each (80)")
    parser.add_argument("--reserve", type=float, default=0.1, help="share left to CUDA and to fragments (0.1)")
    parser.add_argument("--row-tokens", type=int, help="the longest row you expect (default: the longest allowed)")
    parser.add_argument("--turn-tokens", type=int, default=256, help="new tokens of a row between two responses (256)")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="tokens before a strategy (1024)")
    parser.add_argument(
        "--tflops", type=float, help="1e12 FLOPs/s that a rank achieves (default: timed on the GPU here)"
    )
    parser.add_argument("--bandwidth", type=float, default=2.0, help="1e12 bytes/s that its memory gives (2.0)")
    options = parser.parse_args(arguments)
    for name in ("gpus_per_host", "gpu_memory", "row_tokens", "turn_tokens", "prompt_tokens", "tflops", "bandwidth"):
        value = getattr(options, name)
        possible = value is None or 0 < value < math.inf
        require(possible, f"--{name.replace('_', '-')}", "> 0 and finite" if value == math.inf else "> 0", value)
    require(min(options.gpus) > 0, "--gpus", "> 0", min(options.gpus))
    require(0 <= options.reserve < 1, "--reserve", "in [0, 1)", options.reserve)
    config = load_config(options.config, options.set)
    model = read_architecture(config)
    memory = options.gpu_memory * GIB * (1 - options.reserve)
    lengths = Lengths(options.row_tokens, options.turn_tokens, options.prompt_tokens)
    settings = [setting_of(config, gpus, gpus_per_host=options.gpus_per_host) for gpus in options.gpus]
    plans = [make_plan(model, config, setting, memory, lengths) for setting in settings]
    if len(plans) > 1:
        return "\n".join([HEAD, *map(markdown, plans)])
    return show(plans[0], *_rates(options.tflops, options.bandwidth, plans[0].setting))


def _rates(tflops: float | None, bandwidth: float, setting: Setting) -> tuple[float | None, float, str]:
    """(TFLOP/s, TB/s, both in words); no TFLOP/s where none are given and there is no GPU whose rate could be taken."""
    where = "as given"
    if tflops is None:
        none = None, bandwidth, "this machine has no GPU to time; --tflops and --bandwidth say what yours achieve"
        if not _may_have_gpu():
            return none
        import torch

        from hsg.measure.speed import matmul_rate
        from hsg.ranks.distributed import has_accelerator

        if not (has_accelerator() and torch.cuda.is_available()):
            return none
        tflops = matmul_rate(torch.device("cuda"), torch.bfloat16 if setting.half else torch.float32) / 1e12
        where = "a matrix product on this machine's GPU; --tflops says another"
    return tflops, bandwidth, f"{tflops:.3g} TFLOP/s, {where}; {bandwidth:g} TB/s"


def _may_have_gpu() -> bool:
    """False where no driver has put its device there: then torch, which takes seconds to be asked, finds none either."""
    devices = ("nvidia*", "kfd", "dxg")  # CUDA's, ROCm's, and that of Windows below a Linux
    return sys.platform != "linux" or any(next(Path("/dev").glob(name), None) for name in devices)


if __name__ == "__main__":
    sys.exit(main())
