"""The training loop of one rank: step, agree, evaluate, save, and leave at a step boundary.

Belongs here: the order of things. Does not belong here: how each of them is done.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Literal

from hpctrain.train.control import Agreement, Control
from hpctrain.train.engine import Engine, Evaluation, Position
from hpctrain.train.faults import DivergedError
from hpctrain.train.interval import SaveInterval
from hpctrain.train.job import Job
from hpctrain.train.numerics import LossWindow, what_is_not_finite
from hpctrain.train.profiling import StepProfiler
from hpctrain.train.report import Reporter, StepResult
from hpctrain.train.request import SaveRequest
from hpctrain.train.saver import Saver
from hpctrain.train.skips import Skips
from hpctrain.train.stop import file_exists
from hpctrain.train.times import RankClock

Ending = Literal["done", "yielded"]
_MOST_SIGNALLED = 64
# The supervisor sends USR2 to hand on a wish to stop.
_NOT_FROM_OUTSIDE = (None, "SIGUSR2")


@dataclass
class Loop:
    """All parts of a running rank; `position` is where the run stands."""

    job: Job
    engine: Engine
    control: Control
    saver: Saver
    reporter: Reporter
    position: Position
    interval: SaveInterval
    skips: Skips
    losses: LossWindow
    clock: RankClock
    profiler: StepProfiler
    request: SaveRequest
    signalled_ranks: tuple[int, ...] = ()

    def run(self) -> Ending:
        """Train until the target step or until a rank was asked to stop; saves before it ends.

        Raises DivergedError, on all ranks and after the same step, when a step's numbers must not
        be trained on; a checkpoint from before that step may still be published then.
        """
        target = self.job.config.train_steps
        self.reporter.phase("training", self.position.step)
        self.interval.begun()
        gc.freeze()  # model and optimizer live for ever: do not scan them again and again
        gc.enable()  # `__main__` has switched it off for the start
        stopping = self.control.agree_to_stop(self._asked_to_stop())
        trained = False
        try:
            while self.position.step < target and not stopping:
                agreed = self.one_step()
                stopping, trained = agreed.stop, True
            if stopping:
                # Whom a signal has reached is what tells a node that shuts down from the others.
                signalled = self.control.who(self.job.stop.name not in _NOT_FROM_OUTSIDE)
                self.signalled_ranks = signalled[:_MOST_SIGNALLED]
            self._save_the_end(trained)
            self.reporter.close()
        except DivergedError:
            self.saver.leave()
            raise
        finally:
            self.profiler.leave()
            self.reporter.flush()
        return "done" if self.position.step >= target else "yielded"

    def one_step(self) -> Agreement:
        """One optimizer step with everything that belongs to it."""
        self.profiler.begin(self.position.step + 1)
        started_at = time.perf_counter()
        first = self.skips.next_sample(self.position.consumed_samples)
        update = self.engine.update(first, self._before_the_optimizer)
        self.engine.clock.stop("optimizer")
        agreed = self.control.result()
        loss = update.loss
        consumed = first + self.job.config.global_batch_size
        self.position = Position(self.position.step + 1, consumed)
        result = StepResult(
            step=self.position.step,
            consumed_samples=consumed,
            loss=loss,
            grad_norm=None if update.grad_norm is None else float(update.grad_norm),
            learning_rate=update.learning_rate,
            step_seconds=time.perf_counter() - started_at,
            profiled=self.profiler.covers(self.position.step),
        )
        self.profiler.end(result.step)
        problem = self._problem(result, agreed)
        self.clock.finished_step(result.step, result.step_seconds, counts=not result.profiled)
        self.reporter.finished_step(result, None if problem else self._evaluate_if_due())
        if problem:
            raise DivergedError(result.step, first, loss, problem)
        self._save_if_due(agreed)
        return agreed

    def _before_the_optimizer(self) -> None:
        self._propose()
        self.engine.clock.start("optimizer")

    def _propose(self) -> None:
        self.control.propose(
            stop=self._asked_to_stop(),
            save=self._wants_to_save(),
            writer=self.saver.writer_state,
            rejected=self.engine.rejection is not None,
        )

    def _asked_to_stop(self) -> bool:
        """A signal on any rank, or the stop file, which rank 0 looks for."""
        if self.job.stop.requested:
            return True
        return self.job.launch.leads and file_exists(self.job.run.stop_request)

    def _wants_to_save(self) -> bool:
        """Rank 0's clock, or a request; neither is worth waiting for a save under way."""
        if not self.job.launch.leads or self.saver.busy:
            return False
        return self.request.made or self.interval.overdue

    def _problem(self, result: StepResult, agreed: Agreement) -> str | None:
        """Why this step must not count; all ranks know the same numbers, so all say the same."""
        if agreed.rejected:
            return self.engine.rejection or "gradients of another rank are not finite"
        problem = what_is_not_finite(result.loss, result.grad_norm)
        return problem or self.losses.spike(result.loss)

    def _evaluate_if_due(self) -> Evaluation | None:
        interval = self.job.config.eval_interval_steps
        if interval is None or self.position.step % interval:
            return None
        self.reporter.phase("evaluating")
        found = self.engine.evaluate()
        self.reporter.phase("training")
        return found

    def _save_if_due(self, agreed: Agreement) -> None:
        self.saver.poll(agreed.writer)
        config = self.job.config
        by_steps = config.save_interval_steps
        due = agreed.save or (by_steps is not None and self.position.step % by_steps == 0)
        due = due or (self.saver.owed and not self.saver.busy)
        at_the_end = agreed.stop or self.position.step >= config.train_steps
        if due and not at_the_end:
            self._save(wait=not config.async_save)

    def _save(self, *, wait: bool) -> None:
        self.reporter.phase("saving")
        self._refuse_broken_weights()
        self.saver.begin(self.position)
        self.interval.begun()
        if self.request.done():
            self.reporter.log("save_requested", step=self.position.step)
        if wait:
            self.saver.finish()
        while wait and self.saver.owed:
            self.saver.begin(self.position)
            self.saver.finish()
        self.reporter.phase("training")

    def _refuse_broken_weights(self) -> None:
        """The update itself can overflow, which the next loss would tell: too late for this save.

        Raises DivergedError on all ranks.
        """
        if not self.control.all_agree(self.engine.weights_are_finite()):
            step, batch = self.position.step, self.job.config.global_batch_size
            consumed = self.position.consumed_samples - batch
            what = "weights are not finite after the update"
            raise DivergedError(step, consumed, self.losses.last, what)

    def _save_the_end(self, trained: bool) -> None:
        """Finish what is being written and save the last step, unless nothing is new."""
        if self.saver.busy:
            self.reporter.phase("saving")  # waiting for the writers is no slow step
        self.saver.finish()
        if trained and self.saver.newest_step != self.position.step:
            self._save(wait=True)
        self.request.done()
        self.reporter.phase("leaving")
        self.saver.leave()
