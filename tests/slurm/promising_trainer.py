"""A trainer of one's own, of the standard library: `promising_trainer.py OUTPUT [--resume FILE]`.

Rank 0 trains and saves; the other ranks wait for the end. Its state is one number, from which each
loss follows. $BROKEN names a promise that it breaks: `deaf` does not save on SIGTERM, `restarts`
does not load what it is given, `drifts` loads half of it, `early` ends with 0 before its target.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

STEP_SECONDS = 0.05
SAVE_EVERY_STEPS = 20


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    given, broken, asked = parser.parse_args(), os.environ.get("BROKEN"), list[int]()
    if broken != "deaf":
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    if os.environ.get("RANK", "0") != "0":  # a command that starts no ranks is one
        while not asked and broken != "early":
            time.sleep(STEP_SECONDS)
        return 0
    step, state = 0, 1.0
    if given.resume and broken != "restarts":
        saved = json.loads(given.resume.read_text())
        step, state = saved["step"], saved["state"]
        if broken == "drifts":
            state *= 1.5
    while step < given.steps and not asked:
        time.sleep(STEP_SECONDS)
        step += 1
        state = 0.99 * state + 0.001 * (step % 7)
        print(f"step {step} loss {state!r}", flush=True)
        if step % SAVE_EVERY_STEPS == 0:
            save(given.output, step, state)
        if broken == "early" and step == 3:
            return 0
    if asked:
        save(given.output, step, state)
    return 0


def save(output: Path, step: int, state: float) -> None:
    """Under its own name from the beginning, as frameworks do."""
    document = {"step": step, "state": state, "filling": "x" * 1000}
    (output / f"state-{step}.json").write_text(json.dumps(document))


if __name__ == "__main__":
    sys.exit(main())
