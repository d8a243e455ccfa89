"""Read single tensors from a Hugging Face directory, and write one tensor after the other.

Belongs here: safetensors and the small files beside them. Does not belong here: the meaning of
tensors (see `pretrained_weights`), whether the directory is complete
(`hpctrain.checkpoints.staged`).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.staged import INDEX_NAME, WEIGHTS_NAME, Staged, header_of, weight_files
from hpctrain.convert.unfinished import DigestedStream, UnfinishedConversion
from hpctrain.spec.families.settings import family_by, settings_of
from hpctrain.spec.model import ModelSpec
from hpctrain.train.engines.models.transformers_library import class_named, hide_optional_packages

# Files that accompany weights in any format.
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "LICENSE*",
)
# Prefixes that are missing in models saved without a head (AutoModel.save_pretrained).
_BODY_PREFIXES = ("transformer.", "model.", "gpt_neox.")
# https://huggingface.co/docs/safetensors, "Format"; in the order in which the library writes them.
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_TYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor stands: its first byte in its file."""

    file: Path
    offset: int
    type_name: str
    shape: tuple[int, ...]

    def read(self, index: int | None = None) -> Any:
        """Read all of it, or of its first axis one entry, and nothing else of the file."""
        dtype = _TYPES[self.type_name]
        shape = self.shape if index is None else self.shape[1:]
        tensor = torch.empty(shape, dtype=dtype)
        data = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        with self.file.open("rb") as stream:
            stream.seek(self.offset + (index or 0) * len(data))
            if stream.readinto(data) != len(data):
                raise InvalidInputError([Problem("ends within a tensor", str(self.file))])
        return tensor


class StoredTensors:
    """All tensors of a directory by name, of which only headers are in memory."""

    def __init__(self, staged: Staged) -> None:
        self.path = staged.path
        self._tensors: dict[str, StoredTensor] = {}
        for file in weight_files(staged.path):
            start, header = header_of(file)
            for name, about in header.items():
                offset = start + about["data_offsets"][0]
                shape = tuple(about["shape"])
                self._tensors[name] = StoredTensor(file, offset, about["dtype"], shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def find(self, name: str) -> tuple[str, StoredTensor] | None:
        """Find a tensor and its name in the files; None if there is none."""
        for known in (name, *(name.removeprefix(prefix) for prefix in _BODY_PREFIXES)):
            if known in self._tensors:
                return known, self._tensors[known]
        return None

    def dtype(self, ignored: Iterable[str]) -> torch.dtype:
        """Return bf16 if all weights are bf16, else fp32, which can represent any of them.

        Tensors of `ignored` may have any type. Raises InvalidInputError for numbers of 8 bits.
        """
        left_out = frozenset(ignored)
        types = {one.type_name for name, one in self._tensors.items() if name not in left_out}
        if unknown := sorted(types - set(_TYPES)):
            message = f"has weights of type {', '.join(unknown)}, which are quantized"
            hint = f"weights of {', '.join(_TYPES)} can be converted"
            raise InvalidInputError([Problem(message, str(self.path), hint=hint)])
        return torch.bfloat16 if types == {"BF16"} else torch.float32


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor of the result; `parts` yields what stands in it, one behind the other."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[Any]]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(work: UnfinishedConversion, tensors: Iterable[TensorToWrite]) -> None:
    """Write safetensors files, and their index where they are several."""
    files: list[list[TensorToWrite]] = [[]]
    size_bytes = 0
    for tensor in tensors:
        size_bytes += tensor.size_bytes
        if files[-1] and size_bytes > work.most_file_bytes:
            files.append([])
            size_bytes = tensor.size_bytes
        files[-1].append(tensor)
    if len(files) == 1:
        work.write(WEIGHTS_NAME, partial(_write_file, files[0]))
        return
    places: dict[str, str] = {}
    for number, group in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        work.write(name, partial(_write_file, group))
        places |= dict.fromkeys((tensor.name for tensor in group), name)
    total = {"total_size": sum(tensor.size_bytes for group in files for tensor in group)}
    index = json.dumps({"metadata": total, "weight_map": places}, indent=2, sort_keys=True) + "\n"
    work.write(INDEX_NAME, lambda stream: stream.write(index.encode()))


def _write_file(tensors: list[TensorToWrite], stream: DigestedStream) -> None:
    """Write one file as the library does: wide types first, then by name (safetensors,
    tensor.rs, `prepare`)."""
    order = list(_TYPES.values())
    ordered = sorted(tensors, key=lambda one: (order.index(one.dtype), one.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + tensor.size_bytes
        kind = _TYPE_NAMES[tensor.dtype]
        header[tensor.name] = dict(dtype=kind, shape=tensor.shape, data_offsets=(begin, end))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for tensor in ordered:
        for part in tensor.parts():
            values = part.to(tensor.dtype).contiguous().view(-1).view(torch.uint8)
            stream.write(memoryview(values.numpy()))


def write_model(module: Any, target: Path) -> None:
    """Write config.json and safetensors files of at most 5 GB each."""
    with hide_optional_packages():
        module.save_pretrained(target, max_shard_size="5GB")


def write_settings(model: ModelSpec, dtype: torch.dtype, target: Path) -> None:
    """Write the config.json of a causal language model."""
    family = family_by(model)
    settings = class_named(family.settings)(**settings_of(model))
    settings.architectures = [family.classes["language_modeling"]]
    settings.dtype = dtype
    settings.save_pretrained(target)


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, license and settings; existing files are kept."""
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)
