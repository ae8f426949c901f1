"""Notebooks: what stands in git is clean, small and portable; each one runs from top to bottom and shows something.

That numbers computed by hand equal those of the trainer is asserted inside of the notebooks.
"""

from __future__ import annotations

import ast
import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest

from hsg.experiments.upkeep import notebooks
from hsg.experiments.upkeep.notebooks import FOLDER, cleared, execute, main

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_LINES = 10  # of a function or class that a notebook defines
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [{**cell, "text": "".join(cell["source"])} for cell in found if cell["cell_type"] == kind]


def too_long(code: str) -> list[str]:
    """Names of definitions of more than MAX_LINES lines. Of a file that a cell writes, functions alone count."""
    written, _, rest = code.partition("\n")
    kinds: tuple[type[ast.AST], ...] = (ast.FunctionDef, ast.AsyncFunctionDef)
    if written.startswith("%%writefile"):
        if not written.strip().endswith(".py"):
            return []
        code = rest
    else:
        kinds = (*kinds, ast.ClassDef)
        code = re.sub(r"(?m)^[%!].*$", "pass", code)
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, kinds):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])  # type: ignore[attr-defined]
            if node.end_lineno - first + 1 > MAX_LINES:  # type: ignore[attr-defined]
                found.append(node.name)  # type: ignore[attr-defined]
    return found


def machine_paths(text: str) -> list[str]:
    """Absolute paths in a text: they are of one machine, whichever it is."""
    return re.findall(
        r"(?<![\w.:/\\])/(?:work|home|root|tmp|mnt|opt|Users|usr|var|data|scratch)\b[\w/.-]*|[A-Z]:\\\w+", text
    )


def test_six_notebooks_in_order():
    assert [path.name[:3] for path in NOTEBOOKS] == [f"0{i}_" for i in range(1, len(NOTEBOOKS) + 1)]
    assert len(NOTEBOOKS) == 6


@each
def test_file_is_as_it_should_stand_in_git(path):
    assert path.read_text(encoding="utf-8") == cleared(path), "python -m hsg.experiments.upkeep.notebooks --clear"


@each
def test_reads_like_a_lecture(path):
    """A headline, and prose before each code cell (two in a row: the second draws what the first computed)."""
    kinds = [cell["cell_type"] for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    texts = cells(path, "markdown")
    assert texts[0]["text"].startswith(f"# {path.name[:2]} · ")
    assert "code code code" not in " ".join(kinds)
    assert [cell["id"] for cell in texts if len(cell["text"]) > 1600] == []
    ids = [cell["id"] for kind in ("code", "markdown") for cell in cells(path, kind)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z][a-z0-9-]*", name) for name in ids)


@each
def test_definitions_are_short(path):
    assert {cell["id"]: found for cell in cells(path, "code") if (found := too_long(cell["text"]))} == {}


@each
def test_names_no_path_of_a_machine(path):
    found = [cell["text"] for kind in ("code", "markdown") for cell in cells(path, kind)]
    assert machine_paths("\n".join(found)) == []


def test_checks_see_what_they_should():
    long = "def f():\n" + "    pass\n" * MAX_LINES
    assert too_long(long) == ["f"]
    assert too_long("@g\n" + long.replace("    pass\n", "", 1)) == ["f"]
    assert too_long("%%writefile {LAB}/a.py\n" + long) == ["f"]
    assert too_long("%%writefile {LAB}/a.py\nclass A:\n" + "    x = 1\n" * 20) == []
    assert too_long("class A:\n" + "    x = 1\n" * MAX_LINES) == ["A"]
    assert too_long("!ls\nx = 1") == []
    assert machine_paths("see /home/me/x.py and /tmp/a, C:\\runs") == ["/home/me/x.py", "/tmp/a", "C:\\runs"]
    assert machine_paths("a / b, runs/home/x, https://x.org/home") == []


def test_clear_takes_results_out(tmp_path, capsys):
    import nbformat

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1", id="sum")], metadata={"mine": 1})
    path = tmp_path / "a.ipynb"
    book.cells[0].outputs = [nbformat.v4.new_output("stream", text="2")]
    book.cells[0].execution_count = 7
    nbformat.write(book, path)
    assert main(["--clear", str(path)]) == 0
    after = json.loads(path.read_text())
    assert after["cells"] == [
        {"cell_type": "code", "execution_count": None, "id": "sum", "metadata": {}, "outputs": [], "source": ["1 + 1"]}
    ]
    assert list(after["metadata"]) == ["kernelspec", "language_info"]
    assert main([str(tmp_path / "none.ipynb")]) == 2
    assert capsys.readouterr().err.startswith("error: notebooks must be .ipynb files, got ")


WHOLE = {
    "cells": [
        {
            "cell_type": "code",
            "execution_count": 3,
            "id": "sum",
            "metadata": {},
            "outputs": [],
            "source": ["1 +\n", "1"],
        }
    ],
    "metadata": {},
    "nbformat": 4,
    "nbformat_minor": 5,
}
BARE = {key: value for key, value in WHOLE["cells"][0].items() if key != "metadata"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "no JSON (Expecting value: line 1 column 1 (char 0))"),
        (json.dumps(WHOLE)[:60].encode(), "no JSON ("),
        (b"x = 1", "no JSON ("),
        (b"\xff\xfe", "invalid start byte"),
        (b"[" * 100000, "nested too deep"),
        (b"1" * 5000, "Exceeds the limit"),
        (b"[1]", "no cells"),
        (b"{}", "no cells"),
        (json.dumps({**WHOLE, "cells": 5}), "no cells"),
        (json.dumps({**WHOLE, "cells": [1]}), "no cells"),
        (json.dumps({**WHOLE, "nbformat": 3}), "no cells in the format of nbformat 4"),
        (json.dumps({**WHOLE, "nbformat_minor": "5"}), "no cells"),
        (json.dumps({key: value for key, value in WHOLE.items() if key != "cells"}), "cells"),
        (json.dumps({**WHOLE, "metadata": 5}), "['metadata'] 5 is not of type 'object'"),
        (json.dumps({**WHOLE, "cells": [BARE]}), "['cells'][0] 'metadata' is a required property"),
        (json.dumps({**WHOLE, "cells": [{**BARE, "metadata": {}, "source": 5}]}), "['cells'][0]"),
    ],
)
@pytest.mark.parametrize("clear", [["--clear"], []])
def test_a_file_that_is_no_notebook_is_one_line(content, problem, clear, tmp_path, capfd):
    """Nothing is executed, and the whole one that is named before it is not cleared."""
    whole, broken = tmp_path / "a.ipynb", tmp_path / "b.ipynb"
    whole.write_text(json.dumps(WHOLE))
    content = content.encode() if isinstance(content, str) else content
    broken.write_bytes(content)
    assert main([*clear, str(whole), str(broken)]) == 2
    said = capfd.readouterr()
    assert said.err.startswith(f"error: notebooks must be whole .ipynb files, got {str(broken)!r}: ")
    assert problem in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert whole.read_text() == json.dumps(WHOLE)
    assert broken.read_bytes() == content


def test_a_full_disk_leaves_the_notebook_as_it_was(tmp_path, capsys):
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(WHOLE))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert main(["--clear", str(path)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert error.startswith(f"error: notebooks must be files that can be written, got {str(path)!r}: ")
    assert error.count("\n") == 1
    assert path.read_text() == json.dumps(WHOLE)
    assert [file.name for file in tmp_path.iterdir()] == ["a.ipynb"]


def test_a_kernel_that_is_missing_is_one_line(tmp_path, capfd, monkeypatch):
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(WHOLE))
    monkeypatch.setattr(notebooks, "KERNEL", "no-such-kernel")
    assert main([str(path)]) == 2
    said = "error: ipykernel must be installed, got no kernel 'no-such-kernel'; pip install hsg[notebooks]\n"
    assert capfd.readouterr().err == said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import time; time.sleep(60)", "CellTimeoutError: A cell timed out"),
        ("import os; os._exit(3)", "DeadKernelError"),
    ],
)
def test_a_cell_that_does_not_end_is_one_line(code, problem, tmp_path, capfd, monkeypatch):
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({**WHOLE, "cells": [{**WHOLE["cells"][0], "source": [code]}]}))
    monkeypatch.setattr(notebooks, "CELL_SECONDS", 5)
    assert main([str(path)]) == 1
    error = capfd.readouterr().err
    assert error.startswith(f"error: a.ipynb must run to its end, each cell within 5 s, got {problem}")
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_cell_that_raises_is_a_failure(tmp_path, capsys):
    import nbformat

    path = tmp_path / "a.ipynb"
    code = ["x = 1", "assert x == 2, 'not two'", "print('never')"]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in code]), path)
    assert main([str(path)]) == 1
    assert "not two" in capsys.readouterr().err


@pytest.mark.slow
@each
def test_runs_from_top_to_bottom(path):
    """In its own folder or in the repository's root; nothing raises, and every plot is drawn."""
    done = execute(path, cwd=ROOT if int(path.name[:2]) % 2 == 0 else FOLDER)
    code = [cell for cell in done.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    said = "".join(o.text for o in outputs if o.output_type == "stream")
    assert "Traceback" not in said
    drawn = [o for o in outputs if o.output_type == "display_data" and "image/png" in o.data]
    assert len(drawn) == sum(cell.source.count("plt.show()") for cell in code)
