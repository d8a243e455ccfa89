"""The real trainer, with faults that a plan names: `python faulty_trainer.py PLAN train.json`.

Belongs here: what a rank may do to itself at its start or when a step begins. Nothing of it is in
the package. Does not belong here: faults from outside (see `hpctrain.sandbox.faults`).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rank_deeds import ASKED_TO_LEAVE, LASTING, PLAN, Fault, planned, settled
from rank_deeds import DEEDS as COMMON_DEEDS

from hpctrain.train.stop import StopSignals, leave

# -- what a rank does to itself ----------------------------------------------------------------


def stop_writer(fault: Fault) -> None:
    """From now on the process that writes this rank's part of a checkpoint never ends it, as one
    does not whose storage client does not answer."""
    import_loop()
    from hpctrain.train.saving import writer

    real = writer.write_rank_digests

    def stopped(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return real(*arguments)

    writer.write_rank_digests = stopped


def settle(fault: Fault) -> None:
    """On all ranks: no save is under way when the step begins. Rank 0 makes a note of it."""
    LOOPS[-1].saver.finish()
    settled(fault)


def hear_nothing(fault: Fault) -> None:
    """Neither signals nor files make this rank leave."""
    import_loop()
    from hpctrain.train import loop

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    loop.is_requested = lambda run, kind: False


def miss_a_file(fault: Fault) -> None:
    """What the check at the start says where the data are not to be seen, as on a node on which
    their file system is not mounted."""
    from hpctrain.base.errors import InvalidInputError, Problem
    from hpctrain.train import entry

    def check(job: Any) -> None:
        raise InvalidInputError(
            [Problem("data file not found", fault["text"], node_dependent=True)]
        )

    entry.check = check


def pace(fault: Fault) -> None:
    """Steps take longer, and evaluations ten times as much longer, as those of a larger model."""
    time.sleep(fault["seconds"])
    loop = LOOPS[-1]
    if not hasattr(loop, "unhurried"):
        real = loop.engine.evaluate

        def evaluate(*arguments: Any, **keywords: Any) -> Any:
            time.sleep(fault["seconds"] * 10)
            return real(*arguments, **keywords)

        object.__setattr__(loop.engine, "evaluate", evaluate)
        loop.unhurried = True


def compute_slowly(fault: Fault) -> None:
    """On the node `text` every product that is measured begins late."""
    if os.environ["SLURMD_NODENAME"] != fault["text"]:
        return
    import_loop()
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from late_products import late_products

    from hpctrain.train import speed_check

    real = speed_check.measure_products

    def measured(*given: Any) -> float:
        with late_products():
            return real(*given)

    speed_check.measure_products = measured


def publish_slowly(fault: Fault) -> None:
    """From now on, wait between a checkpoint's last byte and its publication."""
    import_loop()
    from hpctrain.train.saving import publication

    real = publication.publish

    def slow(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(fault["seconds"])
        return real(*arguments, **keywords)

    publication.publish = slow


def die_unpublished(fault: Fault) -> None:
    """End between a checkpoint's last byte and its publication."""
    import_loop()
    from hpctrain.train.saving import publication

    assert publication.publish, "replacing what is not there would be no fault"
    publication.publish = lambda *arguments, **keywords: os._exit(fault["code"])


def poison(fault: Fault) -> None:
    """The batch that begins after so many samples gives a loss that is no number."""
    import_megatron()
    from hpctrain.train.engines.megatron.engine import MegatronEngine

    real = MegatronEngine.update

    def update(engine: Any, samples: range, before_step: Any) -> Any:
        done = real(engine, samples, before_step)
        poisoned = samples.start == fault["samples"]
        return replace(done, totals=done.totals * float("nan")) if poisoned else done

    MegatronEngine.update = update  # type: ignore[method-assign]


def evaluate_slowly(fault: Fault) -> None:
    """Each batch of the validation data takes so long, and is noted in the file `text`."""
    import_loop()
    from hpctrain.train.loop import EvaluationBatches

    real, note = EvaluationBatches.__iter__, PLAN.with_name(fault["text"])

    def slowly(batches: Any) -> Any:
        for number in real(batches):
            with note.open("a") as stream:
                stream.write(f"{os.environ['HPCTRAIN_EPOCH']}:{number}\n")
            time.sleep(fault["seconds"])
            yield number

    EvaluationBatches.__iter__ = slowly  # type: ignore[method-assign]


def check_slowly(fault: Fault) -> None:
    """Not through with what comes before torch; the others wait for this rank."""
    from hpctrain.train import entry

    entry.check = lambda job: _starts_slowly(fault)


def open_data_slowly(fault: Fault) -> None:
    """Builds indexes; the others wait in a collective."""
    import_megatron()
    from hpctrain.train.engines.megatron import assembly

    assembly.open_data = lambda *given, **keywords: _starts_slowly(fault)


def load_slowly(fault: Fault) -> None:
    """Reads its part of the checkpoint; the others wait in a collective."""
    import_megatron()
    from hpctrain.train.engines.megatron.snapshot import MegatronSnapshot

    MegatronSnapshot.restore = lambda *given: _starts_slowly(fault)  # type: ignore[method-assign]


def agree_late(fault: Fault) -> None:
    """Comes late to the first collective of the loop."""
    import_loop()
    from hpctrain.train.step_agreement import Control

    Control.agree_to_stop = lambda *given: _starts_slowly(fault)  # type: ignore[method-assign]


def _starts_slowly(fault: Fault) -> Any:
    PLAN.with_name(f"starts-{fault['epoch']}").touch()
    time.sleep(3600)


STOP = StopSignals()
LOOPS: list[Any] = []
DEEDS: dict[str, Callable[[Fault], None]] = COMMON_DEEDS | {
    "stop_writer": stop_writer,
    "pace": pace,
    "miss_a_file": miss_a_file,
    "settle": settle,
    "hear_nothing": hear_nothing,
    "compute_slowly": compute_slowly,
    "publish_slowly": publish_slowly,
    "die_unpublished": die_unpublished,
    "poison": poison,
    "evaluate_slowly": evaluate_slowly,
    "check_slowly": check_slowly,
    "open_data_slowly": open_data_slowly,
    "load_slowly": load_slowly,
    "agree_late": agree_late,
}


# -- when ----------------------------------------------------------------------------------------


def import_loop() -> None:
    """As the entry point does it, and nothing of an engine."""
    from hpctrain.train.rank_environment import quiet_defaults

    os.environ.update(quiet_defaults())
    from hpctrain.train import loop  # noqa: F401


def import_megatron() -> None:
    """The CPU layer comes before anything of megatron-core."""
    import_loop()
    from hpctrain.train.engines.megatron import assembly  # noqa: F401


def strike_at_steps(faults: list[Fault]) -> None:
    """Have the loop stumble when a planned step begins."""
    import_loop()
    from hpctrain.train.loop import Loop

    real = Loop.one_step

    def one_step(loop: Any) -> Any:
        LOOPS[:] = [loop]
        step = loop.position.step + 1
        for fault in faults:
            if fault["step"] == step or (fault["do"] in LASTING and fault["step"] < step):
                DEEDS[fault["do"]](fault)
        return real(loop)

    Loop.one_step = one_step  # type: ignore[method-assign]


def main() -> None:
    arguments = sys.argv[2:]
    STOP.install()
    ASKED_TO_LEAVE.append(lambda: STOP.requested)
    gc.disable()  # as the entry point does
    faults = planned()
    for fault in faults:
        if not fault["step"]:
            DEEDS[fault["do"]](fault)
    later = [fault for fault in faults if fault["step"]]
    if later:
        strike_at_steps(later)
    from hpctrain.train.entry import main as train

    leave(train(arguments, STOP))


if __name__ == "__main__":
    main()
