"""Fork launches of the trainer from one process that strace follows.

Each line of the list names a `train.json`, the number of ranks, and the checkpoint to resume from
or `-`. That is copied into the run before, and divided among the ranks; metrics and records of
software, too, come from the run that has saved it. All launches are of epoch 1. The calls of this
process itself do not count: it writes its number beside the list. Belongs here: what happens inside
the trace. Does not belong here: strace (`system_calls`), what is launched (`small_runs`).
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path

# What each rank would otherwise import by itself: tens of thousands of calls that do not count.
_IMPORTED_BY_RANKS = (
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.tokenizers.text.libraries",
    "torch._dynamo",
    "transformers",
)
LIMIT_SECONDS = 300.0


def main(arguments: list[str]) -> int:
    """Run the launches that the file lists, one after the other, and print their exit codes."""
    from bench import prefork
    from hpctrain.checkpoints.resume_shares import write_shares
    from hpctrain.records.layout import RunLayout
    from hpctrain.records.manifest import read_manifest
    from hpctrain.train.job import read_config
    from hpctrain.train.startup import room_of

    listed = Path(arguments[0])
    listed.with_suffix(".pid").write_text(str(os.getpid()))
    for number, line in enumerate(listed.read_text().splitlines()):
        config, ranks, resume = line.split("\t")
        environment = {"HPCTRAIN_EPOCH": "1", "HPCTRAIN_RESUME": ""}
        if resume != "-":
            name = Path(resume).name
            directory = Path(config).parent / "checkpoints" / name
            shutil.copytree(resume, directory)
            saved, run = RunLayout(Path(resume).parents[1]), RunLayout(Path(config).parent)
            for record in (saved.metrics, saved.software, saved.software_lock):
                shutil.copy(record, run.directory)
            manifest = read_manifest(directory)
            assert manifest is not None, f"{resume} has no manifest"
            write_shares(directory, manifest, int(ranks))  # as the supervisor does
            environment["HPCTRAIN_RESUME"] = name
        room_of(read_config(Path(config)))  # before megatron-core, whose CPU layer it installs
        for module in _IMPORTED_BY_RANKS:
            importlib.import_module(module)
        logs = listed.parent / f"launch-{number}"
        launched = prefork.start(Path(config), int(ranks), logs, environment=environment)
        ended = launched.wait(LIMIT_SECONDS)
        print("exit codes", *ended, flush=True)
        print(*(launched.log(rank) for rank in range(int(ranks)) if ended[rank]), flush=True)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
