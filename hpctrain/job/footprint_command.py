"""Command `footprint`: what a run would write and ask of its site, without Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from hpctrain.base.units import short_bytes, short_duration
from hpctrain.page.options import json_option, profile_option, runs_option, set_option
from hpctrain.page.output import json_out, table
from hpctrain.page.text import facts
from hpctrain.plan.footprint.predict import Footprint
from hpctrain.plan.footprint.table import OPERATIONS, Operation


@click.command()
@click.argument("spec", type=click.Path(path_type=Path, allow_dash=True))
@profile_option
@set_option
@runs_option
@click.option("--rows", is_flag=True, help="Also every row behind the sums, and its source.")
@json_option
def footprint(
    spec: Path,
    profile: str,
    overrides: tuple[str, ...],
    runs: Path | None,
    rows: bool,
    as_json: bool,
) -> None:
    """Show files, metadata operations, Slurm RPCs and bytes of a run before it is submitted.

    Exit code 4 where a limit of the profile is exceeded: limits.max_inodes, max_bytes,
    max_rpc_per_hour.

    \b
    Examples:
      hpctrain footprint --profile a100x64 gpt175b.yaml
      hpctrain footprint -p a100x64 gpt175b.yaml --rows
    """
    from hpctrain.base.errors import LimitError
    from hpctrain.job.footprint import predict_footprint
    from hpctrain.records.find import runs_directory

    predicted = predict_footprint(spec, profile, overrides, runs=runs_directory(runs))
    if as_json:
        json_out("footprint", predicted)
    else:
        for line in footprint_lines(predicted):
            click.echo(line)
        if rows:
            click.echo()
            table(*file_table(predicted))
            click.echo()
            table(*slurm_table(predicted))
    if predicted.exceeded:
        raise LimitError("\n".join(predicted.exceeded))


# -- Formats a footprint in columns of at most 80 characters, and its rows as tables ------------


_NAME, _NUMBER = 30, 13


def footprint_lines(footprint: Footprint) -> list[str]:
    """Format the sums: inodes, metadata operations, RPCs, bytes, and what is assumed."""
    rates = footprint.rates
    often = (
        f"{_number(rates.launches)} launches, {_number(rates.failures)} failures, "
        f"{_number(rates.preemptions)} preemptions and {_number(rates.checkpoints)} checkpoints in "
        f"{_period(footprint)}"
    )
    if rates.run_seconds > rates.period_seconds:
        often += f"; the run takes {short_duration(rates.run_seconds)}"
    ranks = f"{footprint.ranks:,} ranks on {footprint.nodes:,} nodes"
    lines = facts(("Run", ranks), ("Forecast", often))
    inodes = footprint.inodes
    inode_lines = [
        _head("Files and directories", "NUMBER"),
        _row("per launch", inodes.per_launch),
        _row("per failed launch, at most", inodes.per_failed_launch),
        _row("per checkpoint", inodes.per_checkpoint),
        _row(
            "of kept checkpoints",
            inodes.kept_checkpoints,
            f"while one is saved {inodes.peak_checkpoints:,}",
        ),
        _row(f"in {_period(footprint)}, to stay", inodes.per_period),
        _row("when the run is over", inodes.at_end, "with its checkpoints"),
    ]
    made = footprint.metadata
    columns = "".join(f"{name.upper():>9}" for name in OPERATIONS)
    seconds = short_duration(made.start_seconds)
    metadata_lines = [
        f"{'Metadata operations':<26}{columns}",
        _calls("start, by ranks", made.launch_ranks),
        _calls("launch, by supervisor", made.launch_supervisor),
        _calls("checkpoint", made.checkpoint),
        _calls("failure, in addition", made.failure),
        _row("per second of a start", made.start_per_second, f"if all come within {seconds}"),
        _row("per second, by ranks", made.steady_ranks_per_second, "with saves, on average"),
        _row("per second, by supervisor", made.steady_supervisor_per_second),
    ]
    lines += ["", *inode_lines, "", *metadata_lines]
    rpc = footprint.rpc
    rpc_lines = [
        _head("RPCs to slurmctld", "NUMBER"),
        _row("per hour in steady state", rpc.steady_per_hour),
        _row("per hour, on average", rpc.mean_per_hour, "with launches and failures"),
        _row("per launch", rpc.per_launch),
        _row("per failed launch", rpc.per_failed_launch),
        _row("a step that refuses to die", rpc.step_refuses_to_die),
        _row("a restart of the controller", rpc.controller_restart),
        _row("in the worst hour", rpc.worst_hour, "all of these once"),
    ]
    count = footprint.bytes
    files = footprint.checkpoint_files
    byte_lines = [
        _head("Bytes", "SIZE"),
        _row("logs and metrics per day", short_bytes(count.logs_per_day)),
        _row("per checkpoint", short_bytes(count.checkpoint), f"in {files:,} files"),
        _row("of kept checkpoints", short_bytes(count.kept_checkpoints)),
        _row("while one is saved", short_bytes(count.peak_checkpoints)),
    ]
    lines += ["", *rpc_lines, "", *byte_lines, ""]
    return lines + facts(*(("Assumed", assumption) for assumption in footprint.assumptions))


def file_table(footprint: Footprint) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """List the rows of files: operations of one event, and formulas."""
    rows = [
        [
            line.per,
            line.place,
            line.by,
            _number(line.inodes),
            _number(sum(line.calls.values())),
            ", ".join(f"{name} {text}" for name, text in line.formulas.items()),
            line.source.removeprefix("hpctrain."),
        ]
        for line in footprint.files
    ]
    return ("PER", "PLACE", "BY", "INODES", "OPERATIONS", "FORMULA", "SOURCE"), rows


def slurm_table(footprint: Footprint) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """List the rows of Slurm commands."""
    rows = [
        [
            line.per,
            line.command,
            _number(line.commands),
            _number(line.rpc),
            line.why + (", not always" if line.not_always else ""),
            line.source.removeprefix("hpctrain."),
        ]
        for line in footprint.slurm
    ]
    return ("PER", "COMMAND", "TIMES", "RPCS", "WHY", "SOURCE"), rows


def _head(title: str, unit: str) -> str:
    return f"{title:<{_NAME}}{unit:>{_NUMBER}}"


def _row(name: str, value: float | str, remark: str = "") -> str:
    text = value if isinstance(value, str) else _number(value)
    return f"  {name:<{_NAME - 2}}{text:>{_NUMBER}}  {remark}".rstrip()


def _calls(name: str, calls: dict[Operation, int]) -> str:
    return f"  {name:<24}" + "".join(f"{calls[one]:>9,}" for one in OPERATIONS)


def _number(value: float) -> str:
    """Format a count: whole where it is large, two digits below ten."""
    if 0 < value < 0.01:
        return "<0.01"
    return f"{value:.2g}" if 0 < abs(value) < 10 and value != round(value) else f"{value:,.0f}"


def _period(footprint: Footprint) -> str:
    return short_duration(footprint.rates.period_seconds)
