"""Tiny datasets of every format, written with NumPy and Pillow alone, and configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from trial_runs import MODULE_GPT

from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.train_json import parse_train_config
from hpctrain.train.data import Data, Share, open_data

VIT: dict[str, Any] = dict(
    MODULE_GPT,
    model=dict(family="vit", layers=2, hidden=32, ffn=64, heads=4, vocab=10, image=8, patch=4),
    task="classification",
    vocab_size=10,
    seq_length=5,
    data_format="arrays",
)
DISTILBERT: dict[str, Any] = dict(
    MODULE_GPT,
    model=dict(
        family="distilbert", layers=2, hidden=32, ffn=64, heads=4, vocab=50, seq=16, classes=3
    ),
    task="classification",
    vocab_size=50,
    seq_length=16,
    data_format="examples",
)
PACKED: dict[str, Any] = dict(MODULE_GPT, data_format="packed")
CPU = torch.device("cpu")


def config_of(base: dict[str, Any], *paths: Path, **changes: Any) -> ModuleConfig:
    blend = [(1.0, str(path)) for path in paths]
    made = parse_train_config(json.dumps({**base, "data_blend": blend, **changes}))
    assert isinstance(made, ModuleConfig)
    return made


def opened(config: ModuleConfig, cache: Path, rank: int = 0) -> Data:
    return open_data(config, Share(rank, config.data_parallel_size, CPU), cache)


def write_pictures(path: Path, count: int = 50, classes: int = 10, side: int = 8) -> Path:
    draws = np.random.RandomState(3)
    labels = np.arange(count) % classes
    x = draws.random_sample((count, side, side)).astype(np.float32) / 2
    x[np.arange(count), labels % side] += 0.5
    np.savez(path, x=x, y=labels)
    return path


def write_texts(path: Path, count: int = 40, classes: int = 3, length: int = 12) -> Path:
    draws = np.random.RandomState(4)
    labels = np.arange(count) % classes
    tokens = draws.randint(5, 50, size=(count, length))
    tokens[:, 0] = labels
    np.savez(
        path,
        tokens=tokens.astype(np.uint16),
        lengths=draws.randint(2, length + 1, size=count),
        labels=labels,
    )
    return path


def write_conversations(path: Path, count: int = 24, length: int = 32) -> Path:
    """Two texts a row, the second half of each is learned."""
    draws = np.random.RandomState(5)
    positions = np.tile(np.arange(length) % (length // 2), (count, 1))
    learned = (positions >= length // 4) & (positions < length // 2 - 1)
    np.savez(
        path,
        tokens=draws.randint(250, size=(count, length)).astype(np.uint16),
        learned=learned.astype(np.uint8),
        positions=positions.astype(np.uint16),
    )
    return path


def write_folder(root: Path, per_class: int = 6, classes: int = 3) -> Path:
    draws = np.random.RandomState(6)
    for number in range(classes):
        directory = root / f"class-{number}"
        directory.mkdir(parents=True)
        for index in range(per_class):
            colors = draws.randint(256, size=(20 + index, 24, 3)).astype(np.uint8)
            Image.fromarray(colors).save(directory / f"ä{index}.png")
    (root / ".hidden").mkdir()
    return root
