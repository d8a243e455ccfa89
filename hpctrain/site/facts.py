"""Everything that is known about a site: its Slurm, one of its nodes, and the login node.

Belongs here: these records, and parsing the survey of a node. Does not belong here: reading a node
(`survey`), or what follows from the facts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hpctrain.base.disk_usage import Directory
from hpctrain.site.survey import FORMAT, MARK
from hpctrain.slurm.cluster_records import ClusterFacts

# ----------------------------------------------------------------------------------------------
# Turn the survey of a node into typed facts: GPUs, NVLink, RDMA cards, mounts, launchers. Pure.
# Formats: `nvidia-smi --query-gpu` and the matrix of `nvidia-smi topo -m` (NVIDIA's documentation
# of nvidia-smi), `rocm-smi --json` (ROCm's documentation), sysfs of the kernel (sysfs-class-
# infiniband), /proc/mounts (proc(5)). Those of the GPUs' tools were never run by the tests.
#
# Raises ValueError for text that does not have the expected form.


StorageKind = Literal["lustre", "gpfs", "nfs", "weka", "local", "other"]
# Types of /proc/mounts. `other`: parallel or distributed, without a kind of its own.
_SHARED: dict[str, StorageKind] = {
    "lustre": "lustre",
    "gpfs": "gpfs",
    "nfs": "nfs",
    "nfs4": "nfs",
    "wekafs": "weka",
    "beegfs": "other",
    "ceph": "other",
    "cifs": "other",
    "panfs": "other",
    "fuse.juicefs": "other",
    "fuse.daos": "other",
    "fuse.glusterfs": "other",
}
_DISKS = frozenset({"ext4", "ext3", "xfs", "btrfs", "zfs", "overlay"})
# System directories: no data of users lies there.
_SYSTEM_ROOTS = ("/boot", "/etc", "/proc", "/sys", "/dev", "/run", "/usr", "/opt", "/var", "/snap")


@dataclass(frozen=True)
class Mount:
    """A mounted file system that data may lie on."""

    path: str
    kind: StorageKind
    device: str


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA card; `bits_per_second` per direction as the driver states it."""

    card: str
    bits_per_second: float
    is_ethernet: bool
    is_active: bool


@dataclass(frozen=True)
class Interface:
    """A network interface; `bits_per_second` is None where the kernel does not know."""

    name: str
    is_up: bool
    bits_per_second: float | None = None


@dataclass(frozen=True)
class GpuSurvey:
    """The GPUs that a job sees on a node; memory as the driver reports it."""

    vendor: Literal["nvidia", "amd"]
    name: str
    memory_bytes: int
    count: int
    # GPUs that reach each other over NVLink inside this node; None: the matrix was not printed
    joined: int | None = None


@dataclass(frozen=True)
class ModuleSystem:
    """Environment modules of a machine; `init` is the file that gives a shell `module`."""

    name: str
    version: str = ""
    init: str | None = None
    is_cray: bool = False

    @property
    def words(self) -> str:
        cray = " (Cray PE)" if self.is_cray else ""
        return f"{self.name} {self.version}".rstrip() + cray


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """A machine of a site as a process on it sees it. `variables` are those that name paths."""

    host: str
    machine: str = ""
    modules: ModuleSystem | None = None
    mounts: tuple[Mount, ...] = ()
    ports: tuple[RdmaPort, ...] = ()
    default_interface: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NodeSurvey(MachineFacts):
    """One node as a job sees it. `may_submit`: `sbatch --test-only` was accepted there; None is
    unknown. `limits` are (soft, hard), -1 for none. `interpreters` have their versions. `missing`
    are programs of Slurm that a job does not find.
    """

    python: str
    cpus: int
    gpus: tuple[GpuSurvey, ...] = ()
    gpu_devices: int = 0
    interfaces: tuple[Interface, ...] = ()
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    launchers: tuple[str, ...] = ()
    system: str = ""
    interpreters: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    may_submit: bool | None = None
    submit_words: str = ""


def survey_line(output: str) -> str | None:
    """Find the survey in the output of a job, which a prolog may have written to as well."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    return lines[-1].removeprefix(MARK) if lines else None


def node_survey(text: str) -> NodeSurvey:
    """Parse the JSON of a survey. Raises ValueError."""
    try:
        raw = json.loads(text)
        if raw["format"] != FORMAT:
            raise ValueError(f"a survey of format {raw['format']}")
        commands = raw["commands"]
        launchers = ["pyxis"] if "--container-image" in commands["srun"]["stdout"] else []
        launchers += [
            name
            for name in ("enroot", "apptainer", "singularity")
            if commands[name]["returncode"] == 0
        ]
        code = commands["sbatch"]["returncode"]
        return NodeSurvey(
            host=str(raw["variables"].get("SLURMD_NODENAME") or raw["host"]),
            python=str(raw["python"]),
            cpus=int(raw["cpus"]),
            gpus=_gpus(commands),
            gpu_devices=len(raw["gpu_devices"]),
            ports=rdma_ports(raw["infiniband"]),
            interfaces=tuple(
                Interface(
                    name,
                    values["operstate"] == "up",
                    1e6 * float(values["speed"]) if _is_positive(values["speed"]) else None,
                )
                for name, values in raw["interfaces"].items()
            ),
            default_interface=default_interface(raw["routes"]),
            mounts=mounts(raw["mounts"]),
            limits={name: (int(a), int(b)) for name, (a, b) in raw["limits"].items()},
            launchers=tuple(launchers),
            machine=str(raw["machine"]),
            system=system_name(raw["system"]),
            interpreters={str(path): str(text) for path, text in raw["interpreters"].items()},
            modules=module_system(commands["module"]["stdout"]),
            missing=tuple(
                name
                for name in ("srun", "sbatch", "scontrol")
                if commands[name]["returncode"] is None
            ),
            may_submit=None if code is None else code == 0,
            submit_words=commands["sbatch"]["stderr"].strip(),
            variables={str(name): str(value) for name, value in raw["variables"].items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the survey of a node: {error}") from error


def module_system(text: str) -> ModuleSystem | None:
    """Parse what the survey's program says about `module`; None: no shell has it.

    Lmod prints `Modules based on Lua: Version 8.7.53 ...`, environment-modules `Modules Release
    5.3.0 (2023-05-14)`, version 3 of it `VERSION=3.2.10`.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or lines[0] not in ("function", "file", "alias"):
        return None
    init = [line.removeprefix("init=") for line in lines if line.startswith("init=")]
    told = next((line for line in lines[1:] if re.search(r"(?i)version|release", line)), "")
    version = re.search(r"\d+(?:\.\d+)+", told)
    return ModuleSystem(
        name="Lmod" if "lua" in told.lower() else "environment-modules",
        version=version[0] if version else "",
        init=init[0] if init else None,
        is_cray="cray" in lines,
    )


def system_name(text: str) -> str:
    """Read the name of a distribution from os-release(5)."""
    found = re.search(r'(?m)^PRETTY_NAME="?([^"\n]*)', text)
    return found[1] if found else "of unknown system"


def _gpus(commands: Mapping[str, Any]) -> tuple[GpuSurvey, ...]:
    if commands["nvidia-smi"]["returncode"] == 0:
        matrix = commands["nvidia-smi topo"]
        joined = nvlink_group(matrix["stdout"]) if matrix["returncode"] == 0 else None
        return nvidia_gpus(commands["nvidia-smi"]["stdout"], joined)
    if commands["rocm-smi"]["returncode"] == 0:
        return amd_gpus(commands["rocm-smi"]["stdout"])
    return ()


def nvidia_gpus(table: str, joined: int | None = None) -> tuple[GpuSurvey, ...]:
    """Parse `NAME, MIB` lines of `nvidia-smi --query-gpu=name,memory.total`, without units."""
    counts: dict[tuple[str, int], int] = {}
    for line in filter(None, (one.strip() for one in table.splitlines())):
        name, _, mebibytes = line.rpartition(",")
        if not mebibytes.strip().isdecimal():
            continue  # `[N/A]`, or an error of one device among the others
        key = (name.strip(), int(mebibytes) * 2**20)
        counts[key] = counts.get(key, 0) + 1
    return tuple(
        GpuSurvey("nvidia", name, memory, count, joined) for (name, memory), count in counts.items()
    )


def amd_gpus(text: str) -> tuple[GpuSurvey, ...]:
    """Parse `rocm-smi --showproductname --showmeminfo vram --json`; each die is a card.

    Keys changed case between releases (`Card series`, `Card Series`).
    """
    try:
        cards = json.loads(text[text.index("{") :])
    except ValueError as error:
        raise ValueError(f"not the JSON of rocm-smi: {error}") from error
    counts: dict[tuple[str, int], int] = {}
    for card in cards.values():
        values = {str(key).lower(): str(value) for key, value in card.items()}
        memory = values.get("vram total memory (b)", "")
        if memory.isdecimal():
            key = (values.get("card series", "AMD GPU"), int(memory))
            counts[key] = counts.get(key, 0) + 1
    return tuple(GpuSurvey("amd", name, memory, n) for (name, memory), n in counts.items())


def nvlink_group(matrix: str) -> int | None:
    """Count the GPUs of the largest group that NVLink joins, from `nvidia-smi topo -m`.

    Cells are `NV18` for 18 links, or PIX, PXB, PHB, NODE, SYS without one. 1: no GPU has NVLink;
    None: the text has no matrix.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)  # the head line is underlined
    rows = {
        words[0]: words[1:]
        for line in plain.splitlines()
        if (words := line.split()) and re.fullmatch(r"GPU\d+", words[0]) and "X" in words
    }
    names = list(rows)
    if not names:
        return None
    left, largest = set(names), 1
    while left:
        group, border = set(), {left.pop()}
        while border:
            one = border.pop()
            group.add(one)
            cells = zip(names, rows[one], strict=False)
            border |= {other for other, cell in cells if re.match(r"NV\d", cell)} - group
        left -= group
        largest = max(largest, len(group))
    return largest


def rdma_ports(raw: Mapping[str, Mapping[str, str]]) -> tuple[RdmaPort, ...]:
    """Parse `rate` such as `400 Gb/sec (4X NDR)` and `state` such as `4: ACTIVE`."""
    found = []
    for port, values in raw.items():
        match = re.match(r"([\d.]+) Gb/sec", values["rate"])
        if match:
            found.append(
                RdmaPort(
                    card=port.partition("/")[0],
                    bits_per_second=float(match[1]) * 1e9,
                    is_ethernet=values["link_layer"] == "Ethernet",
                    is_active=values["state"].endswith("ACTIVE"),
                )
            )
    return tuple(found)


def _is_positive(speed: str) -> bool:
    return speed.isdecimal() and int(speed) > 0


def default_interface(routes: str) -> str | None:
    """Find the interface of the default route in /proc/net/route."""
    for line in routes.splitlines():
        words = line.split()
        if len(words) > 2 and words[1] == "00000000":
            return words[0]
    return None


def mounts(text: str) -> tuple[Mount, ...]:
    """Parse /proc/mounts: shared file systems, and local ones outside of system directories."""
    found: dict[str, Mount] = {}
    for line in text.splitlines():
        words = line.split(" ")
        if len(words) < 3:
            continue
        path = words[1].replace("\\040", " ")
        kind = _SHARED.get(words[2])
        if kind is None and words[2] in _DISKS:
            kind = "local"
        if kind is not None and not f"{path}/".startswith(tuple(f"{r}/" for r in _SYSTEM_ROOTS)):
            found[path] = Mount(path, kind, words[0])  # a later mount covers an earlier one
    return tuple(found.values())


def mount_of(path: str, among: tuple[Mount, ...]) -> Mount | None:
    """Find the file system of an absolute path: the mount with the longest path above it."""
    above = [one for one in among if f"{path}/".startswith(one.path.rstrip("/") + "/")]
    return max(above, key=lambda one: len(one.path), default=None)


# ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoginFacts(MachineFacts):
    """The machine on which the command runs."""

    user: str
    python: tuple[int, ...]
    interpreter: str = ""
    groups: tuple[str, ...] = ()
    runs: Directory = field(default_factory=lambda: Directory(""))


@dataclass(frozen=True)
class SiteFacts:
    """All facts; `survey` is None unless a node was looked at."""

    cluster: ClusterFacts
    login: LoginFacts
    survey: NodeSurvey | None = None
