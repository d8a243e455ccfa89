"""Find the nodes that an attempt has lost, when its supervisor recorded no end.

Belongs here: querying Slurm about the nodes of an earlier attempt. Does not belong here: the cause
of its end (`attempt`), evidence against nodes (`decision_inputs`), nodes of running jobs (`probe`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError
from hpctrain.records.ledger import Event
from hpctrain.records.run_records import Progress, read_record
from hpctrain.supervise.attempt import is_of_attempt
from hpctrain.supervise.context import AttemptContext

# Shutdown, firmware and boot of a node with eight GPUs take a quarter of an hour. What goes down or
# boots later than this after an attempt's last record has nothing to do with it.
REBOOT_SECONDS = 3600.0


def gone_nodes(
    context: AttemptContext, lost: Event, events: Sequence[Event] = ()
) -> tuple[str, ...]:
    """The nodes of the attempt begun by `lost` that are down or have booted since its last record.

    Empty if Slurm does not answer. If Slurm reports all nodes as down, our own included, the
    controller has just started, and none counts.
    """
    if not lost.nodes:
        return ()
    progress = read_record(context.run_layout.progress, Progress)
    since = max(
        lost.time,
        progress.time if progress is not None else lost.time,
        *(event.time for event in events if is_of_attempt(event, lost)),
    )
    slurm = context.slurm
    try:
        nodes = slurm.hostnames(lost.nodes)
        states = slurm.node_states({*nodes, *slurm.hostnames(context.attempt.nodes)})
        booted = slurm.boot_times(nodes)
    except SlurmError:
        return ()
    down = {node for node, one in states.items() if one.is_down or not one.responding}
    if len(down) == len(states) or clock.now() > since + REBOOT_SECONDS:
        down = set()
    back = {node for node, at in booted.items() if since <= at <= since + REBOOT_SECONDS}
    return tuple(node for node in nodes if node in down | back)
