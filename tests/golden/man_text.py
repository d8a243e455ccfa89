"""Writes the man pages: hpctrain(1) from commands, hpctrain-spec(5) and -profile(5) from fields.

Belongs here: their sections, and the language of man(7). Does not belong here: sentences about
commands (their docstrings and options) and fields (`hpctrain.spec`).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping

import click

from hpctrain.cli.main import EXIT_CODES, GROUPS, cli
from hpctrain.job.reference_command import default_text
from hpctrain.spec.reference import Field, Kind, fields_of

ENVIRONMENT: Mapping[str, str] = {
    "HPCTRAIN_RUNS": "Directory of the runs, where `--runs` is not given. Default: ./runs",
    "HPCTRAIN_PROFILE_PATH": "Directories of cluster profiles, separated by colons; they are "
    "searched before those that come with hpctrain.",
    "HPCTRAIN_DEBUG": "If set, errors are printed with a traceback, as with `--debug`.",
    "XDG_CACHE_HOME": "Below it lie the releases that `hpctrain sandbox up --slurm` fetches. "
    "Default: ~/.cache",
    "NO_COLOR": "If set, nothing is coloured (no-color.org).",
    "HPCTRAIN_PROMETHEUS": "Where the Prometheus of a sandbox answers; `hpctrain sandbox env` "
    "sets it.",
    "HPCTRAIN_ALERTMANAGER": "The same for its Alertmanager.",
    "SLURM_CONF": "Which cluster the programs of Slurm speak to; `hpctrain sandbox env` sets it.",
}
FILES: Mapping[str, str] = {
    "runs/RUN/": "The directory of one run. `describe` and `status` read it, and so can you.",
    "runs/RUN/spec.yaml, profile.yaml": "What was submitted, with the origin of each value.",
    "runs/RUN/job.sbatch": "The job script, as `submit --dry-run` prints it.",
    "runs/RUN/ledger.jsonl": "Every event of the run: the truth about its attempts.",
    "runs/RUN/logs/": "Logs of each attempt: the job's own, and one for each step and node.",
    "runs/RUN/checkpoints/": "Checkpoints, each with a manifest of digests.",
    "runs/RUN/control/": "Requests: a file `save`, `stop`, `stop-now` or `hold` is one.",
}
_SUMMARY = "plan, generate and supervise the training of large models on Slurm"
_ABOUT: Mapping[Kind, tuple[str, str]] = {
    "spec": (
        "what a run of hpctrain trains",
        "A run spec is a YAML 1.2 file that says what to train: model, data, batch, budget, layout "
        "and what to ask Slurm for. It knows nothing of the cluster, which hpctrain-profile(5) "
        "describes. `hpctrain init` writes one, `hpctrain validate` checks one.",
    ),
    "profile": (
        "what hpctrain knows about a cluster",
        "A cluster profile is a YAML 1.2 file that says what a cluster is: nodes, GPUs, links, "
        "file systems, and how its Slurm is used. `hpctrain profile detect` makes one by asking "
        "Slurm, `hpctrain validate` checks one. With `extends: NAME` it contains what differs from "
        "another one.",
    ),
    "service": (
        "what hpctrain serves to whom, and how fast",
        "The spec of a service is a YAML 1.2 file that says which model is served, which requests "
        "come, and what is promised to clients. `hpctrain serve plan` finds the cheapest replicas "
        "that keep the promise, `hpctrain serve up` starts them.",
    ),
}
_WIDTH = 78
_PAGES = ("hpctrain(1)", "hpctrain-spec(5)", "hpctrain-profile(5)", "hpctrain-service(5)")


def command_page() -> str:
    """Write hpctrain(1): all commands with their options, variables, files, exit codes."""
    lines = [*_head("hpctrain", 1, _SUMMARY)]
    lines += [".SH SYNOPSIS", "\\fBhpctrain\\fR [\\fB\\-\\-debug\\fR] \\fICOMMAND\\fR ..."]
    lines += [".SH DESCRIPTION", *_paragraphs(cli.help or "")]
    # with its settings: click keeps the help option that a command was first asked for
    context = click.Context(cli, info_name="hpctrain", **cli.context_settings)
    for heading, group in GROUPS.items():
        lines.append(f".SH {_text(heading).upper()}")
        for name in group:
            command = cli.get_command(context, name)
            assert command is not None
            lines += _command(command, click.Context(command, context, info_name=name))
    lines += [".SH ENVIRONMENT", *_definitions(ENVIRONMENT.items())]
    lines += [".SH FILES", *_definitions(FILES.items())]
    lines += [".SH EXIT STATUS", *_definitions(_exit_codes())]
    return _joined([*lines, *_see_also("hpctrain(1)")])


def field_page(kind: Kind) -> str:
    """Write hpctrain-spec(5) or hpctrain-profile(5): every field, in the order of the document."""
    summary, about = _ABOUT[kind]
    lines = [*_head(f"hpctrain-{kind}", 5, summary), ".SH DESCRIPTION", *_paragraphs(about)]
    lines += [".PP", _text("`hpctrain explain FIELD` prints one field, with an example.")]
    lines.append(".SH FIELDS")
    for field in fields_of(kind).values():
        lines += _field(field)
    return _joined([*lines, *_see_also(f"hpctrain-{kind}(5)")])


def _head(name: str, section: int, summary: str) -> Iterator[str]:
    yield '.\\" Written by the tests from descriptions of commands and fields: do not edit.'
    yield f'.TH {name.upper()} {section} "" "hpctrain" "hpctrain"'
    yield ".SH NAME"
    yield f"{_text(name)} \\- {_text(summary)}"


def _see_also(own: str) -> list[str]:
    others = [page for page in _PAGES if page != own]
    slurm = ["sbatch(1)", "squeue(1)", "scontrol(1)"]
    named = [f"\\fB{_text(page[:-3])}\\fR{page[-3:]}" for page in (*others, *slurm)]
    return [".SH SEE ALSO", ",\n".join(named)]


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    usage = " ".join((context.command_path, *command.collect_usage_pieces(context)))
    yield f'.SS "{_text(usage)}"'
    yield from _paragraphs(command.help or "")
    options = [one for one in command.get_params(context) if isinstance(one, click.Option)]
    records = [one.get_help_record(context) for one in options]
    yield from _definitions(record for record in records if record and "--help" not in record[0])
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _command(inner, click.Context(inner, context, info_name=name))


def _field(field: Field) -> Iterator[str]:
    yield ".TP"
    yield f"\\fB{_text(field.path)}\\fR"
    default = "" if field.fields else f"; default: {default_text(field)}"
    required = "; required" if field.required else ""
    kind = f"{field.type}{required or default}"
    engines = f" (engines: {', '.join(field.engines)})" if field.engines else ""
    yield f"{_text(kind + engines)}."
    if field.description:
        yield ".br"
        yield _text(field.description)


def _exit_codes() -> Iterator[tuple[str, str]]:
    words = EXIT_CODES.replace("\b", "").replace("Exit codes:", "")
    for one in re.split(r"·|\n", words):
        code, _, meaning = one.strip().partition(" ")
        if code:
            yield code, meaning


def _definitions(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, meaning in rows:
        yield ".TP"
        yield f"\\fB{_text(term)}\\fR"
        yield _text(" ".join(meaning.split())) or "\\&"


def _paragraphs(help_text: str) -> Iterator[str]:
    """Format a docstring as click reads it: `\\b` keeps the lines of a paragraph as they are."""
    for number, paragraph in enumerate(re.split(r"\n\s*\n", help_text.strip())):
        rows = [row for row in paragraph.splitlines() if row.strip()]
        kept = bool(rows) and rows[0].strip() == "\b"
        if number:
            yield ".PP"
        if kept:
            yield ".nf"
            for row in textwrap.dedent("\n".join(rows[1:])).splitlines():
                yield _text(row.rstrip())
            yield ".fi"
        else:
            yield _text(" ".join(row.strip() for row in rows))


def _text(text: str) -> str:
    """Escape a text for roff: backslashes, hyphens, what is not ASCII, a dot in front."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    escaped = re.sub(r"`([^`]*)`", r"\\fB\1\\fR", escaped)
    escaped = "".join(one if one.isascii() else f"\\[u{ord(one):04X}]" for one in escaped)
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(_broken(lines)) + "\n"


def _broken(lines: Iterable[str]) -> Iterator[str]:
    """Break lines of text where man fills them anyway: short ones are easier to review."""
    kept = False
    for line in lines:
        kept = (kept or line == ".nf") and line != ".fi"
        if kept or line.startswith((".", "\\fB")):
            yield line
            continue
        for part in textwrap.wrap(line, _WIDTH, break_long_words=False, break_on_hyphens=False):
            yield f"\\&{part}" if part.startswith((".", "'")) else part
