"""`python -m hpctrain.convert SOURCE TARGET`: write the same model in another form.

SOURCE and what TARGET becomes: a Hugging Face directory, megatron-core's starting weights; these,
a Hugging Face directory; a checkpoint of a run, a Hugging Face directory (LoRA merged). Prints one
JSON document of `hpctrain.store.conversions`. Belongs here: the choice, and that TARGET is there
completely or not at all. Does not belong here: the forms.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from hpctrain.checkpoints.manifest import checkpoint_name
from hpctrain.checkpoints.publish import published_steps
from hpctrain.checkpoints.staged import open_staged
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.store.conversions import ConversionFailure, ConversionReport
from hpctrain.store.layout import RunLayout


def convert(source: Path, target: Path) -> ConversionReport:
    """Raises InvalidInputError for what cannot be converted; then there is no TARGET."""
    _refuse_run(RunLayout(source))
    run = RunLayout(source.parent.parent)
    with _becoming(target) as partial:
        if source.parent == run.checkpoints and run.train_config.exists():
            from hpctrain.convert.checkpoint import export

            report = export(source, partial)
        else:
            from hpctrain.convert.weights import convert_staged

            report = convert_staged(open_staged(source), partial)
    return report.model_copy(update={"target": str(target)})


def _refuse_run(run: RunLayout) -> None:
    """A run has many models: somebody must say which."""
    if run.train_config.exists():
        steps = published_steps(run.checkpoints)
        newest = run.checkpoints / checkpoint_name(steps[-1]) if steps else "it has none yet"
        hint = f"give one of its checkpoints: {newest}"
        raise InvalidInputError([Problem("is a run", str(run.directory), hint=hint)])


@contextlib.contextmanager
def _becoming(target: Path) -> Iterator[Path]:
    """A directory beside `target` that takes its name at the end, and is removed on an error."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        hint = "give the name of a directory that is not there yet"
        raise InvalidInputError([Problem("exists already", str(target), hint=hint)])
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main(argv: Sequence[str]) -> int:
    """Print one document and nothing else on stdout; exit code 0, or that of the error."""
    source, target = (Path(os.path.abspath(word)) for word in argv)
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
