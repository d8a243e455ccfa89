"""Specs of services, and directories with weights that are all header, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpctrain.spec.loader import Loaded, load_service_spec
from hpctrain.spec.service import ServiceSpec

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
CHAT_70B = """\
kind: service
name: chat
weights:
  path: weights
model: llama-3-70b
traffic:
  rate: 20
  prompt_tokens: {p50: 512, p99: 2000}
  output_tokens: {p50: 128, p99: 512}
objectives:
  ttft: {p99: 500ms}
  tpot: {p99: 50ms}
"""
SMALL = """\
kind: service
name: small
weights:
  path: weights
traffic:
  rate: 5
  prompt_tokens: 300
  output_tokens: 60
objectives:
  ttft: {p99: 1s}
engine: {tp: 1, batch_tokens: 2048}
"""


def spec_file(here: Path, text: str) -> Path:
    path = here / "service.yaml"
    path.write_text(text)
    return path


def service_spec(here: Path, text: str = SMALL, *overrides: str) -> Loaded[ServiceSpec]:
    return load_service_spec(spec_file(here, text), overrides)


def weights(here: Path, config: dict[str, Any], tensor_bytes: int | None = None) -> Path:
    """Write config.json and, for `tensor_bytes`, a header of safetensors that promises as many."""
    directory = here / "weights"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if tensor_bytes is not None:
        about = {"dtype": "BF16", "shape": [1], "data_offsets": [0, tensor_bytes]}
        header = json.dumps({"__metadata__": {"format": "pt"}, "a": about}).encode()
        content = len(header).to_bytes(8, "little") + header
        (directory / "model.safetensors").write_bytes(content)
    return directory
