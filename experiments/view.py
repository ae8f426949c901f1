"""Look at runs in a browser: one self-contained HTML file, no server, no network.

    python experiments/view.py runs/a [runs/b ...]       (or: hsg view runs/a runs/b)

Tasks, strategies and rollouts with what each was worth, transcripts, strategy maps, curves; several runs side by side.
What a model wrote is data and never markup: it stands in the page as compressed base64, is shown as text only, and the
page's own policy forbids every script but its own and every connection.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import os
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from hsg.config.arguments import Parser, refuse
from hsg.config.checks import require, require_folder_there

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
FILES = Path(__file__).resolve().parent / "viewer"
SCRIPTS = ("base", "data", "list", "tree", "transcript", "map", "curves", "main")
HEAD, TAIL = "<!--DATA-->", "<!--SCRIPT-->"


def write_page(
    folders: Sequence[Path], out: Path, *, every: int = 1, map_method: str = "auto", map_texts: int | None = None
) -> Path:
    """Write the page of some run folders to `out`, whole or not at all.

    every       keep the trajectories of each `every`-th iteration, and of the last (curves keep all)
    map_method  auto | encoder | words | none; map_texts at most are placed (see `experiments.viewer.maps.add_maps`)
    """
    from hsg.experiments.viewer.folder import read_run
    from hsg.experiments.viewer.maps import MAX_TEXTS, add_maps

    template, script, style = _page_files()
    title = " · ".join(folder.resolve().name for folder in folders)
    begin, rest = template.split(HEAD)
    middle, end = rest.split(TAIL)
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:"
    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8", newline="\n") as file:
            begin = begin.replace("{{POLICY}}", policy).replace("/*STYLE*/", style)
            file.write(begin.replace("{{TITLE}}", html.escape(printable(title))))  # last: a name may hold any of these
            runs = []
            vocabularies = []
            for place, folder in enumerate(tqdm(folders, desc="read runs", leave=False, disable=None)):
                seen: set[int] = set()

                def write_chunk(key: str, chunk: Any, seen: set[int] = seen) -> None:
                    _collect_ids(chunk, seen)
                    _write_data(file, key, chunk)

                runs.append(read_run(folder, f"chunk-{place}", write_chunk, every=every))
                vocabularies.append(token_texts(folder, seen, runs[-1]["notes"]) if seen else {})
            drawn = add_maps(runs, map_method, MAX_TEXTS if map_texts is None else map_texts)
            for run, vocabulary in zip(runs, vocabularies, strict=True):
                run["vocabulary"] = vocabulary
            made = time.strftime("%Y-%m-%d %H:%M")
            _write_data(file, "index", {"runs": runs, "map": drawn, "made": made})
            file.write(f"{middle}<script>{script}</script>{end}")
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)
    return out


def _page_files() -> tuple[str, str, str]:
    template = (FILES / "page.html").read_text(encoding="utf-8")
    scripts = [(FILES / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    return template, '"use strict";\n' + "\n".join(scripts), (FILES / "style.css").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _write_data(file: TextIO, key: str, data: Any) -> None:
    """One element that holds `data` as base64 of gzip of JSON: no byte of it can end the element."""
    packed = gzip.compress(to_json(data).encode("ascii"), compresslevel=6, mtime=0)
    file.write(f'<script type="text/plain" id="{key}">{base64.b64encode(packed).decode()}</script>\n')


def to_json(data: Any) -> str:
    """Strict ASCII JSON; numbers that JSON does not have become null."""
    try:
        return json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(data), allow_nan=False, separators=(",", ":"))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and data - data != 0 else data


def printable(text: str) -> str:
    """The text without what a terminal, a file or a title cannot hold."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _collect_ids(chunk: dict[str, Any], seen: set[int]) -> None:
    for record in (*chunk["strategies"], *chunk["trajectories"]):
        for owner in (record, *record["turns"]):
            seen.update(i for i in owner.get("tokens", {}).get("ids", ()) if isinstance(i, int))


def token_texts(folder: Path, ids: set[int], notes: list[str]) -> dict[int, str]:
    """The text of each id, by the tokenizer beside the newest checkpoint; none, and a note, where it does not load."""
    from hsg.model.models import load_tokenizer

    found = sorted(folder.glob("checkpoints/iteration_*/model/tokenizer_config.json"))
    if not found:
        notes.append("tokens are shown as numbers: the run has no checkpoint with a tokenizer")
        return {}
    try:
        tokenizer = load_tokenizer(found[-1].parent)
    except (ValueError, OSError) as error:
        notes.append(f"tokens are shown as numbers: {' '.join(str(error).split())}")
        return {}
    texts = {}
    for i in sorted(i for i in ids if 0 <= i < len(tokenizer)):
        texts[i] = tokenizer.decode([i])
        if "\ufffd" in texts[i]:  # part of a character: its own spelling says more
            texts[i] = str(tokenizer.convert_ids_to_tokens(i))
    return texts


def default_out(folders: Sequence[Path]) -> Path:
    """view.html inside the only run, or beside the runs when there are several."""
    if len(folders) == 1:
        return folders[0] / "view.html"
    return folders[0].resolve().parent / f"view-{'-'.join(f.resolve().name for f in folders)[:120]}.html"


def can_open() -> bool:
    """Whether there is a screen to open a browser on; a text browser in the terminal is not wanted."""
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def make_parser() -> Parser:
    parser = Parser(
        description="Look at runs in a browser: one self-contained HTML file.",
        epilog="examples:  hsg view runs/a          hsg view runs/a runs/b --out both.html --no-open",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders; two can be seen side by side")
    parser.add_argument("--out", type=Path, help="the file; default: view.html in the run folder, or beside several")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="trajectories of each K-th iteration only")
    parser.add_argument(
        "--map",
        choices=("auto", "encoder", "words", "none"),
        default="auto",
        help="what places strategies on the map: the run's encoder or words in common (auto: the encoder if it loads)",
    )
    parser.add_argument("--map-texts", type=int, metavar="U", help="texts placed on the map (default 2000; 0: all)")
    parser.add_argument("--no-open", action="store_true", help="only write the file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, say where it is, and open it where there is a screen. Exit status 2 and one line for bad input."""
    try:
        options = make_parser().parse_args(arguments)
        for folder in options.runs:
            known = any(os.path.exists(folder / name) for name in ("config.yaml", "metrics.jsonl", "trajectories"))
            if not known:
                require_folder_there(str(folder), "RUN")
                raise ValueError(f"RUN must be a run folder, got {str(folder)!r}; it has no config.yaml")
        if options.every < 1:
            raise ValueError(f"--every must be >= 1, got {options.every}; 1 keeps all iterations")
        texts = options.map_texts
        require(texts is None or texts >= 0, "--map-texts", ">= 0", texts, "0 places all")
        out = options.out or default_out(options.runs)
        if not out.name:
            raise ValueError(f"--out must be a file that can be written, got {str(out)!r}; name a file")
        try:
            write_page(options.runs, out, every=options.every, map_method=options.map, map_texts=options.map_texts)
        except OSError as error:
            raise ValueError(f"--out must be a file that can be written, got {str(out)!r}: {error.strerror}") from error
    except ValueError as error:
        return refuse(error)
    print(f"{printable(str(out))}  ({out.stat().st_size / 1e6:.1f} MB)")
    if not options.no_open and can_open():
        webbrowser.open(out.resolve().as_uri())
    return 0


if __name__ == "__main__":
    sys.exit(main())
