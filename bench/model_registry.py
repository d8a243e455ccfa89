"""The registry of public models: its schema, its file, and which entry a name means.

Belongs here: what `public_models.yaml` may say. Does not belong here: the figures (they stand in
the YAML with their sources), rows of published tables (`published_models`), parameter and FLOP
counts (`hpctrain.plan`).
"""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field
from ruamel.yaml import YAML

from hpctrain.spec.document import Document

REGISTRY = Path(__file__).with_name("public_models.yaml")
Family = Literal["gpt", "llama", "bert", "t5", "vit", "resnet", "hybrid"]
Norm = Literal["layernorm", "rmsnorm", "batchnorm"]


class Moe(Document):
    """Mixture of experts. Sizes are of one expert; `latent` is LatentMoE's width (0: hidden)."""

    experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    every: int = 1  # one MoE layer in so many layers
    latent: int = 0
    router: str = ""


class Mla(Document):
    """Multi-head latent attention, DeepSeek-V2 (arXiv 2405.04434) section 2.1; q_rank 0: full."""

    q_rank: int = 0
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


class Window(Document):
    """Sliding-window attention: `size` tokens in all layers but one of every `every`.

    `every` 2 alternates window and full; 6 is five windowed, one full; 0 is a window everywhere.
    """

    size: int
    every: int = 0


class Hybrid(Document):
    """Layers of a Mamba-2 hybrid, which have one mixer each, and the sizes of the SSM.

    The inner width is heads x head_dim. Parameters of one Mamba layer, without norms and biases:
    hidden x (2 x inner + 2 x groups x state + heads) + conv x (inner + 2 x groups x state)
    + 3 x heads + inner x hidden (Megatron-LM, megatron/core/ssm/mamba_mixer.py).

    FLOPs of one Mamba-2 layer in the forward pass, per token (state-space duality: Dao and Gu,
    arXiv 2405.21060, section 6; the same terms as Megatron-Bridge training/utils/flop_utils.py,
    `mamba_layer_flops`), with H heads, P head_dim, N state, G groups, K conv, Q chunk:

      projections   2 hidden (2 H P + 2 G N + H) + 2 H P hidden
      convolution   2 K (H P + 2 G N)
      in the chunk  Q (G N + H P)          C B^T per group and its product with X, causal half
      states        2 H P N + 2 H P N      build B X per chunk; read C h

    Megatron counts the scan as 7 H P N instead of the last two lines. Backward is twice forward.
    """

    attention: int
    mamba: int
    mlp: int = 0
    moe: int = 0
    state: int
    heads: int
    head_dim: int
    groups: int = 8
    conv: int = 4
    chunk: int = 128

    def scaled(self, ratio: float) -> Hybrid:
        """The same mix with `ratio` times as many layers, for proxies."""
        counts = {name: getattr(self, name) for name in ("attention", "mamba", "mlp", "moe")}
        return self.model_copy(update={k: math.ceil(n * ratio) for k, n in counts.items()})


class Entry(Document):
    """One public model. `match` are regular expressions, see `Registry.find`."""

    match: tuple[str, ...]
    source: str
    uncertain: str = ""
    family: Family = "llama"
    params_b: float | None = None
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int
    seq: int | None = None
    gated: bool = True
    norm: Norm = "rmsnorm"
    norms_per_layer: int = 2
    tied: bool = False
    causal: bool = True
    bias: bool = False
    positions: Literal["rope", "learned", "alibi", "none", "relative"] = "rope"
    decoder_layers: int = 0
    image: int = 0
    patch: int = 0
    mtp_layers: int = 0
    mtp_shared: bool = False
    moe: Moe | None = None
    mla: Mla | None = None
    window: Window | None = None
    hybrid: Hybrid | None = None


class RegistryFile(Document):
    """The whole of `public_models.yaml`."""

    styles: dict[str, dict[str, object]] = Field({}, description="Anchors of merged keys; not read")
    models: dict[str, Entry] = Field(min_length=1)


class Registry(dict[str, Entry]):
    """Entries by name."""

    def find(self, name: str) -> str | None:
        """The key of the entry that `name` means, or None.

        Names are compared in lower case with runs of blanks, `_`, `/`, brackets and `-` as one
        `-`. An entry matches where one of its expressions is found between characters that are
        neither letters nor digits; the longest such text wins, and of equals the first entry.
        """
        plain = normal(name)
        best, length = None, 0
        for key, patterns in self._patterns().items():
            for pattern in patterns:
                for found in pattern.finditer(plain):
                    if found.end() - found.start() > length:
                        best, length = key, found.end() - found.start()
        return best

    def _patterns(self) -> dict[str, list[re.Pattern[str]]]:
        return {
            key: [re.compile(rf"(?<![a-z0-9.])(?:{p})(?![a-z0-9]|\.\d)") for p in entry.match]
            for key, entry in self.items()
        }


def normal(name: str) -> str:
    """`Qwen3_30B a3B (tokendrop)` -> `qwen3-30b-a3b-tokendrop`."""
    return re.sub(r"[\s_/()\[\]:,-]+", "-", name.lower()).strip("-")


@cache
def load_registry(path: Path = REGISTRY) -> Registry:
    """The registry; raises pydantic's ValidationError for a wrong file."""
    content = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    return Registry(RegistryFile.model_validate(content).models)
