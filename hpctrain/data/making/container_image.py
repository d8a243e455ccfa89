"""Import a container image from its registry into one file that all nodes start from.

A program of its own, `python -m hpctrain.data.making.container_image ADDRESS FILE`, which the job
script runs once, on the first node. Belongs here: one import at a time, and a file that is there
whole or not at all. Does not belong here: which image a run has (`hpctrain.job.render.containers`).
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import socket
import subprocess
import sys
from pathlib import Path

from hpctrain.base.errors import HpctrainError, StorageError, UsageError

# sysexits.h: EX_USAGE, and EX_CONFIG for what another attempt would meet again.
_USAGE, _CONFIG = 64, 78
# Images of training software have 10 to 30 GB; this is 10 MB/s.
_LONGEST_SECONDS = 2 * 3600


def import_image(address: str, file: Path) -> bool:
    """Import the image unless the file is there; returns whether it was imported now.

    Jobs that need the same file at the same time wait for one import. An import that ends early
    leaves no file behind. Raises StorageError for a directory that cannot be written, and
    HpctrainError where enroot is missing or fails.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = open(f"{file}.lock", "a")  # noqa: SIM115  (held until the end of the import)
    except OSError as error:
        raise StorageError(f"{file.parent} cannot be written: {error.strerror}") from None
    with lock:
        # Lustre without `-o flock` has no locks: then two jobs may both import, each its own part.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            for part in file.parent.glob(f"{glob.escape(file.name)}.part-*"):
                part.unlink(missing_ok=True)  # of an import that was killed
        if file.exists():
            return False
        part = file.with_name(f"{file.name}.part-{socket.gethostname()}-{os.getpid()}")
        _run_enroot(address, part)
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(part, file)
        return True


def _run_enroot(address: str, part: Path) -> None:
    try:
        # enroot, cmd/import.md: --output FILE [USER@][REGISTRY#]IMAGE[:TAG]
        words = ["enroot", "import", "--output", str(part), address]
        done = subprocess.run(words, timeout=_LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        part.unlink(missing_ok=True)
        raise HpctrainError(
            f"enroot has not imported {address} within {_LONGEST_SECONDS // 3600} h",
            hint="import it by hand, and name the file in `image`",
        ) from None
    except FileNotFoundError:
        raise HpctrainError(
            "there is no `enroot` on this node", hint="remove `software.container.cache`"
        ) from None
    if done.returncode != 0 or not part.exists():
        part.unlink(missing_ok=True)
        raise HpctrainError(
            f"enroot could not import {address} (exit code {done.returncode})",
            hint="its message stands above; credentials are in ~/.config/enroot/.credentials",
        )


def main(arguments: list[str]) -> int:
    """Run the import; returns the exit code of the program."""
    try:
        if len(arguments) != 2:
            raise UsageError("expected ADDRESS FILE")
        address, file = arguments[0], Path(arguments[1])
        new = import_image(address, file)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE
    except HpctrainError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return _CONFIG
    print(f"container image: {'imported' if new else 'found'} {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
