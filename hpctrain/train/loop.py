"""The training loop of one rank: step, agree, evaluate, save, and leave at a step boundary.

Belongs here: the order of things. Does not belong here: how each of them is done.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from hpctrain.store.requests import SaveRequest, is_requested
from hpctrain.train.datasets.skipped_samples import Skips
from hpctrain.train.device import wait_for_device
from hpctrain.train.engine import Engine, Evaluation, Position
from hpctrain.train.evaluating import EvaluationBatches, is_evaluated
from hpctrain.train.faults import DivergedError
from hpctrain.train.job import Job
from hpctrain.train.numerics import LossWindow, what_is_not_finite
from hpctrain.train.profiling import StepProfiler
from hpctrain.train.report import Reporter, StepResult
from hpctrain.train.saving.save_interval import SaveInterval
from hpctrain.train.saving.saver import Saver
from hpctrain.train.step_agreement import Agreement, Control, WriterState
from hpctrain.train.times import RankClock

Ending = Literal["done", "yielded"]
_MOST_SIGNALLED = 64
# The supervisor sends USR2 to hand on a wish to stop.
_NOT_FROM_OUTSIDE = (None, "SIGUSR2")


@dataclass
class Loop:
    """All parts of a running rank; `position` is where the run stands.

    `owes_evaluation`: the evaluation of the last finished step was left because of a stop; the next
    launch makes up for it before it trains. `on_begin` is called once all ranks have agreed that
    the start is over.
    """

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
    owes_evaluation: bool
    on_begin: Callable[[], None]
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
        self.on_begin()
        trained = False
        try:
            if self.owes_evaluation and not stopping:
                stopping = self._make_up_evaluation()
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
        return "done" if self.position.step >= target and not self.owes_evaluation else "yielded"

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
        self.profiler.end(result.step, stopping=agreed.stop)
        problem = self._problem(result, agreed)
        self.clock.finished_step(result.step, result.step_seconds, counts=not result.profiled)
        evaluation, evaluates = None, not problem and is_evaluated(self.job.config, result.step)
        if evaluates:
            evaluation, agreed = self._evaluate(agreed)
        self.reporter.finished_step(result, evaluation)
        if problem:
            raise DivergedError(result.step, first, loss, problem)
        if not evaluates:
            self.saver.poll(agreed.writer)
        return self._save_if_due(agreed)

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
        return self.job.launch.leads and is_requested(self.job.run, "stop")

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

    def _evaluate(self, agreed: Agreement) -> tuple[Evaluation | None, Agreement]:
        """Evaluate unless a stop is agreed before or between two batches, and say which it was.

        An evaluation may take longer than a warning comes ahead, so it is left between batches. It
        changes nothing that is trained on: the next launch repeats it in full. A save under way
        goes on meanwhile.
        """
        self.saver.poll(agreed.writer)
        self.owes_evaluation = agreed.stop or self._agree_to_leave_evaluation()
        if self.owes_evaluation:
            return None, replace(agreed, stop=True)
        self.reporter.phase("evaluating", self.position.step)
        batches = EvaluationBatches(self.job.config.eval_batches, self._agree_to_leave_evaluation)
        found = self.engine.evaluate(batches)
        self.reporter.phase("training")
        self.owes_evaluation = batches.interrupted
        if batches.interrupted:
            return None, replace(agreed, stop=True)
        return found, agreed

    def _agree_to_leave_evaluation(self) -> bool:
        """True if any rank was asked to stop; also takes a save under way one stage further."""
        wait_for_device()  # else the batches of a whole evaluation may be queued on the GPU
        self.reporter.still_working()
        self.control.propose(stop=self._asked_to_stop(), save=False, writer=self.saver.writer_state)
        agreed = self.control.result()
        self.saver.poll(agreed.writer)
        return agreed.stop

    def _make_up_evaluation(self) -> bool:
        """The evaluation of the resumed step, before the first own one; True to stop."""
        nothing = Agreement(stop=False, save=False, writer=WriterState.FINISHED, rejected=False)
        found, agreed = self._evaluate(nothing)
        if found is not None:
            self.reporter.made_up_evaluation(found)
        return agreed.stop

    def _save_if_due(self, agreed: Agreement) -> Agreement:
        """A stop that comes during a save that is waited for is agreed on at this step, so that
        the step is not followed by another one and another save."""
        config = self.job.config
        by_steps = config.save_interval_steps
        due = agreed.save or (by_steps is not None and self.position.step % by_steps == 0)
        due = due or (self.saver.owed and not self.saver.busy)
        at_the_end = agreed.stop or self.position.step >= config.train_steps
        if due and not at_the_end:
            self._save(wait=not config.async_save)
            if not config.async_save:
                stop = self.control.agree_to_stop(self._asked_to_stop())
                return replace(agreed, stop=stop)
        return agreed

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
