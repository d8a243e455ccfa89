"""Scripts for big machines, checked by a real controller in their shape; hostile #SBATCH values."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rehearsal import SPEC, own_sandbox, patient_client, profile_text

from hpctrain.base.errors import SlurmRefusedError
from hpctrain.job.prepare import prepare
from hpctrain.job.submit import check
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import shape_from_profile
from hpctrain.spec.loader import find_profile, load_profile

NEWER = "newer releases of Slurm, which are fetched"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("profile", "examples"),
    [
        ("a100x64", ("gpt175b/full", "llama7b", "gpt-tiny")),
        pytest.param("gb200nvl72", ("llama7b", "gpt-tiny"), marks=pytest.mark.nightly(NEWER)),
        pytest.param(
            "a100x1",
            ("digits/full", "gpt1300m-one-node/full", "llama7b", "resnet50-ddp/full"),
            marks=pytest.mark.variant,
        ),
        ("islands10b", ("gpt10b-islands/full", "llama7b", "gpt-tiny")),
        pytest.param("h100x16", ("gpt130b/full", "moe/full"), marks=pytest.mark.variant),
        pytest.param("bert-4nodes", ("bert-4nodes/full",), marks=pytest.mark.variant),
        ("llama7b-spot", ("llama7b-spot/full",)),
        pytest.param("two-nodes-tp-pp", ("two-nodes-tp-pp/full",), marks=pytest.mark.variant),
    ],
)
def test_a_controller_in_the_shape_of_the_cluster_accepts_the_scripts(
    profile: str, examples: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """On this distribution's Slurm; what a rack asks for (`--segment`) exists since 24.05."""
    own = EXAMPLES / profile / "profile.yaml"
    profile = str(own) if own.exists() else profile
    document = load_profile(find_profile(profile)).document
    shape = replace(shape_from_profile(document), slurmd_timeout_seconds=600)
    is_new = document.network.switches.plugin == "block"
    slurm_directory = request.getfixturevalue("newer_slurm") if is_new else None
    with own_sandbox(shape, slurm_directory) as box:
        slurm = patient_client({**os.environ, **box.environment()})
        for example in examples:
            prepared = prepare(EXAMPLES / f"{example}.yaml", profile, runs=tmp_path)
            answer = check(prepared, slurm)
            assert "to start at" in answer.text
        too_many = prepared.script.replace("#SBATCH --nodes=", "#SBATCH --nodes=9")
        with pytest.raises(SlurmRefusedError):
            slurm.test_only(too_many)


@pytest.mark.parametrize(
    "account",
    [
        "two words",
        'a"quote',
        "it's",
        "$(touch pwned)",
        "`touch pwned`",
        "a;b",
        "a#b",
        "back\\slash",
    ],
)
def test_sbatch_reads_hostile_values_as_they_are(
    account: str, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without accounting any account is taken, so it comes back exactly as Slurm has read it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text(SPEC)
    usual = profile_text(sandbox.shape, sys.executable)
    site = usual.replace("gpu_request: gres", f"gpu_request: gres\n  account: {_yaml(account)}")
    (tmp_path / "profile.yaml").write_text(site)
    prepared = prepare(tmp_path / "spec.yaml", str(tmp_path / "profile.yaml"), runs=tmp_path)
    slurm = patient_client({**os.environ, **sandbox.environment()})
    job_id = slurm.submit(prepared.script, ["--hold"]).job_id
    record = slurm.show_job(job_id)
    assert record is not None
    assert record.account == account.lower()  # Slurm keeps accounts in lower case
    assert record.comment == f"hpctrain:{prepared.run_id}"
    assert not (tmp_path / "pwned").exists()


def _yaml(text: str) -> str:
    """A YAML single-quoted scalar."""
    return "'" + text.replace("'", "''") + "'"
