"""Models in Hugging Face's classes and in megatron-core: logits, losses, and back again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from trial_runs import (
    GPT,
    LLAMA,
    MODULE_GPT,
    MODULE_LLAMA,
    PLAIN,
    PLAIN_LLAMA,
    ZERO,
    ZERO_TP2_PP2,
    MakeTrial,
    Trial,
    apart,
    assert_near,
    assert_resumes_exactly,
    largest_difference,
    trained,
)
from variants import varied

from hpctrain.base.errors import InvalidInputError
from hpctrain.checkpoints.staged import open_staged
from hpctrain.convert import megatron_checkpoint
from hpctrain.convert.__main__ import convert
from hpctrain.convert.hugging_face_directory import write_model
from hpctrain.engines.conversion import shape_described
from hpctrain.engines.train_json import parse_train_config
from hpctrain.train.engines.megatron.model import load_weights
from hpctrain.train.engines.models.build import build_module
from hpctrain.train.engines.models.transformers_library import class_named

LOGITS = 1e-5  # fp32, of numbers of about 2
LOSSES = 2e-5  # after steps with other orders of addition
TINY = dict(layers=2, hidden=32, heads=4, ffn=48, vocab=100, seq=16)
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2 of OpenAI": dict(TINY, family="gpt", activation="gelu_tanh"),
    "gpt2, untied": dict(TINY, family="gpt", tied=False, norm_epsilon=1e-6),
    "llama with groups": dict(TINY, family="llama", kv_heads=2, head_dim=16, rope_base=500000),
    "llama with biases, tied": dict(TINY, family="llama", bias=True, tied=True),
}


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> None:
    """What every forked process needs."""
    class_named("LlamaForCausalLM")


def module_config(shape: dict[str, Any], **changes: Any) -> Any:
    sizes = dict(vocab_size=shape["vocab"], seq_length=shape["seq"])
    return parse_train_config(json.dumps({**MODULE_GPT, **sizes, "model": shape, **changes}))


def stage(directory: Path, shape: dict[str, Any]) -> None:
    """A random model as a Hugging Face directory and, converted, for megatron-core.

    Its biases and norms are random, too.
    """
    module = build_module(module_config(shape), device=torch.device("cpu"))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    write_model(module, directory / "hf")
    (directory / "hf" / "tokenizer.json").write_text("{}")
    report = convert(directory / "hf", directory / "megatron")
    assert report.parameters == sum(one.numel() for one in module.parameters())
    tokens = torch.randint(100, (2, 16))
    with torch.no_grad():
        logits = module.eval()(input_ids=tokens).logits
    torch.save([tokens, logits], directory / "logits.pt")


@pytest.mark.parametrize("name", varied(SHAPES, "gpt2 of OpenAI", "llama with groups"))
def test_logits_are_equal_and_the_way_back_is_exact(name: str, tmp_path: Path) -> None:
    apart(there_and_back, tmp_path, SHAPES[name])
    assert_equal_directories(tmp_path / "hf", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").exists()


def there_and_back(directory: Path, shape: dict[str, Any]) -> None:
    stage(directory, shape)
    compare_logits(directory)
    convert(directory / "megatron", directory / "back")


def compare_logits(directory: Path) -> None:
    """With those of megatron-core on one rank."""
    tokens, wanted = torch.load(directory / "logits.pt")
    staged = open_staged(directory / "megatron")
    assert staged.kind == "megatron_core"
    with megatron_checkpoint.one_rank(), torch.no_grad():
        chunk = megatron_checkpoint.build(
            shape_described(staged.config), torch.float32, on_meta=False
        )
        load_weights(str(staged.path), [chunk])
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        found = chunk.eval()(tokens, positions, None)
    assert (found - wanted).abs().max() <= LOGITS < wanted.abs().max() / 1000


def assert_equal_directories(one: Path, other: Path) -> None:
    left, right = (load_file(path / "model.safetensors") for path in (one, other))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    configs = [json.loads((path / "config.json").read_text()) for path in (one, other)]
    assert configs[0] == configs[1]


SMALL_TP2_PP2: dict[str, Any] = dict(
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    pipeline_layer_split=((1,), (1,)),
    num_layers=2,
    padded_vocab_size=512,
)


@pytest.mark.variant("test_logits_are_equal_and_the_way_back_is_exact")
@pytest.mark.parametrize(
    ("module", "core"),
    [
        pytest.param(MODULE_LLAMA, LLAMA, id="llama"),
        pytest.param(MODULE_GPT, GPT, id="gpt"),
    ],
)
def test_both_train_alike_from_one_directory(
    module: dict[str, Any], core: dict[str, Any], tmp_path: Path, trial: MakeTrial
) -> None:
    """megatron-core pads the vocabulary to twice its size here, which must not show."""
    shape = {**module["model"], "layers": 2, "seq": 64}  # it could read longer texts
    apart(stage, tmp_path, shape)
    tuned = dict(shape, seq=32, pretrained=str(tmp_path / "hf"))
    plain = trial(module, model=tuned, train_steps=3, lr_decay_steps=3, save_interval_steps=3)
    spread = trial(
        core,
        **{**SMALL_TP2_PP2, "pretrained": str(tmp_path / "megatron")},
        train_steps=3,
        lr_decay_steps=3,
        save_interval_steps=3,
    )
    assert plain.train() == [0]
    assert spread.train() == [0] * 4
    assert_near(plain, spread, 1, LOSSES, 100 * LOSSES)
    assert plain.losses[3] < plain.losses[1] - 0.1, "it learns"
    for number, run in enumerate((plain, spread)):
        apart(convert, run.run.checkpoints / "iter_0000003", tmp_path / f"tuned-{number}")
    assert_close_directories(tmp_path / "tuned-0", tmp_path / "tuned-1")


def assert_close_directories(one: Path, other: Path) -> None:
    left, right = (load_file(path / "model.safetensors") for path in (one, other))
    assert left.keys() == right.keys()
    for name in left:
        rows = min(len(left[name]), len(right[name]))  # positions that were never read
        difference = (left[name][:rows] - right[name][:rows]).abs().max()
        assert difference <= 1e-3, name


def test_what_is_no_model_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "iter_0000004").mkdir(parents=True)
    (run / "train.json").write_text("{}")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    wrong = {
        run: "run: is a run",
        run / "checkpoints" / "iter_0000004": "iter_0000004: ",
        tmp_path / "none": "none does not exist",
    }
    for source, words in wrong.items():
        with pytest.raises(InvalidInputError, match=words):
            convert(source, tmp_path / "target")
    with pytest.raises(InvalidInputError, match="there: exists already"):
        convert(tmp_path / "none", tmp_path / "there")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there"]


# -- Tasks and LoRA in real runs: the same on any number of ranks, and what comes out of them ---

# fp32 rounding of a mean over other partial sums
ROUNDING = 5e-6
SHORT: dict[str, Any] = dict(train_steps=4, lr_decay_steps=4, save_interval_steps=2)
TWO: dict[str, Any] = dict(data_parallel_size=2, micro_batch_size=1)
FSDP: dict[str, Any] = dict(TWO, engine="fsdp", shard_size=2)
ENCODER = dict(layers=2, hidden=64, ffn=128, heads=4, vocab=250, seq=32)
MASKED: dict[str, Any] = dict(
    MODULE_GPT, model=dict(ENCODER, family="bert"), task="masked_language_modeling"
)
LORA: dict[str, Any] = dict(MODULE_LLAMA, lora=dict(rank=2, dropout=0.0))


def exported(trial: Trial, step: int, target: Path) -> dict[str, Any]:
    """Weights of a checkpoint as a Hugging Face directory, made in a process of its own."""
    apart(convert, trial.run.checkpoints / f"iter_{step:07}", target)
    return load_file(target / "model.safetensors")


@pytest.mark.variant("test_weights_come_from_a_directory")
def test_masked_words_are_learned_alike_on_any_number_of_ranks(trial: MakeTrial) -> None:
    alone, spread = trained(MASKED, **SHORT), trial(MASKED, **SHORT, **FSDP)
    assert spread.train() == [0, 0]
    assert_near(spread, alone, 1, ROUNDING, 10 * ROUNDING)


SPANS: dict[str, Any] = dict(
    MODULE_GPT,
    model=dict(ENCODER, family="t5", encoder_layers=3, head_dim=16, logit_scale=64**-0.5),
    task="span_corruption",
)
# Version 1.1: a gated MLP, and an output matrix of its own.
GATED = dict(SPANS, model={**SPANS["model"], "activation": "geglu_tanh", "tied": False})
GATED["model"]["logit_scale"] = 1.0


def of_spans(engine: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return (SPANS, FSDP) if engine == "fsdp" else (GATED, TWO)


@pytest.mark.parametrize("engine", varied(("ddp", "fsdp"), "fsdp"))
def test_a_run_that_learns_spans_resumes_exactly(engine: str, trial: MakeTrial) -> None:
    settings, layout = of_spans(engine)
    whole = trained(settings, **SHORT, **layout)
    assert whole.losses[4] < whole.losses[1] - 0.1
    assert_resumes_exactly(trial(settings, **SHORT, **layout), whole, 2)


@pytest.mark.variant("test_a_run_that_learns_spans_resumes_exactly")
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_spans_are_learned_alike_and_exported(
    engine: str, trial: MakeTrial, tmp_path: Path
) -> None:
    """By all ranks together as by one; what comes out is the class's, and begins another run."""
    settings, layout = of_spans(engine)
    alone, spread = trained(settings, **SHORT), trained(settings, **SHORT, **layout)
    assert_near(spread, alone, 1, ROUNDING, 10 * ROUNDING)
    weights = exported(spread, 4, tmp_path / "hf")
    module = class_named("T5ForConditionalGeneration").from_pretrained(tmp_path / "hf")
    assert ("lm_head.weight" in weights) == (settings is GATED)
    assert module.config.scale_decoder_outputs == (settings is SPANS)
    start = {**settings["model"], "pretrained": str(tmp_path / "hf")}
    second = trial(settings, **{**SHORT, "model": start})
    assert second.train() == [0]
    assert second.losses[1] < alone.losses[3]


@pytest.mark.variant("test_weights_come_from_a_directory")
def test_a_weight_with_fewer_rows_than_ranks_is_saved_and_resumed(trial: MakeTrial) -> None:
    """BERT's embedding of two segments, over three ranks: one of them has nothing of it."""
    three = dict(engine="fsdp", data_parallel_size=3, shard_size=3, micro_batch_size=1)
    small = dict(model={**MASKED["model"], "layers": 1}, global_batch_size=6)
    settings = dict(MASKED, **SHORT, **three, **small)
    whole, again = trained(settings), trial(settings)
    assert_resumes_exactly(again, whole, 2)


@pytest.mark.variant("test_weights_come_from_a_directory")
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_lora_is_learned_alike_resumed_exactly_and_merged(
    engine: str, trial: MakeTrial, tmp_path: Path
) -> None:
    layout = FSDP if engine == "fsdp" else TWO
    alone, spread = trained(LORA, **SHORT), trained(LORA, **SHORT, **layout)
    loss, _ = largest_difference(spread, alone, 1)
    assert loss <= ROUNDING and spread.losses[4] < spread.losses[1] - 0.01
    again = trial(LORA, **SHORT, **layout)
    again.goes_on(spread, 2)
    assert again.exact.items() <= spread.exact.items()
    compare_weights(exported(spread, 2, tmp_path / "2"), exported(spread, 4, tmp_path / "4"))
    reader = dcp.FileSystemReader(spread.run.checkpoints / "iter_0000004")
    stored = [one for one in reader.read_metadata().state_dict_metadata if one.startswith("model.")]
    assert stored and all(".lora_" in one for one in stored), "only what is learned"


def compare_weights(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Layers of the blocks differ by a matrix of rank 2 for each of the two states; others stay."""
    for name, weight in after.items():
        difference = weight - before[name]
        if "_proj" in name:
            sizes = torch.linalg.svdvals(difference.double())
            assert sizes[0] > 1e-4 and sizes[4] < 1e-5 * sizes[0], name
        else:
            assert not difference.any(), name


PARTS: dict[str, dict[str, Any]] = {
    "stage 0": dict(ZERO, zero_stage=0),
    "stage 1": dict(ZERO, zero_stage=1),
    "stage 3": dict(ZERO, zero_stage=3),
    "pipeline": dict(ZERO, pipeline_stages=(1, 1), data_parallel_size=1),
    "tp": dict(ZERO_TP2_PP2, pipeline_stages=()),
    "tp x pp": ZERO_TP2_PP2,
}


@pytest.mark.variant("test_weights_come_from_a_directory")
@pytest.mark.parametrize("kind", list(PARTS))
def test_weights_of_deepspeed_are_put_together(kind: str, tmp_path: Path) -> None:
    alone = trained(PLAIN_LLAMA if kind.startswith("tp") else PLAIN)
    spread = trained(PARTS[kind])
    wanted, found = (
        exported(one, 4, tmp_path / str(number)) for number, one in enumerate((alone, spread))
    )
    assert wanted.keys() == found.keys()
    assert all((found[name] - wanted[name]).abs().max() < 1e-4 for name in wanted)


@pytest.mark.variant("test_weights_come_from_a_directory")
def test_an_exported_directory_is_a_model_to_start_from(trial: MakeTrial, tmp_path: Path) -> None:
    """A run that starts from the weights of another one's checkpoint has its next loss at once."""
    first = trained(MASKED, **SHORT)
    exported(first, 4, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["BertForMaskedLM"]
    pretrained = {**MASKED["model"], "pretrained": str(tmp_path / "hf")}
    second = trial(MASKED, **{**SHORT, "model": pretrained})
    assert second.train() == [0]
    assert second.losses[1] < first.losses[1] - 0.05
