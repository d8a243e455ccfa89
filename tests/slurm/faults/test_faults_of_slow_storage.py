"""A file system that takes its time while Slurm ends the job: the requeue comes first."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from rehearsal import Rehearsal, Stage, held
from slurm_settings import preempted_by_cancel

from hpctrain.checkpoints.discover import good_steps
from hpctrain.checkpoints.resume_shares import read_head
from hpctrain.records.ledger import EventKind
from hpctrain.records.manifest import MANIFEST_NAME, FileDigest, Manifest, checkpoint_name

pytestmark = pytest.mark.stand_in

FILES, KEPT, NEWEST = 1024, 12, 12
# stat(2) by all names that glibc and Python use; 1 ms as on a Lustre whose metadata is not cached.
SLOW_STAT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
static void wait_for(const char *path) {
    if (path && strstr(path, "/checkpoints/iter_")) usleep(1000);
}
#define SLOW(NAME, PARAMETERS, ARGUMENTS) \
    int NAME PARAMETERS { \
        static int (*real) PARAMETERS; \
        if (!real) real = dlsym(RTLD_NEXT, #NAME); \
        wait_for(path); \
        return real ARGUMENTS; \
    }
SLOW(stat, (const char *path, struct stat *result), (path, result))
SLOW(stat64, (const char *path, struct stat64 *result), (path, result))
SLOW(lstat, (const char *path, struct stat *result), (path, result))
SLOW(lstat64, (const char *path, struct stat64 *result), (path, result))
SLOW(fstatat, (int at, const char *path, struct stat *result, int flags), (at, path, result, flags))
SLOW(fstatat64, (int at, const char *path, struct stat64 *result, int flags),
     (at, path, result, flags))
"""


@pytest.mark.variant("test_the_time_limit_is_met_in_time_and_one_that_is_too_short_is_named")
@pytest.mark.usefixtures("patient_slurm")
def test_a_run_with_many_large_checkpoints_is_requeued_within_kill_wait(stage: Stage) -> None:
    """Slurm cancels what it preempts here, so only the supervisor's own requeue brings it back."""
    place = stage.directory / "slow-storage"
    place.mkdir()
    make_slow(place)
    rehearsal = stage.start(
        "name=slow-storage",
        "resources.partition=sudden",
        f"checkpoint.every_steps={NEWEST}",
        planned=held(1, NEWEST + 1, do="await_warning"),
    )
    rehearsal.wait_for_step(NEWEST)
    for step in range(NEWEST - KEPT + 1, NEWEST):
        fabricate(rehearsal, step)
    with preempted_by_cancel(stage.sandbox, "sudden"):
        rehearsal.urgent_job()
        started = EventKind.LAUNCH_STARTED
        rehearsal.wait(lambda: len(rehearsal.events(started)) == 2, "started again")
    ended = rehearsal.events(EventKind.LAUNCH_ENDED)[0]
    actions = rehearsal.events(EventKind.ACTION)
    assert (ended.cause, actions[0].action) == ("preempted", "requeue")
    assert ended.checkpoint_step is not None and ended.checkpoint_step >= NEWEST
    assert not rehearsal.events(EventKind.ATTEMPT_LOST), rehearsal.logs()
    checkpoints = rehearsal.run.layout.checkpoints
    assert len(good_steps(checkpoints, KEPT)) == KEPT
    head = read_head(checkpoints / checkpoint_name(ended.checkpoint_step))
    assert head is not None and head.world_size == 2, "each rank reads its own share"
    rehearsal.slurm.cancel(rehearsal.job_id)


def make_slow(place: Path) -> None:
    """From now on `stat` takes a millisecond for the checkpoints of the run in `place`."""
    library, source = place / "slow-stat.so", place / "slow-stat.c"
    source.write_text(SLOW_STAT)
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)


def fabricate(rehearsal: Rehearsal, step: int) -> None:
    """A good checkpoint of many files, all of them empty."""
    root = rehearsal.run.layout.checkpoints
    partial = root / f".fabricated-{step}"
    partial.mkdir()
    empty = hashlib.sha256(b"").hexdigest()
    files = [FileDigest(name=f"__{rank}_0.distcp", size_bytes=0, sha256=empty)
             for rank in range(FILES)]  # fmt: skip
    for file in files:
        os.close(os.open(partial / file.name, os.O_CREAT, 0o600))
    manifest = Manifest(
        step=step, epoch=1, engine="megatron", layout="", world_size=FILES,
        consumed_samples=step, time=0.0, files=tuple(files),
    ).sealed()  # fmt: skip
    (partial / MANIFEST_NAME).write_text(manifest.model_dump_json())
    partial.rename(root / checkpoint_name(step))
