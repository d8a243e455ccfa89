"""Climb the rungs of the first hour on GPUs (`make gpu`, docs/gpu.md).

    python -m bench.gpu                                   # all, until one fails
    python -m bench.gpu --rung 4 --gpus 8
    python -m bench.gpu --rung 6 --profile ours.yaml --spec run.yaml

Everything measured goes into one file, gpu-report.json, which `hpctrain calibrate` reads. Exit
code: 0 when every rung asked for has passed, 1 when one has failed, 3 when one could not be run.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu import driver, environment
from bench.gpu.report import add_rung, read_report, write_report
from bench.gpu.rung import Found, NotRunError, Rung, Site, outcome_of
from hpctrain.base.errors import HpctrainError, InvalidInputError
from hpctrain.records.gpu_report import RungCheck, RungResult

OK, FAILED, USAGE, NOT_RUN = 0, 1, 2, 3
_MARKS = {"passed": "ok", "failed": "FAILED", "not_run": "not run"}
_WIDTH = 80


def rungs() -> tuple[Rung, ...]:
    """List all rungs; modules with torch and Slurm are imported when they are run."""

    def one_gpu(site: Site, found: Found):  # type: ignore[no-untyped-def]
        from bench.gpu.one_gpu import run

        return run(site, found)

    def one_node(site: Site, found: Found):  # type: ignore[no-untyped-def]
        from bench.gpu.one_node import run

        return run(site, found)

    def two_nodes(site: Site, found: Found):  # type: ignore[no-untyped-def]
        from bench.gpu.nodes import run_two_nodes

        return run_two_nodes(site, found)

    def eight_nodes(site: Site, found: Found):  # type: ignore[no-untyped-def]
        from bench.gpu.nodes import run_eight_nodes

        return run_eight_nodes(site, found)

    return (
        Rung(1, "driver", "driver, torch, NCCL", "versions of driver and torch", driver.run),
        Rung(2, "environment", "libraries above torch", "versions, and what is absent",
             environment.run),
        Rung(3, "one GPU", "rates, every engine, planned jobs",
             "rates, results of the tests, step times and memory", one_gpu),
        Rung(4, "one node", "layouts against one GPU, kill -9, links",
             "differences of losses, bus bandwidth of each axis", one_node),
        Rung(5, "two nodes", "network of NCCL, links between nodes",
             "network and cards of NCCL, bus bandwidth between nodes", two_nodes, local=False),
        Rung(6, "eight nodes", "50 steps of a real run against its plan",
             "step time, MFU, stall of a save, start of a launch", eight_nodes, local=False),
    )  # fmt: skip


def climb(chosen: Sequence[Rung], site: Site, report_path: Path, *, keep_names: bool) -> int:
    """Run rungs until one does not pass; the report is written after each of them."""
    for rung in chosen:
        print(f"\nRung {rung.number}: {rung.name} ({rung.title})", flush=True)
        if site.emulated:
            print("      emulated on CPU: proves this program, and nothing about a GPU")
        result, found = run_rung(rung, site)
        report = add_rung(read_report(report_path), result, found, site)
        write_report(report_path, report, site.directory, keep_names=keep_names)
        counts = {mark: 0 for mark in _MARKS}
        for check in result.checks:
            counts[check.outcome] += 1
        print(
            f"  = {_MARKS[result.outcome]}: {counts['passed']} passed, {counts['failed']} failed, "
            f"{counts['not_run']} not run, {result.seconds:.0f} s"
        )
        send = f"Send back {report_path.name}: {rung.send_back}."
        if result.outcome == "failed":
            print(_wrapped(f"    Repair this before the next rung. {send}"))
            return FAILED
        if result.outcome == "not_run":
            print(_wrapped(f"    {result.reason}"))
            return NOT_RUN
        print(_wrapped(f"    {send}"))
    return OK


def run_rung(rung: Rung, site: Site) -> tuple[RungResult, Found]:
    """Run one rung; checks are printed as they end. Errors of input fail it."""
    found, checks, start = Found(), [], time.monotonic()
    reason = ""
    try:
        for check in rung.run(site, found):
            _print(check)
            checks.append(check)
    except NotRunError as missing:
        reason = f"needs {missing}"
    except HpctrainError as error:
        problems = error.problems if isinstance(error, InvalidInputError) else ()
        hints = [hint for hint in (error.hint, *(one.hint for one in problems)) if hint]
        detail = ". ".join([str(error), *dict.fromkeys(hints)])
        checks.append(RungCheck(name="input", outcome="failed", detail=detail))
        _print(checks[-1])
    outcome = outcome_of(checks)
    if outcome == "not_run" and not reason:
        reason = "; ".join(f"{check.name}: {check.detail}" for check in checks)
    result = RungResult(
        number=rung.number,
        name=rung.name,
        outcome=outcome,
        time=time.time(),
        seconds=time.monotonic() - start,
        reason=reason,
        emulated=site.emulated,
        checks=tuple(checks),
    )
    return result, found


def _print(check: RungCheck) -> None:
    name = f"  {_MARKS[check.outcome]:8}{check.name}"
    detail = " ".join(check.detail.split()) if check.outcome != "failed" else check.detail
    print(_wrapped(f"{name}: {detail}" if detail else name), flush=True)


def _wrapped(text: str) -> str:
    """Wrap to 80 columns; further lines stand below the name of the check."""
    lines: list[str] = []
    for number, line in enumerate(text.splitlines()):
        first = "" if number == 0 else " " * 10
        lines += textwrap.wrap(
            line, _WIDTH, initial_indent=first, subsequent_indent=" " * 10,
            break_long_words=False, break_on_hyphens=False, drop_whitespace=True,
        )  # fmt: skip
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; argparse ends the process with 2 for what it does not take."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0]
    )
    numbers = [rung.number for rung in rungs()]
    parser.add_argument("--rung", type=int, choices=numbers, help="only this one; default: climb")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this node, for rung 4")
    parser.add_argument("--profile", help="cluster profile: name or file")
    parser.add_argument("--spec", help="the run of rung 6")
    parser.add_argument("--directory", type=Path, default=Path("gpu-rungs"), help="for runs, logs")
    parser.add_argument("--report", type=Path, default=Path("gpu-report.json"))
    parser.add_argument("--keep-names", action="store_true", help="names of nodes and user stay")
    parser.add_argument("--no-submit", action="store_true", help="rungs 5, 6: write, do not submit")
    parser.add_argument(
        "--emulate-gpu", action="store_true", help="CPU and gloo in the GPU's place: tests this"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    site = Site(
        directory=options.directory.absolute(),
        gpus=options.gpus,
        profile=options.profile,
        spec=options.spec,
        emulated=options.emulate_gpu,
        submits=not options.no_submit,
    )
    site.directory.mkdir(parents=True, exist_ok=True)
    try:
        read_report(options.report)
    except ValueError:
        print(f"error: {options.report} is no report of these rungs: move it away", file=sys.stderr)
        return USAGE
    chosen = [rung for rung in rungs() if options.rung in (None, rung.number)]
    if site.emulated and options.rung is None:  # a CPU is no driver, and no library for GPUs
        chosen = [rung for rung in chosen if rung.number in (3, 4)]
    return climb(chosen, site, options.report, keep_names=options.keep_names)


if __name__ == "__main__":
    sys.exit(main())
