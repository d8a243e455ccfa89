"""Who compares which files: each file once, even shares, by preference those that a rank wrote."""

from __future__ import annotations

import pytest

from hpctrain.checkpoints.resume_shares import deal, files_of_rank
from hpctrain.records.manifest import FileDigest, Manifest


def manifest(*sizes: int, writers: tuple[int, ...] | None = None, world_size: int = 4) -> Manifest:
    """Files `f0`, `f1`, ... of these sizes, written by ranks 0, 1, ... unless told otherwise."""
    return Manifest(
        step=4,
        epoch=1,
        engine="megatron",
        layout="tp1",
        world_size=world_size,
        consumed_samples=8,
        time=1.0,
        writers=tuple(range(len(sizes))) if writers is None else writers,
        files=tuple(
            FileDigest(name=f"f{number}", size_bytes=size, sha256="0" * 64)
            for number, size in enumerate(sizes)
        ),
    )


def names(dealt: tuple[tuple[FileDigest, ...], ...]) -> list[list[str]]:
    return [sorted(file.name for file in files) for files in dealt]


def test_ranks_compare_what_they_wrote() -> None:
    assert names(deal(manifest(9, 9, 9, 9), 4)) == [["f0"], ["f1"], ["f2"], ["f3"]]


def test_what_one_rank_wrote_alone_is_shared() -> None:
    one_wrote_all = manifest(*[9] * 8, writers=(0,) * 8)
    assert [len(files) for files in deal(one_wrote_all, 4)] == [2, 2, 2, 2]


def test_on_fewer_ranks_neighbours_share() -> None:
    assert names(deal(manifest(9, 9, 9, 9), 2)) == [["f0", "f1"], ["f2", "f3"]]


def test_on_more_ranks_none_has_much_more_than_others() -> None:
    loads = [sum(f.size_bytes for f in files) for files in deal(manifest(*[9] * 8), 16)]
    assert max(loads) == 9


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("writers", [None, (), (0, 1, 1, 1, 1, 99), (-1,) * 6])
def test_each_file_is_compared_by_exactly_one_rank(
    world_size: int, writers: tuple[int, ...] | None
) -> None:
    """Whatever a manifest says about writers; a wrong word costs balance and nothing else."""
    whole = manifest(1000, 10, 10, 10, 10, 0, writers=writers)
    dealt = [files_of_rank(whole, rank, world_size) for rank in range(world_size)]
    found = sorted(file.name for files in dealt for file in files)
    assert found == [f"f{number}" for number in range(6)]
