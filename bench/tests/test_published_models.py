"""The registry of public models and the shapes of rows."""

from __future__ import annotations

import pytest

from bench.model_registry import Entry, Registry, load_registry
from bench.published import PublishedRow
from bench.published_models import UnknownModel, model_of


def row(**cells: object) -> PublishedRow:
    return PublishedRow(**({"line": 2, "gpu": "H100-80GB SXM"} | cells))


def parameters(entry: Entry) -> float:
    """Parameters in 10^9 from an entry, counted here on its own, without norms and biases."""
    h, dim, groups = entry.hidden, entry.head_dim or entry.hidden // entry.heads, entry.kv_heads
    attention = 2 * h * dim * (entry.heads + (groups or entry.heads))
    if mla := entry.mla:
        query = entry.heads * (mla.nope_dim + mla.rope_dim)
        attention = (h + query) * mla.q_rank if mla.q_rank else h * query
        attention += h * (mla.kv_rank + mla.rope_dim) + entry.heads * mla.value_dim * h
        attention += mla.kv_rank * entry.heads * (mla.nope_dim + mla.value_dim)
    matrices = 3 if entry.gated else 2
    dense, experts = matrices * h * entry.ffn, 0
    if moe := entry.moe:
        width = moe.latent or h
        experts = moe.experts * (matrices * width * moe.ffn + h) + matrices * h * moe.shared_ffn
        experts += 2 * h * width if moe.latent else 0
    if mix := entry.hybrid:
        inner, wide = mix.heads * mix.head_dim, 2 * mix.groups * mix.state
        mamba = h * (3 * inner + wide + mix.heads) + mix.conv * (inner + wide) + 3 * mix.heads
        body = mix.attention * attention + mix.mamba * mamba + mix.mlp * dense + mix.moe * experts
    else:
        sparse = (entry.layers - moe.dense_layers) // moe.every if moe else 0
        body = entry.layers * attention + sparse * experts + (entry.layers - sparse) * dense
    body += entry.decoder_layers * (2 * attention + dense)
    embeddings = 1 if entry.tied or entry.family == "vit" else 2
    return (body + embeddings * h * entry.vocab) / 1e9


REGISTRY = load_registry()
# Names that are rounder than they look, and parameters not counted here: positions, biases, norms
# of small models; mHC and DeltaNet of the entries that are marked uncertain.
LOOSE = {
    **dict.fromkeys(("gpt3-126m", "opt-125m", "mpt-125m", "vit-b-16", "glm-130b"), 0.014),
    **dict.fromkeys(("deepseek-v4-flash", "qwen3-next-80b-a3b", "qwen3.5-397b-a17b"), 0.014),
    "nemo-t5-3b": 0.08,
}


def tolerance(key: str, count: float) -> float:
    """0.6%, or the rounding of a count of one or two digits."""
    digits = f"{count:g}".replace(".", "").strip("0")
    return LOOSE.get(key, 0.006 if len(digits) > 2 else 0.024)


COUNTED = sorted(k for k, e in REGISTRY.items() if e.params_b and e.family != "resnet")


@pytest.mark.parametrize("key", COUNTED)
def test_entry_has_the_published_number_of_parameters(key: str) -> None:
    """The shape gives the publisher's count; a wrong figure in an entry shows here."""
    entry = REGISTRY[key]
    assert parameters(entry) == pytest.approx(
        entry.params_b, rel=tolerance(key, entry.params_b or 0)
    )


@pytest.mark.parametrize("key", sorted(k for k, e in REGISTRY.items() if e.hybrid))
def test_hybrid_layers_add_up(key: str) -> None:
    entry = REGISTRY[key]
    mix = entry.hybrid
    assert mix is not None
    assert mix.attention + mix.mamba + mix.mlp + mix.moe == entry.layers


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("DeepSeekV3 (w/o MTP)", "deepseek-v3"),
        ("DeepSeek-V2 4-layer", "deepseek-v2"),
        ("DeepSeek-V2-Lite", "deepseek-v2-lite"),
        ("Qwen3_235B_a22B (tokendrop)", "qwen3-235b-a22b"),
        ("Qwen2.5-7B", "qwen2.5-7b"),
        ("Qwen2 7B", "qwen2-7b"),
        ("LLAMA3.1_405B", "llama3-405b"),
        ("Llama 2 70B LoRA", "llama2-70b"),
        ("llama2_70b_lora", "llama2-70b"),
        ("LLaMA 30B", "llama-30b"),
        ("Llama4 Maverick", "llama4-maverick"),
        ("Llama-4-Scout-17B-16E", "llama4-scout"),
        ("meta-llama/Llama-3.1-8B", "llama3-8b"),
        ("GPT OSS 120B", "gpt-oss-120b"),
        ("gpt-oss-20b", "gpt-oss-20b"),
        ("GPT3-175B", "gpt3-175b"),
        ("GPT-3 175B", "gpt3-175b"),
        ("Mixtral 8x7B", "mixtral-8x7b"),
        ("Qwen3 MoE 30B", "qwen3-30b-a3b"),
        ("Nemotron V3 Super 120B (26.02)", "nemotron-3-super"),
        ("Nemotron V3 Ultra 550B", "nemotron-3-ultra"),
        ("Turing-NLG 530B", "mt-nlg-530b"),
        ("Turing-NLG", "turing-nlg-17b"),
        ("MIXTRAL_8x22B", "mixtral-8x22b"),
        ("Nemotron_3_Nano", "nemotron-3-nano"),
        ("Nemotron3-8B", "nemotron3-8b"),
        ("Nemotron_3_5_Lightning", "nemotron-3.5-lightning"),
        ("Nemotron-H 8B", "nemotron-h-8b"),
        ("Nemotron4-340B", "nemotron4-340b"),
        ("Kimi-K2", "kimi-k2"),
        ("Grok-1 314B", "grok-1"),
        ("Gemma 2 27B", "gemma2-27b"),
        ("Gemma 3 27B", "gemma3-27b"),
        ("BERT-large", "bert-large"),
        ("ViT-L/16", "vit-l-16"),
        ("ResNet-50", "resnet-50"),
        ("T5-11B", "t5-11b"),
        ("MPT-760m", "mpt-760m"),
        ("MT-NLG 530B", "mt-nlg-530b"),
        # not GPT-3, and not a part of a longer number
        ("GPT 3.6B", None),
        ("GPT 30B", None),
        ("GPT 1.75B", None),
        ("GPT-3 6.7B", None),
        ("PaLM 62B", None),
        ("BERT-4B", None),
        ("175B", "gpt3-175b"),
        ("OPT-175B", "opt-175b"),
        ("an unheard-of model", None),
    ],
)
def test_names(name: str, key: str | None) -> None:
    assert REGISTRY.find(name) == key


def test_every_entry_is_found_by_its_own_key() -> None:
    """No expression of one entry is shadowed by another's."""
    keys = set(REGISTRY) - {"moe-mla-mtp-proxy", "gpt-22b-korthikanti"}
    assert {key: REGISTRY.find(key) for key in keys} == {key: key for key in keys}


def test_the_first_of_equal_entries_wins() -> None:
    entry = REGISTRY["llama-7b"]
    assert Registry({"b": entry, "a": entry}).find("LLaMA 7B") == "b"


class TestShapes:
    def test_columns_overrule_the_entry(self) -> None:
        shape = model_of(row(model="Llama3-405B 4-layer", num_layers=4, kv_heads=16, heads=128))
        assert (shape.layers, shape.kv_heads, shape.hidden, shape.gated) == (4, 16, 16384, True)
        assert shape.entry == "llama3-405b"
        assert shape.filled == ()

    def test_ffn_column_of_a_model_of_experts_only(self) -> None:
        shape = model_of(row(model="Qwen3_30B_a3B", ffn_hidden=768))
        assert shape.moe is not None
        assert (shape.moe.ffn, shape.moe.experts) == (768, 128)
        shape = model_of(row(model="DeepSeekV3", ffn_hidden=18432))
        assert shape.moe is not None
        assert (shape.ffn, shape.moe.ffn) == (18432, 2048)

    def test_another_ffn_is_of_the_experts_only_where_there_is_no_dense_layer(self) -> None:
        narrow = model_of(row(model="Mixtral 8x7B", ffn_hidden=7168))
        mixed = model_of(row(model="DeepSeekV3", ffn_hidden=7168))
        assert narrow.moe is not None
        assert mixed.moe is not None
        assert (narrow.moe.ffn, mixed.moe.ffn, mixed.ffn) == (7168, 2048, 7168)

    def test_proxy_keeps_an_expert_layer_and_the_mix(self) -> None:
        shape = model_of(row(model="DeepSeek-V2", num_layers=1))
        assert shape.moe is not None
        assert shape.moe.dense_layers == 0
        shape = model_of(row(model="Nemotron-H 56B", num_layers=59))
        assert shape.hybrid is not None
        assert (shape.hybrid.attention, shape.hybrid.mamba, shape.hybrid.mlp) == (5, 27, 27)

    def test_gpt_by_size(self) -> None:
        shape = model_of(row(model="GPT 13B"))
        assert (shape.layers, shape.hidden, shape.entry) == (40, 5140, None)
        assert "layers from the size" in shape.filled
        assert model_of(row(model="GPT 20B")).layers == 44

    def test_layers_from_parameters(self) -> None:
        cells = {"params_b": 181, "hidden": 14336, "ffn_hidden": 57344, "heads": 64}
        shape = model_of(row(model="GPT 181B", vocab=250880, **cells))
        assert shape.layers == 72
        assert "layers" in shape.filled

    def test_untied_where_only_that_gives_the_size(self) -> None:
        """Megatron's H100 table: 177B is 96 x 12 x 12288^2 and two embeddings of 131072."""
        cells = {"num_layers": 96, "hidden": 12288, "ffn_hidden": 49152, "heads": 96}
        assert not model_of(row(model="GPT 177B", params_b=177, vocab=131072, **cells)).tied
        assert model_of(row(model="GPT 174.6B", params_b=174.6, vocab=51200, **cells)).tied

    @pytest.mark.parametrize(
        ("size", "layers", "hidden", "vocab"),
        [
            (1.32, 24, 2048, 51200),  # layers and positions 1.211e9; this table 0.105e9
            (1.31, 24, 2048, 50304),
            (1.28, 24, 2048, 32000),
            (1.3, 24, 2048, 51200),  # too coarse to tell
            (1.9, 24, 2048, 51200),  # no known table has so many rows
        ],
    )
    def test_a_blank_vocabulary_is_what_the_size_needs(
        self, size: float, layers: int, hidden: int, vocab: int
    ) -> None:
        cells = {"num_layers": layers, "hidden": hidden, "heads": 32, "seq_len": 1024}
        shape = model_of(row(model="GPT", params_b=size, ffn_hidden=4 * hidden, **cells))
        assert shape.vocab == vocab
        assert "vocab" in shape.filled

    def test_a_printed_vocabulary_stays(self) -> None:
        cells = {"num_layers": 24, "hidden": 2048, "heads": 32, "vocab": 51200}
        assert model_of(row(model="GPT", params_b=1.28, **cells)).vocab == 51200

    def test_a_second_embedding_where_the_notes_or_the_tests_flags_have_one(self) -> None:
        cells = {"num_layers": 8, "hidden": 1024, "heads": 16}
        given = (dict(notes="untied"), dict(source="Megatron-LM CI memory_speed"), dict())
        assert [model_of(row(model="GPT", **cells, **one)).tied for one in given] == [
            False,
            False,
            True,
        ]

    def test_experts_of_a_model_without_an_entry(self) -> None:
        cells = {"num_layers": 8, "hidden": 1024, "heads": 16, "ffn_hidden": 512}
        notes = "16 experts top-2"
        shape = model_of(row(model="proxy", notes=notes, **cells))
        assert shape.moe is not None
        assert (shape.moe.experts, shape.moe.top_k, shape.moe.ffn) == (16, 2, 512)
        assert model_of(row(model="proxy", notes="16 experts", **cells)).moe is None

    def test_gated_like_llama_without_an_entry(self) -> None:
        cells = {"num_layers": 10, "hidden": 4096, "heads": 32, "vocab": 32000}
        grouped = model_of(row(model="proxy", kv_heads=8, ffn_hidden=16384, **cells))
        plain = model_of(row(model="proxy", kv_heads=32, ffn_hidden=16384, **cells))
        assert [(s.gated, s.norm) for s in (grouped, plain)] == [
            (True, "rmsnorm"),
            (False, "layernorm"),
        ]

    def test_unknown(self) -> None:
        with pytest.raises(UnknownModel, match="line 2"):
            model_of(row(model="an unheard-of model"))
        with pytest.raises(UnknownModel, match="neither layers nor parameters"):
            model_of(row(model="proxy", hidden=4096))
