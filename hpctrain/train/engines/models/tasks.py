"""Compute the loss of a batch for each task: the sum of its losses, and their number.

The loss of a step is the mean over all labels of the global batch, however it is distributed over
ranks and microbatches. Belongs here: the forward pass of each task, masking, and sums over ranks
and microbatches. Does not belong here: gradients.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.training import TrainConfig
from hpctrain.spec.model import SpanLengths

# ------------------------------------------------------------------------------------------------
# Choose and mask tokens for masked language modeling, or spans of them for span corruption, by the
# seed and the sample's number alone.


# Devlin et al. 2018 (arXiv 1810.04805), section 3.1: 15% of all tokens are predicted; of these 80%
# are masked, 10% become another token, and 10% stay.
PREDICTED, MASKED, CHANGED = 0.15, 0.8, 0.1
_MASK = "[MASK]"


@dataclass(frozen=True)
class Masking:
    """`special` tokens are never predicted; `mask` replaces masked tokens."""

    seed: int
    vocab: int
    mask: int
    special: tuple[int, ...]

    def apply(self, tokens: Any, samples: range) -> tuple[Any, Any]:
        """Return (the model's input, True where it has to predict), [batch, sequence] each.

        Numbers are drawn on the CPU, so that every device masks the same tokens.
        """
        draws = []
        for sample in samples:
            generator, length = _generator(self.seed, sample), tokens.shape[1]
            selection, action = torch.rand((2, length), generator=generator)
            others = torch.randint(self.vocab, (length,), generator=generator)
            draws.append((selection, action, others))
        selection, action, others = (
            torch.stack(part).to(tokens.device) for part in zip(*draws, strict=True)
        )
        special = torch.tensor(self.special, dtype=tokens.dtype, device=tokens.device)
        predicted = (selection < PREDICTED) & ~torch.isin(tokens, special)
        visible = torch.where(predicted & (action < MASKED), self.mask, tokens)
        changed = predicted & (action >= MASKED) & (action < MASKED + CHANGED)
        return torch.where(changed, others, visible), predicted


def _generator(seed: int, sample: int) -> torch.Generator:
    """Return random numbers of one sample, drawn on the CPU, so that they are those everywhere."""
    digest = hashlib.sha256(f"{seed} {sample}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def masking_of(config: TrainConfig) -> Masking:
    """Return the masking by the run's tokenizer; without one (mock data) the last token is the
    mask.

    Raises InvalidInputError for a tokenizer that has no [MASK].
    """
    vocab = config.vocab_size
    if config.tokenizer is None:
        return Masking(config.seed, vocab, vocab - 1, (vocab - 1,))
    special = special_tokens(Path(config.tokenizer))
    if _MASK not in special:
        raise InvalidInputError(
            [
                Problem(
                    f"the tokenizer has no {_MASK}, which masked language modeling needs",
                    config.tokenizer,
                    hint=f"add {_MASK} to its special tokens, and prepare the data with it",
                )
            ]
        )
    return Masking(config.seed, vocab, special[_MASK], tuple(sorted(special.values())))


# Tokens that span corruption needs, by their names in T5's vocabularies.
_START, _END, _SENTINEL = "<pad>", "</s>", "<extra_id_{}>"


@dataclass(frozen=True)
class SpanCorruption:
    """Each sentinel replaces one span of a text; `start` and `end` are around what is written.

    Raffel et al. 2020 (arXiv 1910.10683), section 3.1.4, and `random_spans_noise_mask` of
    google-research/text-to-text-transfer-transformer (t5/data/preprocessors.py).
    """

    seed: int
    lengths: SpanLengths
    sentinels: tuple[int, ...]
    start: int
    end: int

    def apply(self, tokens: Any, samples: range) -> tuple[Any, Any, Any]:
        """Return what the encoder reads, what the decoder reads, and what it has to predict.

        The first is [batch, inputs], the others [batch, targets].
        """
        left_out = torch.stack([self._left_out(sample) for sample in samples])
        labels = self._marked(tokens, ~left_out)
        start = labels.new_full((len(labels), 1), self.start)
        return self._marked(tokens, left_out), torch.cat([start, labels[:, :-1]], 1), labels

    def _left_out(self, sample: int) -> Any:
        """Draw the spans of a sample: a text that is kept and one that is not take turns."""
        generator, (text, left_out, spans) = _generator(self.seed, sample), self.lengths

        def parts(items: int) -> Any:
            cuts = torch.randperm(items - 1, generator=generator)[: spans - 1].sort().values + 1
            return functional.pad(cuts, (1, 0)).diff(append=torch.tensor([items]))

        lengths = torch.stack([parts(text - left_out), parts(left_out)], 1).flatten()
        return (torch.arange(2 * spans) % 2 == 1).repeat_interleave(lengths)

    def _marked(self, tokens: Any, replaced: Any) -> Any:
        """Put one sentinel in place of each replaced span of `tokens`, and the end behind all."""
        first = replaced & ~functional.pad(replaced, (1, 0))[:, :-1]
        places = (first | ~replaced).nonzero()[:, 1].view(len(tokens), -1)
        sentinels = torch.tensor(self.sentinels)[first.cumsum(1) - 1]
        marks = torch.where(first, sentinels, -1).gather(1, places).to(tokens.device)
        marked = torch.where(marks < 0, tokens.gather(1, places.to(tokens.device)), marks)
        return functional.pad(marked, (0, 1), value=self.end)


def corruption_of(config: ModuleConfig) -> SpanCorruption:
    """Return the span corruption by the run's tokenizer; without one (mock data) the last tokens
    of the vocabulary are sentinels.

    Raises InvalidInputError for a tokenizer that has too few of them.
    """
    lengths, vocab = config.model.spans, config.vocab_size
    if config.tokenizer is None:
        sentinels = tuple(vocab - 1 - n for n in range(lengths.spans))
        return SpanCorruption(config.seed, lengths, sentinels, start=0, end=1)
    special = special_tokens(Path(config.tokenizer))
    names = [_START, _END, *map(_SENTINEL.format, range(lengths.spans))]
    missing = [name for name in names if name not in special]
    if missing:
        message = f"the tokenizer has no {missing[0]}: span corruption of {lengths.inputs} tokens"
        message += f" needs {_START}, {_END}, and one {_SENTINEL.format('N')} for each of "
        hint = "add them to its special tokens, or give a shorter `seq`"
        problem = Problem(f"{message}{lengths.spans} spans", config.tokenizer, hint=hint)
        raise InvalidInputError([problem])
    start, end, *sentinels_found = (special[name] for name in names)
    return SpanCorruption(config.seed, lengths, tuple(sentinels_found), start, end)


def special_tokens(tokenizer: Path) -> dict[str, int]:
    """Read the special tokens and their ids from a tokenizer.json. Raises InvalidInputError."""
    try:
        added = json.loads(tokenizer.read_bytes())["added_tokens"]
        return {token["content"]: int(token["id"]) for token in added if token.get("special")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        missing = isinstance(error, OSError)
        problem = Problem(f"cannot be read: {error}", str(tokenizer), node_dependent=missing)
        raise InvalidInputError([problem]) from error


# -- Sum losses over the microbatches and ranks of a global batch --------------------------------
# The loss of a step is the mean over all labels of the global batch, however it is distributed
# over ranks and microbatches.


def nominal_labels(config: ModuleConfig, samples: range) -> float:
    """Return the number of labels in a global batch without padding.

    Losses are divided by it before the actual number is known. In pretraining, where every token
    has a label, both are the same.
    """
    return float(len(samples) * config.labels_per_sample)


class LossTotals:
    """Sums [losses, labels] of one step's microbatches, and with the last one over all ranks.

    `group`: the ranks to sum over; None: all ranks.
    """

    def __init__(self, microbatches: int, device: torch.device, group: Any = None) -> None:
        self._remaining = microbatches
        self._totals = torch.zeros(2, device=device)
        self._group = group
        self._sum: Any = None

    def add(self, loss_sum: Any, count: Any) -> None:
        """Add one microbatch; the last one starts the sum over ranks, beside its backward pass."""
        self._totals += torch.stack([loss_sum.detach().float(), count.float()])
        self._remaining -= 1
        if self._remaining == 0:
            self._sum = dist.all_reduce(self._totals, group=self._group, async_op=True)

    def wait(self) -> Any:
        """Return the sums over all ranks; call it after the last microbatch."""
        self._sum.wait()
        return self._totals


Loss = Callable[[Any, Any], tuple[Any, ...]]
# logits, labels, mask -> (sum of losses, number of them), as `masked_sum`
TokenLosses = Callable[[Any, Any, Any], tuple[Any, Any]]


def loss_of(config: ModuleConfig, token_losses: TokenLosses | None = None) -> Loss:
    """Return a function of module and batch that returns (sum of losses, number of them).

    These are two fp32 scalars; for a classifier in evaluation mode, the number of correct
    predictions is a third one. `token_losses` replaces `masked_sum` where a rank has a part of
    each token's logits only.

    The batch has `tokens`, `labels`, `loss_mask` and `positions` [batch, sequence] for language
    modeling. For classification it has `labels` [batch] and either `pixels` [batch, colors, side,
    side] or `tokens` and `attention_mask` [batch, sequence].
    """
    if config.task == "classification":
        reads_images = config.model.reads_images

        def classification(module: Any, batch: Any) -> tuple[Any, ...]:
            if reads_images:
                logits = module(pixel_values=batch.pixels).logits
            else:
                logits = module(input_ids=batch.tokens, attention_mask=batch.attention_mask).logits
            loss = masked_sum(logits, batch.labels, torch.ones_like(batch.labels))
            if module.training:
                return loss
            return (*loss, (logits.argmax(-1) == batch.labels).sum())

        return classification
    if config.task == "masked_language_modeling":
        masking = masking_of(config)

        def masked_modeling(module: Any, batch: Any) -> tuple[Any, Any]:
            visible, predicted = masking.apply(batch.tokens, batch.samples)
            return masked_sum(module(input_ids=visible).logits, batch.tokens, predicted)

        return masked_modeling
    if config.task == "span_corruption":
        corruption = corruption_of(config)

        def span_modeling(module: Any, batch: Any) -> tuple[Any, Any]:
            read, written, labels = corruption.apply(batch.tokens, batch.samples)
            logits = module(input_ids=read, decoder_input_ids=written, use_cache=False).logits
            return masked_sum(logits, labels, torch.ones_like(labels))

        return span_modeling
    sum_losses = token_losses or masked_sum
    packed = config.data_format == "packed" or config.documents == "separate"

    def causal_modeling(module: Any, batch: Any) -> tuple[Any, Any]:
        # Labels are the next tokens: GPTDataset has shifted them already. With several texts in
        # one sequence, positions restart with each text. Without a mask, transformers finds the
        # borders by the positions and attends within each text only (masking_utils.py,
        # find_packed_sequence_indices).
        positions = dict(position_ids=batch.positions) if packed else {}
        logits = module(input_ids=batch.tokens, use_cache=False, **positions).logits
        return sum_losses(logits, batch.labels, batch.loss_mask)

    return causal_modeling


def masked_sum(logits: Any, labels: Any, mask: Any) -> tuple[Any, Any]:
    """Sum the cross entropy where `mask` is 1; returns (sum, number of labels) in fp32.

    logits [..., classes], the others without the last axis. In fp32, because sums of
    log-probabilities over a large vocabulary lose too much precision in bf16.
    """
    losses = functional.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), reduction="none"
    )
    weights = mask.flatten().to(torch.float32)
    return (losses * weights).sum(), weights.sum()
