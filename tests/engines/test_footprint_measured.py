"""What real ranks do to files, counted by strace: as predicted, and no faster than ranks grow."""

from __future__ import annotations

import shutil

import pytest

from bench.footprint.small_runs import (
    RANK_ACTORS,
    TABLE,
    Counted,
    count_small_runs,
    growth,
    places,
)
from hpctrain.plan.footprint.table import OPERATIONS

pytestmark = pytest.mark.nightly("whole runs under strace, by which docs/footprint.md is checked")

# Three sizes tell a quadratic part from a linear one: the second difference of counts.
SIZES = (2, 3, 4)
# How often rank 0 looks for requests while it starts, and writes a sign of life, depends on time.
TIMED = frozenset({"requests", "progress"})
# Ranks of a node that end at the same time may all find that its file of records is missing: each
# that does so writes the directory to the disk, so only the calls of one rank are bounded.
SHARED = "exits/"
MOST_OF_SHARED = 4
# Written after more steps than small runs have.
UNREACHED = frozenset({"rank times", "communication"})
# megatron-core's own index of samples: what other versions of it open is not ours.
LIBRARIES = {"index cache": 0.1}
# The first save of a run knows no earlier one whose size it could look up.
FIRST_SAVE = 1


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> list[Counted]:
    assert shutil.which("strace"), "strace is missing: `make install` installs it"
    return count_small_runs(tmp_path_factory.mktemp("footprint"), SIZES)


def of_kind(counted: list[Counted], kind: str) -> list[Counted]:
    return [one for one in counted if one.kind == kind]


@pytest.mark.variant("test_commands_are_as_predicted")
def test_launches_end_as_meant(counted: list[Counted]) -> None:
    for kind, code in (("first", 0), ("again", 0), ("failed", 78)):
        for one in of_kind(counted, kind):
            assert one.exit_codes == (code,) * one.size.ranks


@pytest.mark.parametrize("kind", ["first", "again", "failed"])
def test_no_operation_grows_faster_than_ranks(counted: list[Counted], kind: str) -> None:
    """By kind of path, so that nothing hides in a sum."""
    table = growth(counted, kind, without=TIMED)
    assert len(table) > 15, table
    shared = {key: calls for key, calls in table.items() if key[0].startswith(SHARED)}
    faster = {key: c for key, c in table.items() if key not in shared and c[2] - c[1] > c[1] - c[0]}
    assert not faster, f"calls at {SIZES} ranks: {faster}"
    dearer = {
        key: calls
        for key, calls in shared.items()
        if any(count > MOST_OF_SHARED * ranks for count, ranks in zip(calls, SIZES, strict=True))
    }
    assert shared and not dearer, f"calls at {SIZES} ranks: {dearer}"


def test_what_depends_on_time_is_done_by_one_rank(counted: list[Counted]) -> None:
    for kind in ("first", "again"):
        processes = [one.processes_at(TIMED) for one in of_kind(counted, kind)]
        assert processes == [1, 1, 1]


def test_every_path_has_a_place(counted: list[Counted]) -> None:
    unknown = [
        name
        for one in counted
        for name in (*(place for place, _ in one.by_place()), *one.made)
        if name.startswith("?")
    ]
    assert not unknown


@pytest.mark.parametrize("kind", ["first", "again"])
def test_files_are_as_predicted(counted: list[Counted], kind: str) -> None:
    for one in of_kind(counted, kind):
        found = {place: one.made[place] for place in places() if place not in UNREACHED}
        assert found == {place: one.predicted_inodes(place) for place in found}


def test_files_of_a_failed_launch_are_at_most_as_predicted(counted: list[Counted]) -> None:
    """Ranks that fail before they train leave their records, and no more than is predicted."""
    for one in of_kind(counted, "failed"):
        assert one.made["exit records"] == one.predicted_inodes("exit records")
        assert all(one.made[place] <= one.predicted_inodes(place) for place in places())


@pytest.mark.parametrize("kind", ["first", "again"])
def test_operations_are_as_predicted(counted: list[Counted], kind: str) -> None:
    for one in of_kind(counted, kind):
        by_place = one.by_place()
        for place in places():
            if place in TIMED | UNREACHED:
                continue
            for operation in OPERATIONS:
                count, expected = by_place[place, operation], one.predicted(place, operation)
                allowed = LIBRARIES.get(place, 0) * expected
                allowed += FIRST_SAVE if (place, kind) == ("checkpoints", "first") else 0
                where = f"{kind}, {one.size.ranks} ranks, {operation} of {place}"
                assert abs(count - expected) <= allowed, f"{where}: {count} for {expected}"


def test_what_is_not_compared_is_an_estimate_in_the_table() -> None:
    rows = [
        row for row in TABLE.file_rows if row.by in RANK_ACTORS and row.per in ("step", "second")
    ]
    assert {row.place for row in rows if row.varies} == {"progress", "rank times", "communication"}
