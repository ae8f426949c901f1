"""`make bench`: hsg against TRL's GRPOTrainer on the scripted workload, with turns and with the size of the group.

    turns 8, 16, 32 at a group of 32     group 16, 32, 64 at 8 turns     programs in turns, one thread each, CPU only

Prints Markdown and writes it, with every run's numbers, into --out.  Exit code 1 where the programs did not do the same
work: other token ids, other gradients.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hsg.experiments.benchmarks.compare import ROOT, Comparison, Size, compare, growth, programs, table

PACKAGES = ("torch", "transformers", "accelerate", "trl")


def machine(pythons: Mapping[str, str]) -> str:
    """One line on the hardware, one on the software of each program."""
    words = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in words.splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    lines = [
        f"{datetime.date.today()}, {names[0] if names else platform.processor()}, {os.cpu_count()} cores, "
        f"{memory:.0f} GiB, one torch thread, load before {os.getloadavg()[0]:.1f}"
    ]
    code = (
        "import sys, importlib.metadata as m\n"
        "have = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "print('Python ' + sys.version.split()[0], *(f'{n} {have[n]}' for n in sys.argv[1:] if n in have), sep=', ')"
    )
    for name, python in pythons.items():
        command = [python, "-c", code, *PACKAGES]
        lines.append(f"{name}: " + subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    return "\n".join(f"- {line}" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", default="8,16,32", help="mean turns at a group of 32, with commas")
    parser.add_argument("--groups", default="16,32,64", help="sizes of the group at 8 turns, with commas; empty: none")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps per run, the first one warm-up")
    parser.add_argument("--trl-python", default=str(ROOT / ".venv-bench" / "bin" / "python"))
    parser.add_argument("--only", default="", help="names of programs, with commas")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench")
    given = parser.parse_args()
    chosen = programs(given.trl_python, given.only)
    head = machine({name: command[0] for name, command in chosen.items()})
    done: dict[Size, Comparison] = {}

    def measure(sizes: list[Size]) -> list[Comparison]:
        for size in sizes:
            if size not in done:
                done[size] = compare(chosen, size, given.reps)
        return [done[size] for size in sizes]

    turns = [Size(t, t // 4, given.steps) for t in map(int, filter(None, given.turns.split(",")))]
    groups = [Size(8, 2, given.steps, G=g) for g in map(int, filter(None, given.groups.split(",")))]
    parts = [f"# hsg against TRL's GRPOTrainer, {given.reps} runs each, medians", head]
    for sizes, axis in ((turns, "turns"), (groups, "G")):
        if sizes:
            comparisons = measure(sizes)
            parts.append(table(comparisons))
            if len(sizes) > 1:
                parts.append(growth(comparisons, axis))
    faults = [
        f"{size}: {what} differ"
        for size, c in done.items()
        for what, same in (("token ids", c.same_tokens()), ("gradient norms", c.same_gradients()))
        if not same
    ]
    parts.append("\n".join(faults) or "All programs handled the same token ids and had the same gradient norms.")
    text = "\n\n".join(parts) + "\n"
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "bench.md").write_text(text, encoding="utf-8")
    runs = [{"size": vars(size), "runs": c.runs} for size, c in done.items()]
    (given.out / "bench.json").write_text(json.dumps(runs), encoding="utf-8")
    print(text)
    print(f"written to {given.out / 'bench.md'} and bench.json", file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
