"""Rung 4: all GPUs of one node against one GPU, a killed rank, and the links of the node.

Belongs here: the layouts, the comparison, killing and resuming, bus bandwidth. Does not belong
here: starting ranks (see `trials`), the measurement of links (see `links`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.gpu.links import LinkReport
from bench.gpu.rung import Found, NotRunError, Site, failed, not_run, passed
from bench.gpu.trials import (
    EXPERTS,
    FSDP,
    LIMIT_SECONDS,
    LLAMA,
    MODULE,
    WITH_ENGINE,
    ZERO,
    TrialRun,
    make_run,
    start_processes,
)
from hpctrain.records.gpu_report import RungCheck

# fp32 in another order of sums; AdamW carries the differences on for eight steps.
BOUND = 2e-4
# TransformerEngine multiplies fp32 in TF32 (10 bits of mantissa) on tensor cores.
TF32_BOUND = 5e-3
LINK_SECONDS = 300.0
# Long enough that a rank of a GPU, with steps of some 20 ms, is killed before the end.
_KILLED_STEPS, _EMULATED_STEPS, _SAVE_STEPS = 200, 20, 5
_SP = dict(sequence_parallel=True)
_OVERLAPS = dict(overlap_grad_reduce=True, overlap_param_gather=True)


@dataclass(frozen=True)
class Layout:
    """One layout: fields of the document, and the one-GPU run that it must equal.

    `needs_engine`: needs TransformerEngine. `gpus`: ranks of the layout.
    """

    name: str
    base: dict[str, Any]
    changes: dict[str, Any]
    gpus: int = 2
    needs_engine: bool = False


def _tp(size: int) -> dict[str, Any]:
    return dict(tensor_model_parallel_size=size, **_SP)


_PP2 = dict(pipeline_model_parallel_size=2, pipeline_layer_split=((2,), (2,)))
_VPP2 = dict(
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    pipeline_layer_split=((1, 1), (1, 1)),
)
LAYOUTS: tuple[Layout, ...] = (
    Layout("tp2 sp", LLAMA, _tp(2)),
    Layout("pp2", LLAMA, _PP2),
    Layout("pp2 vpp2", LLAMA, _VPP2),
    Layout("cp2", WITH_ENGINE, dict(context_parallel_size=2), needs_engine=True),
    Layout("ep2", EXPERTS, dict(expert_model_parallel_size=2, data_parallel_size=2)),
    Layout("dp2 overlaps", LLAMA, dict(data_parallel_size=2, **_OVERLAPS)),
    Layout("TransformerEngine tp2 sp", WITH_ENGINE, _tp(2), needs_engine=True),
    Layout("ddp dp2", MODULE, dict(data_parallel_size=2)),
    Layout("fsdp dp2", FSDP, dict(data_parallel_size=2, shard_size=2)),
    Layout("ZeRO 2 dp2", ZERO, dict(data_parallel_size=2)),
    Layout("tp4 sp", LLAMA, _tp(4), gpus=4),
    Layout(
        "tp2 sp pp2 dp2",
        LLAMA,
        {**_tp(2), **_PP2, "data_parallel_size": 2, **_OVERLAPS},
        gpus=8,
    ),
)


def run(site: Site, found: Found) -> Iterator[RungCheck]:
    """Compare layouts, kill a rank, measure links."""
    if site.gpus < 2:
        raise NotRunError("a node with at least 2 GPUs: make gpu RUNG=4 GPUS=8")
    yield from compare_layouts(site)
    yield kill_and_resume(site)
    yield from measure_links(site, found)


def compare_layouts(site: Site) -> Iterator[RungCheck]:
    """Train each layout that fits the node, and compare its losses with those of one GPU."""
    alone: dict[int, TrialRun | str] = {}
    lacking = lacking_engine(site)
    for layout in LAYOUTS:
        name = f"{layout.name} against one GPU"
        if layout.gpus > site.gpus:
            yield not_run(name, f"needs {layout.gpus} GPUs")
            continue
        if layout.needs_engine and lacking is not None:
            yield not_run(name, lacking)
            continue
        start = time.monotonic()
        if id(layout.base) not in alone:
            reference = make_run(site, f"one-for-{layout.name}", layout.base)
            problem = reference.train()
            alone[id(layout.base)] = reference if problem is None else problem
        one = alone[id(layout.base)]
        if isinstance(one, str):
            yield failed(name, f"already on one GPU: {one}")
            continue
        yield compare(site, layout, one, start)


def lacking_engine(site: Site) -> str | None:
    """Return why TransformerEngine cannot be used, None if it can."""
    if site.emulated:
        return "emulated on CPU: TransformerEngine has no kernels for CPUs"
    from hpctrain.train.software import transformer_engine

    library = transformer_engine()
    return None if library.imported else f"TransformerEngine: {library}"


def compare(site: Site, layout: Layout, one: TrialRun, start: float) -> RungCheck:
    """Train one layout from the same initial weights, and compare every loss."""
    name = f"{layout.name} against one GPU"
    own = make_run(site, layout.name, layout.base, **layout.changes)
    problem = own.train()
    seconds = time.monotonic() - start
    if problem is not None:
        return failed(name, problem, seconds)
    here, there = own.losses, one.losses
    if here.keys() != there.keys() or not there:
        return failed(name, f"steps {sorted(here)} instead of {sorted(there)}", seconds)
    apart = max(abs(here[step] - there[step]) for step in there)
    bound = TF32_BOUND if layout.base is WITH_ENGINE else BOUND
    learned = there[min(there)] - there[max(there)]
    detail = (
        f"losses differ by at most {apart:.1e}; allowed {bound:.0e}; they fall by {learned:.2f}"
    )
    if apart > bound or learned < 0.1:
        return failed(name, detail, seconds)
    return passed(name, detail, seconds)


def kill_and_resume(site: Site) -> RungCheck:
    """Kill a rank with SIGKILL, resume from the newest checkpoint, compare bit by bit."""
    name, start = "kill -9 and resume, bit by bit", time.monotonic()
    steps = _EMULATED_STEPS if site.emulated else _KILLED_STEPS
    fields: dict[str, Any] = dict(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        precision="fp32" if site.emulated else "bf16",
        deterministic_mode=True,
        train_steps=steps,
        lr_decay_steps=steps,
        save_interval_steps=_SAVE_STEPS,
    )
    killed = make_run(site, "killed", LLAMA, **fields)
    ranks = killed.start()
    end = time.monotonic() + LIMIT_SECONDS
    while not killed.saved_steps and time.monotonic() < end:
        time.sleep(0.02)
    ranks.signal(signal.SIGKILL, 1)
    time.sleep(1.0)
    ranks.signal(signal.SIGKILL)  # the others wait for it in a collective
    codes = ranks.wait(60)
    saved = killed.saved_steps
    if not saved or codes[1] != -signal.SIGKILL:
        detail = f"rank 1 ended with {codes[1]}, checkpoints {saved}: {ranks.log()[-800:]}"
        return failed(name, detail, time.monotonic() - start)
    step = saved[-1]
    whole = make_run(site, "not-killed", LLAMA, **fields)
    resumed = make_run(site, "resumed", LLAMA, **fields)
    resumed.adopt(killed, step)
    for run_, from_step in ((whole, None), (resumed, step)):
        problem = run_.train(from_step)
        if problem is not None:
            return failed(name, problem, time.monotonic() - start)
    seconds, again = time.monotonic() - start, resumed.exact
    different = [s for s in again if again[s] != whole.exact.get(s)]
    if different or not again:
        detail = f"from step {step}: step {min(different, default=step)} has another loss or norm"
        return failed(name, detail, seconds)
    detail = f"killed after step {step}; {len(again)} steps after it are equal bit by bit"
    return passed(name, detail, seconds)


def measure_links(site: Site, found: Found) -> Iterator[RungCheck]:
    """Measure bus bandwidth of each axis inside the node."""
    result = site.directory / "links-1-node.json"
    result.unlink(missing_ok=True)
    words = ["bench.gpu.links", str(result), f"--gpus-per-node={site.gpus}"]
    words += ["--emulate-gpu"] if site.emulated else []
    start = time.monotonic()
    ranks = start_processes(words, site.gpus, site.directory / "links-logs", dict(os.environ))
    codes = ranks.wait(LINK_SECONDS)
    seconds = time.monotonic() - start
    if any(codes) or not result.exists():
        bad = next((rank for rank, code in enumerate(codes) if code), 0)
        yield failed(
            "links", f"rank {bad} ends with {codes[bad]}: {ranks.log(bad)[-1200:]}", seconds
        )
        return
    report = LinkReport.model_validate_json(result.read_text())
    found.speed.append(report.check)
    yield from link_checks(report, seconds)


def link_checks(report: LinkReport, seconds: float) -> Iterator[RungCheck]:
    """Yield one check per axis and operation with the rate of its largest message."""
    largest: dict[tuple[str, str, int], tuple[int, float]] = {}
    for axis in report.check.axes:
        key = (axis.axis, axis.operation, axis.ranks_per_group)
        rates = [rate for rate in axis.bus_bytes_per_second if rate is not None]
        if rates and axis.message_bytes > largest.get(key, (0, 0.0))[0]:
            largest[key] = (axis.message_bytes, min(rates))
    for (axis_name, operation, ranks), (size, rate) in largest.items():
        detail = f"{rate / 1e9:.1f} GB/s on the slowest rank, {size / 2**20:g} MiB"
        yield passed(f"{operation} of {ranks} ranks ({axis_name})", detail, seconds)
        seconds = 0.0
    if report.far:
        numbers = ", ".join(map(str, report.far[:8]))
        yield failed("placement", f"ranks {numbers} have no CPU near their GPU")
