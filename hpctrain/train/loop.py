"""The training loop of one rank: step, agree, evaluate, save, and leave at a step boundary.

Belongs here: the order of things. Does not belong here: how each of them is done.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from hpctrain.train.control import Agreement, Control
from hpctrain.train.data import Data
from hpctrain.train.evaluate import evaluate
from hpctrain.train.forward import Pass, mean_loss
from hpctrain.train.job import Job
from hpctrain.train.optimizer import Optimizer
from hpctrain.train.report import Reporter, StepResult
from hpctrain.train.saver import Saver
from hpctrain.train.snapshot import Position
from hpctrain.train.stop import stop_file_exists

Ending = Literal["done", "yielded"]


@dataclass
class Loop:
    """All parts of a running rank; `position` is where the run stands."""

    job: Job
    runner: Pass
    optimizer: Optimizer
    data: Data
    control: Control
    saver: Saver
    reporter: Reporter
    position: Position
    saved_at: float = field(default_factory=time.monotonic)

    def run(self) -> Ending:
        """Train until the target step or until a rank was asked to stop; saves before it ends."""
        target = self.job.config.train_steps
        self.reporter.phase("training", self.position.step)
        self.saved_at = time.monotonic()
        gc.freeze()  # model and optimizer live for ever: do not scan them again and again
        stopping = self.control.agree_to_stop(self._asked_to_stop())
        trained = False
        while self.position.step < target and not stopping:
            agreed = self.one_step()
            stopping, trained = agreed.stop, True
        self._save_the_end(trained)
        return "done" if self.position.step >= target else "yielded"

    def one_step(self) -> Agreement:
        """One optimizer step with everything that belongs to it."""
        started_at = time.perf_counter()
        totals, grad_norm, learning_rate = self._update()
        agreed = self.control.result()
        loss = mean_loss(totals)
        self.position = Position(
            self.position.step + 1,
            self.position.consumed_samples + self.job.config.global_batch_size,
        )
        result = StepResult(
            step=self.position.step,
            consumed_samples=self.position.consumed_samples,
            loss=loss,
            grad_norm=None if grad_norm is None else float(grad_norm),
            learning_rate=learning_rate,
            step_seconds=time.perf_counter() - started_at,
        )
        self.reporter.finished_step(result, self._evaluate_if_due())
        self._save_if_due(agreed)
        return agreed

    def _update(self) -> tuple[Any, Any, float]:
        """Forward, backward, optimizer: one step of megatron-core."""
        for chunk in self.runner.model.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.inner.zero_grad()
        reports = self.runner.run(
            self.data.training, self.position.consumed_samples, forward_only=False
        )
        self._propose()
        learning_rate = self.optimizer.learning_rate
        updated, grad_norm, _ = self.optimizer.inner.step()
        if updated:
            self.optimizer.schedule.step(increment=1)
        return self.runner.totals(reports), grad_norm, learning_rate

    def _propose(self) -> None:
        self.control.propose(
            stop=self._asked_to_stop(),
            save=self._save_is_overdue(),
            writer=self.saver.writer_state,
        )

    def _asked_to_stop(self) -> bool:
        """A signal on any rank, or the stop file, which rank 0 looks for."""
        if self.job.stop.requested:
            return True
        return self.job.launch.leads and stop_file_exists(self.job.run.stop_request)

    def _save_is_overdue(self) -> bool:
        """Rank 0's clock decides about saving by seconds."""
        interval = self.job.config.save_interval_seconds
        return (
            interval is not None
            and self.job.launch.leads
            and time.monotonic() - self.saved_at >= interval
        )

    def _evaluate_if_due(self) -> float | None:
        interval = self.job.config.eval_interval_steps
        if interval is None or self.position.step % interval or self.data.validation is None:
            return None
        self.reporter.phase("evaluating")
        loss = evaluate(self.runner, self.data.validation)
        self.reporter.phase("training")
        return loss

    def _save_if_due(self, agreed: Agreement) -> None:
        self.saver.poll(agreed.writer)
        config = self.job.config
        by_steps = config.save_interval_steps
        due = agreed.save or (by_steps is not None and self.position.step % by_steps == 0)
        at_the_end = agreed.stop or self.position.step >= config.train_steps
        if due and not at_the_end:
            self._save(wait=not config.async_save)

    def _save(self, *, wait: bool) -> None:
        self.reporter.phase("saving")
        self.saver.begin(self.position)
        self.saved_at = time.monotonic()
        if wait:
            self.saver.finish()
        self.reporter.phase("training")

    def _save_the_end(self, trained: bool) -> None:
        """Finish what is being written and save the last step, unless nothing is new."""
        self.saver.finish()
        if trained and self.saver.newest_step != self.position.step:
            self._save(wait=True)
        self.reporter.phase("leaving")
