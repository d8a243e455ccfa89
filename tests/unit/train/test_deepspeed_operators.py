"""Where DeepSpeed's operators are built, and that a killed build does not stop the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from hpctrain.train.engines.deepspeed.assembly import exclusive_build, extensions_directory

HOLD = """
import sys, time
from pathlib import Path
from hpctrain.train.engines.deepspeed.assembly import exclusive_build
from torch.utils.file_baton import FileBaton
root = Path(sys.argv[1])
with exclusive_build(root):
    (root / "cpu_adam").mkdir()
    assert FileBaton(str(root / "cpu_adam" / "lock")).try_acquire()
    print("building", flush=True)
    time.sleep(600)
"""


def test_a_killed_build_does_not_stop_the_next_one(tmp_path: Path) -> None:
    """With torch's own lock file: it is left behind, and torch would wait for it."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as builder:
        assert builder.stdout is not None and builder.stdout.readline() == "building\n"
        builder.send_signal(signal.SIGKILL)
        builder.wait(timeout=60)
    lock = tmp_path / "cpu_adam" / "lock"
    assert not FileBaton(str(lock)).try_acquire(), "torch would wait here"
    with exclusive_build(tmp_path):
        assert FileBaton(str(lock)).try_acquire()


@pytest.mark.variant("test_a_killed_build_does_not_stop_the_next_one")
def test_two_ranks_do_not_build_at_the_same_time(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as builder:
        assert builder.stdout is not None and builder.stdout.readline() == "building\n"
        other = HOLD.split("    (root")[0] + "    print('entered', flush=True)\n"
        with subprocess.Popen(
            [sys.executable, "-c", other, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as waiting:
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(timeout=5)
            builder.kill()
            assert waiting.stdout is not None and waiting.stdout.readline() == "entered\n"
            assert waiting.wait(timeout=60) == 0


def test_the_directory_of_the_user_is_kept(tmp_path: Path) -> None:
    assert extensions_directory({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == tmp_path


def test_the_directory_is_on_the_node_and_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"hpctrain-{os.getuid()}"
    assert extensions_directory({}).parent == own == extensions_directory({}).parent
    assert own.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_a_directory_that_others_could_write_is_not_used(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    taken = tmp_path / f"hpctrain-{os.getuid()}"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        taken.symlink_to(tmp_path / "elsewhere")
    else:
        taken.mkdir()
        taken.chmod(0o777)
    chosen = extensions_directory({}).parent
    assert chosen != taken and chosen.stat().st_mode & 0o777 == 0o700
