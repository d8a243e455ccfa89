"""What comparing digests costs a launch: loading with and without it, in turns, in the same ranks.

Two ranks (DP 2, gloo) hold one model, save it once and load it again and again: alone, with each
rank comparing its share of the files in a thread, and after one process has read all of them, as a
supervisor with `verify: sha256` does. Printed: the median of each and ratios to loading alone.

    python -m bench.digests_while_loading [--hidden 512] [--layers 8] [--rounds 5] [--limit 2.0]

Files come from the page cache here, so loading is fast and hashing is all of the difference: on a
parallel file system loading takes longer and the difference is smaller. Where ranks have no core to
spare, as on this machine, the thread competes with loading itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench import prefork
from bench.async_save import LIMIT_SECONDS, RANKS, settings
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name, read_manifest, what_is_wrong
from hpctrain.train import startup
from hpctrain.train.job import Job
from hpctrain.train.loop import Loop
from hpctrain.train.rank_environment import read_launch
from hpctrain.train.saving.digest_check import start_digest_check
from hpctrain.train.stop import StopSignals

ALONE, BESIDE, BEFORE = "loading alone", "digests by the ranks", "digests by one reader"


class _Keeper:
    step: Callable[[], int]
    loading_step: int | None = None


def measure(config: MegatronConfig, run: RunLayout, rounds: int) -> None:
    """On each rank: save once, then load in turns; rank 0 leaves the seconds of each kind."""
    launch = read_launch(os.environ)
    loop = startup.assemble(Job(config, launch, run, StopSignals()), _Keeper())
    loop.one_step()
    loop._save(wait=True)
    directory = run.checkpoints / checkpoint_name(1)
    seconds: dict[str, list[float]] = {ALONE: [], BESIDE: [], BEFORE: []}
    for number in range(rounds + 1):
        for kind, taken in seconds.items():
            loop.control.barrier()
            began_at = time.perf_counter()
            _load(loop, directory, kind, launch.rank)
            loop.control.barrier()
            if number:  # the first of each kind warms up
                taken.append(time.perf_counter() - began_at)
    if launch.leads:
        manifest = read_manifest(directory)
        assert manifest is not None
        told = {"seconds": seconds, "bytes": manifest.total_bytes}
        (run.directory / "bench.json").write_text(json.dumps(told))
    loop.saver.leave()
    loop.control.barrier()


def _load(loop: Loop, directory: Path, kind: str, rank: int) -> None:
    if kind == BEFORE:
        if rank == 0:
            assert what_is_wrong(directory, read_manifest(directory), deep=True) is None
        loop.control.barrier()
    check = start_digest_check(directory, rank, RANKS, "here") if kind == BESIDE else None
    loop.saver._snapshot.restore(directory)
    if check is not None:
        check.agree(loop.control)


def report(run: RunLayout, limit: float) -> int:
    told = json.loads((run.directory / "bench.json").read_text())
    medians = {kind: statistics.median(taken) for kind, taken in told["seconds"].items()}
    print(f"checkpoint of {told['bytes'] / 1e6:.0f} MB on {RANKS} ranks, {os.cpu_count()} cores")
    for kind, median in medians.items():
        print(f"{kind:22} median {median:7.3f} s, {median / medians[ALONE]:.2f} x loading alone")
    ratio = medians[BESIDE] / medians[ALONE]
    print(f"ratio {ratio:.2f} (limit {limit})")
    return 0 if ratio <= limit else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=2.0)
    options = parser.parse_args()
    config = settings(options.hidden, options.layers, "fully_reshardable")
    with tempfile.TemporaryDirectory() as name:
        run = RunLayout(Path(name) / "run")
        run.create()
        run.train_config.write_text(config.model_dump_json())  # without it the run counts as away
        ranks = prefork.fork(lambda: measure(config, run, options.rounds), RANKS, run.logs)
        codes = ranks.wait(LIMIT_SECONDS)
        if any(codes):
            for rank, code in enumerate(codes):
                print(f"rank {rank}: exit code {code}\n{ranks.log(rank)[-2000:]}", file=sys.stderr)
            return 1
        return report(run, options.limit)


if __name__ == "__main__":
    sys.exit(main())
