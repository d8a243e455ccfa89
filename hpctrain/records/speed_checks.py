"""Records of the speed that a launch has measured on its GPUs and links before its first step.

One line of `speed.jsonl` for each launch that has measured; `hpctrain calibrate` can read it, too.
Belongs here: the format, reading and writing it. Does not belong here: measuring (see
`hpctrain.train.speed_check`), what follows from a slow node (see
`hpctrain.judge.slow_nodes`).
"""

from __future__ import annotations

from typing import Literal

from hpctrain.base.durable import append_line
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import Record, RecordPart, parse_record

AxisName = Literal["tp", "cp", "ep", "dp", "pp"]
PartName = Literal["gpu", "memory", "link", "network"]


class AxisSpeed(RecordPart):
    """The links of one axis of the layout, with all groups of the axis at work at once.

    `operation`: `all_reduce` of a tensor of `message_bytes`, `all_gather` into one of that size, or
    `send_recv` of so many bytes between neighbours in both directions. `ranks_per_group` is the
    size of the axis. `groups` has for each rank the smallest rank of its group.
    `bus_bytes_per_second` has for each rank what its group has reached, None where nothing was
    measured (nccl-tests, doc/PERFORMANCE.md): for all_reduce 2 (n - 1) / n * bytes / seconds, for
    all_gather (n - 1) / n * bytes / seconds, for send_recv bytes / seconds and direction of the
    slower of its one or two neighbours. `best_pair_bytes_per_second` has the faster neighbour,
    where pairs were measured: low means that the rank's own link is slow.
    `expected_bytes_per_second`: the profile's bandwidth times the calibrated efficiency; None where
    it is not known.
    """

    axis: AxisName
    operation: Literal["all_reduce", "all_gather", "send_recv"]
    ranks_per_group: int
    message_bytes: int
    groups: tuple[int, ...]
    bus_bytes_per_second: tuple[float | None, ...]
    best_pair_bytes_per_second: tuple[float | None, ...] = ()
    expected_bytes_per_second: float | None = None


class SlowPart(RecordPart):
    """One part that is slow.

    `nodes`: where it is; several where a link between them is slow and neither end can be singled
    out; empty where all nodes are alike, which points to a setting. `share`: measured over
    `reference` (of its peers, or of the profile). `certain`: peers of this launch are faster,
    one node is named, and a speed was slow in two measurements.
    """

    part: PartName
    message: str
    nodes: tuple[str, ...] = ()
    rank: int | None = None
    share: float | None = None
    certain: bool = False


class SpeedCheck(Record):
    """All measurements of one launch; tuples are by rank unless stated otherwise.

    `gpu` is the name of the GPU (None: CPUs), `precision` that of the matrix products with the
    sizes `product_mnk`. `product_flops_per_second` counts 2 m n k for a product;
    `expected_flops_per_second` is what the plan assumes. `copy_bytes_per_second`: a copy inside the
    GPU's memory, read and written bytes. Clocks are of the SMs under load, in Hz. `slowdowns` names
    what the driver reports to hold the clock down, such as `thermal`; "" for nothing.
    `far_cpus` describes the CPUs of a rank of which none is near its GPU; "" for near ones, and
    where that is not known.
    `free_memory_bytes` is free before the model is built. `networks` has the network that NCCL
    chose, such as `IB` or `Socket`; "" if not known.
    `rounds`: 2 where there was a second round for suspects; the better one counts. `twice` has what
    was measured in it: `gpu`, and axes.
    `skipped` lists what was not measured, with the reason. `leaves`: the launch ends because of
    `slow`, so that the supervisor can replace the nodes.
    """

    epoch: int
    time: float
    seconds: float
    nodes: tuple[str, ...]
    gpu: str | None = None
    accelerator: Literal["cuda", "cpu"]
    precision: Literal["bf16", "fp32"]
    product_mnk: tuple[int, int, int]
    product_flops_per_second: tuple[float | None, ...]
    expected_flops_per_second: float | None = None
    copy_bytes_per_second: tuple[float | None, ...] = ()
    clock_hz: tuple[float | None, ...] = ()
    highest_clock_hz: tuple[float | None, ...] = ()
    slowdowns: tuple[str, ...] = ()
    free_memory_bytes: tuple[int | None, ...] = ()
    total_memory_bytes: tuple[int | None, ...] = ()
    networks: tuple[str, ...] = ()
    far_cpus: tuple[str, ...] = ()
    axes: tuple[AxisSpeed, ...] = ()
    rounds: int = 1
    twice: tuple[PartName | AxisName, ...] = ()
    skipped: tuple[str, ...] = ()
    slow: tuple[SlowPart, ...] = ()
    leaves: bool = False

    @property
    def far_ranks(self) -> tuple[str, ...]:
        """Describe the ranks that run on CPUs of another NUMA node than that of their GPU."""
        by_rank = enumerate(zip(self.nodes, self.far_cpus, strict=False))
        return tuple(
            f"rank {rank} on node {node} runs on {cpus}" for rank, (node, cpus) in by_rank if cpus
        )


def write_speed_check(run: RunLayout, check: SpeedCheck) -> None:
    """Append the line of one launch. Raises OSError."""
    append_line(run.speed_checks, check.model_dump_json(exclude_defaults=True), mode=0o600)


def read_speed_checks(run: RunLayout) -> list[SpeedCheck]:
    """Read all lines in the order written; a torn line is left out.

    Raises OSError when the file exists and cannot be read, NewerFormatError when a newer hpctrain
    has written it.
    """
    try:
        lines = run.speed_checks.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = (parse_record(run.speed_checks, line, SpeedCheck) for line in lines)
    return [check for check in found if check is not None]
