"""CUDA graphs, which the stub does not capture."""

from __future__ import annotations

from typing import Any


def make_graphed_callables(*args: Any, **keywords: Any) -> Any:
    raise NotImplementedError("CUDA graphs")


def save_fp8_tensors(*args: Any, **keywords: Any) -> Any:
    raise NotImplementedError("CUDA graphs")


def restore_fp8_tensors(*args: Any, **keywords: Any) -> Any:
    raise NotImplementedError("CUDA graphs")


def set_capture_start() -> None:
    raise NotImplementedError("CUDA graphs")


def set_capture_end() -> None:
    raise NotImplementedError("CUDA graphs")
