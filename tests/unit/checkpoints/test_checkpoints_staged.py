"""Directories of weights that are not there, or not completely, and how to stage them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from staged_weights import write_safetensors

from hpctrain.base.errors import InvalidInputError
from hpctrain.checkpoints.staged import open_staged, require_kind


def complete(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "gpt2"}')
    write_safetensors(directory / "model.safetensors")
    return directory


def test_a_complete_directory(tmp_path: Path) -> None:
    staged = open_staged(complete(tmp_path / "gpt2"))
    assert (staged.kind, staged.config) == ("hugging_face", {"model_type": "gpt2"})


def test_many_files_are_named_by_an_index(tmp_path: Path) -> None:
    directory = complete(tmp_path / "gpt2")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    write_safetensors(directory / "model-1.safetensors")
    with pytest.raises(InvalidInputError, match=r"is incomplete: model-2.safetensors is missing"):
        open_staged(directory)
    write_safetensors(directory / "model-2.safetensors")
    assert open_staged(directory).kind == "hugging_face"


def _cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def _cut_in_its_header(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")


def _header_of(header: object) -> Callable[[Path], object]:
    text = json.dumps(header).encode()
    raw = len(text).to_bytes(8, "little") + text
    return lambda directory: (directory / "model.safetensors").write_bytes(raw)


def _odd_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')


def _pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "cut": (_cut, r"model.safetensors has \d+ of \d+ bytes", "hf download"),
    "header": (_cut_in_its_header, "model.safetensors cannot be read", "hf download"),
    "header of a list": (_header_of([1]), "its header is not that of safetensors", "hf download"),
    "header of texts": (
        _header_of({"a": {"data_offsets": ["0", "4"]}}),
        "its header is not that of safetensors",
        "hf download",
    ),
    "index": (_odd_index, "has no map of files", "hf download"),
    "nested": (
        lambda d: (d / "config.json").write_text("[" * 100_000),
        "config.json cannot be read: it is nested too deep",
        "hf download",
    ),
    "endless": (
        lambda d: (d / "config.json").unlink() or (d / "config.json").symlink_to("/dev/zero"),
        "larger than 100 MiB",
        "hf download",
    ),
    "pickle": (_pickled, "in pickles", "save_pretrained"),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        "neither model.safetensors nor",
        "hf download",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json", "hf download"),
    "no JSON": (lambda d: (d / "config.json").write_text("{"), "cannot be read", "hf download"),
    "a list": (lambda d: (d / "config.json").write_text("[]"), "no JSON object", "hf download"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_and_what_to_do(name: str, tmp_path: Path) -> None:
    break_it, words, hint = BROKEN[name]
    directory = complete(tmp_path / "gpt2")
    break_it(directory)
    with pytest.raises(InvalidInputError, match=words) as caught:
        open_staged(directory)
    assert hint in str(caught.value.problems[0].hint)


def test_an_absent_directory(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="nowhere does not exist") as caught:
        open_staged(tmp_path / "nowhere")
    hint = caught.value.problems[0].hint or ""
    assert f"--local-dir {tmp_path / 'nowhere'}" in hint and "on a node with internet" in hint


def test_a_slip_of_the_pen_is_answered_with_the_directory_beside(tmp_path: Path) -> None:
    complete(tmp_path / "llama-2-7b")
    with pytest.raises(InvalidInputError) as refused:
        open_staged(tmp_path / "lama-2-7b")
    hint = refused.value.problems[0].hint
    assert hint is not None and hint.startswith(
        f"did you mean {tmp_path}/llama-2-7b? Else stage it"
    )
    with pytest.raises(InvalidInputError) as refused:
        open_staged(tmp_path / "gpt")
    assert "did you mean" not in str(refused.value.problems[0].hint)


def test_each_engine_has_its_kind(tmp_path: Path) -> None:
    directory = complete(tmp_path / "gpt2")
    with pytest.raises(InvalidInputError, match="megatron-core cannot start from"):
        require_kind(open_staged(directory), "megatron_core")
    for name in ("metadata.json", "common.pt"):
        (directory / name).write_text("")
    staged = open_staged(directory)
    require_kind(staged, "megatron_core")
    with pytest.raises(InvalidInputError, match="is for megatron-core"):
        require_kind(staged, "hugging_face")
