"""Refuse software and GPUs that cannot train the run, on all ranks alike, within seconds.

The ranks exchange what they have found over the launch's key-value store, before any process group
exists: one rank without a GPU would open groups of gloo while the others open groups of NCCL, and
all of them would wait. Rank 0 judges. Belongs here: the exchange, and what makes facts unusable.
Does not belong here: finding them (see `software`), the file (see `hpctrain.records.software`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta

from pydantic import TypeAdapter
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.base.frozen import Frozen
from hpctrain.engines.training import LibraryName, SoftwareNeed, TrainConfig
from hpctrain.records.kept_code import is_current
from hpctrain.records.software import (
    Library,
    SoftwareFacts,
    SoftwareRecord,
    changes,
    read_lock,
    write_lock,
    write_software,
)
from hpctrain.spec.engines.registry import abilities_of, resolve
from hpctrain.train import software
from hpctrain.train.device import gpu_ids, gpu_index
from hpctrain.train.faults import RefusedElsewhereError
from hpctrain.train.job import Job
from hpctrain.train.software import LibraryFindings, LibraryProblem, found_software
from hpctrain.train.spared_imports import UNUSED_LOGGERS, hidden
from hpctrain.train.storage import outlast

# A judgement has been read by then, unless a rank has gone.
_READING_SECONDS = 30.0
# Sockets and files that a rank needs beside one socket to each other rank.
_OTHER_FILES = 256
_CUDA_HINT = (
    "install a torch for the driver's CUDA (https://pytorch.org/get-started), or update the driver"
)
_NO_GPU_HINT = (
    "compare `srun nvidia-smi` in such a job; a container needs the driver (apptainer --nv); "
    "a cluster without GPUs says `gpu.emulated: true` in its profile"
)

# Libraries by their names in the facts: as people write them, and how they get in.
_LIBRARIES: dict[LibraryName, tuple[str, str]] = {
    "transformer_engine": (
        "TransformerEngine",
        "install `transformer-engine[pytorch]` or train in a container that has it",
    ),
    "apex_wgrad": (
        "Apex's fused_weight_gradient_mlp_cuda",
        "build Apex with its CUDA extensions or train in a container that has them",
    ),
    "deep_ep": ("DeepEP", "build https://github.com/deepseek-ai/DeepEP"),
    "hybrid_ep": ("HybridEP of DeepEP", "build the branch hybrid-ep of DeepEP"),
}


class RankSoftware(Frozen):
    """The facts of one rank; `gpu_ids` identifies the GPUs that it sees.

    `problems` are what the engine has found wrong with its library.
    """

    rank: int
    local_rank: int
    node: str
    facts: SoftwareFacts
    gpu_ids: tuple[str, ...] = ()
    problems: tuple[LibraryProblem, ...] = ()


class Refusal(Frozen):
    """One problem, the nodes that have it, and whether others do not."""

    message: str
    hint: str | None
    nodes: tuple[str, ...]
    everywhere: bool


_REFUSALS = TypeAdapter(tuple[Refusal, ...])


def agree_on_software(job: Job) -> None:
    """Exchange the facts of all ranks, and record them; a collective call.

    Raises InvalidInputError on the ranks of the nodes that have a problem, RefusedElsewhereError on
    the others.
    """
    facts = software.collect()  # before the engine's library is imported, which may need the same
    findings = library_findings(job.config.engine)
    own = RankSoftware(
        rank=job.launch.rank,
        local_rank=job.launch.local_rank,
        node=job.launch.node,
        facts=facts.model_copy(update={"remarks": findings.remarks}),
        gpu_ids=gpu_ids(),
        problems=findings.problems,
    )
    if job.launch.world_size == 1:
        refuse(_judge_as_leader([own], job), job.launch.node)
        return
    timeout = timedelta(seconds=job.config.startup_timeout_seconds)
    url = f"env://?rank={job.launch.rank}&world_size={job.launch.world_size}"
    store, _, _ = next(rendezvous(url, timeout=timeout))
    # the server of this store ends with the object, and init_process_group joins the same one
    _kept_stores.append(store)
    refuse(_exchange(own, PrefixStore("hpctrain/software", store), job), job.launch.node)


def library_findings(engine: str) -> LibraryFindings:
    """Return what the engine finds about its own library; nothing if it checks none."""
    place = abilities_of(engine).library_check
    if place is None:
        return LibraryFindings()
    with hidden(*UNUSED_LOGGERS):  # the check may be what imports the library
        findings: LibraryFindings = resolve(place)()
    return findings


_kept_stores: list[Store] = []


def _exchange(own: RankSoftware, store: Store, job: Job) -> tuple[Refusal, ...]:
    """Send the facts to rank 0 and wait for its judgement.

    The server of the store is in rank 0: where it refuses it stays until all have read why.
    """
    store.set(f"rank/{own.rank}", own.model_dump_json())
    if not job.launch.leads:
        refusals = _REFUSALS.validate_json(store.get("judgement"))
        if refusals:
            store.set(f"read/{own.rank}", "")
        return refusals
    keys = [f"rank/{rank}" for rank in range(job.launch.world_size)]
    ranks = [RankSoftware.model_validate_json(text) for text in map(store.get, keys)]
    refusals = _judge_as_leader(ranks, job)
    store.set("judgement", _REFUSALS.dump_json(refusals).decode())
    if refusals:
        readers = [f"read/{rank}" for rank in range(1, job.launch.world_size)]
        with contextlib.suppress(RuntimeError):  # torch.distributed.DistError: a rank has gone
            store.wait(readers, timedelta(seconds=_READING_SECONDS))
    return refusals


def _judge_as_leader(ranks: Sequence[RankSoftware], job: Job) -> tuple[Refusal, ...]:
    """Record the facts of all ranks and judge them."""
    refusals = tuple(judge(ranks, job.config, job.launch.version))
    changed = _changes_of_run(ranks[0].facts, job) if not refusals else ()
    records = records_of(ranks, job.launch.epoch, changed)
    outlast(job.run, lambda: write_software(job.run, records))
    for remark in dict.fromkeys(remark for rank in ranks for remark in rank.facts.remarks):
        print(f"warning: {remark}", flush=True)
    for message in unequal_nodes(ranks):
        print(f"warning: {message}", flush=True)
    if changed and job.config.software == "locked":
        run_id = job.run.run_id
        refusal = Refusal(
            # Of a refusal of all nodes, only the message reaches `why`.
            message=f"software has changed since the run began: {', '.join(changed)}; restore it, "
            f"or accept it: `hpctrain upgrade {run_id}`, then `hpctrain resume {run_id}`",
            hint="`supervise.software` of the spec is `locked`",
            nodes=(),
            everywhere=True,
        )
        refusals = (refusal,)
    elif changed and job.config.software == "warn":
        print(f"warning: software has changed: {', '.join(changed)}", flush=True)
    return refusals


def _changes_of_run(facts: SoftwareFacts, job: Job) -> tuple[str, ...]:
    """Compare with the lock of the run, or write it: until a step is done, this launch decides.

    `hpctrain upgrade` removes the lock for the next attempt, whose code it has chosen. A launch of
    an attempt that began before, with the code before, leaves writing it to that one.
    """

    def compared() -> tuple[str, ...]:
        now = found_software(facts, job.launch.epoch, job.config.checkout_directory)
        lock = read_lock(job.run)
        if lock is not None and job.run.metrics.exists():
            return changes(lock, now)
        if is_current(job.run, facts.code):
            write_lock(job.run, now)
        return ()

    return outlast(job.run, compared)


def refuse(refusals: Sequence[Refusal], node: str) -> None:
    """Raise what concerns this node; every node raises something if there is a refusal."""
    if not refusals:
        return
    problems = [
        Problem(
            refusal.message
            if refusal.everywhere
            else f"on {', '.join(refusal.nodes[:8])}: {refusal.message}",
            hint=refusal.hint,
            node_dependent=not refusal.everywhere,
        )
        for refusal in refusals
        if refusal.everywhere or node in refusal.nodes
    ]
    if problems:
        raise InvalidInputError(problems)
    first = refusals[0]
    raise RefusedElsewhereError(f"on {', '.join(first.nodes[:8])}: {first.message}")


def records_of(
    ranks: Iterable[RankSoftware], epoch: int, changed: tuple[str, ...] = ()
) -> list[SoftwareRecord]:
    """Group ranks by equal facts, in the order of the first rank of each group.

    `changed` is what is not as the run's lock has it.
    """
    groups: dict[SoftwareFacts, list[RankSoftware]] = {}
    for rank in ranks:
        groups.setdefault(rank.facts, []).append(rank)
    return [
        SoftwareRecord(
            epoch=epoch,
            nodes=tuple(dict.fromkeys(member.node for member in members)),
            ranks=len(members),
            facts=facts,
            changed=changed,
        )
        for facts, members in groups.items()
    ]


# -- judging: pure ---------------------------------------------------------------------------------


def judge(
    ranks: Sequence[RankSoftware], config: TrainConfig, supervisor_version: str = ""
) -> Iterator[Refusal]:
    """Find what makes the launch impossible; a problem of all nodes is one refusal.

    `supervisor_version`: of the hpctrain that reads the trainer's records; empty: any.
    """
    nodes_of_all = {rank.node for rank in ranks}
    found: dict[tuple[str, str | None], dict[str, None]] = {}
    for rank in ranks:
        for problem in (*_problems_of_rank(rank.facts, config, supervisor_version), *rank.problems):
            found.setdefault(problem, {})[rank.node] = None
    for (message, hint), nodes in found.items():
        yield Refusal(
            message=message,
            hint=hint,
            nodes=tuple(nodes),
            everywhere=len(nodes) == len(nodes_of_all),
        )
    yield from _shared_gpus(ranks)
    for message, nodes_of_few in _odd_nodes(ranks, _SAME):
        yield Refusal(
            message=message,
            hint="install the same software on all nodes",
            nodes=nodes_of_few,
            everywhere=False,
        )


def _problems_of_rank(
    facts: SoftwareFacts, config: TrainConfig, supervisor_version: str
) -> Iterator[tuple[str, str | None]]:
    """Yield (message, hint) of everything that a rank lacks."""
    if supervisor_version and facts.hpctrain not in (None, supervisor_version):
        yield (
            f"hpctrain {facts.hpctrain} trains, and hpctrain {supervisor_version} supervises "
            "the job",
            "install the same hpctrain into the container: `pip install --no-deps` of this one",
        )
    on_gpus = config.accelerator == "cuda"
    if on_gpus:
        problem = _gpu_problem(facts)
        if problem is not None:
            yield problem
            return  # everything else follows from it: TransformerEngine needs CUDA, too
    engine = facts.transformer_engine
    if config.needs_transformer_engine is not None and not engine.imported:
        yield (
            f"{config.needs_transformer_engine} needs TransformerEngine: {engine}",
            "install `transformer-engine[pytorch]` or train in a container that has it; without it "
            "set `software.transformer_engine: false` in the profile, and plan anew",
        )
    for need in config.software_needs:
        problem = _unmet(facts, need)
        if problem is not None:
            yield problem
    compiles = on_gpus and config.compiles_kernels
    if compiles and not facts.triton.imported:
        yield (
            f"torch compiles megatron-core's fused kernels with triton: {facts.triton}",
            "install the triton of this torch",
        )
    elif compiles and facts.compiler is None:
        yield (
            "triton needs a C compiler for megatron-core's fused kernels: none is in PATH",
            "load a module with gcc, or train in a container that has it",
        )
    least = config.world_size + _OTHER_FILES
    if facts.open_files < least:
        yield (
            f"at most {facts.open_files} open files are allowed, and {config.world_size} ranks "
            f"need {least}",
            "raise the hard limit for Slurm's steps (LimitNOFILE of slurmd, limits.conf)",
        )


def _unmet(facts: SoftwareFacts, need: SoftwareNeed) -> tuple[str, str] | None:
    """Find the first thing that a setting lacks on a rank: library, GPU, CUDA."""
    hint = need.instead
    if need.library is not None:
        title, source = _LIBRARIES[need.library]
        library: Library = getattr(facts, need.library)
        wanted = "" if need.version is None else f" {_dotted(need.version)}"
        old = need.version is not None and not library.is_at_least(need.version)
        if not library.imported or old:
            return f"{need.setting} needs {title}{wanted}: {library}", f"{source}, or {hint}"
    least, below = need.capability, need.capability_below
    if least is not None:
        wanted = f"compute capability {_dotted(least)}" + (
            "" if below is None else f" or more, below {_dotted(below)}"
        )
        # libraries of CUDA cannot be imported without a GPU, which is found above
        if not facts.capabilities and need.library is None:
            return f"{need.setting} needs GPUs of {wanted}: the rank uses none", hint
        for name, text in zip(facts.gpus, facts.capabilities, strict=True):
            major, _, minor = text.partition(".")
            found = (int(major), int(minor))
            if found < least or (below is not None and found >= below):
                return f"{need.setting} needs {wanted}: {name} has {text}", hint
    if need.cuda is not None and facts.cuda_build is not None:
        major, _, minor = facts.cuda_build.partition(".")
        if (int(major), int(minor or 0)) < need.cuda:
            message = f"{need.setting} needs CUDA {_dotted(need.cuda)}"
            return f"{message}: torch {facts.torch} is built for CUDA {facts.cuda_build}", hint
    return None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _gpu_problem(facts: SoftwareFacts) -> tuple[str, str | None] | None:
    if facts.cuda_build is None:
        return (
            f"torch {facts.torch} is built without CUDA, and the run needs GPUs",
            f"{_CUDA_HINT}; a cluster without GPUs says `gpu.emulated: true` in its profile",
        )
    if facts.driver_cuda is not None and _major(facts.driver_cuda) < _major(facts.cuda_build):
        return (
            f"the driver {facts.driver or ''} supports CUDA {facts.driver_cuda}, and torch "
            f"{facts.torch} is built for CUDA {facts.cuda_build}",
            _CUDA_HINT,
        )
    if not facts.gpus:
        reason = f": {facts.gpu_error}" if facts.gpu_error else ""
        return (f"torch {facts.torch} finds no GPU{reason}", _NO_GPU_HINT)
    return None


def _shared_gpus(ranks: Sequence[RankSoftware]) -> Iterator[Refusal]:
    """Find nodes where two ranks would compute on one GPU, for example because one is gone."""
    taken: dict[tuple[str, str], list[RankSoftware]] = {}
    for rank in ranks:
        if rank.gpu_ids:
            chosen = rank.gpu_ids[gpu_index(rank.local_rank, len(rank.gpu_ids))]
            taken.setdefault((rank.node, chosen), []).append(rank)
    sharing = {node: members for (node, _), members in taken.items() if len(members) > 1}
    tasks = Counter(rank.node for rank in ranks)
    for node, members in sharing.items():
        numbers = " and ".join(str(member.rank) for member in members[:2])
        yield Refusal(
            message=f"{len(members[0].gpu_ids)} GPUs are visible to the {tasks[node]} ranks of the "
            f"node: ranks {numbers} would share one",
            hint="the node may have lost a GPU (`nvidia-smi -L`), or `gpu.per_node` is wrong",
            nodes=(node,),
            everywhere=len(tasks) == 1,
        )


def _major(version: str) -> int:
    return int(version.split(".")[0])


# What must be the same on all nodes, for numbers or messages between them would differ, and what
# only leads to a warning: nodes are upgraded one after the other.
_SAME: Mapping[str, Callable[[SoftwareFacts], str | None]] = {
    "torch": lambda facts: facts.torch,
    "NCCL": lambda facts: facts.nccl,
    "megatron-core": lambda facts: facts.megatron_core,
    "TransformerEngine": lambda facts: facts.transformer_engine.version,
    "the code of hpctrain": lambda facts: facts.code,
}
_ALIKE: Mapping[str, Callable[[SoftwareFacts], str | None]] = {
    "Python": lambda facts: facts.python,
    "driver": lambda facts: facts.driver,
}


def unequal_nodes(ranks: Sequence[RankSoftware]) -> Iterator[str]:
    """Describe what differs between nodes and ends nothing."""
    for message, nodes in _odd_nodes(ranks, _ALIKE):
        yield f"{message}: {', '.join(nodes)}"


def _odd_nodes(
    ranks: Sequence[RankSoftware], read: Mapping[str, Callable[[SoftwareFacts], str | None]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield a message and nodes for everything that some nodes have otherwise than most."""
    for name, value_of in read.items():
        nodes: dict[str, set[str]] = {}
        for rank in ranks:
            nodes.setdefault(value_of(rank.facts) or "none", set()).add(rank.node)
        if len(nodes) < 2:
            continue
        usual = max(nodes, key=lambda value: len(nodes[value]))
        others = sorted(set().union(*(nodes[value] for value in nodes if value != usual)))
        versions = ", ".join(sorted(value for value in nodes if value != usual))
        yield f"{name} is {versions} there, and {usual} on the other nodes", tuple(others)
