"""Checkpoints made by the real protocol: files, digests of ranks, manifest, rename."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from hpctrain.checkpoints.publish import Fence, publish
from hpctrain.records.manifest import (
    Manifest,
    partial_name,
    read_rank_digests,
    write_rank_digests,
)


@dataclass(frozen=True)
class Shelf:
    """A directory of checkpoints."""

    root: Path

    def write(self, step: int, epoch: int = 1) -> Manifest:
        """Two ranks write a shard each and their digests; returns the manifest to publish."""
        partial = self.root / partial_name(step, epoch)
        partial.mkdir()
        for rank in range(2):
            (partial / f"__{rank}_0.distcp").write_bytes(bytes([epoch, step % 256, rank]) * 500)
            write_rank_digests(partial, rank, [f"__{rank}_0.distcp"])
        return Manifest(
            step=step,
            epoch=epoch,
            engine="megatron",
            layout="tp2 pp1 dp1",
            world_size=2,
            consumed_samples=step * 8,
            time=1.0,
            files=read_rank_digests(partial),
        )

    def save(self, *steps: int, epoch: int = 1) -> Path:
        """Publish checkpoints of these steps; returns the directory of the last."""
        for step in steps:
            last = publish(self.root, self.write(step, epoch), Fence(epoch, lambda: epoch))
        return last


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    (tmp_path / "checkpoints").mkdir()
    return Shelf(tmp_path / "checkpoints")
