"""Epochs: which launch owns a run. Every launch takes the next number; the highest one owns.

A stale launch (its node came back, its `srun` was orphaned) can see that it is stale, and must
not publish a checkpoint any more. Belongs here: taking and reading the number.
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.durable import create_exclusive


def current_epoch(epochs: Path) -> int:
    """The highest epoch taken so far, 0 before the first launch."""
    numbers = (int(path.stem) for path in epochs.glob("[0-9]*.json") if path.stem.isdigit())
    return max(numbers, default=0)


def claim_epoch(epochs: Path, claimant: str) -> int:
    """Take the next epoch; two claimants never get the same one (link(2) is exclusive)."""
    epochs.mkdir(parents=True, exist_ok=True, mode=0o700)
    epoch = current_epoch(epochs) + 1
    while not create_exclusive(epochs / f"{epoch:06d}.json", claimant):
        epoch += 1
    return epoch
