"""Command `export`: the metrics of a run for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.options import RunName, runs_option
from hpctrain.cli.output import say


@click.command()
@click.argument("run", type=RunName())
@click.option("--tensorboard", is_flag=True, help="Event files, for `tensorboard --logdir`.")
@click.option("--wandb", is_flag=True, help="An offline W&B run, for `wandb sync`.")
@click.option("--csv", "as_csv", is_flag=True, help="One line per step that counts, on stdout.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="With --tensorboard a directory, below which each run has its own; with --csv a file.",
)
@click.option("--project", help="Project of W&B, if the spec names none.")
@click.option("--entity", help="Team or user of W&B, if the spec names none.")
@runs_option
def export(
    run: str,
    tensorboard: bool,
    wandb: bool,
    as_csv: bool,
    output: Path | None,
    project: str | None,
    entity: str | None,
    runs: Path | None,
) -> None:
    """Write a run's metrics for TensorBoard or Weights & Biases, or as CSV.

    One continuous curve over all attempts: where a run went back to a checkpoint, the later values
    count. Repeated, it adds what is new. Runs with `tracking:` in the spec do this in their jobs.
    With W&B nothing is uploaded: the command that does is printed.

    \b
    Examples:
      hpctrain export gpt175b-7f3a --tensorboard
      hpctrain export gpt175b-7f3a --tensorboard -o /shared/tensorboard
      hpctrain export gpt175b-7f3a --wandb --project llama
      hpctrain export gpt175b-7f3a --csv > metrics.csv
    """
    from hpctrain.actions import export as action
    from hpctrain.actions.runs import find_run, runs_directory
    from hpctrain.store.tracking import tracking_commands

    if [tensorboard, wandb, as_csv].count(True) != 1:
        raise click.UsageError("choose one of --tensorboard, --wandb and --csv")
    if wandb and output is not None:
        raise click.UsageError("--output does not go with --wandb")
    if not wandb and (project or entity):
        raise click.UsageError("--project and --entity go with --wandb")
    found = find_run(runs_directory(runs), run)
    if as_csv:
        text = action.csv_text(found)
        if output is None:
            click.echo(text, nl=False)
        else:
            output.write_text(text)
        return
    if wandb or output is None:
        found.refuse_unless_writable("export")
    if tensorboard:
        click.echo(action.export_tensorboard(found, output))
        return
    segments = action.export_wandb(found, project=project, entity=entity)
    if not segments:
        say(f"Run `{found.run_id}` has nothing to upload")
    for command in tracking_commands(found.layout):
        if segments and command.startswith("wandb"):
            click.echo(command)
