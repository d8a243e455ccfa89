"""Choose and mask tokens for masked language modeling, by the seed and the sample's number alone.

Belongs here: choosing and masking. Does not belong here: the loss (see `tasks`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.training import TrainConfig

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
            digest = hashlib.sha256(f"{self.seed} {sample}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            length = tokens.shape[1]
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


def special_tokens(tokenizer: Path) -> dict[str, int]:
    """Read the special tokens and their ids from a tokenizer.json. Raises InvalidInputError."""
    try:
        added = json.loads(tokenizer.read_bytes())["added_tokens"]
        return {token["content"]: int(token["id"]) for token in added if token.get("special")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        missing = isinstance(error, OSError)
        problem = Problem(f"cannot be read: {error}", str(tokenizer), node_dependent=missing)
        raise InvalidInputError([problem]) from error
