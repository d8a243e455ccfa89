"""One import of a container image for all jobs; a stand-in for enroot, which needs a registry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from stand_ins import python_program

# `enroot import --output FILE ADDRESS`: counts its calls, writes slowly, and may be told to die.
ENROOT = """
import os, sys, time
assert sys.argv[1:3] == ["import", "--output"] and len(sys.argv) == 5, sys.argv
open(os.environ["CALLS"], "a").write(sys.argv[4] + chr(10))
with open(sys.argv[3], "w") as file:
    file.write("first half, ")
    file.flush()
    if os.path.exists(os.environ["CALLS"] + ".die"):
        os.kill(os.getppid(), 9)
        sys.exit(1)
    if os.path.exists(os.environ["CALLS"] + ".fail"):
        sys.exit(3)
    time.sleep(0.5)
    file.write("second half")
"""
ADDRESS = "docker://nvcr.io#nvidia/pytorch:25.04-py3"


def start(directory: Path) -> subprocess.Popen[str]:
    if not (directory / "bin/enroot").exists():  # never written while another job runs it
        python_program(directory / "bin/enroot", ENROOT)
    environment = {
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(directory / "calls"),
    }
    program = "hpctrain.data.making.container_image"
    words = [sys.executable, "-m", program, ADDRESS, str(directory / "cache" / "pt.sqsh")]
    return subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)


def test_jobs_at_the_same_time_import_once(tmp_path: Path) -> None:
    jobs = [start(tmp_path) for _ in range(3)]
    assert [job.wait(60) for job in jobs] == [0, 0, 0]
    assert start(tmp_path).wait(60) == 0
    assert (tmp_path / "calls").read_text().splitlines() == [ADDRESS]
    assert (tmp_path / "cache/pt.sqsh").read_text() == "first half, second half"


def test_an_import_that_is_killed_or_fails_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "calls.die").touch()
    assert start(tmp_path).wait(60) == -9
    (tmp_path / "calls.die").unlink()
    assert not (tmp_path / "cache/pt.sqsh").exists()
    (tmp_path / "calls.fail").touch()
    failed = start(tmp_path)
    _, message = failed.communicate(timeout=60)
    assert failed.returncode == 78
    assert "enroot could not import docker://nvcr.io#nvidia/pytorch:25.04-py3" in message
    assert "Traceback" not in message
    (tmp_path / "calls.fail").unlink()
    assert start(tmp_path).wait(60) == 0
    assert sorted(file.name for file in (tmp_path / "cache").iterdir()) == [
        "pt.sqsh",
        "pt.sqsh.lock",
    ]
