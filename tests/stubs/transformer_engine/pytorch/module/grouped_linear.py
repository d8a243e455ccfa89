"""Several linear layers, each for its own rows: the experts of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.linear import zeros


class GroupedLinear(TransformerEngineBaseModule):
    """Communicates nothing: the dispatcher of experts does."""

    def __init__(
        self,
        num_gemms: int,
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
        device: Any = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        super().__init__()
        if ub_overlap_rs or ub_overlap_ag:
            raise ValueError("GroupedLinear doesn't support Userbuffer overlap.")
        if delay_wgrad_compute:
            raise NotImplementedError("delay_wgrad_compute")
        self.join(tp_group, tp_size)
        if self.tp_size > 1 and bias:
            raise ValueError("GroupedLinear doesn't support bias when TP > 1.")
        self.num_gemms, self.rng_tracker_name = num_gemms, rng_tracker_name
        self.parallel_mode = parallel_mode
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = save_original_input
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        made: dict[str, Any] = dict(dtype=params_dtype or torch.get_default_dtype(), device=device)
        for i in range(num_gemms):
            self.add_parameter(
                f"weight{i}",
                (self.out_features, self.in_features),
                init=init_method or torch.nn.init.xavier_normal_,
                tracker=get_rng_state_tracker,
                **made,
            )
            if bias:
                self.add_parameter(f"bias{i}", (self.out_features,), init=zeros, **made)
            else:
                setattr(self, f"bias{i}", torch.empty(0, **made))
        names = range(num_gemms)
        self.mark_parallel([f"weight{i}" for i in names], [f"bias{i}" for i in names if bias])

    def forward(
        self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Any:
        """`m_splits`: rows of each expert; they add up to the rows of `inp`."""
        assert len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        self.init_fp8_metadata(self.num_gemms)
        outs = []
        for i, part in enumerate(inp.split([int(rows) for rows in m_splits])):
            out = self.product(part, getattr(self, f"weight{i}"), i, self.num_gemms)
            added = self.use_bias and not self.return_bias
            outs.append(out + getattr(self, f"bias{i}") if added else out)
        whole = torch.cat(outs)
        if self.return_bias:
            return whole, [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        return whole
