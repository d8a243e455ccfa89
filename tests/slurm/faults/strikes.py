"""Faults of both tables as strikes: each can be thrown at any run at any moment.

A strike brings its fault about and does what a person would do about it at the time (submit a run
again that was stopped); what an administrator does later (a node comes back) is left in
`Target.aftercare`. It returns what must come next. Belongs here: the table of all strikes, with
the row of the fault table that each stands for and how often it comes in a storm. Does not belong
here: how each is brought about (`strikes_at_processes`, `strikes_at_machines`,
`strikes_at_storage`, `strikes_by_people`), waiting and judging (`storm`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import strikes_at_machines as machines
import strikes_at_processes as processes
import strikes_at_storage as storage
import strikes_by_people as people
from targets import Target


class After(StrEnum):
    """What must come after a strike."""

    RELAUNCH = "a newer launch trains"
    PROGRESS = "training goes on, in the same launch or a newer one"
    OVER = "the run is over, as it was asked to be"


@dataclass(frozen=True)
class Strike:
    """One kind of fault. `row` is that of the fault table; `weight` how often a storm draws it.

    `quick`: over within seconds, and without a spare node.
    """

    name: str
    row: int
    bring_about: Callable[[Target], None]
    after: After
    weight: int
    quick: bool = False
    possible: Callable[[Target], bool] = lambda target: True

    @property
    def unrecorded(self) -> bool:
        """It is of the second table."""
        return self.row > 50


def _has_other_cluster(target: Target) -> bool:
    return target.field.other is not None


def _has_bystander(target: Target) -> bool:
    return target.field.bystander is not None


def _may_freeze_files(target: Target) -> bool:
    return storage.can_be_read_only(target.field.stage.directory)


# Weights: what happens often on clusters comes often here, and what takes long comes seldom.
STRIKES: tuple[Strike, ...] = (
    # The first table: what Slurm records.
    Strike("rank killed", 20, processes.rank_killed, After.RELAUNCH, 6, quick=True),
    Strike("rank frozen", 21, processes.rank_frozen, After.RELAUNCH, 3),
    Strike("srun killed", 25, processes.srun_killed, After.RELAUNCH, 3, quick=True),
    Strike("slurmstepd killed", 20, processes.stepd_killed, After.RELAUNCH, 1),
    Strike("supervisor killed", 37, processes.supervisor_killed, After.RELAUNCH, 2),
    Strike("killed in a save", 31, processes.killed_in_a_save, After.RELAUNCH, 3, quick=True),
    Strike("node crashed", 11, machines.node_crashed, After.RELAUNCH, 2),
    Strike("batch node crashed", 12, machines.batch_node_crashed, After.RELAUNCH, 2),
    Strike("slurmd killed", 13, machines.slurmd_killed, After.PROGRESS, 1),
    Strike("node drained, rank killed", 17, machines.drained_and_killed, After.RELAUNCH, 1),
    Strike("controller away", 18, machines.controller_away, After.RELAUNCH, 1),
    Strike("preempted", 1, machines.preempted, After.RELAUNCH, 4, quick=True),
    Strike("requeued", 35, machines.requeued, After.RELAUNCH, 2, quick=True),
    Strike("held by an administrator", 35, machines.requeued_and_held, After.RELAUNCH, 1),
    Strike("warned of the time limit", 8, machines.warned, After.RELAUNCH, 2, quick=True),
    Strike("byte of a checkpoint flipped", 30, storage.byte_flipped, After.RELAUNCH, 1),
    # The second: what it does not record, and what clients and file systems do.
    Strike("TERM to a rank", 51, processes.rank_asked_to_end, After.RELAUNCH, 4, quick=True),
    Strike("TERM to all ranks", 51, processes.ranks_asked_to_end, After.RELAUNCH, 2, quick=True),
    Strike("TERM to srun", 51, processes.srun_asked_to_end, After.RELAUNCH, 2, quick=True),
    Strike("TERM to the supervisor", 51, processes.supervisor_asked_to_end, After.RELAUNCH, 2),
    Strike("node rebooted in good order", 52, machines.node_rebooted, After.RELAUNCH, 3),
    Strike(
        "controller dies in a preemption",
        53,
        machines.controller_dies_in_a_preemption,
        After.PROGRESS,
        1,
    ),
    Strike("run directory away", 54, storage.directory_away, After.PROGRESS, 3),
    Strike(
        "verbs on another cluster",
        55,
        people.verbs_on_another_cluster,
        After.PROGRESS,
        3,
        quick=True,
        possible=_has_other_cluster,
    ),
    Strike(
        "watch on another cluster",
        56,
        people.watch_on_another_cluster,
        After.PROGRESS,
        2,
        quick=True,
        possible=_has_other_cluster,
    ),
    Strike("submitted by hand", 57, people.submitted_by_hand, After.RELAUNCH, 1),
    Strike("client killed in sbatch", 58, people.client_killed_in_sbatch, After.RELAUNCH, 2),
    Strike(
        "status of another user",
        59,
        people.status_of_another_user,
        After.PROGRESS,
        2,
        quick=True,
        possible=_has_bystander,
    ),
    Strike(
        "run directory read-only",
        61,
        storage.directory_read_only,
        After.PROGRESS,
        2,
        possible=_may_freeze_files,
    ),
    Strike(
        "file missing on one node",
        63,
        storage.file_missing_on_one_node,
        After.RELAUNCH,
        2,
        quick=True,
    ),
    Strike("writer of a save stopped", 67, processes.writer_stopped, After.RELAUNCH, 2),
    Strike("node frozen for long", 68, machines.node_frozen_for_long, After.RELAUNCH, 1),
    Strike("node frozen for a moment", 68, machines.node_frozen_for_a_moment, After.PROGRESS, 2),
    Strike("stopped in an evaluation", 73, people.stopped_in_an_evaluation, After.RELAUNCH, 2),
    Strike("stopped in a pause", 74, people.stopped_in_a_pause, After.RELAUNCH, 2),
    Strike("stopped", 74, people.stopped, After.RELAUNCH, 2, quick=True),
    Strike("held", 74, people.held, After.RELAUNCH, 1),
    Strike("asked to save", 74, people.asked_to_save, After.PROGRESS, 2, quick=True),
)
# How a run of a storm may end other than done.
CANCELS: tuple[Strike, ...] = (
    Strike("cancelled", 34, people.cancelled, After.OVER, 1, quick=True),
    Strike("cancelled in Slurm", 34, people.cancelled_in_slurm, After.OVER, 1, quick=True),
)
BY_NAME = {strike.name: strike for strike in (*STRIKES, *CANCELS)}
assert len(BY_NAME) == len(STRIKES) + len(CANCELS)
