"""List what a run reads outside of its run directory, so that every node can be asked for it.

Belongs here: which files and directories a trainer's settings name. Does not belong here: looking
for them (`hpctrain.supervise.evidence.node_checks` on a node, `hpctrain.train.preflight` in a
rank).
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.training import TrainConfig
from hpctrain.store.datasets import bin_path, idx_path, npz_path


def input_paths(config: TrainConfig) -> tuple[str, ...]:
    """The files and directories that every launch reads on every node.

    Not what only the first launch reads (weights that megatron-core starts from), and not what a
    node has for itself (caches, NVMe).
    """
    paths: list[Path] = []
    if isinstance(config, ModuleConfig) and config.data_format != "tokens":
        sources = [path for _, path in config.data_blend]
        sources += [config.data_validation] if config.data_validation is not None else []
        paths += [_samples(config.data_format, Path(source)) for source in sources]
    else:
        prefixes = [Path(prefix) for _, prefix in config.data_blend]
        paths += [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix))]
    return tuple(dict.fromkeys([*map(str, paths), *config.needed_paths]))


def _samples(data_format: str, source: Path) -> Path:
    return source if data_format == "images" and source.is_dir() else npz_path(source)
