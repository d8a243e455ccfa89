"""Clusters that these tests have never seen: what their Slurm would print.

Constructed by the documented formats of scontrol(1), sacctmgr(1), nvidia-smi and rocm-smi, and by
published sizes of the systems; none of it was captured. Belongs here: texts. Does not belong here:
what is expected of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from hpctrain.base.errors import SlurmUnreachableError
from hpctrain.site.survey import FORMAT
from hpctrain.slurm.cluster_queries import ASSOCIATION_FIELDS, QOS_FIELDS
from hpctrain.slurm.process import Command, CommandResult

CONFIG = """\
Configuration data as of 2026-03-01T12:00:00
AccountingStorageEnforce = {enforce}
AccountingStorageType   = {storage}
AuthInfo                = (null)
AuthType                = auth/munge
ClusterName             = {name}
CliFilterPlugins        = {filter}
GresTypes               = gpu
JobRequeue              = {requeue}
JobSubmitPlugins        = {submit}
KillWait                = {kill_wait} sec
TreeWidth               = {tree_width}
UnkillableStepTimeout   = {unkillable} sec
MaxArraySize            = 1001
OverTimeLimit           = {over} min
PreemptMode             = {preempt_mode}
PreemptParameters       = {preempt_parameters}
PreemptType             = {preempt_type}
PropagateResourceLimits = NONE
RequeueExit             = (null)
SchedulerParameters     = {scheduler}
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
SLURM_VERSION           = {version}
SlurmctldParameters     = {controller}
SwitchType              = {switch}
TaskPlugin              = task/cgroup,task/affinity
TopologyPlugin          = {topology}

Slurmctld(primary) at ctl1 is UP
"""
_CONFIG = {
    "enforce": "none",
    "storage": "(null)",
    "name": "foreign",
    "filter": "(null)",
    "requeue": "1",
    "submit": "(null)",
    "kill_wait": "30",
    "tree_width": "50",
    "unkillable": "60",
    "over": "0",
    "preempt_mode": "OFF",
    "preempt_parameters": "(null)",
    "preempt_type": "preempt/none",
    "scheduler": "(null)",
    "version": "24.11.5",
    "controller": "(null)",
    "switch": "(null)",
    "topology": "topology/default",
}


def config(**changes: str) -> str:
    return CONFIG.format(**{**_CONFIG, **changes})


def node(
    name: str,
    gres: str,
    *,
    partitions: str,
    cpus: int = 224,
    memory: int = 2063937,
    reserved: int = 0,
    features: str = "(null)",
    state: str = "IDLE",
    threads: int = 2,
    arch: str = "x86_64",
) -> str:
    cores = cpus // 2 // threads
    spec = f"MemSpecLimit={reserved} " if reserved else ""
    return (
        f"NodeName={name} Arch={arch} CoresPerSocket={cores}  "
        f"CPUAlloc=0 CPUEfctv={cpus} CPUTot={cpus} "
        f"CPULoad=0.10 AvailableFeatures={features} ActiveFeatures={features} Gres={gres} "
        f"NodeAddr={name} NodeHostName={name} Version=24.11.5 "
        "OS=Linux 5.14.0-427.el9.x86_64 #1 SMP PREEMPT_DYNAMIC "
        f"RealMemory={memory} AllocMem=0 FreeMem=1900000 Sockets=2 Boards=1 {spec}State={state} "
        f"ThreadsPerCore={threads} TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A "
        f"Partitions={partitions}  "
        "BootTime=2026-02-01T08:00:00 SlurmdStartTime=2026-02-01T08:05:00 "
        f"CfgTRES=cpu={cpus},mem={memory}M,billing={cpus},gres/gpu=8 AllocTRES= "
        "Reason=cooling Gres=gpu:fake:99 [root@2026-02-03T10:00:00]\n"
    )


def partition(name: str, **changes: str) -> str:
    values = {
        "AllowGroups": "ALL",
        "AllowAccounts": "ALL",
        "AllowQos": "ALL",
        "AllocNodes": "ALL",
        "Default": "NO",
        "QoS": "N/A",
        "GraceTime": "0",
        "Hidden": "NO",
        "MaxNodes": "UNLIMITED",
        "MinNodes": "0",
        "MaxTime": "UNLIMITED",
        "PriorityTier": "1",
        "RootOnly": "NO",
        "ReqResv": "NO",
        "OverSubscribe": "NO",
        "PreemptMode": "OFF",
        "State": "UP",
        "DefMemPerNode": "UNLIMITED",
        **changes,
    }
    words = " ".join(f"{key}={value}" for key, value in values.items())
    return f"PartitionName={name} {words} TotalNodes=1\n"


def qos(name: str, **values: str) -> str:
    """A line of `sacctmgr -nP show qos` with the fields that are asked for."""
    return "|".join({**dict.fromkeys(QOS_FIELDS, ""), "Name": name, **values}.values()) + "\n"


def association(account: str, **values: str) -> str:
    """A line of `sacctmgr -nP show user withassoc`; the account is the default one."""
    usual = {**dict.fromkeys(ASSOCIATION_FIELDS, ""), "DefaultAccount": account}
    return "|".join({**usual, "Account": account, **values}.values()) + "\n"


class Answers:
    """A runner that answers commands by their words behind `show`."""

    def __init__(self, answers: Mapping[str, str], failures: Mapping[str, str] | None = None):
        self.answers, self.failures = dict(answers), dict(failures or {})
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, command: Command) -> CommandResult:
        self.asked.append(command.argv)
        what = command.argv[command.argv.index("show") + 1]
        if what in self.failures:
            if self.failures[what] == "away":
                raise SlurmUnreachableError(f"no answer from `{command.argv[0]}`")
            return CommandResult(1, "", self.failures[what])
        empty = {"licenses": "No licenses configured in Slurm.\n", "reservation": "No res.\n"}
        return CommandResult(0, self.answers.get(what, empty.get(what, "")), "")


DGX_H100 = {
    "config": config(
        name="dgx",
        preempt_type="preempt/partition_prio",
        preempt_mode="REQUEUE",
        preempt_parameters="send_user_signal",
        topology="topology/tree",
        scheduler="bf_interval=30,max_switch_wait=86400",
    ),
    "node": "".join(
        node(f"dgx{i:03d}", "gpu:h100:8(S:0-1)", partitions="batch,spot", reserved=15361)
        for i in range(1, 65)
    ),
    "partition": partition("batch", Default="YES", MaxTime="2-00:00:00", PriorityTier="10")
    + partition("spot", PreemptMode="REQUEUE", GraceTime="120", MaxNodes="32")
    + partition("admin", RootOnly="YES"),
    "topology": "".join(
        f"SwitchName=leaf{i} Level=0 LinkSpeed=1 Nodes=dgx[{16 * i + 1:03d}-{16 * i + 16:03d}]\n"
        for i in range(4)
    )
    + "SwitchName=spine Level=1 LinkSpeed=1 Nodes=dgx[001-064] Switches=leaf[0-3]\n",
}
# LUMI-G's public sizes; `mi250` is no name of the catalogue, whose MI250X is one die.
MI250X = {
    "config": config(
        name="lumi-like",
        version="23.02.7",
        switch="switch/hpe_slingshot",
        storage="accounting_storage/slurmdbd",
        enforce="associations,limits,qos,safe",
        submit="lua",
    ),
    "node": "".join(
        node(
            f"nid00{5000 + i}",
            "gpu:mi250:8",
            partitions="standard-g",
            cpus=128,
            memory=512000,
            features="AMD_EPYC_7A53,x1000",
        )
        for i in range(4)
    ),
    "partition": partition("standard-g", MaxTime="2-00:00:00", OverSubscribe="EXCLUSIVE"),
    "user": "project_1|project_1||normal,debug|normal||200|||gres/gpu=1024|\n"
    "project_1|project_2||normal|||||||\n",
    "qos": qos("normal", PreemptMode="cluster", GraceTime="00:00:00")
    + qos("debug", PreemptMode="cluster", GraceTime="00:00:00", MaxWall="00:30:00"),
}
GB200 = {
    "config": config(name="nvl72", topology="topology/block", version="25.05.3"),
    "node": "".join(
        node(
            f"rack{rack}-tray{tray:02d}",
            "gpu:gb200:4",
            partitions="gb200",
            cpus=144,
            memory=890000,
            state="IDLE+DRAIN" if (rack, tray) == (1, 18) else "IDLE",
        )
        for rack in (1, 2)
        for tray in range(1, 19)
    ),
    "partition": partition("gb200", Default="YES", MaxTime="1-00:00:00"),
    "topology": "BlockName=rack1 BlockIndex=0 Nodes=rack1-tray[01-18] BlockSize=18\n"
    "BlockName=rack2 BlockIndex=1 Nodes=rack2-tray[01-18] BlockSize=18\n"
    "AggregatedBlock=rack[1-2] BlockIndex=2 Nodes=rack[1-2]-tray[01-18] BlockSize=36\n",
}
# A university: four kinds of nodes, preemption by QOS, one partition with two kinds of GPUs.
UNIVERSITY = {
    "config": config(
        name="uni",
        storage="accounting_storage/slurmdbd",
        enforce="associations,limits,qos",
        preempt_type="preempt/qos",
        preempt_mode="REQUEUE",
        submit="lua,require_timelimit",
        filter="lua",
        requeue="0",
        controller="rl_enable,rl_bucket_size=50",
        scheduler="no_env_cache,requeue_setup_env_fail",
    ),
    "node": "".join(
        [node(f"cpu{i}", "(null)", partitions="cpu", cpus=64) for i in range(3)]
        + [node(f"v{i}", "gpu:v100:4", partitions="gpu", features="v100,v100-32gb") for i in (1, 2)]
        + [node(f"a{i}", "gpu:a100:4(S:0-1)", partitions="gpu,long") for i in (1, 2, 3)]
        + [node("h1", "gpu:h100:4,shard:8", partitions="h100", memory=1000000)]
    ),
    "partition": partition("cpu", Default="YES")
    + partition("gpu", MaxTime="1-00:00:00", AllocNodes="login[1-2]", DefMemPerCPU="4000")
    + partition("long", MaxTime="7-00:00:00", AllowAccounts="physics")
    + partition("h100", AllowAccounts="ml"),
    "user": "ml|ml||scavenge|scavenge|4|20|gres/gpu=8|1-00:00:00||\n",
    "qos": qos("normal", Preempt="scavenge", PreemptMode="cluster", MaxSubmitJobsPU="20")
    + qos("scavenge", PreemptMode="requeue", GraceTime="00:00:45"),
    "licenses": "LicenseName=matlab Total=10 Used=2 Free=8 Reserved=0 Remote=no\n",
    "reservation": "ReservationName=summer StartTime=2026-07-01T06:00:00 "
    "EndTime=2026-07-02T18:00:00 Duration=1-12:00:00 Nodes=a[1-3] NodeCnt=3 CoreCnt=192 "
    "Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS Users=root Accounts=(null)\n",
}


def joined_matrix(gpus: int, link: str = "NV18") -> str:
    """`nvidia-smi topo -m` of a node whose GPUs are all joined."""
    names = [f"GPU{i}" for i in range(gpus)]
    head = "\t".join(["", *names, "NIC0", "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    rows = [
        "\t".join([name, *(" X " if name == other else link for other in names), "PIX", "0-55"])
        for name in names
    ]
    legend = (
        "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    )
    return "\n".join([f"\x1b[4m{head}\x1b[0m", *rows, legend])


PAIRS = (
    "\tGPU0\tGPU1\tGPU2\tGPU3\n"
    "GPU0\t X \tNV12\tSYS\tSYS\nGPU1\tNV12\t X \tSYS\tSYS\n"
    "GPU2\tSYS\tSYS\t X \tNV12\nGPU3\tSYS\tSYS\tNV12\t X \n"
)
ROCM = json.dumps(
    {
        f"card{i}": {
            "VRAM Total Memory (B)": "68702699520",
            "VRAM Total Used Memory (B)": "10960896",
            "Card series": "AMD INSTINCT MI250 (MCM) OAM AC MBA",
            "Card model": "0x0b0c",
            "Card vendor": "Advanced Micro Devices, Inc. [AMD/ATI]",
        }
        for i in range(8)
    }
)
MISSING = {"returncode": None, "stdout": "", "stderr": "No such file or directory"}


def survey(**changes: object) -> str:
    """The JSON of a survey; `commands` are those that succeeded, by name."""
    commands = {
        name: dict(MISSING)
        for name in (
            *("nvidia-smi", "nvidia-smi topo", "rocm-smi", "df", "enroot", "apptainer"),
            *("singularity", "srun", "module", "sbatch", "scontrol"),
        )
    }
    given = changes.pop("commands", {})
    assert isinstance(given, dict)
    for name, stdout in given.items():
        commands[name] = {"returncode": 0, "stdout": stdout, "stderr": ""}
    values = {
        "format": FORMAT,
        "host": "dgx001",
        "python": "3.6.8",
        "python_path": "/usr/bin/python3",
        "interpreters": {"/usr/bin/python3": "3.6.8", "/usr/bin/python3.11": "3.11.9"},
        "machine": "x86_64",
        "system": 'NAME="Rocky Linux"\nPRETTY_NAME="Rocky Linux 8.10 (Green Obsidian)"\n',
        "cpus": 224,
        "commands": commands,
        "infiniband": {},
        "interfaces": {},
        "routes": "Iface\tDestination\tGateway\neth0\t00000000\t0100000A\n",
        "mounts": "/dev/sda1 / xfs rw 0 0\n",
        "limits": {"core": [0, -1], "memlock": [-1, -1], "nofile": [1024, 524288]},
        "variables": {},
        "gpu_devices": [],
        **changes,
    }
    return json.dumps(values)


DGX_SURVEY = survey(
    commands={
        "nvidia-smi": "NVIDIA H100 80GB HBM3, 81559\n" * 8,
        "nvidia-smi topo": joined_matrix(8),
        "srun": "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]\n",
        "enroot": "3.4.1\n",
        "module": "function\nModules based on Lua: Version 8.7.53  2024-10-12\n"
        "init=/usr/share/lmod/lmod/init/bash\n",
        "scontrol": "slurm 24.11.5\n",
        "sbatch": "",
    },
    gpu_devices=[f"/dev/nvidia{i}" for i in range(8)],
    infiniband={
        **{
            f"mlx5_{i}/1": {
                "rate": "400 Gb/sec (4X NDR)",
                "link_layer": "InfiniBand",
                "state": "4: ACTIVE",
            }
            for i in range(8)
        },
        "mlx5_8/1": {
            "rate": "200 Gb/sec (4X HDR)",
            "link_layer": "InfiniBand",
            "state": "4: ACTIVE",
        },
        "mlx5_9/1": {
            "rate": "400 Gb/sec (4X NDR)",
            "link_layer": "InfiniBand",
            "state": "1: DOWN",
        },
    },
    mounts=(
        "/dev/sda1 / xfs rw 0 0\n"
        "10.0.0.1@o2ib:/lustre /lustre lustre rw,flock 0 0\n"
        "nfs1:/home /home nfs4 rw 0 0\n"
        "nfs1:/sw /opt/sw nfs4 ro 0 0\n"
        "/dev/nvme1n1 /raid xfs rw 0 0\n"
        "tmpfs /tmp tmpfs rw 0 0\n"
    ),
)
