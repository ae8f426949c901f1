"""Execute notebooks top to bottom, and keep what stands in git free of outputs.

    python -m hsg.experiments.upkeep.notebooks              all of notebooks/, one after the other, each in its own kernel
    python -m hsg.experiments.upkeep.notebooks notebooks/05_read_a_run.ipynb
    python -m hsg.experiments.upkeep.notebooks --clear                  take outputs, counters and metadata out of the files

Exit status 1 where a cell raised, ran too long or ended its kernel, 2 for a file that is no notebook, before anything is
executed or cleared.  Deliberately absent: writing results back into the file (open it in Jupyter for that).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsg.config.arguments import Parser, refuse
from hsg.config.checks import require
from hsg.run.files import write_whole

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
KERNEL = "python3"
CELL_SECONDS = 900  # a cell may wait for the warm start, on a busy machine too
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": KERNEL},
    "language_info": {"name": "python"},
}


def read(path: Path) -> Any:
    """The notebook of a file. ValueError in one line where it holds none."""
    import nbformat

    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        # nbformat asks these of whatever it reads, and stumbles where they have no answer.
        cells = given["cells"] if isinstance(given, dict) and type(given.get("nbformat_minor")) is int else None
        if not isinstance(cells, list) or given.get("nbformat") != 4 or not all(isinstance(c, dict) for c in cells):
            raise ValueError("no cells in the format of nbformat 4")
        nbformat.validate(given)
    except nbformat.ValidationError as error:
        where = "".join(f"[{part!r}]" for part in error.absolute_path)
        problem = f"{where} {error.message:.100}".strip()
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        problem = getattr(error, "strerror", None) or getattr(error, "reason", None) or "nested too deep"
    except (ValueError, KeyError) as error:
        problem = f"no JSON ({error})" if isinstance(error, json.JSONDecodeError) else str(error)
    else:
        return nbformat.reads(json.dumps(given), as_version=4)  # joins the lines of sources
    raise ValueError(f"notebooks must be whole .ipynb files, got {str(path)!r}: {problem}; save it in Jupyter again")


def execute(path: Path, *, cwd: Path | None = None) -> Any:
    """The notebook with its outputs, every cell executed in order in a fresh kernel that begins in `cwd` (its own folder).

    nbclient.exceptions.CellExecutionError: a cell raised; its text is the cell and the traceback.
    """
    from nbclient import NotebookClient

    notebook = read(path)
    resources = {"metadata": {"path": str(cwd or path.parent)}}
    client = NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name=KERNEL, resources=resources)
    # Else each kernel warns of its local TCP port, and one that is ended within a cell tells of its closed sockets.
    client.extra_arguments = ["--IPKernelApp.log_level=CRITICAL"]
    client.execute()
    return notebook


def cleared(path: Path) -> str:
    """The file's text as it should stand in git: no outputs, no counters, no metadata but the kernel's."""
    import nbformat

    notebook = read(path)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        description="Execute notebooks top to bottom.",
        epilog="example: python -m hsg.experiments.upkeep.notebooks --clear",
    )
    parser.add_argument("notebooks", nargs="*", type=Path, help="files (default: all of notebooks/)")
    parser.add_argument("--clear", action="store_true", help="only take the outputs out of the files")
    try:
        given = parser.parse_args(arguments)
        paths = given.notebooks or sorted(FOLDER.glob("*.ipynb"))
        import nbclient
        from jupyter_client.kernelspec import NoSuchKernel

        for path in paths:
            plain = path.suffix == ".ipynb" and os.path.isfile(path)
            require(plain, "notebooks", ".ipynb files", str(path), "see notebooks/")
            read(path)
        if given.clear:
            _clear(paths)
            return 0
    except ValueError as error:
        return refuse(error)
    except ImportError as error:
        return refuse(ValueError(f"nbclient must be installed, got {error}; pip install hsg[notebooks]"))
    started = time.monotonic()
    for path in paths:
        began = time.monotonic()
        try:
            execute(path)
        except nbclient.exceptions.CellExecutionError as error:
            print(f"{path.name}\n{error}", file=sys.stderr)
            return 1
        except NoSuchKernel:
            return refuse(
                ValueError(f"ipykernel must be installed, got no kernel {KERNEL!r}; pip install hsg[notebooks]")
            )
        # The last: the kernel died, or never answered.
        except (nbclient.exceptions.CellTimeoutError, RuntimeError) as error:
            rule = f"run to its end, each cell within {CELL_SECONDS} s"
            return refuse(ValueError(f"{path.name} must {rule}, got {type(error).__name__}: {error!s:.300}"), status=1)
        print(f"{path.name:<48}{time.monotonic() - began:6.1f} s", flush=True)
    if len(paths) > 1:
        print(f"{'in all':<48}{time.monotonic() - started:6.1f} s")
    return 0


def _clear(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            write_whole(path, cleared(path))
        except OSError as error:
            raise ValueError(
                f"notebooks must be files that can be written, got {str(path)!r}: {error.strerror}"
            ) from None


if __name__ == "__main__":
    sys.exit(main())
