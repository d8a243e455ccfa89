"""The stages of making a dataset, and their order.

Belongs here: which stages a command runs, and which files stay when one fails. Does not belong
here: how a stage is done, output.
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.errors import UsageError
from hpctrain.data.making.dataset_plan import DatasetPlan, need_plan, write_plan
from hpctrain.data.making.digests import sha256_of_file
from hpctrain.data.making.image_arrays import load_digits, load_idx
from hpctrain.data.making.make_plan import Log, find_corpus, obtain_plan, request_digest
from hpctrain.data.making.merging import join
from hpctrain.data.making.options import PrepareOptions
from hpctrain.data.making.publication import (
    StagingDirectory,
    is_intact,
    read_sidecar,
    refuse_to_replace,
    staging_directory,
)
from hpctrain.data.making.shard_directory import ShardDirectory
from hpctrain.data.making.shard_making import make_shards
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
