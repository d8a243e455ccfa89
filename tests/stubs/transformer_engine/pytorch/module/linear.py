"""A linear layer whose weight is cut over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch.distributed import (
    gather_along_first_dim,
    scatter_sum_along_first_dim,
    sum_gradient_over_ranks,
    sum_over_ranks,
)
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, check_overlap


def zeros(tensor: torch.Tensor) -> None:
    tensor.zero_()


class Linear(TransformerEngineBaseModule):
    """`parallel_mode` column, row or None; input and output are [sequence, batch, features]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if delay_wgrad_compute or parameters_split:
            raise NotImplementedError("delay_wgrad_compute and parameters_split")
        assert parallel_mode in ("column", "row", None), f"parallel_mode {parallel_mode}"
        self.join(tp_group, tp_size)
        self.parallel_mode, self.rng_tracker_name = parallel_mode, rng_tracker_name
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = save_original_input
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        check_overlap(
            self.sequence_parallel
            and (ub_overlap_ag or ub_overlap_rs or ub_overlap_rs_dgrad)
            and parallel_mode is not None,
            ub_name,
        )
        made: dict[str, Any] = dict(dtype=params_dtype or torch.get_default_dtype(), device=device)
        self.add_parameter(
            "weight",
            (self.out_features, self.in_features),
            init=init_method or torch.nn.init.xavier_normal_,
            tracker=get_rng_state_tracker,
            **made,
        )
        if bias:
            self.add_parameter("bias", (self.out_features,), init=zeros, **made)
        else:
            self.bias = torch.empty(0, **made)
        self.mark_parallel(["weight"], ["bias"] if bias else [])

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, **unused: Any
    ) -> Any:
        """Return the product; with `return_bias` also the bias, which is then not added."""
        self.init_fp8_metadata()
        split = self.parallel_mode if self.tp_size > 1 else None
        if split == "column" and self.sequence_parallel:
            inp = gather_along_first_dim(inp, self.tp_group)
        elif split == "column":
            inp = sum_gradient_over_ranks(inp, self.tp_group)
        out = self.product(inp, self.weight)
        if split == "row":
            reduce = scatter_sum_along_first_dim if self.sequence_parallel else sum_over_ranks
            out = reduce(out, self.tp_group)
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.use_bias else out
