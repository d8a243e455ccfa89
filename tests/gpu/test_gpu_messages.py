"""Messages on a real GPU, of a group of one rank: what NCCL's flight recorder says of them.

One GPU has no neighbour, so bytes and durations are those of a sum of one rank with itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = """
import json, os, sys, time
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
import torch, torch.distributed as dist
from hpctrain.train.messages import NcclRecording
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
weights = torch.ones(1_000_000, device="cuda")
recording = NcclRecording(set())
for measured in (False, True):
    if measured:
        recording.start()
    dist.all_reduce(weights)
    torch.cuda.synchronize()
    if measured:
        recording.stop()
time.sleep(2)  # the recorder's thread learns of the end later
found = [[one.kind, one.size_bytes, one.seconds] for one in recording.messages()]
print("FOUND", json.dumps(found))
dist.destroy_process_group()
"""


def test_nccl_tells_size_and_duration(real_gpu: None, tmp_path: Path) -> None:
    port = str(20000 + int(time.time()) % 9000)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, port], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    ((kind, size_bytes, seconds),) = json.loads(lines[-1].removeprefix("FOUND "))
    assert (kind, size_bytes) == ("all_reduce", 4_000_000)
    assert 0 < seconds < 1
