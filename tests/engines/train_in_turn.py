"""A program: trains runs one after the other, with the megatron-core that it finds first.

`python train_in_turn.py RUN_DIRECTORY[:CHECKPOINT] ...` prints the log of each run's rank 0, and
ends with 1 if a rank fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1])]


def main() -> int:
    from bench import prefork
    from hpctrain.train.job import read_config

    for number, word in enumerate(sys.argv[1:]):
        directory, _, checkpoint = word.partition(":")
        config = Path(directory, "train.json")
        environment = {"HPCTRAIN_EPOCH": "0", "HPCTRAIN_RESUME": checkpoint}
        ranks = prefork.start(
            config,
            read_config(config).world_size,
            Path(directory, "logs", f"in-turn-{number}"),
            environment=environment,
        )
        codes = ranks.wait(300)
        print(ranks.log(0))
        if any(codes):
            print(f"exit codes of {directory}: {codes}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
