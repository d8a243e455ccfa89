"""Which words a model has to guess: a function of the seed and the sample's number alone.

Belongs here: choosing and hiding them. Does not belong here: the loss (see `tasks`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain.engines.training import TrainConfig
from hpctrain.errors import InvalidInputError, Problem

# Devlin et al. 2018 (arXiv 1810.04805), section 3.1: of all words 15% are guessed; of these 80%
# are hidden, 10% become another word, and 10% stay.
GUESSED, HIDDEN, CHANGED = 0.15, 0.8, 0.1
_MASK = "[MASK]"


@dataclass(frozen=True)
class Masking:
    """`special` tokens are never guessed; `mask` takes the place of hidden words."""

    seed: int
    vocab: int
    mask: int
    special: tuple[int, ...]

    def apply(self, tokens: Any, samples: range) -> tuple[Any, Any]:
        """(what the model sees, 1 where it has to guess), each [batch, sequence] as `tokens`.

        Numbers are drawn on the CPU, so that every device hides the same words.
        """
        draws = [self._draw(number, tokens.shape[1]) for number in samples]
        guessed, kind, words = (
            torch.stack(part).to(tokens.device) for part in zip(*draws, strict=True)
        )
        special = torch.tensor(self.special, dtype=tokens.dtype, device=tokens.device)
        chosen = (guessed < GUESSED) & ~torch.isin(tokens, special)
        shown = torch.where(chosen & (kind < HIDDEN), self.mask, tokens)
        changed = chosen & (kind >= HIDDEN) & (kind < HIDDEN + CHANGED)
        return torch.where(changed, words, shown), chosen

    def _draw(self, sample: int, length: int) -> tuple[Any, Any, Any]:
        digest = hashlib.sha256(f"{self.seed} {sample}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        guessed, kind = torch.rand((2, length), generator=generator)
        return guessed, kind, torch.randint(self.vocab, (length,), generator=generator)


def masking_of(config: TrainConfig) -> Masking:
    """By the run's tokenizer; without one (made-up data) the last token stands for the mask.

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


def special_tokens(tokenizer: Path) -> dict[str, int]:
    """Special tokens and their ids from a tokenizer.json. Raises InvalidInputError."""
    try:
        added = json.loads(tokenizer.read_bytes())["added_tokens"]
        return {one["content"]: int(one["id"]) for one in added if one.get("special")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        missing = isinstance(error, OSError)
        problem = Problem(f"cannot be read: {error}", str(tokenizer), node_dependent=missing)
        raise InvalidInputError([problem]) from error
