"""Find what a trainer of one's own has saved, beside its training, so that it is published.

Belongs here: which of its checkpoints are complete, and how they get among those of the run. Does
not belong here: the rules of completeness and links (`hpctrain.checkpoints.foreign`), digests, the
manifest and the thread (`hpctrain.train.saving.program_saves`).
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hpctrain.checkpoints.foreign import (
    Found,
    Sizes,
    find_checkpoints,
    link_checkpoint,
    unpublished,
    what_is_missing,
)
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import FileDigest, Manifest
from hpctrain.spec.trainer import ForeignCheckpointSpec
from hpctrain.train.job import launch_manifest
from hpctrain.train.rank_environment import Launch
from hpctrain.train.saving.program_saves import SavePublisher

# Without a rule a checkpoint counts when it has stood still for so long, or there is a later one:
# between two of its files a trainer may compute for seconds.
_UNRULED_SECONDS = 30.0
# What has not changed for so long after the end of the trainer is not written any more.
_QUIET_SECONDS = 5.0


class Publisher(SavePublisher):
    """The thread of one agent. `ranks`: how many write checkpoints.

    `earlier` is a step that this launch has saved, although it resumed from a later one, `missing`
    what the last incomplete checkpoint lacks. `ended_well`: the trainer has ended, and not by a
    failure, so what it has saved is complete if no rule says otherwise.
    """

    def __init__(
        self,
        run: RunLayout,
        launch: Launch,
        spec: ForeignCheckpointSpec,
        *,
        ranks: int,
        layout: str,
        samples: Callable[[], int | None],
    ) -> None:
        super().__init__(run, launch, keep=spec.keep, keep_every_steps=spec.keep_every_steps)
        self.earlier: int | None = None
        self.missing: str | None = None
        self.ended_well = False
        self._stand: dict[Path, tuple[Sizes, float]] = {}
        self._changed_at = -math.inf
        self._spec, self._began = spec, time.time()
        self._ranks, self._layout, self._samples = ranks, layout, samples
        self._output = run.launch_output(launch.epoch)

    def complete(self) -> Iterator[Found]:
        everything = find_checkpoints(self._output, self._spec)
        self._note_earlier(everything)
        self.missing = None
        for one in unpublished(self.run.checkpoints, everything):
            try:
                still_seconds = self._still_seconds(one)
            except FileNotFoundError:  # rotated away a moment ago
                continue
            rules = self._spec.complete
            missing = what_is_missing(one, rules, self._output, self._ranks)
            counts = rules.says_when or self.ended_well or still_seconds >= _UNRULED_SECONDS
            if missing is None and not counts and one.step == everything[-1].step:
                missing = f"it changed {still_seconds:.0f} s ago, and there is no rule for it"
            if missing is not None:
                self.is_saving, self.missing = True, f"{one.path.name} is not complete: {missing}"
            else:
                self.began_at.setdefault(one.step, time.monotonic())
                yield one

    @property
    def is_writing(self) -> bool:
        """Whether the trainer has written to a checkpoint within the last seconds."""
        return time.monotonic() - self._changed_at < _QUIET_SECONDS

    def is_pending(self) -> bool:
        return super().is_pending() and (self.is_writing or not self.launch.leads)

    def _still_seconds(self, found: Found) -> float:
        """Return for how long the files have not changed. Raises FileNotFoundError."""
        sizes, now = found.sizes(), time.monotonic()
        before, since = self._stand.get(found.path, (None, now))
        if before != sizes:
            self._changed_at = since = now
            self._stand[found.path] = sizes, now
        return now - since

    def _note_earlier(self, found: list[Found]) -> None:
        """Note a step that this launch has saved, although it resumed from a later one."""
        for one in found:
            if one.step < self.launch.resume_step:
                with contextlib.suppress(FileNotFoundError):
                    if one.path.stat().st_mtime > self._began:
                        self.earlier = one.step

    def take(self, found: Found, sizes: Sizes, directory: Path) -> bool:
        try:
            link_checkpoint(found, directory)
            moved = found.sizes() != sizes
        except FileNotFoundError:
            self.run.require()
            moved = True
        if moved:  # the trainer has written or rotated meanwhile: look again
            shutil.rmtree(directory, ignore_errors=True)
        return not moved

    def owner(self, name: str, index: int) -> int:
        return index % self.launch.world_size

    def manifest(self, step: int, files: Mapping[FileDigest, int]) -> Manifest:
        return launch_manifest(
            self.launch,
            step,
            files,
            engine="trainer",
            layout=self._layout,
            consumed_samples=self._samples(),
        )
