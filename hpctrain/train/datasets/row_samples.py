"""Read the samples of a run as batches on a device, directly or with prefetching workers.

Belongs here: one part of a dataset as an engine reads it. Does not belong here: the content of a
row, Megatron's tokens (see `token_samples`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.engines.module import ModuleConfig
from hpctrain.train.datasets.batches import Batch
from hpctrain.train.datasets.prefetching import Prefetcher, Unreadable
from hpctrain.train.datasets.sample_order import SampleOrder
from hpctrain.train.datasets.sample_rows import SampleRows
from hpctrain.train.datasets.share import Share
from hpctrain.train.faults import DataError


@dataclass(frozen=True)
class RowSamples:
    """Training or validation samples of one rank; `prefetcher` None: read on demand."""

    rows: SampleRows
    order: SampleOrder
    config: ModuleConfig
    share: Share
    training: bool
    prefetcher: Prefetcher | None = None

    def microbatches(self, consumed_samples: int, reads: bool = True) -> Iterator[Batch | None]:
        """Yield this rank's microbatches of the global batch that begins at `consumed_samples`.

        Without `reads`, yields None for each. Raises DataError, InvalidInputError.
        """
        if not reads:
            yield from (None for _ in self.of_step(consumed_samples))
        elif self.prefetcher is not None:
            for batch in self.prefetcher.of_step(consumed_samples):
                yield batch.to(self.share.device)
        else:
            for samples in self.of_step(consumed_samples):
                yield self.read(samples).to(self.share.device)

    def of_step(self, consumed_samples: int) -> Iterator[range]:
        """Yield the sample numbers of each of this rank's microbatches."""
        config = self.config
        return self.share.deal(consumed_samples, config.micro_batch_size, config.microbatches)

    def read(self, samples: range) -> Batch:
        """Read in this process, into CPU memory. Raises DataError, InvalidInputError."""
        try:
            return self.rows.read(self.order.of(samples), samples, training=self.training)
        except (OSError, ValueError) as error:
            message = f"samples {samples[0]} to {samples[-1]} cannot be read: {error}"
            raise DataError(message) from error

    def try_read(self, samples: range) -> Batch | Unreadable:
        """Read in a worker, where exceptions would lose their type when pickled."""
        try:
            return self.read(samples)
        except DataError as error:
            return Unreadable(str(error))
