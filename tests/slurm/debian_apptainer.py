"""Apptainer, which no released Debian has, and images for it.

Belongs here: having it fetched, and images without software of their own: this machine's is bound.
Does not belong here: what is rehearsed in a container.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from newer_slurm import CACHE

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "apptainer-from-debian"
# sysexits.h, EX_UNAVAILABLE: the mirror cannot be reached.
_OFFLINE_EXIT_CODE = 69
_PATIENCE_SECONDS = 900.0
# Nothing outside of an image has it.
MARKER = "etc/of-this-image"
# What an image sets, wins over the job's environment unless the job's is passed on by a prefix.
_ENVIRONMENT = "export OMP_NUM_THREADS=7 OF_THE_IMAGE=yes\n"


def fetched_apptainer() -> Path:
    """The directory of its programs, fetched on first use.

    Skips the test, with the reason in the summary, only where the mirror cannot be reached.
    Whatever else is in the way fails it.
    """
    directory = CACHE / "apptainer"
    directory.mkdir(parents=True, exist_ok=True)
    command = ["bash", str(SCRIPT), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS)
    if done.returncode == _OFFLINE_EXIT_CODE:
        pytest.skip(f"NOT REHEARSED in Apptainer: {done.stderr.partition('error: ')[2].strip()}")
    assert done.returncode == 0, done.stderr
    return directory / "bin"


@dataclass(frozen=True)
class Images:
    """The same image as a directory and as a SIF file, which is mounted by FUSE."""

    directory: Path
    sif: Path


def build_images(place: Path) -> Images:
    """Images that have nothing but directories and an environment; apptainer is in PATH."""
    tree = place / "tree"
    for name in ("usr", "proc", "sys", "dev", "tmp", "root", "home", "var/tmp"):
        (tree / name).mkdir(parents=True)
    for name in ("etc", ".singularity.d/env"):
        (tree / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (tree / name).symlink_to(f"usr/{name}")
    for name in ("etc/passwd", "etc/group", MARKER):
        (tree / name).touch()
    (tree / ".singularity.d/env/90-environment.sh").write_text(_ENVIRONMENT)
    images = Images(place / "image", place / "image.sif")
    for words in (["--sandbox", str(images.directory)], [str(images.sif)]):
        build = ["apptainer", "build", *words, str(tree)]
        done = subprocess.run(build, capture_output=True, text=True, timeout=_PATIENCE_SECONDS)
        assert done.returncode == 0, done.stderr
    return images


def in_container(
    programs: Path,
    image: Path,
    place: Path,
    options: Sequence[str] = (),
    mounts: Sequence[str] = (),
) -> Callable[[str], Mapping[str, object]]:
    """`software` of a profile by the interpreter: a setup file of the site has apptainer in PATH.

    The ranks see this machine's Python, the environment of the tests, and `place`.
    """
    setup = place / "apptainer.sh"
    setup.write_text(f'PATH={shlex.quote(str(programs))}:"$PATH"\n')
    own = [Path("/usr"), ROOT, Path(sys.prefix), Path(sys.base_prefix), place]
    own += [path for path in (Path("/etc/ld.so.cache"),) if path.exists()]
    container = {
        "launcher": "apptainer",
        "image": str(image),
        "gpu": "none",
        "options": ["--userns", *options],
        "mounts": [*dict.fromkeys(map(str, own)), *mounts],
    }
    return lambda python: {"setup": str(setup), "container": {**container, "python": python}}
