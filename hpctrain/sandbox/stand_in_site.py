"""Stand in for a site on one machine: what its jobs find, and a profile with what differs.

Belongs here: a module system with the modules of a profile, launchers of containers, directories of
file systems, and the text of a profile that extends the site's. Does not belong here: Slurm's part
of it (see `shape`, `config`), fetching the module system (see `debian`).
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.sandbox.paths import SandboxPaths
from hpctrain.sandbox.shape import SiteShape, inherited_variables, island_sizes
from hpctrain.slurm.settings import capabilities_of_release
from hpctrain.spec.job_text import expanded_names
from hpctrain.spec.positions import scalar_text
from hpctrain.spec.profile import INTERFACE_VARIABLES, ClusterProfile
from hpctrain.spec.profile.slurm import PartitionProfile
from hpctrain.spec.slurm_options import available_options

# Modules(7): a file without a line beyond this one loads, and changes nothing.
_MODULEFILE = "#%Module1.0\n"
_LAUNCHER = """\
#!/bin/sh
# Made by hpctrain for a sandbox: stands in for {name} and starts commands outside of any container.
# Its options are as hpctrain writes them: `--name`, `--name=value`, and these two with a word.
[ "$1" = exec ] || {{ echo "{name} of a sandbox knows exec only" >&2; exit 255; }}
shift
while :; do
    case $1 in
    --pwd) cd "$2" || exit 255; shift 2 ;;
    --bind) shift 2 ;;
    --*) shift ;;
    *) break ;;
    esac
done
[ -e "$1" ] || {{ echo "FATAL: could not open image $1: no such file or directory" >&2; exit 255; }}
shift
exec "$@"
"""


def write_site(paths: SandboxPaths, site: SiteShape, module_system: Path | None) -> None:
    """Write what jobs and logins of the site find; `module_system` is where one is unpacked."""
    for name in (*site.directories, *site.variables):
        paths.site_directory(name).mkdir(parents=True, exist_ok=True)
    for name in site.launchers:
        paths.programs.mkdir(exist_ok=True)
        image = paths.site_directory("image.sif")
        image.parent.mkdir(exist_ok=True)
        image.touch()
        _write_program(paths.programs / name, _LAUNCHER.format(name=name))
    if site.modules is not None and module_system is not None:
        files = paths.modules / "modulefiles"
        shutil.rmtree(files, ignore_errors=True)
        for module in site.modules:
            # A name without a version may also be that of a directory with versions.
            file = files / module if "/" in module else files / module / "1"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_MODULEFILE)
        init = paths.modules / "init" / "bash"
        init.parent.mkdir(exist_ok=True)
        home, places = shlex.quote(str(paths.modules)), shlex.quote(str(files))
        init.write_text(
            f"# Made by hpctrain for a sandbox\n. {shlex.quote(str(module_system / 'init/bash'))}\n"
            f"export MODULESHOME={home}\nmodule use {places}\n"
        )
        # slurm.conf(5), TaskProlog: each `export NAME=value` that it prints is set in the task.
        word = shlex.quote(f"export MODULESHOME={paths.modules}")
        _write_program(paths.task_prolog, f"#!/bin/sh\necho {word}\n")


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


# ----------------------------------------------------------------------------------------------
# Say in a profile what one machine lacks of a site. Everything else stays as the site has it. Pure.


@dataclass(frozen=True)
class ThisMachine:
    """What the machine has: an interpreter with hpctrain, Slurm's version, files and limits.

    `has` tells whether a file is there, `finds` whether a program is on PATH, `allows` whether a
    process may set a limit: an option of ulimit(1) and its value.
    """

    python: str
    slurm: tuple[int, int]
    has: Callable[[str], bool]
    finds: Callable[[str], bool]
    allows: Callable[[str, str], bool]


@dataclass(frozen=True)
class ProfileChange:
    """One value that differs on this machine, and why; None removes it.

    `path` names items of lists by their `name`.
    """

    path: tuple[str, ...]
    value: Any
    reason: str

    def __str__(self) -> str:
        shown = "left out" if self.value is None else _flow(self.value)
        return f"{'.'.join(self.path)}: {shown} ({self.reason})"


def profile_changes(
    profile: ClusterProfile, nodes: int | None, paths: SandboxPaths, machine: ThisMachine
) -> tuple[ProfileChange, ...]:
    """List what a run of this profile needs otherwise on this machine.

    `nodes`: at most so many of each kind, as in `shape_from_profile`. A profile with emulated GPUs
    is one of a sandbox: all else stays.
    """
    if profile.gpu.emulated:
        return tuple(_count_changes(profile, nodes))
    return (
        *_count_changes(profile, nodes),
        *_hardware_changes(profile, paths, machine),
        *_slurm_changes(profile, machine),
        *_software_changes(profile, paths, machine),
        *_environment_changes(profile),
    )


def _count_changes(profile: ClusterProfile, most: int | None) -> Iterator[ProfileChange]:
    for at, section in _sections(profile).items():
        if section.nodes is not None and most is not None and section.nodes.count > most:
            yield ProfileChange((*at, "nodes", "count"), most, "so many nodes were asked for")
    islands, sizes = profile.network.islands, island_sizes(profile, most)
    if islands and not sizes:
        yield ProfileChange(("network", "islands"), None, "fewer nodes than islands")
    elif sizes != tuple(island.nodes for island in islands):
        fewer = [
            island.model_dump(mode="json", exclude_unset=True) | {"nodes": size}
            for island, size in zip(islands, sizes, strict=True)
        ]
        yield ProfileChange(("network", "islands"), fewer, "the same for fewer nodes")


def _sections(
    profile: ClusterProfile,
) -> dict[tuple[str, ...], ClusterProfile | PartitionProfile]:
    """Map the places of what describes nodes to it: the cluster, and each partition."""
    found: dict[tuple[str, ...], ClusterProfile | PartitionProfile] = {(): profile}
    for partition in profile.slurm.partitions:
        found["slurm", "partitions", partition.name] = partition
    return found


def _hardware_changes(
    profile: ClusterProfile, paths: SandboxPaths, machine: ThisMachine
) -> Iterator[ProfileChange]:
    yield ProfileChange(("gpu", "emulated"), True, "there are no GPUs, and ranks train on CPUs")
    for at, section in _sections(profile).items():
        if section.nodes is not None and section.nodes.architecture is not None:
            yield ProfileChange((*at, "nodes", "architecture"), None, "its nodes are this machine")
        network = section.network
        if network is None:
            continue
        yield ProfileChange((*at, "network", "interface"), "lo", "all nodes are on it")
        if network.master_address is not None:
            yield ProfileChange((*at, "network", "master_address"), None, "one name for all nodes")
        blocks = capabilities_of_release(machine.slurm).has_blocks
        if network.switches.segment_policy != "forbid" and not blocks:
            path = (*at, "network", "switches", "segment")
            yield ProfileChange(path, "forbid", "this Slurm has no --segment")
    for filesystem in profile.filesystems:
        place = ("filesystems", filesystem.name)
        directory = str(paths.site_directory(filesystem.name))
        yield ProfileChange((*place, "path"), directory, "a directory of the sandbox")
        for name in ("stripe_count", "stripe_size"):
            if getattr(filesystem, name) is not None:
                yield ProfileChange((*place, name), None, "it is no Lustre")
    if profile.speed_check not in (None, "off"):
        yield ProfileChange(("speed_check",), "off", "all nodes share its CPUs")
    if profile.notify is not None:
        yield ProfileChange(("notify",), None, "nobody waits for messages of a sandbox")
    textfile = profile.metrics.textfile
    if textfile is not None and not machine.has(textfile):
        yield ProfileChange(("metrics", "textfile"), None, "there is no such directory")


def _slurm_changes(profile: ClusterProfile, machine: ThisMachine) -> Iterator[ProfileChange]:
    slurm, version = profile.slurm, f"{machine.slurm[0]:02d}.{machine.slurm[1]:02d}"
    if profile.limits.account_required and slurm.account is None:
        account = next(iter(profile.limits.accounts), "sandbox")
        yield ProfileChange(("slurm", "account"), account, "any will do")
    if slurm.cluster is not None:
        yield ProfileChange(("slurm", "cluster"), None, "there is one cluster")
    if slurm.submit_command != ("sbatch",):
        yield ProfileChange(("slurm", "submit_command"), ["sbatch"], "there is no other command")
    if slurm.version not in (None, version):
        yield ProfileChange(("slurm", "version"), version, "the Slurm of the sandbox")
    if slurm.reservation_end is not None:
        yield ProfileChange(("slurm", "reservation_end"), None, "that of the sandbox has no end")
    for command, options in (("sbatch", slurm.options.sbatch), ("srun", slurm.options.srun)):
        since = available_options(command)
        for name, value in options.items():
            reason = None if value == "none" else _NOT_HERE.get(name)
            if name in slurm.options.plugins:
                reason = "Slurm has no such plug-in here"
            elif since.get(name, version) > version:
                reason = f"Slurm {version} has no such option"
            if reason is not None:
                yield ProfileChange(("slurm", "options", command, name), None, reason)


# Options about what the sandbox has under other names, or not at all.
_NOT_HERE = {
    **dict.fromkeys(("exclude", "nodelist"), "nodes have other names"),
    "mpi": "there is no PMIx",
}


def _software_changes(
    profile: ClusterProfile, paths: SandboxPaths, machine: ThisMachine
) -> Iterator[ProfileChange]:
    software, known = profile.software, _known_names(profile)
    if software.python is not None or software.activate is not None:
        yield ProfileChange(("software", "python"), machine.python, "the one with hpctrain")
    if software.activate is not None:
        yield ProfileChange(("software", "activate"), None, "there is no such environment")
    if software.setup is not None and not machine.has(software.setup):
        yield ProfileChange(("software", "setup"), None, "there is no such file")
    modules = software.modules
    if modules is not None and not machine.has(str(paths.modules)):
        yield ProfileChange(("software", "modules"), None, "no module system could be fetched")
    elif modules is not None:
        init = str(paths.modules / "init" / "bash")
        if modules.init is not None and not machine.has(modules.init):
            yield ProfileChange(("software", "modules", "init"), init, "that of the sandbox")
        use = tuple(one for one in modules.use if machine.has(one))
        if use != modules.use:
            yield ProfileChange(("software", "modules", "use"), list(use), "what there is of them")
    container = software.container
    if container is not None and container.starts_by_srun:
        reason = f"srun has no plug-in for {container.launcher}"
        yield ProfileChange(("software", "container"), None, reason)
    elif container is not None:
        here = ("software", "container")
        image = str(paths.site_directory("image.sif"))
        reason = f"{container.launcher} of the sandbox starts ranks outside of any container"
        yield ProfileChange((*here, "image"), image, reason)
        yield ProfileChange((*here, "python"), machine.python, "the one with hpctrain")
        if any(set(expanded_names(mount)) - known for mount in container.mounts):
            yield ProfileChange((*here, "mounts"), [], "nothing is mounted")
        if container.site_mounts is not None:
            yield ProfileChange((*here, "site_mounts"), ["/"], "everything is there")
    scratch = software.scratch
    above = (scratch or "").partition("$")[0].rpartition("/")[0]
    if scratch is not None and not (above and machine.has(above)):
        own = f"{paths.site_directory('local')}/$USER-$SLURM_JOB_ID"
        yield ProfileChange(("software", "scratch"), own, "a directory of the sandbox")
    for part, commands in software.commands.commands().items():
        kept = [list(words) for words in commands if _runs_here(words, known, machine)]
        if len(kept) != len(commands):
            path = ("software", "commands", part)
            yield ProfileChange(path, kept, "what there is of them")
    wrapper = software.commands.wrapper
    missing = wrapper[:1] and "/" not in wrapper[0] and not machine.finds(wrapper[0])
    if wrapper and (missing or not _runs_here(wrapper, known, machine)):
        yield ProfileChange(("software", "commands", "wrapper"), [], "it is not here")
    for option, value in software.ulimits.options():
        if not machine.allows(option, value):
            place = ("software", "ulimits", _LIMITS[option])
            yield ProfileChange(place, None, "it does not allow that")


def _runs_here(words: Sequence[str], known: frozenset[str], machine: ThisMachine) -> bool:
    """Whether the names in a command have values here, and the files in it are there."""
    names = {name for word in words for name in expanded_names(word)}
    files = [word for word in words if word.startswith("/")]
    return names <= known and all(machine.has(file) for file in files)


_LIMITS = {"-c": "core", "-l": "memlock", "-n": "nofile", "-s": "stack"}


def _environment_changes(profile: ClusterProfile) -> Iterator[ProfileChange]:
    known = _known_names(profile)
    for at, section in _sections(profile).items():
        for variable in section.environment:
            path = (*at, "environment", variable.name)
            texts = [variable.value or "", *variable.per_local_rank]
            if variable.name in INTERFACE_VARIABLES:
                yield ProfileChange((*path, "value"), "lo", "all nodes are on it")
            elif unset := {name for text in texts for name in expanded_names(text)} - known:
                reason = f"nothing sets {', '.join(sorted(unset))}"
                yield ProfileChange(path, None, reason)


def _known_names(profile: ClusterProfile) -> frozenset[str]:
    """List the variables that a job of the profile has in the sandbox."""
    own = {variable.name for variable in profile.environment if variable.value is not None}
    scratch = {"TMPDIR"} if profile.software.scratch is not None else set()
    return _ALWAYS_KNOWN | set(inherited_variables(profile)) | own | scratch


_ALWAYS_KNOWN = frozenset(
    {"HOME", "HOSTNAME", "LANG", "PATH", "PWD", "USER", "SLURM_JOB_ID", "SLURM_LOCALID"}
    | {"SLURM_NODEID", "SLURM_PROCID", "SLURM_SUBMIT_DIR", "SLURMD_NODENAME", "SLURM_JOB_USER"}
)


# -- The text of such a profile -----------------------------------------------------------------


# Lists whose items are joined by their names (see `merging`).
_NAMED_LISTS = frozenset({"partitions", "environment", "filesystems"})


def profile_text(extends: str, name: str, changes: Iterable[ProfileChange]) -> str:
    """Write the profile that extends the site's and says what differs on this machine."""
    tree: dict[str, Any] = {}
    for change in changes:
        *above, last = change.path
        here = tree
        for part in above:
            here = here.setdefault(part, {})
        here[last] = change
    head = (
        "# Made by `hpctrain sandbox up`. Everything else is as the site has it.",
        f"extends: {scalar_text(extends)}",
        f"name: {scalar_text(name)}",
    )
    return "\n".join((*head, *_lines(tree))) + "\n"


def _lines(tree: Mapping[str, Any]) -> Iterator[str]:
    for key, below in tree.items():
        if isinstance(below, ProfileChange):
            yield f"{scalar_text(key)}: {_flow(below.value)}  # on this machine: {below.reason}"
            continue
        yield f"{scalar_text(key)}:"
        if key not in _NAMED_LISTS:
            yield from (f"  {line}" for line in _lines(below))
            continue
        for name, item in below.items():
            yield f"  - name: {scalar_text(name)}"
            if isinstance(item, ProfileChange):
                yield f"    remove: true  # on this machine: {item.reason}"
            else:
                yield from (f"    {line}" for line in _lines(item))


def _flow(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list | dict) else scalar_text(value)
