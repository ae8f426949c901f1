"""Execute notebooks top to bottom, and keep what stands in git free of outputs.

    python -m experiments.notebooks                          all of notebooks/, one after the other, each in its own kernel
    python -m experiments.notebooks notebooks/05_read_a_run.ipynb
    python -m experiments.notebooks --clear                  take outputs, counters and metadata out of the files

Exit status 1 where a cell raised.  Deliberately absent: writing results back into the file (open it in Jupyter for that).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsg.arguments import Parser, refuse

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
CELL_SECONDS = 900  # a cell may wait for the warm start, on a busy machine too
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path, *, cwd: Path | None = None) -> Any:
    """The notebook with its outputs, every cell executed in order in a fresh kernel that begins in `cwd` (its own folder).

    nbclient.exceptions.CellExecutionError: a cell raised; its text is the cell and the traceback.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(cwd or path.parent)}}
    client = NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name="python3", resources=resources)
    client.extra_arguments = ["--IPKernelApp.log_level=ERROR"]  # else each kernel warns of its local TCP port
    client.execute()
    return notebook


def cleared(path: Path) -> str:
    """The file's text as it should stand in git: no outputs, no counters, no metadata but the kernel's."""
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        description="Execute notebooks top to bottom.", epilog="example: python -m experiments.notebooks --clear"
    )
    parser.add_argument("notebooks", nargs="*", type=Path, help="files (default: all of notebooks/)")
    parser.add_argument("--clear", action="store_true", help="only take the outputs out of the files")
    try:
        given = parser.parse_args(arguments)
        paths = given.notebooks or sorted(FOLDER.glob("*.ipynb"))
        for path in paths:
            if path.suffix != ".ipynb" or not path.is_file():
                raise ValueError(f"notebooks must be .ipynb files, got {str(path)!r}; see notebooks/")
        import nbclient
    except ValueError as error:
        return refuse(error)
    except ImportError as error:
        return refuse(ValueError(f"nbclient must be installed, got {error}; pip install hsg[notebooks]"))
    started = time.monotonic()
    for path in paths:
        if given.clear:
            path.write_text(cleared(path), encoding="utf-8")
            continue
        began = time.monotonic()
        try:
            execute(path)
        except nbclient.exceptions.CellExecutionError as error:
            print(f"{path.name}\n{error}", file=sys.stderr)
            return 1
        print(f"{path.name:<48}{time.monotonic() - began:6.1f} s", flush=True)
    if not given.clear and len(paths) > 1:
        print(f"{'in all':<48}{time.monotonic() - started:6.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
