"""hpctrain from its wheel in an environment of its own, as people have it who have no checkout.

Belongs here: making the wheel and installing it. Does not belong here: what is done with it.

PyTorch and the engines are those of the environment that runs the tests: a file `.pth` names it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_SECONDS = 600.0
_SOURCES = ("hpctrain", "templates", "cluster_profiles", "examples", "man")
_FILES = ("pyproject.toml", "setup.cfg", "README.md", "LICENSE")


def install_wheel(place: Path, environment: Path) -> None:
    """Build the wheel below `place`, and install it into a new environment."""
    source = place / "source"
    source.mkdir()
    for name in _SOURCES:
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in _FILES:
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-build-isolation", "--no-deps", "--no-index"]
    _run([*pip, "wheel", *offline, "--wheel-dir", str(place), str(source)])
    (wheel,) = place.glob("hpctrain-*.whl")
    _run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    python = str(environment / "bin" / "python")
    into = ["install", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    _run([*pip, "--python", python, *into])
    packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
    Path(packages, "engines.pth").write_text(f"{sysconfig.get_path('purelib')}\n")


def _run(argv: list[str]) -> None:
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout}{done.stderr}"
