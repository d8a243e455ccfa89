"""Rung 2: the libraries above torch, and what each absence costs.

Belongs here: which library is needed, what its absence costs, how it gets in. Does not belong
here: finding the facts (see `facts`), the layers below (see `driver`).
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.driver import read_facts
from bench.gpu.facts import MachineFacts
from bench.gpu.rung import Found, Site, failed, not_run, passed
from hpctrain.records.gpu_report import RungCheck
from hpctrain.records.software import SoftwareFacts

CONTAINER = (
    "NVIDIA's PyTorch container has it (nvcr.io/nvidia/pytorch); in it: "
    "`pip install --no-deps -e .`, then what `pip check` still misses"
)
WHEEL = "`pip install --no-build-isolation 'transformer-engine[pytorch]'`"
# 512 ranks and their files, with room: gloo opens a socket to each other rank.
_OPEN_FILES = 4096


def run(site: Site, found: Found) -> Iterator[RungCheck]:
    """Check the libraries; without a profile TransformerEngine counts as promised."""
    facts = read_facts()
    if isinstance(facts, RungCheck):
        yield facts
        return
    if facts.software is None:
        yield not_run("libraries", f"torch cannot be imported: {facts.torch_error}")
        return
    if not found.software:
        found.software.append(facts.software)
    cost = None if site.profile is None else planned_cost(site.profile)
    yield from judge(facts, promised=_promised(site), planned=cost)


def _promised(site: Site) -> bool:
    """Tell whether the profile promises TransformerEngine, which plans then count on."""
    if site.profile is None:
        return True
    from hpctrain.spec.loader import load_named_profile

    profile = load_named_profile(site.profile).document
    return profile.software.transformer_engine


def planned_cost(profile: str) -> str | None:
    """Plan a GPT of 1.3 billion weights on one GPU with TransformerEngine and without it.

    Returns the ratio of the step times; None where the profile's GPU is not known or too small.
    """
    from bench.one_gpu.__main__ import HERE
    from bench.one_gpu.jobs import CASES
    from hpctrain.job.plan import load, plan_option

    case = next(case for case in CASES if case.name == "gpt-1.3b megatron")
    seconds = []
    for kind in ("transformer_engine", "local"):
        words = (*case.settings_with(1), f"engine.implementation={kind}")
        plan = plan_option(load(HERE / "base.yaml", profile, words), "time").plan
        if plan is None or plan.step_seconds is None:
            return None
        seconds.append(plan.step_seconds)
    ratio = seconds[1] / seconds[0]
    return (
        f"A GPT of 1.3 billion weights on one such GPU takes {ratio:.2f} times as long (planned)."
    )


def judge(
    facts: MachineFacts, *, promised: bool, planned: str | None = None
) -> Iterator[RungCheck]:
    """Yield one check for each library and limit.

    `promised`: the profile has TransformerEngine. `planned`: what its absence costs.
    """
    software = facts.software
    assert software is not None
    yield _megatron_core(facts, software)
    yield from _transformer_engine(software, promised, planned)
    apex = software.apex_wgrad
    yield passed(
        "Apex extension",
        str(apex)
        if apex.imported
        else f"absent ({apex}): gradients of weights are added by a kernel of their own, which "
        f"reads and writes them once more; nothing fails. {CONTAINER}.",
    )
    flash = software.flash_attention
    yield passed(
        "flash-attn",
        str(flash)
        if flash.imported
        else f"absent ({flash}): attention takes cuDNN's kernel of TransformerEngine, or PyTorch's "
        "own fused one for FSDP, DDP and DeepSpeed. Optional: `pip install flash-attn`.",
    )
    yield _compiler(software)
    yield from _libraries(facts)
    yield _open_files(software)
    yield _numa(facts)


def _megatron_core(facts: MachineFacts, software: SoftwareFacts) -> RungCheck:
    name, found = "megatron-core", software.megatron_core
    if found is None:
        return failed(
            name,
            "absent: the engines `megatron` cannot train, which large models need. "
            f"`pip install 'megatron-core{facts.required_megatron_core or ''}'`.",
        )
    wanted = facts.required_megatron_core
    exact = wanted.removeprefix("==") if wanted else found
    remark = "" if found == exact or not exact[0].isdigit() else f"; this hpctrain wants {wanted}"
    return passed(name, f"{found}{remark}")


def _transformer_engine(
    software: SoftwareFacts, promised: bool, planned: str | None
) -> Iterator[RungCheck]:
    name, engine = "TransformerEngine", software.transformer_engine
    if engine.imported:
        yield passed(name, str(engine))
        kernels = ", ".join(software.attention)
        fused = any("flash" in kernel for kernel in software.attention)
        hint = "" if fused else " (flash-attn is not there; cuDNN has all that production uses)"
        yield passed("attention kernels", f"{kernels or 'none'}{hint}")
        return
    figure = f"{planned} " if planned else ""
    cost = (
        f"{engine}. Without it megatron-core has no fused attention (matrices of s x s in memory), "
        "no FP8, no context parallelism and no multi-head latent attention, and its optimizer "
        f"makes one kernel per weight. {figure}{CONTAINER}; without a container: {WHEEL}"
    )
    if engine.error is not None:
        cost += (
            ". It is installed and cannot be imported: it was built for another torch or CUDA. "
            "megatron-core cannot be imported beside it: repair or remove it"
        )
    if promised:
        yield failed(
            name,
            f"{cost}. To train without it: `software.transformer_engine: false` in the profile, so "
            "that plans count with that.",
        )
    else:
        yield passed(name, f"absent, as the profile says: {cost}")
    yield not_run("attention kernels", "they are TransformerEngine's")


def _compiler(software: SoftwareFacts) -> RungCheck:
    name = "triton and C compiler"
    if software.cuda_build is None:
        return not_run(name, "triton comes with a PyTorch for CUDA")
    if not software.triton.imported:
        return failed(
            name,
            f"triton: {software.triton}. torch compiles megatron-core's fused kernels with it. "
            "Install the one that this torch asks for: `pip install --force-reinstall torch`.",
        )
    if software.compiler is None:
        return failed(
            name,
            "no C compiler (gcc, cc, clang) in PATH: triton needs one on every compute node when a "
            "run starts. `module load gcc`, or train in a container that has it.",
        )
    return passed(name, f"triton {software.triton}, {software.compiler}")


def _libraries(facts: MachineFacts) -> Iterator[RungCheck]:
    uses = {"transformers": "engines fsdp, ddp and deepspeed", "deepspeed": "engine deepspeed"}
    extras = {"transformers": "huggingface", "deepspeed": "deepspeed"}
    for library, use in uses.items():
        found = facts.libraries.get(library)
        if found is None:
            yield not_run(
                library, f"absent: {use} cannot run. `pip install -e '.[{extras[library]}]'`"
            )
        else:
            yield passed(library, found)


def _open_files(software: SoftwareFacts) -> RungCheck:
    count = software.open_files
    if count >= _OPEN_FILES:
        return passed("open files", f"{count:,}")
    return failed(
        "open files",
        f"at most {count:,} files may be open: each rank has a socket to every other one, so runs "
        f"end at about {max(0, count - 256):,} ranks. Raise the hard limit for Slurm's steps "
        "(LimitNOFILE of slurmd) to 65536 or more.",
    )


def _numa(facts: MachineFacts) -> RungCheck:
    name = "NUMA nodes of GPUs"
    if not facts.gpu_nodes:
        return not_run(name, "no GPU of NVIDIA's driver is visible")
    nodes = ", ".join(
        f"GPU {number}: " + ("one node" if gpu.numa_node is None else f"node {gpu.numa_node}")
        for number, gpu in enumerate(facts.gpu_nodes)
    )
    far = [number for number, gpu in enumerate(facts.gpu_nodes) if gpu.near_cpus == 0]
    if far:
        numbers = ", ".join(map(str, far))
        return failed(
            name,
            f"{nodes}. None of this shell's {facts.cpus} CPUs is near GPU {numbers}: copies to the "
            "GPU cross to the other socket. Ask for whole nodes, or `--distribution=block:block`.",
        )
    return passed(name, f"{nodes}; {facts.cpus} CPUs")
