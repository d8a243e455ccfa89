"""The control group of 256 ranks: it connects, votes, and fits into the limits of a process.

gloo 2.x opens one socket to each other rank (a full mesh) while the group is made. The ranks are
forks of a process that has imported torch, on the loopback interface of this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import control_ranks
import pytest

_ROOT = Path(__file__).resolve().parents[2]
# A program of its own: pytest's process has threads and megatron-core, which 256 forks would carry.
_PROGRAM = """
import sys
from functools import partial
from pathlib import Path
import control_ranks
from bench import prefork
size, place = int(sys.argv[1]), Path(sys.argv[2])
ranks = prefork.fork(partial(control_ranks.agree, str(place)), size, place / "logs",
                     environment={"GLOO_SOCKET_IFNAME": "lo"})
codes = ranks.wait(control_ranks.LIMIT_SECONDS)
bad = [rank for rank, code in enumerate(codes) if code]
print(len(bad), "ranks failed", *[ranks.log(rank)[-1500:] for rank in bad[:2]])
sys.exit(bool(bad))
"""


def measured(size: int, directory: Path) -> list[dict[str, Any]]:
    """Start so many ranks; return what each of them wrote."""
    directory.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(size), str(directory)],
        env={
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{_ROOT}:{_ROOT / 'tests' / 'as_gpu'}",
        },
        capture_output=True,
        text=True,
        timeout=control_ranks.LIMIT_SECONDS + 60,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return [json.loads((directory / str(rank)).read_text()) for rank in range(size)]


@pytest.mark.parametrize("size", [64, pytest.param(256, marks=pytest.mark.variant)])
def test_many_ranks_agree(size: int, tmp_path: Path) -> None:
    rows = measured(size, tmp_path / "ranks")
    wanted = [vote == control_ranks.STOPPING_VOTE for vote in range(control_ranks.VOTES)]
    assert all(row["stops"] == wanted for row in rows)
    assert all(row["odd"] == [1, 3, 5] for row in rows)
    leader, *others = (row["files"] for row in rows)
    print(
        f"{size} ranks: connected in {max(r['connect_seconds'] for r in rows):.1f} s, slowest vote "
        f"{max(max(r['vote_seconds']) for r in rows):.2f} s, files {leader} on rank 0 and "
        f"{max(others)} on others, {max(r['memory_mib'] for r in rows)} MiB"
    )
    # One socket for each other rank. Rank 0 also has the store, with one for each rank: from 512
    # ranks on more than the usual soft limit of 1024, which `raise_open_files_limit` raises.
    assert size - 1 <= min(others) <= max(others) <= size + 32
    assert 2 * (size - 1) <= leader <= 2 * size + 32
    assert max(row["memory_mib"] for row in rows) < 1024
