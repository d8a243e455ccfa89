"""Find what Megatron-LM has saved, so that it is published as checkpoints of the run.

Megatron-LM writes `iter_N` and then the tracker file into the directory that its arguments name,
which belongs to one launch (`saving_name`). Belongs here: which saves are complete, and who wrote
their files. Does not belong here: publishing them (see `hpctrain.train.saving.program_saves`).
"""

from __future__ import annotations

import _thread
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpctrain.base.errors import CheckpointError
from hpctrain.checkpoints.foreign import Found, Sizes
from hpctrain.checkpoints.publish import TRACKER_NAME, published_steps
from hpctrain.records.manifest import FileDigest, Manifest, checkpoint_name, saving_name
from hpctrain.train.engines.megatron_lm.log_reporter import read_save_begun, read_save_done
from hpctrain.train.job import Job
from hpctrain.train.saving.program_saves import SavePublisher
from hpctrain.train.storage import outlast

# torch's file_system writer names a rank's files `__RANK_NUMBER.distcp`.
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
# How long the end of a launch waits for its last checkpoint.
_DEADLINE_SECONDS = 1800.0


class CheckpointPublisher(SavePublisher):
    """The thread of one rank; all other files than shards are rank 0's."""

    ends_together = True

    def __init__(self, job: Job) -> None:
        config, launch = job.config, job.launch
        super().__init__(
            job.run,
            launch,
            keep=config.keep_checkpoints,
            keep_every_steps=config.keep_every_steps,
            alarm=_thread.interrupt_main,
        )
        self._job = job
        self.directory = job.run.checkpoints / saving_name(launch.epoch)

    @property
    def newest_step(self) -> int | None:
        """The step in the tracker of this launch; None before its first save."""
        try:
            return int((self.directory / TRACKER_NAME).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def start(self) -> None:
        if self.launch.leads:
            outlast(self.run, lambda: self.run.make_directory(self.directory))
        super().start()

    def handle_line(self, text: str) -> None:
        """Measure from one line of rank 0's output how long a save stalls training."""
        begun, done = read_save_begun(text), read_save_done(text)
        if begun is not None:
            self.began_at[begun] = time.monotonic()
        if done is not None and done in self.began_at:
            # an asynchronous save prints it twice; training continued after the first time
            self.stall_seconds.setdefault(done, time.monotonic() - self.began_at[done])

    def finish(self, patience_seconds: float = _DEADLINE_SECONDS) -> bool:
        """Wait, after the program has ended without an error, until its last save is published.

        Raises the error that kept rank 0 from publishing; on other ranks CheckpointError if rank 0
        does not publish.
        """
        if not super().finish(patience_seconds):
            raise CheckpointError(f"rank 0 did not publish what {self.directory} holds")
        if self.launch.leads:
            shutil.rmtree(self.directory, ignore_errors=True)
        return True

    def complete(self) -> Iterator[Found]:
        """List all saves up to the one that the tracker names."""
        newest = self.newest_step
        for step in published_steps(self.directory) if newest is not None else ():
            source = self.directory / checkpoint_name(step)
            if newest is not None and step > newest:
                continue
            if not (source / "metadata.json").is_file():
                raise CheckpointError(
                    f"Megatron-LM reports that it saved {source.name}, but it is incomplete"
                )
            # some versions add a tokenizer after they have moved the tracker
            yield Found(step, source)

    def is_pending(self) -> bool:
        newest = self.newest_step  # none once rank 0 has deleted the directory
        return newest is not None and newest not in published_steps(self.run.checkpoints)

    def take(self, found: Found, sizes: Sizes, directory: Path) -> bool:
        os.rename(found.path, directory)
        return True

    def owner(self, name: str, index: int) -> int:
        match = _SHARD.fullmatch(name)
        return int(match[1]) if match else 0

    def manifest(self, step: int, files: Mapping[FileDigest, int]) -> Manifest:
        return self._job.manifest(step, self._job.config.batch_sizes.samples_after(step), files)
