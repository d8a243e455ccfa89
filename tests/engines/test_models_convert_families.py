"""Every family that megatron-core has: its weights there compute what transformers computes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from trial_runs import LIMIT_SECONDS, MODULE_GPT, MOE, MakeTrial, apart, assert_near, wrap
from variants import varied

from bench import prefork
from hpctrain.base.errors import HpctrainError, InvalidInputError
from hpctrain.checkpoints.staged import open_staged
from hpctrain.convert import megatron_checkpoint, unfinished
from hpctrain.convert.__main__ import convert
from hpctrain.convert.hugging_face_directory import (
    TensorToWrite,
    write_model,
    write_tensors,
)
from hpctrain.convert.pretrained_weights import rules_of, tensors_of
from hpctrain.engines.conversion import conversion_config, shape_described, unconvertible
from hpctrain.engines.megatron import with_model
from hpctrain.records.manifest import read_manifest
from hpctrain.spec.families.settings import family_by, settings_of
from hpctrain.spec.model import ModelSpec
from hpctrain.train.engines.megatron import fixes
from hpctrain.train.engines.megatron.model import (
    build_chunks,
    load_weights,
    transformer_settings,
)
from hpctrain.train.engines.models.transformers_library import class_named

FILES = sorted((Path(__file__).parents[1] / "families").glob("*.json"))
CONFIGS = {file.stem: json.loads(file.read_text()) for file in FILES}
# Other choices of the same families.
CONFIGS |= {
    "cohere, norms of each head": {**CONFIGS["cohere"], "use_qk_norm": True},
    "hyperclovax, norms before": {**CONFIGS["hyperclovax"], "use_post_norm": False},
    "stablelm, no norms of heads": {**CONFIGS["stablelm"], "qk_layernorm": False},
    "stablelm 12b": {**CONFIGS["stablelm"], "use_parallel_residual": True},
    "falcon 40b": {
        **CONFIGS["falcon"],
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 2,
    },
    "gpt_bigcode, keys of each head": {**CONFIGS["gpt_bigcode"], "multi_query": False},
    "gpt_neox, one after the other": {**CONFIGS["gpt_neox"], "use_parallel_residual": False},
    "deepseek_v3, whole queries": {**CONFIGS["deepseek_v3"], "q_lora_rank": None},
    "mellum, as published": {
        **CONFIGS["mellum"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "attention_factor": 1.2772588722239782,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    },
    "mpt, six heads": {**CONFIGS["mpt"], "d_model": 96, "n_heads": 6},
    "llama, tied, with biases": {
        **CONFIGS["llama"],
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
}
CONVERTED = [name for name, config in CONFIGS.items() if not unconvertible(config)]
LOGITS = 2e-5  # fp32, of numbers of about 3
PADDED = 384  # of a vocabulary of 320


def model_of(name: str) -> ModelSpec:
    """The model of a fixture without prediction layers, which no class has."""
    return shape_described(CONFIGS[name]).model_copy(update={"mtp_layers": 0})


def stage(directory: Path, name: str) -> None:
    """Write a model with random weights, norms and biases, and its logits."""
    model, config = shape_described(CONFIGS[name]), CONFIGS[name]
    family = family_by(model)
    settings = settings_of(model.model_copy(update={"config": config, "seq": 16}))
    kind = class_named(family.classes["language_modeling"])
    torch.manual_seed(5)
    module = kind._from_config(class_named(family.settings)(**settings), dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        tokens = torch.randint(99, (2, 16))
        logits = module.eval()(input_ids=tokens).logits
    write_model(module, directory / "hf")
    torch.save([tokens, logits], directory / "logits.pt")


def assert_equal_files(one: Path, other: Path) -> None:
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert (one / "config.json").read_bytes() == (other / "config.json").read_bytes()


def test_as_many_families_as_megatron_core_has() -> None:
    assert len(CONVERTED) >= 30


QUICK = ("qwen3_moe",)


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> None:
    """What every forked process needs."""
    for name in ("Qwen3MoeForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"):
        class_named(name)


@pytest.mark.parametrize("name", varied(CONVERTED, *QUICK))
def test_a_family_computes_the_same_and_comes_back_equal(name: str, tmp_path: Path) -> None:
    apart(there_and_back, tmp_path, name)
    assert_equal_files(tmp_path / "hf", tmp_path / "back")


def there_and_back(directory: Path, name: str) -> None:
    stage(directory, name)
    convert(directory / "hf", directory / "megatron")
    with megatron_checkpoint.one_rank():
        compare_logits(directory, name)
    convert(directory / "megatron", directory / "back")


@torch.no_grad()
def compare_logits(directory: Path, name: str, **layout: int) -> None:
    """With those of this rank's part of the model in megatron-core, of which all are part."""
    from megatron.core import parallel_state

    fixes.install()
    tokens, wanted = torch.load(directory / "logits.pt")
    model = model_of(name)
    tp, pp = (layout.get(f"{axis}_model_parallel_size", 1) for axis in ("tensor", "pipeline"))
    config = conversion_config(model, half=False).model_copy(
        update={
            "padded_vocab_size": PADDED,
            "pipeline_layer_split": ((model.layers // pp,),) * pp,
            **layout,
        }
    )
    (chunk,) = build_chunks(config, transformer_settings(config, compiled=False))
    load_weights(str(directory / "megatron"), [chunk])
    rank, stages = dist.get_rank(), pp
    stage_number = rank // tp if stages > 1 else 0
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    if stage_number > 0:
        received = torch.empty(tokens.shape[1], tokens.shape[0], model.hidden)
        dist.recv(received, rank - tp)
        chunk.set_input_tensor(received)
    found = chunk.eval()(tokens, positions, None)
    if stage_number < stages - 1:
        dist.send(found.contiguous(), rank + tp)
        return
    if tp > 1:
        parts = [torch.empty_like(found) for _ in range(tp)]
        group = parallel_state.get_tensor_model_parallel_group()
        dist.all_gather(parts, found.contiguous(), group=group)
        found = torch.cat(parts, dim=-1)
    difference = (found[..., : model.vocab] - wanted).abs().max()
    assert difference <= LOGITS * max(1.0, float(wanted.abs().max())), difference


LAYOUTS: dict[str, dict[str, int]] = {
    "tp 2": {"tensor_model_parallel_size": 2},
    "pp 2": {"pipeline_model_parallel_size": 2},
    "ep 2": {"expert_model_parallel_size": 2, "data_parallel_size": 2},
}
SPLIT = [
    (name, layout)
    for name in ("gpt", "gemma3", "qwen3_moe", "deepseek_v3", "gpt_oss")
    for layout in LAYOUTS
    if layout != "ep 2" or model_of(name).moe is not None
]


@pytest.mark.nightly("layouts of ranks take seconds each")
@pytest.mark.parametrize(("name", "layout"), SPLIT)
def test_a_family_computes_the_same_on_several_ranks(
    name: str, layout: str, tmp_path: Path
) -> None:
    apart(stage, tmp_path, name)
    apart(convert, tmp_path / "hf", tmp_path / "megatron")
    whole_experts = {} if model_of(name).moe is None else {"expert_tensor_parallel_size": 1}
    sizes = LAYOUTS[layout] | whole_experts

    def one_of_two() -> None:
        from megatron.core import parallel_state, tensor_parallel

        rank = int(os.environ["RANK"])
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        model_parallel = {one: n for one, n in sizes.items() if one != "data_parallel_size"}
        parallel_state.initialize_model_parallel(**model_parallel)
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        compare_logits(tmp_path, name, **sizes)
        dist.barrier()

    ranks = prefork.fork(one_of_two, 2, tmp_path / "logs")
    assert ranks.wait(LIMIT_SECONDS) == [0, 0], ranks.log(0) + ranks.log(1)


@pytest.mark.variant("test_a_family_computes_the_same_and_comes_back_equal")
def test_layers_that_predict_are_converted_where_files_have_them(tmp_path: Path) -> None:
    """No class of transformers has them; published files do."""
    apart(stage, tmp_path, "deepseek_v3")
    file = tmp_path / "hf" / "model.safetensors"
    weights, layers = load_file(file), CONFIGS["deepseek_v3"]["num_hidden_layers"]
    last, behind = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    more = {
        name.replace(last, behind): weight + 1
        for name, weight in weights.items()
        if name.startswith(last)
    }
    hidden = CONFIGS["deepseek_v3"]["hidden_size"]
    more |= {
        f"{behind}{name}.weight": torch.randn(hidden)
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    more[f"{behind}eh_proj.weight"] = torch.randn(hidden, 2 * hidden)
    more[f"{behind}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    more[f"{behind}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file({**weights, **more}, file, {"format": "pt"})
    apart(convert, tmp_path / "hf", tmp_path / "megatron")
    apart(convert, tmp_path / "megatron", tmp_path / "back")
    assert_equal_files(tmp_path / "hf", tmp_path / "back")
    apart(load_with_predictions_and_other_norms, tmp_path / "megatron")


def load_with_predictions_and_other_norms(directory: Path) -> None:
    """As a run does whose layers have a norm as part of the next one, unlike the checkpoint."""
    with megatron_checkpoint.one_rank():
        model = shape_described(CONFIGS["deepseek_v3"])
        assert model.mtp_layers == 1
        chunk = megatron_checkpoint.build(model, torch.float32, on_meta=False)
        real = chunk.sharded_state_dict

        def named_otherwise(**given: Any) -> Any:
            state = real(**given)
            norm = state["decoder.layers.0.pre_mlp_layernorm.weight"]
            assert norm.key == "decoder.layers.0.pre_mlp_layernorm.weight"
            norm.key = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
            return state

        chunk.sharded_state_dict = named_otherwise
        load_weights(str(directory), [chunk])
        found = chunk.state_dict()["decoder.layers.0.pre_mlp_layernorm.weight"]
    weights = load_file(directory.parent / "hf" / "model.safetensors")
    assert torch.equal(found, weights["model.layers.0.post_attention_layernorm.weight"])


@pytest.mark.nightly("trains by two engines")
@pytest.mark.parametrize("ramp", [None, (4, 4, 4)])  # steps of 4, 8 and 8 samples
def test_experts_train_alike_from_one_directory_and_come_out_alike(
    ramp: tuple[int, int, int] | None, tmp_path: Path, trial: MakeTrial
) -> None:
    apart(stage, tmp_path, "qwen3_moe")
    file = tmp_path / "hf" / "config.json"
    # transformers adds no loss that balances experts
    config = {**json.loads(file.read_text()), "router_aux_loss_coef": 0.0}
    file.write_text(json.dumps(config))
    apart(convert, tmp_path / "hf", tmp_path / "megatron")
    model = shape_described(config).model_dump(exclude_none=True) | {"seq": 32}
    short = dict(train_steps=3, lr_decay_steps=3, save_interval_steps=3, global_batch_size=8)
    short |= dict(vocab_size=320, rampup_batch_size=ramp)
    whole = {**model, "pretrained": str(tmp_path / "hf"), "config": config}
    plain = trial(MODULE_GPT, **short, model=whole)
    spread = trial(
        with_model(MOE),
        **short,
        model={**model, "pretrained": str(tmp_path / "megatron")},
        padded_vocab_size=PADDED,
        pipeline_layer_split=((model["layers"],),),
        **LAYOUTS["ep 2"],
    )
    assert plain.train() == [0]
    assert spread.train() == [0, 0], spread.said
    assert_near(plain, spread, 1, 1e-4, 1e-2)
    assert plain.losses[3] < plain.losses[1] - 0.01, "it learns"
    weights = []
    for number, run in enumerate((plain, spread)):
        target = tmp_path / f"tuned-{number}"
        apart(convert, run.run.checkpoints / "iter_0000003", target)
        weights.append(load_file(target / "model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        assert (weight - weights[1][name]).abs().max() <= 2e-3, name


# -- Names, kills, memory ------------------------------------------------------------------------


def test_a_tensor_that_nobody_knows_or_that_is_missing_is_named(tmp_path: Path) -> None:
    apart(stage, tmp_path, "qwen3")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    norm = weights.pop("model.layers.1.self_attn.q_norm.weight")
    more = [norm.clone() for _ in range(2)]
    for changed, words in (
        (
            {"model.layers.0.self_attn.g_norm.weight": norm},
            "has no weight model.layers.1.self_attn.",
        ),
        ({"model.layers.1.self_attn.q_norm.weight": norm[:4]}, r"has shape \[4\], not \[16\]"),
        (
            {
                "model.layers.1.self_attn.q_norm.weight": norm,
                "model.layers.0.self_attn.g_norm.weight": more[0],
                "model.layers.0.self_attn.rotary_emb.inv_freq": more[1],  # of older versions
            },
            "has weights that no part of Qwen3 has: model.layers.0.self_attn.g_norm.weight$",
        ),
    ):
        save_file({**weights, **changed}, tmp_path / "hf" / "model.safetensors")
        apart(refused, tmp_path, words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "logits.pt"]


def refused(directory: Path, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        convert(directory / "hf", directory / "megatron")


def converted_in_parts(source: Path, target: Path, killed_at: int | None = None) -> None:
    """Convert into many small files; in the middle of one of them the process may be killed."""
    unfinished.MOST_FILE_BYTES = 100_000
    begun: list[str] = []

    @wrap(unfinished.UnfinishedConversion, "write")
    def write(original: Callable[..., Any], work: Any, name: str, write_file: Any) -> Any:
        def killed(stream: Any) -> None:
            stream.write(b"half of it")
            stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)

        begun.append(name)
        return original(work, name, killed if len(begun) == killed_at else write_file)

    convert(source, target)


@pytest.mark.parametrize("form", varied(["megatron", "back"], "megatron"))
def test_a_killed_conversion_goes_on_with_what_is_finished(form: str, tmp_path: Path) -> None:
    apart(stage, tmp_path, "llama")
    source = tmp_path / "hf"
    if form == "back":
        source = tmp_path / "source"
        apart(convert, tmp_path / "hf", source)
    apart(converted_in_parts, source, tmp_path / "whole")
    killed = prefork.fork(
        lambda: converted_in_parts(source, tmp_path / form, killed_at=4), 1, tmp_path / "logs"
    )
    assert killed.wait(LIMIT_SECONDS) == [-signal.SIGKILL]
    assert not (tmp_path / form).exists()
    partial = tmp_path / f"{form}.partial"
    *finished, last = sorted(path for path in partial.iterdir() if path.stat().st_size > 10_000)
    last.write_bytes(bytes(last.stat().st_size))  # a file that the disk has lost
    before = {path.name: path.stat().st_ino for path in finished}
    times = {path.name: path.stat().st_mtime_ns for path in finished}
    assert len(before) == 2
    apart(converted_in_parts, source, tmp_path / form)
    assert not partial.exists()
    for name, inode in before.items():
        state = (tmp_path / form / name).stat()
        assert (state.st_ino, state.st_mtime_ns) == (inode, times[name])
    found, wanted = (read_manifest(tmp_path / name) for name in (form, "whole"))
    assert found is not None and wanted is not None and len(found.files) > 6
    assert contents(found) == contents(wanted)


def contents(manifest: Any) -> dict[str, str]:
    return {file.name: file.sha256 for file in manifest.files if file.name != ".metadata"}


def test_another_source_and_a_second_process_do_not_mix(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "model").write_text("one")
    with pytest.raises(KeyboardInterrupt), unfinished.unfinished(target, source) as work:
        work.write("part", lambda stream: stream.write(b"of one"))
        with (
            pytest.raises(HpctrainError, match="is being written by another process"),
            unfinished.unfinished(target, source),
        ):
            pass
        raise KeyboardInterrupt
    (source / "model").write_text("other")
    with unfinished.unfinished(target, source) as work:
        work.write("part", lambda stream: stream.write(b"of two"))
    assert (target / "part").read_bytes() == b"of two"
    assert sorted(path.name for path in target.iterdir()) == ["manifest.json", "part"]


def test_what_the_disk_has_changed_is_noticed_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with (
        pytest.raises(HpctrainError, match="part has other content than was written"),
        unfinished.unfinished(tmp_path / "target", tmp_path / "source") as work,
    ):
        work.write("part", lambda stream: stream.write(b"as it was"))
        (work.directory / "part").write_bytes(b"as it is.")
    assert not (tmp_path / "target").exists()


def test_a_cut_checkpoint_for_megatron_core_is_not_opened(tmp_path: Path) -> None:
    apart(stage, tmp_path, "llama")
    apart(convert, tmp_path / "hf", tmp_path / "megatron")
    shard = tmp_path / "megatron" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InvalidInputError, match=r"is incomplete: __0_0\.distcp has"):
        open_staged(tmp_path / "megatron")


LARGE = dict(
    model_type="llama",
    num_hidden_layers=16,
    hidden_size=1024,
    num_attention_heads=8,
    intermediate_size=4096,
    vocab_size=4096,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)


@pytest.mark.nightly("writes three gigabytes")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A model of 1.1 GB in both directions, beside what a tiny one needs with all imports."""
    peaks = {}
    for name, changes in (("tiny", {"num_hidden_layers": 1, "vocab_size": 128}), ("large", {})):
        directory = tmp_path / name
        apart(stage_zeros, directory / "hf", {**LARGE, **changes})
        for source, target in (("hf", "megatron"), ("megatron", "back")):
            command = [sys.executable, "-m", "hpctrain.convert", source, target]
            process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE)
            _, status, usage = os.wait4(process.pid, 0)
            assert status == 0
            peaks[name, target] = usage.ru_maxrss * 1024
        assert_equal_files(directory / "hf", directory / "back")
    for target in ("megatron", "back"):
        assert peaks["large", target] - peaks["tiny", target] < 200 * 2**20, peaks
    assert (tmp_path / "large" / "hf" / "model.safetensors").stat().st_size > 2**30


def zeros(shape: tuple[int, ...]) -> Iterator[Any]:
    yield torch.zeros(shape)


def stage_zeros(directory: Path, config: dict[str, Any]) -> None:
    """Write a model's tensors one after the other."""
    model = shape_described(config)
    with megatron_checkpoint.one_rank():
        core = megatron_checkpoint.CoreWeights(model, torch.float32)
    shapes = tensors_of(model, core, rules_of(model, core.weights))
    with unfinished.unfinished(directory, Path(__file__).parent) as work:
        write_tensors(
            work,
            [
                TensorToWrite(name, torch.float32, shape, partial(zeros, shape))
                for name, (shape, _) in shapes.items()
            ],
        )
        (work.directory / "config.json").write_text(json.dumps(config))
