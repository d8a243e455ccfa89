"""What a real Slurm says when it refuses, and what hpctrain says about that."""

from __future__ import annotations

import pytest
from rehearsal import Stage

from hpctrain.base.errors import SlurmRefusedError

SCRIPT = "#!/bin/sh\n"


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--partition=nowhere",), "sinfo -s"),
        (("--gres=gpu:none:1",), "profile check"),
        (("--constraint=none",), "slurm.constraint"),
        (("--reservation=none",), "resources.reservation"),
    ],
)
def test_a_refusal_has_a_hint(stage: Stage, options: tuple[str, ...], hint: str) -> None:
    with pytest.raises(SlurmRefusedError) as refused:
        stage.slurm.submit(SCRIPT, ("--partition=train", *options, "--output=/dev/null"))
    assert hint in str(refused.value.hint), str(refused.value)
