"""What the trainer costs: its step against the least loop that trains with the same engine.

For each engine both run in the same processes (gloo, or one on a GPU) on the same model, optimizer
and samples, in short turns. Printed: the median step of each; the median over neighbouring turns of
the ratio, with the interval that holds the true one with 95 %; and the same ratio of the CPU time
of rank 0, which does most and which other programs of this machine disturb less. Exit code 1 when a
ratio of steps is above the limit beyond doubt: the whole interval.

    python -m bench.overhead [ENGINE ...] [--seconds 25] [--limit 1.02] [--gpu]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

from bench import prefork
from bench.overhead.jobs import JOBS, MEGATRON_LM, on_one_gpu
from bench.overhead.ranks import SECONDS_FILE, measure
from bench.overhead.turns import BARE, OURS, Found, read_found
from bench.pairs import Ratio, ratio
from hpctrain.records.layout import RunLayout

LIMIT_SECONDS = 600.0


def measured(engine: str, seconds: float) -> Found | None:
    """What the turns took on rank 0; None where a rank failed, which is shown."""
    with tempfile.TemporaryDirectory() as name:
        run = RunLayout(Path(name) / "run")
        run.create()
        run.train_config.write_text(JOBS[engine].model_dump_json())  # or the run counts as away
        work = partial(measure, engine, run.directory, seconds)
        ranks = prefork.fork(work, JOBS[engine].world_size, run.logs)
        codes = ranks.wait(LIMIT_SECONDS)
        found = run.directory / SECONDS_FILE
        if not any(codes) and found.exists():
            return read_found(found)
        for rank, code in enumerate(codes):
            print(f"rank {rank}: exit code {code}\n{ranks.log(rank)[-2000:]}", file=sys.stderr)
        return None


def compared(ours: list[float], bare: list[float]) -> Ratio:
    return ratio([one / other for one, other in zip(ours, bare, strict=True)])


def told(engine: str, found: Found, limit: float) -> bool:
    """Print one row; False if the ratio is above the limit beyond doubt."""
    ours, bare = found[OURS], found[BARE]
    step, cpu = compared(ours.wall, bare.wall), compared(ours.cpu, bare.cpu)
    sure = "" if step.high <= limit or step.low > limit else "  (not sure)"
    print(
        f"{engine:12}{statistics.median(bare.wall) * 1000:8.1f} ms bare"
        f"{statistics.median(ours.wall) * 1000:8.1f} ms hpctrain  ratio {step}{sure}",
        f"{'':12}{'CPU time of rank 0':>40}  ratio {cpu}",
        sep="\n",
        flush=True,
    )
    return step.low <= limit


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=", ".join(JOBS))
    parser.add_argument("--seconds", type=float, default=25.0, help="for each engine")
    parser.add_argument("--limit", type=float, default=1.02)
    parser.add_argument("--gpu", action="store_true", help="one process on the GPU of this machine")
    options = parser.parse_args()
    if options.gpu:
        JOBS.update({engine: on_one_gpu(config) for engine, config in JOBS.items()})
    if unknown := set(options.engines) - set(JOBS):
        parser.error(f"no such engine: {', '.join(sorted(unknown))}")
    good = True
    for engine in options.engines or JOBS:
        if engine == "megatron-lm" and not MEGATRON_LM.is_dir():
            print(f"{engine:12} not measured: `make install` unpacks one into {MEGATRON_LM.name}")
            continue
        found = measured(engine, options.seconds)
        good = found is not None and told(engine, found, options.limit) and good
    print(f"limit {options.limit}: {'kept' if good else 'NOT kept'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
