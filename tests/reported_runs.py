"""Run directories with everything that a page can show, written by the code that writes real ones.

Planned by the real planner; what the run has measured is made up: it is preempted, then loses a
node, and one of its nodes is slow.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpctrain.base.durable import append_line
from hpctrain.plan.documents import Plan
from hpctrain.records.exit_records import write_exit_record
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import (
    AxisMessages,
    CommunicationRecord,
    DoneMarker,
    ExitRecord,
    LinkBytes,
    Progress,
    RankTimes,
    SaveRecord,
    StepMetrics,
    append_save,
    write_record,
)
from hpctrain.records.software import SoftwareLock, write_lock
from hpctrain.runs.run_documents import known_plan
from tests.fabricated_runs import published
from tests.judged_runs import submitted

START = 1_790_000_000.0
GIB = 2**30
SLOW_NODE = 3
SMALL = ("llama7b", "h100x16", ("resources.gpus=64", "parallel.tp=2", "parallel.pp=2"))
LARGE = ("gpt175b", "a100x64", ())
LOST = "node n0007 does not answer any more (slurmctld: not responding)"


def reported(
    runs: Path,
    name: str = "report",
    *,
    steps: int = 2400,
    of: tuple[str, str, Sequence[str]] = SMALL,
    changes: Sequence[str] = (),
    seed: int = 7,
    done: bool = False,
    loss_factor: float = 1.0,
) -> RunFiles:
    """A run of three attempts that has reached `steps`, which is its target if it is `done`."""
    budget = ("budget.tokens=null", f"budget.steps={steps}") if done else ()
    run, _ = submitted(runs, of[0], of[1], (*of[2], f"name={name}", *changes, *budget))
    plan = known_plan(run.layout)
    assert plan is not None and plan.step_seconds is not None
    _Story(run, plan, random.Random(seed), loss_factor).write(steps, done=done)
    return run


class _Story:
    """Writes the records of one run, launch by launch."""

    def __init__(self, run: RunFiles, plan: Plan, dice: random.Random, factor: float) -> None:
        self._run, self._layout, self._plan, self._dice = run, run.layout, plan, dice
        self._loss_factor = factor
        self._time = START
        self._step_seconds = (plan.step_seconds or 1.0) * 1.06

    def write(self, steps: int, *, done: bool) -> None:
        save = max(1, steps // 20)
        first, second = round(steps * 0.3), round(steps * 0.64)
        self._say(EventKind.SUBMITTED, job_id=4711)
        self._time += 3 * 3600
        self._attempt(1, 0, 1, first, save)
        self._ends("preempted", "the job is being preempted: the trainer saved and left",
                   "requeue", first, first)  # fmt: skip
        self._time += 2 * 3600
        self._attempt(2, first, 2, second, save)
        saved = second // save * save
        self._ends("node_failure", LOST, "requeue", second, saved)
        self._time += 600
        self._attempt(3, saved, 3, steps, save)
        self._say(EventKind.SLOW_RANK, rank=25, node=_node(SLOW_NODE), factor=1.12,
                  reason="rank 25 computes 12 % longer than the middle rank")  # fmt: skip
        for step in (steps // save * save - save, steps // save * save):
            published(self._run, step, epoch=3, time=self._time)
        write_record(self._layout.progress, Progress(
            epoch=3, phase="training", step=steps, target_step=self._plan.batch.train_steps,
            time=self._time, step_seconds=self._step_seconds, loss=2.1,
            checkpoint_step=steps // save * save))  # fmt: skip
        if done:
            self._ends("done", "the target step is reached", "finish", steps, steps)
            name = f"iter_{steps:07d}"
            marker = DoneMarker(step=steps, epoch=3, checkpoint=name, time=self._time)
            write_record(self._layout.done, marker)
        self._measures(steps)

    def _say(self, kind: EventKind, **fields: object) -> None:
        event = Event.model_validate({"event": kind, "time": self._time, **fields})
        append_line(self._layout.ledger, event.model_dump_json(exclude_defaults=True))

    def _ends(self, cause: str, reason: str, action: str, last: int, saved: int) -> None:
        self._time += 40
        attempt = {"job_id": 4711, "restart_count": self._epoch - 1}
        self._say(EventKind.LAUNCH_ENDED, **attempt, epoch=self._epoch, cause=cause, reason=reason,
                  last_step=last, checkpoint_step=saved)  # fmt: skip
        self._say(EventKind.ACTION, **attempt, epoch=self._epoch, action=action, cause=cause,
                  reason=f"{cause}: the next attempt resumes from step {saved:,}")  # fmt: skip

    def _attempt(self, epoch: int, start: int, seed: int, end: int, save: int) -> None:
        nodes = self._plan.nodes.nodes
        self._epoch = epoch
        attempt = {"job_id": 4711, "restart_count": epoch - 1}
        self._say(EventKind.ATTEMPT_STARTED, **attempt, nodes=f"n[0000-{nodes - 1:04d}]")
        self._time += 25
        self._say(EventKind.LAUNCH_STARTED, **attempt, epoch=epoch, resume_step=start)
        self._time += 210
        lines = []
        for step in range(start + 1, end + 1):
            seconds = self._step_seconds * (1 + abs(self._dice.gauss(0, 0.012)))
            seconds *= 3 if step == start + 1 else 1
            self._time += seconds
            lines.append(self._row(step, epoch, seconds).model_dump_json())
            if step % save == 0:
                append_save(self._layout, SaveRecord(
                    step=step, epoch=epoch, time=self._time, stall_seconds=6.5,
                    publish_seconds=48.0, size_bytes=90 * GIB))  # fmt: skip
                self._time += 7
        with self._layout.metrics.open("a") as stream:
            stream.writelines(f"{line}\n" for line in lines)

    def _row(self, step: int, epoch: int, seconds: float) -> StepMetrics:
        plan, dice = self._plan, self._dice
        total = plan.batch.train_steps
        loss = 1.9 + self._loss_factor * 8.6 * (step + 3) ** -0.28 + dice.gauss(0, 0.025)
        if step % 977 == 500:
            loss += 1.6
        rate = 1e-4 * min(1, step / (total * 0.01)) * (0.55 + 0.45 * math.cos(step / total * 3))
        mfu = plan.prediction.mfu * plan.step_seconds / seconds if plan.prediction else None
        return StepMetrics(
            step=step,
            epoch=epoch,
            time=self._time,
            loss=loss,
            loss_hex=loss.hex(),
            grad_norm=0.4 + 2 / math.sqrt(step) + abs(dice.gauss(0, 0.03)),
            learning_rate=rate,
            step_seconds=seconds,
            tokens_per_second=plan.batch.tokens_per_step / seconds,
            mfu=mfu,
            memory_bytes=60 * GIB,
            consumed_samples=step * plan.batch.global_batch,
            eval_loss=loss + 0.06 if step % 200 == 0 else None,
        )

    def _measures(self, steps: int) -> None:
        plan, dice = self._plan, self._dice
        ranks, per_node = plan.layout.world_size, plan.nodes.gpus_per_node
        nodes = tuple(_node(rank // per_node) for rank in range(ranks))
        step = self._step_seconds
        slow = [1.12 if rank // per_node == SLOW_NODE else 1.0 for rank in range(ranks)]
        memory = [
            round(stage.total_bytes * dice.uniform(0.93, 0.97)) for stage in plan.memory
            for _ in range(ranks // len(plan.memory))
        ]  # fmt: skip
        write_record(self._layout.rank_times, RankTimes(
            epoch=3, first_step=steps - 19, last_step=steps, time=self._time, nodes=nodes,
            compute_seconds=tuple(step * 0.78 * s * dice.uniform(0.99, 1.01) for s in slow),
            backward_seconds=(0.0,) * ranks,
            data_seconds=tuple(step * dice.uniform(0.001, 0.004) for _ in range(ranks)),
            optimizer_seconds=(step * 0.03,) * ranks, step_seconds=(step,) * ranks,
            peak_memory_bytes=tuple(memory),
            reserved_memory_bytes=tuple(round(one * 1.04) for one in memory)))  # fmt: skip
        write_record(self._layout.communication, messages(plan, nodes, step, steps))
        write_lock(self._layout, SoftwareLock(
            epoch=1, parts={"python": "3.11.9", "torch": "2.13.0", "CUDA": "12.9",
                            "driver": "575.57.08", "NCCL": "2.27.3"},
            packages={"numpy": "2.3.0", "pydantic": "2.11.4", "torch": "2.13.0"}))  # fmt: skip
        logs = self._layout.attempt_logs(4711, 2)
        logs.mkdir(parents=True)
        write_exit_record(self._layout, 0, ExitRecord(
            epoch=3, rank=7, node=_node(0), outcome="crash", step=steps, exit_code=1,
            time=self._time, cause="crash",
            message='ValueError: <script>alert(1)</script> & "quoted"'))  # fmt: skip


def _node(index: int) -> str:
    return f"n{index:04d}"


def messages(
    plan: Plan, nodes: Sequence[str], step_seconds: float, step: int
) -> CommunicationRecord:
    """Messages of a step along the axes of a plan, of which a ring algorithm sends the same."""
    ranks = len(nodes)
    layout = plan.layout
    inner = {"tp": 1, "cp": layout.tp, "dp": layout.tp * layout.cp,
             "pp": layout.tp * layout.cp * layout.dp}  # fmt: skip
    amounts = {"tp": 48 * GIB, "dp": 6 * GIB, "pp": 2 * GIB, "cp": 8 * GIB}
    shares = {"tp": 0.09, "dp": 0.03, "pp": 0.02, "cp": 0.02}
    axes, links = [], []
    for axis, size in (("tp", layout.tp), ("cp", layout.cp), ("dp", layout.dp), ("pp", layout.pp)):
        if size == 1:
            continue
        groups = [rank - rank // inner[axis] % size * inner[axis] for rank in range(ranks)]
        axes.append(AxisMessages(
            axis=axis, ranks_per_group=size, groups=tuple(groups), calls=(96,) * ranks,
            bytes=(amounts[axis],) * ranks,
            seconds=tuple(step_seconds * shares[axis] * (1 + rank % 7 / 50)
                          for rank in range(ranks))))  # fmt: skip
        links += _ring(groups, inner[axis], size, amounts[axis])
    return CommunicationRecord(
        epoch=3, step=step, time=START, step_seconds=step_seconds, nodes=tuple(nodes),
        axes=tuple(axes), links=tuple(links), source="torch.profiler")  # fmt: skip


def _ring(groups: Sequence[int], stride: int, size: int, amount: int) -> Iterator[LinkBytes]:
    for rank, first in enumerate(groups):
        place = (rank - first) // stride
        following = first + (place + 1) % size * stride
        yield LinkBytes(source=rank, target=following, bytes=amount * 2 * (size - 1) // size)
