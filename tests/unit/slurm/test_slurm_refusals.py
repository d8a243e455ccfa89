"""Hints about refusals, by Slurm's words."""

from __future__ import annotations

import pytest

from hpctrain.base.errors import SlurmRefusedError, SlurmUnreachableError
from hpctrain.slurm.process import CommandResult, accepted, hint_about

_FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("Invalid account or account/partition combination specified", "sacctmgr show assoc"),
        ("Invalid qos specification", "`resources.qos`"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "resources.walltime"),
        ("Requested node configuration is not available", "profile check"),
        ("Invalid generic resource (gres) specification", "slurm.gpu_request"),
    ],
)
def test_a_refusal_says_what_helps(words: str, hint: str) -> None:
    with pytest.raises(SlurmRefusedError) as refused:
        accepted(["sbatch"], CommandResult(1, "", f"{_FAILED}{words}\n"))
    assert words in str(refused.value) and hint in str(refused.value.hint)
    assert refused.value.__notes__ == [f"hint: {refused.value.hint}"], "a traceback has it, too"


def test_no_configuration_is_no_login_node() -> None:
    words = "sbatch: fatal: Could not establish a configuration source"
    with pytest.raises((SlurmRefusedError, SlurmUnreachableError)) as refused:
        accepted(["sbatch"], CommandResult(1, "", words))
    assert "login node" in str(refused.value.hint)


def test_unknown_words_have_no_hint() -> None:
    assert hint_about("the moon is full") is None
