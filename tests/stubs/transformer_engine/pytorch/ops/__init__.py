"""Fusible operations: named by megatron-core's annotations, and not computed by the stub."""

from __future__ import annotations

from typing import Any


class Sequential:
    def __init__(self, *operations: Any) -> None:
        raise NotImplementedError("use_transformer_engine_op_fuser")


class FusibleOperation:
    """A type of annotations."""
