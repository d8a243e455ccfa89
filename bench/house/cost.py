"""Measure what a command costs on a login node: CPU seconds against importing its libraries."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# `import pydantic` alone loads next to nothing: the first model pulls in the rest.
_PEER = (sys.executable, "-c", "import click, pydantic; pydantic.BaseModel")
_DRY_RUN = (
    "submit --dry-run -p a100x64 examples/gpt175b.yaml "
    "--set data.sources=[] --set data.tokenizer=null --set data.made_up=true"
)


def cpu_seconds(command: Sequence[str], directory: Path) -> float:
    """Run a command to its end and return the user and system time of its process."""
    process = subprocess.Popen(
        command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{command} ended with {process.returncode}"
    return usage.ru_utime + usage.ru_stime


def dry_run_cost(checkout: Path, rounds: int = 5) -> tuple[float, float]:
    """Measure a dry run and its peer in turns; return both medians in seconds."""
    main = "from hpctrain.cli.main import main; main()"
    ours = (sys.executable, "-c", main, *_DRY_RUN.split())
    pairs = [(cpu_seconds(ours, checkout), cpu_seconds(_PEER, checkout)) for _ in range(rounds)]
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)


def loaded_modules(module: str, prefix: str, checkout: Path) -> list[str]:
    """List the modules below `prefix` that importing `module` loads in a fresh interpreter."""
    code = f"import {module}, sys; print(*sorted(sys.modules))"
    done = subprocess.run(
        (sys.executable, "-c", code), cwd=checkout, capture_output=True, text=True, check=True
    )
    return [name for name in done.stdout.split() if name.startswith(prefix)]
