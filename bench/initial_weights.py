"""Time to draw initial weights by their places, beside `torch.nn.init.normal_` in the same run.

Both fill the same tensor in turns, on one device; the first round of each warms up. Printed: the
median of each, nanoseconds per number, and their ratio. A rank draws its own part only: the last
line is that time for a model of 70e9 weights on 64 ranks.

    python -m bench.initial_weights [--numbers 1e8] [--rounds 3] [--device cpu] [--threads N]

Belongs here: the speed of the numbers. Does not belong here: which numbers they are (see
`tests/unit/train/test_initial_weights.py`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from hpctrain.train.initial_weights import Normal, fill

STD = 0.02
PLACES, GENERATOR = "by place", "torch.nn.init.normal_"
# of a large model, for the last line
WEIGHTS, RANKS = 70e9, 64


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Run `work` once; a GPU is waited for."""
    began_at = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began_at


def main(arguments: list[str]) -> int:
    """Print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numbers", type=float, default=1e8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    device, size = torch.device(given.device), int(given.numbers)
    weight = torch.empty(size, device=device)
    kinds: dict[str, Callable[[], object]] = {
        PLACES: lambda: fill(weight, 7, Normal(0.0, STD), global_shape=(size,), offsets=(0,)),
        GENERATOR: lambda: torch.nn.init.normal_(weight, 0.0, STD),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(given.rounds + 1):
        for kind, work in kinds.items():
            taken = seconds_of(work, device)
            if number:
                seconds[kind].append(taken)
    medians = {kind: statistics.median(taken) for kind, taken in seconds.items()}
    print(f"{size} numbers on {device}, {given.threads} threads, {given.rounds} rounds")
    for kind, median in medians.items():
        print(f"{kind:<24}{median:8.3f} s {median / size * 1e9:8.2f} ns per number")
    print(f"ratio {medians[PLACES] / medians[GENERATOR]:.2f}")
    part = WEIGHTS / RANKS * medians[PLACES] / size
    print(f"a part of {WEIGHTS / RANKS:.2e} numbers: {part:.1f} s on one such device")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
