"""Command `serve`: plan a service, start it, watch it, change it, measure it, end it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.page.options import (
    ProfileName,
    confirm,
    json_option,
    profile_option,
    runs_option,
    set_option,
    yes_option,
)
from hpctrain.page.output import busy, json_out, line_width, say, table, warn
from hpctrain.runs.control_command import reason_option

if TYPE_CHECKING:
    from hpctrain.records.service_layout import ServiceLayout

SPEC = click.Path(path_type=Path, allow_dash=True)


@click.group()
def serve() -> None:
    """Serve a model: replicas as Slurm jobs behind one address, at a promised latency.

    \b
    Examples:
      hpctrain serve plan -p a100x64 -p h100x16 chat70b.yaml
      hpctrain serve up -p h100x16 chat70b.yaml
      hpctrain serve status chat70b
      hpctrain serve test chat70b
      hpctrain serve restart chat70b --reason "new weights"
      hpctrain serve down chat70b
    """


@serve.command(short_help="Find the cheapest replicas that keep the objectives")
@click.argument("spec", type=SPEC)
@click.option(
    "--profile",
    "-p",
    "profiles",
    type=ProfileName(),
    multiple=True,
    required=True,
    help="Cluster profile: name or file. Several are compared by what they cost.",
)
@set_option
@runs_option
@json_option
def plan(
    spec: Path,
    profiles: tuple[str, ...],
    overrides: tuple[str, ...],
    runs: Path | None,
    as_json: bool,
) -> None:
    """Find the cheapest replicas that keep the objectives, without Slurm.

    \b
    Examples:
      hpctrain serve plan -p h100x16 chat70b.yaml
      hpctrain serve plan -p a100x64 -p h100x16 chat70b.yaml --set traffic.rate=20
    """
    from hpctrain.base.errors import InvalidInputError
    from hpctrain.serve.make_plan import plan_service
    from hpctrain.serve.serve_text import planned_lines
    from hpctrain.spec.loader import load_named_profile, load_service_spec

    loaded = load_service_spec(spec, overrides)
    with busy("playing requests ..."):
        planned = plan_service(loaded, [load_named_profile(name) for name in profiles], runs)
    if as_json:
        json_out("service_plan", planned)
    else:
        for line in planned_lines(planned, line_width(sys.stdout)):
            click.echo(line)
    if planned.clarifications:
        message = "a limit without the name of its latency: ttft, tpot or e2e"
        raise InvalidInputError([loaded.problem("objectives.p99", message)])


@serve.command(short_help="Plan a service and start it")
@click.argument("spec", type=SPEC)
@profile_option
@set_option
@runs_option
@click.option("--new", is_flag=True, help="Start another one beside a service of the same name.")
@click.option("--dry-run", is_flag=True, help="Print the scripts of a replica and the router.")
def up(
    spec: Path,
    profile: str,
    overrides: tuple[str, ...],
    runs: Path | None,
    new: bool,
    dry_run: bool,
) -> None:
    """Plan a service and start it: its replicas, and the router with the controller.

    A service of the same name that is up gets the new spec: replicas that start from now on have
    it, and `hpctrain serve restart` gives it to all.

    \b
    Examples:
      hpctrain serve up -p h100x16 chat70b.yaml
      hpctrain serve up -p h100x16 chat70b.yaml --dry-run
    """
    from hpctrain.records.find import runs_directory
    from hpctrain.serve.serve_text import started_lines
    from hpctrain.serve.up import (
        prepare_service,
        running_service,
        service_scripts,
        start_service,
    )
    from hpctrain.slurm.client import SlurmClient

    directory = runs_directory(runs)
    with busy("planning, and playing requests ..."):
        inputs = prepare_service(spec, profile, overrides, runs=directory)
    for warning in inputs.plan.warnings:
        warn(warning)
    if dry_run:
        click.echo("\n".join(service_scripts(inputs)), nl=False)
        return
    old = None if new else running_service(directory, inputs)
    with busy("starting the service ..."):
        started = start_service(inputs, directory, SlurmClient(), service=old)
    click.echo(started.service_id)
    for line in started_lines(started, updated=old is not None):
        say(line)


@serve.command(short_help="List services, or show one")
@click.argument("service", required=False)
@runs_option
@json_option
def status(service: str | None, runs: Path | None, as_json: bool) -> None:
    """List services, or show one: address, replicas, load, and what is wanted and why.

    \b
    Examples:
      hpctrain serve status
      hpctrain serve status chat70b
    """
    from hpctrain.records.find import all_services, runs_directory
    from hpctrain.runs.service_status import service_status
    from hpctrain.serve.serve_text import status_lines, status_row

    if service is not None:
        found = service_status(_found(service, runs))
        if as_json:
            json_out("service", found)
            return
        for line in status_lines(found, line_width(sys.stdout)):
            click.echo(line)
        return
    listed = [service_status(one) for one in all_services(runs_directory(runs))]
    if as_json:
        json_out("services", listed)
        return
    table(["SERVICE", "STATE", "READY", "LOAD", "ADDRESS"], [status_row(one) for one in listed])


@serve.command(short_help="Have so many replicas, or as many as the spec says")
@click.argument("service")
@click.argument("replicas", metavar="N|auto")
@runs_option
def scale(service: str, replicas: str, runs: Path | None) -> None:
    """Have so many replicas, or as many as the spec says (`auto`).

    \b
    Examples:
      hpctrain serve scale chat70b 5
      hpctrain serve scale chat70b auto
    """
    from hpctrain.serve.control import request_scale

    if replicas != "auto" and not replicas.isdecimal():
        raise click.UsageError(f"`{replicas}` is neither a number of replicas nor `auto`")
    found = _found(service, runs)
    request_scale(found, None if replicas == "auto" else int(replicas))
    say(f"{found.service_id}: {replicas} replicas; the controller follows within seconds")


@serve.command(short_help="Restart all replicas one after the other")
@click.argument("service")
@reason_option
@click.option(
    "--compare/--no-compare",
    default=True,
    help="Stop where a new replica answers other greedy tokens than an old one."
    "  [default: compare]",
)
@runs_option
def restart(service: str, reason: str, compare: bool, runs: Path | None) -> None:
    """Restart all replicas one after the other, the new one before the old one leaves.

    \b
    Examples:
      hpctrain serve restart chat70b --reason "a node image with another driver"
      hpctrain serve restart chat70b --no-compare --reason "other weights"
    """
    from hpctrain.serve.control import request_restart

    found = _found(service, runs)
    request_restart(found, reason, compare=compare)
    say(f"{found.service_id}: `hpctrain serve status {found.service_id}` shows how far it is")


@serve.command(short_help="End a service: what has begun is finished")
@click.argument("service")
@click.option("--now", is_flag=True, help="Cancel all jobs; what has begun may be broken off.")
@runs_option
@yes_option
def down(service: str, now: bool, runs: Path | None, yes: bool) -> None:
    """End a service: the router first takes no more requests, then replicas finish theirs.

    \b
    Examples:
      hpctrain serve down chat70b
      hpctrain serve down chat70b --now -y
    """
    from hpctrain.serve.control import stop_service
    from hpctrain.serve.serve_text import ending_line
    from hpctrain.slurm.client import SlurmClient

    found = _found(service, runs)
    confirm(f"End service `{found.service_id}`?", yes=yes)
    say(ending_line(stop_service(found, SlurmClient(), now=now)))


@serve.command("test", short_help="Measure a service beside its promise")
@click.argument("service")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Requests per second.")
@click.option(
    "--requests",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="How many; a P99 is told apart with some thousands.",
)
@click.option(
    "--warm-up",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="At the start, not counted.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of times and lengths.")
@click.option("--ca", type=click.Path(path_type=Path), help="Certificates to trust.")
@click.option("--token-file", type=click.Path(path_type=Path), help="Its first line is the token.")
@runs_option
@json_option
def test_service(
    service: str,
    rate: float | None,
    requests: int,
    warm_up: float,
    seed: int,
    ca: Path | None,
    token_file: Path | None,
    runs: Path | None,
    as_json: bool,
) -> None:
    """Measure a service from here: the plan's promise beside what comes out.

    Requests are sent at planned times, whatever became of those before (an open loop), and
    latencies count from the planned time. Exit code 7: an objective is not met.

    \b
    Examples:
      hpctrain serve test chat70b
      hpctrain serve test chat70b --rate 20 --requests 2000
    """
    from hpctrain.base.errors import ObjectiveMissedError
    from hpctrain.serve.serve_text import measured_lines
    from hpctrain.serve.test import run_service_test

    found = _found(service, runs)
    with busy("sending requests ..."):
        result, path = run_service_test(found, rate, requests, warm_up, seed, ca, token_file)
    if as_json:
        json_out("service_test", result)
    else:
        for line in measured_lines(result, line_width(sys.stdout)):
            click.echo(line)
        say(f"written to {path}")
    if result.verdict == "not met":
        raise ObjectiveMissedError(f"service `{found.service_id}` does not keep its objectives")


def _found(service: str, runs: Path | None) -> ServiceLayout:
    from hpctrain.records.find import find_service, runs_directory

    return find_service(runs_directory(runs), service)
