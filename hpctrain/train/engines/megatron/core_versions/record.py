"""The record of one version of megatron-core: everything in which it differs from the others.

Belongs here: the fields. Does not belong here: their values (one module per version).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What its tokenizers import where it is installed, and the one without texts does not need:
# transformers alone is a second of processor time and 1,100 files of metadata.
LIBRARIES_OF_TOKENIZERS = ("transformers", "sentencepiece", "tiktoken")


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
    `null_tokenizer` takes the number of token ids, the last of which ends a document.
    `load_options` returns arguments of `dist_checkpointing.load` for a checkpoint, and
    `read_common_state` its state that is not sharded. `save_options`: arguments of
    `dist_checkpointing.save` beside those of all versions. `common_files`: files of rank 0 with the
    state that is not sharded; without any, it is in the shards. `graphed_modules`: the field of
    TransformerConfig with the modules of a layer that CUDA graphs hold, empty for all. `mended`:
    functions of `fixes` that it does not need. `names` are used with this version only. `muted`: by
    the name of a logger, how a message begins that advises developers.
    """

    number: str
    oldest_python: tuple[int, int]
    imports_triton: bool
    null_tokenizer: Callable[[int], Any]
    load_options: Callable[[Path], dict[str, Any]]
    read_common_state: Callable[[Path], dict[str, Any]]
    graphed_modules: str
    save_options: Mapping[str, Any] = field(default_factory=dict)
    common_files: tuple[str, ...] = ()
    mended: frozenset[str] = frozenset()
    names: tuple[CoreName, ...] = ()
    muted: Mapping[str, str] = field(default_factory=dict)
