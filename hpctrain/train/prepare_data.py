"""`python -m hpctrain.train.prepare_data`: text files to a Megatron dataset and its tokenizer.

Writes PREFIX.bin, PREFIX.idx, PREFIX.json (what is in them and what they were made from) and
tokenizer.json. The same text and options give the same bytes. Belongs here: the command line, the
steps and their order. Does not belong here: how a step is done (see `corpus`, `tokens`,
`publication`). Nothing of torch or megatron is imported before the text has been read.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import HpctrainError, InvalidInputError, Problem, UsageError
from hpctrain.store.datasets import (
    END_OF_DOCUMENT,
    DatasetFailure,
    DatasetReport,
    DatasetSidecar,
    ReportedProblem,
    bin_path,
    idx_path,
)
from hpctrain.train.corpus import (
    DEFAULT_SUFFIXES,
    Corpus,
    batches,
    find_files,
    find_stdlib,
    read_corpus,
)
from hpctrain.train.publication import (
    Workplace,
    is_intact,
    read_sidecar,
    refuse_to_replace,
    refuse_to_replace_tokenizer,
    workplace,
)
from hpctrain.train.tokens import (
    ByteTokenizer,
    Written,
    load_tokenizer,
    sha256_of,
    train_tokenizer,
    write_dataset,
)

DEFAULT_VOCAB_SIZE = 4096
BUILTIN_MAX_BYTES = 4_000_000
_BATCH_BYTES = 8 << 20
_SKIPPED_SHOWN = 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain.train.prepare_data",
        description="Make a Megatron dataset (.bin/.idx) and its byte-level BPE tokenizer from "
        "text, one document per file.",
    )
    add = parser.add_argument
    add("inputs", nargs="*", type=Path, metavar="INPUT", help="text files and directories")
    add("--builtin", action="store_true", help="use the source text of Python's standard library")
    add("--output", type=Path, required=True, metavar="PREFIX", help="writes .bin, .idx, .json")
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
    add("--tokenizer", type=Path, metavar="JSON", help="reuse this tokenizer, do not train one")
    add(
        "--tokenizer-output",
        type=Path,
        metavar="JSON",
        help="where the trained tokenizer goes (default: tokenizer.json beside PREFIX)",
    )
    add("--force", action="store_true", help="write again, and replace what is there")
    add("--json", action="store_true", help="print the report, or what is wrong, as JSON")
    return parser


def _say(line: str) -> None:
    print(f"prepare_data: {line}", file=sys.stderr, flush=True)


def _check_usage(args: argparse.Namespace) -> None:
    if bool(args.inputs) == args.builtin:
        raise UsageError("give either text files and directories, or --builtin")
    if args.tokenizer is not None and args.tokenizer_output is not None:
        raise UsageError("--tokenizer-output is for a trained tokenizer, not with --tokenizer")
    if args.max_bytes is not None and args.max_bytes < 1:
        raise UsageError("--max-bytes must be at least 1")
    if not args.output.name:
        raise UsageError("--output must end with the name of the dataset, such as data/text")


def _say_what_was_read(corpus: Corpus) -> None:
    _say(
        f"read {len(corpus.sources)} documents, {corpus.text_bytes} bytes; "
        f"skipped {len(corpus.skipped)} files, {corpus.over_budget_files} beyond --max-bytes"
    )
    for skipped in corpus.skipped[:_SKIPPED_SHOWN]:
        _say(f"skipped {skipped.name}: {skipped.reason}")
    if len(corpus.skipped) > _SKIPPED_SHOWN:
        _say(f"skipped {len(corpus.skipped) - _SKIPPED_SHOWN} more, all named in the --json report")


def _read_corpus(args: argparse.Namespace) -> Corpus:
    """Find and read the text; says what was left out. Raises InvalidInputError if none is left."""
    if args.builtin:
        corpus = read_corpus(find_stdlib(), args.max_bytes or BUILTIN_MAX_BYTES)
    else:
        files = find_files(args.inputs, args.suffixes or DEFAULT_SUFFIXES)
        corpus = read_corpus(files, args.max_bytes)
    _say_what_was_read(corpus)
    if not corpus.sources:
        counts = f"{len(corpus.skipped)} skipped, {corpus.over_budget_files} beyond --max-bytes"
        raise InvalidInputError([Problem(f"no text in the input ({counts})")])
    return corpus


def _tokenizer_target(args: argparse.Namespace) -> Path:
    """Where the dataset's tokenizer is, or will be."""
    chosen = args.tokenizer or args.tokenizer_output
    return Path(chosen or args.output.with_name("tokenizer.json"))


def _tokenizer_reference(args: argparse.Namespace) -> str:
    path = _tokenizer_target(args).absolute()
    return path.name if path.parent == args.output.absolute().parent else str(path)


def _request_sha256(args: argparse.Namespace, corpus: Corpus) -> str:
    """A digest of everything that the files depend on."""
    tokenizer = None
    if args.tokenizer is not None:
        try:
            tokenizer = hashlib.sha256(args.tokenizer.read_bytes()).hexdigest()
        except OSError as error:
            problem = Problem(f"cannot be read: {error.strerror}", file=str(args.tokenizer))
            raise InvalidInputError([problem]) from error
    request = [1, corpus.sha256, args.vocab_size, tokenizer, _tokenizer_reference(args)]
    return sha256_of(json.dumps(request))


def _obtain_tokenizer(
    args: argparse.Namespace, corpus: Corpus, place: Workplace
) -> tuple[ByteTokenizer, str]:
    """The tokenizer and the text of its JSON file; a trained one is written to the workplace."""
    if args.tokenizer is not None:
        _say(f"using the tokenizer {args.tokenizer}")
        loaded = load_tokenizer(args.tokenizer)
        if args.vocab_size not in (None, loaded.vocab_size):
            message = f"has {loaded.vocab_size} tokens, but --vocab-size is {args.vocab_size}"
            raise InvalidInputError([Problem(message, file=str(args.tokenizer))])
        return loaded, args.tokenizer.read_text("utf-8")
    vocab_size = DEFAULT_VOCAB_SIZE if args.vocab_size is None else args.vocab_size
    _say(f"training a tokenizer of {vocab_size} tokens")
    trained = train_tokenizer(batches(corpus.sources, _BATCH_BYTES), vocab_size)
    text = trained.to_json()
    if not args.force:
        refuse_to_replace_tokenizer(_tokenizer_target(args), text)
    place.tokenizer.write_text(text, "utf-8")
    return trained, text


def _make(args: argparse.Namespace, corpus: Corpus, request: str) -> DatasetSidecar:
    with workplace(args.output) as place:
        if not args.force:
            refuse_to_replace(place, request)
        tokenizer, tokenizer_text = _obtain_tokenizer(args, corpus, place)
        _say("writing tokens, and reading them back with megatron-core")
        written = write_dataset(batches(corpus.sources, _BATCH_BYTES), tokenizer, place.prefix)
        _say(f"wrote {written.documents} documents, {written.tokens} tokens ({written.dtype})")
        sidecar = DatasetSidecar(
            **_written_fields(written, place),
            text_bytes=corpus.text_bytes,
            vocab_size=tokenizer.vocab_size,
            end_of_document=END_OF_DOCUMENT,
            end_of_document_id=tokenizer.end_of_document_id,
            tokenizer=_tokenizer_reference(args),
            tokenizer_sha256=sha256_of(tokenizer_text),
            sources_sha256=corpus.sha256,
            request_sha256=request,
        )
        place.publish(sidecar, None if args.tokenizer else _tokenizer_target(args))
        return sidecar


def _written_fields(written: Written, place: Workplace) -> dict[str, object]:
    return dict(
        documents=written.documents,
        tokens=written.tokens,
        dtype=written.dtype,
        bin_bytes=bin_path(place.prefix).stat().st_size,
        idx_bytes=idx_path(place.prefix).stat().st_size,
    )


def _same_dataset(args: argparse.Namespace, request: str) -> DatasetSidecar | None:
    """The sidecar at the target if it is of this request and its files are intact."""
    sidecar = read_sidecar(args.output)
    if sidecar is None or sidecar.request_sha256 != request:
        return None
    if not is_intact(args.output, sidecar, _tokenizer_target(args)):
        _say(f"{args.output} was made of this text already, but its files are damaged")
        return None
    return sidecar


def prepare(args: argparse.Namespace) -> DatasetReport:
    """Make the dataset, unless the same one is there already.

    Raises UsageError, InvalidInputError (a wrong input, or another dataset in the way), and
    HpctrainError when a Python package is missing.
    """
    _check_usage(args)
    corpus = _read_corpus(args)
    request = _request_sha256(args, corpus)
    present = None if args.force else _same_dataset(args, request)
    dataset = present or _make(args, corpus, request)
    _say(f"{args.output} {'is ready' if present is None else 'was made of this text already'}")
    return DatasetReport(
        prefix=str(args.output),
        status="written" if present is None else "unchanged",
        dataset=dataset,
        skipped=corpus.skipped,
        over_budget_files=corpus.over_budget_files,
    )


def _failure(error: HpctrainError) -> DatasetFailure:
    if isinstance(error, InvalidInputError):
        problems = tuple(
            ReportedProblem(message=problem.message, file=problem.file, hint=problem.hint)
            for problem in error.problems
        )
    else:
        problems = (ReportedProblem(message=str(error), hint=error.hint),)
    return DatasetFailure(exit_code=error.exit_code, problems=problems)


def _print_failure(failure: DatasetFailure) -> None:
    for problem in failure.problems:
        place = "" if problem.file is None else f"{problem.file}: "
        print(f"error: {place}{problem.message}", file=sys.stderr)
        if problem.hint is not None:
            print(f"  hint: {problem.hint}", file=sys.stderr)


def _print_report(report: DatasetReport) -> None:
    dataset = report.dataset
    assert isinstance(dataset, DatasetSidecar)
    print(
        f"{report.prefix}: {dataset.documents} documents, {dataset.tokens} tokens, vocabulary "
        f"{dataset.vocab_size}, {dataset.end_of_document} is {dataset.end_of_document_id}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code (0, or that of the error; 2 for wrong usage)."""
    args = _parser().parse_args(argv)
    try:
        report = prepare(args)
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
