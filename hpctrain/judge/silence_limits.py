"""Limit how long a launch may be silent, per phase and learned from the run itself. Pure.

A step that has always taken two seconds has hung after ninety; one that takes four minutes has not.
What the spec sets (`stall`, `setup_stall`) is the most that is ever waited; what the run has shown
makes it less. Belongs here: that arithmetic; times are handed in as seconds of one monotonic clock.
Does not belong here: reading signs of life (`run_dir_snapshot`), or ending anything
(`launch_watch`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from hpctrain.judge.documents import Stall
from hpctrain.records.supervise_config import SuperviseConfig

# Five times the longest silence seen: `safety_factor` of nvidia-resiliency-ext, whose
# fault_tolerance/timeouts_calc.py multiplies the maximum, not a quantile, by it.
_FACTOR = 5.0
# Below this nothing is learned: `num_warmup_iterations` in the same project's config.py.
_LEAST_SEEN = 5
# About half an hour of signs, so that a rare pause is remembered for longer than it takes to recur.
_WINDOW = 1000
# No limit is learned below these, however fast a phase has been, because files and networks pause
# for reasons of their own. The time-outs of the same project's reference job (setup 900, step 60,
# checkpointing 300; examples/fault_tolerance/deployment/slurm/nvrx_singleton_array.sbatch), but a
# step gets 90: an NFS client repeats a request that got lost only after 60 s (nfs(5), `timeo`).
# An evaluation is many steps: twice a save. A trace of hundreds of MB is written as JSON.
_FLOORS_SECONDS = {
    "starting": 900.0,
    "loading": 900.0,
    "training": 90.0,
    "saving": 300.0,
    "evaluating": 600.0,
    "profiling": 900.0,
    "leaving": 300.0,
    # A replica of a service gives a sign every second, whatever its engine does.
    "serving": 90.0,
    "draining": 90.0,
}
# srun reports that it waits for resources of its step only after 60 to 70 s of silence
# (slurm: src/srun/libsrun/launch.c, step_wait), ...
_SRUN_SILENT_SECONDS = 75.0
# ... and what it waits for (remains of an earlier step, a restarting controller) takes minutes.
_SRUN_WAITS_SECONDS = 300.0
LAUNCHING = "launching"
# The phase of a stall where output and files show life. What a rank of another node has printed or
# written is seen by the leading agent late: for its looks, and for attributes that an NFS client
# keeps for a minute (nfs(5), `acregmax`).
RUNNING = "running"
_SEEN_LATE_SHARE = 0.1
_STARTUP = frozenset({"starting", "loading"})
# Phases with the limit of a step; all others have that of a start.
_BEATING = frozenset({"training", "serving", "draining"})


class StallLimits:
    """The silences of the run so far, kept for all launches of one supervisor."""

    def __init__(self, config: SuperviseConfig) -> None:
        self._config = config
        self._silences: dict[str, deque[float]] = {}

    @property
    def of_output(self) -> bool:
        """Whether output and files show life, because the trainer tells no steps."""
        return self._config.life == "output"

    def observe(self, phase: str, silent_seconds: float) -> None:
        """Record a silence in `phase` that ended by itself."""
        self._silences.setdefault(phase, deque(maxlen=_WINDOW)).append(silent_seconds)

    def stalled(self, phase: str, silent_seconds: float) -> None:
        """Record a silence that was taken for a hang.

        It counts like one that ended by itself: then the next limit is five times as long, so one
        kind of pause cannot end launch after launch.
        """
        self.observe(phase, silent_seconds)

    def relearn(self, step_seconds: Iterable[float]) -> None:
        """Record steps of earlier attempts: long ones raise the limit, none lowers it."""
        for seconds in step_seconds:
            self.observe("training", seconds)

    def cap(self, phase: str) -> float:
        """Return the longest silence that the spec allows in `phase`, in seconds."""
        config = self._config
        return config.stall_seconds if phase in _BEATING else config.setup_stall_seconds

    def limit(self, phase: str) -> float:
        """Return how many seconds of silence are allowed in `phase` now."""
        cap = self.cap(phase)
        seen = self._silences.get(phase, ())
        if not self._config.learn_stalls or len(seen) < _LEAST_SEEN:
            return cap
        factor = _FACTOR * self._config.step_growth
        return min(max(factor * max(seen), _FLOORS_SECONDS.get(phase, cap)), cap)


class SilenceMonitor:
    """Tracks the signs of life of one launch and how long the present silence may last."""

    def __init__(self, limits: StallLimits, resume_step: int, now: float) -> None:
        self.started = False
        self._limits = limits
        self._resume_step = resume_step
        self._phase, self._step = "starting", resume_step
        self._at = now
        # Until then no rank had left a trace. srun waits for a controller that is away, and says so
        # only when it is back.
        self._absent_until = now
        self._unseen_seconds = 0.0
        self._steps_seen = 0

    @property
    def in_startup(self) -> bool:
        """True until a sign shows that the start is over, so that no step has been trained."""
        is_start = self._phase in _STARTUP and not self._limits.of_output  # it may train silently
        return not self.started or is_start

    def sign(self, phase: str, step: int, step_seconds: float | None, now: float) -> None:
        """Record a new sign of life of the trainer at the time `now`."""
        longest_seconds = self.silent_seconds(now)
        # The first step of a launch (connections, compilation) is not typical of the others.
        typical = self._phase != "training" or self._step > self._resume_step
        if self._phase == "training" and typical and step > self._step:
            self._steps_seen += 1
            longest_seconds = max(longest_seconds, step_seconds or 0.0)
        if typical:
            self._limits.observe(self._phase, longest_seconds)
        self.started = True
        self._phase, self._step, self._at = phase, step, now
        self._unseen_seconds = 0.0

    def unseen(self, seconds: float) -> None:
        """Exclude a time in which the run directory could not be read from the silence."""
        self._unseen_seconds += seconds

    def silent_seconds(self, now: float) -> float:
        """Return the seconds since the last sign in which one would have been seen.

        Time before the first rank does not count.
        """
        return max(0.0, now - max(self._at, self._absent_until) - self._unseen_seconds)

    def stall(
        self,
        now: float,
        *,
        ranks_seen: bool = True,
        srun_waits: bool = False,
        save_in_flight: bool = False,
    ) -> Stall | None:
        """Return a stall if the silence is longer than the present phase allows.

        `ranks_seen`: a rank of this launch has left some trace; `srun_waits`: srun reports that
        it cannot create the step yet; `save_in_flight`: a checkpoint of this launch is being
        written beside training, which may hold up a step as long as it takes to save.
        """
        silent_seconds = self.silent_seconds(now)
        phase, limit_seconds = self._phase, self._limit_seconds(save_in_flight)
        if not self.started and not ranks_seen:
            self._absent_until = now
            silent_seconds = max(0.0, now - self._at - self._unseen_seconds)
            phase = LAUNCHING if srun_waits else "starting"
            least = _SRUN_WAITS_SECONDS if srun_waits else _SRUN_SILENT_SECONDS
            limit_seconds = max(self._limits.cap("starting"), least)
        if silent_seconds <= limit_seconds:
            return None
        if phase == "training" and self._limits.of_output:
            phase = RUNNING
        return Stall(phase, silent_seconds, limit_seconds)

    def is_late(self, now: float) -> bool:
        """True once half of the allowed time is over, so that closer checks pay."""
        return self.silent_seconds(now) > self._limit_seconds(save_in_flight=False) / 2

    def _limit_seconds(self, save_in_flight: bool) -> float:
        limits = self._limits
        if limits.of_output and self._phase in ("training", *_STARTUP):
            silence_seconds = limits.cap("training") * (1 + _SEEN_LATE_SHARE)
            is_start = self._phase != "training"
            return max(silence_seconds, limits.limit(self._phase)) if is_start else silence_seconds
        if self._phase != "training":
            return limits.limit(self._phase)
        if self._step <= self._resume_step:
            return limits.cap("starting")
        learned = self._steps_seen >= _LEAST_SEEN
        limit_seconds = limits.limit("training") if learned else limits.cap("training")
        return max(limit_seconds, limits.limit("saving")) if save_in_flight else limit_seconds
