"""Choose epoch and checkpoint of a launch that no supervisor starts, on its first node.

What `hpctrain.supervise` does before a launch, without its records: the run directory, the next
epoch, unfinished saves of older epochs, the newest verified checkpoint. Does not belong here: how
other nodes learn of it (see `unsupervised_agent`).
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.durable import make_private_directory, replace_bytes
from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.discover import select_for_resume
from hpctrain.checkpoints.publish import fence_off
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import Record
from hpctrain.version import __version__


class AgreedLaunch(Record):
    """The launch that all nodes start: its epoch and the checkpoint, empty for a fresh start.

    `version`: hpctrain of the first node. `refused`: why there is no launch; None: there is one.
    `passing`: the reason may be gone when the launch is tried again.
    """

    epoch: int = 0
    resume: str = ""
    version: str = __version__
    refused: str | None = None
    passing: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """Return what the supervisor would set for the ranks."""
        return {
            "HPCTRAIN_EPOCH": str(self.epoch),
            "HPCTRAIN_RESUME": self.resume,
            "HPCTRAIN_VERSION": self.version,
        }


def open_run_directory(run: RunLayout, train_config: Path) -> None:
    """Make what is missing of the run directory, with `train_config` as its `train.json`.

    Raises InvalidInputError for the directory of another run, and of one that a supervisor owns.
    """
    try:
        settings = train_config.read_bytes()
    except OSError as error:
        raise InvalidInputError([Problem(f"{error.strerror}", str(train_config))]) from error
    if run.ledger.exists():
        message = f"a run of Slurm lives in {run.directory}, and its supervisor starts its launches"
        hint = "continue it by `hpctrain resume`, or name another directory"
        raise InvalidInputError([Problem(message, hint=hint)])
    if not run.directory.exists():
        run.create()
    for directory in run.fixed_directories:
        make_private_directory(directory)
    if not run.train_config.exists():
        replace_bytes(run.train_config, settings, mode=0o600)
    elif run.train_config.read_bytes() != settings:
        message = f"{run.train_config} is not {train_config}: another run has begun there"
        raise InvalidInputError([Problem(message, hint="give the changed run another name")])


def choose_launch(run: RunLayout, claimant: str) -> AgreedLaunch:
    """Take the next epoch, fence off what older ones were saving, and select the checkpoint.

    Raises CheckpointError where no good one is left, OSError where the directory is away.
    """
    epoch = claim_epoch(run.epochs, claimant)
    fence_off(run.checkpoints, epoch)
    checkpoint = select_for_resume(run.checkpoints, "auto").checkpoint
    return AgreedLaunch(epoch=epoch, resume="" if checkpoint is None else checkpoint.directory.name)
