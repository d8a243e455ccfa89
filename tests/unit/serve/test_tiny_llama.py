"""The tiny model that tests and demos serve: complete, and the same bytes each time."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from hpctrain.serve.tiny_llama import TinyShape, main, write_tiny_llama


def digests(directory: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_the_same_shape_and_seed_give_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        write_tiny_llama(tmp_path / name, seed=seed)
    first, again, other = (digests(tmp_path / name) for name in ("one", "again", "other"))
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_every_id_that_the_model_may_sample_is_a_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tiny_llama(tmp_path, TinyShape(vocab_size=300))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 300
    text = "héllo, wörld 7"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]


def test_the_weights_are_those_of_the_config(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    shape = TinyShape(hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
    write_tiny_llama(tmp_path, shape)
    weights = load_file(tmp_path / "model.safetensors")
    assert sum(name.endswith("q_proj.weight") for name in weights) == 3
    assert weights["model.layers.2.self_attn.k_proj.weight"].shape == (8, 32)
    assert weights["lm_head.weight"].shape == (shape.vocab_size, 32)


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="below the bytes"):
        TinyShape(vocab_size=100)


def test_as_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").stat().st_mode & 0o077 == 0o044
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
