"""The training loop of one rank: step, agree, evaluate, save, and stop at a step boundary.

Belongs here: the order of these actions. Does not belong here: how each of them is done.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from hpctrain.engines.training import TrainConfig
from hpctrain.records.requests import SaveRequest, is_requested
from hpctrain.train.datasets.skipped_samples import Skips
from hpctrain.train.device import peak_memory_bytes, wait_for_device
from hpctrain.train.engine import Engine, Evaluation, Position
from hpctrain.train.faults import DivergedError
from hpctrain.train.job import Job
from hpctrain.train.messages import MessageClock
from hpctrain.train.numerics import LossWindow, what_is_not_finite
from hpctrain.train.profiling import StepProfiler
from hpctrain.train.report import Reporter, StepResult
from hpctrain.train.saving.save_interval import SaveInterval
from hpctrain.train.saving.saver import Saver
from hpctrain.train.step_agreement import Control, StepAgreement, WriterState
from hpctrain.train.times import RankClock

# -- Iterate over the batches of an evaluation, which ends early when all ranks agree to stop ----


@dataclass
class EvaluationBatches:
    """Yields the numbers of the global batches of the validation data, 0 to `count` - 1.

    All ranks call `agree_to_stop` between two batches. The iteration ends when it returns True, and
    `interrupted` is set. The first batch is always yielded.
    """

    count: int
    agree_to_stop: Callable[[], bool]
    interrupted: bool = field(default=False, init=False)

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            if number and self.agree_to_stop():
                self.interrupted = True
                return
            yield number


def is_evaluated(config: TrainConfig, step: int) -> bool:
    """Check whether a step is followed by an evaluation."""
    interval = config.eval_interval_steps
    return interval is not None and step > 0 and step % interval == 0


Ending = Literal["done", "yielded"]
_MOST_SIGNALLED = 64
# The supervisor sends USR2 to pass on a request to stop.
_NOT_FROM_OUTSIDE = (None, "SIGUSR2")


@dataclass
class Loop:
    """All parts of a running rank; `position` is the progress of the run.

    `evaluation_pending`: the evaluation of the last finished step was skipped due to a stop. The
    next launch repeats it before it trains. `on_begin` is called once all ranks have agreed that
    start-up is complete.
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
    messages: MessageClock
    profiler: StepProfiler
    request: SaveRequest
    evaluation_pending: bool
    on_begin: Callable[[], None]
    signalled_ranks: tuple[int, ...] = ()

    def run(self) -> Ending:
        """Train until the target step or until a rank gets a request to stop; saves at the end.

        Raises DivergedError, on all ranks and after the same step, when the numbers of a step are
        invalid. A checkpoint from before that step may still be published then.
        """
        target = self.job.config.train_steps
        self.reporter.phase("training", self.position.step)
        self.interval.begun()
        gc.freeze()  # model and optimizer are permanent: exclude them from garbage collection
        gc.enable()  # `__main__` has disabled it for the start
        stopping = self.control.agree_to_stop(self._asked_to_stop())
        self.on_begin()
        trained = False
        try:
            if self.evaluation_pending and not stopping:  # of the resumed step
                none = StepAgreement(
                    stop=False, save=False, writer=WriterState.FINISHED, rejected=False
                )
                evaluation, agreed = self._evaluate(none)
                if evaluation is not None:
                    self.reporter.made_up_evaluation(evaluation)
                stopping = agreed.stop
            while self.position.step < target and not stopping:
                agreed = self.one_step()
                stopping, trained = agreed.stop, True
            if stopping:
                # The signalled ranks identify a node that is shutting down.
                signalled = self.control.who(self.job.stop.name not in _NOT_FROM_OUTSIDE)
                self.signalled_ranks = signalled[:_MOST_SIGNALLED]
            if self.saver.busy:
                self.reporter.phase("saving")  # waiting for the writers is not a slow step
            self.saver.finish()
            if trained and self.saver.newest_step != self.position.step:
                self._save(wait=True)
            self.request.done()
            self.reporter.phase("leaving")
            self.saver.leave()
            self.reporter.close()
        except DivergedError:
            self.saver.leave()
            raise
        finally:
            self.profiler.leave()
            self.reporter.flush()
        return "done" if self.position.step >= target and not self.evaluation_pending else "yielded"

    def one_step(self) -> StepAgreement:
        """Run one optimizer step, with agreement, evaluation, reporting and saving."""
        self.profiler.begin(self.position.step + 1)
        self.messages.begin(counts=not self.profiler.covers(self.position.step + 1))
        started_at = time.perf_counter()
        first = self.skips.next_sample(self.position.consumed_samples)
        batch = self.job.config.batch_sizes.size_after(self.position.step)
        samples = range(first, first + batch)

        def before_optimizer() -> None:
            self._propose()
            self.engine.clock.start("optimizer")

        update = self.engine.update(samples, before_optimizer)
        self.engine.clock.stop("optimizer")
        agreed = self.control.result()
        loss = update.loss
        self.position = Position(self.position.step + 1, samples.stop)
        result = StepResult(
            step=self.position.step,
            consumed_samples=samples.stop,
            loss=loss,
            grad_norm=None if update.grad_norm is None else float(update.grad_norm),
            learning_rate=update.learning_rate,
            step_seconds=time.perf_counter() - started_at,
            memory_bytes=peak_memory_bytes(),
            profiled=self.profiler.covers(self.position.step),
        )
        self.messages.end(result.step, result.step_seconds)
        self.profiler.end(result.step, stopping=agreed.stop)
        # the same numbers on all ranks, hence the same result
        if agreed.rejected:
            problem: str | None = (
                self.engine.rejection or "gradients of another rank are not finite"
            )
        else:
            problem = what_is_not_finite(result.loss, result.grad_norm)
            problem = problem or self.losses.spike(result.loss)
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

    def _propose(self) -> None:
        save = False
        if self.job.launch.leads and not self.saver.busy:  # neither is worth waiting for a save
            save = self.request.made or self.interval.overdue
        self.control.propose(
            stop=self._asked_to_stop(),
            save=save,
            writer=self.saver.writer_state,
            rejected=self.engine.rejection is not None,
        )

    def _asked_to_stop(self) -> bool:
        """Check for a signal to this rank, and on rank 0 for the stop file."""
        if self.job.stop.requested:
            return True
        return self.job.launch.leads and is_requested(self.job.run, "stop")

    def _evaluate(self, agreed: StepAgreement) -> tuple[Evaluation | None, StepAgreement]:
        """Evaluate unless a stop is agreed on before or between two batches.

        Returns the evaluation, if complete, and the agreement with `stop` updated. An evaluation
        may take longer than the warning time, so it is aborted between batches. It does not affect
        training, and the next launch repeats it in full. A save in progress continues.
        """
        self.saver.poll(agreed.writer)
        self.evaluation_pending = agreed.stop or self._agree_to_leave_evaluation()
        if self.evaluation_pending:
            return None, replace(agreed, stop=True)
        self.reporter.phase("evaluating", self.position.step)
        batches = EvaluationBatches(self.job.config.eval_batches, self._agree_to_leave_evaluation)
        evaluation = self.engine.evaluate(batches)
        self.reporter.phase("training")
        self.evaluation_pending = batches.interrupted
        if batches.interrupted:
            return None, replace(agreed, stop=True)
        return evaluation, agreed

    def _agree_to_leave_evaluation(self) -> bool:
        """Agree on whether any rank should stop; also advances a save in progress."""
        wait_for_device()  # otherwise all batches of the evaluation may be queued on the GPU
        self.reporter.still_working()
        self.control.propose(stop=self._asked_to_stop(), save=False, writer=self.saver.writer_state)
        agreed = self.control.result()
        self.saver.poll(agreed.writer)
        return agreed.stop

    def _save_if_due(self, agreed: StepAgreement) -> StepAgreement:
        """Save if a save is due; returns the agreement.

        A request to stop during a synchronous save is agreed on at this step, so that neither
        another step nor another save follows.
        """
        config = self.job.config
        by_steps = config.save_interval_steps
        due = agreed.save or (by_steps is not None and self.position.step % by_steps == 0)
        due = due or (self.saver.postponed and not self.saver.busy)
        at_the_end = agreed.stop or self.position.step >= config.train_steps
        if due and not at_the_end:
            self._save(wait=not config.async_save)
            if not config.async_save:
                stop = self.control.agree_to_stop(self._asked_to_stop())
                return replace(agreed, stop=stop)
        return agreed

    def _save(self, *, wait: bool) -> None:
        """Save the current position. Raises DivergedError on all ranks for invalid weights."""
        self.reporter.phase("saving")
        # The update itself can overflow, which the next loss would show too late for this save.
        if not self.control.all_agree(self.engine.weights_are_finite()):
            step, sizes = self.position.step, self.job.config.batch_sizes
            consumed = self.position.consumed_samples - sizes.size_after(step - 1)
            what = "weights are not finite after the update"
            raise DivergedError(step, consumed, self.losses.last, what)
        self.saver.begin(self.position)
        self.interval.begun()
        if self.request.done():
            self.reporter.log("save_requested", step=self.position.step)
        if wait:
            self.saver.finish()
        while wait and self.saver.postponed:
            self.saver.begin(self.position)
            self.saver.finish()
        self.reporter.phase("training")
