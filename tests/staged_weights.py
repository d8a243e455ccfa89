"""Files in the format of safetensors, for tests of what reads no weights."""

from __future__ import annotations

import json
from pathlib import Path


def write_safetensors(path: Path, size_bytes: int = 16) -> None:
    """One fp32 tensor, by the description of the format."""
    about = {"a": {"dtype": "F32", "shape": [size_bytes // 4], "data_offsets": [0, size_bytes]}}
    header = json.dumps({"__metadata__": {"format": "pt"}, **about}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size_bytes))
