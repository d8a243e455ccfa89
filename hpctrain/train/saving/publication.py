"""Publish what a launch has saved as checkpoints of the run, and delete old ones.

Whoever has written the files, an engine's ranks or a program, comes here with the manifest: it is
published behind the fence, with retries while the run directory is away. Belongs here: these steps,
the record of a save, and which checkpoints stay. Does not belong here: whose files a checkpoint has
(see `saver`, `program_saves`), what makes one good (`hpctrain.checkpoints`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hpctrain.base.formats import NewerFormatError
from hpctrain.checkpoints.discover import saving_epochs
from hpctrain.checkpoints.publish import Retention, publish, published_steps
from hpctrain.records.evaluations import needed_steps
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import Manifest, checkpoint_name, remove_rank_digests
from hpctrain.records.run_records import SaveRecord
from hpctrain.train.rank_environment import Launch
from hpctrain.train.storage import fence_of, outlast

# How long the end of a launch waits for the deletion of old checkpoints, which may stay incomplete:
# the next launch continues it.
_RETIRE_SECONDS = 10.0


class Publication:
    """The published checkpoints of one launch, on the process that publishes.

    `pinned` returns more steps that stay; it may raise OSError.
    """

    def __init__(
        self,
        run: RunLayout,
        launch: Launch,
        *,
        keep: int,
        keep_every_steps: int | None,
        pinned: Callable[[], set[int]] = set,
    ) -> None:
        self._run, self._launch = run, launch
        self._keep, self._keep_every_steps, self._pinned = keep, keep_every_steps, pinned
        self._retention = Retention(run.checkpoints)
        self._retiring: threading.Thread | None = None

    def publish(self, make_manifest: Callable[[], Manifest]) -> Manifest:
        """Publish the files that the manifest names; it is made once.

        Raises what ends the retries: StaleEpochError, CheckpointError, OSError.
        """
        made: list[Manifest] = []

        def publish_once() -> None:
            if not made:
                made.append(make_manifest())
            publish(self._run.checkpoints, made[0], fence_of(self._run, self._launch))

        outlast(self._run, publish_once)
        return made[0]

    def retire(self, step: int) -> None:
        """Delete the ranks' digests of `step`, and old checkpoints, in a thread.

        It takes seconds on a shared file system, in which the next save must be noticed. It begins
        after what an earlier save deletes. Kept are those pinned by the launcher, and those that
        are still to be evaluated.
        """
        earlier = self._retiring

        def delete() -> None:
            if earlier is not None:
                earlier.join()
            remove_rank_digests(self._run.checkpoints / checkpoint_name(step))
            try:
                pinned = self._launch.pinned_steps | steps_to_evaluate(self._run) | self._pinned()
                self._retention.retire(self._keep, self._keep_every_steps, pinned)
            except OSError:
                return  # left to the next checkpoint

        self._retiring = threading.Thread(target=delete, name="retire", daemon=True)
        self._retiring.start()

    def join(self) -> None:
        """Wait for the deletion of old checkpoints, for a limited time."""
        if self._retiring is not None:
            self._retiring.join(_RETIRE_SECONDS)


def save_record(
    manifest: Manifest, stall_seconds: float | None, publish_seconds: float
) -> SaveRecord:
    """Make the record of a published checkpoint."""
    return SaveRecord(
        step=manifest.step,
        epoch=manifest.epoch,
        time=manifest.time,
        stall_seconds=stall_seconds,
        publish_seconds=publish_seconds,
        size_bytes=manifest.total_bytes,
    )


def steps_to_evaluate(run: RunLayout) -> set[int]:
    """List the steps whose evaluations have no result yet; all where that cannot be read.

    Raises OSError where not even the checkpoints can be listed.
    """
    try:
        run.evaluation_config.stat()  # `exists` would take any error for an absence
    except FileNotFoundError:
        return set()
    except OSError:
        return set(published_steps(run.checkpoints))
    try:
        epochs = saving_epochs(run.checkpoints)
        unread = {step for step, epoch in epochs.items() if epoch is None}
        return needed_steps(run, epochs) | unread
    except (OSError, NewerFormatError):
        return set(published_steps(run.checkpoints))
