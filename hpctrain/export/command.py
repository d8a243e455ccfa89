"""Command `export`: the metrics of a run for other programs, or a spec for other clusters."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hpctrain.page.options import ProfileName, RunName, runs_option, set_option
from hpctrain.page.output import busy, line_width, say, warn

_METRICS = ("tensorboard", "wandb", "as_csv", "project", "entity")
# Options with which `--to` they go; all others of a spec go with each.
_PODS, _HOSTS = ("jobset", "trainjob"), ("hostfile",)
_DESTINATIONS: dict[str, tuple[str, ...]] = {
    "profile": (*_PODS, *_HOSTS),
    "overrides": (*_PODS, *_HOSTS),
    "name": (*_PODS, *_HOSTS),
    "hosts": _HOSTS,
    **dict.fromkeys(("image", "run_claim", "volumes", "secret", "namespace", "queue"), _PODS),
    **dict.fromkeys(("resources", "node_labels", "host_network", "most_restarts"), _PODS),
}


@click.command()
@click.argument("subject", metavar="RUN|SPEC", type=RunName())
@click.option("--tensorboard", is_flag=True, help="Event files, for `tensorboard --logdir`.")
@click.option("--wandb", is_flag=True, help="An offline W&B run, for `wandb sync`.")
@click.option("--csv", "as_csv", is_flag=True, help="One line per step that counts, on stdout.")
@click.option(
    "--to",
    type=click.Choice([*_PODS, *_HOSTS]),
    help="A spec for Kubernetes (JobSet, or TrainJob of Kubeflow) or for hosts without Slurm.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="With --tensorboard a directory, below which each run has its own; with --csv a file; "
    "with --to a directory.",
)
@click.option("--project", help="Project of W&B, if the spec names none.")
@click.option("--entity", help="Team or user of W&B, if the spec names none.")
@click.option("--profile", "-p", type=ProfileName(), help="With --to: profile to plan for.")
@set_option
@click.option("--name", help="With --to: name of the exported run.  [default: the spec's]")
@click.option("--image", help="Pods: their image.  [default: the container of spec or profile]")
@click.option("--run-claim", metavar="CLAIM", help="Pods: volume claim of the run directory.")
@click.option(
    "--volume",
    "volumes",
    multiple=True,
    metavar="CLAIM:/PATH",
    help="Pods: volume claim with data, at the path of the spec. May be repeated.",
)
@click.option("--secret", help="Pods: Secret with the variables that the spec inherits.")
@click.option("--namespace", "-n", help="Pods: namespace.")
@click.option("--queue", help="Pods: local queue of Kueue, which admits all pods together.")
@click.option(
    "--resource",
    "resources",
    multiple=True,
    metavar="NAME=COUNT",
    help="Pods: further devices of each node, such as rdma/hca=8. May be repeated.",
)
@click.option(
    "--node-selector",
    "node_labels",
    multiple=True,
    metavar="LABEL=VALUE",
    help="Pods: label that nodes must have. May be repeated.",
)
@click.option("--host-network", is_flag=True, help="Pods: use the network of their nodes.")
@click.option(
    "--max-restarts",
    "most_restarts",
    type=click.IntRange(min=0),
    help="Pods: starts after failures, in all.  [default: by the failures that the plan expects]",
)
@click.option("--hosts", help="Hosts of a hostfile in the order of nodes, as node[1-4].")
@runs_option
@click.pass_context
def export(
    context: click.Context,
    /,
    subject: str,
    tensorboard: bool,
    wandb: bool,
    as_csv: bool,
    to: str | None,
    output: Path | None,
    project: str | None,
    entity: str | None,
    runs: Path | None,
    **options: object,
) -> None:
    """Write a run's metrics for TensorBoard or Weights & Biases, or as CSV; with --to, write a
    spec for a cluster without Slurm.

    Metrics are one continuous curve over all attempts: where a run went back to a checkpoint, the
    later values count. Repeated, it adds what is new. Runs with `tracking:` in the spec do this in
    their jobs. With W&B nothing is uploaded: the command that does is printed.

    With --to the plan is that of `submit`. What is lost without Slurm and the supervisor is listed
    on stderr and at the top of the file. Nothing leads back.

    \b
    Examples:
      hpctrain export gpt175b-7f3a --tensorboard
      hpctrain export gpt175b-7f3a --tensorboard -o /shared/tensorboard
      hpctrain export gpt175b-7f3a --wandb --project llama
      hpctrain export gpt175b-7f3a --csv > metrics.csv
      hpctrain export llama7b.yaml -p h100x16 --to jobset --run-claim runs
      hpctrain export llama7b.yaml -p h100x16 --to hostfile --hosts n[1-4] -o out
    """
    flags = {one.name: one.opts[0] for one in context.command.params}
    given = [name for name, value in context.params.items() if value not in (None, False, ())]
    of_metrics = [flags[name] for name in given if name in _METRICS]
    if to is not None and of_metrics:
        raise click.UsageError(f"--to exports a spec, and {of_metrics[0]} the metrics of a run")
    for name in given:
        homes = _DESTINATIONS.get(name)
        if homes is not None and to not in homes:
            raise click.UsageError(f"{flags[name]} goes with --to {' or '.join(homes)}")
    if to is not None:
        _export_spec(context, subject, to, output, runs)
        return
    is_spec = subject.endswith((".yaml", ".yml")) or subject == "-"
    without_to = click.UsageError(
        f"`{subject}` is a spec and no run: --to jobset, trainjob or hostfile exports it"
        if is_spec
        else "choose one of --tensorboard, --wandb and --csv, or --to of a spec"
    )
    if [tensorboard, wandb, as_csv].count(True) != 1:
        raise without_to
    if wandb and output is not None:
        raise click.UsageError("--output does not go with --wandb")
    if not wandb and (project or entity):
        raise click.UsageError("--project and --entity go with --wandb")
    if is_spec:
        raise without_to
    from hpctrain.export import metrics as action
    from hpctrain.records.find import find_run, runs_directory
    from hpctrain.records.tracking import tracking_commands

    found = find_run(runs_directory(runs), subject)
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


def _export_spec(
    context: click.Context, subject: str, to: str, output: Path | None, runs: Path | None
) -> None:
    from hpctrain.export.exported_run import write_files
    from hpctrain.export.host_files import export_hosts
    from hpctrain.export.kubernetes import PodOptions, export_pods
    from hpctrain.job.plan_text import plan_lines
    from hpctrain.job.prepare import prepare
    from hpctrain.records.find import runs_directory

    wanted = context.params
    if wanted["profile"] is None:
        raise click.UsageError("Missing option '--profile' / '-p'.")
    if to in _HOSTS and output is None:
        raise click.UsageError("--to hostfile needs --output, a directory that all hosts have")
    if subject != "-" and not Path(subject).exists():
        raise click.UsageError(
            f"`{subject}` does not exist: --to exports the file of a spec, and --csv, "
            "--tensorboard and --wandb the metrics of a run"
        )
    directory = runs_directory(runs)
    with busy("planning ..."):
        prepared = prepare(Path(subject), wanted["profile"], wanted["overrides"], runs=directory)
    for line in plan_lines(prepared.plan, line_width(sys.stderr)):
        say(line)
    for warning in prepared.plan.warnings:
        warn(warning)
    if to in _HOSTS:
        assert output is not None
        made = export_hosts(prepared, wanted["hosts"], output, directory, wanted["name"])
    else:
        pods = {name: wanted[name] for name in PodOptions.__dataclass_fields__}
        made = export_pods(prepared, to, PodOptions(**pods))
    say("Lost, compared with `hpctrain submit` to Slurm:")
    for setting in made.lost:
        say(f"- {setting.sentence}")
    if output is None:
        click.echo(made.files[0].text, nl=False)
        return
    for path in write_files(made, output):
        click.echo(path)
