"""Read settings of slurm.conf whose spelling changed between versions, or that are lists of words.

Belongs here: the spelling. Does not belong here: what follows from a setting (`hpctrain.site`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hpctrain.slurm.records import SlurmConfig

# slurm.conf(5), AuthInfo: cred_expire is 120 s; a requeued job waits a second longer.
_CRED_EXPIRE_SECONDS = 120
_LEAST_CRED_EXPIRE_SECONDS = 5


def words_of(config: SlurmConfig, key: str) -> dict[str, str]:
    """Split `a,b=3,c` into {a: "", b: "3", c: ""}, the form of most *Parameters."""
    pairs = (word.strip().partition("=") for word in config.get(key).split(",") if word.strip())
    return {name.lower(): value for name, _, value in pairs}


def preempts_by_qos(config: SlurmConfig) -> bool:
    """True if PreemptType is preempt/qos."""
    return config.get("PreemptType").rpartition("/")[2] == "qos"


def sends_user_signal(config: SlurmConfig) -> bool:
    """True if a preempted job gets the signal of its own `--signal` when its grace begins."""
    # Release notes of 23.02: the option moved and was renamed.
    if not capabilities(config).has_preempt_parameters:
        return "preempt_send_user_signal" in words_of(config, "SlurmctldParameters")
    return "send_user_signal" in words_of(config, "PreemptParameters")


def seconds_of(config: SlurmConfig, key: str) -> int | None:
    """Read `30 sec`; None for a setting that is not there or not a number."""
    match = re.match(r"\d+", config.get(key))
    return int(match[0]) if match else None


def requeue_delay_seconds(config: SlurmConfig) -> int:
    """Return how long a requeued job waits before it may start again (slurmctld(8))."""
    text = words_of(config, "AuthInfo").get("cred_expire", "")
    seconds = int(text) if text.isdecimal() else _CRED_EXPIRE_SECONDS
    if seconds < _LEAST_CRED_EXPIRE_SECONDS:
        seconds = _CRED_EXPIRE_SECONDS
    return seconds + 1


def minutes_beyond_limit(config: SlurmConfig) -> int:
    """Return OverTimeLimit, in minutes; 0 for none."""
    match = re.match(r"\d+", config.get("OverTimeLimit"))
    return int(match[0]) if match else 0


def plugins(config: SlurmConfig, key: str) -> tuple[str, ...]:
    """List plugins of JobSubmitPlugins or CliFilterPlugins, without their directory."""
    names = (name.rpartition("/")[2] for name in config.get(key).split(","))
    return tuple(name for name in names if name not in ("", "none"))


# ----------------------------------------------------------------------------------------------
# Tell what a Slurm does from what it says of itself, for behaviour that releases differ in. Pure.
# Where `scontrol show config` has a key only in releases that behave so, the key decides: packagers
# carry changes back. The number of the release decides where nothing else tells.


@dataclass(frozen=True)
class Capabilities:
    """What a Slurm does.

    `requeues_who_leaves_in_a_grace`: a job that exits in its grace period comes back whatever its
    exit code, unless it may not be requeued. `replaces_daemons`: `scontrol reconfigure` gives
    daemons new processes. `needs_cgroup_plugin`: cgroup.conf has to switch cgroups off where there
    are none. `has_preempt_parameters`: slurm.conf has PreemptParameters; before, its option was one
    of SlurmctldParameters. `has_blocks`: the plugin topology/block. `hides_topology`:
    TopologyPlugin says `flat` in the place of what topology.yaml describes.
    """

    requeues_who_leaves_in_a_grace: bool
    replaces_daemons: bool
    needs_cgroup_plugin: bool
    has_preempt_parameters: bool
    has_blocks: bool
    hides_topology: bool


# The first release with each of them; the first one was seen from 24.11 on.
_SINCE = {
    "requeues_who_leaves_in_a_grace": (24, 5),
    "replaces_daemons": (23, 11),
    "needs_cgroup_plugin": (24, 5),
    "has_preempt_parameters": (23, 2),
    "has_blocks": (23, 11),
    "hides_topology": (25, 5),
}


def capabilities(config: SlurmConfig) -> Capabilities:
    """Derive them from `scontrol show config`."""
    found = capabilities_of_release(config.version)
    if "PreemptParameters" in config.values:
        return replace(found, has_preempt_parameters=True)
    return found


def capabilities_of_release(version: tuple[int, ...]) -> Capabilities:
    """Derive them from the release alone, for a Slurm that does not run yet."""
    return Capabilities(**{name: version >= first for name, first in _SINCE.items()})
