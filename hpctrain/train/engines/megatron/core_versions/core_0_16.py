"""What differs in megatron-core 0.16.1, the newest release for Python 3.11.

Belongs here: differences from other versions. Does not belong here: what all versions have in
common (see `names`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.train.engines.megatron.core_versions.record import (
    LIBRARIES_OF_TOKENIZERS,
    CoreName,
    CoreVersion,
)
from hpctrain.train.spared_imports import hidden

_COMMON_FILE = "common.pt"
_COMMON_KEY = "common_state"  # of newer versions (0.19.2: serialization.py, save)


def null_tokenizer(token_ids: int) -> Any:
    """Make a tokenizer that only has a size; the id that ends documents is not counted in it."""
    from megatron.core.tokenizers import MegatronTokenizer

    with hidden(*LIBRARIES_OF_TOKENIZERS):
        return MegatronTokenizer.from_pretrained(
            metadata_path={"library": "null"}, vocab_size=token_ids - 1
        )


def load_options(directory: Path) -> dict[str, Any]:
    """Return how to load the common state of a checkpoint that a newer version has saved."""
    if (directory / _COMMON_FILE).exists():
        return {}
    from megatron.core.dist_checkpointing.strategies.base import LoadCommonStrategy

    class ShardedCommonState(LoadCommonStrategy):
        """Reads the common state from the shards."""

        can_handle_sharded_objects = True

        def load_common(self, checkpoint_dir: str | Path) -> Any:
            return read_common_state(Path(checkpoint_dir))

        def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
            raise AssertionError("sharded objects are loaded with the shards")

        def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
            raise AssertionError("metadata of shards are loaded with the shards")

        def check_backend_compatibility(self, loaded_version: Any) -> None:
            """Accept every format, because `read_common_state` does not depend on it."""

        def check_version_compatibility(self, loaded_version: Any) -> None:
            """Accept every version, because `read_common_state` does not depend on it."""

    return {"common_strategy": ShardedCommonState()}


def read_common_state(directory: Path) -> dict[str, Any]:
    """Read the state that is not sharded, in the form of this version or of newer ones."""
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict

    if (directory / _COMMON_FILE).exists():
        return dict(load_common_state_dict(str(directory)))
    return _read_from_shards(directory)


def _read_from_shards(directory: Path) -> dict[str, Any]:
    """Read the object that 0.19.2 stores for the common state (serialization.py,
    load_common_state_dict)."""
    import io

    import torch
    import torch.distributed.checkpoint as dcp
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    key = ShardedObject(_COMMON_KEY, None, (1,), (0,)).unique_key
    state: dict[str, Any] = {key: io.BytesIO()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    stored = state[key]
    if isinstance(stored, io.BytesIO):
        stored.seek(0)
        stored = torch.load(stored, weights_only=True)
    return dict(stored[0])


CORE_0_16 = CoreVersion(
    number="0.16.1",
    oldest_python=(3, 10),
    imports_triton=False,
    null_tokenizer=null_tokenizer,
    load_options=load_options,
    read_common_state=read_common_state,
    graphed_modules="cuda_graph_scope",
    common_files=(_COMMON_FILE,),
    names=(CoreName("megatron.core.dist_checkpointing.strategies.base", "LoadCommonStrategy"),),
)
