"""A tiny Llama with random weights as a Hugging Face directory: what tests and demos serve.

    python -m hpctrain.serve.tiny_llama DIRECTORY

Nothing is downloaded, and the same shape and seed give the same bytes. Belongs here: the files that
engines read of a model. Does not belong here: models that learn (see `hpctrain.train`), weights of
runs (see `hpctrain.convert`). NumPy, safetensors and tokenizers are imported where they are used.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
_ALPHABET_TOKENS = 256
# The deviation that Llama's own configuration names (transformers, LlamaConfig.initializer_range).
_WEIGHT_DEVIATION = 0.02


@dataclass(frozen=True)
class TinyShape:
    """The shape of a tiny Llama, with names as in `config.json` of transformers."""

    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    max_position_embeddings: int = 2048
    vocab_size: int = 512

    def __post_init__(self) -> None:
        if self.vocab_size < _ALPHABET_TOKENS + len(_SPECIAL_TOKENS):
            raise ValueError(f"vocab_size {self.vocab_size} is below the bytes and their marks")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def write_tiny_llama(directory: Path, shape: TinyShape | None = None, seed: int = 1) -> None:
    """Write config, weights and tokenizer of a random Llama into a directory."""
    from safetensors.numpy import save_file

    shape = shape or TinyShape()
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config(shape))
    _write_json(directory / "generation_config.json", _token_ids())
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(shape))
    (directory / "tokenizer.json").write_text(_tokenizer_json(shape.vocab_size), "utf-8")
    weights_path = directory / "model.safetensors"
    save_file(_weights(shape, seed), weights_path, metadata={"format": "pt"})
    weights_path.chmod(0o644)  # safetensors keeps it to its owner


def _token_ids() -> dict[str, Any]:
    return {
        "bos_token_id": _SPECIAL_TOKENS.index("<|im_start|>"),
        "eos_token_id": _SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": _SPECIAL_TOKENS.index("<|pad|>"),
    }


def _config(shape: TinyShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": _WEIGHT_DEVIATION,
        "head_dim": shape.head_dim,
        **vars(shape),
        **_token_ids(),
    }


def _tokenizer_config(shape: TinyShape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
        "chat_template": _TEMPLATE,
    }


def _tokenizer_json(vocab_size: int) -> str:
    """Build a byte-level tokenizer: marks, the 256 bytes, then words that no text contains.

    The words fill the vocabulary, so that every id that the model may sample is a token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    filling = vocab_size - len(_SPECIAL_TOKENS) - len(alphabet)
    words = [*_SPECIAL_TOKENS, *alphabet, *(f"Ġw{number}" for number in range(filling))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in _SPECIAL_TOKENS])
    return str(tokenizer.to_str())


def _weights(shape: TinyShape, seed: int) -> dict[str, Any]:
    """Draw every matrix of LlamaForCausalLM; norms are ones."""
    import numpy

    draws = numpy.random.default_rng(seed)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (shape.vocab_size, hidden)}
    for number in range(shape.num_hidden_layers):
        shapes.update({f"model.layers.{number}.{name}": size for name, size in layer.items()})
    shapes |= {"model.norm": (hidden,), "lm_head": (shape.vocab_size, hidden)}
    deviation = numpy.float32(_WEIGHT_DEVIATION)
    return {
        f"{name}.weight": (
            numpy.ones(size, numpy.float32)
            if len(size) == 1
            else draws.standard_normal(size, numpy.float32) * deviation
        )
        for name, size in shapes.items()
    }


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", "utf-8")


def main(words: list[str]) -> int:
    """Write a tiny Llama into the directory that the command line names."""
    if len(words) != 1:
        print("usage: python -m hpctrain.serve.tiny_llama DIRECTORY", file=sys.stderr)
        return 2
    write_tiny_llama(Path(words[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
