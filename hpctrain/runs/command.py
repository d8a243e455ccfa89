"""Commands that show runs: `status`, `describe`, `logs`, `goodput`, `why`, `nodes`, `notify`."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.base import clock
from hpctrain.page.options import (
    ProfileName,
    RunName,
    Seconds,
    json_option,
    runs_option,
    set_option,
)
from hpctrain.page.output import busy, json_out, say, table, terminal_width
from hpctrain.records.find import find_run, runs_directory

if TYPE_CHECKING:
    from hpctrain.runs.node_evidence import NodeRow
    from hpctrain.runs.service_status import ServiceRow
    from hpctrain.runs.status import RunStatus


@click.command()
@click.argument("names", nargs=-1, type=RunName(), metavar="[RUN]...")
@click.option("--all", "-a", "show_all", is_flag=True, help="Finished runs as well.")
@click.option("--last", "-n", type=click.IntRange(1), help="Only the newest N runs.")
@click.option("--follow", "-f", is_flag=True, help="Show again and again.")
@click.option("--watch", "-w", is_flag=True, hidden=True, help="The former name of --follow.")
@click.option(
    "--wait", is_flag=True, help="Wait until the runs are over; exit code 7 if one failed."
)
@click.option(
    "--every",
    type=Seconds(),
    metavar="DURATION",
    help="Time between two looks of --follow and --wait; by default as often as the site allows.",
)
@runs_option
@json_option
def status(
    names: tuple[str, ...],
    show_all: bool,
    last: int | None,
    follow: bool,
    watch: bool,
    wait: bool,
    every: float | None,
    runs: Path | None,
    as_json: bool,
) -> None:
    """Show runs: state and reason, job, attempt, step, loss, rate, last sign of life, time left.

    Without names: unfinished runs and the last finished one, and services, of which `serve status`
    tells more. With one name: a page about that run.

    \b
    Examples:
      hpctrain status
      hpctrain status gpt175b-7f3a --json
      hpctrain status --wait gpt-tiny-1a2b
    """
    follow = follow or watch
    if as_json and follow:
        raise click.UsageError("--json and --follow exclude each other")
    if every is not None and not (follow or wait):
        raise click.UsageError("--every is the time between two looks of --follow or --wait")
    pause_seconds = _pause_seconds(names, runs, every) if follow or wait else 0.0
    while True:
        with busy("asking Slurm, and reading the runs ..."):
            services = [] if names or as_json else _services(show_all, runs)
            rows, notes = _collect(names, show_all, last, runs)
        over = all(row.state.over for row in rows)
        if follow:
            click.clear()
        if follow or over or not wait:
            for note in notes if rows or not services else ():
                say(note)
            _show(names, rows, runs, as_json=as_json)
            _show_services(services, below=bool(rows))
        if wait and over:
            _fail_if_any_failed(rows)
        if (wait and over) or not (wait or follow):
            return
        clock.sleep(pause_seconds)  # squeue(1), PERFORMANCE: no queries in a tight loop


def _pause_seconds(names: tuple[str, ...], runs: Path | None, every: float | None) -> float:
    from hpctrain.records.find import all_runs
    from hpctrain.runs.status import poll_interval

    directory = runs_directory(runs)
    found = [find_run(directory, name) for name in names] if names else all_runs(directory)
    return poll_interval(found, every)


def _show(
    names: tuple[str, ...], rows: list[RunStatus], runs: Path | None, *, as_json: bool
) -> None:
    """Print JSON, the page of one run that was named, or one line per run and what is below it."""
    from hpctrain.runs.status_text import HEADERS, cells, people_lines

    if as_json:
        json_out("runs", rows)
    elif not rows:
        return
    elif len(names) == 1:
        from hpctrain.runs.run_page import page_lines, run_page

        for line in page_lines(run_page(find_run(runs_directory(runs), names[0]), rows[0])):
            click.echo(line)
    elif sys.stdout.isatty():
        for line in people_lines(rows, terminal_width()):
            click.echo(line)
    else:
        table(HEADERS, [cells(row) for row in rows])


def _services(show_all: bool, runs: Path | None) -> list[ServiceRow]:
    """Find a line about each service; those that were ended only with `--all`."""
    from hpctrain.records.find import all_services

    services = all_services(runs_directory(runs))
    if not services:
        return []
    from hpctrain.runs.service_status import service_rows

    return [row for row in service_rows(services) if show_all or not row.is_over]


def _show_services(rows: list[ServiceRow], *, below: bool) -> None:
    """Print one line per service, below the runs if there are any."""
    if not rows:
        return
    from hpctrain.runs.service_status import SERVICE_HEADERS, service_cells

    if below:
        click.echo()
    cells = [service_cells(row) for row in rows]
    problems = any(row.problem for row in rows)
    shown = len(SERVICE_HEADERS) if problems else len(SERVICE_HEADERS) - 1
    table(SERVICE_HEADERS[:shown], [line[:shown] for line in cells])


def _collect(
    names: tuple[str, ...], show_all: bool, last: int | None, runs: Path | None
) -> tuple[list[RunStatus], list[str]]:
    """Determine the state of the selected runs, and say what is left out.

    By default these are the unfinished runs, those that are only prepared, and the last finished.
    """
    from hpctrain.records.find import all_runs
    from hpctrain.runs.state import RunState
    from hpctrain.runs.status import statuses
    from hpctrain.slurm.client import SlurmClient

    directory = runs_directory(runs)
    found = [find_run(directory, name) for name in names] if names else all_runs(directory)
    if not found:
        return [], ["no runs here yet; `hpctrain submit --help` shows how to start one"]
    rows = statuses(found[-last:] if last else found, SlurmClient())
    if names or show_all or last:
        return rows, []
    notes = []
    hidden = sum(not row.readable for row in rows)
    if hidden:
        whose = "`-a` shows whose they are" if hidden > 1 else "`-a` shows whose it is"
        notes.append(f"{hidden} {'run' if hidden == 1 else 'runs'} cannot be read; {whose}")
    rows = [row for row in rows if row.readable]
    ended = [row for row in rows if row.state.over and row.state is not RunState.PREPARED]
    older = {row.run_id: row.state for row in ended[:-1]}
    shown = [row for row in rows if row.run_id not in older]
    failed = sum(state is RunState.FAILED for state in older.values())
    if failed:
        notes.append(
            f"{failed} more {'run has' if failed == 1 else 'runs have'} failed; `-a` shows them"
        )
    return shown, notes


def _fail_if_any_failed(rows: list[RunStatus]) -> None:
    from hpctrain.base.errors import RunFailedError
    from hpctrain.runs.state import RunState

    failed = [row for row in rows if row.state is not RunState.DONE]
    if failed:
        raise RunFailedError(
            "; ".join(f"run `{row.run_id}` is {row.state}: {row.reason}" for row in failed)
        )


@click.command()
@click.argument("run", type=RunName())
@runs_option
@json_option
def describe(run: str, runs: Path | None, as_json: bool) -> None:
    """Show the history of a run: attempts, launches, why each ended and what was done.

    \b
    Examples:
      hpctrain describe gpt175b-7f3a
      hpctrain describe gpt175b-7f3a --json
    """
    from hpctrain.runs.describe import describe as read_story
    from hpctrain.runs.describe import story_lines

    story = read_story(find_run(runs_directory(runs), run))
    if as_json:
        json_out("run", story)
        return
    for line in story_lines(story):
        click.echo(line)


@click.command()
@click.argument("run", type=RunName())
@click.option("--rank", type=click.IntRange(0), help="The log of this rank instead of the job's.")
@click.option("--attempt", type=click.IntRange(1), help="Only this attempt, counted from 1.")
@click.option("--tail", type=click.IntRange(1), metavar="N", help="Only the last N lines.")
@click.option("--errors", is_flag=True, help="What ranks died of: one line for each error.")
@click.option("--follow", "-f", is_flag=True, help="Continue until the run is over.")
@runs_option
def logs(
    run: str,
    rank: int | None,
    attempt: int | None,
    tail: int | None,
    errors: bool,
    follow: bool,
    runs: Path | None,
) -> None:
    """Show the log of the job, or of one rank; of all attempts by default.

    \b
    Examples:
      hpctrain logs gpt175b-7f3a --tail 100
      hpctrain logs gpt175b-7f3a --rank 0 -f
      hpctrain logs gpt175b-7f3a --errors
    """
    from hpctrain.runs import logs as action

    if attempt is not None and ((rank is None and not errors) or follow):
        raise click.UsageError("--attempt goes with --rank or --errors, and without --follow")
    if errors and (rank is not None or tail is not None or follow):
        raise click.UsageError("--errors goes with no option but --attempt")
    found = find_run(runs_directory(runs), run)
    if errors:
        from hpctrain.runs.log_errors import error_lines, launch_errors

        for line in error_lines(launch_errors(found, attempt)):
            click.echo(line)
        return
    if follow:
        _follow(found.run_id, rank, runs, tail)
        return
    parts = action.logs_of(found, rank, attempt)
    if not parts:
        say(f"run `{found.run_id}` has no log yet")
    for text in action.texts(parts, tail):
        click.echo(text, nl=False)
    packed = action.packed_logs(found) if rank is not None else []
    if packed:
        say(f"Logs of older launches are packed: {', '.join(map(str, packed))}")


def _follow(run_id: str, rank: int | None, runs: Path | None, tail: int | None) -> None:
    """Print the newest log as it grows, or from its last lines on, until the run is over."""
    from hpctrain.base.errors import UsageError
    from hpctrain.runs import logs as action
    from hpctrain.runs.status import poll_interval

    found = find_run(runs_directory(runs), run_id)

    def newest() -> action.LogPart | None:
        try:
            parts = action.logs_of(found, rank)
        except UsageError:
            return None
        return parts[-1] if parts else None

    def rows() -> list[RunStatus]:
        return _collect((run_id,), False, None, runs)[0]

    pause_seconds = poll_interval([found])
    next_at, is_over = 0.0, False

    def over() -> bool:
        nonlocal next_at, is_over
        if clock.monotonic() >= next_at:  # lines come every second, Slurm is asked rarely
            next_at = clock.monotonic() + pause_seconds
            is_over = all(row.state.over for row in rows())
        return is_over

    for text in action.follow(newest, over, tail):
        click.echo(text, nl=False)
    _fail_if_any_failed(rows())


@click.command()
@click.argument("run", type=RunName())
@runs_option
@json_option
def goodput(run: str, runs: Path | None, as_json: bool) -> None:
    """Show where the time of a run went, and what each cause of interruptions has cost.

    \b
    Every moment counts once, from the first submission to now or to the end:
      productive     steps that are in the final weights
      redone steps   steps that were lost and are trained again
      saving         training stood still for a checkpoint
      starting       from the start of a launch to its first step
      not reported   launches of a trainer that does not report its steps
      detecting      from the last sign of life to the verdict
      restarting     from the verdict to the next launch
      down           an attempt that was lost without a word
      held           stopped or held; not counted in ETTR

    \b
    Examples:
      hpctrain goodput gpt175b-7f3a
      hpctrain goodput gpt175b-7f3a --json
    """
    from hpctrain.runs.goodput import goodput as account_for
    from hpctrain.runs.goodput import goodput_lines

    account = account_for(find_run(runs_directory(runs), run))
    if as_json:
        json_out("goodput", account)
        return
    for line in goodput_lines(account):
        click.echo(line)


@click.command()
@click.argument("run", type=RunName())
@runs_option
@json_option
def why(run: str, runs: Path | None, as_json: bool) -> None:
    """Explain the state of a run: the last cause and the action taken, the budget of
    each cause, why it waits, and what happens at the next failure.

    The last part applies the policy that the supervisor itself uses.

    \b
    Examples:
      hpctrain why gpt175b-7f3a
      hpctrain why gpt175b-7f3a --json
    """

    from hpctrain.runs.why import why as explain
    from hpctrain.runs.why import why_lines
    from hpctrain.slurm.client import SlurmClient

    now = clock.now()
    explained = explain(find_run(runs_directory(runs), run), SlurmClient(), now)
    if as_json:
        json_out("why", explained)
        return
    for line in why_lines(explained, now):
        click.echo(line)


@click.command()
@click.option("--profile", "-p", type=ProfileName(), help="Only the cluster of this profile.")
@click.option("--cluster", metavar="NAME", help="Only the cluster of this name.")
@click.option("--forgive", metavar="NODE", help="Void the evidence against a node.")
@runs_option
@json_option
def nodes(
    profile: str | None,
    cluster: str | None,
    forgive: str | None,
    runs: Path | None,
    as_json: bool,
) -> None:
    """Show the nodes with evidence against them, and hints for the administrators.

    Runs share evidence about nodes in RUNS/nodes.jsonl. A node with a score of 100 or more is
    avoided by runs with `supervise.exclude_nodes: act`. Evidence counts in full for a day, broken
    hardware for a week; later it fades. Users cannot drain nodes: the last lines are for a ticket.

    \b
    Examples:
      hpctrain nodes
      hpctrain nodes --profile a100x64 --json
      hpctrain nodes --forgive n17
    """
    from hpctrain.job.supervisor_settings import NODE_LEDGER_NAME
    from hpctrain.runs import node_evidence as action

    if profile and cluster:
        raise click.UsageError("--profile and --cluster exclude each other")
    ledger = runs_directory(runs) / NODE_LEDGER_NAME
    usable_nodes = 0
    if profile:
        from hpctrain.spec.loader import load_named_profile

        document = load_named_profile(profile).document
        cluster, usable_nodes = document.name, document.nodes.count
    if forgive is not None:
        entry = action.forgive(ledger, forgive, getpass.getuser(), cluster)
        say(f"Forgave node `{entry.node}` of {entry.cluster}")
        return
    rows = action.node_rows(ledger, cluster, usable_nodes)
    if as_json:
        json_out("nodes", rows)
    elif not rows:
        say("no run has evidence against a node")
    else:
        headers = ["NODE", "SCORE", "AVOIDED", "RUNS", "AGE", "EVIDENCE"]
        cells = [_cells(row) for row in rows]
        if len({row.cluster for row in rows}) > 1:
            headers.insert(0, "CLUSTER")
            cells = [[row.cluster, *line] for row, line in zip(rows, cells, strict=True)]
        table(headers, cells)
        hints = [row.admin_hint for row in rows if row.admin_hint]
        if hints:
            click.echo("\nFor the administrators (users cannot drain nodes):")
        for hint in hints:
            click.echo(f"  {hint}")


def _cells(row: NodeRow) -> list[str]:
    from hpctrain.base.units import short_duration

    avoided = "yes" if row.avoided else "spared" if row.spared else "no"
    return [
        row.node,
        f"{row.score:g}",
        avoided,
        str(len(row.runs)),
        short_duration(row.age_seconds),
        row.reason or row.kind,
    ]


@click.command()
@click.argument("run_or_spec", metavar="RUN|SPEC")
@click.option("--profile", "-p", type=ProfileName(), help="With a SPEC: the cluster's profile.")
@click.option("--test", "is_test", is_flag=True, help="Send a test message over each channel.")
@set_option
@runs_option
@json_option
def notify(
    run_or_spec: str,
    profile: str | None,
    is_test: bool,
    overrides: tuple[str, ...],
    runs: Path | None,
    as_json: bool,
) -> None:
    """Show what a run has told people, and over which channels.

    With a SPEC and a profile: the channels of a run before it is submitted. Ends with exit code 1
    when a channel does not take the test.

    \b
    Examples:
      hpctrain notify gpt175b-7f3a
      hpctrain notify gpt175b-7f3a --test
      hpctrain notify gpt175b.yaml -p a100x64 --test
    """
    from hpctrain.base.errors import HpctrainError
    from hpctrain.runs import notify as action
    from hpctrain.runs.notify import answer_lines, settings_lines, state_words

    directory = runs_directory(runs)
    run = None
    if profile is None:
        if overrides:
            raise click.UsageError("`--set` needs a SPEC and `--profile`")
        run = find_run(directory, run_or_spec)
        settings, facts = action.told_by_run(run)
    else:
        settings, facts = action.told_by_spec(Path(run_or_spec), profile, overrides, directory)
    if is_test:
        tests = action.try_channels(settings, facts)
        if as_json:
            json_out("tests", tests)
        else:
            click.echo("\n".join(answer_lines(tests)))
        failed = [one for one in tests if one.problem is not None]
        if failed:
            names = ", ".join(one.channel for one in failed)
            raise HpctrainError(
                f"not sent: {names}", next((f.hint for f in failed if f.hint), None)
            )
        return
    states = action.notice_states(run) if run is not None else []
    if as_json:
        json_out("notices", states)
        return
    click.echo("\n".join(settings_lines(settings)))
    for one in states:
        click.echo(state_words(one))
    if run is not None and not states:
        say("nothing has happened yet that the run tells")
