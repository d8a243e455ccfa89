"""Every family: its config.json is read, built, counted and trained as its class computes it."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trial_runs import MODULE_GPT

from hpctrain.engines.train_json import parse_train_config
from hpctrain.plan.model.parameters import (
    attention_flops_per_token,
    linear_layers,
    linear_multiplications,
    total_parameters,
)
from hpctrain.spec.families import (
    DIRECTORY,
    Family,
    family_named,
    family_names,
    family_of,
    read_config,
    text_config,
)
from hpctrain.spec.families.settings import compare, differences, disagreements, settings_of
from hpctrain.spec.model import LoraSpec, ModelSpec
from hpctrain.train.engines.models.build import add_adapters, blocks_of, build_module
from hpctrain.train.engines.models.tasks import loss_of
from hpctrain.train.engines.models.transformers_library import class_named
from tests.engines.test_models_build import batch_of

META = torch.device("meta")
FILES = sorted((Path(__file__).parents[1] / "families").glob("*.json"))
# Of what multiplies tokens, other sums than of matrices: scans and convolutions.
NO_MATRICES = (
    *("mamba2", "nemotron_h", "qwen3_next", "qwen3_5", "qwen3_5_moe", "minimax"),
    *("granitemoehybrid", "bamba"),
)


def config_of(file: Path, **changes: Any) -> Any:
    content = json.loads(file.read_text())
    family = family_named(file.stem)
    assert family is not None
    fields = read_config(content, family).fields
    model = {**fields, "config": content, **({} if "image" in fields else {"seq": 16}), **changes}
    if file.stem == "resnet":
        del model["seq"]
        model["image"] = 32
    task = next(iter(family.classes))
    sizes = dict(vocab_size=fields["vocab"], seq_length=16)
    return parse_train_config(json.dumps({**MODULE_GPT, **sizes, "model": model, "task": task}))


def model_of(content: dict[str, Any], family: Family) -> ModelSpec:
    fields = read_config(content, family).fields
    own = {} if "image" in fields or family.name == "resnet" else {"seq": 16}
    return ModelSpec.model_validate({**own, **fields})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_file_leaves_out_is_what_its_class_takes(file: Path) -> None:
    """Each name in turn: absent is not null, and defaults differ from class to class."""
    content, family = json.loads(file.read_text()), family_named(file.stem)
    assert family is not None
    settings_class = class_named(family.settings)
    compared = 0
    for name in set(content) - {"model_type"}:
        left = {key: value for key, value in content.items() if key != name}
        try:
            whole = settings_class.from_dict(dict(left)).to_dict()
            theirs = model_of(json.loads(json.dumps({**left, **whole}, default=str)), family)
        except (ValueError, TypeError, StrictDataclassError):
            continue  # the class refuses it, or it is no model
        assert list(compare(model_of(left, family), theirs)) == [], name
        compared += 1
    assert compared > len(content) / 2


LISTED = [file for file in FILES if '"layer_types"' in file.read_text()]


@pytest.mark.parametrize("file", LISTED, ids=lambda file: file.stem)
def test_layers_that_all_see_everything_are_read_as_such(file: Path) -> None:
    content, family = json.loads(file.read_text()), family_named(file.stem)
    assert family is not None
    content["layer_types"] = ["full_attention"] * content["num_hidden_layers"]
    assert {kind.mixer for kind in model_of(content, family).kinds} == {"full"}


def test_every_family_has_one() -> None:
    assert [file.stem for file in FILES] == family_names()


def test_every_causal_model_of_transformers_is_of_a_family_or_says_why_not() -> None:
    text = "".join(one.read_text() for one in DIRECTORY.glob("*_types.yaml"))
    refused = set(re.findall(r"^([\w-]+): ", text, re.M))
    known = {kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if family_of({"model_type": kind})}
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - known - refused == set()
    assert known & refused == set()


# What a class reads of `config`, and may be left out: the other ways to compute the same number,
# first weights, what follows from other names, and parts that no training here has.
READ_AND_LEFT_OUT = {
    "attention_softmax_in_fp32": "the same numbers, other rounding",
    "block_size": "the same numbers, other rounding",
    "enable_moe_fp32_combine": "the same numbers, other rounding",
    "reorder_and_upcast_attn": "the same numbers, other rounding",
    "residual_in_fp32": "the same numbers, other rounding",
    "scale_attention_softmax_in_fp32": "the same numbers, other rounding",
    "slow_but_exact": "the same numbers, other rounding",
    "use_mamba_kernels": "the same numbers, other rounding",
    "init_std": "first weights",
    "initializer_factor": "first weights",
    "rescale_prenorm_residual": "first weights",
    "time_step_floor": "first weights",
    "time_step_max": "first weights",
    "time_step_min": "first weights",
    "expand": "the heads and their size say it",
    "intermediate_size": "there is no dense layer",
    "moe_layers": "`interleave_moe_layer_step` says it",
    "num_key_value_heads": "latent attention has one of each head",
    "task_type_vocab_size": "there are no tasks in it, `use_task_id`",
    "n_ctx": "no layer reads it",
    "time_step_rank": "no layer reads it",
    "decoder_start_token_id": "the task says what the decoder reads",
    "encoder_stride": "another task",
    "mm_tokens_per_image": "another task",
    "image_token_id": "another task",
    "num_logits_to_keep": "generation",
    "pooler_act": "another task",
    "pooler_output_size": "another task",
    "pooling": "another task",
    "qa_dropout": "another task",
    "video_token_id": "another task",
    "vision_config": "another task",
}


def names_read(family: Family) -> set[str]:
    """The names of its config that the module of a family's class reads, wherever."""
    module = class_named(next(iter(family.classes.values()))).__module__
    source = inspect.getsource(importlib.import_module(module))
    return set(re.findall(r"\bconfig\.(\w+)", source))


EVERYWHERE = set.intersection(
    *(set(one.ignored) for one in map(family_named, family_names()) if one is not None)
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_class_reads_is_not_left_out_without_a_reason(file: Path) -> None:
    family = family_named(file.stem)
    assert family is not None
    left_out = (set(family.ignored) - EVERYWHERE) & names_read(family)
    assert left_out <= set(READ_AND_LEFT_OUT)


# Said in other words: heads have keys of their own or one, layers are listed, the MLP is four times
# as wide, windows are not used, a constant makes the base of positions larger.
SAID_OTHERWISE = {
    *("num_kv_heads", "sliding_window_pattern", "n_inner"),
    *("sliding_window", "moe_topk", "rope_parameters"),
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_class_gets_from_the_record_what_the_file_says(file: Path) -> None:
    """All names that its module reads, without the file; dropouts are the run's."""
    content, family = json.loads(file.read_text()), family_named(file.stem)
    assert family is not None
    settings = class_named(family.settings)
    theirs = settings.from_dict(dict(text_config(content, family))).to_dict()
    ours = settings(**settings_of(model_of(content, family))).to_dict()
    names = names_read(family) - EVERYWHERE - set(READ_AND_LEFT_OUT) - set(family.dropouts)
    for name in names & set(theirs) - SAID_OTHERWISE:
        said = theirs[name]
        close = pytest.approx(said, rel=1e-12) if isinstance(said, float) else said
        assert ours.get(name) == close, name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_config_becomes_the_model_that_its_class_computes(file: Path) -> None:
    config = config_of(file)
    model = config.model.model_copy(update={"mtp_layers": 0})  # no class has them
    module = build_module(config, device=torch.device("cpu"))
    # biases that balance experts are frozen weights of some classes, and buffers of others
    learned = {name: one for name, one in module.named_parameters() if one.requires_grad}
    assert all(
        name.endswith("bias") for name, _ in module.named_parameters() if name not in learned
    )
    assert sum(one.numel() for one in learned.values()) == total_parameters(model)
    blocks = model.layers + model.encoder_layers
    assert len(blocks_of(module)) == (0 if file.stem == "resnet" else blocks)
    assert list(differences(model)) == [] == disagreements(model, model.config)
    loss, _ = loss_of(config)(module, batch_of(config))
    loss.backward()
    assert loss.isfinite()
    assert [name for name, one in learned.items() if one.grad is None] == []


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bart", {"decoder_ffn_dim": 128}, "decoder_ffn_dim"),
    ("cohere2", {"sliding_window": None}, "sliding_window"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
    ("granite_swa", {"layer_rope_theta": [1e4, 1e5, 1e4, 1e4, 1e4, 1e4]}, "layer_rope_theta"),
    ("mellum", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),
    (
        "mellum",
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e4},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
            }
        },
        "rope_parameters",
    ),
    ("minicpm3", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("t5", {"dense_act_fn": "silu"}, "dense_act_fn"),
    ("mpt", {"attn_config": {"clip_qkv": 6.0}}, "clip_qkv"),
]


@pytest.mark.parametrize(("name", "changes", "refused"), REFUSED)
def test_what_no_part_says_is_refused(name: str, changes: dict[str, Any], refused: str) -> None:
    family, content = family_named(name), json.loads((FILES[0].parent / f"{name}.json").read_text())
    assert family is not None
    assert read_config(content, family).refused == []
    assert [one for one, _ in read_config({**content, **changes}, family).refused] == [refused]


ALL_FULL = {"layer_types": ["full_attention"] * 6}
OTHER_CHOICES: list[tuple[str, dict[str, Any]]] = [
    *((name, ALL_FULL) for name in ("gemma2", "gemma3", "gpt_oss", "olmo3", "vaultgemma")),
    ("gpt_bigcode", {"multi_query": False}),
    ("mellum", {"mlp_layer_types": ["sparse"] * 6, **ALL_FULL}),
    ("minicpm3", {"scale_depth": None, "dim_model_base": None, "v_head_dim": None}),
    ("persimmon", {"qk_layernorm": False}),
    ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("name", "changes"), OTHER_CHOICES)
def test_other_choices_are_what_the_class_computes(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    content = json.loads((FILES[0].parent / f"{name}.json").read_text()) | changes
    family, file = family_named(name), tmp_path / f"{name}.json"
    assert family is not None
    file.write_text(json.dumps(content))
    config = config_of(file)
    module = build_module(config, device=torch.device("cpu"))
    assert sum(one.numel() for one in module.parameters()) == total_parameters(config.model)
    assert disagreements(config.model, content) == [] == list(differences(config.model))
    whole = json.loads(json.dumps(module.config.to_dict(), default=str))
    assert list(compare(config.model, model_of(whole, family))) == []
    if changes == ALL_FULL:
        assert {config.model.mixer(layer) for layer in range(6)} == {"full"}


TEXTS = [file for file in FILES if file.stem not in ("vit", "resnet", *NO_MATRICES)]
# Its class multiplies the tokens of all experts, and takes those that were not chosen as zeros.
COUNTED = [file for file in TEXTS if file.stem != "llama4"]


@pytest.mark.parametrize("file", COUNTED, ids=lambda file: file.stem)
def test_operations_are_those_that_torch_counts(file: Path) -> None:
    """Products of one forward pass in all layers and the output; eager attention over the whole
    square is counted apart."""
    config = config_of(file)
    module = build_module(config, device=torch.device("cpu")).eval()
    module.config._experts_implementation = "eager"  # products that are counted
    tokens = torch.randint(99, (1, 16))
    model = config.model.model_copy(update={"mtp_layers": 0})
    written = {}
    if model.encoder_layers:
        module.set_attn_implementation("eager")  # squares that are counted
        written = {"decoder_input_ids": tokens[:, : model.target_seq]}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(input_ids=tokens, **written)
    counted = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    products = sum(flops for name, flops in counted.items() if "mm" in name)
    squares = sum(flops for name, flops in counted.items() if "attention" in name or "bmm" in name)
    assert products - squares * any("bmm" in name for name in counted) == pytest.approx(
        2 * linear_multiplications(model), rel=0.005
    ), counted
    if model.encoder_layers:
        assert squares == attention_flops_per_token(model) * 16 / 3


# Mamba 2 has none, encoder-decoders are not adapted; experts of the others are no linear layers.
ADAPTED = [
    file
    for file in FILES
    if file.stem not in ("vit", "resnet", "mamba2") and "decoder_layers" not in file.read_text()
]


@pytest.mark.parametrize("file", ADAPTED, ids=lambda file: file.stem)
def test_adapters_are_counted(file: Path) -> None:
    config = config_of(file)
    module = add_adapters(config, LoraSpec(rank=3), build_module(config, device=META))
    added = sum(one.numel() for name, one in module.named_parameters() if "lora_" in name)
    model, layers = config.model, range(config.model.layers)
    counted = [sum(i + o for _, i, o in linear_layers(model, layer)) for layer in layers]
    assert added == 3 * sum(counted)


def test_a_factor_that_is_usually_one_reaches_the_class() -> None:
    """Scales and multipliers: with their default value a record without them looks right."""
    reached = set()
    for file in FILES:
        content, family = json.loads(file.read_text()), family_named(file.stem)
        assert family is not None
        settings = class_named(family.settings)
        for name in names_read(family) & set(content):
            if isinstance(content[name], float) and content[name] == 1.0:
                changed = {**content, name: 0.5}
                ours = settings(**settings_of(model_of(changed, family))).to_dict()
                assert ours[name] == pytest.approx(0.5, rel=1e-12), (file.stem, name)
                reached.add((file.stem, name))
    assert ("granite", "logits_scaling") in reached
