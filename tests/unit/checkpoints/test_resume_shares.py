"""The files of a checkpoint are divided over ranks, and each rank gets its share in one read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from file_system_calls import FileSystemCalls

from hpctrain.checkpoints import resume_shares
from hpctrain.checkpoints.resume_shares import (
    SHARES_NAME,
    deal,
    files_of_rank,
    read_head,
    read_share,
    write_shares,
)
from hpctrain.records.manifest import (
    MANIFEST_NAME,
    FileDigest,
    Manifest,
    checkpoint_name,
    digest_file,
    list_problem,
    read_manifest,
)
from hpctrain.train.faults import BadCheckpointError, UnreadableCheckpointError
from hpctrain.train.saving.digest_check import lost_file, start_digest_check

STEP = 4


def saved_by(root: Path, ranks: int) -> tuple[Path, Manifest]:
    """A checkpoint of one shard per rank and a file of rank 0, as megatron-core writes it."""
    directory = root / checkpoint_name(STEP)
    directory.mkdir(parents=True)
    names = [".metadata", *(f"__{rank}_0.distcp" for rank in range(ranks))]
    for name in names:
        (directory / name).write_bytes(name.encode() * 100)
    manifest = Manifest(
        step=STEP, epoch=1, engine="megatron", layout="", world_size=ranks, consumed_samples=32,
        time=0.0, writers=(0, *range(ranks)), library_version="0.16.1",
        files=tuple(digest_file(directory, name) for name in names),
    ).sealed()  # fmt: skip
    (directory / MANIFEST_NAME).write_text(manifest.model_dump_json())
    return directory, manifest


def check_on_all(directory: Path, ranks: int) -> None:
    for rank in range(ranks):
        check = start_digest_check(directory, rank, ranks, "n0")
        assert check is not None
        check.wait()


@pytest.mark.parametrize("handed_out", [True, False])
def test_a_launch_asks_in_proportion_to_its_ranks(
    tmp_path: Path, file_system_calls: FileSystemCalls, handed_out: bool
) -> None:
    """Also where no supervisor has handed out shares: then each rank opens the manifest as well."""
    asked: dict[int, int] = {}
    for ranks in (8, 64):
        directory, manifest = saved_by(tmp_path / str(ranks), ranks)
        if handed_out:
            assert write_shares(directory, manifest, ranks)
        with file_system_calls.counted(directory.parent) as counted:
            check_on_all(directory, ranks)
        asked[ranks] = counted.total()
    assert asked[8] >= 8 * 3, "nothing was counted"
    assert asked[64] <= asked[8] * 64 / 8, asked


def test_shares_are_those_of_the_manifest(tmp_path: Path) -> None:
    directory, manifest = saved_by(tmp_path, 5)
    assert write_shares(directory, manifest, 3)
    shares = [read_share(directory, rank, 3) for rank in range(3)]
    assert [share.files for share in shares if share is not None] == list(deal(manifest, 3))
    head = read_head(directory)
    assert head is not None and head.manifest.library_version == "0.16.1"
    assert head.manifest.files == ()
    lengths = {len(line) for line in (tmp_path / SHARES_NAME).read_bytes().splitlines()[1:]}
    assert lengths == {head.line_bytes - 1}


def test_shares_of_something_else_are_not_used(tmp_path: Path) -> None:
    directory, manifest = saved_by(tmp_path, 4)
    assert read_share(directory, 0, 4) is None and read_head(directory) is None
    write_shares(directory, manifest, 4)
    assert read_share(directory, 0, 2) is None  # another number of ranks
    other = directory.rename(tmp_path / checkpoint_name(8))
    assert read_share(other, 0, 4) is None
    other.rename(directory)
    assert read_share(directory, 0, 4) is not None
    os.utime(directory / MANIFEST_NAME, ns=(1, 1))  # saved again
    assert read_share(directory, 0, 4) is None and read_head(directory) is None


def test_damaged_shares_are_not_used(tmp_path: Path) -> None:
    """A byte that changed in a share would else condemn a good checkpoint, or leave a file out."""
    directory, manifest = saved_by(tmp_path, 4)
    write_shares(directory, manifest, 4)
    path = tmp_path / SHARES_NAME
    raw = bytearray(path.read_bytes())
    sha256 = manifest.files[1].sha256.encode()
    raw[raw.index(sha256)] ^= 1
    path.write_bytes(raw)
    assert [read_share(directory, rank, 4) is None for rank in range(4)].count(True) == 1
    check_on_all(directory, 4)
    path.write_bytes(raw[:5000])
    assert read_share(directory, 3, 4) is None
    check_on_all(directory, 4)


def test_a_head_that_is_too_long_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, manifest = saved_by(tmp_path, 4)
    monkeypatch.setattr(resume_shares, "_HEAD_BYTES", 100)
    assert not write_shares(directory, manifest, 4)
    assert not (tmp_path / SHARES_NAME).exists()


@pytest.mark.parametrize("handed_out", [True, False])
def test_every_damage_is_found_by_one_rank(tmp_path: Path, handed_out: bool) -> None:
    """Before any rank joins the others: what is loaded needs all of them."""
    directory, manifest = saved_by(tmp_path, 4)
    if handed_out:
        write_shares(directory, manifest, 4)

    def refusals() -> list[str]:
        found = []
        for rank in range(4):
            try:
                check = start_digest_check(directory, rank, 4, "n0")
                assert check is not None
                check.wait()
            except (BadCheckpointError, UnreadableCheckpointError) as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    assert refusals() == []
    for file in manifest.files:
        path = directory / file.name
        raw = path.read_bytes()
        path.write_bytes(raw[:-1])
        assert len(refusals()) == 1 and f"{file.name} has" in refusals()[0]
        path.write_bytes(bytes(len(raw)))
        assert len(refusals()) == 1 and "other content" in refusals()[0]
        path.unlink()
        assert len(refusals()) == 1 and "UnreadableCheckpointError" in refusals()[0]
        path.write_bytes(raw)
    (directory / "__9_0.distcp").touch()
    assert len(refusals()) == 1 and "does not list it" in refusals()[0]
    (directory / "__9_0.distcp").unlink()
    (directory / MANIFEST_NAME).unlink()
    assert len(refusals()) == 4


def test_a_manifest_that_lost_files_is_refused_by_rank_0(tmp_path: Path) -> None:
    directory, manifest = saved_by(tmp_path, 4)
    shorter = manifest.model_copy(update={"files": manifest.files[:-1]})
    (directory / MANIFEST_NAME).write_text(shorter.model_dump_json())
    assert list_problem(directory, read_manifest(directory)) is not None
    with pytest.raises(BadCheckpointError, match="lists 4 of 5 files"):
        start_digest_check(directory, 0, 4, "n0")


def test_a_file_that_the_loader_missed_is_named_if_the_manifest_has_it(tmp_path: Path) -> None:
    directory, _ = saved_by(tmp_path, 2)

    collected = RuntimeError("of all ranks")
    gone = FileNotFoundError(2, "gone", str(directory / "__1_0.distcp"))
    collected.failures = {1: (gone, None)}  # type: ignore[attr-defined]
    assert lost_file(directory, collected) == "__1_0.distcp"
    assert lost_file(directory, FileNotFoundError(2, "gone", "/elsewhere/config.json")) is None
    assert lost_file(directory, FileNotFoundError("without a name")) is None
    assert lost_file(directory, RuntimeError("no")) is None


# -----------------------------------------------------------------------------------------------
# Who compares which files: each file once, even shares, by preference those that a rank wrote.


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
