"""The stages of making a dataset, and their order.

Belongs here: which stages a command runs, and which files stay when one fails. Does not belong
here: how a stage is done, output.
"""

from __future__ import annotations

import gzip
import hashlib
import multiprocessing
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem, UsageError
from hpctrain.data.making.conversations import tokenize_conversations
from hpctrain.data.making.corpus import Source
from hpctrain.data.making.dataset_plan import DatasetPlan, Recipe, ShardPlan, need_plan, write_plan
from hpctrain.data.making.digests import sha256_of_file
from hpctrain.data.making.image_folders import check_images
from hpctrain.data.making.labelled_text import tokenize_examples
from hpctrain.data.making.make_plan import Log, find_corpus, obtain_plan, request_digest
from hpctrain.data.making.merging import join
from hpctrain.data.making.optional_packages import missing_package
from hpctrain.data.making.options import PrepareOptions
from hpctrain.data.making.publication import (
    StagingDirectory,
    is_intact,
    read_sidecar,
    refuse_to_replace,
    staging_directory,
)
from hpctrain.data.making.shard_contents import ShardContents
from hpctrain.data.making.shard_directory import ShardDirectory
from hpctrain.data.making.tokenized_text import tokenize_texts
from hpctrain.records.datasets import (
    AnySidecar,
    DatasetReport,
    SamplesSidecar,
    ShardsReport,
    npz_path,
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
        return DatasetReport(
            prefix=str(options.output),
            status="unchanged",
            dataset=present,
            skipped=corpus.skipped,
            over_budget_files=corpus.over_budget_files,
        )
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
    return DatasetReport(
        prefix=str(options.output),
        status="written",
        dataset=sidecar,
        skipped=plan.skipped,
        over_budget_files=plan.over_budget_files,
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


# -- Format `arrays`: load small images from scikit-learn's digits or files in MNIST's format ---


_DIGITS_LARGEST = 16.0
# http://yann.lecun.com/exdb/mnist/: two zeros, the type (8: unsigned byte), the number of axes,
# then the length of each axis as 4 bytes, the highest first
_IDX_BYTES = 8
_LABEL_AXES, _IMAGE_AXES = 1, 3


@dataclass(frozen=True)
class LabelledImages:
    """Images [sample, side, side] and their classes [sample]."""

    x: np.ndarray
    y: np.ndarray
    classes: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Digest of the numbers, independent of the files they came from."""
        digest = hashlib.sha256()
        for array in (self.x, self.y):
            digest.update(f"{array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def load_digits() -> LabelledImages:
    """Load the 1797 handwritten digits of 8 x 8 pixels that come with scikit-learn.

    From the UCI repository, "Optical recognition of handwritten digits".
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise missing_package(error, "data") from error
    digits = datasets.load_digits()
    images = (digits.images / _DIGITS_LARGEST).astype(np.float32)
    return LabelledImages(images, digits.target.astype(np.int64), tuple("0123456789"))


def load_idx(paths: Sequence[Path]) -> LabelledImages:
    """Load an idx file of images and one of labels, in any order, optionally gzipped.

    Raises InvalidInputError for anything else.
    """
    arrays = [_read_idx(path) for path in paths]
    by_axes = {array.ndim: array for array in arrays}
    if len(arrays) != 2 or set(by_axes) != {_LABEL_AXES, _IMAGE_AXES}:
        message = "give two files: images and labels in MNIST's format (idx3-ubyte, idx1-ubyte)"
        raise InvalidInputError([Problem(message)])
    x, y = by_axes[_IMAGE_AXES], by_axes[_LABEL_AXES]
    if len(x) != len(y):
        raise InvalidInputError([Problem(f"{len(x)} images, but {len(y)} labels")])
    return LabelledImages(x, y.astype(np.int64), tuple(map(str, range(int(y.max()) + 1))))


def _read_idx(path: Path) -> np.ndarray:
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError) as error:
        raise InvalidInputError([Problem(f"cannot be read: {error}", file=str(path))]) from error
    axes = raw[3] if raw[:3] == bytes((0, 0, _IDX_BYTES)) and len(raw) > 3 else 0
    begin = 4 + 4 * axes
    if axes not in (_LABEL_AXES, _IMAGE_AXES) or len(raw) < begin:
        raise InvalidInputError([Problem("is not a file in MNIST's format", file=str(path))])
    shape = struct.unpack(f">{axes}I", raw[4:begin])
    if len(raw) - begin != int(np.prod(shape)) or 0 in shape:
        message = f"has {len(raw) - begin} numbers instead of {' x '.join(map(str, shape))}"
        raise InvalidInputError([Problem(message, file=str(path))])
    return np.frombuffer(raw, np.uint8, offset=begin).reshape(shape)


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
