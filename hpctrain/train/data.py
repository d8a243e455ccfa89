"""The samples of one rank: megatron-core datasets in an order that a resume continues exactly.

The order is a function of files, seed, sequence length, split and the number of samples of the
whole run, so the only state is how many samples were consumed; it is the same for every engine
and layout. Ranks read what they need from memory-mapped files themselves: neighbours on a node
share the page cache, which is cheaper than a broadcast per microbatch. Belongs here: datasets and
microbatches. Does not belong here: what the model does with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.train.megatron import cpu

cpu.install()  # before the first import of megatron.core, also where another engine trains

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset  # noqa: E402
from megatron.core.tokenizers import MegatronTokenizer  # noqa: E402

from hpctrain.engines.training import TrainConfig  # noqa: E402
from hpctrain.errors import InvalidInputError, Problem  # noqa: E402
from hpctrain.train.faults import DataError  # noqa: E402

_MOCK_SPLIT = "90,10,0"


@dataclass(frozen=True)
class Microbatch:
    """Tensors of shape [micro batch, sequence] on the rank's device.

    `samples` are the numbers of its sequences within the run.
    """

    tokens: Any
    labels: Any
    loss_mask: Any
    positions: Any
    samples: range = range(0)


@dataclass(frozen=True)
class Share:
    """Which samples a rank reads: those of data rank `rank` of `size`, onto `device`."""

    rank: int
    size: int
    device: torch.device


@dataclass(frozen=True)
class Samples:
    """One dataset seen from one rank; `dataset` is None on ranks that need no data.

    `horizon` is the number of samples in it: a run that leaves some out takes the first ones
    again at its end, for more samples would be another order of all.
    """

    dataset: Any
    config: TrainConfig
    share: Share
    horizon: int

    def microbatches(
        self, consumed_samples: int, reads: bool = True
    ) -> Iterator[Microbatch | None]:
        """This rank's microbatches of the global batch that begins at `consumed_samples`.

        None in the place of each if the rank need not read.

        Microbatch m of data rank d holds samples m * (micro * dp) + d * micro + [0, micro), as
        Megatron-LM's MegatronPretrainingSampler deals them: the same set for every layout.
        """
        micro = self.config.micro_batch_size
        for number in range(self.config.microbatches):
            row = number * self.share.size + self.share.rank
            first = consumed_samples + row * micro
            yield self._read(range(first, first + micro)) if reads else None

    def _read(self, indices: range) -> Microbatch:
        try:
            rows = [self.dataset[index % self.horizon] for index in indices]
        except (OSError, ValueError, IndexError) as error:
            first, last = indices[0], indices[-1]
            raise DataError(f"samples {first} to {last} cannot be read: {error}") from error
        tokens = torch.stack([row["tokens"] for row in rows])
        labels = torch.stack([row["labels"] for row in rows])
        self._check_vocabulary(max(int(tokens.max()), int(labels.max())))
        device = self.share.device
        return Microbatch(
            tokens.to(device, non_blocking=True),
            labels.to(device, non_blocking=True),
            torch.stack([row["loss_mask"] for row in rows]).to(device, non_blocking=True),
            torch.stack([row["position_ids"] for row in rows]).to(device, non_blocking=True),
            indices,
        )

    def _check_vocabulary(self, largest: int) -> None:
        """Vocabulary-parallel layers would mask a foreign token silently, so look here."""
        if largest >= self.config.vocab_size:
            raise InvalidInputError(
                [
                    Problem(
                        f"token id {largest} in the data, but the model has vocab_size "
                        f"{self.config.vocab_size}"
                    )
                ]
            )


@dataclass(frozen=True)
class Data:
    """Training samples, and validation samples if the run evaluates."""

    training: Samples
    validation: Samples | None


def training_samples(config: TrainConfig) -> int:
    """The horizon: samples of the whole run. The order of the very first one depends on it."""
    return config.train_steps * config.global_batch_size


def sample_order(config: TrainConfig) -> dict[str, Any]:
    """Everything that decides which sample comes when; kept in each checkpoint."""
    return {
        "training samples (train_steps x global_batch_size)": training_samples(config),
        "global_batch_size": config.global_batch_size,
        "seq_length": config.seq_length,
        "seed": config.seed,
        "data_split": config.data_split if config.data_blend else _MOCK_SPLIT,
        "data_blend": [[weight, Path(prefix).name] for weight, prefix in config.data_blend],
    }


def open_data(config: TrainConfig, share: Share, cache: Path, *, needed: bool = True) -> Data:
    """Build the datasets; all ranks must call this (rank 0 builds the index, others wait).

    Raises InvalidInputError when the split leaves nothing to read.
    """
    evaluates = config.eval_interval_steps is not None
    sizes = [
        training_samples(config),
        config.eval_batches * config.global_batch_size if evaluates else 0,
        0,
    ]
    kind = GPTDataset if config.data_blend else MockGPTDataset
    builder = BlendedMegatronDatasetBuilder(
        kind,
        sizes,
        lambda: needed or dist.get_rank() == 0,
        dataset_settings(config, cache),
    )
    training, validation, _ = _build(builder, config)
    if not needed:
        training = validation = None
    return Data(
        Samples(training, config, share, sizes[0]),
        Samples(validation, config, share, sizes[1]) if evaluates else None,
    )


def _build(builder: BlendedMegatronDatasetBuilder, config: TrainConfig) -> list[Any]:
    training, validation, test = builder.build()
    if training is None:
        raise _empty("training", config)
    if validation is None and config.eval_interval_steps is not None:
        raise _empty("validation", config)
    return [training, validation, test]


def _empty(part: str, config: TrainConfig) -> InvalidInputError:
    return InvalidInputError(
        [Problem(f"data_split {config.data_split} leaves no documents for {part}")]
    )


def dataset_settings(config: TrainConfig, cache: Path) -> GPTDatasetConfig:
    """The dataset's configuration. The null tokenizer is enough: only its size is asked for."""
    blend = config.data_blend
    weights = [weight for weight, _ in blend] if len(blend) > 1 else None
    return GPTDatasetConfig(
        random_seed=config.seed,
        sequence_length=config.seq_length,
        blend=([prefix for _, prefix in blend], weights) if blend else None,
        split=config.data_split if blend else _MOCK_SPLIT,
        path_to_cache=str(cache),
        tokenizer=MegatronTokenizer.from_pretrained(
            metadata_path={"library": "null"}, vocab_size=config.vocab_size - 1
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
