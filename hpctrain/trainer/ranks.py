"""Find the processes of a trainer of one's own on this node, signal them, and talk to them.

Belongs here: what a launcher is told, finding the processes that are ranks, signals to those that
catch them, the socket of those that call `hpctrain.trainer`. Does not belong here: starting them
(`hpctrain.train.launchers.rank_processes`), those calls (`hpctrain.trainer`), what follows from
their end or from what they say (`agent`), Ray (`ray_cluster`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from hpctrain.train.launchers.agent_environment import Place
from hpctrain.train.launchers.agent_ranks import catches
from hpctrain.train.launchers.rank_processes import Rank

_READ_BYTES = 1 << 16
_SCONTROL = """\
#!/bin/sh
# First on the PATH of a trainer below hpctrain: one requeues, the supervisor.
case "$1" in
requeue|requeuehold)
    echo "hpctrain: no \\`scontrol $*\\` here: the supervisor requeues, not the trainer" >&2
    : >>{mark}
    exit 0
    ;;
esac
PATH=${{PATH#{directory}:}}
exec scontrol "$@"
"""


# Options of `accelerate launch` that choose what starts the ranks; of several it takes none.
_ACCELERATE_KINDS = (
    *("--cpu", "--multi_gpu", "--tpu", "--use_deepspeed", "--use_fsdp", "--use_megatron_lm"),
    "--config_file",
)


def accelerate_words(
    words: Sequence[str], arguments: Sequence[str], place: Place
) -> tuple[str, ...]:
    """Write the command of `accelerate launch` on one node, which starts the ranks there.

    Without a word about it, that is torchrun's agent, also on CPUs: `--cpu` would start one process
    on each node and give it no rank (accelerate/commands/launch.py, simple_launcher).
    """
    python, rest = python_of(words), list(words)
    rest = rest[1:] if rest[0] == python else rest
    rest = rest[1:] if rest[:1] == ["-u"] else rest  # accelerate gives it itself
    module = ["--module"] if rest[:1] == ["-m"] else []
    names = {word.partition("=")[0].replace("-", "_").replace("__", "--", 1) for word in arguments}
    is_chosen = place.world_size == 1 or not names.isdisjoint(_ACCELERATE_KINDS)
    return (
        *(python, "-m", "accelerate.commands.launch"),
        *("--num_machines", str(place.nodes), "--machine_rank", str(place.node_rank)),
        *("--num_processes", str(place.world_size)),
        *("--main_process_ip", place.address, "--main_process_port", str(place.port)),
        *(() if is_chosen else ("--multi_gpu",)),
        *arguments,
        *module,
        *(rest[1:] if module else rest),
    )


def python_of(words: Sequence[str]) -> str:
    """Return the interpreter with which a command begins, else that on the PATH."""
    return words[0] if Path(words[0]).name.startswith("python") else "python"


def write_scontrol(directory: Path) -> Path:
    """Write the program that stands before Slurm's own on the PATH; return the mark of its use."""
    mark = directory / "requeue-asked"
    program = directory / "scontrol"
    program.write_text(_SCONTROL.format(mark=quote(str(mark)), directory=quote(str(directory))))
    program.chmod(0o700)
    return mark


# -- Which processes are ranks, and which of them catch a signal ---------------------------------


def rank_processes(root: int, *, is_rank: bool) -> list[int]:
    """Find the processes of ranks below a launcher: those to which it gave a RANK of their own.

    `is_rank`: `root` itself is one.
    """
    if is_rank:
        return [root]
    return [pid for pid, parent in descendants(root) if _has_rank(pid) and not _has_rank(parent)]


def catching(pid: int, number: int) -> list[int]:
    """Find the first processes from `pid` downwards that catch a signal; none where nobody does."""
    try:
        if catches(pid, number):
            return [pid]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [found for child in _children(pid) for found in catching(child, number)]


def descendants(root: int) -> Iterator[tuple[int, int]]:
    """Yield each process below one, and its parent."""
    for child in _children(root):
        yield child, root
        yield from descendants(child)


def _children(pid: int) -> list[int]:
    """The children of all threads of a process (proc(5), /proc/PID/task/TID/children)."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except ProcessLookupError:
        pass
    except FileNotFoundError:
        if Path(f"/proc/{pid}").exists():  # a kernel without CONFIG_PROC_CHILDREN
            found = [child for child, parent in _all_parents() if parent == pid]
    return found


def _all_parents() -> Iterator[tuple[int, int]]:
    """Each process and its parent (proc(5), /proc/PID/stat: the name may hold anything but `)`)."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            yield (
                int(name),
                int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]),
            )


def _has_rank(pid: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(entry.startswith((b"RANK=", b"LOCAL_RANK=")) for entry in environment)


class SaveSignal:
    """The signal by which ranks save: each process gets it once, as soon as it catches it.

    A launcher gets none once its ranks have had it: it would end those that still save.
    """

    def __init__(self, name: str, *, to_launcher: bool) -> None:
        self.number = getattr(signal, f"SIG{name}")
        self.sent: set[int] = set()
        self._to_launcher = to_launcher
        self._launchers: set[int] = set()

    def send(self, ranks: Sequence[Rank]) -> None:
        """Send it to those that catch it by now; call this again and again."""
        for rank in ranks:
            if rank.poll() is not None:
                continue
            roots = [rank.pid]
            if not self._to_launcher:
                roots = rank_processes(rank.pid, is_rank=rank.number is not None)
                if roots:
                    self._launchers.add(rank.pid)
                elif rank.pid not in self._launchers:
                    roots = [rank.pid]  # the command starts none: it trains itself
            for pid in (found for root in roots for found in catching(root, self.number)):
                if pid not in self.sent:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, self.number)
                    self.sent.add(pid)


# -- What ranks say that call `hpctrain.trainer` --------------------------------------------------


class Talk:
    """The agent's end of the socket by which ranks that call `hpctrain.trainer` talk to it.

    `address` is the path of the socket.
    """

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self._asked: Literal["SAVE", "STOP"] | None = None
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(self.address)
        self._server.listen()
        self._streams: dict[socket.socket, bytes] = {}

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what ranks have said since the last call; a line that is none is left out."""
        waiting = [self._server, *self._streams]
        for stream in select.select(waiting, [], [], 0)[0]:
            if stream is self._server:
                fresh, _ = self._server.accept()
                self._streams[fresh] = b""
                if self._asked is not None:
                    self._send(fresh, self._asked)
                continue
            try:
                data = stream.recv(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                del self._streams[stream]
                stream.close()
                continue
            *lines, self._streams[stream] = (self._streams[stream] + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    if isinstance(message, dict):
                        yield message

    def ask(self, what: Literal["SAVE", "STOP"]) -> None:
        """Ask all ranks of this node, also one that connects later, if it is to stop."""
        if what == "STOP":
            self._asked = what
        for stream in self._streams:
            self._send(stream, what)

    def close(self) -> None:
        for stream in (self._server, *self._streams):
            stream.close()

    def _send(self, stream: socket.socket, what: str) -> None:
        with contextlib.suppress(OSError):
            stream.sendall(f"{what}\n".encode())
