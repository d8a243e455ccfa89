"""Which nodes went away under an attempt whose supervisor left no word, by what Slurm knows.

Belongs here: asking Slurm about the nodes of an earlier attempt. Does not belong here: what that
says of its cause (`attempt`), what is written down against a node (`decision_inputs`), nodes that
are asked while their job goes on (`probe`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpctrain.errors import SlurmError
from hpctrain.store.ledger import Event
from hpctrain.store.run_records import Progress, read_record
from hpctrain.supervise.attempt import is_of_attempt
from hpctrain.supervise.context import AttemptContext

# An orderly shutdown, the firmware of a node with eight GPUs and its boot take a quarter of an
# hour; what goes down or boots this long after an attempt's last word is another story.
REBOOT_SECONDS = 3600.0


def gone_nodes(
    context: AttemptContext, lost: Event, events: Sequence[Event] = ()
) -> tuple[str, ...]:
    """The nodes of the attempt begun by `lost` that are down, or have booted since its last word.

    Empty while Slurm is silent. Where Slurm says that of all nodes, the ones we run on too, it is
    the controller that has just begun.
    """
    if not lost.nodes:
        return ()
    since, slurm = _last_word(context, lost, events), context.slurm
    try:
        nodes = slurm.hostnames(lost.nodes)
        states = slurm.node_states({*nodes, *slurm.hostnames(context.attempt.nodes)})
        booted = slurm.boot_times(nodes)
    except SlurmError:
        return ()
    down = {node for node, one in states.items() if one.is_down or not one.responding}
    if len(down) == len(states) or time.time() > since + REBOOT_SECONDS:
        down = set()
    back = {node for node, at in booted.items() if since <= at <= since + REBOOT_SECONDS}
    return tuple(node for node in nodes if node in down | back)


def _last_word(context: AttemptContext, lost: Event, events: Sequence[Event]) -> float:
    """Of the attempt's supervisor or its ranks, in seconds since the epoch."""
    own = [event for event in events if is_of_attempt(event, lost)]
    progress = read_record(context.run_layout.progress, Progress)
    signs = [progress.time] if progress is not None else []
    return max([lost.time, *signs, *(event.time for event in own)])
