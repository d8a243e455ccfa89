"""`sandbox up --profile`: the profile that it writes starts a run as its site has written it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from started_sites import STEPS, site_sandbox

from hpctrain.records.run_records import read_metrics
from hpctrain.runs.state import RunState

pytestmark = pytest.mark.stand_in

# What no plain sandbox has: each ended a first start.
SITE: dict[str, Any] = {
    "extends": "a100x1",
    "name": "site",
    "nodes": {"count": 900, "cpus": 96, "threads_per_core": 2, "prefix": "jwb"},
    "gpu": {"per_node": 2, "gres": "A100_SXM"},
    "nvlink": {"domain": 2},
    "network": {"interface": "ib", "master_address": "{node}i"},
    "slurm": {
        "gpu_request": "gres",
        "inherit": ["WORK"],
        "account": "lab",
        "qos": "long",
        "constraint": "fast&hbm80g",
        "reservation": "training",
        "partitions": [
            {"name": "other", "nodes": {"count": 4, "prefix": "h"}, "gpu": {"type": "h100",
             "gres": "h100", "per_node": 4, "memory": "80GiB"}, "nvlink": {"domain": 4}},
        ],
        "options": {
            "plugins": ["auto-resume"],
            "sbatch": {"licenses": "scratch:1", "exclude": "jwb[7-8]", "wckey": "ml"},
            "srun": {"auto-resume": 1, "cpu-bind": "none"},
        },
    },
    "software": {
        "scratch": "$LOCALSCRATCH/$USER",
        "modules": {
            "init": "/p/software/modules.sh", "purge": True, "use": ["$OTHERSTAGES"],
            "load": ["Stages/2025", "GCC", "CUDA/12"],
        },
        "container": {"launcher": "apptainer", "image": "$WORK/torch.sif",
                      "mounts": ["/p/scratch:/p/scratch"]},
        "ulimits": {"memlock": "unlimited"},
    },
    "environment": [
        {"name": "NCCL_SOCKET_IFNAME", "value": "ib", "reason": "all cards"},
        {"name": "CACHE", "value": "$WORK/cache", "reason": "home is small"},
    ],
}  # fmt: skip
# slurm.conf(5), JobSubmitPlugins: what a site's plug-in says and does.
LUA = """
function slurm_job_submit(job, partitions, uid)
  slurm.log_user("charged to %s", job.account)
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid) return slurm.SUCCESS end
"""


def test_a_site_starts_and_finishes_a_run_as_it_is_written(tmp_path: Path) -> None:
    profile, lua = tmp_path / "site.yaml", tmp_path / "job_submit.lua"
    profile.write_text(json.dumps(SITE))
    lua.write_text(LUA)
    with site_sandbox(str(profile), "--job-submit-lua", str(lua)) as site:
        printed = site.box.command("sinfo", "--noheader", "-N", "-o", "%N %z %f %G")
        assert {" ".join(line.split()) for line in printed.splitlines()} == {
            *(f"jwb{node} 1:48:2 fast,hbm80g gpu:A100_SXM:2" for node in (0, 1)),
            *(f"h{node} 1:48:2 fast,hbm80g gpu:h100:4" for node in (2, 3)),
        }
        tried = ["sbatch", "--test-only", "--reservation=training", "-A", "lab", "--wrap=true"]
        environment = {**os.environ, **site.box.environment()}
        done = subprocess.run(tried, env=environment, capture_output=True, text=True, timeout=60)
        assert "charged to lab" in done.stderr
        rehearsal = site.start()
        row = rehearsal.wait_till_over()
        logs = rehearsal.logs()
        assert row.state is RunState.DONE, logs
        assert [metrics.step for metrics in read_metrics(rehearsal.run.layout)] == [
            *range(1, STEPS + 1)
        ]
        assert re.search(r"Stages/2025 +2\) GCC/1 +3\) CUDA/12", logs)
        script = rehearsal.run.layout.script.read_text()
        for words in ("--licenses=scratch:1", "--reservation=training", "--qos=long", "exec"):
            assert words in script
        record = site.box.command("scontrol", "show", "job", str(rehearsal.job_id))
        assert "Features=fast&hbm80g" in record and "Licenses=scratch:1" in record
