"""From samples of the run to batches on a device, at once or ahead of time by other processes.

Belongs here: one part of a dataset as an engine reads it. Does not belong here: what lies in a
row, Megatron's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.engines.module import ModuleConfig
from hpctrain.train.datasets.ahead import Ahead, Unreadable
from hpctrain.train.datasets.batches import Batch
from hpctrain.train.datasets.order import Order
from hpctrain.train.datasets.rows import Rows
from hpctrain.train.datasets.share import Share
from hpctrain.train.faults import DataError


@dataclass(frozen=True)
class RowSamples:
    """Training or validation samples seen from one rank; `ahead` None: read when asked for."""

    rows: Rows
    order: Order
    config: ModuleConfig
    share: Share
    training: bool
    ahead: Ahead | None = None

    def microbatches(self, consumed_samples: int, reads: bool = True) -> Iterator[Batch | None]:
        """This rank's microbatches of the global batch that begins at `consumed_samples`.

        None in the place of each if the rank need not read. Raises DataError, InvalidInputError.
        """
        if not reads:
            yield from (None for _ in self.of_step(consumed_samples))
        elif self.ahead is not None:
            for batch in self.ahead.of_step(consumed_samples):
                yield batch.to(self.share.device)
        else:
            for samples in self.of_step(consumed_samples):
                yield self.read(samples).to(self.share.device)

    def of_step(self, consumed_samples: int) -> Iterator[range]:
        """Numbers of the samples of each of this rank's microbatches."""
        config = self.config
        return self.share.deal(consumed_samples, config.micro_batch_size, config.microbatches)

    def read(self, samples: range) -> Batch:
        """In this process, into CPU memory. Raises DataError, InvalidInputError."""
        try:
            return self.rows.read(self.order.of(samples), samples, training=self.training)
        except (OSError, ValueError) as error:
            words = f"samples {samples[0]} to {samples[-1]} cannot be read: {error}"
            raise DataError(words) from error

    def attempt(self, samples: range) -> Batch | Unreadable:
        """The same in another process, where exceptions would lose their kind on the way."""
        try:
            return self.read(samples)
        except DataError as error:
            return Unreadable(str(error))
