"""A trainer of sixty lines that needs Python alone, and can do wrong what trainers do wrong.

It prints `step N loss X`, and saves `step-N/` with the sign `state.json` last.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, required=True)
parser.add_argument("--resume", type=Path)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--every", type=int, default=5)
parser.add_argument("--pause", type=float, default=0.01)
parser.add_argument("--import-seconds", type=float, default=0.0, help="before any signal is caught")
parser.add_argument("--catches", default="TERM", help="the signal that saves; empty: none")
parser.add_argument(
    "--own-newest", type=Path, help="loads the newest one there, whatever it is told"
)
parser.add_argument("--pieces", type=int, default=1, help="a save is written in so many pieces")
parser.add_argument("--piece-seconds", type=float, default=0.2)
parser.add_argument("--sign-first", action="store_true", help="a save begins with the sign")
parser.add_argument("--dies-in-save", type=int, help="is killed in the midst of saving this step")
parser.add_argument("--requeues-at", type=int, help="fresh: has its job requeued, and goes")
parser.add_argument("--waits-at", help="STEP:PATH: waits there until the file exists")
parser.add_argument("--when-asked", choices=("saves", "hangs", "goes on"), default="saves")
parser.add_argument("--quiet", action="store_true", help="prints no steps")
asked = parser.parse_args()

time.sleep(asked.import_seconds)
stops: list[int] = []


def stop(number: int, frame: object) -> None:
    print(f"caught {signal.Signals(number).name}", flush=True)
    while asked.when_asked == "hangs":
        time.sleep(1)
    if asked.when_asked == "saves":
        stops.append(number)


if asked.catches:
    signal.signal(getattr(signal, f"SIG{asked.catches}"), stop)

step = 0
if asked.own_newest is not None:
    step = max(int(path.name.partition("-")[2]) for path in asked.own_newest.glob("step-*"))
elif asked.resume is not None:
    step = json.loads((asked.resume / "state.json").read_text())["step"]


def save() -> None:
    directory = asked.output / f"step-{step}"
    directory.mkdir(exist_ok=True)
    sign = json.dumps({"step": step})
    if asked.sign_first:
        (directory / "state.json").write_text(sign)
    for piece in range(asked.pieces):
        if asked.dies_in_save == step and piece == asked.pieces // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with (directory / "weights.bin").open("ab") as stream:
            stream.write(bytes(1000))
        time.sleep(asked.piece_seconds if asked.pieces > 1 else 0)
    (directory / "state.json").write_text(sign)


print(f"begins at {step}", flush=True)
while step < asked.steps:
    step += 1
    time.sleep(asked.pause)
    if not asked.quiet:
        print(f"step {step} loss {1 / step!r}", flush=True)
    if stops or step % asked.every == 0:
        save()
    if stops:
        sys.exit(0)
    if asked.waits_at and asked.waits_at.partition(":")[0] == str(step):
        while not stops and not os.path.exists(asked.waits_at.partition(":")[2]):
            time.sleep(0.05)
    if asked.requeues_at == step and asked.resume is None:
        subprocess.run(["scontrol", "requeue", os.environ.get("SLURM_JOB_ID", "1")], check=True)
        sys.exit(0)
