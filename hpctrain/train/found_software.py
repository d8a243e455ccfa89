"""Everything that a launch trains with, by name, for the comparison with the run's lock.

Rank 0 finds it for all: ranks that differ in what numbers or messages depend on are refused before
(`software_agreement`). Belongs here: the names, and reading the installed packages and the engine's
checkout. Does not belong here: finding facts by importing (`software`), comparing
(`hpctrain.records.software`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from hpctrain.records.software import SoftwareFacts, SoftwareLock

# Set by the supervisor, which sees the image from outside.
IMAGE_VARIABLE = "HPCTRAIN_IMAGE"
# NAME-VERSION.dist-info (PyPA, "Recording installed projects"); eggs have more words.
_INSTALLED = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-.*)?\.(dist|egg)-info")
_DIGITS = 12
# Directories of a checkout whose code does not train.
_ASIDE = frozenset({".git", "tests", "docs", "examples", "__pycache__"})


def found_software(
    facts: SoftwareFacts,
    epoch: int,
    checkout: str | None,
    environment: Mapping[str, str] = os.environ,
) -> SoftwareLock:
    """Collect what this launch has, with `checkout` as the engine's."""
    own = facts.hpctrain
    if own is not None and facts.code is not None:
        own = f"{own} ({facts.code})"
    libraries = {
        "TransformerEngine": facts.transformer_engine,
        "Apex": facts.apex_wgrad,
        "flash-attn": facts.flash_attention,
        "DeepEP": facts.deep_ep,
        "triton": facts.triton,
    }
    parts = {
        "hpctrain": own,
        "Python": facts.python,
        "torch": facts.torch,
        "CUDA of torch": facts.cuda_build,
        "NCCL": facts.nccl,
        "driver": facts.driver,
        "megatron-core": facts.megatron_core,
        **{name: library.version for name, library in libraries.items()},
        "attention": ", ".join(facts.attention) or None,
        "GPU": ", ".join(dict.fromkeys(facts.gpus)) or None,
        "image": environment.get(IMAGE_VARIABLE) or None,
        "checkout": checkout_state(Path(checkout)) if checkout is not None else None,
    }
    return SoftwareLock(
        epoch=epoch,
        parts={name: text for name, text in parts.items() if text is not None},
        packages=installed_packages(),
    )


def installed_packages() -> dict[str, str]:
    """List all installed distributions and their versions, by the names of their directories.

    Reads one directory for each entry of `sys.path` and opens no file. hpctrain itself is left out:
    the run has its own.
    """
    found: dict[str, str] = {}
    for entry in sys.path:
        try:
            names = os.listdir(entry or ".")
        except OSError:
            continue
        for name in names:
            installed = _INSTALLED.fullmatch(name)
            if installed is not None:
                normal = re.sub(r"[-_.]+", "-", installed["name"]).lower()
                found.setdefault(normal, installed["version"])
    found.pop("hpctrain", None)
    return dict(sorted(found.items()))


def checkout_state(checkout: Path) -> str:
    """Identify the code of a checkout: its commit, if any, and a digest of its Python files.

    A file that cannot be read counts by its name: the engine will say so when it imports it.
    """
    digest = hashlib.sha256()
    for directory, below, files in os.walk(checkout):
        below[:] = sorted(name for name in below if name not in _ASIDE)
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(directory, name)
                digest.update(f"{path.relative_to(checkout)}\n".encode())
                with contextlib.suppress(OSError):
                    digest.update(path.read_bytes())
    commit = _commit(checkout)
    code = digest.hexdigest()[:_DIGITS]
    return f"{commit[:_DIGITS]} (files {code})" if commit else f"files {code}"


def _commit(checkout: Path) -> str | None:
    """Read the commit that is checked out, without git (gitrepository-layout(5)).

    None where the directory is no plain checkout.
    """
    git = checkout / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        branch = git / name
        if branch.is_file():
            return branch.read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
