"""`python -m hpctrain.data.making`: make a dataset from text, conversations or images.

Writes PREFIX.bin and PREFIX.idx, or PREFIX.npz, and PREFIX.json, which describes them and their
input. The same input and options give the same bytes, whatever the number of processes. Belongs
here: the command line, and printing the result. Does not belong here: the work (see `stages`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from hpctrain.base.errors import HpctrainError, InvalidInputError, UsageError
from hpctrain.data.making.corpus import DEFAULT_SUFFIXES
from hpctrain.data.making.make_plan import (
    BUILTIN_MAX_BYTES,
    DEFAULT_VOCAB_SIZE,
    PrepareOptions,
    PrepareStage,
    check_usage,
)
from hpctrain.data.making.shards import reported
from hpctrain.data.making.stages import make_share, merge, prepare
from hpctrain.records.datasets import (
    END_OF_DOCUMENT,
    Builtin,
    DatasetFailure,
    DatasetFormat,
    DatasetReport,
    DatasetSidecar,
    ReportedProblem,
    ShardsReport,
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain.data.making",
        description="Make a dataset: tokens for Megatron (.bin/.idx), or arrays (.npz).",
    )
    add = parser.add_argument
    add("inputs", nargs="*", type=Path, metavar="INPUT", help="files and directories")
    add("--output", type=Path, metavar="PREFIX", help="writes .bin and .idx, or .npz, and .json")
    add(
        "--format",
        choices=get_args(DatasetFormat),
        help="what is made (default: tokens; with --builtin digits: arrays)",
    )
    add(
        "--builtin",
        nargs="?",
        const="stdlib",
        choices=get_args(Builtin),
        help="stdlib: the source text of Python's standard library; digits: scikit-learn's",
    )
    add("--force", action="store_true", help="write again, and replace what is there")
    add("--json", action="store_true", help="print the report, or what is wrong, as JSON")
    add(
        "--suffix",
        action="append",
        dest="suffixes",
        metavar=".EXT",
        help=f"files to take from directories (default: {' '.join(DEFAULT_SUFFIXES)})",
    )
    add(
        "--max-bytes",
        type=int,
        metavar="N",
        help=f"stop before the file that exceeds N bytes of text (--builtin: {BUILTIN_MAX_BYTES})",
    )
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        help=f"tokens including {END_OF_DOCUMENT}, which gets id N-1 "
        f"(default: {DEFAULT_VOCAB_SIZE}, or that of --tokenizer)",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="a tokenizer.json, or a directory that transformers loads; do not train one",
    )
    add(
        "--tokenizer-output",
        type=Path,
        metavar="JSON",
        help="where the trained tokenizer goes (default: tokenizer.json beside PREFIX)",
    )
    add("--field", metavar="NAME", help="field of JSONL lines that is the text (default: text)")
    add("--seq", type=int, dest="seq_length", metavar="N", help="tokens of a sample")
    add("--chat-template", type=Path, metavar="FILE", help="instead of the tokenizer's own")
    add("--classes", metavar="A,B,...", help="names of labels by number (default: as found)")
    add("--workers", type=int, default=1, metavar="N", help="processes on this machine")
    add("--shard-bytes", type=int, metavar="N", help="text of one shard, about (default: 64 MiB)")
    add(
        "--stage",
        choices=get_args(PrepareStage),
        help="plan: stop before the shards; merge: put together what others have made",
    )
    add("--shards", type=Path, metavar="DIR", help="make shards of the plan in DIR, nothing else")
    add("--share", default="0/1", metavar="I/N", help="with --shards: every Nth, from the Ith on")
    return parser


def _log(line: str) -> None:
    print(f"data prepare: {line}", file=sys.stderr, flush=True)


def _options(args: argparse.Namespace) -> PrepareOptions:
    """Validate the options of a dataset. Raises UsageError."""
    if args.output is None:
        raise UsageError("give --output, or --shards")
    given = {name: getattr(args, name) for name in PrepareOptions.model_fields}
    given["classes"] = args.classes.split(",") if args.classes else None
    options = PrepareOptions(**{name: value for name, value in given.items() if value is not None})
    check_usage(options)
    return options


def _print_failure(error: HpctrainError, *, as_json: bool) -> None:
    if isinstance(error, InvalidInputError):
        problems = reported(error.problems)
    else:
        problems = (ReportedProblem(message=str(error), hint=error.hint),)
    if as_json:
        print(DatasetFailure(exit_code=error.exit_code, problems=problems).model_dump_json())
        return
    for problem in problems:
        place = "".join(f"{part}:" for part in (problem.file, problem.line) if part is not None)
        print(f"error: {place}{' ' * bool(place)}{problem.message}", file=sys.stderr)
        if problem.hint is not None:
            print(f"  hint: {problem.hint}", file=sys.stderr)


def _print_report(report: DatasetReport | ShardsReport) -> None:
    if isinstance(report, ShardsReport):
        print(f"{report.directory}: {report.missing} of {report.shards} shards are missing")
    elif isinstance(report.dataset, DatasetSidecar):
        dataset = report.dataset
        print(
            f"{report.prefix}: {dataset.documents} documents, {dataset.tokens} tokens, vocabulary "
            f"{dataset.vocab_size}, {dataset.end_of_document} is {dataset.end_of_document_id}"
        )
    else:
        print(
            f"{report.prefix}: {report.dataset.samples} samples of format {report.dataset.format}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code (0, or that of the error; 2 for wrong usage)."""
    args = _parser().parse_args(argv)
    try:
        report: DatasetReport | ShardsReport
        if args.shards is not None:
            report = make_share(args.shards, args.share, args.workers, _log)
        else:
            options = _options(args)
            report = (merge if options.stage == "merge" else prepare)(options, _log)
    except KeyboardInterrupt:
        return 130
    except (HpctrainError, OSError) as raised:
        error = raised if isinstance(raised, HpctrainError) else HpctrainError(str(raised))
        _print_failure(error, as_json=args.json)
        return error.exit_code
    if args.json:
        print(report.model_dump_json())
    else:
        _print_report(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
