"""Where a run comes from: the command, the commit, the versions, the machine. What a reader of the folder asks a year later.

Each start of a run adds one entry to `run.json`, the first and every resumption.  Deliberately absent: environment
variables (keys stand among them), the state of the checkout beyond "changed".
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("hsg", "torch", "transformers", "accelerate", "peft", "flash-attn", "faiss-cpu", "numpy")


def origin() -> dict[str, Any]:
    """This process: plain values, ready for JSON."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(sys.argv) if " " not in sys.argv[0] else f"{sys.argv[0]} {shlex.join(sys.argv[1:])}",
        "folder": os.getcwd(),
        "commit": commit(),
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else ["cpu"],
    }


def commit() -> str:
    """The commit of this checkout, with a + where its files differ from it; "unknown" outside of one."""
    here = Path(__file__).resolve().parent
    git = ["git", "-C", str(here)]
    try:
        # An installed copy may lie in somebody else's checkout, whose commit says nothing of it.
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=True)
        name = subprocess.run([*git, "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
