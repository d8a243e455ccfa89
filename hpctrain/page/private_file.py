"""Writes what a command made into a file for its user only, or to stdout.

Belongs here: that. Does not belong here: files of runs (`hpctrain.base.durable`), which follow the
mode of their directory.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click


def write_private(path: Path, text: str, *, name_on_stderr: bool = False) -> None:
    """Replace a file that only its owner may read, and print its name; `-` is stdout.

    `name_on_stderr`: stdout is for something else. The file is private also where a directory
    shares its files with a group. Raises OSError.
    """
    if str(path) == "-":
        click.echo(text, nl=False)
        return
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    click.echo(path, err=name_on_stderr)
