"""What measuring the messages between ranks costs: a measured step against one that is not.

Both take turns in the same processes, as in `bench.overhead`. Printed for each engine: the median
of both, their ratio, and what that makes over a run that measures as often as a spec does by
default. Exit code 1 when the latter is above the limit beyond doubt.

    python -m bench.overhead.messages [ENGINE ...] [--seconds 15] [--limit 1.02]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench import prefork
from bench.overhead.jobs import JOBS
from bench.overhead.ranks import SECONDS_FILE, Keeper, meet
from bench.overhead.turns import BARE, OURS, Turns, read_found, write_found
from bench.pairs import ratio
from hpctrain.engines.training import MESSAGES_INTERVAL_STEPS
from hpctrain.records.layout import RunLayout
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import quiet_defaults, read_launch
from hpctrain.train.stop import StopSignals

LIMIT_SECONDS = 600.0
ENGINES = tuple(name for name in JOBS if name != "megatron-lm")


def in_turns(engine: str, directory: Path, seconds: float) -> None:
    """On each rank: every second step is measured."""
    os.environ.update(quiet_defaults())
    run = RunLayout(directory)
    from hpctrain.train import startup

    job = Job(JOBS[engine], read_launch(os.environ), run, StopSignals())
    loop: Any = startup.assemble(job, Keeper())

    def step(interval_steps: int | None) -> None:
        loop.messages.interval_steps = interval_steps
        loop.one_step()

    steps: dict[str, Callable[[], None]] = {BARE: partial(step, None), OURS: partial(step, 1)}
    ranks = job.config.world_size
    turns = Turns(seconds, lambda: meet(loop), lambda own: loop.control.total(own) / ranks)
    for kind in turns:
        steps[kind]()
    if job.launch.leads:
        assert run.communication.exists(), "nothing was measured"
        write_found(run.directory / SECONDS_FILE, turns.found)
    loop.control.barrier()


def told(engine: str, seconds: float, limit: float) -> bool:
    """Print one row; False if the ratio over a run is above the limit beyond doubt."""
    with tempfile.TemporaryDirectory() as name:
        run = RunLayout(Path(name) / "run")
        run.create()
        run.train_config.write_text(JOBS[engine].model_dump_json())
        work = partial(in_turns, engine, run.directory, seconds)
        ranks = prefork.fork(work, JOBS[engine].world_size, run.logs)
        if any(ranks.wait(LIMIT_SECONDS)):
            print(ranks.log()[-2000:], file=sys.stderr)
            return False
        found = read_found(run.directory / SECONDS_FILE)
    measured, usual = found[OURS].wall, found[BARE].wall
    each = ratio([one / other for one, other in zip(measured, usual, strict=True)])
    every = MESSAGES_INTERVAL_STEPS
    print(
        f"{engine:12}{statistics.median(usual) * 1000:8.1f} ms"
        f"{statistics.median(measured) * 1000:8.1f} ms measured  ratio {each}"
        f"  in one step of {every}: {1 + (each.median - 1) / every:.4f}",
        flush=True,
    )
    return 1 + (each.low - 1) / every <= limit


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=", ".join(ENGINES))
    parser.add_argument("--seconds", type=float, default=15.0, help="for each engine")
    parser.add_argument("--limit", type=float, default=1.02)
    options = parser.parse_args()
    if unknown := set(options.engines) - set(ENGINES):
        parser.error(f"no such engine: {', '.join(sorted(unknown))}")
    good = [told(engine, options.seconds, options.limit) for engine in options.engines or ENGINES]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
