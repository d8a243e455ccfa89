"""The controller of a service: looks, decides and acts, again and again.

There is one at a time: it takes an epoch of the service and gives up when a higher one is taken.
Each action has a line in the service's ledger before it is carried out. What a controller knows is
in the service directory, so that the next one goes on where it was. Belongs here: the order of
these steps. Does not belong here: how many replicas (`scaling`) and which ones (`decide`), what the
router asks (`rotation`), jobs (`jobs`).
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from zoneinfo import ZoneInfo

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError
from hpctrain.records.epochs import is_superseded
from hpctrain.records.run_records import read_record, write_record
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import (
    Endpoint,
    ReplicaState,
    RestartRequest,
    ScaleRequest,
    ScalingMemory,
    ServiceEventKind,
    ServiceLedger,
    ServiceSettings,
    ServiceState,
)
from hpctrain.serve.http_request import address_of, http_request
from hpctrain.serve.jobs import JobView, SlurmReplicaJobs
from hpctrain.serve.replica.life import say
from hpctrain.serve.router.decide import (
    Action,
    Drain,
    FinishRestart,
    Phase,
    ReplicaView,
    RollingRestart,
    Start,
    StopRestart,
    Timing,
    decide,
)
from hpctrain.serve.router.rotation import EndpointReader
from hpctrain.serve.router.scaling import Load, Replicas, Wanted, wanted_now
from hpctrain.serve.router.traffic import TrafficWatch

PASS_SECONDS = 1.0
_STATE_SECONDS = 5.0
# A start or a drain that has failed is tried again after so long.
_RETRY_SECONDS = 15.0
# Of the last replicas that were measured the slowest counts.
_MEASURED = 3
# A new replica that does not answer the comparison so often is no good.
_MOST_COMPARISONS = 5
# A wait in the queue that is longer than this says nothing about the next one.
_LONGEST_QUEUE_SECONDS = 6 * 3600.0

_NOTED_PHASES = {
    "ready": ServiceEventKind.REPLICA_READY,
    "failed": ServiceEventKind.REPLICA_FAILED,
    "ended": ServiceEventKind.REPLICA_ENDED,
}


class Controller:
    """Steers one service with one epoch; `asked` are the URLs that the router asks now."""

    def __init__(
        self,
        service: ServiceLayout,
        settings: ServiceSettings,
        jobs: SlurmReplicaJobs,
        traffic: TrafficWatch,
        asked: Callable[[], dict[ReplicaName, str]],
        epoch: int,
        claimant: str,
    ) -> None:
        self._service, self._settings, self._jobs = service, settings, jobs
        self._traffic, self._asked = traffic, asked
        self._epoch, self._claimant = epoch, claimant
        self._ledger = ServiceLedger(service.ledger)
        self._endpoints = EndpointReader(service.endpoints)
        self._zone = ZoneInfo(settings.scaling.time_zone)
        before = read_record(service.state, ServiceState)
        self._memory = before.scaling if before is not None else ScalingMemory()
        self._restart_words = before.restart if before is not None else None
        self._since = (
            {one.name: (one.phase, one.since) for one in before.replicas} if before else {}
        )
        self._wanted = Wanted(before.wanted, before.reason) if before is not None else None
        self._loads: dict[ReplicaName, tuple[float, float]] = {}
        self._not_before: dict[ReplicaName, float] = {}
        self._comparisons: dict[ReplicaName, Future[str]] = {}
        self._differences: dict[ReplicaName, str] = {}
        self._failed_comparisons: dict[ReplicaName, int] = {}
        self._comparing = ThreadPoolExecutor(1, thread_name_prefix="comparison")
        self._views: tuple[JobView, ...] | None = None
        self._next_look = 0.0
        self._written: ServiceState | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="controller", daemon=True)
        self.superseded = False
        self.is_over = False

    def start(self) -> None:
        """Steer in a thread until `stop`, or until another controller has taken over."""
        self._ledger.append(ServiceEventKind.CONTROLLER_STARTED, epoch=self._epoch)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(30)
        self._comparing.shutdown(wait=False, cancel_futures=True)

    def _loop(self) -> None:
        while not clock.wait(self._stopping, PASS_SECONDS) and not self.superseded:
            try:
                self.make_pass()
            except OSError as error:
                say(f"the service directory cannot be used: {error}")
            except Exception:
                traceback.print_exc()

    def make_pass(self) -> None:
        """Look once, decide once and act. Raises OSError while the service directory is away."""
        if self._gives_up():
            return
        now = clock.now()
        endpoints = self._endpoints.valid(now)
        loads = {name: (one.ready_since, one.load_seconds) for name, one in endpoints.items()}
        self._loads |= loads
        if clock.monotonic() >= self._next_look:
            self._next_look = clock.monotonic() + self._settings.poll_seconds
            self._views = self._jobs.look()
        load = self._traffic.load({name: one.url for name, one in endpoints.items()}, now)
        if self._views is None:
            last = self._written.replicas if self._written is not None else ()
            self._write_state(now, last, ("Slurm does not answer",))
            return
        timing = self._timing(self._views, now)
        replicas = self._replicas(self._views, endpoints, now)
        wanted = self._choose_wanted(replicas, load, timing, now)
        restart = self._restart(replicas, endpoints)
        decision = decide(replicas, wanted.count, timing, now=now, restart=restart)
        for action in decision.actions:
            if self._gives_up():
                return
            name = action.name if isinstance(action, Start | Drain) else None
            # one that has failed is not tried again at once
            if name is None or clock.monotonic() >= self._not_before.get(name, 0.0):
                self._carry_out(action)
                self._next_look = 0.0  # what was done is to be seen
        down = self._service.down_request.exists()
        gone = all(one.phase in ("ended", "failed") for one in replicas)
        self.is_over = down and gone and not decision.actions
        views = {view.name: view for view in self._views}
        states = (
            ReplicaState(
                name=str(one.name),
                phase=one.phase,
                job_id=views[one.name].job_id,
                node=views[one.name].node,
                since=one.since,
                reason=one.problem,
            )
            for one in replicas
        )
        self._write_state(now, tuple(states), decision.waits, timing)

    def _gives_up(self) -> bool:
        """Whether another controller has taken over. Raises OSError."""
        if not self.superseded:
            self.superseded = is_superseded(self._service.epochs, self._epoch, self._claimant)
            if self.superseded:
                say(f"another controller steers the service: epoch {self._epoch} gives up")
        return self.superseded

    # -- looking ---------------------------------------------------------------------------

    def _timing(self, views: tuple[JobView, ...], now: float) -> Timing:
        settings = self._settings
        loads = [seconds for _, seconds in sorted(self._loads.values())][-_MEASURED:]
        queued = [
            (view.started_at if view.started_at is not None else now) - view.submitted_at
            for view in sorted(views, key=lambda view: view.submitted_at)
            if view.state != "submitting" and (view.started_at is not None or view.state != "over")
        ]
        queue_seconds = max(queued[-_MEASURED:], default=0.0)
        return Timing(
            load_seconds=max(loads, default=settings.load_seconds),
            queue_seconds=min(max(queue_seconds, 0.0), _LONGEST_QUEUE_SECONDS),
            drain_seconds=settings.drain_seconds,
            most_jobs=settings.scaling.most_jobs,
        )

    def _replicas(
        self, views: tuple[JobView, ...], endpoints: dict[ReplicaName, Endpoint], now: float
    ) -> list[ReplicaView]:
        """Join jobs, endpoints and rotation; note in the ledger what has changed."""
        asked, found = self._asked(), []
        for view in views:
            endpoint = endpoints.get(view.name)
            phase = _phase(view, endpoint)
            old, since = self._since.get(str(view.name), ("", now))
            if phase != old:
                since = now
                if phase in _NOTED_PHASES:
                    self._ledger.append(
                        _NOTED_PHASES[phase],
                        epoch=self._epoch,
                        replica=str(view.name),
                        job_id=view.job_id,
                        node=view.node,
                        url=endpoint.url if endpoint is not None else None,
                        reason=view.problem or None,
                    )
            self._since[str(view.name)] = phase, since
            found.append(
                ReplicaView(
                    name=view.name,
                    phase=phase,
                    submitted_at=view.submitted_at,
                    since=since,
                    in_rotation=view.name in asked,
                    load=self._traffic.load_of(endpoint.url) if endpoint is not None else 0.0,
                    drain_asked=view.drain_asked,
                    walltime_ends=view.ends_at,
                    problem=view.problem,
                )
            )
        return found

    # -- deciding --------------------------------------------------------------------------

    def _choose_wanted(
        self, replicas: list[ReplicaView], load: Load, timing: Timing, now: float
    ) -> Wanted:
        asked = read_record(self._service.scale_request, ScaleRequest)
        here = datetime.fromtimestamp(now, self._zone)
        live = {one.name.number for one in replicas if one.is_live}
        answering = {one.name.number for one in replicas if one.answers}
        wanted, self._memory = wanted_now(
            self._settings.scaling,
            load,
            Replicas(len(live), len(answering)),
            self._memory,
            now=now,
            local_minute=here.hour * 60 + here.minute + here.second / 60,
            lead_seconds=timing.lead_seconds,
            asked=asked.replicas if asked is not None else None,
        )
        if self._service.down_request.exists():
            wanted = Wanted(0, "the service is to end")
        if self._wanted is None or wanted.count != self._wanted.count:
            self._ledger.append(
                ServiceEventKind.WANTED,
                epoch=self._epoch,
                replicas=wanted.count,
                reason=wanted.reason,
            )
        self._wanted = wanted
        return wanted

    def _restart(
        self, replicas: list[ReplicaView], endpoints: dict[ReplicaName, Endpoint]
    ) -> RollingRestart | None:
        """The restart that a person wants, with what the comparisons have shown so far."""
        request = read_record(self._service.restart_request, RestartRequest)
        if request is not None and self._service.down_request.exists():
            words = "stopped: the service is to end"
            self._end_restart(ServiceEventKind.RESTART_STOPPED, words)
            request = None
        if request is None:
            self._differences.clear()
            return None
        self._collect_comparisons()
        old = {
            one.name.number: one
            for one in replicas
            if one.submitted_at < request.time and one.name in endpoints and one.phase == "ready"
        }
        for one in replicas:
            if one.submitted_at < request.time or not one.answers or one.name in self._differences:
                continue
            other = old.get(one.name.number)
            if other is None or not request.compare:
                self._differences[one.name] = ""
            elif one.name not in self._comparisons and one.name in endpoints:
                self._comparisons[one.name] = self._comparing.submit(
                    difference_of,
                    endpoints[other.name].url,
                    endpoints[one.name].url,
                    endpoints[one.name].served_name,
                )
        new = sum(one.answers and one.submitted_at >= request.time for one in replicas)
        total = new + sum(one.is_live and one.submitted_at < request.time for one in replicas)
        self._restart_words = f"{new} of {total} replaced"
        return RollingRestart(request.time, dict(self._differences))

    def _collect_comparisons(self) -> None:
        for name, comparison in list(self._comparisons.items()):
            if not comparison.done():
                continue
            del self._comparisons[name]
            try:
                self._differences[name] = comparison.result()
            except NoAnswerError as error:
                failed = self._failed_comparisons.get(name, 0) + 1
                self._failed_comparisons[name] = failed
                if failed >= _MOST_COMPARISONS:
                    self._differences[name] = str(error)

    # -- acting ----------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        """Announce one action in the ledger, then do it; a failure is noted and tried again."""
        if isinstance(action, StopRestart):
            self._end_restart(ServiceEventKind.RESTART_STOPPED, f"stopped: {action.reason}")
            return
        if isinstance(action, FinishRestart):
            self._end_restart(ServiceEventKind.RESTART_DONE, "done")
            return
        name, reason, failed = action.name, action.reason, ServiceEventKind.DRAIN_FAILED
        try:
            if isinstance(action, Start):
                failed = ServiceEventKind.START_FAILED
                self._note(ServiceEventKind.START_REPLICA, name, reason, action.instead_of)
                words = f"is job {self._jobs.start(name)}"
            else:
                self._note(ServiceEventKind.DRAIN_REPLICA, name, reason)
                self._jobs.drain(name)
                words = "is to leave"
        except HpctrainError as error:
            self._note(failed, name, str(error))
            self._not_before[name] = clock.monotonic() + _RETRY_SECONDS
            return
        say(f"{name} {words}: {reason}")

    def _end_restart(self, kind: ServiceEventKind, words: str) -> None:
        self._ledger.append(kind, epoch=self._epoch, reason=words)
        self._service.restart_request.unlink(missing_ok=True)
        self._restart_words = words
        say(f"rolling restart: {words}")

    def _note(
        self,
        kind: ServiceEventKind,
        name: ReplicaName,
        reason: str,
        instead_of: ReplicaName | None = None,
    ) -> None:
        self._ledger.append(
            kind,
            epoch=self._epoch,
            replica=str(name),
            reason=reason,
            instead_of=None if instead_of is None else str(instead_of),
        )

    # -- telling ---------------------------------------------------------------------------

    def _write_state(
        self,
        now: float,
        replicas: tuple[ReplicaState, ...],
        waits: tuple[str, ...],
        timing: Timing | None = None,
    ) -> None:
        """Write what is wanted and seen, after a change and every few seconds."""
        wanted = self._wanted or Wanted(0, "nothing was seen yet")
        state = ServiceState(
            epoch=self._epoch,
            time=now,
            wanted=wanted.count,
            reason=wanted.reason,
            replicas=replicas,
            restart=self._restart_words,
            waits=waits,
            scaling=self._memory,
            load_seconds=timing.load_seconds if timing is not None else None,
            queue_seconds=timing.queue_seconds if timing is not None else None,
        )
        last = self._written
        if last is not None and now - last.time < _STATE_SECONDS:
            seen = (state.wanted, state.replicas, state.restart)
            if seen == (last.wanted, last.replicas, last.restart):
                return
        write_record(self._service.state, state, durable=False)
        self._written = state


def _phase(view: JobView, endpoint: Endpoint | None) -> Phase:
    """What a replica is doing, as its job and its endpoint show it."""
    if view.state == "over":
        return "ended" if view.drain_asked else "failed"
    if view.drain_asked:
        return "draining"
    if view.state != "running":
        return "queued"
    return "ready" if endpoint is not None else "loading"


def claimant_of(job_id: str | None, node: str, directory: Path) -> str:
    """The name under which a controller takes an epoch; unique among controllers."""
    return f"{job_id or 'login'} on {node} of {directory.name}, at {time.time_ns()}"


# -- Compare what an old and a new replica answer to the same prompts, greedily -----------------
# Greedy answers of one model on the same engine are equal but for rounding, which changes with the
# batch; so prompts are short, asked one at a time, and the first tokens are compared.


PROMPTS = ("The capital of France is", "1 2 3 4 5 6 7", "def add(a, b):\n    return")
TOKENS = 16
# Rounding may turn one token in a near tie, and all that follow it; two prompts that agree are
# enough to know the weights, the tokenizer and the engine's settings for the same.
MOST_DIFFERENT_PROMPTS = 1
_ANSWER_SECONDS = 120.0


class NoAnswerError(Exception):
    """A replica that did not answer; nothing is known about its tokens."""


def difference_of(old_url: str, new_url: str, model: str) -> str:
    """What differs between the answers of two replicas; empty if they agree.

    Raises NoAnswerError if one of them does not answer.
    """
    different = []
    for prompt in PROMPTS:
        old, new = _answer(old_url, model, prompt), _answer(new_url, model, prompt)
        if old != new:
            different.append(f"`{prompt[:24]}` was continued by {old[:40]!r}, now by {new[:40]!r}")
    return different[0] if len(different) > MOST_DIFFERENT_PROMPTS else ""


def _answer(url: str, model: str, prompt: str) -> str:
    asked = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "seed": 0}
    status, text = http_request(address_of(url), "POST", "/v1/completions", _ANSWER_SECONDS, asked)
    if status not in (0, HTTPStatus.OK):
        raise NoAnswerError(f"{url} answered with {status}")
    try:
        if not status:
            raise ValueError(text.decode())
        return str(json.loads(text)["choices"][0]["text"])
    except (ValueError, KeyError, IndexError) as error:
        raise NoAnswerError(f"{url} did not answer: {error}") from error
