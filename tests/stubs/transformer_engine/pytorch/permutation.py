"""Tokens in the order of their experts, and back."""

from __future__ import annotations

import torch


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of `inp` by expert, and [2, rows]: token and expert of each."""
    if map_type != "mask":
        raise NotImplementedError("maps of indices")
    experts, tokens = routing_map.bool().T.nonzero(as_tuple=True)
    return inp.index_select(0, tokens), torch.stack((tokens, experts))


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return also the probability of each row."""
    rows, places = moe_permute(inp, routing_map, num_out_tokens)
    return rows, probs[places[0], places[1]], places


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the rows of each token."""
    tokens, experts = row_id_map
    if merging_probs is not None:
        inp = inp * merging_probs[tokens, experts].unsqueeze(-1).to(inp.dtype)
    shape = restore_shape if restore_shape is not None else (int(tokens.max()) + 1, inp.shape[1])
    return torch.zeros(shape, dtype=inp.dtype, device=inp.device).index_add(0, tokens, inp)


def moe_sort_chunks_by_index(
    inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> torch.Tensor:
    """Put chunks of rows in another order."""
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[index] for index in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_index: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put rows and their probabilities in another order."""
    rows = moe_sort_chunks_by_index(inp, split_sizes, sorted_index)
    return rows, moe_sort_chunks_by_index(probs, split_sizes, sorted_index)
