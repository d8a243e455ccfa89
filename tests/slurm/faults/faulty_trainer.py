"""The real trainer, with faults that a plan names: `python faulty_trainer.py PLAN train.json`.

Belongs here: what a rank may do to itself at its start or when a step begins. Nothing of it is in
the package. Does not belong here: faults from outside (see `hpctrain.sandbox.faults`).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.train.stop import StopSignals

Fault = dict[str, Any]


def planned(path: Path) -> list[Fault]:
    """The faults of this rank and launch; rank -1 stands for all, and so does epoch 0."""
    rank, epoch = int(os.environ["SLURM_PROCID"]), int(os.environ["HPCTRAIN_EPOCH"])
    return [
        fault
        for fault in json.loads(path.read_text())
        if fault["rank"] in (rank, -1) and fault["epoch"] in (epoch, 0)
    ]


# -- what a rank does to itself ----------------------------------------------------------------


def leave(fault: Fault) -> None:
    """End at once with a code, after some words."""
    say(fault)
    os._exit(fault["code"])


def fail(fault: Fault) -> None:
    """Raise what a library raises."""
    raise RuntimeError(fault["text"])


def misspell(fault: Fault) -> None:
    """A mistake in the code of the user that one rank alone comes to."""
    json.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def stop_writer(fault: Fault) -> None:
    """From now on the process that writes this rank's part of a checkpoint never ends it, as one
    does not whose storage client does not answer."""
    import_loop()
    from hpctrain.train.saving import write_job

    real = write_job.write_rank_digests

    def stopped(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return real(*arguments)

    write_job.write_rank_digests = stopped


def say(fault: Fault) -> None:
    if fault["text"]:
        print(fault["text"], file=sys.stderr, flush=True)


def kernel(fault: Fault) -> None:
    """The kernel of this node says something, in the format of `journalctl -o short-unix`."""
    node = os.environ["SLURMD_NODENAME"]
    log = Path(os.environ["HPCTRAIN_KERNEL_LOG"].replace("{node}", node))
    with log.open("a") as stream:
        stream.write(f"{time.time():.6f} {node} kernel: {fault['text']}\n")


def sleep(fault: Fault) -> None:
    """Never come to the collective that the others wait in."""
    time.sleep(fault["seconds"] or 3600)


def await_warning(fault: Fault) -> None:
    """A step that lasts until somebody asks this rank to leave."""
    _wait_for(lambda: False)


def await_word(fault: Fault) -> None:
    """This step and those after it wait until the test says `text`, or somebody wants a save."""
    word, request = PLAN.with_name(f"said-{fault['text']}"), Path("control/save")
    _wait_for(lambda: word.exists() or request.exists())


def _wait_for(reached: Callable[[], bool]) -> None:
    """Or until this rank is asked to leave."""
    request = Path("control/stop")
    deadline = time.monotonic() + 3600
    while not (reached() or STOP.requested or request.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)


def stop(fault: Fault) -> None:
    """All threads stand still, as after a SIGSTOP from outside."""
    os.kill(os.getpid(), signal.SIGSTOP)


def settle(fault: Fault) -> None:
    """On all ranks: no save is under way when the step begins. Rank 0 makes a note of it."""
    LOOPS[-1].saver.finish()
    if os.environ["SLURM_PROCID"] == "0":
        PLAN.with_name(f"settled-{os.environ['HPCTRAIN_EPOCH']}-{fault['step']}").touch()


def import_nothing(fault: Fault) -> None:
    """A mistake in the code of the user: the traceback is Python's own.

    All ranks come to it together: one that is late would be ended before it can say the same.
    """
    _meet()
    import a_module_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401


def _meet() -> None:
    """Wait for all ranks of this launch."""
    place = PLAN.with_name(f"met-{os.environ['HPCTRAIN_EPOCH']}")
    place.mkdir(exist_ok=True)
    (place / os.environ["SLURM_PROCID"]).touch()
    _wait_for(lambda: len(list(place.iterdir())) == int(os.environ["SLURM_NTASKS"]))


def die_of_term(fault: Fault) -> None:
    """TERM ends the process, as it ends most programs: code 143 for Slurm."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
    from hpctrain.errors import InvalidInputError, Problem
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


def take_port(fault: Fault) -> None:
    """Listen where rank 0 is about to."""
    taken = socket.create_server(("", int(os.environ["MASTER_PORT"])))
    _KEPT.append(taken)


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
    from hpctrain.train.saving import publisher

    real = publisher.publish

    def slow(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(fault["seconds"])
        return real(*arguments, **keywords)

    publisher.publish = slow


def poison(fault: Fault) -> None:
    """The batch that begins after so many samples gives a loss that is no number."""
    import_megatron()
    from hpctrain.train.engines.megatron.engine import MegatronEngine

    real = MegatronEngine.update

    def update(engine: Any, first_sample: int, before_step: Any) -> Any:
        done = real(engine, first_sample, before_step)
        poisoned = first_sample == fault["samples"]
        return replace(done, totals=done.totals * float("nan")) if poisoned else done

    MegatronEngine.update = update  # type: ignore[method-assign]


def evaluate_slowly(fault: Fault) -> None:
    """Each batch of the validation data takes so long, and is noted in the file `text`."""
    import_loop()
    from hpctrain.train.evaluation import EvaluationBatches

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
PLAN = Path(sys.argv[1])
LOOPS: list[Any] = []
_KEPT: list[Any] = []
DEEDS: dict[str, Callable[[Fault], None]] = {
    "leave": leave,
    "fail": fail,
    "misspell": misspell,
    "stop_writer": stop_writer,
    "say": say,
    "kernel": kernel,
    "sleep": sleep,
    "await_warning": await_warning,
    "await_word": await_word,
    "pace": pace,
    "miss_a_file": miss_a_file,
    "stop": stop,
    "settle": settle,
    "import_nothing": import_nothing,
    "die_of_term": die_of_term,
    "hear_nothing": hear_nothing,
    "take_port": take_port,
    "compute_slowly": compute_slowly,
    "publish_slowly": publish_slowly,
    "poison": poison,
    "evaluate_slowly": evaluate_slowly,
    "check_slowly": check_slowly,
    "open_data_slowly": open_data_slowly,
    "load_slowly": load_slowly,
    "agree_late": agree_late,
}


# What is done at all later steps, too.
LASTING = ("await_word", "pace")


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
    gc.disable()  # as the entry point does
    faults = planned(PLAN)
    for fault in faults:
        if not fault["step"]:
            DEEDS[fault["do"]](fault)
    later = [fault for fault in faults if fault["step"]]
    if later:
        strike_at_steps(later)
    from hpctrain.train.entry import leave as end
    from hpctrain.train.entry import main as train

    end(train(arguments, STOP))


if __name__ == "__main__":
    main()
