"""The program that runs inside the sandbox: a solution is called with the inputs of some tests, its answers are written.

    stdin    {"nonce", "prelude", "code", "entry_point", "calls": ["n=3", ...], "limits", "paths", "filter"}
    stdout   nonce {"compiled": true}             then one line per call, in order:
             nonce {"value": ...}                 what the solution returned, as plain data
             nonce {"error": "...", "kind": "TypeError"}
    stderr   ready                                before the solution's first line runs; what comes without it is our fault

The solution shares this process and may alter all of it, so nothing here is trusted: no expected answer ever enters, and
whatever is written is only data that the grader compares outside.  The nonce keeps a stray print from reading like a line.
Its source is handed to a bare interpreter with -c, so it imports the standard library only.

Deliberately absent: any comparison, exit status or count of passed tests; isolation of one call from the next (the
tests of a problem share one `Solution()`, as the data set's own checks do).
"""

import json
import linecache
import os
import random
import resource
import sys

FILE = "solution.py"
MAX_ERROR_CHARS = 2000
MAX_NODES = 100_000  # of a linked list or tree that is written out
MAX_DEPTH = 100  # of a value that is written out


def encode(value, depth=0):
    """A value as JSON data that is equal exactly when the values are equal; what is no plain data equals nothing.

    None, bool, int, float, str and list stand for themselves (so 1 == 1.0 == True, as in Python); tuples, sets, dicts,
    linked lists and trees are objects with one key.  Subclasses count as what they are made of, whatever their __eq__.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"a returned value must be at most {MAX_DEPTH} levels deep")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int.__add__(value, 0)
        # Decimal digits of a huge number take quadratic time and are refused past 4,300; hexadecimal ones are not.
        return number if -(2**63) <= number < 2**63 else {"int": hex(number)}
    if isinstance(value, float):
        return float.__add__(value, 0.0)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, depth + 1) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, depth + 1) for item in tuple.__iter__(value)]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((encode(item, depth + 1) for item in value), key=json.dumps)}
    if isinstance(value, dict):
        pairs = [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in dict.items(value)]
        return {"dict": sorted(pairs, key=lambda pair: json.dumps(pair[0]))}
    if hasattr(value, "val") and hasattr(value, "next"):
        return {"list_node": _list_values(value, depth)}
    if hasattr(value, "val") and hasattr(value, "left") and hasattr(value, "right"):
        return {"tree_node": _tree_values(value, depth)}
    return {"other": type(value).__name__}


def _list_values(node, depth):
    values = []
    while node is not None:
        values.append(encode(node.val, depth + 1))
        node = node.next
        if len(values) > MAX_NODES:
            raise ValueError(f"a linked list must have at most {MAX_NODES} nodes (does it run in a circle?)")
    return values


def _tree_values(root, depth):
    """Level by level, None for a missing child, none at the end: how the problems write a tree."""
    values, queue = [], [root]
    for node in queue:
        values.append(None if node is None else encode(node.val, depth + 1))
        if node is not None:
            queue += [node.left, node.right]
        if len(queue) > 2 * MAX_NODES:
            raise ValueError(f"a tree must have at most {MAX_NODES} nodes (does it run in a circle?)")
    while values and values[-1] is None:
        values.pop()
    return values


def describe(error):
    """Kind and traceback of an error, only the lines of the solution itself."""
    kind = type(error).__name__
    try:
        import traceback

        found = traceback.TracebackException.from_exception(error, limit=-20)
        # The recursion that led to a RecursionError says nothing after its first lines.
        found.stack[:] = [frame for frame in found.stack if frame.filename == FILE][-4:]
        text = "".join(found.format(chain=False)).rstrip()
    except BaseException:  # the error's own __str__ may raise anything
        text = kind
    return {"error": text[-MAX_ERROR_CHARS:], "kind": kind}


def set_limits(limits):
    """Resource limits of this process, which no solution can raise again (root in the weak mode could)."""
    sizes = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_STACK: 120 * 2**20,  # deep recursion through C code, such as functools.cache
    }
    for name, size in sizes.items():
        _, hard = resource.getrlimit(name)
        size = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(name, (size, size))


def confine(program):
    """Install a seccomp filter and die with the parent (bubblewrap does both itself, and sooner)."""
    import ctypes

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    parent_death_signal, no_new_privileges, set_seccomp, mode_filter = 1, 38, 22, 2
    libc.prctl(parent_death_signal, 9, 0, 0, 0)
    libc.prctl(no_new_privileges, 1, 0, 0, 0)
    if libc.prctl(set_seccomp, mode_filter, ctypes.byref(Filter(len(program) // 8, program))) != 0:
        raise OSError(ctypes.get_errno(), "seccomp is not available")


def main():
    job = json.load(sys.stdin)
    results = os.dup(1)
    set_limits(job["limits"])
    if job["filter"]:
        confine(bytes.fromhex(job["filter"]))
    sys.setrecursionlimit(50_000)
    sys.path[:] = [path for path in sys.path if path] + job["paths"]
    os.write(2, b"ready")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    head = job["nonce"] + " "

    def write(line):
        left = (head + json.dumps(line) + "\n").encode()
        while left:
            left = left[os.write(results, left) :]

    scope = {"__name__": "solution"}
    exec(compile(job["prelude"], "prelude.py", "exec"), scope)
    random.seed(0)  # a solution that draws at random earns the same reward every time
    linecache.cache[FILE] = (len(job["code"]), None, job["code"].splitlines(True), FILE)
    try:
        code = compile(job["code"], FILE, "exec")
    except BaseException as error:
        return write(describe(error) | {"compiled": False})
    write({"compiled": True})
    try:
        exec(code, scope)
        candidate = eval(job["entry_point"], scope)
    except BaseException as error:
        failure = describe(error)
        for _ in job["calls"]:
            write(failure)
        return None
    for call in job["calls"]:
        try:
            value = eval(f"_call_({call})", scope, {"_call_": candidate})
            line = {"value": encode(value)}
        except BaseException as error:
            line = describe(error)
        try:
            write(line)
        except BaseException as error:
            write(describe(error))
    return None


if __name__ == "__main__":
    main()
