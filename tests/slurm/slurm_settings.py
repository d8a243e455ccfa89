"""Settings of a sandbox's Slurm that hold while a test needs them.

They keep Slurm from acting before the test, or the run, is through with what it waits for: a
machine under load holds up any process for many seconds. Belongs here: such settings. Does not
belong here: faults (see `hpctrain.sandbox.faults`), the shape of the sandbox (see `rehearsal`).
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from hpctrain.sandbox.faults import set_option
from hpctrain.sandbox.processes import send
from hpctrain.sandbox.sandbox import Sandbox

# Beyond what holds up a rank, a supervisor or the test itself.
LONG_GRACE_SECONDS = 120
LONG_KILL_WAIT_SECONDS = 30


@contextlib.contextmanager
def grace(
    sandbox: Sandbox, partition: str = "train", seconds: int = LONG_GRACE_SECONDS
) -> Iterator[None]:
    """Jobs of the partition that are preempted from now on have so long to leave."""
    usual = next(one for one in sandbox.shape.partitions if one.name == partition).grace_seconds
    _update(sandbox, partition, f"GraceTime={seconds}")
    try:
        yield
    finally:
        _update(sandbox, partition, f"GraceTime={usual}")


@contextlib.contextmanager
def preempted_by_cancel(sandbox: Sandbox, partition: str) -> Iterator[None]:
    """Slurm ends jobs of the partition that it preempts, and does not requeue them."""
    usual = next(one for one in sandbox.shape.partitions if one.name == partition).preempt_mode
    _update(sandbox, partition, "PreemptMode=CANCEL")
    try:
        yield
    finally:
        _update(sandbox, partition, f"PreemptMode={usual}")


@contextlib.contextmanager
def nothing_starts(sandbox: Sandbox, partition: str = "train") -> Iterator[None]:
    """A job that is requeued waits; one that runs goes on."""
    _update(sandbox, partition, "State=DOWN")
    try:
        yield
    finally:
        _update(sandbox, partition, "State=UP")


@contextlib.contextmanager
def long_kill_wait(sandbox: Sandbox) -> Iterator[None]:
    """A supervisor that takes KillWait for shorter has that much more time for its last words.

    Makes all daemons read their configuration anew, which takes back what `scontrol update` has
    changed: not within `grace` or `nothing_starts`.
    """
    set_option(sandbox, "KillWait", str(LONG_KILL_WAIT_SECONDS))
    try:
        yield
    finally:
        set_option(sandbox, "KillWait", str(sandbox.shape.kill_wait_seconds))


@contextlib.contextmanager
def lost_nodes_unnoticed(sandbox: Sandbox) -> Iterator[None]:
    """Slurm does not take a node for down on its own; see `long_kill_wait`."""
    set_option(sandbox, "SlurmdTimeout", "600")
    try:
        yield
    finally:
        set_option(sandbox, "SlurmdTimeout", str(sandbox.shape.slurmd_timeout_seconds))


@contextlib.contextmanager
def frozen_controller(sandbox: Sandbox) -> Iterator[None]:
    """slurmctld stands still: nobody writes its state."""
    daemon = [one.identity for one in sandbox.state.daemons if one.name == "slurmctld"]
    send(daemon, signal.SIGSTOP)
    try:
        yield
    finally:
        send(daemon, signal.SIGCONT)


def _update(sandbox: Sandbox, partition: str, change: str) -> None:
    sandbox.command("scontrol", "update", f"PartitionName={partition}", change)
