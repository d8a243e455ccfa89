"""Distribute the files of a checkpoint over the ranks that compare their digests. Pure.

Every rank computes the same distribution from the manifest alone, so no message is needed. Each
file goes to exactly one rank: to the one that wrote it, which reads it anyway when it loads the
same layout, unless that rank would have much more to read than others. Belongs here: who reads
what.
Does not belong here: reading (see `hpctrain.train.saving.digest_check`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hpctrain.records.manifest import FileDigest, Manifest

# A rank keeps the files it wrote up to so many times an even share; a file cannot be divided.
_MOST_SHARES = 1.25


def files_of_rank(manifest: Manifest, rank: int, world_size: int) -> tuple[FileDigest, ...]:
    """The files whose digests `rank` of `world_size` compares, the largest first."""
    return deal(manifest, world_size)[rank]


def deal(manifest: Manifest, world_size: int) -> tuple[tuple[FileDigest, ...], ...]:
    """The files of each rank. Ranks of another number than the writers' get neighbouring files."""
    known = len(manifest.writers) == len(manifest.files)
    writers = manifest.writers if known else (-1,) * len(manifest.files)
    homes = [writer * world_size // max(manifest.world_size, 1) for writer in writers]
    return _dealt(list(zip(manifest.files, homes, strict=True)), world_size)


def even_share(files: Sequence[FileDigest], rank: int, world_size: int) -> tuple[FileDigest, ...]:
    """The same for files that no rank has at home."""
    return _dealt([(file, -1) for file in files], world_size)[rank]


def _dealt(
    files: Sequence[tuple[FileDigest, int]], world_size: int
) -> tuple[tuple[FileDigest, ...], ...]:
    """`files` with the rank that each should go to, -1 for any."""
    limit_bytes = _MOST_SHARES * sum(file.size_bytes for file, _ in files) / world_size
    dealt: list[list[FileDigest]] = [[] for _ in range(world_size)]
    bytes_of = [0] * world_size
    left: list[FileDigest] = []
    for file, home in sorted(files, key=lambda pair: (-pair[0].size_bytes, pair[0].name)):
        fits = 0 <= home < world_size and bytes_of[home] + file.size_bytes <= limit_bytes
        if fits:
            dealt[home].append(file)
            bytes_of[home] += file.size_bytes
        else:
            left.append(file)
    least_loaded = [(load, rank) for rank, load in enumerate(bytes_of)]
    heapq.heapify(least_loaded)
    for file in left:
        load, rank = heapq.heappop(least_loaded)
        dealt[rank].append(file)
        heapq.heappush(least_loaded, (load + file.size_bytes, rank))
    return tuple(
        tuple(sorted(files, key=lambda file: file.size_bytes, reverse=True)) for files in dealt
    )
