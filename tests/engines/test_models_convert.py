"""The same model in Hugging Face's classes and in megatron-core: logits, losses, and back again."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trial_runs import (
    GPT,
    LIMIT_SECONDS,
    LLAMA,
    MODULE_GPT,
    MODULE_LLAMA,
    Trial,
    largest_difference,
)
from variants import varied

from hpctrain.base.errors import InvalidInputError
from hpctrain.checkpoints.staged import open_staged
from hpctrain.convert import megatron_checkpoint
from hpctrain.convert.__main__ import convert
from hpctrain.convert.hugging_face_directory import write_model
from hpctrain.engines.conversion import shape_described
from hpctrain.engines.train_json import parse_train_config
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


def apart(function: Callable[..., None], *given: Any) -> None:
    """Call it in a forked process: process groups and threads must not live where ranks are forked
    from later on (bench.prefork)."""
    process = multiprocessing.get_context("fork").Process(target=function, args=given)
    process.start()
    process.join(LIMIT_SECONDS)
    assert process.exitcode == 0


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
        chunk = megatron_checkpoint.build(shape_described(staged.config), torch.float32)
        megatron_checkpoint.load(chunk, staged.path)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        found = chunk.eval()(tokens, positions, None)
    assert (found - wanted).abs().max() <= LOGITS < wanted.abs().max() / 1000


def assert_equal_directories(one: Path, other: Path) -> None:
    left, right = (load_file(path / "model.safetensors") for path in (one, other))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    configs = [json.loads((path / "config.json").read_text()) for path in (one, other)]
    assert configs[0] == configs[1]


TP2_PP2: dict[str, Any] = dict(
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
    module: dict[str, Any], core: dict[str, Any], tmp_path: Path, trial: Callable[..., Trial]
) -> None:
    """megatron-core pads the vocabulary to twice its size here, which must not show."""
    shape = {**module["model"], "layers": 2, "seq": 64}  # it could read longer texts
    apart(stage, tmp_path, shape)
    tuned = dict(shape, seq=32, pretrained=str(tmp_path / "hf"))
    plain = trial(module, model=tuned, train_steps=3, lr_decay_steps=3, save_interval_steps=3)
    spread = trial(
        core,
        **{**TP2_PP2, "pretrained": str(tmp_path / "megatron")},
        train_steps=3,
        lr_decay_steps=3,
        save_interval_steps=3,
    )
    assert plain.train() == [0]
    assert spread.train() == [0] * 4
    loss, norm = largest_difference(plain, spread, 1)
    assert loss <= LOSSES and norm <= 100 * LOSSES
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
