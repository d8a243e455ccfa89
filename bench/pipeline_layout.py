"""Layers per pipeline stage, from Megatron's layout strings or by rule.

Belongs here: `--pipeline-model-parallel-layout` strings such as `Et*4|(t*4|)*14tmL`. Does not
belong here: anything else about a row (`cases`).
"""

from __future__ import annotations

import math
import re


def stage_layers(
    layout: str | None, layers: int, pp: int, equal_modules: bool = False
) -> tuple[float, float, float]:
    """Layers of the first, a middle and the last stage.

    By the layout where it holds the model's layers. With `equal_modules` embedding, layers, norm
    and head are split evenly, and the first stages have one more. Else evenly where that divides;
    else embedding and loss count as layers (account_for_embedding_in_pipeline_split of
    megatron-core), else the last stage has what is left.
    """
    if pp == 1:
        return layers, layers, layers
    counts = _counts(layout, pp) if layout else None
    if counts and sum(counts) == layers:
        return counts[0], max(counts[1:-1], default=counts[-1]), counts[-1]
    if equal_modules:
        least, more = divmod(layers + 3, pp)
        sizes = [least + (stage < more) for stage in range(pp)]
        return sizes[0] - 1, max(sizes[1:-1], default=sizes[0] - 1), max(0, sizes[-1] - 2)
    if layers % pp == 0:
        return layers / pp, layers / pp, layers / pp
    most = math.ceil((layers + 2) / pp)
    last = layers - most * (pp - 2) - (most - 1)
    if last >= 0:
        return most - 1, most, last
    most = math.ceil(layers / pp)
    return most, most, max(0, layers - most * (pp - 1))


def _counts(layout: str, pp: int) -> list[int] | None:
    """Transformer layers of each stage; None for a string whose chunks pp does not divide.

    E embedding, t transformer layer, m prediction layer, L loss, `|` the end of a chunk, x*n
    repeats a letter or a group in brackets; chunk i is on stage i mod pp
    (megatron/core/transformer/pipeline_parallel_layer_layout.py).
    """
    chunks = _expanded(layout).split("|")
    if len(chunks) % pp:
        return None
    counts = [0] * pp
    for index, chunk in enumerate(chunks):
        counts[index % pp] += chunk.count("t")
    return counts


def _expanded(layout: str) -> str:
    text = layout
    while True:
        text, groups = re.subn(r"\(([^()]*)\)\*(\d+)", _repeat, text)
        text, letters = re.subn(r"([A-Za-z])\*(\d+)", _repeat, text)
        if not groups and not letters:
            return text


def _repeat(found: re.Match[str]) -> str:
    return found.group(1) * int(found.group(2))
