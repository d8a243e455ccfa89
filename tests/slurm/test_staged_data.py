"""Data that is copied to the disks of nodes, by the ranks of a real job.

The nodes of the sandbox are one machine, so they have one disk: what two disks would each have once
is there once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearsal import Stage, held
from token_files import write_tokens

from hpctrain.records.datasets import bin_path, idx_path
from hpctrain.records.ledger import EventKind


@pytest.mark.variant("test_ranks_that_die_are_named_and_relaunched_in_place")
def test_copies_are_read_and_the_next_launch_finds_them(stage: Stage, tmp_path: Path) -> None:
    own, disk = Stage(stage.sandbox, tmp_path), tmp_path / "disk"
    own.data.mkdir()
    prefix = own.data / "text"
    write_tokens(prefix)
    source = f"data.sources=[{{path: {prefix}}}]"
    steps = "budget.steps=20"
    whole = own.start("name=whole", source, steps)
    whole.wait_till_over()
    assert not disk.exists()

    rehearsal = own.start(
        "name=staged",
        source,
        steps,
        "data.stage=true",
        planned=held(1, 14),
        software=lambda _: {"scratch": str(disk), "scratch_capacity": "1GiB"},
    )
    rehearsal.wait_for_step(13)
    copies = sorted(disk.glob("hpctrain-data/*/*"))
    assert [one.name for one in copies] == sorted([bin_path(prefix).name, idx_path(prefix).name])
    assert [one.read_bytes() for one in copies] == [
        (own.data / one.name).read_bytes() for one in copies
    ]
    before = [one.stat() for one in copies]
    mapped = Path(f"/proc/{rehearsal.rank_processes(1)[-1].pid}/maps").read_text()
    assert str(disk) in mapped and str(prefix) not in mapped, "the copies are what is read"
    rehearsal.kill_rank(1)
    rehearsal.assert_done_exactly(whole.run, steps=20)
    assert len(rehearsal.events(EventKind.LAUNCH_STARTED)) == 2, rehearsal.logs()
    after = [one.stat() for one in sorted(disk.glob("hpctrain-data/*/*"))]
    assert [(one.st_ino, one.st_mtime_ns) for one in after] == [
        (one.st_ino, one.st_mtime_ns) for one in before
    ]
