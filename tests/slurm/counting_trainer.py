"""A trainer of somebody's own without any library: `counting_trainer.py OUTPUT [CHECKPOINT]`.

All ranks count to 30, by themselves, and save every 5 steps and on SIGTERM; rank 0 says the loss,
which follows from its checkpoint. $HELD (`1:13,2:17`) holds the ranks of a launch in a step until
they are asked to leave or killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS, SAVE_EVERY_STEPS, STEP_SECONDS = 30, 5, 0.02


def following(state: float, step: int) -> float:
    return 0.9 * state + 0.01 * (step % 7)


def main(output: Path, checkpoint: str = "") -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    launch = int(output.name.removeprefix("launch-"))
    holds = dict(entry.split(":") for entry in os.environ.get("HELD", "").split(",") if entry)
    step, state = 0, 1.0
    if checkpoint:
        step, state = json.loads((Path(checkpoint) / "rank-0").read_text())
    print(f"rank {rank} of {world} begins after step {step}", flush=True)
    while step < STEPS and not asked:
        while holds.get(str(launch)) == str(step + 1) and not asked:
            time.sleep(STEP_SECONDS)
        if asked:
            break
        time.sleep(STEP_SECONDS)
        step += 1
        state = following(state, step)
        if rank == 0:
            print(f"step {step} loss {state!r}", flush=True)
        if step % SAVE_EVERY_STEPS == 0:
            save(output / f"step-{step}", rank, (step, state))
    if asked:
        save(output / f"step-{step}", rank, (step, state))


def save(directory: Path, rank: int, what: tuple[int, float]) -> None:
    directory.mkdir(exist_ok=True)
    path = directory / f".rank-{rank}"
    path.write_text(json.dumps(what))
    path.rename(directory / f"rank-{rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
