"""List the supported versions of megatron-core: how they differ, and resumes across them.

Belongs here: one row per version, comparing versions, which version saved a checkpoint, and what
follows. Does not belong here: what all versions have in common, and what is checked at the start
(see `check`).
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.resume_shares import read_head
from hpctrain.records.manifest import read_manifest
from hpctrain.train import software
from hpctrain.train.spared_imports import hidden

_COMMON_FILE = "common.pt"
_COMMON_KEY = "common_state"  # of newer versions (0.19.2: serialization.py, save)
# What its tokenizers import where it is installed, and the one without texts does not need:
# transformers alone is a second of processor time and 1,100 files of metadata.
_LIBRARIES_OF_TOKENIZERS = ("transformers", "sentencepiece", "tiktoken")


@dataclass(frozen=True)
class CoreName:
    """A name of megatron-core that hpctrain uses.

    `path` is below `module`, with dots for attributes of classes; empty for the module itself.
    `attribute` is one that the `__init__` of the class in `path` assigns, if that is what is used.
    `private`: private by its name, or replaced by hpctrain.
    """

    module: str
    path: str = ""
    private: bool = False
    attribute: str | None = None

    def __str__(self) -> str:
        words = filter(None, (self.module, self.path, self.attribute))
        return ".".join(words)


@dataclass(frozen=True)
class CoreVersion:
    """One supported version; `number` is the release that the engine tests run with.

    `oldest_python`: as its package requires. `imports_triton`: it cannot be imported without.
    `null_library`: its name for tokenizers that only have a size; `null_counts_end`: that size
    includes the id that ends documents. `load_options` returns arguments of
    `dist_checkpointing.load` for a checkpoint, and `read_common_state` its state that is not
    sharded. `save_options`: arguments of `dist_checkpointing.save` beside those of all versions.
    `common_files`: files of rank 0 with the state that is not sharded; without any, it is in the
    shards. `graphed_modules`: the field of
    TransformerConfig with the modules of a layer that CUDA graphs hold, empty for all. `mended`:
    functions of `fixes` that it does not need. `names` are used with this version only. `muted`: by
    the name of a logger, how a message begins that advises developers.
    """

    number: str
    oldest_python: tuple[int, int]
    imports_triton: bool
    null_library: str
    null_counts_end: bool
    load_options: Callable[[Path], dict[str, Any]]
    read_common_state: Callable[[Path], dict[str, Any]]
    graphed_modules: str
    save_options: Mapping[str, Any] = field(default_factory=dict)
    common_files: tuple[str, ...] = ()
    mended: frozenset[str] = frozenset()
    names: tuple[CoreName, ...] = ()
    muted: Mapping[str, str] = field(default_factory=dict)

    def null_tokenizer(self, token_ids: int) -> Any:
        """Make a tokenizer that only has a size; the last of the `token_ids` ends a document."""
        from megatron.core.tokenizers import MegatronTokenizer

        with hidden(*_LIBRARIES_OF_TOKENIZERS):
            return MegatronTokenizer.from_pretrained(
                metadata_path={"library": self.null_library},
                vocab_size=token_ids if self.null_counts_end else token_ids - 1,
            )


def _load_options_0_16(directory: Path) -> dict[str, Any]:
    """Return how to load the common state of a checkpoint that a newer version has saved."""
    if (directory / _COMMON_FILE).exists():
        return {}
    from megatron.core.dist_checkpointing.strategies.base import LoadCommonStrategy

    class ShardedCommonState(LoadCommonStrategy):
        """Reads the common state from the shards."""

        can_handle_sharded_objects = True

        def load_common(self, checkpoint_dir: str | Path) -> Any:
            return _read_common_state_0_16(Path(checkpoint_dir))

        def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
            raise AssertionError("sharded objects are loaded with the shards")

        def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
            raise AssertionError("metadata of shards are loaded with the shards")

        def check_backend_compatibility(self, loaded_version: Any) -> None:
            """Accept every format, because `_read_common_state_0_16` does not depend on it."""

        def check_version_compatibility(self, loaded_version: Any) -> None:
            """Accept every version, because `_read_common_state_0_16` does not depend on it."""

    return {"common_strategy": ShardedCommonState()}


def _read_common_state_0_16(directory: Path) -> dict[str, Any]:
    """Read the state that is not sharded, in the form of this version or of newer ones."""
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict

    if (directory / _COMMON_FILE).exists():
        return dict(load_common_state_dict(str(directory)))
    # the object that 0.19.2 stores for it (serialization.py, load_common_state_dict)
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


# The newest release for Python 3.11.
CORE_0_16 = CoreVersion(
    number="0.16.1",
    oldest_python=(3, 10),
    imports_triton=False,
    null_library="null",
    null_counts_end=False,
    load_options=_load_options_0_16,
    read_common_state=_read_common_state_0_16,
    graphed_modules="cuda_graph_scope",
    common_files=(_COMMON_FILE,),
    names=(CoreName("megatron.core.dist_checkpointing.strategies.base", "LoadCommonStrategy"),),
)


def _read_common_state_0_19(directory: Path) -> dict[str, Any]:
    """Read the state that is not sharded, in the form of this version or of older ones."""
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict

    return dict(load_common_state_dict(str(directory)))


# Requires Python 3.12. The files of its wheel also run with Python 3.11, except for the compiled
# functions of its datasets, whose source is that of 0.16.1.
CORE_0_19 = CoreVersion(
    number="0.19.2",
    oldest_python=(3, 12),
    imports_triton=True,  # transformer/moe/ops/paged_stash.py
    null_library="null-text",
    null_counts_end=True,
    load_options=lambda directory: {},  # recognizes checkpoints of older ones (serialization.py)
    read_common_state=_read_common_state_0_19,
    graphed_modules="cuda_graph_modules",
    # the default `nvrx` needs nvidia-resiliency-ext, and another writer (strategies/torch.py)
    save_options={"async_strategy": "mcore"},
    mended=frozenset({"define_router_product"}),
    # none of these can be followed: 0.16.1 has neither the writer nor the layout nor the new model
    muted={
        "megatron.core.dist_checkpointing.strategies.common": "load_common is deprecated",
        "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
        "megatron.core.distributed.distributed_data_parallel": (
            "DistributedDataParallel: full_param_layout not provided"
        ),
        "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    },
    names=(CoreName("megatron.core.tensor_parallel.random", "_get_share_storage", private=True),),
)

# From the oldest to the newest. The engine tests run with each of them.
SUPPORTED: tuple[CoreVersion, ...] = (CORE_0_16, CORE_0_19)
# The version of checkpoints whose manifest does not name one: the only one that was supported.
UNNAMED_VERSION = CORE_0_16.number


def release_numbers(version: str) -> tuple[int, ...]:
    """Return the release of a version as numbers, without suffixes: (0, 16, 1) for 0.16.1rc0+x."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def is_tested(version: str) -> bool:
    """Return whether the engine tests run with exactly this version."""
    return any(version == known.number for known in SUPPORTED)


def row_of(version: str) -> CoreVersion:
    """Return the newest row that is not newer than `version`; the oldest one for older versions."""
    release = release_numbers(version)
    rows = [known for known in SUPPORTED if release_numbers(known.number) <= release]
    return rows[-1] if rows else SUPPORTED[0]


@functools.cache
def current() -> CoreVersion:
    """Return the row of the megatron-core that this process imports."""
    return row_of(software.megatron_core() or SUPPORTED[0].number)


def resumes_exactly(saved: str, now: str) -> bool:
    """Return whether a checkpoint of version `saved` is known to resume exactly with `now`.

    Every version resumes its own checkpoints. All pairs of tested versions do
    (tests/engines/test_core_newest.py compares losses bit for bit); nothing is known of others.
    """
    return saved == now or (is_tested(saved) and is_tested(now))


def tested_numbers() -> str:
    """Return the tested versions for messages: `0.16.1 or 0.19.2`."""
    return " or ".join(known.number for known in SUPPORTED)


def saving_version(directory: Path) -> str:
    """Return the version of megatron-core that has saved the checkpoint."""
    head = read_head(directory)  # every rank asks, and the manifest lists the files of all
    manifest = head.manifest if head is not None else read_manifest(directory)
    return (manifest and manifest.library_version) or UNNAMED_VERSION


def check_versions(directory: Path) -> tuple[str, ...]:
    """Return a remark if another version has saved the checkpoint.

    Raises InvalidInputError if a resume across both versions is not known to be exact.
    """
    saved, now = saving_version(directory), software.megatron_core() or UNNAMED_VERSION
    if saved == now:
        return ()
    if resumes_exactly(saved, now):
        return (f"saved by megatron-core {saved}, resumed with {now}",)
    message = f"was saved by megatron-core {saved}, and this is {now}: not known to resume exactly"
    hint = (
        f"resume with megatron-core {saved}; only checkpoints of {tested_numbers()} can change to "
        "another of these versions (docs/engines.md)"
    )
    raise InvalidInputError([Problem(message, str(directory), hint=hint)])
