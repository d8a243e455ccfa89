"""Start one tiny run at a stand-in of a site: the sandbox of its profile, as a newcomer does it.

Belongs here: `sandbox up --profile`, and a run with the profile that it writes. Does not belong
here: which sites are started, and what is asserted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from command_line import hpctrain
from rehearsal import PATIENCE_SECONDS, Rehearsal, patient_client

from hpctrain.job.prepare import prepare
from hpctrain.job.submit import submit
from hpctrain.records.find import find_run
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.spec.loader import load_profile
from tests.rig.stand_in.interpreter import write_stand_in_interpreter

STEPS = 4
SPEC = f"""
name: tiny
model: {{layers: 2, hidden: 64, heads: 4, vocab: 256, seq: 64}}
batch: {{global: 32, micro: 1}}
budget: {{steps: {STEPS}}}
precision: fp32
optimizer: {{lr: 1e-3}}
engine: {{name: fsdp}}
resources: {{gpus: 2, walltime: 00:10:00}}
checkpoint: {{every_steps: 2}}
supervise: {{stall: 5min, setup_stall: 5min, learn_stalls: false}}
"""


@dataclass(frozen=True)
class SiteSandbox:
    """A sandbox in the shape of a site, and where its runs are."""

    box: Sandbox
    place: Path
    said: str

    @property
    def profile(self) -> Path:
        """The profile that `sandbox up` has written."""
        return self.box.paths.profile

    def start(self, *overrides: str, nodes: int = 2, stand_in: bool = True) -> Rehearsal:
        """Submit a run on whole nodes; `stand_in`: its ranks compute nothing."""
        spec, profile = self.place / "spec.yaml", self.profile
        spec.write_text(SPEC)
        document = load_profile(profile).document
        if stand_in:
            python = str(write_stand_in_interpreter(self.place / "python", 0.02))
            software: dict[str, object] = {"python": python}
            if document.software.container is not None:
                software["container"] = {"python": python}
            profile = self.place / "profile.yaml"
            own = {"extends": str(self.profile), "name": document.name, "software": software}
            profile.write_text(json.dumps(own))
        gpus = f"resources.gpus={nodes * document.gpu.per_node}"
        runs = self.place / "runs"
        environment = {**os.environ, **self.box.environment()}
        slurm = patient_client(environment)
        prepared = prepare(spec, str(profile), (gpus, *overrides), runs=runs)
        submitted = submit(prepared, runs, slurm)
        run = find_run(runs, submitted.run_id)
        return Rehearsal(self.box, slurm, run, submitted.job_id, self.place)


@contextlib.contextmanager
def site_sandbox(profile: str, *options: str, nodes: int = 2) -> Iterator[SiteSandbox]:
    """`sandbox up --profile`; it is gone afterwards, whatever happens."""
    parent = Path(tempfile.mkdtemp(prefix="ht-", dir="/tmp"))
    try:
        directory = str(parent / "s")
        up = ("sandbox", "up", "-d", directory, "--profile", profile, "--nodes", str(nodes))
        done = hpctrain(*up, *options, "--timeout", str(PATIENCE_SECONDS))
        assert done.exit_code == 0, done.output
        yield SiteSandbox(Sandbox.open(parent / "s"), parent, done.stdout)
    finally:
        with contextlib.suppress(Exception):
            Sandbox.open(parent / "s").down()
        shutil.rmtree(parent, ignore_errors=True)
