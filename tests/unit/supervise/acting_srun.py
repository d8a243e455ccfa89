"""Stands in for `srun` and the ranks behind it: `acting_srun.py RUN_DIRECTORY PART...`.

The launch with epoch 1 plays the first part, and so on; a part is words such as `save:20 crash`.
Only the standard library, so that it starts at once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

RUN = Path(sys.argv[1])
EPOCH = int(os.environ["HPCTRAIN_EPOCH"])
PATIENCE_SECONDS = 300.0


def write(path: Path, **values: object) -> None:
    if path.parent != RUN:
        path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(values))
    temporary.replace(path)


def progress(step: int, phase: str = "training", clock_seconds: float = 0.0) -> None:
    now = time.time() + clock_seconds
    write(RUN / "progress.json", epoch=EPOCH, phase=phase, step=step, target_step=100, time=now)


def leave(outcome: str, code: int, message: str = "", **more: object) -> None:
    write(
        RUN / f"exits/e{EPOCH:06d}/node-000000.jsonl",
        epoch=EPOCH,
        rank=0,
        node="n0",
        outcome=outcome,
        step=1,
        exit_code=code,
        time=time.time(),
        message=message,
        **more,
    )
    if code:
        print(f"srun: error: n0: task 0: Exited with exit code {code}", file=sys.stderr)
    sys.exit(code)


def save(step: int) -> None:
    directory = RUN / f"checkpoints/iter_{step:07d}"
    directory.mkdir()
    (directory / "shard").write_bytes(b"weights")
    shard = {"name": "shard", "size_bytes": 7, "sha256": sha256(b"weights").hexdigest()}
    write(
        directory / "manifest.json",
        step=step,
        epoch=EPOCH,
        engine="megatron",
        layout="tp1",
        world_size=1,
        consumed_samples=step,
        time=time.time(),
        files=[shard],
    )


def wait_for(path: Path, *, there: bool = True) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while path.exists() is not there:
        if time.monotonic() > deadline:
            raise SystemExit(f"waited in vain for {path}")
        time.sleep(0.01)


def write_pids(name: str, *pids: int) -> None:
    """Whole, or not there: others read it meanwhile."""
    temporary = RUN / f"{name}.new"
    temporary.write_text(" ".join(map(str, pids)))
    temporary.replace(RUN / name)


def start_ranks(places: list[str]) -> None:
    """Real processes on nodes n0, n1, ...; `!` before a place stops the process there."""
    argv = [sys.executable, str(Path(__file__).with_name("acting_rank.py")), str(RUN), str(EPOCH)]
    ranks = [
        subprocess.Popen([*argv, str(rank), f"n{rank}", place.lstrip("!")], stdout=subprocess.PIPE)
        for rank, place in enumerate(places)
    ]
    for rank, place in zip(ranks, places, strict=True):
        assert rank.stdout is not None and rank.stdout.readline()
        if place.startswith("!"):
            rank.send_signal(signal.SIGSTOP)
    write_pids("ranks.pid", *(rank.pid for rank in ranks))


def play(word: str) -> None:
    name, _, value = word.partition(":")
    if name == "save":
        save(int(value))
    elif name == "progress":
        progress(int(value))
    elif name == "phase":
        progress(7, phase=value)
    elif name == "ranks":
        start_ranks(value.split(","))
    elif name == "clock":
        progress(7, clock_seconds=float(value))
    elif name == "lines":
        print((RUN / value).read_text(), file=sys.stderr, end="", flush=True)
    elif name == "sleep":
        time.sleep(float(value))
    elif name == "await-stop":
        wait_for(RUN / "control/stop")
        time.sleep(0.15)  # the end of a step is not there at once
        leave("yielded", 75)
    elif name == "leave":
        leave("yielded", 75)
    elif name == "await":
        wait_for(RUN / value)
    elif name == "await-away":
        wait_for(RUN, there=False)
    elif name == "done":
        write(RUN / "done.json", step=100, epoch=EPOCH, checkpoint="x", time=time.time())
        leave("done", 0)
    elif name == "config":
        leave("config_error", 78, "no such data set")
    elif name == "crash":
        leave("crash", 1, "ValueError: bad batch")
    elif name == "unloadable":
        leave("crash", 1, "KeyError: 'optimizer'", loading_step=int(value))
    elif name == "changed":
        words = (
            f"cannot resume from iter_{int(value):07d}: shard has other content than was written"
        )
        leave("crash", 1, words, loading_step=int(value), cause="bad_checkpoint")
    elif name == "exit":
        sys.exit(int(value))
    else:
        raise SystemExit(f"unknown word {word}")


write_pids("srun.pid", os.getpid())
(RUN / f"environment-{EPOCH}.json").write_text(json.dumps(dict(os.environ)))
for part in sys.argv[1 + EPOCH].split():
    play(part)
