"""The jobs: models of known shape, data made up, each with an engine and what a user would set.

Belongs here: specs as words. Does not belong here: running them.
"""

from __future__ import annotations

from dataclasses import dataclass

_GPT = ("model.family=gpt", "model.vocab=50257", "model.seq=2048")
_LLAMA = ("model.family=llama", "model.vocab=32000", "model.seq=2048")
# Brown et al. 2020 (arXiv:2005.14165), table 2.1, with heads of 128
_GPT_1300M = (*_GPT, "model.layers=24", "model.hidden=2048", "model.heads=16")
# TinyLlama (arXiv:2401.02385)
_LLAMA_1100M = (
    *(*_LLAMA, "model.layers=22", "model.hidden=2048", "model.heads=32"),
    *("model.kv_heads=4", "model.ffn=5632"),
)
# Touvron et al. 2023 (arXiv:2302.13971), table 2
_LLAMA_7B = (
    *(*_LLAMA, "model.layers=32", "model.hidden=4096", "model.heads=32", "model.ffn=11008"),
)
# Devlin et al. 2019 (arXiv:1810.04805)
_BERT_LARGE = (
    *("model.family=bert", "model.layers=24", "model.hidden=1024", "model.heads=16"),
    *("model.vocab=30522", "model.seq=512", "task=masked_language_modeling"),
)
# He et al. 2016 (arXiv:1512.03385)
_RESNET_50 = (
    *("model.family=resnet", "model.layers=50", "model.vocab=1000", "model.image=224"),
    *("recompute=none",),
)
_ZERO = ("engine.name=deepspeed", "optimizer.zero=2")


@dataclass(frozen=True)
class Case:
    """One job; `settings` as `--set` takes them, `micro` samples in each of two microbatches."""

    name: str
    settings: tuple[str, ...]
    micro: int

    def settings_with(self, micro: int) -> tuple[str, ...]:
        return (*self.settings, f"batch.micro={micro}", f"batch.global={2 * micro}")


def _case(name: str, *settings: str, micro: int) -> Case:
    return Case(name, settings, micro)


CASES: tuple[Case, ...] = (
    _case("gpt-1.3b ddp", *_GPT_1300M, "engine.name=ddp", "recompute=none", micro=8),
    _case("gpt-1.3b fsdp", *_GPT_1300M, "engine.name=fsdp", "recompute=none", micro=8),
    _case("gpt-1.3b fsdp full", *_GPT_1300M, "engine.name=fsdp", "recompute=full", micro=16),
    _case("gpt-1.3b zero2", *_GPT_1300M, *_ZERO, "recompute=none", micro=8),
    _case("gpt-1.3b megatron", *_GPT_1300M, "recompute=none", micro=4),
    _case("gpt-1.3b megatron full", *_GPT_1300M, "recompute=full", micro=8),
    _case("llama-1.1b fsdp", *_LLAMA_1100M, "engine.name=fsdp", "recompute=none", micro=8),
    _case("llama-1.1b megatron", *_LLAMA_1100M, "recompute=none", micro=4),
    _case("bert-large ddp", *_BERT_LARGE, "engine.name=ddp", "recompute=none", micro=64),
    _case("resnet-50 ddp", *_RESNET_50, "engine.name=ddp", micro=256),
    _case("llama-7b fsdp full", *_LLAMA_7B, "engine.name=fsdp", "recompute=full", micro=8),
)
