"""What InferenceX (formerly InferenceMAX) ran: layouts and speculation that its tables leave out.

Belongs here: reading `serving_recipes.csv` and finding the configuration of a published row. Does
not belong here: rows (`serving_rows`), measurements.

The file holds the distinct configurations of `.github/configs/nvidia-master.yaml` in the history
of the public repository SemiAnalysisAI/InferenceX from 2025-11-03 to 2026-04-27. `prefill` and
`decode` are replicas x tp / ep, with /dp where attention is data parallel; `streams` a list, or
first-last where each doubling was run; `drafted` the tokens that multi-token prediction drafts
(of single-node scripts: 3, with data parallel attention 1, SGLang 2); `versions` of the
image; `first_seen` the day of the commit, on which the benchmark ran what was new.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RECIPES = Path(__file__).with_name("serving_recipes.csv")
PREFIXES = (
    ("dsr1", r"deepseek-(r1|v3)"),
    ("gptoss", r"gpt-oss-120b"),
    ("minimaxm2.5", r"minimax-m2\.5"),
    ("qwen3.5", r"qwen3\.5-397b"),
    ("kimik2.5", r"kimi-k2\.5"),
    ("glm5", r"glm-5"),
    ("70b", r"llama-3\.\d-70b"),
)


@dataclass(frozen=True)
class PoolRecipe:
    """Replicas of one kind."""

    replicas: int
    tp: int
    ep: int
    dp: bool

    @property
    def group(self) -> int:
        """GPUs of one replica; some configurations have ep for tp where attention is parallel."""
        return max(self.tp, self.ep) if self.dp else self.tp

    @property
    def gpus(self) -> int:
        return self.replicas * self.group


@dataclass(frozen=True)
class Recipe:
    """One configuration of the benchmark; `prefill` is None where one replica does both."""

    drafted: int
    streams: str
    prefill: PoolRecipe | None
    decode: PoolRecipe
    versions: tuple[str, ...]
    since: str

    def ran(self, streams: float) -> bool:
        """Tell whether the benchmark ran it with so many streams, or so many per decode replica.

        Some configurations list the streams of one decode replica (4 of nine are 36 in the table).
        """
        span = re.fullmatch(r"(\d+)-(\d+)", self.streams)
        if span:
            return int(span.group(1)) <= streams <= int(span.group(2))
        listed = [int(text) for text in self.streams.split()]
        return streams in listed or streams / self.decode.replicas in listed

    @property
    def gpus(self) -> int:
        return self.decode.gpus + (self.prefill.gpus if self.prefill else 0)


def recipes_of(
    model: str, precision: str, gpu: str, framework: str, lengths: tuple[float, float]
) -> tuple[Recipe, ...]:
    """List what the benchmark ran of a model with these lengths; empty where it ran none."""
    plain = model.lower()
    prefix = next((key for key, pattern in PREFIXES if re.search(pattern, plain)), "")
    key = (prefix, precision, gpu.lower().split("_")[0], framework, *lengths)
    return _by_key().get(key, ())


@cache
def _by_key() -> dict[tuple[object, ...], tuple[Recipe, ...]]:
    found: dict[tuple[object, ...], tuple[Recipe, ...]] = {}
    with RECIPES.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            names = ("model", "precision", "gpu", "framework")
            key = (*(line[name] for name in names), float(line["isl"]), float(line["osl"]))
            recipe = Recipe(
                drafted=int(line["drafted"]),
                streams=line["streams"],
                prefill=_pool(line["prefill"]) if line["prefill"] else None,
                decode=_pool(line["decode"]),
                versions=tuple(line["versions"].split()),
                since=line["first_seen"],
            )
            found[key] = (*found.get(key, ()), recipe)
    return found


def _pool(text: str) -> PoolRecipe:
    matched = re.fullmatch(r"(\d+)x(\d+)/(\d+)(/dp)?", text)
    assert matched, text
    replicas, tp, ep = (int(matched.group(n)) for n in (1, 2, 3))
    return PoolRecipe(replicas, tp, ep, dp=bool(matched.group(4)))
