"""A trainer that tells no steps: what it prints or writes on any node is life, nothing else is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_runs import AgentLaunch, AgentRun
from waiting import wait_until

from hpctrain.records.run_records import Progress, read_record
from hpctrain.trainer import progress
from hpctrain.trainer.progress import FileChanges

# Time goes by for nobody here: a look follows at once, and none is so long that it is broken off.
AT_ONCE, LONG_SILENT = 0.0, 1e9


# -- Changed files -------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    below = tmp_path / "output" / "logs" / "deep"
    below.mkdir(parents=True)
    (below / "log.txt").write_text("one\n")
    (tmp_path / "output" / "state").write_text("1")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "output" / "link").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "output"


def append(tree: Path) -> None:
    with (tree / "logs" / "deep" / "log.txt").open("a") as stream:
        stream.write("two\n")


def replace_by_as_much(tree: Path) -> None:
    (tree / "state.new").write_text("2")
    os.replace(tree / "state.new", tree / "state")


def write_in_place(tree: Path) -> None:
    before = (tree / "state").stat()
    (tree / "state").write_text("3")
    os.utime(tree / "state", ns=(before.st_atime_ns, before.st_mtime_ns + 1))


CHANGES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "nothing": (lambda tree: None, False),
    "read": (lambda tree: (tree / "state").read_text(), False),
    "linked elsewhere, as checkpoints are": (
        lambda tree: os.link(tree / "state", tree.parent / "elsewhere" / "state"),
        False,
    ),
    "behind a link": (lambda tree: (tree.parent / "elsewhere" / "new").touch(), False),
    "appended": (append, True),
    "replaced": (replace_by_as_much, True),
    "in place": (write_in_place, True),
    "made": (lambda tree: (tree / "logs" / "empty").touch(), True),
    "removed": (lambda tree: (tree / "state").unlink(), True),
    "renamed": (lambda tree: (tree / "state").rename(tree / "state-1"), True),
    "a directory": (lambda tree: (tree / "logs" / "d").mkdir(), True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_any_file_is_seen_once(
    tree: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LOOK_SECONDS", LONG_SILENT)
    change, is_seen = CHANGES[name]
    changes = FileChanges(tree, AT_ONCE)
    assert [changes.seen(LONG_SILENT) for _ in range(3)] == [False] * 3
    change(tree)
    assert [changes.seen(LONG_SILENT) for _ in range(3)] == [is_seen, False, False]
    assert not changes.takes_too_long


def test_nobody_looks_while_lines_come(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_marks_below", lambda root: pytest.fail("looked"))
    assert not FileChanges(tree, 400.0).seen(silent_seconds=9.0)


def test_a_large_tree_is_looked_at_in_parts(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry a look, of six; the last look finds the end."""
    monkeypatch.setattr(progress, "_LOOK_SECONDS", -1.0)
    real, looked = os.scandir, []
    monkeypatch.setattr(progress.os, "scandir", lambda path: looked.append(path) or real(path))
    changes = FileChanges(tree, 4000.0)
    for _ in range(6):
        assert not changes.seen(LONG_SILENT)
    assert len(looked) == 3, "each directory once"
    for _ in range(6):  # the next pass has time until a fortieth of the silence is over
        assert not changes.seen(LONG_SILENT)
    assert len(looked) == 3


def test_a_tree_too_large_to_tell_counts_as_one_that_changes(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LOOK_SECONDS", -1.0)
    changes = FileChanges(tree, AT_ONCE)
    assert not changes.seen(LONG_SILENT)
    assert changes.seen(LONG_SILENT) and changes.takes_too_long


# -- Agents of real launches -----------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> AgentRun:
    return AgentRun.made(tmp_path / "run")


def started(run: AgentRun, program: str, silence: str | None, **more: object) -> AgentLaunch:
    """Start a launch of level 0 with this text for Python."""
    command = [sys.executable, "-c", f"import os, time\noutput = '{{output}}'\n{program}"]
    nothing = {"checkpoint": None, "signal": None, "metrics": None}
    return run.start(command=command, silence=silence, **nothing, **more)  # type: ignore[arg-type]


def sign(run: AgentRun) -> Progress | None:
    return read_record(run.run.progress, Progress)


def wait_for_signs(run: AgentRun, launch: AgentLaunch, count: int = 3) -> None:
    """Wait for so many signs of life, one of which is the agent's own."""
    seen: set[float] = set()

    def enough() -> bool:
        assert launch.process.poll() is None, launch.process.communicate()[0]
        seen.update([found.time] if (found := sign(run)) is not None else [])
        return len(seen) >= count

    try:
        wait_until(enough, "alive")
    finally:
        launch.process.kill()


FOREVER = "while True: time.sleep(0.1)"


@pytest.mark.variant("test_files_are_life")
def test_lines_are_life(run: AgentRun) -> None:
    """So long a silence that no look at files is due."""
    launch = started(run, FOREVER + "; print('working', flush=True)", "4000s")
    wait_for_signs(run, launch)


def test_files_are_life(run: AgentRun) -> None:
    program = "while True: time.sleep(0.1); open(output + '/log', 'a').write('x')"
    wait_for_signs(run, started(run, program, "20s"))


def test_what_another_node_prints_is_life(run: AgentRun) -> None:
    """Rank 1 alone prints, below an agent that does not lead."""
    program = f"{FOREVER}; os.environ['RANK'] == '1' and print('working', flush=True)"
    launch = started(run, program, "20s", environment={"WORLD_SIZE": "2"})
    other = run.beside(launch)
    try:
        wait_for_signs(run, launch)
    finally:
        other.process.kill()


@pytest.mark.variant("test_without_either_there_is_no_sign")
def test_silence_means_nothing_if_nobody_says_so(run: AgentRun) -> None:
    wait_for_signs(run, started(run, FOREVER, silence=None))


def test_without_either_there_is_no_sign(run: AgentRun) -> None:
    launch = started(run, FOREVER, "20s")

    def stands_still() -> bool:
        assert launch.process.poll() is None, launch.process.communicate()[0]
        return sign(run) is not None and run.seconds_since_sign > 3.0

    try:
        wait_until(stands_still, "still")
    finally:
        launch.process.kill()
