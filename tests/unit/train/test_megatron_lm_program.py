"""The end of an external Megatron-LM, whose publisher interrupts the main thread when it fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpctrain.checkpoints.publish import StaleEpochError
from hpctrain.engines.megatron_lm import MegatronLmConfig
from hpctrain.records.layout import RunLayout
from hpctrain.train import software_agreement
from hpctrain.train.engines.megatron_lm import program
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import Launch


class SupersededPublisher:
    """Finds that a newer launch owns the run, and its interrupt arrives in `finish`."""

    directory = Path("saving")
    newest_step = None

    def __init__(self, job: Job) -> None:
        self.problem: Exception | None = None
        self.abandoned = False

    def start(self) -> None:
        """Nothing to watch."""

    def finish(self) -> None:
        self.problem = StaleEpochError("a newer launch owns the run")
        raise KeyboardInterrupt

    def abandon(self) -> None:
        self.abandoned = True


def ends(code: int | None) -> Callable[..., None]:
    """Return a program that has ended; None: without SystemExit."""

    def execute(*arguments: Any) -> None:
        if code is not None:
            raise SystemExit(code)

    return execute


@pytest.mark.parametrize("code", [None, 3])
def test_an_interrupt_behind_the_end_is_the_publishers_problem(
    code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "CheckpointPublisher": SupersededPublisher,
        "_execute": ends(code),
        "_prepare_environment": lambda config, launch: None,
        "_install_cpu_stand_ins": lambda config: False,
        "arguments": lambda config, places, on_cpu: (),
    }.items():
        monkeypatch.setattr(program, name, value)
    monkeypatch.setattr(software_agreement, "agree_on_software", lambda job: None)
    (tmp_path / "pretrain.py").touch()
    config = MegatronLmConfig.model_construct(
        checkout=str(tmp_path), entry="pretrain.py", train_steps=10
    )
    launch = Launch(rank=1, world_size=2, local_rank=1, node="n0", epoch=1, resume="")
    job = cast(Job, SimpleNamespace(config=config, launch=launch, run=RunLayout(tmp_path),
                                    data_cache=tmp_path))  # fmt: skip
    with pytest.raises(StaleEpochError, match="newer launch"):
        program.run(job, cast(program.ProgramStatus, SimpleNamespace()))
