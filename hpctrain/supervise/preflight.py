"""`python -m hpctrain.supervise.preflight`: check one node; runs on each node of a job.

Prints short lines of JSON (parsed by `judge.probe_results`): `begin`, problems, lines of the kernel
log, `end`. Every check has its own thread and at most `CHECK_SECONDS`, so that a hung mount is
reported and does not hang the program. Standard library only: it starts on every node at once.

A site whose users cannot read the kernel log may set HPCTRAIN_KERNEL_LOG to a file with its lines,
or to a command that prints them; `{node}` in it is replaced by the name of the node.

Belongs here: the checks of one node, and running them. Does not belong here:
comparing nodes (`judge.probe_results`), starting this program (`evidence.probe`), what a line of
the kernel means (`evidence.log_scan`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from hpctrain.base import clock
from hpctrain.judge.preflight_format import INPUTS, MARK, RUN_DIRECTORY, SHUTDOWN

KERNEL_LOG_VARIABLE = "HPCTRAIN_KERNEL_LOG"
_TRIAL_BYTES = 4096
# PyTorch's data loaders and NCCL keep their buffers here; with less than this they fail at once.
_LEAST_SHARED_BYTES = 64 * 2**20
_SHARED_MEMORY = Path("/dev/shm")
# sd_booted(3): the machine runs systemd if this directory is there.
_SYSTEMD = Path("/run/systemd/system")
_SCHEDULED_SHUTDOWN = Path("/run/systemd/shutdown/scheduled")
# A launch that begins this shortly before a shutdown is not worth it.
_SOON_SECONDS = 600.0
_INFINIBAND = Path("/sys/class/infiniband")
_MOST_KERNEL_LINES = 40
_MOST_KERNEL_BYTES = 2**20
# Clocks of the kernel's log and of the launch may differ a little.
_KERNEL_SLACK_SECONDS = 5.0
_INTERESTING = re.compile(
    r"xid|nvrm|nvidia|nvlink|nvswitch|out of memory|oom|i/o error|nfs|lustre|mlx5|infiniband"
    r"|blocked for more than|read-?only|hardware error|mce:|nvme|segfault|lost carrier|link down",
    re.IGNORECASE,
)
_ISO_TIME = re.compile(r"\s*(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,]\d+)?(Z|[+-]\d\d:?\d\d)?")
# Messages of nvidia-smi about a GPU that the driver cannot reach any more.
_GPU_GONE = re.compile(r"GPU is lost|fallen off the bus|Unable to determine the device handle")
_GPU_FIELDS = "uuid,ecc.errors.uncorrected.volatile.total,retired_pages.pending"
_REMAP_FIELDS = "gpu_uuid,remapped_rows.pending,remapped_rows.failure"


@dataclass(frozen=True)
class Fault:
    """A problem; `hard`: certainly broken hardware; `gpu`: its UUID."""

    text: str
    hard: bool = False
    gpu: str | None = None


@dataclass
class NodeReport:
    """Results of one check; kernel lines come with seconds since the epoch, if known."""

    problems: list[Fault] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)
    kernel: list[tuple[float | None, str]] = field(default_factory=list)

    def problem(self, text: str, *, hard: bool = False, gpu: str | None = None) -> None:
        self.problems.append(Fault(text, hard, gpu))


# -- on its way out --------------------------------------------------------------------------


def check_shutdown(report: NodeReport, timeout_seconds: float) -> None:
    """Report a shutdown: the node sends TERM to every process long before Slurm notices.

    systemctl(1), is-system-running: `stopping` while the manager is shutting down. shutdown(8)
    writes its schedule into a file; USEC is in microseconds since the epoch.
    """
    if not _SYSTEMD.is_dir():
        return
    # Its exit code is 1 for every state but `running`.
    state = _output(["systemctl", "is-system-running"], timeout_seconds / 2, any_exit_code=True)
    if state == ["stopping"]:
        report.problem("the machine is being shut down")
        return
    with contextlib.suppress(OSError):
        match = re.search(r"^USEC=(\d+)", _SCHEDULED_SHUTDOWN.read_text(), re.MULTILINE)
        if match is not None and int(match[1]) / 1e6 - clock.now() < _SOON_SECONDS:
            report.problem("a shutdown of the machine is scheduled within minutes")


# -- storage and memory ----------------------------------------------------------------------


def check_directory(report: NodeReport, directory: Path, node: str) -> None:
    """Write, flush, rename and remove 4 KiB in `directory`, as a checkpoint would."""
    trial, renamed = directory / f".preflight-{node}", directory / f".preflight-{node}.done"
    try:
        descriptor = os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(descriptor, b"\0" * _TRIAL_BYTES)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(trial, renamed)
        renamed.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            trial.unlink(missing_ok=True)
        report.problem(f"cannot write into {directory}: [Errno {error.errno}] {error.strerror}")
        return
    space = os.statvfs(directory)
    report.facts["free_bytes"] = space.f_bavail * space.f_frsize
    report.facts["free_inodes"] = space.f_favail


def read_inputs(path: Path) -> tuple[str, ...]:
    """Read only the `inputs` of a `supervise.json`; none if it cannot be read.

    With the standard library: this program starts on all nodes of a job at once, from a shared file
    system, and cannot afford pydantic. The format version is not looked at: a node is not to blame
    for it, and the supervisor has read the whole document before.
    """
    try:
        return tuple(json.loads(path.read_bytes()).get("inputs", ()))
    except (OSError, ValueError, AttributeError):
        return ()


def check_inputs(report: NodeReport, settings: Path | None) -> None:
    """Check that every file and directory that the run reads exists and is readable.

    `settings` lists them. If it cannot be read, the check of the run directory reports that.
    """
    missing: list[tuple[str, str]] = []
    for path in read_inputs(settings) if settings else ():
        # stat(2) asks the server of a network file system; access(2) checks this user's rights.
        try:
            os.stat(path)
        except OSError as error:
            missing.append((path, f"[Errno {error.errno}] {error.strerror}"))
            continue
        if not os.access(path, os.R_OK):
            missing.append((path, "no permission"))
    if missing:
        path, reason = missing[0]
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        report.problem(f"cannot read {path}: {reason}{more}")


def check_shared_memory(report: NodeReport) -> None:
    """Report a full /dev/shm: killed jobs leave files behind."""
    try:
        space = os.statvfs(_SHARED_MEMORY)
    except FileNotFoundError:
        return
    free_bytes = space.f_bavail * space.f_frsize
    report.facts["shared_memory_free_bytes"] = free_bytes
    if free_bytes < _LEAST_SHARED_BYTES:
        report.problem(f"{free_bytes >> 20} MiB are free in {_SHARED_MEMORY}")


# -- GPUs ------------------------------------------------------------------------------------


def check_gpus(report: NodeReport, expected: int, timeout_seconds: float) -> None:
    """Count the GPUs and look at their memory, where nvidia-smi is installed.

    nvidia-smi --help-query-gpu and --help-query-remapped-rows have the fields. A failed row
    remapping is NVIDIA's criterion for replacement (GPU Memory Error Management, RMA policy); a
    pending one waits for a reset of the GPU, which can go on until then.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return
    limit = timeout_seconds / 2
    rows, error = _query([program, f"--query-gpu={_GPU_FIELDS}"], limit)
    if not rows and error:
        report.problem(f"nvidia-smi: {error}", hard=_GPU_GONE.search(error) is not None)
        return
    report.facts["gpus"] = [row[0] for row in rows]
    if expected and len(rows) < expected:
        report.problem(f"{len(rows)} of {expected} GPUs answer nvidia-smi", hard=True)
    # Errors counted since the driver was loaded are no problem: they may be another job's.
    errors = {row[0]: int(row[1]) for row in rows if row[1].isdigit() and int(row[1])}
    if errors:
        report.facts["uncorrected_memory_errors"] = errors
    for row in rows:
        if row[2] == "Yes":
            report.problem("GPU memory pages wait to be retired", gpu=row[0])
    remapped, _ = _query([program, f"--query-remapped-rows={_REMAP_FIELDS}"], limit)
    for uuid, pending, failure in remapped:
        if failure in ("Yes", "1"):
            report.problem("GPU memory: row remapping has failed", hard=True, gpu=uuid)
        elif pending in ("Yes", "1"):
            report.problem("GPU memory: a row remapping waits for a reset", gpu=uuid)


def _query(argv: list[str], timeout_seconds: float) -> tuple[list[list[str]], str]:
    """Rows of three cells, and the error message of nvidia-smi if it printed none."""
    try:
        done = subprocess.run(
            [*argv, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return [], f"no answer within {timeout_seconds:g} s"
    cells = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    rows = [row for row in cells if len(row) == 3]
    message = " ".join((done.stderr or done.stdout).split())
    return rows, "" if rows else message or f"exit code {done.returncode}"


# -- fabric ----------------------------------------------------------------------------------


def check_ports(report: NodeReport) -> None:
    """List ACTIVE InfiniBand and RoCE ports; unused ones are normal, so nodes are compared."""
    active, total = [], 0
    for state in sorted(_INFINIBAND.glob("*/ports/*/state")):
        total += 1
        if "ACTIVE" in state.read_text():
            active.append(f"{state.parts[-4]}/{state.parts[-2]}")
    if total:
        report.facts["ports"] = active


# -- the kernel's log ------------------------------------------------------------------------


def check_kernel(report: NodeReport, since: float, node: str, timeout_seconds: float) -> None:
    """Report the newest lines since `since` that may explain a failure, unchanged."""
    source, lines = _read_kernel_log(node, since, timeout_seconds / 2)
    report.facts["kernel_log"] = source
    report.kernel = select_lines(lines, since, clock.now() - clock.monotonic())


def select_lines(
    lines: Iterable[str], since: float, booted_at: float
) -> list[tuple[float | None, str]]:
    """Select interesting lines that are not older than `since`; lines without a time are kept."""
    found = []
    for line in lines:
        if _INTERESTING.search(line):
            seen_at = time_of(line, booted_at)
            if seen_at is None or seen_at >= since - _KERNEL_SLACK_SECONDS:
                found.append((seen_at, line.strip()))
    return found[-_MOST_KERNEL_LINES:]


def time_of(line: str, booted_at: float) -> float | None:
    """Parse when a line was logged, in seconds since the epoch; None if it has no time.

    `[  12.345] ...` counts from boot (dmesg), `1795257692.5 ...` from the epoch (journalctl -o
    short-unix), `2026-11-21T10:45:12+0000 ...` is ISO 8601 (dmesg --time-format iso).
    """
    match = re.match(r"\s*(?:<\d+>)?\[\s*(\d+\.\d+)\]", line)
    if match:
        return booted_at + float(match[1])
    match = re.match(r"\s*(\d{9,}(?:\.\d+)?)\s", line)
    if match:
        return float(match[1])
    match = _ISO_TIME.match(line)
    return datetime.fromisoformat(match[1] + (match[2] or "")).timestamp() if match else None


def _read_kernel_log(node: str, since: float, timeout_seconds: float) -> tuple[str, list[str]]:
    """The source of the lines, and the lines."""
    hook = os.environ.get(KERNEL_LOG_VARIABLE, "").replace("{node}", node)
    if hook:
        path = Path(hook)
        if not path.exists() or os.access(path, os.X_OK):
            return hook, _output(hook.split(), timeout_seconds)
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - _MOST_KERNEL_BYTES))
            return hook, stream.read().decode(errors="replace").splitlines()
    journal = ["journalctl", "-k", "-q", "--no-pager", "-o", "short-unix", f"--since=@{since:.0f}"]
    for argv in (journal, ["dmesg"]):
        lines = _output(argv, timeout_seconds)
        if lines:
            return argv[0], lines
    return "not readable", []


def _output(argv: list[str], timeout_seconds: float, *, any_exit_code: bool = False) -> list[str]:
    """Lines that a program prints; none if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0 and not any_exit_code:
        return []
    return done.stdout[-_MOST_KERNEL_BYTES:].splitlines()


# -- running the checks ----------------------------------------------------------------------


CHECK_SECONDS = 4.0
# srun passes on what a task writes in pieces of 1 KiB (src/common/io_hdr.h, SLURM_IO_MAX_MSG_LEN);
# longer lines of several nodes could be mixed.
_LONGEST_LINE = 900
_LONGEST_TEXT = 400


def main(arguments: list[str]) -> int:
    """Check this node and print the results; returns 0 even if it has problems."""
    parser = argparse.ArgumentParser(prog="python -m hpctrain.supervise.preflight")
    parser.add_argument("--run-directory", type=Path, required=True)
    parser.add_argument("--since", type=float, default=0.0, help="seconds since the epoch")
    parser.add_argument("--gpus", type=int, default=0, help="expected; 0: any number")
    parser.add_argument("--settings", type=Path, help="the run's supervise.json")
    parsed = parser.parse_args(arguments)
    started = clock.monotonic()
    _print_line("begin", clock=clock.now(), step=os.environ.get("SLURM_STEP_ID", ""))
    facts: dict[str, object] = {}
    for check, report in _run_checks(parsed):
        for problem in report.problems:
            _print_line(
                "problem", check=check, text=problem.text, hard=problem.hard, gpu=problem.gpu
            )
        for seen_at, line in report.kernel:
            _print_line("kernel", at=seen_at, text=line)
        facts.update(report.facts)
    for name, value in facts.items():
        _print_line("fact", name=name, value=value)
    _print_line("end", seconds=round(clock.monotonic() - started, 3))
    return 0


def _run_checks(options: argparse.Namespace) -> list[tuple[str, NodeReport]]:
    """Run all checks at once; one that takes too long is reported as a problem and abandoned."""
    node = node_name()
    checks: list[tuple[str, Callable[[NodeReport], None]]] = [
        (RUN_DIRECTORY, lambda report: check_directory(report, options.run_directory, node)),
        (INPUTS, lambda report: check_inputs(report, options.settings)),
        (SHUTDOWN, lambda report: check_shutdown(report, CHECK_SECONDS)),
        ("shared memory", check_shared_memory),
        ("GPUs", lambda report: check_gpus(report, options.gpus, CHECK_SECONDS)),
        ("fabric", check_ports),
        ("kernel log", lambda report: check_kernel(report, options.since, node, CHECK_SECONDS)),
    ]
    running = [(name, *_start(check)) for name, check in checks]
    deadline = clock.monotonic() + CHECK_SECONDS
    results = []
    for name, thread, report in running:
        thread.join(max(0.0, deadline - clock.monotonic()))
        if thread.is_alive():
            report = NodeReport()
            report.problem(f"no answer within {CHECK_SECONDS:g} s")
        results.append((name, report))
    return results


def _start(check: Callable[[NodeReport], None]) -> tuple[threading.Thread, NodeReport]:
    report = NodeReport()

    def run() -> None:
        try:
            check(report)
        except Exception as error:  # a check that fails is a problem of the node, too
            report.problem(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, report


def node_name() -> str:
    """The name by which Slurm knows this node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def _print_line(kind: str, **fields: object) -> None:
    """Print one line in a single write below the size of srun's buffer; cut a long `text`."""
    line = _line(kind, fields)
    while len(line) > _LONGEST_LINE and fields.get("text"):
        text = str(fields["text"])
        fields["text"] = text[: min(_LONGEST_TEXT, len(text) * 2 // 3)]
        line = _line(kind, fields)
    if len(line) <= _LONGEST_LINE:
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


def _line(kind: str, fields: dict[str, object]) -> str:
    return MARK + json.dumps({"node": node_name(), "kind": kind, **fields})


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Not sys.exit: it would wait for a thread that hangs in a dead mount.
    os._exit(code)
