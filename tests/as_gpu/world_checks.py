"""What must hold over all ranks of a world: stored tensors, weights, buckets, optimizer ranges.

Each function returns sentences about what is wrong; none means good. Belongs here: conditions.
Does not belong here: building ranks (see `fake_worlds`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from fake_worlds import Part, Place


def wrong_coverage(places: Iterable[Place], wanted: dict[str, tuple[int, ...]]) -> list[str]:
    """Check that the parts that are written tile each stored tensor, and that all are there.

    `wanted`: shapes of the whole model, by key. Objects are written once by key.
    """
    problems, written = [], defaultdict(list)
    objects: dict[str, int] = defaultdict(int)
    shapes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for place in places:
        for part in place.parts:
            shapes[part.key].add(part.global_shape)
            if part.writes:
                written[part.key].append(part)
        for key, writes in place.objects:
            objects[key] += writes
    problems += [f"object {key} is written {n} times" for key, n in objects.items() if n != 1]
    for key, found in shapes.items():
        if len(found) > 1:
            problems.append(f"{key} has several shapes: {sorted(found)}")
            continue
        problems += _wrong_tiles(key, next(iter(found)), written[key])
    for key, shape in wanted.items():
        if shapes.get(key) != {shape}:
            problems.append(f"{key} is {shapes.get(key)}, wanted {shape}")
    return problems


def _wrong_tiles(key: str, shape: tuple[int, ...], parts: list[Part]) -> list[str]:
    """Check that parts cover each element once: their sizes add up, and none overlap."""
    total = sum(math.prod(part.shape) for part in parts)
    problems = []
    if total != math.prod(shape):
        problems.append(f"{key}: {total} of {math.prod(shape)} elements are written")
    parts = sorted(parts, key=lambda part: part.offset)
    if len(shape) == 1:
        ends = [part.offset[0] + part.shape[0] for part in parts]
        begins = [part.offset[0] for part in parts[1:]]
        overlap = any(begin < end for begin, end in zip(begins, ends[:-1], strict=True))
    else:  # a grid of equal parts
        overlap = len({part.offset for part in parts}) != len(parts)
        overlap |= len({part.shape for part in parts}) > 1
    if overlap:
        problems.append(f"{key}: parts overlap")
    return problems


def without_optimizers_of_absent_ranks(places: list[Place], config: Any) -> list[Place]:
    """Leave out optimizer states of data-parallel groups whose ranks were not all visited.

    megatron-core names the group in the key (`dp_group_idx_N`).
    """
    seen: dict[str, int] = defaultdict(int)
    for place in places:
        for key in {_group_of(part.key) for part in place.parts} - {None}:
            seen[str(key)] += 1
    complete = {key for key, count in seen.items() if count == config.data_parallel_size}

    def kept(key: str) -> bool:
        return _group_of(key) is None or _group_of(key) in complete

    return [
        Place(
            place.rank,
            [part for part in place.parts if kept(part.key)],
            [(key, writes) for key, writes in place.objects if kept(key)],
            place.buffers,
            place.tensors,
        )
        for place in places
    ]


def _group_of(key: str) -> str | None:
    """Return the part of a key that names a data-parallel group; None for weights."""
    found = re.search(r"dp_group_idx_[0-9]+", key)
    return key[: found.end()] if found else None


def wrong_replicas(places: Iterable[Place]) -> list[str]:
    """Check that all ranks that hold the same piece of a weight hold the same numbers."""
    digests: dict[tuple[str, tuple[int, ...]], set[str]] = defaultdict(set)
    for place in places:
        for part in place.parts:
            digests[part.key, part.offset].add(part.digest)
    return [f"{where} differs between ranks" for where, seen in digests.items() if len(seen) > 1]


def wrong_numbers(
    places: Iterable[Place], whole: dict[tuple[str, tuple[int, ...]], torch.Tensor]
) -> list[str]:
    """Check that each piece is what a model on one rank has at that place."""
    joined: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = defaultdict(list)
    for (key, offset), tensor in whole.items():
        joined[key].append((offset, tensor))
    problems = []
    for place in places:
        for (key, offset), tensor in place.tensors.items():
            if not any(_is_within(tensor, offset, *other) for other in joined[key]):
                problems.append(f"rank {place.rank}: {key} at {offset} is not the whole model's")
    return problems


def _is_within(
    tensor: torch.Tensor, offset: tuple[int, ...], start: tuple[int, ...], whole: torch.Tensor
) -> bool:
    ahead = [own - other for own, other in zip(offset, start, strict=True)]
    ends = [first + size for first, size in zip(ahead, tensor.shape, strict=True)]
    if min(ahead) < 0 or any(end > size for end, size in zip(ends, whole.shape, strict=True)):
        return False
    cut = whole[tuple(slice(*pair) for pair in zip(ahead, ends, strict=True))]
    return torch.equal(cut, tensor)


def equal_pieces(place: Place, word: str) -> list[str]:
    """Name pieces of random weights whose keys contain `word` that hold the same numbers."""
    seen: dict[str, tuple[str, tuple[int, ...]]] = {}
    problems = []
    for (key, offset), tensor in place.tensors.items():
        if word not in key or float(tensor.std()) == 0.0:
            continue
        digest = tensor.flatten()[:64].tolist()
        name = str(digest)
        if name in seen:
            problems.append(f"{key} at {offset} equals {seen[name]}")
        seen[name] = (key, offset)
    return problems


def wrong_buffers(buffers: list[dict[str, Any]], dp_multiple: bool = True) -> list[str]:
    """Check one rank's buffers: parameters do not overlap and lie within one bucket each."""
    problems = []
    for buffer in buffers:
        end_before = 0
        for name, (start, end, bucket) in sorted(
            buffer["ranges"].items(), key=lambda item: item[1][0]
        ):
            if start < end_before:
                problems.append(f"{name} overlaps the parameter before it")
            if end - start != buffer["sizes"][name]:
                problems.append(f"{name} has {end - start} of {buffer['sizes'][name]} elements")
            end_before = end
            first, length, _ = buffer["buckets"][bucket]
            if not first <= start < end <= first + length:
                problems.append(f"{name} is not within bucket {bucket}")
        begins = [bucket[0] for bucket in buffer["buckets"]]
        ends = [bucket[0] + bucket[1] for bucket in buffer["buckets"]]
        if [0, *ends] != [*begins, buffer["numel"]]:
            problems.append(f"buckets {buffer['buckets']} do not tile {buffer['numel']} elements")
        if any(bucket[1] % len(buffer["ranks"]) for bucket in buffer["buckets"]):
            problems.append("a bucket is not divisible by the data-parallel size")
    return problems


def wrong_ownership(by_rank: dict[int, list[dict[str, Any]]]) -> list[str]:
    """Check that each parameter's elements have one owner in each data-parallel group."""
    pieces: dict[tuple[tuple[int, ...], str], list[tuple[int, int]]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for buffers in by_rank.values():
        for buffer in buffers:
            for name, (start, end, numel) in buffer["owned"].items():
                pieces[tuple(buffer["ranks"]), name].append((start, end))
                sizes[f"{buffer['ranks']}{name}"] = numel
    problems = []
    for (ranks, name), found in pieces.items():
        ordered = sorted(found)
        starts = [start for start, _ in ordered]
        ends = [end for _, end in ordered]
        if [*starts, sizes[f"{list(ranks)}{name}"]] != [0, *ends]:
            problems.append(f"{name} on ranks {ranks} is owned in pieces {ordered}")
    return problems
