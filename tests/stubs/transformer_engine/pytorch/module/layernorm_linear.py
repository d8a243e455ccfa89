"""A norm and a column-parallel linear layer in one module."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.module.linear import Linear, zeros


def _ones(tensor: torch.Tensor) -> None:
    tensor.fill_(1.0)


class LayerNormLinear(Linear):
    """With sequence parallelism the norm sees this rank's part, the product the whole sequence."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
        **linear: Any,
    ) -> None:
        if return_layernorm_output:
            raise NotImplementedError("return_layernorm_output")
        assert normalization in ("LayerNorm", "RMSNorm"), "Unsupported normalization type!"
        assert linear.get("parallel_mode") != "row", "a norm needs whole rows"
        super().__init__(
            in_features, out_features, params_dtype=params_dtype, device=device, **linear
        )
        self.eps, self.normalization = eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        made: dict[str, Any] = dict(dtype=params_dtype or torch.get_default_dtype(), device=device)
        self.add_parameter(
            "layer_norm_weight",
            (in_features,),
            init=zeros if zero_centered_gamma else _ones,
            **made,
        )
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            del self.layer_norm_bias
            self.add_parameter("layer_norm_bias", (in_features,), init=zeros, **made)
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, **unused: Any
    ) -> Any:
        shape, weight = (self.in_features,), self.layer_norm_weight + self.zero_centered_gamma
        if self.normalization == "RMSNorm":
            inp = torch.nn.functional.rms_norm(inp, shape, weight, self.eps)
        else:
            inp = torch.nn.functional.layer_norm(inp, shape, weight, self.layer_norm_bias, self.eps)
        return super().forward(inp, is_first_microbatch)
