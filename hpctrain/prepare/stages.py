"""The stages of making a dataset, and their order.

Belongs here: what is done once, by which process, and what stays when something fails. Does not
belong here: how a stage is done, output.
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.errors import UsageError
from hpctrain.prepare.arrays import load_digits, load_idx
from hpctrain.prepare.joining import join
from hpctrain.prepare.plan import Plan, need_plan, write_plan
from hpctrain.prepare.planning import Say, find_corpus, obtain_plan, request_digest
from hpctrain.prepare.publication import (
    Workplace,
    is_intact,
    read_sidecar,
    refuse_to_replace,
    workplace,
)
from hpctrain.prepare.request import Request
from hpctrain.prepare.shards import Shards, make_shards, sha256_of_file
from hpctrain.store.datasets import (
    AnySidecar,
    DatasetReport,
    SamplesSidecar,
    ShardsReport,
    npz_path,
)
from hpctrain.train.datasets.archive import write_archive


def prepare(request: Request, say: Say) -> DatasetReport | ShardsReport:
    """Make the dataset, unless the same one is there already; or only its plan.

    Raises InvalidInputError (a wrong input, or another dataset in the way), and HpctrainError
    when a Python package is missing or a process dies.
    """
    if request.format == "arrays":
        return _prepare_arrays(request, say)
    corpus = find_corpus(request, say)
    digest = request_digest(request, corpus.sha256)
    present = None if request.force else _same_dataset(request, digest, say)
    if present is not None:
        say(f"{request.output} was made of this input already")
        return DatasetReport(
            prefix=str(request.output),
            status="unchanged",
            dataset=present,
            skipped=corpus.skipped,
            over_budget_files=corpus.over_budget_files,
        )
    with workplace(request.output) as place:
        if not request.force:
            refuse_to_replace(place, digest)
        plan = obtain_plan(request, corpus, digest, place, say)
        _keep_plan(place, plan)
        if request.stage == "plan":
            place.keeps_shards = True
            return _shards_report(place, plan)
        return _make(request, plan, place, say)


def merge(request: Request, say: Say) -> DatasetReport:
    """Put together what others have made of a plan. Raises InvalidInputError, HpctrainError."""
    with workplace(request.output) as place:
        place.keeps_shards = True
        plan = need_plan(place.shards)
        if not request.force:
            refuse_to_replace(place, plan.request_sha256)
        return _publish(request, plan, place, say)


def _keep_plan(place: Workplace, plan: Plan) -> None:
    place.shards.mkdir(exist_ok=True)
    write_plan(place.shards, plan)


def _shards_report(place: Workplace, plan: Plan) -> ShardsReport:
    missing = Shards(place.shards).missing(plan)
    return ShardsReport(
        directory=str(place.shards.absolute()), shards=len(plan.shards), missing=len(missing)
    )


def _make(request: Request, plan: Plan, place: Workplace, say: Say) -> DatasetReport:
    shards = Shards(place.shards)
    try:
        make_shards(plan, shards, plan.shards, request.workers, say)
        return _publish(request, plan, place, say)
    finally:
        # a single one is made again as fast as it is verified
        some = len(shards.missing(plan)) < len(plan.shards)
        place.keeps_shards = some and len(plan.shards) > 1


def _publish(request: Request, plan: Plan, place: Workplace, say: Say) -> DatasetReport:
    say("putting the shards together, and reading the result back")
    sidecar = join(plan, Shards(place.shards), place.prefix)
    place.publish(sidecar, plan.tokenizer_target)
    say(f"{request.output} is ready")
    return DatasetReport(
        prefix=str(request.output),
        status="written",
        dataset=sidecar,
        skipped=plan.skipped,
        over_budget_files=plan.over_budget_files,
    )


def _same_dataset(request: Request, digest: str, say: Say) -> AnySidecar | None:
    """The sidecar at the target if it is of this request and its files are intact."""
    sidecar = read_sidecar(request.output)
    if sidecar is None or sidecar.request_sha256 != digest:
        return None
    ours = request.format == "tokens" and not request.hugging_face
    if not is_intact(request.output, sidecar, request.tokenizer_target if ours else None):
        say(f"{request.output} was made of this input already, but its files are damaged")
        return None
    return sidecar


def _prepare_arrays(request: Request, say: Say) -> DatasetReport:
    """Small enough to be made at once."""
    found = load_digits() if request.builtin else load_idx(request.inputs)
    present = None if request.force else _same_dataset(request, found.sha256, say)
    if present is None:
        with workplace(request.output) as place:
            if not request.force:
                refuse_to_replace(place, found.sha256)
            path = npz_path(place.prefix)
            write_archive(path, {"x": found.x, "y": found.y})
            made = SamplesSidecar(
                format="arrays",
                samples=len(found.y),
                classes=found.classes,
                sources_sha256=found.sha256,
                request_sha256=found.sha256,
                npz_bytes=path.stat().st_size,
                npz_sha256=sha256_of_file(path),
            )
            place.publish(made, None)
    return DatasetReport(
        prefix=str(request.output),
        status="written" if present is None else "unchanged",
        dataset=present or made,
        skipped=(),
        over_budget_files=0,
    )


def make_share(directory: Path, share: str, workers: int, say: Say) -> ShardsReport:
    """Make every Nth shard of the plan in a directory. Raises UsageError, InvalidInputError."""
    first, _, count = share.partition("/")
    if not (first.isdecimal() and count.isdecimal() and int(first) < int(count)):
        raise UsageError(f"--share is I/N with I below N, not {share}")
    plan, shards = need_plan(directory), Shards(directory)
    make_shards(plan, shards, plan.shards[int(first) :: int(count)], workers, say)
    return ShardsReport(
        directory=str(directory), shards=len(plan.shards), missing=len(shards.missing(plan))
    )
