"""State the nodes, GPUs and links of a group, and whether its GPUs exist.

Belongs here: `nodes`, `gpu`, `nvlink` and `network` of a profile or of one of its partitions. Does
not belong here: which nodes a profile is about (`detected`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from hpctrain.base.units import Bandwidth, ByteSize
from hpctrain.site.facts import Interface, NodeSurvey, RdmaPort, SiteFacts
from hpctrain.site.hardware import NODES_SHOWN, KnownGpu, NodeGroup
from hpctrain.site.profile_text import Stated, Tree, ask, guess


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
    threads = min(node.threads_per_core for node in group.nodes)
    memory = min(node.job_memory_mib for node in group.nodes)
    reserved = any(node.reserved_mib for node in group.nodes)
    source = "RealMemory minus MemSpecLimit" if reserved else "RealMemory"
    prefixes = {re.sub(r"\d+$", "", node.name) for node in group.nodes}
    prefix = min(prefixes)
    return {
        "count": Stated(len(group.nodes), f"{NODES_SHOWN}, nodes with {group.words}"),
        "cpus": Stated(min(node.cpus for node in group.nodes), f"CPUEfctv of {NODES_SHOWN}"),
        "threads_per_core": Stated(
            threads, f"ThreadsPerCore of {NODES_SHOWN}, as far as CPUTot counts them"
        ),
        "memory": Stated(_mebibytes(memory), f"{source} of {NODES_SHOWN}"),
        "prefix": Stated(prefix, NODES_SHOWN)
        if len(prefixes) == 1
        else guess(prefix, f"nodes have {len(prefixes)} prefixes, this is the first"),
    }


def gpu_section(
    group: NodeGroup, gpu: KnownGpu, emulated: Stated | None, survey: NodeSurvey | None = None
) -> Mapping[str, Tree]:
    """State type, number and memory; rates come from the catalogue when a run is planned."""
    declared = f"Gres of {NODES_SHOWN}"
    section: dict[str, Tree] = {"type": Stated(gpu.type, declared)}
    if gpu.gres is not None:
        section["type"] = Stated(gpu.type, f"{gpu.source}: its usual name")
        section["gres"] = Stated(gpu.gres, declared)
    elif not group.type:
        section["type"] = Stated(gpu.type, gpu.source, gpu.is_guess)
    section["per_node"] = _per_node(group, gpu, survey)
    if emulated is not None:
        share = min(node.job_memory_mib for node in group.nodes) // group.per_node
        section["memory"] = guess(_mebibytes(share), "processes on CPUs share a node's RealMemory")
        section["reserved"] = guess("0GiB", "no CUDA context on a CPU")
        section["peak"] = guess({}, "no rates, so no model FLOP utilization is printed")
        section["emulated"] = emulated
        return section
    assert gpu.memory_bytes is not None
    section["memory"] = Stated(str(ByteSize(gpu.memory_bytes)), gpu.source, gpu.is_guess)
    known = gpu.gpu
    if known is None:
        return section
    part = group.slice
    if part is not None:
        # NVIDIA's MIG user guide: up to seven slices compute, eight have the memory
        share_of = f"{part.sevenths}/7 of {known.name}"
        rates: dict[str, str] = {
            name: f"{rate * part.sevenths / 7e12:.4g}TFLOP/s" for name, rate in known.peak.items()
        }
        section["peak"] = guess(rates, share_of)
        eighths = max(1, round(8 * part.gigabytes * 1e9 / known.memory))
        rate = known.memory_bandwidth * min(8, eighths) / 8e9
        section["memory_bandwidth"] = guess(f"{rate:g}GB/s", f"{eighths}/8 of {known.name}")
        return section
    section["model"] = Stated(known.name, f"GPU catalogue: {known.source}", gpu.is_guess)
    if known.unified_memory:
        share = min(node.job_memory_mib for node in group.nodes) * 2**20 // group.per_node
        least = min(gpu.memory_bytes, share)
        section["memory"] = guess(
            str(ByteSize(least)), f"{known.name} has the CPUs' memory, too: a share of RealMemory"
        )
    return section


def _per_node(group: NodeGroup, gpu: KnownGpu, survey: NodeSurvey | None) -> Stated:
    if group.kind != "undeclared":
        return Stated(group.per_node, f"Gres of {NODES_SHOWN}")
    if survey is not None and survey.gpus:
        tool = "nvidia-smi" if survey.gpus[0].vendor == "nvidia" else "rocm-smi"
        return Stated(group.per_node, f"{tool} on {survey.host}")
    usual = f", reference systems {gpu.gpu.per_node}" if gpu.gpu is not None else ""
    words = f"how many GPUs has a node? Gres does not list them; 1 is safe{usual}; --in-job counts"
    return ask(group.per_node, words)


def _mebibytes(count: int) -> str:
    """Write memory as Slurm counts it, in GiB where that is a whole number."""
    return f"{count}MiB" if count % 1024 else f"{count // 1024}GiB"


# -- Find the links of a cluster: NVLink inside a node, cards and switches between nodes --------
# By rank of certainty: the cards of a node that a job has seen, Slurm's SwitchType, the cards of
# the login node, the maker's reference system in the GPU catalogue.


_EMULATED_NVLINK, _EMULATED_NETWORK = "10GB/s", "10Gb/s"
_TOPOLOGY_SHOWN = "scontrol show topology"
_SLINGSHOT_BITS = 200e9  # of a card of Slingshot 11, per direction (HPE)
_PCIE = Bandwidth(32e9)  # PCIe 4 x16, per direction (PCI-SIG)


def nvlink(facts: SiteFacts, group: NodeGroup, gpu: KnownGpu, emulated: bool) -> Mapping[str, Tree]:
    """State the domain of NVLink and its rate."""
    if emulated:
        return {
            "domain": guess(group.per_node, "the processes of one node"),
            "bandwidth": guess(_EMULATED_NVLINK, "shared memory of one machine"),
        }
    known = gpu.gpu
    rate = known.nvlink_bandwidth if known is not None else _PCIE
    reason = f"GPU catalogue: {known.source}" if known is not None else "PCIe 4 x16, GPU unknown"
    domain = _domain(facts, group, gpu)
    if group.slice is not None:
        domain = Stated(1, "slices of GPUs (MIG) reach each other by no NVLink")
    if domain.value == 1:
        rate, reason = _PCIE, "PCIe 4 x16: no NVLink joins the GPUs"
    return {"domain": domain, "bandwidth": guess(f"{rate / 1e9:g}GB/s", reason)}


def _domain(facts: SiteFacts, group: NodeGroup, gpu: KnownGpu) -> Stated:
    catalogued = gpu.gpu.nvlink_domain if gpu.gpu is not None else 1
    leaf = _usual_leaf(facts, group)
    if catalogued > group.per_node and facts.cluster.topology == "block" and leaf:
        words = f"blocks of {leaf} nodes in {_TOPOLOGY_SHOWN}, and {gpu.type} joins nodes by NVLink"
        return guess(min(catalogued, leaf * group.per_node), words)
    survey = facts.survey
    joined = survey.gpus[0].joined if survey is not None and survey.gpus else None
    if survey is not None and joined is not None:
        return Stated(joined, f"nvidia-smi topo -m on {survey.host}")
    words = "GPU catalogue, and the number of GPUs of a node"
    return guess(max(1, min(catalogued, group.per_node)), words)


def network(
    facts: SiteFacts, group: NodeGroup, gpu: KnownGpu, emulated: bool
) -> tuple[Mapping[str, Tree], list[str]]:
    """State cards, interface and switches, and what is not known about them."""
    section: dict[str, Tree] = dict(_cards(facts, group, gpu, emulated))
    remarks = []
    if interface := _interface(facts, group):
        section["interface"] = interface
    else:
        remarks.append(
            "network.interface is left out: NCCL and gloo choose one by themselves; a job "
            "(--in-job) sees the names"
        )
    switches, words = _switches(facts, group)
    if switches is not None:
        section["switches"] = switches
    return section, remarks + words


def _cards(facts: SiteFacts, group: NodeGroup, gpu: KnownGpu, emulated: bool) -> dict[str, Tree]:
    survey = facts.survey
    if emulated:
        reason = "all nodes are one machine" if group.is_one_machine else "no GPU was found"
        return _stated("ethernet", 1, _EMULATED_NETWORK, reason, is_guess=True)
    if survey is not None and (ports := _fast_ports(survey.ports)):
        source = f"/sys/class/infiniband on {survey.host}"
        return _of_ports(facts, ports, source, is_guess=False)
    if survey is not None and (slingshot := _slingshot(survey)):
        # cards of Slingshot 11 (cxi) are no RDMA devices of the kernel, but interfaces
        speed = slingshot[0].bits_per_second
        section = _stated(
            "slingshot",
            len(slingshot),
            f"{(speed or _SLINGSHOT_BITS) / 1e9:g}Gb/s",
            f"hsn interfaces in /sys/class/net of {survey.host}",
            is_guess=False,
        )
        if speed is None:
            section["nic_bandwidth"] = guess("200Gb/s", "Slingshot 11; the kernel states no speed")
        return section
    if survey is not None:
        speeds = [one.bits_per_second for one in survey.interfaces if one.is_up]
        known = [speed for speed in speeds if speed]
        source = f"{survey.host} has no RDMA card"
        rate = f"{max(known) / 1e9:g}Gb/s" if known else "10Gb/s"
        section = _stated("ethernet", 1, rate, source, is_guess=not known)
        return section
    if ports := _fast_ports(facts.login.ports):
        source = f"cards of this machine, {facts.login.host}; nodes may have others"
        return _of_ports(facts, ports, source, is_guess=True)
    known_gpu = gpu.gpu
    if known_gpu is None:
        return _stated("ethernet", 1, "10Gb/s", "nothing is known about cards", is_guess=True)
    kind = _kind(facts, "infiniband")
    rate = f"{float(known_gpu.network_bandwidth) * 8 / 1e9:g}Gb/s"
    reason = f"a card for each GPU, as in reference systems of {known_gpu.name}"
    cards = group.per_node if group.slice is None else 1
    section = _stated(kind, cards, rate, reason, is_guess=True)
    if _is_slingshot(facts):
        section["fabric"] = Stated(kind, "SwitchType of scontrol show config")
    return section


def _stated(fabric: str, cards: int, rate: str, source: str, *, is_guess: bool) -> dict[str, Tree]:
    return {
        "fabric": Stated(fabric, source, is_guess),
        "nics_per_node": Stated(cards, source, is_guess),
        "nic_bandwidth": Stated(rate, source, is_guess),
    }


def _fast_ports(ports: Sequence[RdmaPort]) -> list[RdmaPort]:
    """Keep the active ports of the highest rate: slower ones are for storage or management."""
    active = [port for port in ports if port.is_active]
    best = max((port.bits_per_second for port in active), default=0.0)
    return [port for port in active if port.bits_per_second == best]


def _of_ports(
    facts: SiteFacts, ports: Sequence[RdmaPort], source: str, *, is_guess: bool
) -> dict[str, Tree]:
    fabric = _kind(facts, "roce" if all(port.is_ethernet for port in ports) else "infiniband")
    if all(port.card.startswith(("efa", "rdmap")) for port in ports):
        fabric = "efa"
    cards = len({port.card for port in ports})
    rate = f"{ports[0].bits_per_second / 1e9:g}Gb/s"
    return _stated(fabric, cards, rate, source, is_guess=is_guess)


def _slingshot(survey: NodeSurvey) -> list[Interface]:
    """List the interfaces that HPE's documentation calls hsn0, hsn1, ..., if they are up."""
    return [one for one in survey.interfaces if one.name.startswith("hsn") and one.is_up]


def _is_slingshot(facts: SiteFacts) -> bool:
    return "slingshot" in facts.cluster.config.get("SwitchType")


def _kind(facts: SiteFacts, otherwise: str) -> str:
    return "slingshot" if _is_slingshot(facts) else otherwise


def _interface(facts: SiteFacts, group: NodeGroup) -> Stated | None:
    survey = facts.survey
    if group.is_one_machine and group.nodes[0].address.startswith("127."):
        return Stated("lo", f"NodeAddr={group.nodes[0].address} of {NODES_SHOWN}")
    if survey is None:
        return None
    if slingshot := _slingshot(survey):
        names = ", ".join(one.name for one in slingshot)
        return Stated("hsn", f"{names} in /sys/class/net of {survey.host}")
    if survey.default_interface is None:
        return None
    return Stated(survey.default_interface, f"default route of {survey.host}")


def _usual_leaf(facts: SiteFacts, group: NodeGroup) -> int | None:
    """Return the most frequent number of the group's nodes below one leaf or in one block."""
    names = {node.name for node in group.nodes}
    sizes = Counter(len(names & set(leaf.nodes)) for leaf in facts.cluster.leaves)
    del sizes[0]
    return max(sizes, key=lambda size: (sizes[size], size)) if sizes else None


def _switches(facts: SiteFacts, group: NodeGroup) -> tuple[Tree | None, list[str]]:
    kind, leaf = facts.cluster.topology, _usual_leaf(facts, group)
    if kind == "none":
        return None, []
    if kind == "other" or leaf is None:
        name = facts.cluster.config.get("TopologyPlugin")
        return None, [f"{name} is not described: a profile knows trees and blocks only"]
    section: Tree = {
        "plugin": Stated(kind, f"TopologyPlugin, {_TOPOLOGY_SHOWN}"),
        "nodes_per_leaf": Stated(leaf, f"{_TOPOLOGY_SHOWN}, most frequent size"),
    }
    return section, []
