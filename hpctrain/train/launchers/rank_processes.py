"""Start the ranks of one node, hear what they print, and run those of our engines to their end.

Belongs here: processes with torchrun's variables, their output with the rank before each line, and
what ends with the first rank that fails. Does not belong here: signals (see `agent_ranks`), the
trainer of a run that has its own (see `hpctrain.trainer.agent`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpctrain.records.exit_records import write_agent_record
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import AgentRecord, RankEnd, TrainerExit
from hpctrain.train.launchers.agent_environment import AgentEnvironment, Place
from hpctrain.train.launchers.agent_ranks import SignalForwarder, die_with_parent

_READ_BYTES = 1 << 16
# A line without an end, such as a bar that is drawn over itself, is taken in pieces.
_LONGEST_LINE_BYTES = 1 << 16
_TAIL_LINES = 40
_TICK_SECONDS = 0.1
# How long the others may live on after a rank has failed, as torchrun's agent has it.
_END_SECONDS = 30.0
# How long the last output of ranks is waited for, which children of theirs may hold open.
_READ_SECONDS = 2.0


def torchrun_variables(place: Place, local_rank: int, run_id: str) -> dict[str, str]:
    """The variables that torchrun sets for a rank (torch/distributed/elastic, local_elastic_agent).

    Libraries that see them look for no other launcher, such as Slurm.
    """
    return {
        "RANK": str(place.first_rank + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.ranks_here),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_RANK": str(place.first_rank + local_rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def _begin() -> None:
    """Prepare the process of a rank before its program starts.

    The supervisor sends SIGUSR2 to the step. Except with proctrack/cgroup Slurm gives it to all
    processes of the step, and a program that does not catch it would end before it is asked to save
    (seen with proctrack/linuxproc: exit code 140). An ignored signal stays so in exec(2).
    """
    die_with_parent()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class Rank:
    """One process below the agent, with all that it prints.

    `number`: its rank; None where it is a launcher, whose ranks it starts itself. Its output goes
    to the descriptor `log`, with `label` before each line, and each line to `hear`.
    """

    def __init__(
        self,
        number: int | None,
        words: Sequence[str],
        directory: str,
        environment: Mapping[str, str],
        log: int,
        label: bytes,
        hear: Callable[[str], None] | None = None,
    ) -> None:
        self.number = number
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.ended_at: float | None = None
        self._log, self._label, self._hear = log, label, hear
        self._process = subprocess.Popen(
            list(words),
            cwd=directory,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log if hear is None and not label else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_begin,
        )
        self._reader = threading.Thread(target=self._read, name=f"output {number}", daemon=True)
        if self._process.stdout is not None:
            self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit code, negative for the signal that killed it; None while it runs."""
        code = self._process.poll()
        if code is not None and self.ended_at is None:
            self.ended_at = time.time()
        return code

    def cpu_ticks(self) -> int:
        """Return the time that it has computed (proc(5), /proc/PID/stat: utime and stime)."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0
        return int(fields[11]) + int(fields[12])

    @property
    def last_words(self) -> str:
        """Return the last line that was heard of it, but no ruled one; empty without one."""
        lines = (line.strip() for line in reversed(self.tail))
        return next((line for line in lines if any(map(str.isalnum, line))), "")

    def finish_reading(self, seconds: float) -> None:
        """Wait for the end of its output; a child of its own may hold that open."""
        if self._process.stdout is not None:
            self._reader.join(seconds)

    def signal(self, number: int) -> None:
        """Send a signal to it and everything that it has started in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _read(self) -> None:
        stream, rest = self._process.stdout, b""
        assert stream is not None, "it was opened"
        while data := os.read(stream.fileno(), _READ_BYTES):
            *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
            if len(rest) > _LONGEST_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            if not self._label:
                self._write(data)
            for line in lines:
                self._take(line)
        if rest:
            self._take(rest)

    def _take(self, line: bytes) -> None:
        if self._label and line:
            self._write(b"%s%s\n" % (self._label, line))
        text = line.decode(errors="replace")
        if self._hear is not None and text.strip():
            self.tail.append(text)
            self._hear(text)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        with contextlib.suppress(OSError):  # a full disk must not end the rank
            while view:
                view = view[os.write(self._log, view) :]


def open_log(
    run: RunLayout, rank: int, *, by_node: bool, environment: Mapping[str, str] = os.environ
) -> tuple[int, bytes]:
    """Open the log of a rank of this step of Slurm, and return it with the label of its lines.

    One appending descriptor for both streams, or they would overwrite each other. Without access to
    it, and with `by_node`, it is the agent's, whose lines have the rank before them.
    """
    label = b"%d: " % rank
    if by_node:
        return 1, label
    try:
        job_id, step_id = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
        # not set in the first attempt of a job
        restarts = int(environment.get("SLURM_RESTART_COUNT") or 0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(run.rank_log(job_id, restarts, step_id, rank), flags, 0o644), b""
    except (KeyError, ValueError, OSError):
        return 1, label


def run_ranks(
    agent: AgentEnvironment, forwarder: SignalForwarder, variables: Mapping[str, str] | None = None
) -> int:
    """Start the ranks of this node and wait for them; `variables` are of the launch.

    Returns the exit code of the first rank that failed, or 128 + signal number if it was killed.
    """
    ranks: list[Rank] = []
    signal.signal(signal.SIGHUP, signal.default_int_handler)  # the end of a terminal, like Ctrl-C
    try:
        for local in range(agent.place.ranks_here):
            own = torchrun_variables(agent.place, local, f"{agent.run.run_id}.{agent.epoch}")
            number = agent.place.first_rank + local
            log, label = open_log(agent.run, number, by_node=agent.logs_by_node)
            words = (sys.executable, "-m", "hpctrain.train", agent.train_config)
            environment = {**os.environ, **(variables or {}), **own}
            ranks.append(Rank(number, words, os.getcwd(), environment, log, label))
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            forwarder.forward([rank.pid for rank in ranks])
            time.sleep(_TICK_SECONDS)
        failed = [
            RankEnd(rank=agent.place.first_rank + local, code=code)
            for local, code in enumerate(codes)
            if code not in (None, TrainerExit.DONE, TrainerExit.YIELDED)
        ]
        if failed:
            _record(agent, failed)
            first = failed[0].code
            return first if first >= 0 else 128 - first
        return TrainerExit.YIELDED if any(codes) else TrainerExit.DONE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        _end(ranks)


def _record(agent: AgentEnvironment, failed: Sequence[RankEnd]) -> None:
    record = AgentRecord(epoch=agent.epoch, node=agent.node, time=time.time(), ended=tuple(failed))
    try:
        write_agent_record(agent.run, agent.place.node_rank, record)
    except OSError as error:
        print(f"the record of this node could not be written: {error}", file=sys.stderr)


def _end(ranks: Sequence[Rank]) -> None:
    """Ask the ranks that are left to end, and kill those that have not some time later."""
    deadline = time.monotonic() + _END_SECONDS
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            if rank.poll() is None:
                rank.signal(number)
        while None in [rank.poll() for rank in ranks] and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)
    deadline = time.monotonic() + _READ_SECONDS
    for rank in ranks:
        rank.finish_reading(max(0.0, deadline - time.monotonic()))
