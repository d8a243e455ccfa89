"""A storm over one long run: faults of all kinds at random steps, and the sum at the end.

The gaps between faults are exponential in steps (a Poisson process), so a fault may strike in a
save, in a start, or right after the one before. Belongs here: choosing and bringing about. Does
not belong here: single faults with all that is asserted about them (the tests beside this file).
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from rehearsal import SAVE_EVERY_STEPS, PlannedFault, Rehearsal, wait_till_remembered
from survival import flip_a_byte, newest_verified

from hpctrain.actions.requests import ask
from hpctrain.actions.state import RunState
from hpctrain.actions.submit import resubmit
from hpctrain.checkpoints.discover import checkpoints
from hpctrain.checkpoints.publish import published_steps
from hpctrain.sandbox import faults
from hpctrain.sandbox.repair import revive
from hpctrain.store.ledger import EventKind
from hpctrain.store.signs import read_metrics

Strike = Callable[[Rehearsal, random.Random], None]
# Long enough that a run which saves every 10 steps has something to lose.
MEAN_GAP_STEPS = 25
_TAIL_STEPS = 20
_PATIENCE_SECONDS = 400.0


@dataclass(frozen=True)
class Chosen:
    """One fault of the storm: which, and the step that must have been trained before it."""

    name: str
    step: int


@dataclass(frozen=True)
class Struck:
    """One fault that was survived. `causes` are those of all launches that it ended."""

    name: str
    step: int
    causes: tuple[str, ...]
    resumed_step: int
    lost_steps: int
    seconds: float


@dataclass
class Storm:
    """What happened; `wrong` must be empty."""

    struck: list[Struck] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def causes(self) -> Counter[str]:
        return Counter(cause for one in self.struck for cause in one.causes)


# -- the faults ----------------------------------------------------------------------------------


def rank_killed(rehearsal: Rehearsal, dice: random.Random) -> None:
    rank = dice.randrange(2)
    rehearsal.wait(lambda: bool(rehearsal.rank_processes(rank)), f"running rank {rank}")
    rehearsal.kill_rank(rank)


def rank_frozen(rehearsal: Rehearsal, dice: random.Random) -> None:
    rehearsal.kill_rank(dice.randrange(2), signal.SIGSTOP)


def srun_killed(rehearsal: Rehearsal, dice: random.Random) -> None:
    rehearsal.kill_srun()


def stepd_killed(rehearsal: Rehearsal, dice: random.Random) -> None:
    faults.kill_stepd(rehearsal.sandbox, rehearsal.nodes()[1])


def supervisor_killed(rehearsal: Rehearsal, dice: random.Random) -> None:
    """The run is over then, and its owner submits it again."""
    rehearsal.kill_supervisor()
    rehearsal.wait_till_over()
    rehearsal.job_id = resubmit(rehearsal.run, rehearsal.slurm).job_id


def node_crashed(rehearsal: Rehearsal, dice: random.Random) -> None:
    faults.crash_node(rehearsal.sandbox, rehearsal.nodes()[1])


def batch_node_crashed(rehearsal: Rehearsal, dice: random.Random) -> None:
    faults.crash_node(rehearsal.sandbox, rehearsal.nodes()[0])


def controller_restarted(rehearsal: Rehearsal, dice: random.Random) -> None:
    """Away for some seconds, with a rank that dies meanwhile."""
    wait_till_remembered(rehearsal.sandbox)
    faults.kill_controller(rehearsal.sandbox)
    rank_killed(rehearsal, dice)
    time.sleep(dice.uniform(1, 8))
    faults.restart_controller(rehearsal.sandbox)


def preempted(rehearsal: Rehearsal, dice: random.Random) -> None:
    rehearsal.urgent_job()


def requeued(rehearsal: Rehearsal, dice: random.Random) -> None:
    rehearsal.sandbox.command("scontrol", "requeue", str(rehearsal.job_id))


def warned(rehearsal: Rehearsal, dice: random.Random) -> None:
    """As before the time limit."""
    rehearsal.sandbox.command("scancel", "--batch", "--signal=USR1", str(rehearsal.job_id))


def killed_in_a_save(rehearsal: Rehearsal, dice: random.Random) -> None:
    """Somebody wants a checkpoint, and a rank dies while it is written."""
    ask(rehearsal.run, "save", "chaos")
    time.sleep(dice.uniform(0, 0.4))
    rank_killed(rehearsal, dice)


def byte_flipped(rehearsal: Rehearsal, dice: random.Random) -> None:
    """The newest checkpoint rots while the job waits in the queue."""
    requeued(rehearsal, dice)
    rehearsal.wait_until(lambda row: row.state is RunState.PENDING, "pending")
    found = checkpoints(rehearsal.run.layout.checkpoints)
    if len(found) > 1:  # a run whose only checkpoint is bad rightly stops
        flip_a_byte(sorted(found[0].directory.glob("*.distcp"))[dice.randrange(2)])


# Weights: what happens often on clusters comes often here, and what takes long comes seldom.
FAULTS: dict[str, tuple[Strike, int]] = {
    "rank killed": (rank_killed, 6),
    "rank frozen": (rank_frozen, 2),
    "srun killed": (srun_killed, 3),
    "slurmstepd killed": (stepd_killed, 1),
    "supervisor killed": (supervisor_killed, 2),
    "node crashed": (node_crashed, 2),
    "batch node crashed": (batch_node_crashed, 1),
    "controller away": (controller_restarted, 1),
    "preempted": (preempted, 4),
    "requeued": (requeued, 2),
    "warned of the time limit": (warned, 2),
    "killed in a save": (killed_in_a_save, 3),
    "byte of a checkpoint flipped": (byte_flipped, 1),
}


# A storm would be over after a few faults if the run might not fail so often.
PATIENT = (
    "supervise.failures_without_progress=100000",
    "supervise.storm_failures=100000",
    "supervise.stall=15s",
    *(
        f"supervise.budgets.{cause}=100000"
        for cause in ("node_failure", "prolog_failure", "storage", "port", "launch_failure")
    ),
)


# -- the storm -----------------------------------------------------------------------------------


def choose(
    count: int,
    dice: random.Random,
    names: tuple[str, ...] = (),
    mean_gap_steps: float = MEAN_GAP_STEPS,
) -> list[Chosen]:
    """`count` faults (of `names` only, if given) with exponential gaps between their steps."""
    known = list(names or FAULTS)
    weights = [FAULTS[name][1] for name in known]
    step, chosen = float(SAVE_EVERY_STEPS + 2), []
    for name in dice.choices(known, weights, k=count):
        step += dice.expovariate(1 / mean_gap_steps)
        chosen.append(Chosen(name, round(step)))
    return chosen


def steps_needed(chosen: list[Chosen], tail_steps: int = _TAIL_STEPS) -> int:
    """Whole save intervals, and some steps after the last fault.

    Ranks without a slurmstepd train on until srun misses it, so a long storm has a long tail.
    """
    last = chosen[-1].step + tail_steps
    return -(-last // SAVE_EVERY_STEPS) * SAVE_EVERY_STEPS


def gates(chosen: list[Chosen]) -> list[PlannedFault]:
    """A run that is short waits a few steps later for each fault, lest it is over before."""
    return [
        PlannedFault(epoch=0, rank=1, step=fault.step + 2, do="await_word", text=str(number))
        for number, fault in enumerate(chosen)
    ]


def rage(
    rehearsal: Rehearsal,
    chosen: list[Chosen],
    dice: random.Random,
    tell: Callable[[int, Struck], None] = lambda number, struck: None,
) -> Storm:
    """Bring about all faults, one after the other, and wait until the run trains again."""
    storm = Storm()
    for number, fault in enumerate(chosen):
        rehearsal.wait_for_step(fault.step)
        _settle(rehearsal)
        time.sleep(dice.uniform(0, 0.3))
        epoch, began_at = rehearsal.epoch, time.monotonic()
        FAULTS[fault.name][0](rehearsal, dice)
        rehearsal.say(str(number))
        rehearsal.wait(
            lambda epoch=epoch: any(r.epoch > epoch for r in read_metrics(rehearsal.run.layout)),
            f"training again after: {fault.name}",
            _PATIENCE_SECONDS,
        )
        _take_down(storm, rehearsal, fault, epoch, time.monotonic() - began_at)
        tell(len(storm.struck), storm.struck[-1])
        revive(rehearsal.sandbox)
    return storm


def _settle(rehearsal: Rehearsal) -> None:
    """The newest launch has trained a step: a fault before that strikes the one before, too."""
    rehearsal.wait(lambda: bool(rehearsal.rows(rehearsal.epoch)), "training")


def _take_down(
    storm: Storm, rehearsal: Rehearsal, fault: Chosen, epoch: int, seconds: float
) -> None:
    events = rehearsal.run.ledger.events()
    starts = [e for e in events if e.event is EventKind.LAUNCH_STARTED and (e.epoch or 0) > epoch]
    ends = [
        e
        for e in events
        if e.event in (EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_LOST) and e.time <= starts[-1].time
    ]
    newest = starts[-1]
    resumed_step = newest.resume_step or 0
    before = [row.step for row in read_metrics(rehearsal.run.layout) if row.epoch <= epoch]
    verified = newest_verified(rehearsal, (newest.epoch or 1) - 1)
    if resumed_step != verified:
        storm.wrong.append(f"{fault}: resumed at {resumed_step}, {verified} was verified")
    storm.struck.append(
        Struck(
            name=fault.name,
            step=fault.step,
            causes=tuple(str(e.cause) for e in ends[-len(starts) :]),
            resumed_step=resumed_step,
            lost_steps=max(before[-1] - resumed_step, 0),
            seconds=seconds,
        )
    )


def nothing_left_behind(rehearsal: Rehearsal) -> list[str]:
    """What a run that is done must not have: checkpoints that are bad, processes that live on."""
    root = rehearsal.run.layout.checkpoints
    found = checkpoints(root, "sha256")
    bad = [f"{one.directory.name}: {one.problem}" for one in found if not one.good]
    alive = [f"process {one.pid}" for one in rehearsal.processes() if one.rank is not None]
    return bad + alive if published_steps(root) else ["no checkpoint"]
