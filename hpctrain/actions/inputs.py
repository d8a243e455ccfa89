"""Lists the files that a run reads outside of its run directory, so that every node can check them.

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
    """List the files and directories that every launch reads on every node.

    This excludes what only the first launch reads (initial weights for megatron-core), and what
    each node has for itself (caches, NVMe).
    """
    paths: list[Path] = []
    if isinstance(config, ModuleConfig) and config.data_format != "tokens":
        sources = [path for _, path in config.data_blend]
        sources += [config.data_validation] if config.data_validation is not None else []
        images = config.data_format == "images"
        for source in map(Path, sources):
            paths.append(source if images and source.is_dir() else npz_path(source))
    else:
        prefixes = [Path(prefix) for _, prefix in config.data_blend]
        paths += [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix))]
    return tuple(dict.fromkeys([*map(str, paths), *config.needed_paths]))
