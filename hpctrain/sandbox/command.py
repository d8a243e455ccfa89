"""`sandbox`: a real multi-node Slurm in a directory, to try things out and to check scripts."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.base import clock
from hpctrain.page.options import ProfileName, runs_option
from hpctrain.page.output import say, table

if TYPE_CHECKING:
    from hpctrain.sandbox.monitoring import Monitoring
    from hpctrain.sandbox.stand_in_site import ThisMachine

DEFAULT_DIRECTORY = Path(".sandbox")

directory_option = click.option(
    "--directory",
    "-d",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_DIRECTORY,
    show_default=True,
    help="Where the sandbox lives.",
)


@click.group()
def sandbox() -> None:
    """A real multi-node Slurm in a directory; the system's own Slurm is not touched.

    \b
    Examples:
      hpctrain sandbox up
      hpctrain sandbox up --profile a100x64
      hpctrain sandbox up --slurm 24.11
      hpctrain sandbox up --prometheus
      eval "$(hpctrain sandbox env)"; sinfo
      hpctrain sandbox kill n1
      hpctrain sandbox down
    """


@sandbox.command()
@directory_option
@click.option(
    "--profile",
    "-p",
    type=ProfileName(),
    default="sandbox",
    show_default=True,
    help="Take nodes, GPUs, partitions, switches and modules from this profile.",
)
@click.option(
    "--nodes",
    metavar="N",
    type=click.IntRange(1),
    help="At most N of each kind of nodes of the profile; default: all.",
)
@click.option(
    "--job-submit-lua",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The site's job_submit.lua, which Slurm's controller runs for each job.",
)
@click.option(
    "--slurm",
    metavar="RELEASE|DIRECTORY",
    help="Another Slurm than the installed one: 22.05, 24.11 or 26.05, which Debian's packages are "
    "fetched for (once, without root), or a directory where one is unpacked.",
)
@click.option(
    "--accounting",
    is_flag=True,
    help="With slurmdbd and its database: sacct, accounts, QOS and their limits.",
)
@click.option(
    "--prometheus",
    is_flag=True,
    help="With Prometheus, Alertmanager and the alert rules for runs, which Debian's packages are "
    "fetched for (once, without root).",
)
@runs_option
@click.option(
    "--webhook",
    metavar="URL",
    help="What Alertmanager sends alerts to: http://127.0.0.1:PORT/... of this machine.",
)
@click.option(
    "--alert-delays",
    metavar="FACTOR",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="Multiply the time that alerts wait before they fire by this, to rehearse them.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(1),
    default=90.0,
    show_default=True,
    help="Seconds to wait for the nodes.",
)
def up(
    directory: Path,
    profile: str,
    nodes: int | None,
    job_submit_lua: Path | None,
    slurm: str | None,
    accounting: bool,
    prometheus: bool,
    runs: Path | None,
    webhook: str | None,
    alert_delays: float,
    timeout: float,
) -> None:
    """Start it and wait until every node is ready.

    DIRECTORY/profile.yaml is the profile for jobs in it: it extends the one that was given, and
    changes what this machine lacks.

    \b
    Examples:
      hpctrain sandbox up
      hpctrain sandbox up --profile a100x64 --directory /tmp/big
      hpctrain sandbox up --profile my-site.yaml --nodes 2
      hpctrain sandbox up --slurm 26.05 --directory /tmp/newer
      hpctrain sandbox up --slurm 24.11 --accounting
      hpctrain sandbox up --prometheus --runs runs
    """
    from dataclasses import replace

    from hpctrain.base.errors import UsageError
    from hpctrain.sandbox.monitoring import alerts_page
    from hpctrain.sandbox.sandbox import Sandbox
    from hpctrain.sandbox.shape import shape_from_profile
    from hpctrain.sandbox.stand_in_site import profile_changes, profile_text
    from hpctrain.spec.loader import (
        PACKAGED_PROFILES,
        find_profile,
        load_named_profile,
        profile_search_path,
    )

    began = clock.monotonic()
    if webhook is not None and not prometheus:
        raise UsageError("--webhook is for the alerts of --prometheus", "add --prometheus")
    monitoring = _monitoring(runs, webhook, alert_delays) if prometheus else None
    loaded = load_named_profile(profile)
    shape = shape_from_profile(loaded.document, nodes)
    if job_submit_lua is not None:
        shape = replace(shape, job_submit_lua=job_submit_lua.read_text())
    if shape.site.modules is not None and not _has_modules():
        shape = replace(shape, site=replace(shape.site, modules=None))
    if accounting:
        shape = replace(shape, accounting="slurmdbd")
    unpacked = None if slurm is None else _unpacked(slurm)
    try:
        box = Sandbox.open(directory)
    except UsageError:
        box = Sandbox.create(directory, shape, unpacked)
    hint = f"`hpctrain sandbox down -d {shlex.quote(str(directory))}` first"
    if not accounting:  # a sandbox that has it keeps it
        shape = replace(shape, accounting=box.shape.accounting)
    if box.shape != replace(shape, accounting=box.shape.accounting):
        raise UsageError(
            f"the sandbox in {directory} has another shape than profile `{profile}`", hint
        )
    if box.shape != shape:
        raise UsageError(f"the sandbox in {directory} was made without --accounting", hint)
    if unpacked is not None and box.state.slurm != unpacked.resolve():
        raise UsageError(f"the sandbox in {directory} has another Slurm than {slurm}", hint)
    box.up(timeout)
    if monitoring is not None:
        box.monitor(monitoring)
    changes = profile_changes(loaded.document, nodes, box.paths, _this_machine(box.state.version))
    file = find_profile(profile, profile_search_path())
    base = file.stem if file.parent == PACKAGED_PROFILES else str(file.absolute())
    text = profile_text(base, f"{loaded.document.name}-sandbox", changes)
    box.paths.profile.write_text(text)
    seconds = clock.monotonic() - began
    sizes: dict[int, int] = {}
    for group in shape.node_groups:
        sizes[group.gpus] = sizes.get(group.gpus, 0) + group.nodes
    size = " + ".join(f"{count} nodes x {gpus} GPUs" for gpus, count in sizes.items())
    say(f"Slurm {_dotted(box.state.version)} with {size} is up ({seconds:.1f} s)")
    if (watching := box.state.monitoring) is not None:
        say(f"Prometheus watches the runs in {watching.runs}: {alerts_page(box.state.ports)}")
    for change in changes:
        say(f"  {change}")
    if changes:
        say(f"Its profile   {box.paths.profile}")
    say(f'To use it   eval "$(hpctrain sandbox env -d {shlex.quote(str(directory))})"')


def _has_modules() -> bool:
    """Fetch the module system if that is necessary; without a network say that there is none."""
    from hpctrain.base.errors import SlurmUnreachableError
    from hpctrain.sandbox.debian import fetch_modules, is_complete, modules_cache

    cache = modules_cache()
    if not is_complete(cache):
        say(f"Fetching Environment Modules of Debian into {cache} (some 12 MB)")
    try:
        fetch_modules(cache)
    except SlurmUnreachableError as error:
        say(f"No module system: {error}")
        return False
    return True


def _this_machine(slurm: tuple[int, int]) -> ThisMachine:
    """Look at what this machine has for jobs of the sandbox."""
    import subprocess
    import sys

    from hpctrain.sandbox.stand_in_site import ThisMachine

    def allows(option: str, value: str) -> bool:
        tried = ["bash", "-c", 'ulimit "$@"', "bash", option, value]
        return subprocess.run(tried, capture_output=True, timeout=10, check=False).returncode == 0

    return ThisMachine(sys.executable, slurm, os.path.exists, allows)


def _monitoring(runs: Path | None, webhook: str | None, alert_delays: float) -> Monitoring:
    """Return the settings of `--prometheus`, whose programs are fetched if that is necessary."""
    from urllib.parse import urlsplit

    from hpctrain.base.errors import UsageError
    from hpctrain.records.find import all_runs, runs_directory
    from hpctrain.runs.status import poll_interval
    from hpctrain.sandbox.debian import (
        PROMETHEUS_SUITE,
        fetch_prometheus,
        is_complete,
        prometheus_cache,
    )
    from hpctrain.sandbox.monitoring import SCRAPE_SECONDS, Monitoring

    if webhook is not None:
        url = urlsplit(webhook)
        # What is tried out in a sandbox is nobody else's alarm, and other addresses are secrets.
        if url.scheme != "http" or url.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise UsageError(
                f"the webhook of a sandbox is one of this machine, not {url.hostname or webhook}",
                "as in --webhook http://127.0.0.1:9099/alerts",
            )
    cache = prometheus_cache()
    if not is_complete(cache):
        say(f"Fetching Prometheus of Debian {PROMETHEUS_SUITE} into {cache} (some 75 MB)")
    watched = runs_directory(runs).absolute()
    programs = fetch_prometheus(cache)
    return Monitoring(
        programs.directory,
        watched,
        webhook,
        # The exporter refuses to ask Slurm more often than the sites of the runs allow.
        collect_seconds=max(SCRAPE_SECONDS, poll_interval(all_runs(watched))),
        delay_factor=alert_delays,
    )


def _unpacked(slurm: str) -> Path:
    """Return the directory of the Slurm that `--slurm` names, fetched if that is necessary."""
    from hpctrain.sandbox.debian import (
        SUITES,
        default_cache,
        fetch_slurm,
        is_complete,
        slurm_directory,
    )

    directory = slurm_directory(slurm, default_cache())
    if slurm in SUITES and not is_complete(directory):
        say(f"Fetching Slurm {slurm} of Debian {SUITES[slurm]} into {directory} (some 35 MB)")
    return fetch_slurm(slurm, default_cache())


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(f"{number:02d}" for number in version)


@sandbox.command()
@directory_option
@click.option("--keep", is_flag=True, help="Keep configuration and logs.")
def down(directory: Path, keep: bool) -> None:
    """End every process of it and remove the directory.

    \b
    Examples:
      hpctrain sandbox down
    """
    from hpctrain.sandbox.sandbox import Sandbox

    Sandbox.open(directory).down(keep=keep)
    say("The sandbox is down")


@sandbox.command("kill", short_help="Kill a node, as a loss of power does.")
@directory_option
@click.option("--freeze", is_flag=True, help="Hang it instead: its processes stop, and stay.")
@click.argument("node")
def kill_node(directory: Path, freeze: bool, node: str) -> None:
    """Kill a node, as a loss of power does: its daemon and all processes of jobs on it.

    To rehearse a bad night. `sandbox revive` brings it back.

    \b
    Examples:
      hpctrain sandbox kill n1
      hpctrain sandbox kill n1 --freeze
    """
    from hpctrain.sandbox.faults import crash_node, freeze_node
    from hpctrain.sandbox.sandbox import Sandbox

    box = Sandbox.open(directory)
    (freeze_node if freeze else crash_node)(box, node)
    seconds = box.shape.slurmd_timeout_seconds
    say(f"{node} {'hangs' if freeze else 'is dead'}; Slurm misses it after {seconds} s of silence")
    say("To bring it back   hpctrain sandbox revive")


@sandbox.command(short_help="Start dead nodes again, and thaw hanging ones.")
@directory_option
def revive(directory: Path) -> None:
    """Start dead nodes again, thaw hanging ones, and return them to the scheduler.

    \b
    Examples:
      hpctrain sandbox revive
    """
    from hpctrain.sandbox.repair import bring_back
    from hpctrain.sandbox.sandbox import Sandbox

    nodes = bring_back(Sandbox.open(directory))
    say(f"Back again: {', '.join(nodes)}" if nodes else "No node was dead or hanging")


@sandbox.command()
@directory_option
def env(directory: Path) -> None:
    """Print the shell commands that point Slurm's programs to it.

    \b
    Examples:
      eval "$(hpctrain sandbox env)"
    """
    from hpctrain.sandbox.sandbox import Sandbox

    for name, value in Sandbox.open(directory).environment().items():
        click.echo(f"export {name}={shlex.quote(value)}")


@sandbox.command()
@directory_option
def status(directory: Path) -> None:
    """Show its nodes and daemons.

    \b
    Examples:
      hpctrain sandbox status
    """
    from hpctrain.sandbox.sandbox import Sandbox

    seen = Sandbox.open(directory).status()
    click.echo(f"Slurm {_dotted(seen.version)} in {seen.directory}: {seen.health}")
    daemons = [
        [d.name, str(d.pid), "frozen" if d.frozen else "alive" if d.alive else "dead"]
        for d in seen.daemons
    ]
    table(["NODE", "STATE"], [[node.name, node.state] for node in seen.nodes])
    click.echo()
    table(["DAEMON", "PID", "STATE"], daemons)
    if seen.addresses:
        click.echo()
        table(["MONITOR", "ADDRESS"], [[name, url] for name, url in seen.addresses.items()])


@sandbox.command(context_settings={"ignore_unknown_options": True})
@directory_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(directory: Path, command: tuple[str, ...]) -> None:
    """Run one command with the sandbox as its Slurm.

    \b
    Examples:
      hpctrain sandbox run squeue
      hpctrain sandbox run -- hpctrain submit --profile sandbox gpt-tiny.yaml
    """
    from hpctrain.sandbox.sandbox import Sandbox

    environment = {**os.environ, **Sandbox.open(directory).environment()}
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        raise click.UsageError(f"cannot run `{command[0]}`: {error.strerror}") from error
