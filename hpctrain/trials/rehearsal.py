"""Rehearse a run on few nodes: do to a short one what a bad night does, and see what it survives.

The runs are submitted as every run is. The first one is a few steps long and ends at its target;
it tells how long a step and a save take. The second one is warned, loses a rank, and finds its
newest checkpoint truncated; then it is cancelled. Everything is done as a plain user from where
jobs are submitted, and only to the rehearsal's own runs. Belongs here: the faults, their order and
the waits. Does not belong here: judging what was seen (`rehearsal_proofs`), the record
(`hpctrain.records.rehearsals`).
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from hpctrain.base import clock
from hpctrain.base.errors import (
    DoesNotFitError,
    HpctrainError,
    RefusedPlanError,
    SlurmError,
    UsageError,
)
from hpctrain.base.units import Duration, short_duration
from hpctrain.checkpoints.discover import inspect
from hpctrain.checkpoints.publish import published_steps
from hpctrain.job.job_queries import jobs_of, slurm_of
from hpctrain.job.preflight import MADE_UP_STEPS
from hpctrain.job.prepare import PreparedRun, load_any_inputs
from hpctrain.job.submit import submit
from hpctrain.job.supervisor_settings import NODE_LEDGER_NAME
from hpctrain.job.trainer_run import prepare_any
from hpctrain.judge.attempts import signals, starts
from hpctrain.judge.causes import FAILURE_CAUSES, FINAL_CAUSES
from hpctrain.records.exit_records import read_exit_records
from hpctrain.records.find import RunFiles, command_in, find_run
from hpctrain.records.jobs import recorded
from hpctrain.records.ledger import Event
from hpctrain.records.manifest import checkpoint_name, read_manifest
from hpctrain.records.rehearsals import (
    Proof,
    RehearsalRecord,
    record_rehearsal,
    rehearsals_directory,
)
from hpctrain.records.run_records import (
    DoneMarker,
    Progress,
    read_metrics,
    read_record,
    read_saves,
)
from hpctrain.records.supervise_config import read_supervise_config
from hpctrain.runs import clean, control
from hpctrain.runs.state import RunState
from hpctrain.runs.status import RunStatus, poll_interval, statuses
from hpctrain.slurm.client import REVOKED_SECONDS, SlurmClient
from hpctrain.spec.run import RunSpec
from hpctrain.spec.trainer import TrainerRunSpec
from hpctrain.trials.judging import bound_of
from hpctrain.trials.rehearsal_proofs import (
    CHECKPOINT,
    DAMAGED,
    KILLED,
    LOSSES,
    RESUME,
    SAVE,
    START,
    TARGET,
    TOPICS,
    TriedLaunch,
    complete,
    launches_of,
    passed_over,
    proved,
    reports_values,
    restarted,
    resumed,
    same_losses,
    save_seconds,
    saved_on_signal,
    started,
    trained_twice,
    unpromised,
)

# The first run: two saves, and enough steps for the time of one behind the first, which is slower.
_FIRST_STEPS, _FIRST_SAVE = 6, 3
# The second one: steps between two saves take so long, so that a fault finds its place, and ...
_LEAST_SECONDS_BETWEEN_SAVES = 4.0
_SAVES_BETWEEN_SAVES = 3
# ... all of its steps take longer than the faults. It ends by itself should nobody cancel it.
_TRAINING_SECONDS = 600.0
_KEPT = 4  # checkpoints
_LOOK_SECONDS = 0.2
# For a signal to reach the supervisor, and beyond the time that the plan gives to a stop.
_SIGNAL_SECONDS = 60.0
# Until the job of a run that has ended has left its nodes.
_LEAVING_SECONDS = 60.0
# A run has trained so many steps behind a checkpoint when a fault comes: others train them again.
_STEPS_BEYOND = 2
# Where neither steps nor checkpoints are known, a launch that has lived so long trains.
_BLIND_SECONDS = 5.0
# A launch that fails by itself may be bad luck, such as a port that is taken; another one is not.
_FAILURES = 2
_NEAR_SECONDS = 120.0
_TOO_NEAR = "it reaches its target before this can be done: rehearse it with more steps"
_RUNS_PER_FAULT = 2  # the first one may reach its target
_TRUNCATIONS = 3  # a newer checkpoint may be published meanwhile
_COPIED_BYTES = 2**20
_STEP_NAME = "hpctrain-try"

# Kills the rank with the highest number on a node, of a job of this user, with all its processes.
# Prints what it was, or nothing. RANK is what torchrun and its like set for each rank. A trainer's
# command may have none: then the driver of Ray is killed, which alone has its address, else all
# that the command has started, which the agent above it marks. Ranks of hpctrain's engines have
# srun's own number. The step of this script, the batch step and others are left alone.
KILL_RANK = r"""
has() { grep -qzxF "$1" "$process/environ" 2>/dev/null; }
knows() { grep -qz "^$1=" "$process/environ" 2>/dev/null; }
of() { sed -zn "s/^$1=\([0-9][0-9]*\)$/\1/p" "$process/environ" 2>/dev/null | tr -d '\0'; }
ranks() {
    for process in /proc/[0-9]*; do
        [ -O "$process" ] && has "SLURM_JOB_ID=$SLURM_JOB_ID" || continue
        [ -z "$SLURM_CONF" ] || has "SLURM_CONF=$SLURM_CONF" || continue
        has "SLURMD_NODENAME=$SLURMD_NODENAME" || continue
        step=$(of SLURM_STEP_ID)
        [ -n "$step" ] && [ "$step" != "$SLURM_STEP_ID" ] || continue
        kind=1 rank=$(of RANK)
        [ -n "$rank" ] || kind=4 rank=$(of SLURM_PROCID)
        [ $kind = 1 ] || ! knows HPCTRAIN_OUTPUT || kind=3
        [ $kind != 3 ] || ! knows RAY_ADDRESS || kind=2
        [ -z "$rank" ] || echo "$kind $rank ${process#/proc/}"
    done | sort -k1,1n -k2,2nr
}
found=$(ranks)
[ -n "$found" ] || exit 0
set -- $found
echo "$found" | while read -r kind rank process; do
    [ "$kind $rank" != "$1 $2" ] || kill -9 "$process" 2>/dev/null
done
case $1 in
2) echo "the driver of Ray" ;;
3) echo "the command on $SLURMD_NODENAME" ;;
*) echo "rank $2" ;;
esac
"""

Found = TypeVar("Found")
Say = Callable[[str], None]


@dataclass(frozen=True)
class RehearsalRequest:
    """What is rehearsed, where, and how long anything may take.

    `limit_seconds` is the time limit of each job, and the longest wait for one thing while it
    runs; `patience_seconds` the longest in the queue. `keep` the runs also if all is proved.
    """

    spec: Path
    profile: str
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    limit_seconds: float = 900.0
    patience_seconds: float = 1800.0
    keep: bool = False


class _Missed(Exception):
    """What was waited for has not come; the message says why."""


class _Done(_Missed):
    """The run has reached its target before what was waited for."""


class _NotPossible(_Missed):
    """What was to be done to the run could not be done here, which proves nothing about it."""


def rehearse(
    wanted: RehearsalRequest, runs: Path, slurm: SlurmClient, say: Say = lambda _: None
) -> RehearsalRecord:
    """Rehearse a run, record what was proved in the directory of runs, and return it.

    Raises DoesNotFitError for a run that needs more nodes, UsageError for a trainer that saves
    outside of the run, and what `submit` raises.
    """
    if str(wanted.spec) == "-":
        raise UsageError("a spec on standard input can be read only once", hint="give a file")
    begun_at = clock.monotonic()
    spec, _ = load_any_inputs(wanted.spec, wanted.profile, wanted.overrides)
    _refuse_other_places(spec.document)
    rehearsal = _Rehearsal(wanted, spec.document, rehearsals_directory(runs), slurm, say)
    try:
        prepared = rehearsal.carry_out()
    finally:
        rehearsal.end_all()
    record = RehearsalRecord(
        event="rehearsed",
        spec_name=spec.document.name,
        spec_digest=spec.digest,
        profile=prepared.profile.document.name,
        profile_digest=prepared.profile.digest,
        event_time=clock.now(),
        run_ids=tuple(one.run_id for one in rehearsal.submitted),
        nodes=str(prepared.plan.nodes),
        seconds=clock.monotonic() - begun_at,
        proofs=tuple(rehearsal.proofs[topic] for topic in TOPICS),
    )
    record_rehearsal(runs, record)
    if not (wanted.keep or record.missing):
        rehearsal.remove_all()
    return record


def _refuse_other_places(spec: RunSpec | TrainerRunSpec) -> None:
    """Raise UsageError for a trainer whose checkpoints lie where those of the real run lie."""
    where = spec.trainer.checkpoint if isinstance(spec, TrainerRunSpec) else None
    if where is not None and os.path.isabs(where.path):
        raise UsageError(
            f"the trainer saves in {where.path}, where the run itself saves: a rehearsal would "
            "damage what is there",
            hint="have it save below `{output}`, or rehearse with `--set trainer.checkpoint.path=`",
        )


def rehearsal_overrides(
    spec: RunSpec | TrainerRunSpec, gpus: int, walltime: Duration
) -> tuple[str, ...]:
    """List overrides for a short run on at most `gpus` GPUs, of which nobody is told.

    Each GPU has as many samples as in the whole run. Nothing is copied elsewhere, and nothing waits
    for another run.
    """
    resources = spec.resources
    gpus = min(resources.gpus, gpus)
    walltime = min(resources.walltime or walltime, walltime)
    own: tuple[str, ...] = ()
    if isinstance(spec, TrainerRunSpec):
        if spec.trainer.checkpoint is not None:
            own = (f"trainer.checkpoint.keep={_KEPT}", "trainer.checkpoint.keep_every_steps=")
    else:
        own = (
            "evaluation.every_steps=",
            "evaluation.jobs=[]",
            "profile=",
            "checkpoint.every=",
            f"checkpoint.keep={_KEPT}",
            "checkpoint.keep_every_steps=",
        )
        if gpus < resources.gpus:
            samples = math.ceil(spec.batch.global_ / resources.gpus) * gpus
            own += (f"batch.global={samples}", "batch.micro=auto")
        if spec.batch.ramp_up is not None:  # whose steps are fewer than a rehearsal needs to learn
            own += ("batch.ramp_up=",)
        if not spec.data.sources and spec.train_steps <= MADE_UP_STEPS:
            own += ("data.made_up=true",)
    return (
        f"name={rehearsal_name(spec.name)}",
        f"resources.gpus={gpus}",
        f"resources.walltime={walltime}",
        "resources.spare_nodes=0",
        "resources.min_nodes=",
        "supervise.failures_without_progress=6",
        "tracking.tensorboard=false",
        "tracking.wandb=",
        "metrics.endpoint=false",
        "notify.channels=[]",
        "after=",
        *own,
    )


def rehearsal_name(name: str) -> str:
    """Name the runs of a rehearsal after their run, within the length of a name."""
    return f"try-{name}"[:63]


# -- One run, watched from outside -----------------------------------------------------------------


@dataclass
class _WatchedRun:
    """A run of the rehearsal; waits read its directory, and ask Slurm as often as is allowed.

    `tells`: the trainer reports its steps, and in `rows` with a value of them. Of another one only
    checkpoints are known (`saves`), or nothing. `has_driver`: its only rank is on the first node.
    """

    run: RunFiles
    slurm: SlurmClient
    wanted: RehearsalRequest
    say: Say
    tells: bool = True
    rows: bool = True
    saves: bool = True
    has_driver: bool = False
    _asked_at: float = -math.inf
    _since: float = -math.inf
    _row: RunStatus | None = None

    @property
    def events(self) -> list[Event]:
        return self.run.ledger.events()

    @property
    def launches(self) -> list[TriedLaunch]:
        progress = read_record(self.run.layout.progress, Progress)
        return launches_of(self.events, read_metrics(self.run.layout), progress)

    @property
    def attempt(self) -> Event:
        """The newest start of the job by Slurm."""
        return starts(self.events)[-1]

    @property
    def good_steps(self) -> list[int]:
        """Steps of checkpoints that are whole by names and sizes, oldest first."""
        root = self.run.layout.checkpoints
        steps = published_steps(root)
        return [one for one in steps if inspect(root / checkpoint_name(one), one, "size").good]

    @property
    def newest(self) -> int:
        """The step of the newest good checkpoint, 0 without one."""
        return max(self.good_steps, default=0)

    @property
    def failed(self) -> list[TriedLaunch]:
        """The launches that have ended otherwise than Slurm and the target explain."""
        bad = FAILURE_CAUSES | FINAL_CAUSES
        return [one for one in self.launches if one.end is not None and one.end.cause in bad]

    def status(self) -> RunStatus:
        """Ask Slurm, have a requeued job start at once, and tell a change of state."""
        before, self._row = self._row, statuses([self.run], self.slurm)[0]
        self._asked_at = clock.monotonic()
        if before is None or before.state is not self._row.state:
            self.say(f"{self.run.run_id}: {_state_words(self._row)}")
            self._since = self._asked_at
        if self._asked_at - self._since > REVOKED_SECONDS:
            self._start_requeued()
        return self._row

    def _start_requeued(self) -> None:
        """End the minutes for which Slurm lets a requeued job wait (cred_expire of AuthInfo)."""
        if self._row is None or self._row.state is not RunState.PENDING:
            return
        with contextlib.suppress(SlurmError):
            there = slurm_of(self.run, self.slurm)
            for job in jobs_of(self.run, self.slurm).live:
                if job.state.is_pending and job.restart_count and job.hold is None:
                    there.update_job(job.job_id, start_now=True)

    def wait(
        self,
        what: str,
        reached: Callable[[], Found | None],
        seconds: float | None = None,
        *,
        over: bool = False,
    ) -> Found:
        """Wait for something that the run directory shows. Raises _Missed, _Done.

        Time in the queue and time on nodes have limits of their own; `seconds` replaces the
        latter. `over`: the end of the run is what is waited for.
        """
        limit, pause = seconds or self.wanted.limit_seconds, poll_interval([self.run], None)
        failures = len(self.failed)
        queued, active, before = 0.0, 0.0, clock.monotonic()
        while (found := reached()) is None:
            if clock.monotonic() - self._asked_at >= pause:
                row = self.status()
                if (found := reached()) is not None:
                    return found
                if row.state.over and not over:
                    kind = _Done if row.state is RunState.DONE else _Missed
                    raise kind(f"the run is {_state_words(row)}")
            clock.sleep(_LOOK_SECONDS)
            passed, before = clock.monotonic() - before, clock.monotonic()
            if self._row is not None and self._row.state is RunState.PENDING:
                queued += passed
            else:
                active += passed
            if len(failed := self.failed) - failures >= _FAILURES:
                words = f"launch {failed[-1].epoch} ended: {failed[-1].end_words}"
                raise _Missed(f"{what} was not seen: {words}")
            if queued > self.wanted.patience_seconds:
                waited = short_duration(queued)
                raise _NotPossible(f"{what} was not seen: the job waited {waited} in the queue")
            if active > limit:
                raise _Missed(f"{what} was not seen within {short_duration(limit)}")
        return found

    def trains(self, launch: TriedLaunch) -> bool:
        """Whether a launch has reported a step; of a trainer that reports none, whether it runs."""
        sign = launch.progress
        if launch.rows or sign is None or sign.phase != "training":
            return bool(launch.rows)
        return not self.tells or (not self.rows and sign.step > launch.resume_step)

    def wait_over(self) -> RunStatus:
        """Wait until the run is over. Raises _Missed."""

        def ended() -> RunStatus | None:
            return self._row if self._row is not None and self._row.state.over else None

        return self.wait("its end", ended, over=True)

    def wait_launch(self, after_epoch: int) -> TriedLaunch:
        """Wait for a launch after `after_epoch` that trains. Raises _Missed."""

        def trains() -> TriedLaunch | None:
            newer = [one for one in self.launches if one.epoch > after_epoch]
            return next((one for one in newer if self.trains(one)), None)

        return self.wait("the first step of a launch", trains)

    def wait_beyond(self, launch: TriedLaunch, steps: int) -> TriedLaunch:
        """Wait until a launch has trained some steps more than what it resumed from, or saved.

        Of a trainer that reports no steps, until it has saved; without checkpoints, for a while.
        Raises _Missed, also when it has ended.
        """

        def moved() -> TriedLaunch | None:
            found = self._again(launch)
            if self.tells:
                base = max(found.resume_step, *(one for one in (*self.good_steps, 0)))
                enough = found.last_step >= base + steps
            elif self.saves:
                enough = self.newest > found.resume_step
            else:
                enough = found.seen_seconds > _BLIND_SECONDS
            if not enough and found.end is not None:
                raise _Missed(f"the launch ended: {found.end_words}")
            return found if enough else None

        return self.wait(f"steps of launch {launch.epoch}", moved)

    def _again(self, launch: TriedLaunch) -> TriedLaunch:
        return next(one for one in self.launches if one.epoch == launch.epoch)

    def wait_end(self, launch: TriedLaunch, seconds: float | None = None) -> TriedLaunch:
        """Wait until a launch has ended. Raises _Missed."""

        def ended() -> TriedLaunch | None:
            found = self._again(launch)
            return found if found.end is not None else None

        return self.wait(f"the end of launch {launch.epoch}", ended, seconds)

    def kill_rank(self) -> str:
        """Kill one rank of the present attempt, and return which. Raises _Missed."""
        attempt, there = self.attempt, slurm_of(self.run, self.slurm)
        try:
            assert attempt.job_id is not None
            node = there.hostnames(attempt.nodes or "")[0 if self.has_driver else -1]
            words = ["/bin/sh", "-c", KILL_RANK]
            answer = there.run_on_node(attempt.job_id, node, _STEP_NAME, words)
        except (SlurmError, IndexError) as error:
            raise _NotPossible(f"Slurm started no step that kills a rank: {error}") from error
        victim = answer.strip()
        if not victim:
            raise _NotPossible(f"no process of a rank was found on {node}")
        self.say(f"{self.run.run_id}: killed {victim} by -9")
        return victim

    def truncate(self, step: int) -> None:
        """Shorten the largest file of a checkpoint of this run.

        The file is replaced, because the trainer's own may be the same one by another name.
        """
        directory = self.run.layout.checkpoints / checkpoint_name(step)
        manifest = read_manifest(directory)
        assert manifest is not None
        file = max(manifest.files, key=lambda one: one.size_bytes)
        path, kept = directory / file.name, min(file.size_bytes // 2, _COPIED_BYTES)
        with path.open("rb") as stream:
            head = stream.read(kept)
        shorter = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        shorter.write_bytes(head)
        shutil.copymode(path, shorter)
        os.replace(shorter, path)
        sizes = f"from {file.size_bytes} to {kept} bytes"
        self.say(f"{self.run.run_id}: cut {file.name} of step {step} {sizes}")


def _state_words(row: RunStatus) -> str:
    return f"{row.state}: {row.reason}" if row.reason else str(row.state)


# -- The order of a rehearsal ----------------------------------------------------------------------


@dataclass
class _Rehearsal:
    """The runs of one rehearsal, and what was proved by them."""

    wanted: RehearsalRequest
    spec: RunSpec | TrainerRunSpec
    place: Path
    slurm: SlurmClient
    say: Say
    submitted: list[RunFiles] = field(default_factory=list)
    proofs: dict[str, Proof] = field(default_factory=dict)

    def carry_out(self) -> PreparedRun:
        """Prove what can be proved; the rest is `not tried`, with the reason."""
        spec, more = self.spec, tuple[str, ...]()
        if isinstance(spec, TrainerRunSpec):
            prepared = self._prepared()
            for topic, reason in unpromised(spec.trainer):
                self.proofs[topic] = proved(topic, None, reason, promised=False)
        else:
            decay = f"schedule.decay_steps={spec.schedule.decay_steps or spec.train_steps}"
            always = ("budget.tokens=", decay)
            first = (f"budget.steps={_FIRST_STEPS}", f"checkpoint.every_steps={_FIRST_SAVE}")
            prepared = self._prepared(*always, *first)
        try:
            if not isinstance(spec, TrainerRunSpec):
                step_seconds, save_seconds = self._undisturbed(prepared)
                apart = max(_LEAST_SECONDS_BETWEEN_SAVES, _SAVES_BETWEEN_SAVES * save_seconds)
                every = max(2, math.ceil(apart / step_seconds))
                steps = max(10 * every, math.ceil(_TRAINING_SECONDS / step_seconds))
                more = (*always, f"budget.steps={steps}", f"checkpoint.every_steps={every}")
            self._disturbed(self._prepared(*more) if more else prepared)
        except _Missed:
            for topic in TOPICS:
                if topic not in self.proofs and topic != TARGET:
                    self.proofs[topic] = proved(topic, None, "the rehearsal did not get so far")
        if TARGET not in self.proofs:
            reason = "it is beyond a rehearsal, which cancels the run"
            self._prove(proved(TARGET, None, reason, promised=not isinstance(spec, TrainerRunSpec)))
        return prepared

    def _prepared(self, *more: str) -> PreparedRun:
        """Plan a run of the rehearsal. Raises DoesNotFitError with the nodes that it needs."""
        try:
            return self._planned(self.wanted, more)
        except RefusedPlanError as error:
            enough = self.wanted.nodes
            while enough < self.spec.resources.gpus:
                enough *= 2
                with contextlib.suppress(RefusedPlanError):
                    self._planned(replace(self.wanted, nodes=enough), more)
                    break
            else:
                enough = 0
            nodes = self.wanted.nodes
            hint = "rehearse a smaller model: `--set model.layers=4`"
            raise DoesNotFitError(
                f"cannot be rehearsed on {nodes} {'node' if nodes == 1 else 'nodes'}: {error}",
                hint=f"`--nodes {enough}` rehearses it on so many" if enough else hint,
            ) from None

    def _planned(self, wanted: RehearsalRequest, more: Sequence[str]) -> PreparedRun:
        _, loaded = load_any_inputs(wanted.spec, wanted.profile, wanted.overrides)
        site = loaded.document
        partition = site.slurm.partition(self.spec.resources.partition)
        walltime = Duration(wanted.limit_seconds)
        if partition is not None and partition.max_walltime is not None:
            walltime = min(walltime, partition.max_walltime)
        gpus = wanted.nodes * site.gpu.per_node
        given = (*wanted.overrides, *rehearsal_overrides(self.spec, gpus, walltime), *more)
        return prepare_any(wanted.spec, wanted.profile, given, runs=self.place)

    def _submit(self, prepared: PreparedRun, purpose: str) -> _WatchedRun:
        self.place.mkdir(parents=True, exist_ok=True, mode=0o700)
        done = submit(prepared, self.place, self.slurm)
        run = find_run(self.place, done.run_id)
        self.submitted.append(run)
        self.say(f"{run.run_id}: job {done.job_id}, {prepared.plan.nodes}: {purpose}")
        watched = _WatchedRun(run, self.slurm, self.wanted, self.say)
        if isinstance(self.spec, TrainerRunSpec):
            trainer = self.spec.trainer
            watched.tells = bool(trainer.metrics) or trainer.talks
            watched.rows = any(reports_values(one) for one in trainer.metrics)
            watched.saves = trainer.checkpoint is not None
            watched.has_driver = trainer.starts_by == "ray"
        return watched

    def _prove(self, proof: Proof) -> None:
        self.proofs[proof.topic] = proof
        self.say(f"{proof.topic}: {proof.verdict}: {proof.fact}")

    @contextlib.contextmanager
    def _proving(self, topic: str) -> Iterator[None]:
        """Take what does not come for a no, unless the run has reached its target meanwhile."""
        try:
            yield
        except _Missed as missed:
            if topic not in self.proofs and not isinstance(missed, _Done):
                verdict = None if isinstance(missed, _NotPossible) else False
                self._prove(proved(topic, verdict, str(missed)))
            raise

    # -- start, first checkpoint, end ------------------------------------------------------

    def _begin(self, watched: _WatchedRun) -> TriedLaunch:
        """Wait for the first step and the first checkpoint of a run. Raises _Missed."""
        with self._proving(START):
            launch = watched.wait_launch(0)
            if START not in self.proofs:
                asked = recorded(watched.events)[0]
                self._prove(started(launch, watched.attempt.time, asked.time))
        if not watched.saves:
            return launch
        with self._proving(CHECKPOINT):
            root = watched.run.layout.checkpoints
            steps = watched.wait("a checkpoint", lambda: published_steps(root) or None)
            if CHECKPOINT not in self.proofs:
                found = inspect(root / checkpoint_name(steps[-1]), steps[-1], "auto")
                files = found.manifest.files if found.manifest is not None else ()
                sizes = [one.size_bytes for one in files]
                self._prove(complete(steps[-1], found.problem, sizes, deep=found.deep))
                if not found.good:
                    raise _Missed(f"the checkpoint of step {steps[-1]} is of no use")
        return launch

    def _undisturbed(self, prepared: PreparedRun) -> tuple[float, float]:
        """Start, save, end; returns the seconds of a step and of a save. Raises _Missed."""
        watched = self._submit(prepared, "start, first checkpoint, end at its target")
        self._begin(watched)
        self._end_at_target(watched)
        layout = watched.run.layout
        saves = [save_seconds(one) or 0.0 for one in read_saves(layout)]
        times = [row.step_seconds for row in read_metrics(layout)[1:] if row.step_seconds]
        return max(median(times or [1.0]), 1e-4), max(saves, default=0.0)

    def _end_at_target(self, watched: _WatchedRun) -> None:
        with self._proving(TARGET):
            row = watched.wait_over()
            if row.state is not RunState.DONE:
                raise _Missed(f"the run is {_state_words(row)}")
        self._prove_target(watched)

    def _prove_target(self, watched: _WatchedRun) -> None:
        done = read_record(watched.run.layout.done, DoneMarker)
        step = done.step if done is not None else watched.launches[-1].last_step
        self._prove(proved(TARGET, True, f"done at step {step}"))

    # -- the faults ------------------------------------------------------------------------

    def _disturbed(self, prepared: PreparedRun) -> None:
        """Do one fault after the other to a run; to the next one if it has ended. Raises _Missed.

        A trainer's own target may be near: then each fault has a run of its own.
        """
        watched: _WatchedRun | None = None
        seen: list[_WatchedRun] = []
        faults = ((SAVE, self._warned), (KILLED, self._killed), (DAMAGED, self._truncated))
        for topic, fault in faults:
            if topic in self.proofs and (topic != SAVE or RESUME in self.proofs):
                continue  # not promised
            for _ in range(_RUNS_PER_FAULT):
                if watched is None:
                    watched = self._submit(prepared, "signal, killed rank, truncated checkpoint")
                    seen.append(watched)
                known = [one for one in watched.launches if watched.trains(one) and not one.end]
                try:
                    launch = known[-1] if known else self._begin(watched)
                    fault(watched, watched.wait_beyond(launch, _STEPS_BEYOND))
                    break
                except _Done:
                    self._prove_target(watched)
                    watched = None
                except _Missed as missed:
                    if any(one.ended_early for one in watched.failed):
                        self._prove(proved(TARGET, False, watched.failed[0].end_words))
                    begun = [self.proofs.get(one) for one in (START, CHECKPOINT)]
                    if any(one is None or one.is_missing for one in begun):
                        raise
                    self._leave_out(topic, str(missed))
                    self._end(watched.run)
                    watched = None
                    break
            else:
                self._leave_out(topic, _TOO_NEAR)
        if LOSSES not in self.proofs:
            exact, bound = True, bound_of("bf16", "bf16")
            if isinstance(self.spec, TrainerRunSpec):
                exact = False
            else:
                bound = bound_of(self.spec.precision, self.spec.precision)
            found = [one.launches for one in seen]
            self._prove(same_losses(found, bound, exact=exact))
        if TARGET not in self.proofs and watched is not None and self._is_near(watched):
            self._end_at_target(watched)

    def _leave_out(self, topic: str, reason: str) -> None:
        """Say why a fault was not done, and what would have followed it was not seen."""
        for one in (topic, RESUME) if topic == SAVE else (topic,):
            if one not in self.proofs:
                self._prove(proved(one, None, reason))

    def _is_near(self, watched: _WatchedRun) -> bool:
        """Whether the target of a trainer is reached within a minute or two."""
        rows = watched.launches[-1].rows
        if not isinstance(self.spec, TrainerRunSpec) or len(rows) < 2:
            return False
        steps_left = (self.spec.trainer.done.step or math.inf) - rows[-1].step
        pace_seconds = (rows[-1].time - rows[0].time) / (rows[-1].step - rows[0].step)
        return steps_left * pace_seconds < _NEAR_SECONDS

    def _warned(self, watched: _WatchedRun, launch: TriedLaunch) -> None:
        """Warn the job as Slurm does before its time limit, and see where it resumes."""
        layout, before = watched.run.layout, watched.newest
        attempt = watched.attempt
        assert attempt.job_id is not None
        config = read_supervise_config(layout.supervise_config)
        patience, refused = config.warning_seconds, None
        with self._proving(SAVE):
            try:
                slurm_of(watched.run, self.slurm).signal_batch(attempt.job_id, "USR1")
            except SlurmError as error:
                # An element of an array gets it, and scancel fails all the same (Slurm 22.05).
                refused = error
            self.say(f"{watched.run.run_id}: sent USR1, as Slurm warns before the time limit")

            def arrived() -> Event | None:
                got = (one for one in signals(watched.events) if one.attempt == attempt.attempt)
                return next(got, None)

            try:
                sent = watched.wait("the signal at the supervisor", arrived, _SIGNAL_SECONDS)
            except _Missed as missed:
                if refused is None:
                    raise
                raise _NotPossible(f"Slurm did not send the signal: {refused}") from missed
            ended = watched.wait_end(launch, patience + _SIGNAL_SECONDS)
            assert ended.end is not None
            if SAVE not in self.proofs:
                left = next(iter(read_exit_records(layout, launch.epoch)), None)
                codes = (left.rank_codes or (left.exit_code,)) if left is not None else ()
                took = [save_seconds(one) for one in read_saves(layout)][-1:]
                self._prove(
                    saved_on_signal(
                        ended,
                        before,
                        watched.newest,
                        save_seconds=took[0] if took else None,
                        leave_seconds=max(0.0, ended.end.time - sent.time),
                        exit_codes=codes,
                    )
                )
        with self._proving(RESUME):
            how, expected = "", watched.newest
            if config.continuation == "none":
                watched.wait_over()
                self.say(control.resume(watched.run, self.slurm).message)
                how = "by `hpctrain resume`: this site does not requeue"
            after = watched.wait_launch(launch.epoch)
            if not how:
                is_same = after.start.job_id == attempt.job_id
                job = "the same job" if is_same else f"the run's next job, {after.start.job_id}"
                how = f"by itself, in {job}"
            if RESUME not in self.proofs:
                self._prove(resumed(after, expected, how))

    def _killed(self, watched: _WatchedRun, launch: TriedLaunch) -> None:
        with self._proving(KILLED):
            victim = watched.kill_rank()
            killed_at = clock.monotonic()
            ended = watched.wait_end(launch)
            expected = watched.newest
            after = watched.wait_launch(launch.epoch)
            seconds = clock.monotonic() - killed_at
            self._prove(restarted(ended, after, expected, victim, seconds))

    def _truncated(self, watched: _WatchedRun, launch: TriedLaunch) -> None:
        """Kill a rank and truncate what it has saved; then train the steps behind it again.

        After the end of a launch, because a trainer may save while it is ended. The next one may
        have begun by then: another rank is killed. The checkpoint before the truncated one should
        be one that a launch went through: else there is nothing to compare losses with.
        """
        root, damaged, expected = watched.run.layout.checkpoints, 0, 0

        def compares(step: int) -> bool:
            launches = watched.launches
            known = LOSSES in self.proofs or trained_twice(launches)
            return known or any(one.resume_step < step < one.last_step for one in launches)

        def saved() -> bool | None:
            steps = watched.good_steps
            return True if len(steps) > 1 and compares(steps[-2]) else None

        with self._proving(DAMAGED):
            for tries_left in reversed(range(_TRUNCATIONS)):
                if published_steps(root)[-1] != damaged:
                    watched.wait("a second checkpoint", saved)
                watched.kill_rank()
                watched.wait_end(launch)
                known = max(one.last_step for one in watched.launches)
                if published_steps(root)[-1] != damaged:
                    *_, older, newest = watched.good_steps
                    if compares(older) or not tries_left:
                        expected, damaged = older, newest
                        watched.truncate(damaged)
                launch = watched.wait_launch(launch.epoch)
                if launch.resume_step < damaged:
                    break
                begun = launch.resume_step == damaged
                why = f"launch {launch.epoch} had begun" if begun else "it had saved another one"
                self.say(f"{watched.run.run_id}: {why}; once more")
            self._prove(passed_over(launch, watched.events, damaged, expected))
        upto = min(max(damaged, expected + 1) + _STEPS_BEYOND, known)
        if watched.tells:
            with contextlib.suppress(_Missed):  # the losses that there are
                watched.wait(
                    f"step {upto}",
                    lambda: True if watched.launches[-1].last_step >= upto else None,
                )

    # -- afterwards ------------------------------------------------------------------------

    def end_all(self) -> None:
        """Cancel what is not over, also when somebody has interrupted the rehearsal."""
        for run in self.submitted:
            self._end(run)

    def _end(self, run: RunFiles) -> None:
        if run.layout.done.exists():
            return
        with contextlib.suppress(UsageError):  # it is over
            try:
                if not control.cancel(run, self.slurm).already:
                    self.say(f"{run.run_id}: cancelled")
            except SlurmError as error:
                command = command_in(self.place, "cancel", run.run_id)
                self.say(f"{run.run_id}: could not be cancelled: {error}; `{command}`")

    def remove_all(self) -> None:
        """Remove the runs, once their jobs have left their nodes, and what they noted of nodes."""
        deadline = clock.monotonic() + _LEAVING_SECONDS
        for run in self.submitted:
            while True:
                try:
                    clean.remove(run, self.slurm)
                    break
                except HpctrainError as error:
                    if clock.monotonic() >= deadline:
                        self.say(f"{run.run_id} is kept: {error}")
                        break
                    clock.sleep(1.0)
        with contextlib.suppress(OSError):  # runs of other rehearsals are there
            if not any(path.is_dir() for path in self.place.iterdir()):
                (self.place / NODE_LEDGER_NAME).unlink(missing_ok=True)
                self.place.rmdir()
