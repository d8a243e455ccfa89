"""The stages of making a dataset, and their order.

Belongs here: which stages a command runs, which files stay when one fails, making the shards,
verifying them, and merging them into one dataset and its sidecar. Does not belong here: the plan
(see `make_plan`), the rows of a format, output.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem, UsageError
from hpctrain.data.making.conversations import (
    ASSISTANT_ROLE,
    join_conversations,
    tokenize_conversations,
)
from hpctrain.data.making.corpus import Corpus, Source
from hpctrain.data.making.images import check_images, join_images, load_digits, load_idx
from hpctrain.data.making.labelled_text import join_examples, tokenize_examples
from hpctrain.data.making.make_plan import (
    Log,
    PrepareOptions,
    find_corpus,
    obtain_plan,
    request_digest,
)
from hpctrain.data.making.publication import (
    StagingDirectory,
    is_intact,
    read_sidecar,
    refuse_to_replace,
    staging_directory,
)
from hpctrain.data.making.shards import (
    DatasetPlan,
    DocumentCounts,
    Recipe,
    ShardContents,
    ShardDirectory,
    ShardPlan,
    need_plan,
    sha256_of_file,
    write_plan,
)
from hpctrain.data.making.text_tokenizers import load_hugging_face, tokenizer_file
from hpctrain.data.making.tokenized_text import join_texts, tokenize_texts
from hpctrain.records.datasets import (
    END_OF_DOCUMENT,
    AnySidecar,
    DatasetReport,
    DatasetSidecar,
    SamplesSidecar,
    ShardsReport,
    npz_path,
    read_heads,
)
from hpctrain.train.datasets.npz_arrays import write_archive


def prepare(options: PrepareOptions, log: Log) -> DatasetReport | ShardsReport:
    """Make the dataset, or only its plan; nothing is written if the same dataset exists.

    Raises InvalidInputError (a wrong input, or another dataset at the target), and HpctrainError
    when a Python package is missing or a process dies.
    """
    if options.format == "arrays":
        return _prepare_arrays(options, log)
    corpus = find_corpus(options, log)
    digest = request_digest(options, corpus.sha256)
    present = None if options.force else _existing_dataset(options, digest, log)
    if present is not None:
        log(f"{options.output} was made from this input already")
        return _report(options, "unchanged", present, corpus)
    with staging_directory(options.output) as staging:
        if not options.force:
            refuse_to_replace(staging, digest)
        plan = obtain_plan(options, corpus, digest, staging, log)
        staging.shards.mkdir(exist_ok=True)
        write_plan(staging.shards, plan)
        shards = ShardDirectory(staging.shards)
        if options.stage == "plan":
            staging.keeps_shards = True
            return ShardsReport(
                directory=str(staging.shards.absolute()),
                shards=len(plan.shards),
                missing=len(shards.missing(plan)),
            )
        try:
            make_shards(plan, shards, plan.shards, options.workers, log)
            return _publish(options, plan, staging, log)
        finally:
            # making a single shard again is as fast as verifying it
            any_made = len(shards.missing(plan)) < len(plan.shards)
            staging.keeps_shards = any_made and len(plan.shards) > 1


def merge(options: PrepareOptions, log: Log) -> DatasetReport:
    """Merge shards that other processes made. Raises InvalidInputError, HpctrainError."""
    with staging_directory(options.output) as staging:
        staging.keeps_shards = True
        plan = need_plan(staging.shards)
        if not options.force:
            refuse_to_replace(staging, plan.request_sha256)
        return _publish(options, plan, staging, log)


def _publish(
    options: PrepareOptions, plan: DatasetPlan, staging: StagingDirectory, log: Log
) -> DatasetReport:
    log("merging the shards, and reading the result back")
    sidecar = join(plan, ShardDirectory(staging.shards), staging.prefix)
    staging.publish(sidecar, plan.tokenizer_target)
    log(f"{options.output} is ready")
    return _report(options, "written", sidecar, plan)


def _report(
    options: PrepareOptions,
    status: Literal["written", "unchanged"],
    dataset: AnySidecar,
    made_from: Corpus | DatasetPlan,
) -> DatasetReport:
    """Say what was done; the input, or the plan for it, knows what was left out."""
    return DatasetReport(
        prefix=str(options.output),
        status=status,
        dataset=dataset,
        skipped=made_from.skipped,
        over_budget_files=made_from.over_budget_files,
    )


def _existing_dataset(options: PrepareOptions, digest: str, log: Log) -> AnySidecar | None:
    """Return the sidecar at the target if it has this digest and its files are intact."""
    sidecar = read_sidecar(options.output)
    if sidecar is None or sidecar.request_sha256 != digest:
        return None
    byte_level = options.format == "tokens" and not options.hugging_face
    tokenizer = options.tokenizer_target if byte_level else None
    if not is_intact(options.output, sidecar, tokenizer):
        log(f"{options.output} was made from this input already, but its files are damaged")
        return None
    return sidecar


def _prepare_arrays(options: PrepareOptions, log: Log) -> DatasetReport:
    """Make a dataset of format `arrays`, which is small enough to need no shards."""
    images = load_digits() if options.builtin else load_idx(options.inputs)
    digest = images.sha256
    present = None if options.force else _existing_dataset(options, digest, log)
    if present is None:
        with staging_directory(options.output) as staging:
            if not options.force:
                refuse_to_replace(staging, digest)
            path = npz_path(staging.prefix)
            write_archive(path, {"x": images.x, "y": images.y})
            made = SamplesSidecar(
                format="arrays",
                samples=len(images.y),
                classes=images.classes,
                sources_sha256=digest,
                request_sha256=digest,
                npz_bytes=path.stat().st_size,
                npz_sha256=sha256_of_file(path),
            )
            staging.publish(made, None)
    return DatasetReport(
        prefix=str(options.output),
        status="written" if present is None else "unchanged",
        dataset=present or made,
        skipped=(),
        over_budget_files=0,
    )


def make_share(directory: Path, share: str, workers: int, log: Log) -> ShardsReport:
    """Make every Nth shard of the plan in a directory. Raises UsageError, InvalidInputError."""
    first, _, count = share.partition("/")
    if not (first.isdecimal() and count.isdecimal() and int(first) < int(count)):
        raise UsageError(f"--share is I/N with I below N, not {share}")
    plan, shards = need_plan(directory), ShardDirectory(directory)
    make_shards(plan, shards, plan.shards[int(first) :: int(count)], workers, log)
    return ShardsReport(
        directory=str(directory), shards=len(plan.shards), missing=len(shards.missing(plan))
    )


# -- Make the shards of a plan, in this process or in several forked ones -----------------------


def build_shard(recipe: Recipe, sources: Sequence[Source]) -> ShardContents:
    """Build the arrays of one shard. Raises InvalidInputError with the problems of its sources."""
    match recipe.format:
        case "images":
            return check_images(sources)
        case "tokens":
            return tokenize_texts(recipe, sources)
        case "examples":
            return tokenize_examples(recipe, sources)
        case "packed":
            return tokenize_conversations(recipe, sources)


def make_shards(
    plan: DatasetPlan,
    directory: ShardDirectory,
    wanted: Sequence[ShardPlan],
    workers: int,
    log: Callable[[str], None],
) -> None:
    """Make those of `wanted` that are missing or damaged, with `workers` processes.

    Raises InvalidInputError with the problems of the input, HpctrainError when a process is killed.
    """
    problems: list[Problem] = []
    for done, outcome in enumerate(_outcomes(plan, directory, wanted, workers), 1):
        problems += outcome.problems
        result = "could not be made" if outcome.problems else "made"
        if len(plan.shards) > 1:
            log(f"shard {done} of {len(wanted)} {'was there' if outcome.kept else result}")
    if problems:
        raise InvalidInputError(problems)


@dataclass(frozen=True)
class _Outcome:
    problems: tuple[Problem, ...] = ()
    kept: bool = False


def _outcomes(
    plan: DatasetPlan, directory: ShardDirectory, wanted: Sequence[ShardPlan], workers: int
) -> Iterator[_Outcome]:
    if workers == 1 or len(wanted) == 1:
        for shard in wanted:
            yield _make_if_needed(plan.recipe, directory, shard)
        return
    # forked processes share the modules that are imported already
    context = multiprocessing.get_context("fork")
    tasks = [(plan.recipe, directory, shard) for shard in wanted]
    # the tokenizers library would use all CPUs in each process
    one_thread = {"TOKENIZERS_PARALLELISM": "false"}
    try:
        with ProcessPoolExecutor(workers, context, os.environ.update, (one_thread,)) as pool:
            yield from pool.map(_make_if_needed, *zip(*tasks, strict=True))
    except BrokenProcessPool as error:
        raise HpctrainError(
            "a process that makes shards was killed",
            hint="often the machine is out of memory: use fewer --workers or smaller shards; the "
            "same command makes only the missing shards",
        ) from error


def _make_if_needed(recipe: Recipe, directory: ShardDirectory, shard: ShardPlan) -> _Outcome:
    """Return problems instead of raising: pickling an exception would lose its attributes."""
    if directory.intact_record(shard) is not None:
        return _Outcome(kept=True)
    try:
        directory.write(shard, build_shard(recipe, shard.sources))
    except InvalidInputError as error:
        directory.write_failure(shard, error.problems)
        return _Outcome(error.problems)
    return _Outcome()


# -- Verify all shards, and merge them into one dataset and its sidecar ------------------------


def join(plan: DatasetPlan, shards: ShardDirectory, prefix: Path) -> AnySidecar:
    """Write the dataset's files beside `prefix`, and return the sidecar that describes them.

    Raises InvalidInputError with the problems of the input where a shard is missing,
    HpctrainError when one was damaged.
    """
    counts = verified_counts(plan, shards)
    if counts.documents == 0:
        if counts.dropped:
            problem = Problem(
                f"none of {counts.dropped} conversations has an answer within "
                f"{plan.recipe.seq_length} tokens",
                hint=f"answers are messages of role `{ASSISTANT_ROLE}`; --seq may be too small",
            )
        else:
            problem = Problem("no documents in the input")
        raise InvalidInputError([problem])
    archives = [shards.archive(shard) for shard in plan.shards]
    recipe, path = plan.recipe, npz_path(prefix)
    made_of: dict[str, Any] = dict(
        sources_sha256=plan.sources_sha256, request_sha256=plan.request_sha256
    )
    classes, tokenizer_sha256 = recipe.classes, None
    if recipe.tokenizer is not None:
        tokenizer_sha256 = sha256_of_file(tokenizer_file(recipe.tokenizer))
    if recipe.format == "images":
        assert recipe.directory is not None
        rows = join_images(recipe.directory, counts.documents, path)
        # the directories are the classes
        names = (source.name for shard in plan.shards for source in shard.sources)
        classes = tuple(dict.fromkeys(Path(name).parts[0] for name in names))
    elif recipe.format == "examples":
        rows = join_examples(archives, path)
    else:
        assert recipe.tokenizer is not None
        tokenizer = load_hugging_face(recipe.tokenizer) if recipe.hugging_face else None
        if recipe.format == "tokens":
            files = join_texts(plan, archives, counts, prefix)
            assert plan.tokenizer_reference is not None and tokenizer_sha256 is not None
            return DatasetSidecar(
                **files,
                text_bytes=plan.text_bytes,
                vocab_size=recipe.vocab_size,
                end_of_document=END_OF_DOCUMENT if tokenizer is None else tokenizer.end,
                end_of_document_id=recipe.vocab_size - 1 if tokenizer is None else tokenizer.end_id,
                tokenizer=plan.tokenizer_reference,
                tokenizer_sha256=tokenizer_sha256,
                **made_of,
            )
        assert recipe.seq_length is not None and tokenizer is not None
        rows = join_conversations(archives, recipe.seq_length, tokenizer.pad_id, path)
    rows_read = {head.rows for name, head in read_heads(path).items() if name != "names"}
    if rows_read != {rows}:
        raise HpctrainError(f"{path} reads back with {rows_read} rows, but {rows} were written")
    return SamplesSidecar(
        format=recipe.format,
        samples=rows,
        seq_length=recipe.seq_length,
        npz_bytes=path.stat().st_size,
        npz_sha256=sha256_of_file(path),
        classes=classes,
        directory=None if recipe.directory is None else str(recipe.directory),
        **made_of,
        **counts.model_dump(exclude={"documents"}),
        vocab_size=None if tokenizer_sha256 is None else recipe.vocab_size,
        tokenizer=None if tokenizer_sha256 is None else plan.tokenizer_reference,
        tokenizer_sha256=tokenizer_sha256,
    )


def verified_counts(plan: DatasetPlan, shards: ShardDirectory) -> DocumentCounts:
    """Compare every shard with its digest, and return the sum of their counts."""
    missing = shards.missing(plan)
    if missing:
        if problems := shards.failure_problems(missing):
            raise InvalidInputError(problems)
        message = f"{len(missing)} of {len(plan.shards)} shards are missing in {shards.directory}"
        raise HpctrainError(message, hint="the same command makes only the missing shards")
    total = DocumentCounts()
    for shard in plan.shards:
        record = shards.intact_record(shard)
        if record is None:
            raise HpctrainError(
                f"shard {shards.archive(shard)} is not what it was when it was written",
                hint="the same command makes it again; check the health of the file system",
            )
        total += record.counts
    return total
