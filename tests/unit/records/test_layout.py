"""The run directory: private, complete, and never one that exists."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hpctrain.records.layout import Place, RunLayout


def test_a_new_run_directory_is_private(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        run = RunLayout(tmp_path / "gpt-1a2b")
        run.create()
    finally:
        os.umask(before)
    directories = [run.directory, *run.directory.iterdir()]
    assert len(directories) == 8
    assert {stat.S_IMODE(path.stat().st_mode) for path in directories} == {0o700}


def test_an_existing_directory_is_not_taken_over(tmp_path: Path) -> None:
    run = RunLayout(tmp_path / "gpt-1a2b")
    run.create()
    run.ledger.write_text("somebody's history")
    with pytest.raises(FileExistsError):
        run.create()
    assert run.ledger.read_text() == "somebody's history"


def test_all_paths_are_inside_and_differ() -> None:
    run = RunLayout(Path("runs/gpt-1a2b"))
    names = [name for name, kind in vars(RunLayout).items() if isinstance(kind, property | Place)]
    found = [getattr(run, name) for name in names if name != "run_id"]
    paths = [path for path in found if isinstance(path, Path)]
    assert run.run_id == "gpt-1a2b"
    assert len(paths) >= 15
    assert len(set(paths)) == len(paths)
    assert all(run.directory in path.parents for path in paths)


def test_exit_records_of_launches_and_nodes_are_apart() -> None:
    run = RunLayout(Path("run"))
    records = {run.exit_records(epoch, node) for epoch in (1, 11) for node in (1, 11)}
    assert len(records) == 4
    assert run.exit_records(1, 3) == Path("run/exits/e000001/node-000003.jsonl")
