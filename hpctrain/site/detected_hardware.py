"""State the nodes and GPUs of a group, and whether its GPUs exist.

Belongs here: `nodes` and `gpu` of a profile or of one of its partitions. Does not belong here:
which nodes a profile is about (`detected`), links (`detected_network`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain.base.units import ByteSize
from hpctrain.site.facts import SiteFacts
from hpctrain.site.hardware import NODES_SHOWN, KnownGpu, NodeGroup
from hpctrain.site.profile_text import Stated, Tree, guess


def emulated_gpus(facts: SiteFacts, group: NodeGroup) -> Stated | None:
    """Find out whether Slurm counts GPUs that do not exist, as a sandbox does."""
    survey = facts.survey
    if survey is not None:
        if survey.gpus or survey.gpu_devices:
            return None
        return Stated(
            True, f"job on {survey.host}: neither a GPU device nor nvidia-smi or rocm-smi"
        )
    if group.is_one_machine:
        address = group.nodes[0].address
        reason = f"{len(group.nodes)} nodes have the address {address}: one machine, as a sandbox"
        return guess(True, reason)
    return None


def nodes_section(group: NodeGroup) -> Mapping[str, Tree]:
    """State number, CPUs, memory and names; of unequal nodes the least."""
    memory = min(node.job_memory_mib for node in group.nodes)
    reserved = any(node.reserved_mib for node in group.nodes)
    source = "RealMemory minus MemSpecLimit" if reserved else "RealMemory"
    prefixes = {re.sub(r"\d+$", "", node.name) for node in group.nodes}
    prefix = min(prefixes)
    return {
        "count": Stated(len(group.nodes), f"{NODES_SHOWN}, nodes with {group.words}"),
        "cpus": Stated(min(node.cpus for node in group.nodes), f"CPUEfctv of {NODES_SHOWN}"),
        "memory": Stated(_mebibytes(memory), f"{source} of {NODES_SHOWN}"),
        "prefix": Stated(prefix, NODES_SHOWN)
        if len(prefixes) == 1
        else guess(prefix, f"nodes have {len(prefixes)} prefixes, this is the first"),
    }


def gpu_section(group: NodeGroup, gpu: KnownGpu, emulated: Stated | None) -> Mapping[str, Tree]:
    """State type, number and memory; rates come from the catalogue when a run is planned."""
    section: dict[str, Tree] = {
        "type": Stated(gpu.type, f"Gres of {NODES_SHOWN}" if group.type else gpu.source),
        "per_node": Stated(group.per_node, f"Gres of {NODES_SHOWN}"),
    }
    if emulated is not None:
        share = min(node.job_memory_mib for node in group.nodes) // group.per_node
        section["memory"] = guess(_mebibytes(share), "processes on CPUs share a node's RealMemory")
        section["reserved"] = guess("0GiB", "no CUDA context on a CPU")
        section["peak"] = guess({}, "no rates, so no model FLOP utilization is printed")
        section["emulated"] = emulated
        return section
    assert gpu.memory_bytes is not None
    section["memory"] = Stated(str(ByteSize(gpu.memory_bytes)), gpu.source, gpu.is_guess)
    if gpu.gpu is None:
        return section
    section["model"] = Stated(gpu.gpu.name, f"GPU catalogue: {gpu.gpu.source}", gpu.is_guess)
    return section


def _mebibytes(count: int) -> str:
    """Write memory as Slurm counts it, in GiB where that is a whole number."""
    return f"{count}MiB" if count % 1024 else f"{count // 1024}GiB"
