"""`python -m hpctrain.prepare`: from text, conversations or images to a dataset.

Writes PREFIX.bin and PREFIX.idx, or PREFIX.npz, and PREFIX.json: what is in them and what they
were made from. The same input and options give the same bytes, whatever the number of processes.
Belongs here: the command line, and telling how it went. Does not belong here: the work (see
`hpctrain.prepare`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from hpctrain.errors import HpctrainError, InvalidInputError, UsageError
from hpctrain.prepare.corpus import DEFAULT_SUFFIXES
from hpctrain.prepare.planning import BUILTIN_MAX_BYTES, DEFAULT_VOCAB_SIZE
from hpctrain.prepare.request import Builtin, Request, check_usage
from hpctrain.prepare.stages import make_share, merge, prepare
from hpctrain.spec.data import DataFormat
from hpctrain.store.datasets import (
    END_OF_DOCUMENT,
    DatasetFailure,
    DatasetReport,
    DatasetSidecar,
    ReportedProblem,
    ShardsReport,
)

_SHARD_BYTES = 64 << 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain.prepare",
        description="Make a dataset: tokens for Megatron (.bin/.idx), or arrays (.npz).",
    )
    add = parser.add_argument
    add("inputs", nargs="*", type=Path, metavar="INPUT", help="files and directories")
    add("--output", type=Path, metavar="PREFIX", help="writes .bin and .idx, or .npz, and .json")
    add(
        "--format",
        choices=get_args(DataFormat),
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
    _add_text_options(parser)
    _add_stage_options(parser)
    return parser


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
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


def _add_stage_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, default=1, metavar="N", help="processes on this machine")
    add(
        "--shard-bytes",
        type=int,
        default=_SHARD_BYTES,
        metavar="N",
        help=f"text of one shard, about (default: {_SHARD_BYTES})",
    )
    add(
        "--stage",
        choices=("all", "plan", "merge"),
        default="all",
        help="plan: stop before the shards; merge: put together what others have made",
    )
    add("--shards", type=Path, metavar="DIR", help="make shards of the plan in DIR, nothing else")
    add("--share", default="0/1", metavar="I/N", help="with --shards: every Nth, from the Ith on")


def _say(line: str) -> None:
    print(f"prepare_data: {line}", file=sys.stderr, flush=True)


def _request(args: argparse.Namespace) -> Request:
    """The options of a dataset. Raises UsageError."""
    if args.output is None:
        raise UsageError("give --output, or --shards")
    request = Request(
        output=args.output,
        inputs=tuple(args.inputs),
        builtin=args.builtin,
        format=args.format or ("arrays" if args.builtin == "digits" else "tokens"),
        suffixes=tuple(args.suffixes or ()),
        max_bytes=args.max_bytes,
        vocab_size=args.vocab_size,
        tokenizer=args.tokenizer,
        tokenizer_output=args.tokenizer_output,
        field=args.field,
        seq_length=args.seq_length,
        chat_template=args.chat_template,
        classes=tuple(args.classes.split(",")) if args.classes else (),
        workers=args.workers,
        shard_bytes=args.shard_bytes,
        force=args.force,
        stage=args.stage,
    )
    check_usage(request)
    return request


def _failure(error: HpctrainError) -> DatasetFailure:
    if isinstance(error, InvalidInputError):
        problems = tuple(
            ReportedProblem(message=one.message, file=one.file, line=one.line, hint=one.hint)
            for one in error.problems
        )
    else:
        problems = (ReportedProblem(message=str(error), hint=error.hint),)
    return DatasetFailure(exit_code=error.exit_code, problems=problems)


def _print_failure(failure: DatasetFailure) -> None:
    for problem in failure.problems:
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


def _run(args: argparse.Namespace) -> DatasetReport | ShardsReport:
    if args.shards is not None:
        return make_share(args.shards, args.share, args.workers, _say)
    request = _request(args)
    return merge(request, _say) if request.stage == "merge" else prepare(request, _say)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code (0, or that of the error; 2 for wrong usage)."""
    args = _parser().parse_args(argv)
    try:
        report = _run(args)
    except KeyboardInterrupt:
        return 130
    except (HpctrainError, OSError) as raised:
        error = raised if isinstance(raised, HpctrainError) else HpctrainError(str(raised))
        failure = _failure(error)
        if args.json:
            print(failure.model_dump_json())
        else:
            _print_failure(failure)
        return failure.exit_code
    if args.json:
        print(report.model_dump_json())
    else:
        _print_report(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
