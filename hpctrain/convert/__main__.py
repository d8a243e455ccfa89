"""`python -m hpctrain.convert SOURCE TARGET`: convert a model between weight formats.

- a Hugging Face directory becomes starting weights for megatron-core;
- starting weights for megatron-core become a Hugging Face directory;
- a checkpoint of a run becomes a Hugging Face directory (with LoRA merged).

Prints one JSON document of `hpctrain.records.conversions`. Belongs here: the choice. Does not
belong here: the formats, going on after a kill (see `unfinished`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.publish import published_steps
from hpctrain.checkpoints.staged import open_staged
from hpctrain.convert.unfinished import UnfinishedConversion, unfinished
from hpctrain.records.conversions import ConversionFailure, ConversionReport
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name


def convert(source: Path, target: Path) -> ConversionReport:
    """Convert SOURCE to TARGET. Raises InvalidInputError, and leaves no TARGET, if it cannot."""
    if (whole_run := RunLayout(source)).train_config.exists():
        steps = published_steps(whole_run.checkpoints)
        newest = whole_run.checkpoints / checkpoint_name(steps[-1]) if steps else "it has none yet"
        hint = f"give one of its checkpoints: {newest}"
        raise InvalidInputError([Problem("is a run", str(source), hint=hint)])
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        hint = "give the name of a directory that is not there yet"
        raise InvalidInputError([Problem("exists already", str(target), hint=hint)])
    run = RunLayout(source.parent.parent)
    # A missing package and a source that is no model are told before anything is written.
    write: Callable[[UnfinishedConversion], ConversionReport]
    if source.parent == run.checkpoints and run.train_config.exists():
        from hpctrain.convert.run_checkpoint import export

        write = partial(export, source)
    else:
        from hpctrain.convert.pretrained_weights import convert_staged

        write = partial(convert_staged, open_staged(source))
    with unfinished(target, source) as work:
        report = write(work)
    return report.model_copy(update={"target": str(target)})


def main(argv: Sequence[str]) -> int:
    """Print only one document on stdout; returns exit code 0, or that of the error."""
    source, target = (Path(os.path.abspath(argument)) for argument in argv)
    try:
        with redirect_stdout(sys.stderr):
            report = convert(source, target)
    except InvalidInputError as error:
        print(ConversionFailure.of(error).model_dump_json())
        return error.exit_code
    print(report.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
