"""Command `footprint`: what a run would write and ask of its site, without Slurm."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.page.options import json_option, profile_option, runs_option, set_option
from hpctrain.page.output import json_out, table


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
    from hpctrain.job.footprint_text import file_table, footprint_lines, slurm_table
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
