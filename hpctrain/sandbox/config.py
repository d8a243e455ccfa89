"""Generate the text of a sandbox's configuration files.

Belongs here: slurm.conf, gres.conf, topology.conf or topology.yaml, and cgroup.conf, as pure
functions of the sandbox's shape and location. Does not belong here: writing them, or starting
anything.

Source of every unusual key: slurm.conf(5), or trials on Slurm 22.05.8. The generated file gives
the reason beside the key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import UsageError
from hpctrain.sandbox.paths import Ports, SandboxPaths
from hpctrain.sandbox.shape import PartitionShape, SandboxShape, bracket
from hpctrain.slurm.settings import capabilities_of_release

# Characters that slurm.conf(5) gives a meaning: comments, quotes, host lists, name patterns.
# Blanks are quoted.
_UNWRITABLE = re.compile(r'[\n\r"#%,\[\]\\]')
# With this many slurmds on one machine, 5 s is too short for a reply.
_CROWDED_NODES = 33
# slurmstepds report the end of a step through a tree of this width, and one above a lost node waits
# 60 s for it (Slurm: REVERSE_TREE_WIDTH, REVERSE_TREE_CHILDREN_TIMEOUT). A healthy node whose
# slurmstepd takes longer than UnkillableStepTimeout is drained ("Kill task failed").
_TREE_WIDTH = 7


@dataclass(frozen=True)
class ConfigFile:
    """One file beside slurm.conf."""

    name: str
    text: str


@dataclass(frozen=True)
class Site:
    """Inputs of the text besides the shape.

    `version` is Slurm's, such as (22, 5). `plugins` is the directory of its plugins, None for the
    compiled-in one.
    """

    paths: SandboxPaths
    ports: Ports
    user: str
    version: tuple[int, int]
    plugins: Path | None = None


def config_files(shape: SandboxShape, site: Site) -> tuple[ConfigFile, ...]:
    """Generate all files, each with the name that Slurm expects beside slurm.conf.

    Raises UsageError when a path has a character that cannot be written in these files.
    """
    for path in (site.paths.directory, site.paths.sockets, site.plugins):
        match = _UNWRITABLE.search(str(path or ""))
        if match:
            raise UsageError(
                f"a sandbox cannot lie in {path}: slurm.conf has no way to write {match[0]!r}",
                "choose another directory",
            )
    files = [
        ConfigFile("slurm.conf", slurm_conf(shape, site)),
        ConfigFile("gres.conf", gres_conf(shape, site)),
    ]
    if shape.switches:
        files.append(topology_file(shape, site.version))
    if shape.job_submit_lua:
        files.append(ConfigFile("job_submit.lua", shape.job_submit_lua))
    if capabilities_of_release(site.version).needs_cgroup_plugin:
        files.append(ConfigFile("cgroup.conf", _CGROUP_CONF))
    return tuple(files)


def slurm_conf(shape: SandboxShape, site: Site) -> str:
    """Generate the main file."""
    accounting = "# No accounting: sacct answers with an error."
    if shape.accounting == "filetxt":
        accounting = f"JobCompType=jobcomp/filetxt\nJobCompLoc={quoted(site.paths.jobcomp)}"
    if shape.accounting == "slurmdbd":
        accounting = _accounting(site)
    blocks = (
        _daemon_settings(shape, site),
        _job_settings(shape, site.version),
        _preemption(shape, site.version),
        *_of_the_site(shape, site.paths),
        accounting,
        _nodes(shape, site.ports),
        "\n".join(_partition(partition, shape) for partition in shape.partitions),
    )
    return "\n\n".join(blocks) + "\n"


def gres_conf(shape: SandboxShape, site: Site) -> str:
    """Declare GPUs as links to /dev/null: a gpu without File= makes its node invalid."""
    lines = ["AutoDetect=off"]
    kinds: dict[tuple[str, int], list[str]] = {}
    for group in shape.node_groups:
        kinds.setdefault((group.gpu_type, group.gpus), []).append(group.names())
    for (kind, gpus), names in kinds.items():
        if gpus:
            nodes = shape.node_range if len(kinds) == 1 else ",".join(names)
            device = site.paths.devices / f"gpu{bracket(0, gpus)}"
            lines.append(f"NodeName={nodes} Name=gpu Type={kind} File={device}")
    return "\n".join(lines) + "\n"


def topology_conf(shape: SandboxShape, version: tuple[int, int]) -> str:
    """Generate blocks for topology/block or a tree for topology/tree: topology.conf(5)."""
    if topology_plugin(shape, version) == "block":
        leaves = [switch for switch in shape.switches if switch.nodes]
        blocks = [f"BlockName={leaf.name} Nodes={','.join(leaf.nodes)}\n" for leaf in leaves]
        return "".join((*blocks, f"BlockSizes={min(len(leaf.nodes) for leaf in leaves)}\n"))
    lines = [
        f"SwitchName={switch.name} Nodes={','.join(switch.nodes)}\n"
        if switch.nodes
        else f"SwitchName={switch.name} Switches={','.join(switch.switches)}\n"
        for switch in shape.switches
    ]
    return "".join(lines)


def topology_file(shape: SandboxShape, version: tuple[int, int]) -> ConfigFile:
    """Choose the file that describes the switches of a sandbox."""
    if _is_in_yaml(shape, version):
        return ConfigFile("topology.yaml", topology_yaml(shape))
    return ConfigFile("topology.conf", topology_conf(shape, version))


def topology_yaml(shape: SandboxShape) -> str:
    """Generate the same for topology.yaml(5), of which JSON is a part."""
    leaves = [switch for switch in shape.switches if switch.nodes]
    if shape.leaves_are_blocks:
        blocks = [{"block": leaf.name, "nodes": ",".join(leaf.nodes)} for leaf in leaves]
        sizes = [min(len(leaf.nodes) for leaf in leaves)]
        kind: dict[str, object] = {"block": {"block_sizes": sizes, "blocks": blocks}}
    else:
        switches = [
            {"switch": one.name, "nodes": ",".join(one.nodes)}
            if one.nodes
            else {"switch": one.name, "children": ",".join(one.switches)}
            for one in shape.switches
        ]
        kind = {"tree": {"switches": switches}}
    return json.dumps([{"topology": "halls", "cluster_default": True, **kind}], indent=2) + "\n"


def _is_in_yaml(shape: SandboxShape, version: tuple[int, int]) -> bool:
    """Tell whether the switches stand in topology.yaml, so that slurm.conf names no plugin."""
    return shape.topology_yaml and capabilities_of_release(version).hides_topology


def topology_plugin(shape: SandboxShape, version: tuple[int, int]) -> str:
    """Return the topology plugin of a sandbox with switches; a tree where there are no blocks."""
    has_blocks = capabilities_of_release(version).has_blocks
    return "block" if shape.leaves_are_blocks and has_blocks else "tree"


# Without this, 24.05 and newer need a usable cgroup file system, which an ordinary user lacks.
# Older versions refuse the key, and with proctrack/linuxproc they need no such file.
_CGROUP_CONF = "CgroupPlugin=disabled\n"


def _daemon_settings(shape: SandboxShape, site: Site) -> str:
    paths = site.paths
    plugins = f"PluginDir={quoted(site.plugins)}\n" if site.plugins else ""
    return f"""\
# Made by `hpctrain sandbox`; written anew by every start.
ClusterName={shape.cluster_name}
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={site.ports.controller}
# Only this user is served: without root a slurmd cannot become anybody else.
SlurmUser={site.user}
SlurmdUser={site.user}
AuthType=auth/munge
# cred_expire is also the delay of a requeue (the default 120 means 121 s); less than 5 means 120.
AuthInfo={quoted(f"socket={paths.munge_socket},cred_expire=5")}
# Otherwise every daemon listens on all network devices.
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny

{plugins}StateSaveLocation={quoted(paths.state)}
SlurmdSpoolDir={quoted(paths.spool / "%n")}
SlurmctldPidFile={quoted(paths.pid_file("slurmctld"))}
SlurmdPidFile={quoted(paths.pid_file("slurmd-%n"))}
SlurmctldLogFile={quoted(paths.log("slurmctld"))}
SlurmdLogFile={quoted(paths.log("slurmd-%n"))}
# There is no mail here, and the default program is missing on most machines.
MailProg=/bin/true"""


def _job_settings(shape: SandboxShape, version: tuple[int, int]) -> str:
    message_seconds = 5 if shape.nodes < _CROWDED_NODES else 20
    unkillable_seconds = 60 if shape.nodes <= _TREE_WIDTH else 180
    plugin = topology_plugin(shape, version)
    named = shape.switches and not _is_in_yaml(shape, version)
    topology = f"\nTopologyPlugin=topology/{plugin}" if named else ""
    return f"""\
# Neither cgroups nor root are needed this way.
ProctrackType=proctrack/{shape.process_tracking}
TaskPlugin=task/{"affinity" if shape.binds_tasks else "none"}
JobAcctGatherType=jobacct_gather/linux
MpiDefault=none
# An unprivileged daemon cannot set the groups of another user.
LaunchParameters=disable_send_gids
# Claim the CPUs and the memory of a big node, whatever this machine has.
SlurmdParameters=config_overrides

KillWait={shape.kill_wait_seconds}
SlurmdTimeout={shape.slurmd_timeout_seconds}
SlurmctldTimeout=10
MessageTimeout={message_seconds}
BatchStartTimeout=10
InactiveLimit=0
# Less than 60 drains nodes ("Kill task failed") after a short outage of the controller.
UnkillableStepTimeout={unkillable_seconds}
# How long `scontrol show job` knows a finished job.
MinJobAge=300
# 1, not 2: with 2 a node that crashes and returns quickly loses its job without a word.
ReturnToService=1

SchedulerType=sched/backfill
# Look every 2 s instead of every 30 s to 60 s: somebody is waiting for this.
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue={int(shape.requeue)}
# A job that ends with 85 goes back into the queue, as on sites that support it.
RequeueExit=85{topology}"""


def _preemption(shape: SandboxShape, version: tuple[int, int]) -> str:
    if shape.preempt_type == "none":
        return "PreemptType=preempt/none"
    lines = ["PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE"]
    if shape.user_signal_on_preempt:
        # Each Slurm rejects the other's spelling or ignores it.
        lines.append(
            "PreemptParameters=send_user_signal"
            if capabilities_of_release(version).has_preempt_parameters
            else "SlurmctldParameters=preempt_send_user_signal"
        )
    return "\n".join(lines)


def _of_the_site(shape: SandboxShape, paths: SandboxPaths) -> Iterator[str]:
    """Generate what a site has by choice: licences, a plug-in, variables of its jobs."""
    if shape.licenses:
        yield f"Licenses={','.join(shape.licenses)}"
    if shape.job_submit_lua:
        yield "JobSubmitPlugins=lua"
    if shape.site.modules is not None:
        # Where jobs find the module system, as /etc/profile.d says at sites: slurm.conf(5).
        yield f"TaskProlog={quoted(paths.task_prolog)}"


def _accounting(site: Site) -> str:
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={site.ports.accounting}
# The socket of munge: what AuthInfo says does not count here.
AccountingStoragePass={quoted(site.paths.munge_socket)}
# As on sites: nobody without an account, and limits of associations and QOS hold.
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment"""


_NODES_HEAD = """\
GresTypes=gpu
# One line for all that are alike: every slurmd parses it, and 256 lines make the start three times
# slower."""


def _nodes(shape: SandboxShape, ports: Ports) -> str:
    lines = []
    for group in shape.node_groups:
        gres = f" Gres=gpu:{group.gpu_type}:{group.gpus}" if group.gpus else ""
        feature = f" Features={','.join(group.features)}" if group.features else ""
        layout = ""
        if shape.sockets_per_node > 1 or group.threads_per_core > 1:
            cores = group.cpus // shape.sockets_per_node // group.threads_per_core
            layout = (
                f" Sockets={shape.sockets_per_node} CoresPerSocket={cores} "
                f"ThreadsPerCore={group.threads_per_core}"
            )
        lines.append(
            f"NodeName={group.names()} NodeHostname=localhost NodeAddr=127.0.0.1 "
            f"Port={bracket(ports.first_node + group.first, group.nodes)} CPUs={group.cpus}"
            f"{layout} RealMemory={group.memory_mib}{gres}{feature} State=UNKNOWN"
        )
    return "\n".join((_NODES_HEAD, *lines))


def _partition(partition: PartitionShape, shape: SandboxShape) -> str:
    # slurm.conf(5): the resolution of MaxTime is a minute, and seconds are rounded up.
    seconds = partition.max_walltime_seconds
    max_time = "INFINITE" if seconds is None else max(1, -(-seconds // 60))
    settings = [
        f"PartitionName={partition.name}",
        f"Nodes={partition.nodes}",
        f"Default={'YES' if partition.default else 'NO'}",
        f"MaxTime={max_time}",
        f"PriorityTier={partition.priority_tier}",
        "State=UP",
    ]
    if shape.preempt_type == "partition_prio":
        settings.append(f"PreemptMode={partition.preempt_mode}")
        settings.append(f"GraceTime={partition.grace_seconds}")
    return " ".join(settings)


def quoted(value: Path | str) -> str:
    """Quote a value with blanks, as src/common/parse_config.c (`keyvalue_pattern`) expects."""
    return f'"{value}"' if re.search(r"\s", str(value)) else str(value)
