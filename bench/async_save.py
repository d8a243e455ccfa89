"""How long training stands still for a checkpoint: asynchronous saves against synchronous ones.

Two ranks (DP 2, gloo) hold one model and save it again and again, in turns synchronously and
beside training, in the same process on the same disk. Printed: the median stall of each, their
ratio, and where the asynchronous stall goes. The first saves, which make plans, are not counted.

    python -m bench.async_save [--hidden 1024] [--layers 8] [--rounds 6] [--limit 0.05]
        [--sharding fully_reshardable] [--copies]

On a CPU a fork shares memory with the rank; `--copies` makes the copies that a rank with a GPU
makes, at the speed of host memory. megatron-core's planning is the same.
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
from typing import Any

from bench import prefork
from bench.overhead.jobs import MEGATRON as CONFIG
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import SaveRecord, read_saves
from hpctrain.train import startup
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import read_launch
from hpctrain.train.saving import writer
from hpctrain.train.saving.saver import Saver
from hpctrain.train.stop import StopSignals

RANKS = 2
LIMIT_SECONDS = 1800.0
# The first plans, the second finds that the plan stays, the third is the first one like all later.
WARM_UP_SAVES = 3


class _Keeper:
    step: Callable[[], int]
    loading_step: int | None = None

    def begin(self) -> None:
        """Nobody stops this launch."""


def settings(hidden: int, layers: int, sharding: str) -> MegatronConfig:
    """The model of the overhead benchmark in another size, on two data-parallel ranks."""
    return CONFIG.model_copy(
        update=dict(
            hidden_size=hidden,
            ffn_hidden_size=4 * hidden,
            kv_channels=hidden // CONFIG.num_attention_heads,
            num_layers=layers,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            pipeline_layer_split=((layers,),),
            data_parallel_size=RANKS,
            save_interval_seconds=None,
            optimizer_sharding=sharding,
        )
    )


class _Parts:
    """Seconds within the parts of `Saver.begin`, of all calls since the last reset."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            began_at = time.perf_counter()
            try:
                return original(*arguments, **keywords)
            finally:
                taken = time.perf_counter() - began_at
                self.seconds[label] = self.seconds.get(label, 0.0) + taken

        setattr(owner, name, timed)


def measure(config: MegatronConfig, run: RunLayout, rounds: int) -> None:
    """On each rank: save in turns, with a step in between; rank 0 leaves the kinds of its saves."""
    launch = read_launch(os.environ)
    loop = startup.assemble(Job(config, launch, run, StopSignals()), _Keeper())
    parts = _Parts()
    parts.watch(type(loop.saver._snapshot), "plan", "plan (with the state)")
    parts.watch(type(loop.saver._snapshot), "sharded", "state dict")
    parts.watch(type(loop.saver._writer), "start", "copy and fork")
    parts.watch(Saver, "_prepare_directory", "room and directory")
    kinds: list[str] = []
    split: list[dict[str, float]] = []
    for number in range(WARM_UP_SAVES + 2 * rounds):
        wait = number % 2 == 0
        parts.seconds = {}
        loop.one_step()
        loop._save(wait=wait)
        if not wait:
            split.append(parts.seconds)
        while loop.saver.busy:  # as steps would: nobody waits, all agree
            loop.saver.poll(loop.control.worst_writer(loop.saver.writer_state))
            time.sleep(0.01)
        kinds.append("sync" if wait else "async")
    if launch.leads:
        told = {"kinds": kinds, "parts": split[WARM_UP_SAVES // 2 :]}
        (run.directory / "bench.json").write_text(json.dumps(told))
    loop.saver.leave()
    loop.control.barrier()


def report(run: RunLayout, limit: float) -> int:
    told = json.loads((run.directory / "bench.json").read_text())
    pairs = list(zip(told["kinds"], read_saves(run), strict=True))[WARM_UP_SAVES:]
    size_bytes = pairs[0][1].size_bytes
    stalls = {kind: _stalls(kind, pairs) for kind in ("sync", "async")}
    print(f"checkpoint of {size_bytes / 1e6:.0f} MB on {RANKS} ranks")
    for kind, seconds in stalls.items():
        publish = [save.publish_seconds for one, save in pairs if one == kind]
        print(
            f"{kind:5} stall median {statistics.median(seconds):7.3f} s of {len(seconds)} saves, "
            f"until it counts {statistics.median(publish):7.3f} s"
        )
    for label in told["parts"][0]:
        median = statistics.median(part[label] for part in told["parts"])
        print(f"      {label:22} {median:7.3f} s")
    ratio = statistics.median(stalls["async"]) / statistics.median(stalls["sync"])
    print(f"ratio {ratio:.3f} (limit {limit})")
    return 0 if ratio <= limit else 1


def _stalls(kind: str, pairs: list[tuple[str, SaveRecord]]) -> list[float]:
    return [save.stall_seconds for one, save in pairs if one == kind]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--limit", type=float, default=0.05)
    parser.add_argument("--sharding", default="dp_reshardable", help="or fully_reshardable")
    parser.add_argument(
        "--copies", action="store_true", help="write from copies, as ranks with a GPU do"
    )
    options = parser.parse_args()
    config = settings(options.hidden, options.layers, options.sharding)
    with tempfile.TemporaryDirectory() as name:
        run = RunLayout(Path(name) / "run")
        run.create()
        run.train_config.write_text(config.model_dump_json())  # without it the run counts as away

        def rank() -> None:
            if options.copies:
                writer.needs_copies = lambda: True
            measure(config, run, options.rounds)

        ranks = prefork.fork(rank, RANKS, run.logs)
        codes = ranks.wait(LIMIT_SECONDS)
        if any(codes):
            for rank, code in enumerate(codes):
                print(f"rank {rank}: exit code {code}\n{ranks.log(rank)[-2000:]}", file=sys.stderr)
            return 1
        return report(run, options.limit)


if __name__ == "__main__":
    sys.exit(main())
