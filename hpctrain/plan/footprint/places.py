"""Places of the run directory: which files are counted together.

Belongs here: patterns of paths. Does not belong here: what is done to the files (`file_rows`).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

# Patterns (fnmatch) of paths in the run directory, without the endings of temporary files. A path
# belongs to the first place that has a pattern for it.
PLACES: dict[str, tuple[str, ...]] = {
    "settings": (
        *("spec.yaml", "profile.yaml", "plan.json", "train.json", "train-n*.json"),
        *("supervise.json", "signatures.json", "data.json", "job.sbatch"),
        *("ds_config.json", "ds_config-n*.json", "archive.json", "prologue.sh"),
        *("replica.json", "router.json"),  # of parts of a service
    ),
    "kept scripts": ("scripts", "scripts/*"),
    "ledger": ("ledger.jsonl",),
    "epochs": ("epochs", "epochs/*"),
    "requests": ("control", "control/*"),
    "progress": ("progress.json", "drain.json"),
    "metrics": ("metrics.jsonl",),
    "saves": ("saves.jsonl",),
    "rank times": ("ranks.json",),
    "communication": ("communication.json",),
    "software": ("software.jsonl", "software.lock", "speed.jsonl"),
    "kept code": ("software", "software/*"),
    "skipped data": ("skips.json",),
    "done marker": ("done.json",),
    "exit records": ("exits", "exits/*"),
    "evaluations": (
        *("evaluation.json", "evaluation-*.sbatch", "evaluations.jsonl", "evaluations.lock"),
        *("evaluations", "evaluations/*"),
    ),
    "stacks": ("stacks", "stacks/*"),
    "logs": ("logs", "logs/*"),
    "notices": ("notices", "notices/*"),
    "tracking": ("tracking.json", "tracking", "tracking/*"),
    "traces": ("traces", "traces/*", "flops-*.txt"),
    "index cache": ("data-cache", "data-cache/*"),
    "metrics endpoint": ("metrics-endpoint.json",),
    "node checks": (".preflight-*",),
    "quarantine": ("checkpoints/quarantine", "checkpoints/quarantine/*"),
    "checkpoints": ("checkpoints", "checkpoints/*"),
}


def place_of(path: str) -> str | None:
    """The place of a path relative to the run directory; None for one that belongs to none."""
    for place, patterns in PLACES.items():
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            return place
    return None
