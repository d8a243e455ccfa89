"""What the supervisor would do if something happened now: the policy asked in advance. Pure.

The same `policy.decide` and the same counting (`supervise.past`) as in the job, fed with an end
that has not happened. Belongs here: inventing that end. Does not belong here: deciding, showing.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from hpctrain.store.ledger import Event, EventKind
from hpctrain.store.supervise_config import SuperviseConfig
from hpctrain.supervise.judge.causes import FAILURE_CAUSES, Cause
from hpctrain.supervise.judge.documents import History, Situation, Verdict
from hpctrain.supervise.judge.launch_history import history
from hpctrain.supervise.judge.policy import budget_of, decide

# What may happen to a run, in the words of a condition; the order is that of the answer.
EVENTUALITIES: dict[Cause, str] = {
    Cause.PREEMPTED: "the job is preempted",
    Cause.TIME_LIMIT: "the time limit comes",
    Cause.NODE_FAILURE: "a node is lost",
    Cause.GPU_ERROR: "a GPU fails",
    Cause.FABRIC: "the network fails",
    Cause.STORAGE: "the file system fails",
    Cause.HANG: "the run hangs",
    Cause.CRASH: "a rank crashes",
    Cause.LAUNCH_FAILURE: "srun cannot start the step",
    Cause.PORT: "a port is taken",
    Cause.GPU_OOM: "a GPU runs out of memory",
    Cause.HOST_OOM: "a node runs out of memory",
    Cause.DATA_LOADER: "the data loader dies",
    Cause.UNKNOWN: "a launch ends and nothing says why",
    Cause.SUSPECT_NUMERICS: "a result cannot be reproduced",
    Cause.DIVERGED: "the loss is not finite or jumps",
    Cause.DISK_FULL: "the disk is full",
    Cause.LOAD_FAILED: "a checkpoint cannot be loaded",
    Cause.BAD_CHECKPOINT: "no checkpoint can be used",
    Cause.DATA_CHANGED: "the data have changed",
    Cause.CONFIG_ERROR: "the trainer refuses its settings",
    Cause.USER_ERROR: "the code has an error",
}
_SUSPECT = "the suspected node"


class Foresight(BaseModel):
    """One answer of the policy and all eventualities that it answers.

    `action` is an `ActionKind`, `observed` what would be done had the spec allowed it.
    """

    model_config = ConfigDict(frozen=True)

    causes: tuple[str, ...]
    conditions: tuple[str, ...]
    action: str
    reason: str
    delay_seconds: float = 0.0
    observed: tuple[str, ...] = ()


class Budget(BaseModel):
    """Failures by one cause since the last new checkpoint, and the retries that it has (None: as
    often as it comes)."""

    model_config = ConfigDict(frozen=True)

    cause: str
    used: int
    allowed: int | None


def budgets(past: History, config: SuperviseConfig) -> list[Budget]:
    """Of every cause that is counted."""
    counted = [cause for cause in Cause if cause in FAILURE_CAUSES or cause is Cause.TIME_LIMIT]
    return [
        Budget(cause=cause, used=past.of(cause), allowed=budget_of(cause, config))
        for cause in counted
    ]


def foresee(
    events: Sequence[Event], config: SuperviseConfig, now: float, checkpoint_step: int, step: int
) -> list[Foresight]:
    """What would be done if the run ended now by each cause.

    `checkpoint_step` is the newest good checkpoint (0: none), `step` the last finished step.
    """
    end = _End(events, config, now, checkpoint_step, step)
    answers = [end.by(cause, words) for cause, words in EVENTUALITIES.items()]
    again = "the loss is not finite or jumps twice at the same step"
    answers.append(end.by(Cause.DIVERGED, again, repeated=True))
    return _grouped(answers)


class _End:
    """Ends that have not happened."""

    def __init__(
        self,
        events: Sequence[Event],
        config: SuperviseConfig,
        now: float,
        checkpoint_step: int,
        step: int,
    ) -> None:
        self._events = list(events)
        self._config = config
        self._now = now
        self._checkpoint_step = checkpoint_step
        self._step = step
        began = _running_launch(events)
        self._resume_step = began.resume_step or 0 if began else checkpoint_step

    def by(self, cause: Cause, words: str, *, repeated: bool = False) -> Foresight:
        ends = [self._event(cause)]
        if repeated:  # the launch after the first brings nothing new
            ends.append(ends[0].model_copy(update={"resume_step": self._checkpoint_step}))
        past = history([*self._events, *ends], self._config.storm_window_seconds)
        # `hard` stays False: what broken hardware leads to depends on which node it is. Without a
        # reason of the verdict, that of the action is the decision alone.
        verdict = Verdict(cause, reason="", nodes=(_SUSPECT,), step=self._step + 1)
        action = decide(verdict, past, self._situation(cause), self._config)
        return Foresight(
            causes=(cause,),
            conditions=(words,),
            action=action.kind,
            reason=action.reason,
            delay_seconds=action.delay_seconds,
            observed=action.observed,
        )

    def _event(self, cause: Cause) -> Event:
        return Event(
            event=EventKind.LAUNCH_ENDED,
            time=self._now,
            cause=cause,
            resume_step=self._resume_step,
            checkpoint_step=self._checkpoint_step or None,
            failed_step=self._step + 1,
        )

    def _situation(self, cause: Cause) -> Situation:
        """All nodes answer, but for the one that is lost. Without spares and smaller shapes the
        job ends with its node."""
        config = self._config
        needed = config.shapes[0].nodes if config.shapes else 1
        least = config.shapes[-1].nodes if config.shapes else needed
        allocated = needed + config.spare_nodes
        lost = 1 if cause is Cause.NODE_FAILURE else 0
        return Situation(
            keeps_nodes=not lost or allocated - lost >= least,
            allocated_nodes=allocated,
            healthy_nodes=allocated - lost,
            needed_nodes=needed,
            least_nodes=least,
            good_checkpoints=(self._checkpoint_step,) if self._checkpoint_step else (),
        )


def _running_launch(events: Sequence[Event]) -> Event | None:
    """The launch that has not ended; None between launches."""
    for event in reversed(events):
        if event.event in (EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_LOST):
            return None
        if event.event is EventKind.LAUNCH_STARTED:
            return event
    return None


def _grouped(answers: Sequence[Foresight]) -> list[Foresight]:
    """Eventualities with the same answer, together, in the order of the first of each."""
    groups: dict[Foresight, list[Foresight]] = {}
    for answer in answers:
        key = answer.model_copy(update={"causes": (), "conditions": ()})
        groups.setdefault(key, []).append(answer)
    return [
        key.model_copy(
            update={
                "causes": tuple(one.causes[0] for one in group),
                "conditions": tuple(one.conditions[0] for one in group),
            }
        )
        for key, group in groups.items()
    ]
