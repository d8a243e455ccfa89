"""Compare a footprint with the limits of the site's profile.

Belongs here: one sentence per limit that is exceeded. Does not belong here: the footprint itself.
"""

from __future__ import annotations

from hpctrain.plan.footprint.documents import Footprint
from hpctrain.spec.profile import ClusterProfile
from hpctrain.units import short_bytes


def exceeded_limits(profile: ClusterProfile, footprint: Footprint) -> tuple[str, ...]:
    """Say which of the site's limits the run would exceed, and what would help."""
    limits, found = profile.limits, list[str]()
    inodes, peak, rpc = footprint.inodes, footprint.bytes.peak_checkpoints, footprint.rpc
    if limits.max_inodes is not None and inodes.at_end > limits.max_inodes:
        found.append(
            f"the run leaves {inodes.at_end:,} files and directories in its run directory, "
            f"{inodes.peak_checkpoints:,} of them in checkpoints; this site allows "
            f"{limits.max_inodes:,} (limits.max_inodes)"
        )
    if limits.max_bytes is not None and peak > limits.max_bytes:
        found.append(
            f"checkpoints take {short_bytes(peak)} at their peak; this site allows "
            f"{short_bytes(limits.max_bytes)} (limits.max_bytes): lower checkpoint.keep"
        )
    if limits.max_rpc_per_hour is not None and rpc.worst_hour > limits.max_rpc_per_hour:
        found.append(
            f"the run may send slurmctld {rpc.worst_hour:,} RPCs in its worst hour; this site "
            f"allows {limits.max_rpc_per_hour:,} (limits.max_rpc_per_hour)"
        )
    return tuple(found)
