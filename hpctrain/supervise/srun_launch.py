"""Make one launch: claim the run, choose the checkpoint, start srun, watch it, record its end.

Belongs here: the order of these steps. Does not belong here: judging (`judge.classify`), deciding
(`judge.policy`), acting (`act.execute`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.errors import CheckpointError, HpctrainError, SlurmError
from hpctrain.checkpoints.discover import (
    HOW_TO_START_OVER,
    Checkpoint,
    Decisions,
    good_steps,
    select_for_resume,
)
from hpctrain.checkpoints.foreign import EndedLaunch, publish_left
from hpctrain.checkpoints.publish import fence_off
from hpctrain.checkpoints.resume_shares import write_shares
from hpctrain.engines.trainer import trainer_settings_of
from hpctrain.judge.causes import Cause
from hpctrain.judge.classify import classify
from hpctrain.judge.documents import LaunchEvidence, Verdict
from hpctrain.judge.launch_history import pending_rejections, pending_rollback, pinned_steps
from hpctrain.judge.launch_nodes import Placement, host_file_lines, place_command
from hpctrain.judge.probe_results import KernelLine, ProbeResult
from hpctrain.judge.slow_nodes import SlowRank, replaceable_nodes
from hpctrain.records.data_identity import (
    InterruptedReadingError,
    compare,
    read_identity,
    recorded_again,
    with_touched,
    write_identity,
)
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.known_steps import accepted_fresh_start, fresh_start_pending, known_steps
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.requests import clear_stale_requests
from hpctrain.records.run_records import Progress, read_record
from hpctrain.records.speed_checks import SpeedCheck
from hpctrain.slurm.client import SlurmClient
from hpctrain.supervise.context import AttemptContext, log_message
from hpctrain.supervise.evidence.gather import (
    Prober,
    Traces,
    examine_failure,
    gather,
    newest_logged_step,
    probe_job,
)
from hpctrain.supervise.evidence.launch_watch import CrossLaunchState, LaunchWatch
from hpctrain.supervise.site_commands import SiteCommands
from hpctrain.supervise.srun_process import SrunProcess, reserve_port
from hpctrain.supervise.time_limit import JobTimeLimit
from hpctrain.version import __version__


@dataclass(frozen=True)
class Ended:
    """The end of a launch: the verdict, and the evidence if srun was started."""

    verdict: Verdict
    evidence: LaunchEvidence | None = None
    probe: ProbeResult | None = None
    slow_ranks: tuple[SlowRank, ...] = ()
    speed_check: SpeedCheck | None = None


class TrainerLauncher:
    """Makes the launches of one attempt; `epoch` is the epoch of the newest launch."""

    def __init__(
        self,
        context: AttemptContext,
        argv: list[str],
        environment: Mapping[str, str],
        prober: Prober = probe_job,
    ) -> None:
        self.context = context
        self.argv = argv
        self.environment = dict(environment)
        self.prober = prober
        self.commands = SiteCommands(context, environment)
        self.launches = 0
        self.epoch = 0
        self.name = f"{context.attempt} on {context.attempt.node}"
        self._state: CrossLaunchState | None = None
        self._time_limit: JobTimeLimit | None = None
        self._seen: frozenset[KernelLine] = frozenset()
        self._checked_nodes: frozenset[str] = frozenset()

    def launch(
        self, placement: Placement, job_nodes: Sequence[str], time_limit: JobTimeLimit | None = None
    ) -> Ended:
        """Run the trainer once on `placement`, from the newest checkpoint that is not rejected.

        `job_nodes` are all nodes of the job; they are probed if the launch fails. `time_limit` is
        Slurm's latest answer about the time limit.
        """
        context, self._time_limit = self.context, time_limit
        run = context.run_layout
        run.require()
        self.epoch = claim_epoch(run.epochs, self.name)
        fence_off(run.checkpoints, self.epoch)
        clear_stale_requests(run)
        try:
            changed = data_problem(context)
            if changed is not None:
                return self._not_begun(changed)
            if context.config.launcher == "agent":
                self.publish_left()
            start = self._select_checkpoint()
        except CheckpointError as error:
            reason = f"{error}; {error.hint}" if error.hint else str(error)
            return self._not_begun(Verdict(Cause.BAD_CHECKPOINT, reason))
        except OSError as error:
            reason = f"{error.filename or run.checkpoints}: {error.strerror or error}"
            return self._not_begun(Verdict(Cause.STORAGE, reason))
        nodes = placement.nodes or job_nodes
        failed = self.commands.run_before(nodes)
        if failed is not None:
            ended = self._not_begun(failed)
            self.commands.run_after((), time_limit)
            return ended
        resume_step = start.step if start else 0
        self.launches += 1
        if start is not None and placement.shape is not None and placement.shape.tasks:
            _hand_out_shares(start, placement.shape.tasks)
        context.note(
            EventKind.LAUNCH_STARTED,
            epoch=self.epoch,
            launch=self.launches,
            resume_step=resume_step,
            launch_nodes=placement.shape.nodes if placement.shape else None,
            nodes=",".join(placement.nodes) or None,
        )
        ended, exit_code = self._watch(placement, start, job_nodes)
        newest = ended.evidence.checkpoint_step if ended.evidence is not None else None
        self._note_end(ended.verdict, resume_step, exit_code, newest)
        log_message(f"launch {self.launches} ended: {ended.verdict.cause}: {ended.verdict.reason}")
        self.commands.run_after(ended.evidence.lost_nodes if ended.evidence else nodes, time_limit)
        return ended

    def publish_left(self) -> None:
        """Publish what earlier launches of a trainer of one's own have left. Raises OSError."""
        context, run = self.context, self.context.run_layout
        settings = trainer_settings_of(run.train_config, run.train_config.read_bytes())
        started = {
            event.epoch: event
            for event in context.ledger.events()
            if event.event is EventKind.LAUNCH_STARTED
        }
        launches = []
        for output in run.output.glob("launch-*"):
            epoch = int(output.name.removeprefix("launch-"))
            event = started.get(epoch)
            nodes = event.launch_nodes if event is not None else None
            ranks = (nodes or context.config.shapes[0].nodes) * settings.gpus_per_node
            resumed = event.resume_step if event is not None else None
            launches.append(EndedLaunch(output, epoch, ranks, resumed or 0))
        for sentence in publish_left(run, self.epoch, settings.trainer, launches):
            log_message(sentence)

    def _not_begun(self, verdict: Verdict) -> Ended:
        """Record a failure before srun as an ended launch, so that retry budgets count it."""
        newest: tuple[int, ...] = ()
        with contextlib.suppress(OSError):
            newest = good_steps(self.context.run_layout.checkpoints)
        self._note_end(verdict, None, None, next(iter(newest), None))
        log_message(f"nothing was launched: {verdict.cause}: {verdict.reason}")
        return Ended(verdict)

    def _watch(
        self, placement: Placement, start: Checkpoint | None, job_nodes: Sequence[str]
    ) -> tuple[Ended, int | None]:
        """Start srun, watch it to its end, gather evidence and judge it.

        Returns the end and srun's exit code.
        """
        argv, since = place_command(self.argv, placement), clock.now()
        step_before = newest_logged_step(self.context)
        attempt = f"{self.context.run_layout.directory} {self.context.attempt}"
        port = None
        try:
            port = reserve_port(attempt, self.epoch, self.context.config.master_ports)
            environment = self._environment(placement, start, port.getsockname()[1], job_nodes)
            if placement.reordered:
                environment["SLURM_HOSTFILE"] = self._write_host_file(placement)
            launch = SrunProcess(argv, environment)
        except OSError as error:
            if port is not None:
                port.close()
            reason = f"srun could not be run: {error}"
            return Ended(Verdict(Cause.LAUNCH_FAILURE, reason)), None
        if self._state is None:
            self._state = CrossLaunchState.of(self.context)
        with port:
            watch = LaunchWatch(
                self.context,
                launch,
                self.epoch,
                start.step if start else 0,
                state=self._state,
                tasks=placement.shape.tasks if placement.shape else 0,
                nodes=placement.nodes or job_nodes,
                time_limit=self._time_limit,
            )
            watch.wait()
        if self.context.hurries:
            self.context.ledger.defer()  # until the job is in the queue again
        if watch.speed_check is not None:
            self._checked_nodes = frozenset(watch.speed_check.nodes)
        evidence = gather(self.context, launch, watch)
        launched_on = tuple(placement.nodes or job_nodes)
        traces = Traces(since, step_before, launched_on, self._seen)
        examined = examine_failure(self.context, evidence, job_nodes, traces, self.prober)
        self._seen |= frozenset(examined.probe.kernel_lines if examined.probe is not None else ())
        verdict = classify(examined.evidence)
        ended = Ended(
            verdict, examined.evidence, examined.probe, watch.slow_ranks, watch.speed_check
        )
        return ended, launch.poll()

    def _write_host_file(self, placement: Placement) -> str:
        """Write the node of each task, on which srun places them in this order; return the path."""
        attempt = self.context.attempt
        path = self.context.run_layout.host_file(attempt.job_id, attempt.restart_count, self.epoch)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{node}\n" for node in host_file_lines(self.argv, placement)))
        return str(path)

    def _select_checkpoint(self) -> Checkpoint | None:
        """Select the checkpoint to resume from; record it and those that were rejected.

        None for a replica of a service, which has none.

        Raises CheckpointError when the run must not start over without a person's consent.
        """
        context = self.context
        if context.config.serves:
            return None
        events = context.ledger.events()
        root, level = context.run_layout.checkpoints, context.config.verify
        selection = select_for_resume(root, level, decisions_of(events))
        for bad in selection.rejected:
            context.note(
                EventKind.CHECKPOINT_REJECTED,
                checkpoint_step=bad.step,
                cause=Cause.BAD_CHECKPOINT,
                reason=bad.problem,
            )
            log_message(f"checkpoint of step {bad.step} rejected: {bad.problem}")
        checkpoint = selection.checkpoint
        if checkpoint is None:
            reason = why_fresh_start(context.run_layout, events)
            context.note(EventKind.RESUME, resume_step=0, reason=reason)
            log_message(f"{reason}, from step 0")
        else:
            reason = f"from verified checkpoint {checkpoint.directory.name}"
            context.note(EventKind.RESUME, resume_step=checkpoint.step, reason=reason)
            log_message(f"resume from step {checkpoint.step}")
        return checkpoint

    def _environment(
        self,
        placement: Placement,
        start: Checkpoint | None,
        port: int,
        job_nodes: Sequence[str],
    ) -> dict[str, str]:
        """Set the variables of the trainer for this launch."""
        context, image = self.context, self.context.config.image
        master = placement.nodes[0] if placement.nodes else context.attempt.node
        mttf_seconds, events = context.mttf_seconds(), context.ledger.events()
        replaceable = replaceable_nodes(
            context.config, placement, placement.nodes or job_nodes, self._checked_nodes, events
        )
        return {
            **self.environment,
            "HPCTRAIN_EPOCH": str(self.epoch),
            "HPCTRAIN_VERSION": __version__,  # that of the trainer's image may be another
            **({"HPCTRAIN_IMAGE": image_identity(image)} if image else {}),
            "HPCTRAIN_RESUME": start.directory.name if start else "",
            "HPCTRAIN_PINNED_STEPS": " ".join(map(str, pinned_steps(events))),
            "HPCTRAIN_SPEED_CHECK": "off" if replaceable is None else str(replaceable),
            **({"HPCTRAIN_MTTF_SECONDS": f"{mttf_seconds:.0f}"} if mttf_seconds else {}),
            "MASTER_ADDR": master_address(context.slurm, master, context.config.master_address),
            "MASTER_PORT": str(port),
        }

    def _note_end(
        self,
        verdict: Verdict,
        resume_step: int | None,
        code: int | None,
        checkpoint_step: int | None,
    ) -> None:
        run = self.context.run_layout
        progress = read_record(run.progress, Progress)
        self.context.note(
            EventKind.LAUNCH_ENDED,
            epoch=self.epoch,
            launch=self.launches if resume_step is not None else None,
            cause=verdict.cause,
            reason=verdict.reason,
            evidence=verdict.evidence,
            rank=verdict.rank,
            node=verdict.nodes[0] if verdict.nodes else None,
            fingerprint=verdict.fingerprint or None,
            failed_step=verdict.step,
            hard=verdict.hard,
            resume_step=resume_step,
            last_step=progress.step if progress and progress.epoch == self.epoch else None,
            checkpoint_step=checkpoint_step,
            exit_code=code,
        )


def _hand_out_shares(start: Checkpoint, tasks: int) -> None:
    """Divide the files of the checkpoint among the ranks, which spares each of them the manifest.

    If that fails, the ranks read the manifest themselves.
    """
    assert start.manifest is not None, "a good checkpoint has a manifest"
    try:
        write_shares(start.directory, start.manifest, tasks)
    except OSError as error:
        log_message(f"the shares of the checkpoint cannot be written: {error.strerror}")


# -- Choose MASTER_ADDR, the address at which all ranks reach the first node of a launch --------


def master_address(slurm: SlurmClient, node: str, form: str | None) -> str:
    """Return the address of `node` in the form of `network.master_address`.

    None: the address that Slurm uses, or the node's name if Slurm does not answer. `hostname
    --ip-address` may give a loopback address. `ip`: that address as a number, if it can be
    resolved here; `{node}` in any other form is the name of the node.
    """
    if form is not None and form != "ip":
        return form.replace("{node}", node)
    address = node
    with contextlib.suppress(SlurmError):
        address = slurm.node_address(node)
    if form == "ip":
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
            numbers = [str(entry[4][0]) for entry in found]
            return next((one for one in numbers if not one.startswith("127.")), numbers[0])
    return address


# -- Identify the container image of a launch, which its ranks cannot see from inside -----------


_END_BYTES = 2**20
_DIGITS = 12


def image_identity(image: str) -> str:
    """Describe an image by its name and, for a file, a digest of its size, head and end.

    A whole image has tens of GiB. SquashFS and SIF have times and identifiers in their heads, and
    tables of contents at their ends, so that two builds differ there. A directory or an address
    stays a name: what is behind it may change unseen, unless the address has a digest.
    """
    path = Path(os.path.expandvars(image))
    try:
        if not path.is_file():
            return image
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            digest = hashlib.sha256(str(size).encode())
            for start in (0, max(0, size - _END_BYTES)):
                stream.seek(start)
                digest.update(stream.read(_END_BYTES))
    except OSError:
        return image
    return f"{path.name} ({digest.hexdigest()[:_DIGITS]})"


# -- Decide whether a run without a checkpoint may start at step 0 ------------------------------
# It may if no record shows that there ever was a checkpoint, or if a person has accepted the loss.


def decisions_of(events: Sequence[Event]) -> Decisions:
    """Collect the decisions in the ledger about the checkpoint of the next launch."""
    accepted = accepted_fresh_start(events)
    pending = accepted if fresh_start_pending(events) else None
    return Decisions(
        at_most_step=pending_rollback(events),
        rejected=pending_rejections(events),
        from_scratch=f"{pending.user} had the run start at step 0" if pending else None,
        loss_accepted=accepted is not None,
    )


def why_fresh_start(run: RunLayout, events: Sequence[Event]) -> str:
    """Return why the run starts at step 0, for the ledger.

    Raises CheckpointError when the run has published a checkpoint whose loss nobody has accepted,
    OSError when its records cannot be read.
    """
    known = known_steps(run, events)
    if fresh_start_pending(events):
        accepted = accepted_fresh_start(events)
        return f"fresh start, accepted by {accepted.user if accepted else 'somebody'}"
    if known.saved:
        raise CheckpointError(
            f"{run.checkpoints} holds no checkpoint, and the run has published some: "
            f"{known.sources}; a start from step 0 would lose that work",
            hint=f"restore them from a copy, or {HOW_TO_START_OVER}",
        )
    if known.trained:
        return f"fresh start: {known.trained} steps that no checkpoint holds are trained again"
    return "fresh start"


# -- Refuse a launch on data that differ from those that the run has trained on -----------------
# Losses after a silent change look plausible and mean nothing.


_MOST_NAMED, _MOST_EVIDENCE = 3, 6


def data_problem(context: AttemptContext) -> Verdict | None:
    """Compare the data with their record; return the verdict that prevents a launch, if any.

    Before the first step nothing depends on the data yet, so a change is only recorded. A file that
    cannot be read is left to the ranks, which see whether others can. Raises OSError when the
    record itself cannot be read or renewed.
    """
    accept = f"`hpctrain resume {context.config.run_id} --accept-data`"
    remedy = f"restore what it was, or accept what it is with {accept}"
    run = context.run_layout
    try:
        identity = read_identity(run.data_identity)
        if identity is None:
            return None
        found = compare(identity, lambda: context.signals.final)
    except InterruptedReadingError as error:
        log_message(str(error))  # the job is being ended
        return None
    except HpctrainError as error:
        return Verdict(Cause.DATA_CHANGED, f"{error}; {remedy}")
    for problem in found.unread:
        log_message(f"data: {problem}")
    if found.touched:
        names = ", ".join(file.path for file in found.touched[:_MOST_NAMED])
        log_message(
            f"data: {len(found.touched)} files have another time and the same content: {names}"
        )
        write_identity(run.data_identity, with_touched(identity, found))
    if not found.changed:
        return None
    named = "; ".join(found.changed[:_MOST_NAMED])
    more = len(found.changed) - _MOST_NAMED
    reason = f"the data have changed: {named}" + (f"; and {more} more" if more > 0 else "")
    known = known_steps(run, context.ledger.events())
    if not known.saved and not known.trained:
        reason = f"{reason}; before the first step, so they are recorded anew"
        context.note(EventKind.OBSERVED, reason=reason)
        log_message(reason)
        write_identity(run.data_identity, recorded_again(identity))
        return None
    evidence = found.changed[:_MOST_EVIDENCE]
    return Verdict(Cause.DATA_CHANGED, f"{reason}; {remedy}", evidence)
