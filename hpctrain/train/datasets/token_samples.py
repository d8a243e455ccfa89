"""Read tokens through megatron-core's datasets, in an order that a resume continues exactly.

The order is a function of files, seed, sequence length, split and the number of samples of the
whole run. Each rank reads memory-mapped files: ranks on a node share the page cache, which is
cheaper than a broadcast per microbatch. Does not belong here: other formats, what the model does
with them.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.train import megatron_on_cpu

# Before the first import of megatron.core, also where another engine trains.
megatron_on_cpu.import_core()

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset  # noqa: E402

from hpctrain.base.errors import InvalidInputError, Problem  # noqa: E402
from hpctrain.engines.training import TrainConfig  # noqa: E402
from hpctrain.records.datasets import idx_path  # noqa: E402
from hpctrain.records.shares import EVALUATE_NOTHING, parts_without_documents  # noqa: E402
from hpctrain.train.datasets.batches import Microbatch  # noqa: E402
from hpctrain.train.datasets.npz_arrays import complete_files  # noqa: E402
from hpctrain.train.datasets.sample_order import MOCK_SPLIT, Share  # noqa: E402
from hpctrain.train.datasets.sample_rows import check_vocabulary  # noqa: E402
from hpctrain.train.engines.megatron.core_versions.supported import current  # noqa: E402
from hpctrain.train.faults import DataError  # noqa: E402

_INDEX_HEAD = struct.Struct("<9sQBQ")  # magic, version, dtype, number of sequences
_COLUMNS = ("tokens", "labels", "loss_mask", "position_ids")


@dataclass(frozen=True)
class TokenSamples:
    """The samples of one rank; `dataset` is None on ranks that need no data.

    `horizon` is the number of samples: a run that skips samples repeats the first ones at its
    end, because a larger dataset would have another order.
    """

    dataset: Any
    config: TrainConfig
    share: Share
    horizon: int

    def microbatches(self, samples: range, reads: bool = True) -> Iterator[Microbatch | None]:
        """Yield this rank's microbatches of the global batch of `samples`.

        Without `reads`, yields None for each. Raises DataError, InvalidInputError.
        """
        for own in self.share.deal(samples, self.config.micro_batch_size):
            yield self._read(own).to(self.share.device) if reads else None

    def _read(self, samples: range) -> Microbatch:
        try:
            rows = [self.dataset[sample % self.horizon] for sample in samples]
        except (OSError, ValueError, IndexError) as error:
            first, last = samples[0], samples[-1]
            raise DataError(f"samples {first} to {last} cannot be read: {error}") from error
        tokens, labels, loss_mask, positions = (
            torch.stack([row[name] for row in rows]) for name in _COLUMNS
        )
        # vocabulary-parallel layers would silently mask an id that is out of range
        check_vocabulary(tokens, self.config.vocab_size)
        check_vocabulary(labels, self.config.vocab_size)
        return Microbatch(tokens, labels, loss_mask, positions, samples)


def open_tokens(
    config: TrainConfig,
    share: Share,
    cache: Path,
    horizons: tuple[int, int],
    copies: Mapping[str, str],
    *,
    needed: bool,
) -> tuple[TokenSamples, TokenSamples | None]:
    """Open training and validation samples; a collective call (rank 0 builds the index).

    `horizons` are their numbers, the second one 0 without validation; `copies` are read in place
    of their sources. Raises InvalidInputError when the split leaves nothing to read.
    """
    settings = dataset_settings(config, cache)
    # `submit` checks the same, if it can read the index.
    for _, prefix in config.data_blend:
        index = idx_path(Path(prefix))
        if not index.exists():
            continue  # the builder raises the error
        with index.open("rb") as file:
            # the split counts sequences (megatron/core/datasets/indexed_dataset.py)
            count = int(_INDEX_HEAD.unpack(file.read(_INDEX_HEAD.size))[-1])
        for part in parts_without_documents(config.data_split, count):
            raise _empty(part, config, f"none of the {count} documents of {prefix}")
    builder = BlendedMegatronDatasetBuilder(
        GPTDataset if config.data_blend else MockGPTDataset,
        [*horizons, 0],
        lambda: needed or dist.get_rank() == 0,
        settings,
    )
    with complete_files(), reading_copies(copies):
        training, validation, _ = builder.build()
    if needed and training is None:
        raise _empty("training", config)
    if needed and validation is None and horizons[1]:
        raise _empty("validation", config)
    if not needed:  # a stage in the middle of a pipeline; rank 0 only builds the index
        training = validation = None
    return (
        TokenSamples(training, config, share, horizons[0]),
        TokenSamples(validation, config, share, horizons[1]) if horizons[1] else None,
    )


@contextlib.contextmanager
def reading_copies(copies: Mapping[str, str]) -> Iterator[None]:
    """Within the block, make megatron-core open the copy of a prefix in place of the prefix.

    The names of indexes in the cache, and with them the indexes, stay those of the prefix: they are
    digests over it (megatron_dataset.py, `unique_description`).
    """
    if not copies:
        yield
        return
    build = GPTDataset.build_low_level_dataset

    def build_from_copy(dataset_path: str, config: GPTDatasetConfig) -> Any:
        return build(copies.get(dataset_path, dataset_path), config)

    GPTDataset.build_low_level_dataset = staticmethod(build_from_copy)
    try:
        yield
    finally:
        GPTDataset.build_low_level_dataset = staticmethod(build)


def _empty(part: str, config: TrainConfig, what: str = "no documents") -> InvalidInputError:
    message = f"data_split {config.data_split} leaves {what} for {part}"
    return InvalidInputError([Problem(message, hint=EVALUATE_NOTHING)])


def dataset_settings(config: TrainConfig, cache: Path) -> GPTDatasetConfig:
    """Build the dataset's configuration.

    A null tokenizer suffices: only its size is used, and the token that ends a document.
    """
    blend = config.data_blend
    tokenizer = current().null_tokenizer(config.vocab_size)
    if config.document_end is not None:
        tokenizer._tokenizer._eod_id = config.document_end
    weights = [weight for weight, _ in blend] if len(blend) > 1 else None
    return GPTDatasetConfig(
        random_seed=config.seed,
        sequence_length=config.text_length,
        blend=([prefix for _, prefix in blend], weights) if blend else None,
        split=config.data_split if blend else MOCK_SPLIT,
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        reset_position_ids=config.documents != "joined",
        reset_attention_mask=False,
        eod_mask_loss=config.eod_mask_loss,
        create_attention_mask=False,
    )
