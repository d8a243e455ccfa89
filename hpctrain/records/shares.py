"""What `data.split` leaves of a dataset for training, validation and test.

Belongs here: how shares are rounded, as those who read the data round them. Does not belong here:
opening datasets, which samples are in which part.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise

PARTS = ("training", "validation", "test")
EVALUATE_NOTHING = "`data.split: 100,0,0` gives all to training and evaluates nothing"
# Shares of training, in percent, that `split_hint` tries.
_TRAINING_SHARES = (90, 80, 50)


def parts_without_documents(split: str, count: int) -> list[str]:
    """Parts that have a share of Megatron's documents and get none of `count`.

    megatron-core rounds the ends of parts, not their sizes, half to even (megatron/core/datasets/
    blended_megatron_dataset_config.py, `convert_split_vector_to_split_matrix`;
    blended_megatron_dataset_builder.py), and counts epochs without end where nothing is left
    (gpt_dataset.py, `_get_num_epochs`), also of a part that nobody reads.
    """
    shares = _shares(split)
    total = sum(shares)
    if total <= 0:
        return []
    ends = accumulate((share / total for share in shares), initial=0.0)
    sizes = _sizes(end * count for end in ends)
    return [part for part, share in zip(PARTS, shares, strict=True) if share and not sizes[part]]


def parts_without_rows(split: str, count: int) -> list[str]:
    """Parts that get none of `count` samples of another format, with a share or without."""
    shares = _shares(split)
    total = sum(shares)
    if total <= 0:
        return list(PARTS)
    sizes = _sizes(end / total * count for end in accumulate(shares, initial=0.0))
    return [part for part in PARTS if not sizes[part]]


def split_hint(count: int) -> str:
    """Name values of `data.split` that leave nothing empty of `count` documents or samples."""
    for share in _TRAINING_SHARES:
        split = f"{share},{100 - share},0"
        without = {*parts_without_documents(split, count), *parts_without_rows(split, count)}
        if not without & {"training", "validation"}:
            return f"`data.split: {split}` leaves some for both; {EVALUATE_NOTHING}"
    return f"{EVALUATE_NOTHING}; to evaluate, at least two are needed"


def _shares(split: str) -> list[float]:
    return [float(share) for share in split.split(",")]


def _sizes(ends: Iterable[float]) -> dict[str, int]:
    rounded = [round(end) for end in ends]
    return {
        part: last - first for part, (first, last) in zip(PARTS, pairwise(rounded), strict=True)
    }
