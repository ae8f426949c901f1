"""Make the packaged files of this environment again (users never need to; experts.jsonl.gz: see expert.py).

python -m hsg.environments.sciworld.build --jar      Engine.java -> engine.jar, Java 8 byte code (needs a JDK)
python -m hsg.environments.sciworld.build --splits   the engine's official splits -> splits.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile

from hsg.environments.sciworld.catalog import SPLITS_FILE, ask_engine
from hsg.environments.sciworld.engine import ENGINE_JAR, HERE, find_jar


def build_jar() -> None:
    """Compile Engine.java. The fixed date makes the same sources give the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--release", "8", "-Xlint:-options", "-cp", str(find_jar()), "-d", folder]
        subprocess.run(["javac", *options, str(HERE / "Engine.java")], check=True)
        date = "--date=2026-01-01T00:00:00Z"
        subprocess.run(["jar", "--create", "--file", str(ENGINE_JAR), date, "-C", folder, "."], check=True)


def build_splits() -> None:
    rows = (f"{json.dumps(task)}: {json.dumps(ranges)}" for task, ranges in ask_engine().items())
    SPLITS_FILE.write_text("{\n " + ",\n ".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jar", action="store_true")
    parser.add_argument("--splits", action="store_true")
    options = parser.parse_args()
    if options.jar:
        build_jar()
    if options.splits:
        build_splits()
