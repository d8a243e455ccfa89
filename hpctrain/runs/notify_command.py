"""Command `notify`: whom a run tells about which events, what was sent, and a test."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.page.options import ProfileName, json_option, runs_option, set_option
from hpctrain.page.output import json_out, say


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
    from hpctrain.records.find import find_run, runs_directory
    from hpctrain.runs import notify as action
    from hpctrain.runs.notify_text import answer_lines, settings_lines, state_words

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
