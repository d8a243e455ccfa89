"""Strikes at nodes, at slurmctld, and what Slurm and its administrators do to a job.

Belongs here: crashes, reboots, freezes and returns of nodes; the controller; preemption, requeue,
warning. Does not belong here: single processes (see `strikes_at_processes`).
"""

from __future__ import annotations

import contextlib
import signal
import time

from rehearsal import wait_till_remembered
from strikes_at_processes import rank_killed
from targets import DeedKind, Target

from hpctrain.sandbox import faults
from hpctrain.sandbox.daemons import processes_of_nodes
from hpctrain.sandbox.processes import is_alive, send

_SEEN_SECONDS = 120.0
# systemd gives a service 90 s; ranks of rehearsals need less to save.
_SHUTDOWN_SECONDS = 10.0


def node_crashed(target: Target) -> None:
    _crash(target, target.nodes()[1])


def batch_node_crashed(target: Target) -> None:
    _crash(target, target.nodes()[0])


def _crash(target: Target, node: str) -> None:
    with target.field.machines:
        faults.crash_node(target.sandbox, node)
    target.aftercare.append(lambda: target.field.bring_back(node, rebooted=False))


def slurmd_killed(target: Target) -> None:
    node = target.nodes()[target.dice.randrange(2)]
    with target.field.machines:
        faults.kill_slurmd(target.sandbox, node)
    target.aftercare.append(lambda: target.field.bring_back(node, rebooted=False))


def node_rebooted(target: Target) -> None:
    """`shutdown -r`: TERM to everything on the node, KILL to what is left, and up again."""
    node = target.nodes()[target.dice.randrange(2)]
    with target.field.machines:
        reboot(target, node)
    target.field.bring_back(node, rebooted=True)


def reboot(target: Target, node: str) -> None:
    """Take a node down in good order: everything on it may end in its own way before it is off."""
    sandbox = target.sandbox
    everything = [
        process.identity
        for process in processes_of_nodes(sandbox.paths, sandbox.shape.node_names, node)
    ]
    slurmd = [one.identity for one in sandbox.state.daemons if one.name == f"slurmd-{node}"]
    send([*slurmd, *everything], signal.SIGTERM)
    target.until(lambda: not any(map(is_alive, everything)), _SHUTDOWN_SECONDS)
    faults.crash_node(sandbox, node)


def node_frozen_for_long(target: Target) -> None:
    """Until Slurm has moved the job to other nodes; then the node thaws with all that was on it."""
    node = target.nodes()[target.dice.randrange(2)]
    before = target.rehearsal.epoch
    with target.field.machines:
        faults.freeze_node(target.sandbox, node)
    target.until(lambda: target.rehearsal.epoch > before, _SEEN_SECONDS)
    with target.field.machines:
        faults.thaw_node(target.sandbox, node)


def node_frozen_for_a_moment(target: Target) -> None:
    node = target.nodes()[target.dice.randrange(2)]
    with target.field.machines:
        faults.freeze_node(target.sandbox, node)
    time.sleep(target.dice.uniform(0.5, 3))
    with target.field.machines:
        faults.thaw_node(target.sandbox, node)


def drained_and_killed(target: Target) -> None:
    """A drained node is used to the end, unless something fails."""
    node = target.nodes()[target.dice.randrange(2)]
    change = ("update", f"NodeName={node}", "State=DRAIN", "Reason=storm")
    target.field.slurm("scontrol", *change)
    rank_killed(target)


def controller_away(target: Target) -> None:
    """For some seconds, with a rank that dies meanwhile."""
    with target.field.without_controller():
        wait_till_remembered(target.sandbox)
        faults.kill_controller(target.sandbox)
        rank_killed(target)
        time.sleep(target.dice.uniform(1, 8))


def controller_dies_in_a_preemption(target: Target) -> None:
    """slurmctld forgets the last 5 s: the preemption, the job that wanted the nodes."""
    with target.field.without_controller():
        wait_till_remembered(target.sandbox)
        target.did(DeedKind.FORGOTTEN)
        target.rehearsal.urgent_job(nodes=target.nodes())
        record = target.rehearsal.job_id
        target.until(lambda: _is_being_preempted(target, record), 20.0)
        faults.kill_controller(target.sandbox)
        time.sleep(target.dice.uniform(1, 4))


def _is_being_preempted(target: Target, job_id: int) -> bool:
    record = target.rehearsal.slurm.show_job(job_id)
    return record is None or record.preempt_time is not None or not record.state.is_running


def preempted(target: Target) -> None:
    """By a job that wants these very nodes."""
    with target.field.with_controller():
        target.rehearsal.urgent_job(nodes=target.nodes())


def requeued(target: Target) -> None:
    target.field.slurm("scontrol", "requeue", str(target.rehearsal.job_id))


def requeued_and_held(target: Target) -> None:
    """By an administrator, who releases it later."""
    job = str(target.rehearsal.job_id)
    with target.doing(DeedKind.HELD):
        target.field.slurm("scontrol", "requeuehold", job)
        target.until(lambda: any(one.is_held for one in target.live_jobs()), _SEEN_SECONDS)
        time.sleep(target.dice.uniform(0, 2))
        target.field.slurm("scontrol", "release", job)


def warned(target: Target) -> None:
    """As before the time limit."""
    with contextlib.suppress(Exception):
        target.field.slurm("scancel", "--batch", "--signal=USR1", str(target.rehearsal.job_id))
