"""Fused routing, which the stub does not compute."""

from __future__ import annotations

from typing import Any


def fused_topk_with_score_function(*args: Any, **keywords: Any) -> Any:
    raise NotImplementedError("moe_router_fusion")


def fused_compute_score_for_moe_aux_loss(*args: Any, **keywords: Any) -> Any:
    raise NotImplementedError("moe_router_fusion")


def fused_moe_aux_loss(*args: Any, **keywords: Any) -> Any:
    raise NotImplementedError("moe_router_fusion")
