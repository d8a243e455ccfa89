"""Whether the data of a spec are there and for its model, before the queue.

Belongs here: which files a spec names. Does not belong here: what is looked at in them (see
`hpctrain.store.prepared`).
"""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.engines.hugging_face import classes_of
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.spec.loader import Loaded
from hpctrain.spec.run import RunSpec
from hpctrain.store.datasets import bin_path, idx_path
from hpctrain.store.prepared import Expected, problems_of

_HINT = "`hpctrain data prepare` makes them from text; paths count from here"


def check_samples(spec: Loaded[RunSpec]) -> None:
    """Raise InvalidInputError for everything that would end the job as soon as it starts."""
    data = spec.document.data
    problems = _missing(spec) if data.format == "tokens" else _unfit(spec)
    if data.tokenizer and not os.path.exists(data.tokenizer):
        problems.append(_missing_file(spec, os.path.abspath(data.tokenizer)))
    if problems:
        raise InvalidInputError(problems)


def _missing(spec: Loaded[RunSpec]) -> list[Problem]:
    prefixes = [Path(os.path.abspath(source.path)) for source in spec.document.data.sources]
    wanted = [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix))]
    return [_missing_file(spec, str(path)) for path in wanted if not path.exists()]


def _missing_file(spec: Loaded[RunSpec], path: str) -> Problem:
    return Problem(f"data file {path} does not exist", spec.file, hint=_HINT)


def _unfit(spec: Loaded[RunSpec]) -> list[Problem]:
    """Formats that are not tokens."""
    data, model = spec.document.data, spec.document.model
    expected = Expected(
        format=data.format,
        seq_length=model.seq,
        vocab_size=model.vocab,
        classes=classes_of(model),
        side=model.image,
    )
    named = [(f"data.sources.{n}.path", one.path) for n, one in enumerate(data.sources)]
    if data.validation is not None:
        named.append(("data.validation", data.validation))
    return [
        spec.problem(field, f"`{field}`: {problem}", problem.hint)
        for field, path in named
        for problem in problems_of(Path(os.path.abspath(path)), expected)
    ]
