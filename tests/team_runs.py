"""Runs of a made-up team over two weeks: users, accounts, clusters, prices, causes of failure.

`python -m tests.team_runs DIRECTORY` writes them there, into `a100/` and `h100/`; with `40 100000`
behind it 40 runs of 100,000 steps each into `many/`, and `python -m tests.week_seconds
DIRECTORY/many` prints how long the report about them takes.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.durable import append_line
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import SaveRecord, StepMetrics, append_save
from hpctrain.runs.run_documents import known_plan
from tests.judged_runs import submitted

# Thursday, 26 November 2026, 08:00 UTC; the week before it is 2026-W47.
NOW = 1_795_680_000.0
DAY = 86400.0
A100 = ("llama7b", "a100x64", ("resources.gpus=64",))
H100 = ("llama7b", "h100x16", ("resources.gpus=32",))


class TeamRun:
    """Writes the records of one run, entry by entry; `clock` is its time."""

    def __init__(self, run: RunFiles, begin: float, job: int = 4711, cluster: str = "") -> None:
        plan = known_plan(run.layout)
        assert plan is not None
        self.run, self.clock, self._plan = run, begin, plan
        self._job, self._restarts, self._epoch, self.step = job, 0, 0, 0
        self._say(EventKind.SUBMITTED, job_id=job, cluster=cluster or None)

    def _say(self, kind: EventKind, **fields: object) -> None:
        event = Event.model_validate({"event": kind, "time": self.clock, **fields})
        append_line(self.run.layout.ledger, event.model_dump_json(exclude_defaults=True))

    @property
    def _attempt(self) -> dict[str, object]:
        return {"job_id": self._job, "restart_count": self._restarts}

    def waits(self, seconds: float) -> TeamRun:
        self.clock += seconds
        return self

    def starts(self, seconds: float = 240.0) -> TeamRun:
        """An attempt begins, and after so many seconds its first step."""
        self._say(EventKind.ATTEMPT_STARTED, **self._attempt)
        return self.launches(seconds)

    def launches(self, seconds: float) -> TeamRun:
        self._epoch += 1
        self._say(EventKind.LAUNCH_STARTED, **self._attempt, epoch=self._epoch)
        self.clock += seconds
        return self

    def trains(
        self, steps: int, seconds: float, save_every: int = 0, stall: float = 12.0
    ) -> TeamRun:
        """So many steps; every few of them a save, for which training waits."""
        lines = []
        for _ in range(steps):
            self.step += 1
            self.clock += seconds
            row = StepMetrics(
                step=self.step, epoch=self._epoch, time=self.clock, loss=2.0, loss_hex="0x1p+1",
                grad_norm=1.0, learning_rate=1e-4, step_seconds=seconds,
                tokens_per_second=self._plan.batch.tokens_per_step / seconds, mfu=0.4,
                memory_bytes=2**30, consumed_samples=self.step)  # fmt: skip
            lines.append(row.model_dump_json(exclude={"schema_version"}) + "\n")
            if save_every and self.step % save_every == 0:
                append_save(self.run.layout, SaveRecord(
                    step=self.step, epoch=self._epoch, time=self.clock, stall_seconds=stall,
                    publish_seconds=40.0, size_bytes=2**30))  # fmt: skip
                self.clock += stall
        with self.run.layout.metrics.open("a") as stream:
            stream.writelines(lines)
        return self

    def ends(
        self, cause: str, action: str, *, detected: float = 60.0, back_to: int | None = None
    ) -> TeamRun:
        """The launch ends; `back_to` is the step from which the next one continues."""
        self.clock += detected
        about = {**self._attempt, "epoch": self._epoch, "cause": cause}
        self._say(EventKind.LAUNCH_ENDED, **about, reason=cause)
        self._say(EventKind.ACTION, **about, action=action, reason=cause)
        if action == "requeue":
            self._restarts += 1
        self.step = self.step if back_to is None else back_to
        return self


def make(
    runs: Path, name: str, begin: float, kind: tuple[str, str, Sequence[str]], *changes: str,
    cluster: str = "",
) -> TeamRun:  # fmt: skip
    """A submitted run of that name."""
    run, _ = submitted(runs, kind[0], kind[1], (*kind[2], f"name={name}", *changes))
    return TeamRun(run, begin, cluster=cluster)


def team(place: Path, step_seconds: float = 120.0, seed: int = 5) -> tuple[Path, Path]:
    """Two directories of runs: of four accounts on a cluster with A100, and of one with H100."""
    dice = random.Random(seed)
    first, second = place / "a100", place / "h100"
    for number, (name, account, days) in enumerate((
        ("llama7b-base", "nlp", 13), ("llama7b-code", "nlp", 9), ("llama7b-long", "nlp", 6),
        ("protein-lm", "biology", 11), ("climate-ft", "climate", 5), ("speech-ft", "speech", 3),
    )):  # fmt: skip
        begin = NOW - (days + 0.1 * number) * DAY
        run = make(first, name, begin, A100, f"resources.account={account}", cluster="aurora")
        _eventful(run.waits(dice.uniform(0.2, 9) * 3600), dice, step_seconds)
    for name, days in (("vision-probe", 8), ("reward-model", 4)):
        run = make(second, name, NOW - days * DAY, H100, "resources.account=alignment",
                   cluster="borealis")  # fmt: skip
        _eventful(run.waits(dice.uniform(0.1, 3) * 3600), dice, step_seconds)
    return first, second


def _eventful(run: TeamRun, dice: random.Random, step_seconds: float) -> None:
    """Attempts until now, each with an end of its own."""
    causes = (("preempted", "requeue"), ("node_failure", "requeue"), ("crash", "relaunch"),
              ("hang", "relaunch"), ("time_limit", "requeue"))  # fmt: skip
    save_every = round(6000 / step_seconds)
    run.starts(dice.uniform(150, 600))
    while True:
        trained_seconds = dice.uniform(4, 16) * 3600
        if run.clock + 2 * trained_seconds > NOW:
            run.trains(int((NOW - run.clock) / (1.1 * step_seconds)), step_seconds, save_every)
            return
        steps = round(trained_seconds / step_seconds)
        run.trains(steps, step_seconds * dice.uniform(0.98, 1.04), save_every)
        cause, action = dice.choice(causes)
        lost = run.step if cause in ("preempted", "time_limit") else run.step - steps % save_every
        run.ends(cause, action, detected=dice.uniform(20, 1500), back_to=lost)
        if action == "requeue":
            run.waits(dice.uniform(300, 20_000)).starts(dice.uniform(150, 600))
        else:
            run.waits(dice.uniform(20, 90)).launches(dice.uniform(150, 400))


def many(place: Path, runs: int, steps: int) -> Path:
    """So many runs of so many steps within the last seven days, for measuring: one, and links."""
    first = make(place / "many", "first", NOW - 7 * DAY, A100, "resources.account=nlp")
    seconds = 6.5 * DAY / steps
    first.starts().trains(steps // 2, seconds, save_every=1000, stall=1.0)
    first.ends("crash", "relaunch", back_to=steps // 2 - 500).launches(60.0)
    first.trains(steps - first.step, seconds, save_every=1000, stall=1.0)
    for number in range(1, runs):
        copy = place / "many" / f"copy-{number:04d}"
        shutil.copytree(first.run.layout.directory, copy, symlinks=True, copy_function=os.link)
    return place / "many"


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(many(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
    else:
        print(*team(Path(sys.argv[1])), sep="\n")
