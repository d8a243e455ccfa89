"""Publish what a program has saved in a directory of its own as checkpoints of the run.

Two programs do: Megatron-LM, and a trainer of somebody's own. That directory belongs to one launch,
so a stale launch writes where nobody reads. The first process sees a complete save and brings it
under its partial name. From there it is published like any other: digests of all processes,
manifest, fence, rename. Belongs here: that thread. Does not belong here: which saves are complete
(its subclasses), what makes a checkpoint good (see `hpctrain.checkpoints`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from hpctrain.checkpoints.foreign import Found, Sizes
from hpctrain.records.exit_records import rank_0_has_exited
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import (
    DIGESTS_DIRECTORY,
    MANIFEST_NAME,
    FileDigest,
    Manifest,
    digest_file,
    partial_name,
    read_rank_digests,
    write_rank_digests,
)
from hpctrain.train.rank_environment import Launch
from hpctrain.train.report import RecordFile
from hpctrain.train.saving.publication import Publication, save_record
from hpctrain.train.storage import outlast, stale_or

# Upper limit for the polls of the shared directory by all processes together.
_POLLS_PER_SECOND = 200.0
_SHORTEST_POLL_SECONDS = 0.5
# The first process computes the digests of others itself after so long without a new one.
_DIGEST_TIMEOUT_SECONDS = 120.0
_DIGEST_TIMEOUT_AFTER_FAILURE_SECONDS = 5.0


def poll_seconds(world_size: int) -> float:
    """Return the poll interval of one process, so that thousands do not overload a file system."""
    return max(_SHORTEST_POLL_SECONDS, world_size / _POLLS_PER_SECOND)


class SavePublisher(ABC):
    """A thread in each process: the first one publishes, all others digest their share.

    `problem` is the error that has ended the thread, if any; `alarm` is called then. `newest` is
    the step that was published last by this launch; `is_saving`: another one may follow soon.
    `began_at` has when a save of a step began, `stall_seconds` for how long training has waited.
    """

    # Whether nobody writes any more when the program of one process has ended.
    ends_together = False

    def __init__(
        self,
        run: RunLayout,
        launch: Launch,
        *,
        keep: int,
        keep_every_steps: int | None,
        alarm: Callable[[], None] = lambda: None,
    ) -> None:
        self.run, self.launch = run, launch
        self.problem: Exception | None = None
        self.newest: int | None = None
        self.is_saving = False
        self.began_at: dict[int, float] = {}
        self.stall_seconds: dict[int, float] = {}
        self._alarm = alarm
        self._publication = Publication(run, launch, keep=keep, keep_every_steps=keep_every_steps)
        self._rows = RecordFile(run, run.saves)
        self._digested: set[str] = set()
        self._seen: dict[Path, Sizes] = {}
        self._digest_timeout_seconds = _DIGEST_TIMEOUT_SECONDS
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="saves", daemon=True)

    # -- what differs between programs -------------------------------------------------------

    @abstractmethod
    def complete(self) -> Iterable[Found]:
        """List the saves that the program has completed, oldest first.

        Raises CheckpointError for one that never will be.
        """

    def is_pending(self) -> bool:
        """Tell whether the first process may have something left to publish."""
        return self.is_saving or not self.launch.leads

    @abstractmethod
    def take(self, found: Found, sizes: Sizes, directory: Path) -> bool:
        """Bring a save into `directory`; False if it has changed meanwhile."""

    @abstractmethod
    def owner(self, name: str, index: int) -> int:
        """Return the process that digests a file of a save; `index`: among all, sorted."""

    @abstractmethod
    def manifest(self, step: int, files: Mapping[FileDigest, int]) -> Manifest:
        """Make the manifest of a save from its files, each with its owner."""

    # -- the thread, its begin and its end ---------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def finish(self, patience_seconds: float) -> bool:
        """Publish what is left, after the end of the program; returns whether all is published.

        Raises the error that keeps it from being published.
        """
        self._stopping.set()
        self._thread.join()
        deadline = time.monotonic() + patience_seconds
        while True:
            # without the run directory it would look as if everything were published
            outlast(self.run, self.run.require)
            # the first process has left its exit record, and publishes no more
            gone = not self.launch.leads and rank_0_has_exited(self.run, self.launch.epoch)
            given_up = gone or time.monotonic() > deadline
            if self.problem is None:
                self._work()
            if self.problem is not None:
                raise self.problem
            if not self.is_pending() or given_up:
                break
            time.sleep(_SHORTEST_POLL_SECONDS)
        if self.launch.leads:
            self._rows.close()
            self._publication.join()
        return not self.is_pending()

    def abandon(self) -> None:
        """Publish, after the program has failed, earlier saves of which no file is missing."""
        self._digest_timeout_seconds = _DIGEST_TIMEOUT_AFTER_FAILURE_SECONDS
        with contextlib.suppress(Exception):  # how the program has failed is what counts
            SavePublisher.finish(self, _DIGEST_TIMEOUT_AFTER_FAILURE_SECONDS)

    def _poll(self) -> None:
        pause_seconds = poll_seconds(self.launch.world_size)
        while not self._stopping.wait(pause_seconds):
            self._work()
            if self.problem is not None:
                self._alarm()  # nothing that is trained from here on could be saved
                return

    def _work(self) -> None:
        try:
            outlast(self.run, self._publish_saved if self.launch.leads else self._digest_own)
        except Exception as error:
            self.problem = stale_or(error, self.run, self.launch)

    # -- the first process -------------------------------------------------------------------

    def _publish_saved(self) -> None:
        """Publish complete saves whose files stand still in two looks, or cannot change."""
        self.is_saving = False
        for found in self.complete():
            try:
                sizes = found.sizes()
            except FileNotFoundError:  # rotated away a moment ago
                continue
            before, self._seen[found.path] = self._seen.get(found.path), sizes
            if before != sizes and not (self.ends_together and self._stopping.is_set()):
                self.is_saving = True
                continue
            directory = self.run.checkpoints / partial_name(found.step, self.launch.epoch)
            if self.take(found, sizes, directory):
                self._publish(found.step, directory)

    def _publish(self, step: int, directory: Path) -> None:
        """Publish a save that has its partial name, with retries: no later poll may find it."""
        make = partial(outlast, self.run, lambda: self.manifest(step, self._digests(directory)))
        manifest = self._publication.publish(make)
        self.newest = step
        now = time.monotonic()
        publish_seconds = now - self.began_at.pop(step, now)  # 0 if nobody knows when it began
        stall_seconds = self.stall_seconds.pop(step, None)
        self._rows.append(save_record(manifest, stall_seconds, publish_seconds))
        self._publication.retire(step)

    def _digests(self, directory: Path) -> dict[FileDigest, int]:
        """Digest all files, each with its owner: one's own, those of others, and missing ones.

        Raises FileNotFoundError if the directory is removed, by a newer launch or by a fault.
        """
        owners = self._owners(directory)
        if self.launch.world_size > 1:
            (directory / DIGESTS_DIRECTORY).mkdir(exist_ok=True)  # others begin when it is there
        own = [name for name, owner in owners.items() if owner == self.launch.rank]
        known = {name: digest_file(directory, name) for name in own}
        progress_at = time.monotonic()
        while (
            len(known) < len(owners)
            and time.monotonic() - progress_at < self._digest_timeout_seconds
        ):
            told = {one.name: one for one in read_rank_digests(directory) if one.name in owners}
            if told.keys() - known.keys():
                progress_at = time.monotonic()
            known |= told
            os.stat(directory)
            if len(known) < len(owners):
                time.sleep(0.1)
        known |= {name: digest_file(directory, name) for name in owners if name not in known}
        return {known[name]: owner for name, owner in owners.items()}

    # -- all other processes -----------------------------------------------------------------

    def _digest_own(self) -> None:
        """Write the digests of this process's share of every save of this launch."""
        for directory in self.run.checkpoints.glob(f"iter_*.partial-e{self.launch.epoch:06d}"):
            if directory.name in self._digested or not (directory / DIGESTS_DIRECTORY).is_dir():
                continue
            owners = self._owners(directory)
            own = [name for name, owner in owners.items() if owner == self.launch.rank]
            try:
                if own:
                    write_rank_digests(directory, self.launch.rank, own)
            except FileNotFoundError:  # the first process no longer waits
                continue
            self._digested.add(directory.name)

    def _owners(self, directory: Path) -> dict[str, int]:
        """Return the files of a save, without those that hpctrain adds, each with its owner."""
        paths = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
        ours = (DIGESTS_DIRECTORY, MANIFEST_NAME)
        names = sorted(str(path) for path in paths if path.parts[0] not in ours)
        return {name: self.owner(name, index) for index, name in enumerate(names)}
