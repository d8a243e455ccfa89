"""Models of Hugging Face's classes: parameters, first weights, losses, and what LoRA adds."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import ks_2samp
from torch import nn
from torch.nn import functional
from trial_runs import MODULE_GPT
from variants import varied

from hpctrain.base.errors import InvalidInputError
from hpctrain.convert.hugging_face_directory import write_model
from hpctrain.engines.train_json import parse_train_config
from hpctrain.plan.mesh.candidate import layout_of
from hpctrain.plan.mesh.stages import build_stages
from hpctrain.plan.model.parameters import count_model, total_parameters
from hpctrain.spec.model import LoraSpec, span_lengths
from hpctrain.spec.run import ParallelSpec, RunSpec
from hpctrain.train.engines.models.allocation import allocate, slice_offsets
from hpctrain.train.engines.models.build import (
    blocks_of,
    build_module,
    build_on_meta,
    merge_adapters,
)
from hpctrain.train.engines.models.tasks import corruption_of, loss_of, masking_of
from hpctrain.train.initial_weights import initial_weight, recording

CPU, META = torch.device("cpu"), torch.device("meta")
TEXT: dict[str, Any] = dict(layers=2, hidden=32, heads=4, ffn=64, vocab=100, seq=16)
WORDS, MASKED, CLASSES = "language_modeling", "masked_language_modeling", "classification"
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "gpt": (dict(TEXT, family="gpt"), WORDS),
    "gpt, untied": (dict(TEXT, family="gpt", tied=False, activation="gelu_tanh"), WORDS),
    "llama": (dict(TEXT, family="llama", kv_heads=2, head_dim=16, bias=True), WORDS),
    "llama, tied": (dict(TEXT, family="llama", tied=True), WORDS),
    "bert": (dict(TEXT, family="bert"), MASKED),
    "bert, classes": (dict(TEXT, family="bert", classes=3), CLASSES),
    "distilbert": (dict(TEXT, family="distilbert"), MASKED),
    "distilbert, classes": (dict(TEXT, family="distilbert", classes=3), CLASSES),
    "t5": (
        dict(TEXT, family="t5", encoder_layers=3, head_dim=8, logit_scale=32**-0.5),
        "span_corruption",
    ),
    "vit": (
        dict(family="vit", layers=2, hidden=32, heads=4, ffn=64, vocab=10, image=16, patch=4),
        CLASSES,
    ),
    "resnet-18": (dict(family="resnet", layers=18, vocab=10, image=32), CLASSES),
    "resnet-50": (dict(family="resnet", layers=50, vocab=10, image=32), CLASSES),
}
DEEPER = (34, 101, 152)


def config_of(name: str, **changes: Any) -> Any:
    shape, task = SHAPES[name]
    model = {**shape, **changes.pop("model", {})}
    sizes = dict(vocab_size=shape["vocab"], seq_length=shape.get("seq", 16))
    fields = {**MODULE_GPT, **sizes, "model": model, "task": task, **changes}
    return parse_train_config(json.dumps(fields))


def batch_of(config: Any) -> Any:
    """Whatever any of the tasks asks for; two samples."""
    torch.manual_seed(3)
    tokens = torch.randint(99, (2, config.text_length))
    whole_texts = config.task == CLASSES
    return SimpleNamespace(
        tokens=tokens,
        labels=torch.randint(3, (2,)) if whole_texts else tokens.roll(-1, 1),
        loss_mask=torch.ones(2, 16),
        positions=torch.arange(16).expand(2, -1),
        attention_mask=torch.ones(2, 16, dtype=torch.int64),
        pixels=torch.randn(2, 3, config.model.image, config.model.image),
        samples=range(2),
    )


def equal(one: Any, other: Any) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("name", varied(SHAPES, "llama", "resnet-18"))
def test_a_model_is_what_was_planned_and_learns_with_every_weight(name: str) -> None:
    config = config_of(name)
    module = build_module(config, device=CPU)
    count = sum(one.numel() for one in module.parameters())
    assert count == total_parameters(config.model) == planned(config)
    layers = config.model.layers + config.model.encoder_layers
    assert len(blocks_of(module)) == (0 if "resnet" in name else layers)
    assert module.training and {one.dtype for one in module.parameters()} == {torch.float32}
    loss, number = loss_of(config)(module, batch_of(config))
    loss.backward()
    assert loss.dtype == number.dtype == torch.float32 and loss.isfinite()
    # DistributedDataParallel waits for the gradient of every weight
    assert [one for one, p in module.named_parameters() if p.grad is None] == []


def planned(config: Any) -> int:
    """Of the plan for one GPU: rows of embeddings are not padded, as Megatron's are."""
    split, counts = (config.model.layers,), count_model(spec_of(config))
    layout = layout_of(ParallelSpec(), 1)
    (stage,) = build_stages(
        config.model, layout, split, counts.vocab_multiple, counts.adapters_per_layer
    )
    return stage.parameters_per_gpu


def spec_of(config: Any) -> RunSpec:
    return RunSpec.model_validate(
        dict(
            name="counted",
            model=config.model,
            task=config.task,
            lora=config.lora,
            batch={"global": 8, "micro": 1},
            budget=dict(steps=4),
            optimizer=dict(lr=1e-4),
            checkpoint=dict(every_steps=2),
            engine=dict(name="ddp"),
            resources=dict(gpus=1),
        )
    )


TUNED = [
    *(("all", name) for name in SHAPES if "resnet" not in name and name != "t5"),
    (("c_attn",), "gpt"),
    (("q_proj", "v_proj"), "llama"),
    (("dense",), "bert, classes"),
]


@pytest.mark.parametrize("rank", [2, 5])
@pytest.mark.parametrize(("targets", "name"), TUNED)
def test_what_lora_learns_is_what_was_planned(targets: Any, name: str, rank: int) -> None:
    config = config_of(name, lora=dict(rank=rank, targets=targets))
    module = build_module(config, device=META)
    learned = sum(one.numel() for one in module.parameters() if one.requires_grad)
    assert learned == count_model(spec_of(config)).trainable
    held = sum(one.numel() for one in module.parameters())
    assert held == planned(config) == count_model(spec_of(config)).parameters


@pytest.mark.variant("test_what_lora_learns_is_what_was_planned")
def test_a_llama_of_7_billion_is_tuned_as_planned() -> None:
    shape = dict(family="llama", layers=32, hidden=4096, ffn=11008, heads=32, vocab=32000, seq=2048)
    config = config_of("llama", model={**shape, "kv_heads": None, "head_dim": None, "bias": False})
    config = config.model_copy(update=dict(lora=LoraSpec(rank=16)))
    module = build_module(config, device=META)
    sizes = [(one.numel(), one.requires_grad) for one in module.parameters()]
    assert sum(size for size, learns in sizes if learns) == 39_976_960
    assert sum(size for size, learns in sizes if not learns) == 6_738_415_616
    assert sum(size for size, _ in sizes) == planned(config)


@pytest.mark.variant("test_a_model_is_what_was_planned_and_learns_with_every_weight")
@pytest.mark.parametrize("layers", DEEPER)
def test_deeper_networks_are_what_was_planned(layers: int) -> None:
    config = config_of("resnet-50", model=dict(layers=layers))
    module = build_module(config, device=META)
    assert sum(one.numel() for one in module.parameters()) == total_parameters(config.model)


@pytest.mark.parametrize("name", varied(["gpt", "llama", "bert", "vit", "resnet-18"], "gpt"))
def test_weights_follow_from_the_seed_alone(name: str) -> None:
    torch.manual_seed(1)
    one = build_module(config_of(name), device=CPU)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3)), "building leaves the random numbers of others alone"
    assert equal(one, build_module(config_of(name), device=CPU))
    assert not equal(one, build_module(config_of(name, seed=2), device=CPU))


@pytest.mark.parametrize("name", ["gpt", "llama", "llama, tied", "bert", "vit", "resnet-18"])
def test_shapes_without_weights(name: str) -> None:
    config = config_of(name)
    real, meta = (build_module(config, device=device) for device in (CPU, META))
    unset = build_module(config, device=CPU, initialize=False)
    assert {one.device.type for one in meta.parameters()} == {"meta"}
    for other in (meta, unset):  # a tied weight is one parameter in each of them
        assert [n for n, _ in other.named_parameters()] == [n for n, _ in real.named_parameters()]
    for (key, wanted), (_, found) in zip(real.named_buffers(), unset.named_buffers(), strict=True):
        assert torch.equal(wanted, found), key


def test_labels_are_shifted_already() -> None:
    config = config_of("llama")
    module, batch = build_module(config, device=CPU), batch_of(config)
    batch.loss_mask[0, 5:] = 0
    loss, count = loss_of(config)(module, batch)
    losses = functional.cross_entropy(
        module(input_ids=batch.tokens).logits.transpose(1, 2), batch.labels, reduction="none"
    )
    assert count == 21
    assert abs(loss - (losses[0, :5].sum() + losses[1].sum())) < 1e-4


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_texts_do_not_see_each_other(name: str, deterministic: bool) -> None:
    config = config_of(name, data_format="packed", deterministic_mode=deterministic)
    module, batch = build_module(config, device=CPU), batch_of(config)
    batch.positions = torch.cat([torch.arange(6), torch.arange(10)]).expand(2, -1)
    batch.loss_mask[:, :6] = 0
    before, _ = loss_of(config)(module, batch)
    batch.tokens[:, :6] = 7
    after, _ = loss_of(config)(module, batch)
    assert torch.equal(before, after)
    alone = SimpleNamespace(**{
        key: getattr(batch, key)[:, 6:] for key in ("tokens", "labels", "loss_mask", "positions")
    })  # fmt: skip
    assert abs(loss_of(config)(module, alone)[0] - before) < 1e-4


def test_determinism_takes_attention_whose_sums_have_an_order() -> None:
    one, other = config_of("llama"), config_of("llama", deterministic_mode=True)
    fast, exact = build_module(one, device=CPU), build_module(other, device=CPU)
    assert (fast.config._attn_implementation, exact.config._attn_implementation) == (
        "sdpa",
        "eager",
    )
    losses = [loss_of(one)(module, batch_of(one))[0].item() for module in (fast, exact)]
    assert abs(losses[0] - losses[1]) < 1e-4


# -- masked words ----------------------------------------------------------------------------
def test_the_same_words_are_masked_wherever_a_sample_is_read() -> None:
    masking = masking_of(config_of("bert"))
    tokens = torch.randint(99, (4, 16))
    shown, hidden = masking.apply(tokens, range(10, 14))
    one_by_one = [masking.apply(tokens[n : n + 1], range(10 + n, 11 + n)) for n in range(4)]
    assert torch.equal(shown, torch.cat([part[0] for part in one_by_one]))
    assert torch.equal(hidden, torch.cat([part[1] for part in one_by_one]))
    assert torch.equal(shown[~hidden], tokens[~hidden])
    assert not torch.equal(hidden, masking.apply(tokens, range(14, 18))[1])


def test_shares_of_masked_words_are_those_of_the_paper(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    special = [dict(id=n, content=c, special=True) for n, c in enumerate(("[PAD]", "[MASK]"))]
    tokenizer.write_text(json.dumps({"added_tokens": special}))
    masking = masking_of(config_of("bert", tokenizer=str(tokenizer), vocab_size=1000))
    tokens = torch.randint(2, 1000, (40, 1000))
    tokens[:, 0] = 0
    shown, hidden = masking.apply(tokens, range(40))
    assert not hidden[:, 0].any(), "padding is not guessed"
    guessed = hidden.sum().item()
    assert abs(guessed / 40000 - 0.15) < 0.01
    assert abs((shown == 1).sum().item() / guessed - 0.8) < 0.02
    assert abs(((shown == tokens) & hidden).sum().item() / guessed - 0.1) < 0.02


# -- spans ------------------------------------------------------------------------------------
def corrupted(seq: int, samples: range = range(3), **changes: Any) -> tuple[Any, Any, Any]:
    """(text, what is read and written of it, the corruption)."""
    corruption = corruption_of(config_of("t5", model=dict(seq=seq), seq_length=seq, **changes))
    tokens = torch.randint(2, 50, (len(samples), corruption.lengths.text))
    return tokens, corruption.apply(tokens, samples), corruption


@pytest.mark.parametrize("seq", [4, 16, 45, 512])
def test_what_is_read_and_what_is_written_make_the_text(seq: int) -> None:
    tokens, (read, written, labels), corruption = corrupted(seq, vocab_size=200)
    spans, end = corruption.lengths.spans, 1
    assert read.shape == (3, seq) and labels.shape == (3, corruption.lengths.targets)
    assert written[:, 0].tolist() == [0] * 3 and torch.equal(written[:, 1:], labels[:, :-1])
    for text, source, target in zip(tokens.tolist(), read.tolist(), labels.tolist(), strict=True):
        assert source.pop() == end == target.pop()
        sentinels = [token for token in source if token >= 100]
        assert sentinels == [199 - n for n in range(spans)] == [t for t in target if t >= 100]
        assert source[0] < 100 and target[0] == 199, "a text begins with what is kept"
        for n, sentinel in enumerate(sentinels):
            first = target.index(sentinel) + 1
            last = target.index(199 - n - 1) if n + 1 < spans else len(target)
            assert last > first
            source[(at := source.index(sentinel)) : at + 1] = target[first:last]
        assert source == text


def test_spans_depend_on_seed_and_sample_alone() -> None:
    tokens, whole, corruption = corrupted(45, range(10, 13))
    alone = [corruption.apply(tokens[n : n + 1], range(10 + n, 11 + n)) for n in range(3)]
    assert all(torch.equal(torch.cat(parts), one) for parts, one in zip(zip(*alone), whole))  # noqa: B905
    assert not torch.equal(corruption.apply(tokens, range(20, 23))[0], whole[0])


def test_lengths_of_spans_are_those_of_the_reference() -> None:
    """512 tokens of a text of 568, and 114 to write: t5's `compute_input_and_target_lengths`."""
    assert span_lengths(512) == (568, 85, 28) and span_lengths(512).targets == 114
    for inputs in range(4, 3000):
        found = span_lengths(inputs)
        assert found.inputs == inputs
        longer = found.text + 1
        noise = round(longer * 0.15)
        assert longer - noise + round(noise / 3) + 1 > inputs or inputs < 20


@pytest.mark.parametrize("missing", ["<pad>", "</s>", "<extra_id_1>"])
def test_a_tokenizer_without_enough_sentinels_is_refused(missing: str, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    names = ["<pad>", "</s>", *(f"<extra_id_{n}>" for n in range(2))]
    special = [dict(id=n, content=c, special=True) for n, c in enumerate(names, 90)]
    tokenizer.write_text(json.dumps({"added_tokens": special}))
    _, (read, written, labels), _ = corrupted(45, tokenizer=str(tokenizer))
    assert written[0, 0] == 90 and labels[0, 0] == 92 and read[0, -1] == labels[0, -1] == 91
    assert {92, 93} <= {*read[0].tolist()}
    rest = [one for one in special if one["content"] != missing]
    tokenizer.write_text(json.dumps({"added_tokens": rest}))
    with pytest.raises(InvalidInputError, match=f"the tokenizer has no {missing}: span corruption"):
        corrupted(45, tokenizer=str(tokenizer))


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text('{"added_tokens": [{"id": 0, "content": "<eod>", "special": true}]}')
    with pytest.raises(InvalidInputError, match=r"has no \[MASK\]"):
        loss_of(config_of("bert", tokenizer=str(tokenizer)))


# -- somebody's weights ----------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gpt", "llama, tied", "bert", "distilbert, classes", "resnet-18"])
def test_weights_come_from_a_directory(name: str, tmp_path: Path) -> None:
    module = build_module(config_of(name, seed=7), device=CPU)
    write_model(module, tmp_path)
    config = config_of(name, model=dict(pretrained=str(tmp_path)))
    assert equal(module, build_module(config, device=CPU))


def test_a_body_without_its_head_is_tuned_to_classes(tmp_path: Path) -> None:
    words = build_module(config_of("distilbert", seed=7), device=CPU)
    write_model(words, tmp_path)
    config = config_of("distilbert, classes", model=dict(pretrained=str(tmp_path)))
    module, again = (build_module(config, device=CPU) for _ in range(2))
    assert equal(module.base_model, words.base_model)
    assert equal(module, again), "the new head is the same on all ranks"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("transformer.h.1.mlp.c_fc.weight", None, "c_fc.weight are missing or of another shape"),
        ("transformer.h.1.mlp.c_fc.weight", "transformer.h.2.x", "h.2.x belong to no part of GPT2"),
    ],
)
def test_weights_that_are_missing_or_left_over(
    old: str, new: str | None, words: str, tmp_path: Path
) -> None:
    write_model(build_module(config_of("gpt"), device=CPU), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    taken = tensors.pop(old)
    if new is not None:
        tensors[new] = taken
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInputError) as caught:
        build_module(config_of("gpt", model=dict(pretrained=str(tmp_path))), device=CPU)
    assert any(words in str(problem) for problem in caught.value.problems)


# -- LoRA ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "vit"])
def test_only_thin_matrices_learn_and_they_can_be_merged(name: str) -> None:
    config = config_of(name, lora=dict(rank=2))
    plain = build_module(config_of(name), device=CPU)
    module = build_module(config, device=CPU)
    batch, loss = batch_of(config), loss_of(config)
    learning = [one for one, p in module.named_parameters() if p.requires_grad]
    assert {("lora_" in one) or ("classifier" in one) for one in learning} == {True}
    assert torch.equal(loss(plain, batch)[0], loss(module, batch)[0]), "nothing is added at first"
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        loss(module, batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(blocks_of(module)) == 2
    tuned = loss(module, batch)[0].item()
    whole = merge_adapters(module)
    assert abs(loss(whole, batch)[0].item() - tuned) < 1e-3 * abs(tuned)
    assert [n for n, _ in whole.named_parameters()] == [n for n, _ in plain.named_parameters()]


def test_chosen_layers_alone_are_adapted() -> None:
    module = build_module(config_of("llama", lora=dict(targets=("q_proj", "v_proj"))), device=CPU)
    learning = {one.split(".")[-4] for one, p in module.named_parameters() if p.requires_grad}
    assert learning == {"q_proj", "v_proj"}


def test_lora_on_meta_has_the_same_names() -> None:
    config = config_of("llama", lora=dict(rank=2))
    real, meta = (build_module(config, device=device) for device in (CPU, META))
    assert real.state_dict().keys() == meta.state_dict().keys()
    assert {one.device.type for one in meta.parameters()} == {"meta"}
    again = build_module(config, device=CPU)
    assert equal(real, again), "thin matrices follow from the seed, too"


# -- What modules' own initialisers do to weights is recorded on meta, and repeated in parts ----

SIZE = (64, 96)


def recorded(build: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    """A module whose weights are on meta, with their records."""
    with recording() as recorder:
        module = build()
        recorder.finish(module, seed)
    return module


def drawn(build: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    module = recorded(build, seed)
    allocate(module, CPU, draw=True)
    return module


# -- models ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", varied(SHAPES, "gpt", "llama"))
def test_weights_are_distributed_as_transformers_draws_them(name: str) -> None:
    """Constants and buffers are equal; others by a test of Kolmogorov and Smirnov (fixed seeds)."""
    ours = build_module(config_of(name), device=CPU)
    theirs = build_module(config_of(name, initial_weights="generator"), device=CPU)
    random = 0
    for (key, mine), (other, wanted) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert key == other and mine.shape == wanted.shape
        assert mine.requires_grad == wanted.requires_grad
        one, two = mine.detach().flatten(), wanted.detach().flatten()
        if (two == two[0]).all():
            assert torch.equal(one, two), key
            continue
        random += 1
        assert ks_2samp(one.numpy(), two.numpy()).pvalue > 1e-5, key
        assert float(one.std() / two.std()) == pytest.approx(1, abs=5 / math.sqrt(len(one))), key
    assert random >= 6
    buffers = dict(theirs.named_buffers())
    assert dict(ours.named_buffers()).keys() == buffers.keys()
    for key, buffer in ours.named_buffers():
        assert torch.equal(buffer, buffers[key]) and buffer.dtype == buffers[key].dtype, key


@pytest.mark.parametrize("name", ["gpt", "llama", "vit", "resnet-18"])
def test_other_names_and_seeds_are_other_numbers(name: str) -> None:
    first, second = (build_module(config_of(name, seed=seed), device=CPU) for seed in (1, 2))
    seen = set()
    for (key, one), (_, two) in zip(
        first.named_parameters(), second.named_parameters(), strict=True
    ):
        if one.dim() > 1 and one.std() > 0:
            assert not torch.equal(one, two), key
            seen.add(float(one.flatten()[0] / one.std()))
    matrices = [p for p in first.parameters() if p.dim() > 1 and p.std() > 0]
    assert len(seen) == len(matrices), "two weights begin with the same number"


def test_adapters_begin_at_nothing_beside_the_weights_of_the_plain_model() -> None:
    plain = build_module(config_of("llama"), device=CPU)
    tuned = build_module(config_of("llama", lora=dict(rank=4)), device=CPU)
    pairs = dict(tuned.named_parameters())
    first = [weight for key, weight in pairs.items() if "lora_A" in key]
    second = [weight for key, weight in pairs.items() if "lora_B" in key]
    assert len(first) == len(second) == 14
    assert all(weight.std() > 0.01 for weight in first) and not any(w.any() for w in second)
    assert len({float(weight.flatten()[0]) for weight in first}) == len(first)
    frozen = {key: w for key, w in pairs.items() if "lora_" not in key}
    for key, weight in plain.named_parameters():
        owner, _, last = key.rpartition(".")
        there = f"base_model.model.{owner}"
        found = frozen.get(f"{there}.{last}")
        found = frozen[f"{there}.base_layer.{last}"] if found is None else found
        assert torch.equal(found, weight), key


def test_documents_of_older_versions_keep_the_weights_of_torchs_generator() -> None:
    """A run with LoRA draws its frozen weights again at each start."""
    document = json.loads(config_of("gpt", lora=dict(rank=2)).model_dump_json())
    del document["initial_weights"]
    old = build_module(parse_train_config(json.dumps(document)), device=CPU)  # type: ignore[arg-type]
    torch.manual_seed(config_of("gpt").seed)
    theirs = type(old.base_model.model)(old.base_model.model.config)
    found = old.base_model.model.transformer.h[1].mlp.c_fc.base_layer.weight
    assert torch.equal(found, theirs.transformer.h[1].mlp.c_fc.weight)
    new = build_module(config_of("gpt", lora=dict(rank=2)), device=CPU)
    assert not equal(old, new)


# -- initialisers ----------------------------------------------------------------------------
class One(nn.Module):
    """A weight, and what is done to it."""

    def __init__(self, act: Callable[[Any], Any], values: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZE) if values is None else values())
        with torch.no_grad():
            act(self.weight)


def rows(weight: Any) -> None:
    nn.init.normal_(weight, std=0.1)
    nn.init.zeros_(weight[5])


INITIALISERS: dict[str, Callable[[Any], Any]] = {
    "normal": lambda weight: nn.init.normal_(weight, 1.0, 0.1),
    "data.normal": lambda weight: weight.data.normal_(mean=0.2, std=0.1),
    "uniform": lambda weight: nn.init.uniform_(weight, -1.0, 3.0),
    "uniform, defaults": lambda weight: weight.uniform_(),
    "truncated": lambda weight: nn.init.trunc_normal_(weight, std=0.5, a=-0.4, b=1.0),
    "xavier": nn.init.xavier_uniform_,
    "kaiming": lambda weight: nn.init.kaiming_normal_(weight, mode="fan_out"),
    "constant": lambda weight: nn.init.constant_(weight, 0.7),
    "ones": nn.init.ones_,
    "filled": lambda weight: weight.fill_(torch.tensor(0.3)),
    "a row": rows,
    "a table": lambda weight: weight.copy_(torch.arange(SIZE[1]) / SIZE[1]),
    "twice": lambda weight: nn.init.normal_(nn.init.uniform_(weight), std=0.1),
}


@pytest.mark.parametrize("name", INITIALISERS)
def test_an_initialiser_is_repeated(name: str) -> None:
    module = drawn(lambda: One(INITIALISERS[name]))
    torch.manual_seed(3)
    expected = One(INITIALISERS[name]).weight.detach()
    found = module.weight.detach()
    assert isinstance(found, torch.Tensor) and type(module.weight) is nn.Parameter
    if name in ("constant", "ones", "filled", "a table"):
        assert torch.equal(found, expected)
    else:
        assert ks_2samp(found.flatten().numpy(), expected.flatten().numpy()).pvalue > 1e-4
        assert torch.equal(found == 0, expected == 0)


@pytest.mark.parametrize("name", INITIALISERS)
def test_parts_are_those_of_the_whole(name: str) -> None:
    whole = drawn(lambda: One(INITIALISERS[name])).weight.detach()
    weight = initial_weight(recorded(lambda: One(INITIALISERS[name])).weight)
    for cut in ((slice(3, 40), slice(None)), (slice(None), slice(17, 50)), (slice(5, 6), slice(2))):
        part = torch.empty_like(whole[cut])
        view = torch.empty(SIZE, device="meta")[cut]
        offsets = slice_offsets(view.storage_offset(), SIZE)
        weight.draw(part, offsets=offsets)
        assert torch.equal(part, whole[cut])
    flat = torch.empty(1234)
    weight.draw_range(flat, 321)
    assert torch.equal(flat, whole.flatten()[321 : 321 + 1234])


@pytest.mark.parametrize(
    "values", [lambda: torch.randn(SIZE), lambda: torch.ones(SIZE), lambda: torch.eye(*SIZE)]
)
def test_values_that_a_weight_is_made_with_are_kept(values: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    expected = values()
    torch.manual_seed(3)
    assert torch.equal(drawn(lambda: One(lambda _: None, values)).weight, expected)


REFUSED_INITIALISERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda weight: None, "no initialiser writes into it"),
    "orthogonal": (nn.init.orthogonal_, "uses aten"),
    "product": (lambda weight: weight.normal_().mul_(0.1), "uses aten.mul_.Tensor"),
    "some rows": (lambda weight: weight[:3].normal_(), r"normal_.default on a tensor \[3, 96\]"),
    "columns": (lambda weight: weight.fill_(1.0)[:, :3].zero_(), "uses aten.zero_.default"),
    "replaced": (lambda weight: setattr(weight, "data", weight * 2), "the result of an operation"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_INITIALISERS)
def test_an_initialiser_that_cannot_be_repeated_in_parts_is_refused(name: str) -> None:
    act, words = REFUSED_INITIALISERS[name]
    with pytest.raises(InvalidInputError, match=f"weight: its initial values cannot .*{words}"):
        recorded(lambda: One(act))


def test_what_follows_a_refused_operation_counts() -> None:
    act = lambda weight: nn.init.ones_(nn.init.orthogonal_(weight))  # noqa: E731
    assert torch.equal(drawn(lambda: One(act)).weight, torch.ones(SIZE))


def test_a_memory_address_that_is_used_again_is_another_weight() -> None:
    """What was recorded for memory that is free again must not reach the next weight there."""

    def build() -> nn.Module:
        layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(50)))
        for layer in layers:
            layer.weight.data = layer.weight.data * 2
        return layers

    with pytest.raises(InvalidInputError) as caught:
        recorded(build)
    assert len(caught.value.problems) == 50


def test_a_copy_has_the_values_of_its_source() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(8, 8)
        layer.bias.data = layer.bias.data.clone()
        return layer

    assert torch.equal(drawn(build).bias, drawn(lambda: nn.Linear(8, 8)).bias)


def test_weights_that_share_memory_before_they_are_registered() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.arange(12.0).view(2, 6)
            self.first, self.second = (nn.Parameter(half) for half in both)
            self.third = nn.Parameter(kept := torch.ones(6))
            kept.fill_(2.0)

    found = drawn(Halves)
    expected = torch.arange(12.0)
    assert torch.equal(found.first, expected[:6]) and torch.equal(found.second, expected[6:])
    assert torch.equal(found.third, torch.full((6,), 2.0))


def test_shared_weights_stay_shared_and_attributes_stay() -> None:
    def build() -> nn.Module:
        pair = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        pair[1].weight = pair[0].weight
        pair[0].weight.marked = True
        return pair

    pair = drawn(build)
    assert pair[0].weight is pair[1].weight and pair[0].weight.marked


def test_modules_are_built_as_ever_afterwards() -> None:
    before = nn.Module.register_parameter, nn.init._no_grad_trunc_normal_
    with pytest.raises(ZeroDivisionError), recording():
        raise ZeroDivisionError
    assert (nn.Module.register_parameter, nn.init._no_grad_trunc_normal_) == before
    module = build_on_meta(config_of("gpt"), record=True)
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    assert nn.Linear(2, 2).weight.device == CPU
    assert copy.deepcopy(module).lm_head.weight.device.type == "meta"
