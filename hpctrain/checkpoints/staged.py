"""Directories with somebody's weights, staged where compute nodes can read them.

Two kinds: Hugging Face's (`config.json` and safetensors) and what `hpctrain convert` makes of one
for megatron-core (the same `config.json`, and a `torch_dist` checkpoint). Belongs here: whether
all of it is there. Does not belong here: whether it is the model that somebody wants
(`hpctrain.spec.families.settings`), loading it.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.records.manifest import file_problem, read_manifest

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MEGATRON_NAME = "metadata.json"
_LONGEST_HEADER = 100 * 2**20  # as the safetensors library has it
Kind = Literal["hugging_face", "megatron_core"]

_HINT = (
    "stage it before, on a node with internet: `hf download OWNER/MODEL --local-dir {path}`; "
    "nothing is downloaded while a job runs"
)


@dataclass(frozen=True)
class Staged:
    """A complete directory; `config` is its config.json."""

    path: Path
    config: dict[str, Any]
    kind: Kind


def open_staged(path: Path) -> Staged:
    """Look at every file, read none but headers. Raises InvalidInputError for what is missing."""
    config = _read_json(path, path / CONFIG_NAME)
    # newer versions of megatron-core write no common.pt
    beside = (path / "common.pt", path / ".metadata")
    if (path / MEGATRON_NAME).exists() and any(file.exists() for file in beside):
        manifest = read_manifest(path)
        for listed in manifest.files if manifest is not None else ():
            if problem := file_problem(path, listed, deep=False):
                hint = "convert it again"
                raise InvalidInputError([Problem(f"{path} is incomplete: {problem}", hint=hint)])
        return Staged(path, config, "megatron_core")
    for file in weight_files(path):
        # a download that was cut off is shorter than its header says
        try:
            expected, size_bytes = expected_bytes(file), file.stat().st_size
        except FileNotFoundError:
            raise _missing(path, f"{path} is incomplete: {file.name} is missing") from None
        except (OSError, ValueError) as error:
            raise _missing(path, f"{file} cannot be read: {error}") from error
        if size_bytes < expected:
            cut = f"{file.name} has {size_bytes} of {expected} bytes"
            raise _missing(path, f"{path} is incomplete: {cut}")
    return Staged(path, config, "hugging_face")


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a Hugging Face directory, whether one or many."""
    if (path / INDEX_NAME).exists():
        index = _read_json(path, path / INDEX_NAME)
        try:
            names = sorted({str(name) for name in index.get("weight_map", {}).values()})
        except (AttributeError, TypeError):
            raise _missing(path, f"{INDEX_NAME} of {path} has no map of files") from None
        return [path / name for name in names]
    if (path / WEIGHTS_NAME).exists():
        return [path / WEIGHTS_NAME]
    if any(path.glob("pytorch_model*.bin")):
        hint = "save it with `model.save_pretrained(DIRECTORY)`, which writes safetensors"
        raise _problem(f"{path} has its weights in pickles, which are not loaded", hint)
    raise _missing(path, f"{path} has neither {WEIGHTS_NAME} nor {INDEX_NAME}")


def expected_bytes(file: Path) -> int:
    """Length of a safetensors file by its header: 8 bytes of length, JSON, then the tensors.

    https://huggingface.co/docs/safetensors, "Format". Raises OSError, ValueError.
    """
    start, tensors = header_of(file)
    return start + max((about["data_offsets"][1] for about in tensors.values()), default=0)


def tensor_bytes(directory: Path) -> int:
    """Add up the bytes of all tensors, by the headers of a directory's safetensors files.

    Raises InvalidInputError, OSError, ValueError.
    """
    return sum(
        about["data_offsets"][1] - about["data_offsets"][0]
        for file in weight_files(directory)
        for about in header_of(file)[1].values()
    )


def header_of(file: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Read where the tensors of a safetensors file begin, and what its header says of each."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = _parsed(stream.read(min(header_bytes, _LONGEST_HEADER)))
    try:
        header.pop("__metadata__", None)
        sizes = [last - first for first, last in (one["data_offsets"] for one in header.values())]
    except (AttributeError, LookupError, TypeError, ValueError):
        sizes = [-1]
    if min(sizes, default=0) < 0:
        raise ValueError("its header is not that of safetensors")
    return 8 + header_bytes, header


def _parsed(text: bytes) -> Any:
    """Parse JSON. Raises ValueError, also for what is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _read_json(path: Path, file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            text = stream.read(_LONGEST_HEADER + 1)
        if len(text) > _LONGEST_HEADER:
            raise ValueError(f"it is larger than {_LONGEST_HEADER // 2**20} MiB")
        found = _parsed(text)
    except FileNotFoundError:
        what = f"{path} has no {file.name}" if path.is_dir() else f"{path} does not exist"
        raise _missing(path, what) from None
    except (OSError, ValueError) as error:
        raise _missing(path, f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise _missing(path, f"{file} is no JSON object")
    return found


def require_kind(staged: Staged, kind: Kind) -> None:
    """Raise InvalidInputError where an engine cannot read this kind of directory."""
    if staged.kind == kind:
        return
    if kind == "megatron_core":
        hint = "`hpctrain convert HUGGING_FACE_DIRECTORY DIRECTORY` makes it"
        raise _problem(f"megatron-core cannot start from {staged.path}, a Hugging Face model", hint)
    raise _problem(
        f"{staged.path} is for megatron-core",
        "`hpctrain convert` makes a Hugging Face directory of it",
    )


def _missing(path: Path, words: str) -> InvalidInputError:
    hint = _HINT.format(path=path)
    if not path.exists():
        with contextlib.suppress(OSError):
            names = [one.name for one in path.parent.iterdir() if one.is_dir()]
            for close in get_close_matches(path.name, names, n=1):
                hint = f"did you mean {path.parent / close}? Else {hint}"
    return InvalidInputError([Problem(words, hint=hint, node_dependent=True)])


def _problem(words: str, hint: str) -> InvalidInputError:
    return InvalidInputError([Problem(words, hint=hint)])
