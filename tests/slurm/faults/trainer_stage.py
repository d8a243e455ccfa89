"""Where runs of a trainer of somebody's own are put on, for the storms of hpctrain's engines.

The trainer is the example of plain PyTorch with torch.distributed.checkpoint, two ranks on two
nodes, with as many steps as the storm has. Belongs here: such a run in place of the rehearsal's,
and the strikes that mean something to it. Does not belong here: the storm (see `storm`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rehearsal import SAVE_EVERY_STEPS, PlannedFault, Rehearsal, Stage, profile_text

from hpctrain.job.submit import submit
from hpctrain.job.trainer_run import prepare_any
from hpctrain.records.find import find_run

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "any-trainer" / "dcp_loop.py"
# Those that ask the trainer itself for something, or look into files of hpctrain's engines, do not.
TRAINER_STRIKES = (
    *("rank killed", "srun killed", "supervisor killed", "node crashed", "preempted", "requeued"),
    *("warned of the time limit", "TERM to the supervisor", "run directory away", "stopped"),
)
SPEC: dict[str, Any] = {
    "trainer": {
        "adapter": "dcp",
        "launch": "srun",
        "command": [sys.executable, EXAMPLE.name, "--output", "{output}", "--resume", "{resume}"],
        "signal": {"save": "TERM", "seconds": "20s"},
        "metrics": [{"output": r"step (?P<step>\d+) loss (?P<loss>\S+)"}],
    },
    "resources": {"gpus": 2, "walltime": "00:30:00"},
}


class TrainerStage(Stage):
    """`start` takes the words of a storm."""

    def start(
        self, *overrides: str, planned: Sequence[PlannedFault] = (), **more: Any
    ) -> Rehearsal:
        given = dict(word.split("=", 1) for word in overrides)
        place = self.directory / given["name"]
        place.mkdir(exist_ok=True)
        steps, pace = given["budget.steps"], sum(one.seconds for one in planned)
        text = EXAMPLE.read_text()
        for old, new in (
            ("STEPS, SAVE_EVERY, BATCH = 60, 10,", f"STEPS, SAVE_EVERY, BATCH = {steps}, 10,"),
            ("step += 1\n", f"step += 1\n        __import__('time').sleep({pace})\n"),
        ):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        assert SAVE_EVERY_STEPS == 10
        (place / EXAMPLE.name).write_text(text)
        document = SPEC | {"name": given["name"]}
        document["trainer"] = {**SPEC["trainer"], "done": {"step": int(steps)}}
        spec, site = place / "spec.yaml", place / "profile.yaml"
        spec.write_text(json.dumps(document))
        site.write_text(profile_text(self.sandbox.shape, sys.executable))
        own = [word for word in overrides if word.startswith("supervise.")]
        submitted = submit(prepare_any(spec, str(site), own, runs=self.runs), self.runs, self.slurm)
        run = find_run(self.runs, submitted.run_id)
        return Rehearsal(self.sandbox, self.slurm, run, submitted.job_id, place, tuple(planned))
