"""`python -m hpctrain.supervise.preflight`: check one node; runs on each node of a job.

Prints short lines of JSON (parsed by `judge.probe_results`): `begin`, problems, lines of the kernel
log, `end`. Every check has its own thread and at most `CHECK_SECONDS`, so that a hung mount is
reported and does not hang the program. Standard library only: it starts on every node at once.

A site whose users cannot read the kernel log may set HPCTRAIN_KERNEL_LOG to a file with its lines,
or to a command that prints them; `{node}` in it is replaced by the name of the node.

Belongs here: running the checks. Does not belong here: the checks (`evidence.node_checks`),
comparing nodes (`judge.probe_results`), starting this program (`evidence.probe`), what a line of
the kernel means (`evidence.log_scan`).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base import clock
from hpctrain.judge.preflight_format import INPUTS, MARK, RUN_DIRECTORY, SHUTDOWN
from hpctrain.supervise.evidence.node_checks import (
    NodeReport,
    check_directory,
    check_gpus,
    check_inputs,
    check_kernel,
    check_ports,
    check_shared_memory,
    check_shutdown,
)

CHECK_SECONDS = 4.0
# srun passes on what a task writes in pieces of 1 KiB (src/common/io_hdr.h, SLURM_IO_MAX_MSG_LEN);
# longer lines of several nodes could be mixed.
_LONGEST_LINE = 900
_LONGEST_TEXT = 400


@dataclass(frozen=True)
class CheckOptions:
    """What to check. `gpus` 0: do not count them. `since` is seconds since the epoch.

    `settings` lists what the run reads (`inputs`).
    """

    run_directory: Path
    since: float
    gpus: int
    settings: Path | None = None


def main(arguments: list[str]) -> int:
    """Check this node and print the results; returns 0 even if it has problems."""
    parser = argparse.ArgumentParser(prog="python -m hpctrain.supervise.preflight")
    parser.add_argument("--run-directory", type=Path, required=True)
    parser.add_argument("--since", type=float, default=0.0, help="seconds since the epoch")
    parser.add_argument("--gpus", type=int, default=0, help="expected; 0: any number")
    parser.add_argument("--settings", type=Path, help="the run's supervise.json")
    parsed = parser.parse_args(arguments)
    options = CheckOptions(parsed.run_directory, parsed.since, parsed.gpus, parsed.settings)
    started = clock.monotonic()
    _print_line("begin", clock=clock.now(), step=os.environ.get("SLURM_STEP_ID", ""))
    facts: dict[str, object] = {}
    for check, report in _run_checks(options):
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


def _run_checks(options: CheckOptions) -> list[tuple[str, NodeReport]]:
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
