"""Count what a program does to files below a directory, and which programs it starts, by strace.

strace(1) stops a process only at the system calls that are counted (`--seccomp-bpf`), and writes
one file per thread, so that no line is cut in two. Belongs here: running and reading strace. Does
not belong here: what the counts mean (`hpctrain.plan.footprint`), what is traced (`small_runs`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.plan.footprint.table import Operation

# The kind of each system call that names a file; all others of the class %file are refused, so that
# none is left out without notice.
_KINDS: dict[str, Operation] = {
    **dict.fromkeys(("open", "openat", "openat2", "creat"), "open"),
    **dict.fromkeys(("stat", "lstat", "newfstatat", "statx", "access", "faccessat"), "stat"),
    **dict.fromkeys(("faccessat2", "readlink", "readlinkat", "statfs"), "stat"),
    **dict.fromkeys(("rename", "renameat", "renameat2", "link", "linkat"), "rename"),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), "unlink"),
    **dict.fromkeys(("mkdir", "mkdirat"), "mkdir"),
}
_NOT_COUNTED = frozenset({"execve", "execveat", "chdir", "getcwd", "clone", "clone3"})
_CALL = re.compile(r"(\w+)\((.*)")
# A path, and the directory to which it is relative, as `--decode-fds` prints it.
_PATH = re.compile(r'(?:(?:AT_FDCWD|\d+)<(?P<base>[^>]*)>, )?"(?P<path>(?:[^"\\]|\\.)*)"')
_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Call:
    """One counted system call; `path` is relative to the directory that was asked about.

    `process`: its number; a thread counts as the process that has started it.
    """

    operation: Operation
    path: str
    process: int


def strace_command(directory: Path, name: str, *, beside: bool = False) -> list[str]:
    """The words before a command that is to be traced; its traces are `directory/name.TID`.

    With `beside` the program keeps its place as child of the caller, and the tracer is its
    grandchild: for programs that are signalled.
    """
    return [
        *("strace", "--follow-forks", "--output-separately", "--seccomp-bpf", "--decode-fds=path"),
        *("--trace=%file,clone,clone3", "--signal=none", "--quiet=all", "--string-limit=4096"),
        *(("--daemonize=grandchild",) if beside else ()),
        f"--output={directory / name}",
    ]


def calls_below(
    root: Path, traces: Path, name: str, without: Collection[int] = ()
) -> Counter[Call]:
    """Count calls on paths below `root`. `without`: threads whose calls do not count.

    Raises ValueError for a system call that has no kind.
    """
    found: Counter[Call] = Counter()
    process_of = _processes(traces, name)
    prefix = f"{os.path.abspath(root)}/"
    for thread, call, rest in _lines(traces, name, without):
        if prefix not in rest or call in _NOT_COUNTED:
            continue
        paths = [
            os.path.normpath(os.path.join(match["base"] or "/", match["path"]))
            for match in _PATH.finditer(rest)
            if match["path"]  # an empty one names an open file (AT_EMPTY_PATH)
        ]
        if not paths or not (place := paths[-1 if _KINDS.get(call) == "rename" else 0]).startswith(
            prefix
        ):
            continue
        if call not in _KINDS:
            raise ValueError(f"strace has seen `{call}`, which has no kind: {rest[:200]}")
        process = process_of.get(thread, thread)
        found[Call(_KINDS[call], place.removeprefix(prefix), process)] += 1
    return found


def programs(traces: Path, name: str) -> list[list[str]]:
    """The words of every command that was started (execve(2)) and found, in no order."""
    return [
        _WORD.findall(rest.partition("[")[2].partition("], 0x")[0])
        for _, call, rest in _lines(traces, name)
        if call == "execve" and rest.rstrip().endswith("= 0")
    ]


def _processes(traces: Path, name: str) -> dict[int, int]:
    """The process of each thread that clone(2) has made with CLONE_THREAD."""
    made = {
        int(match[1]): thread
        for thread, call, rest in _lines(traces, name)
        if call.startswith("clone") and "CLONE_THREAD" in rest
        if (match := re.search(r"= (\d+)$", rest.rstrip()))
    }
    found = {}
    for thread in made:
        process = thread
        while process in made:
            process = made[process]
        found[thread] = process
    return found


def _lines(
    traces: Path, name: str, without: Collection[int] = ()
) -> Iterator[tuple[int, str, str]]:
    """Thread, system call and the rest of each line."""
    for path in sorted(traces.glob(f"{name}.*")):
        thread = int(path.name.rpartition(".")[2])
        if thread in without:
            continue
        with path.open(errors="replace") as stream:
            for line in stream:
                match = _CALL.match(line)
                if match:
                    yield thread, match[1], match[2]
