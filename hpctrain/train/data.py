"""Open the samples of one rank, in an order that a resume continues exactly.

The order is a function of the data, the seed and the number of samples of the whole run. The only
state is the number of consumed samples; it is the same for every engine and layout. Belongs here:
dispatch by format, and the settings that determine the order. Does not belong here: any format
(see `hpctrain.train.datasets`), what the model does with a batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.training import TrainConfig
from hpctrain.train.datasets.batches import Batch as Batch
from hpctrain.train.datasets.batches import Microbatch as Microbatch
from hpctrain.train.datasets.sample_order import MOCK_SPLIT
from hpctrain.train.datasets.sample_order import Share as Share
from hpctrain.train.times import StepClock


class Samples(Protocol):
    """One part of the data, as read by one rank."""

    def microbatches(self, samples: range, reads: bool = True) -> Iterator[Any]:
        """Yield this rank's microbatches of the global batch of `samples`.

        Batches of `hpctrain.train.datasets.batches` on the rank's device; None for each without
        `reads`. Raises DataError, InvalidInputError.
        """
        ...


@dataclass(frozen=True)
class Data:
    """Training samples, and validation samples if the run evaluates.

    `rows`: the number of distinct training samples; None for tokens, whose samples megatron-core
    cuts out of documents.
    """

    training: Samples
    validation: Samples | None
    rows: int | None = None


@dataclass(frozen=True)
class _Timed:
    """Samples that measure with a clock how long training waits for them."""

    samples: Samples
    clock: StepClock

    def microbatches(self, samples: range, reads: bool = True) -> Iterator[Any]:
        return self.clock.reading(self.samples.microbatches(samples, reads))


def training_samples(config: TrainConfig) -> int:
    """Return the horizon: samples of the whole run, on which the order of all samples depends."""
    return config.batch_sizes.samples_after(config.train_steps)


def _is_tokens(config: TrainConfig) -> bool:
    return not isinstance(config, ModuleConfig) or config.data_format == "tokens"


def sample_order(config: TrainConfig, data: Data | None = None) -> dict[str, Any]:
    """Return all settings that determine the sample order; they are stored in each checkpoint.

    `data` is needed for formats other than tokens.
    """
    order = {
        "training samples (train_steps x global_batch_size)": training_samples(config),
        "global_batch_size": config.global_batch_size,
        "seq_length": config.seq_length,
        "seed": config.seed,
        "data_split": config.data_split if config.data_blend else MOCK_SPLIT,
        "data_blend": [[weight, Path(prefix).name] for weight, prefix in config.data_blend],
    }
    if config.rampup_batch_size is not None:
        order["rampup_batch_size"] = list(config.rampup_batch_size)
    if isinstance(config, ModuleConfig) and not _is_tokens(config):
        order["data_format"] = config.data_format
        order["data_validation"] = config.data_validation and Path(config.data_validation).name
        order["augmentation"] = config.augmentation
        order["samples to train on"] = None if data is None else data.rows
    return order


def import_reader(config: TrainConfig) -> None:
    """Import the modules that read this run's data, so that forked ranks share them."""
    reader = "token_samples" if _is_tokens(config) else "row_samples"  # the first: megatron-core
    importlib.import_module(f"hpctrain.train.datasets.{reader}")


def open_data(
    config: TrainConfig,
    share: Share,
    cache: Path,
    copies: Mapping[str, str] = MappingProxyType({}),
    *,
    needed: bool = True,
    clock: StepClock | None = None,
) -> Data:
    """Open the datasets; a collective call (rank 0 builds indexes, others wait).

    `copies` of sources on this node, by path, are read in their place; orders and indexes have the
    names of the sources. Not `needed`: this rank takes part in the call but reads nothing later.
    `clock` measures how long training waits for its samples. Raises InvalidInputError when there is
    nothing to read.
    """
    evaluates = config.eval_interval_steps is not None
    evaluated = config.eval_batches * config.global_batch_size if evaluates else 0
    horizons = training_samples(config), evaluated
    if isinstance(config, ModuleConfig) and not _is_tokens(config):
        from hpctrain.train.datasets.row_samples import open_rows

        training, validation = open_rows(config, share, cache, horizons, copies)
        data = Data(training, validation, len(training.order.rows))
    else:
        from hpctrain.train.datasets.token_samples import open_tokens

        data = Data(*open_tokens(config, share, cache, horizons, copies, needed=needed))
    return data if clock is None else replace(data, training=_Timed(data.training, clock))
