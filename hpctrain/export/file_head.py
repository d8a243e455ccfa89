"""Writes the comment at the top of each file: what it is, how to use it, and what is lost. Pure."""

from __future__ import annotations

import textwrap

from hpctrain.export.exported_run import ExportedRun
from hpctrain.export.lost_settings import LostSetting

_WIDTH = 96


def file_head(run: ExportedRun, lost: tuple[LostSetting, ...], how_to: tuple[str, ...]) -> str:
    """Write the comment; no value of a spec can end it early."""
    lines = [run.title, run.origin, "", *how_to, "", "Why variables are set:"]
    for one in run.variables:
        lines += _wrapped(f"{one.name}: {one.reason}")
    lines += ["", "Lost, compared with `hpctrain submit` to Slurm:"]
    for setting in lost:
        lines += _wrapped(setting.sentence)
    lines += [
        "",
        "Kept: layout, batch, engine and every setting of training, as `submit` has them;",
        "numbered launches, of which an older one publishes no checkpoint; resuming from the",
        "newest verified checkpoint; a save when the pod or the process is told to stop.",
    ]
    return "".join(f"# {_printable(line)}".rstrip() + "\n" for line in lines)


def _printable(line: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in line)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="- ", subsequent_indent="  ")
