"""`init --from`: what each name of another tool's configuration becomes, by its line.

The files are written for these tests in the form of each tool.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from command_line import hpctrain

from hpctrain.adopt.configuration import _READERS, Brought, bring
from hpctrain.base.errors import InvalidInputError
from hpctrain.spec.fields import annotation_at
from hpctrain.spec.loader import load_run_spec
from hpctrain.spec.other_tools import table_of, tools
from hpctrain.spec.run import RunSpec

TABLES = [tool.name for tool in tools() if table_of(tool.name) is not None]

MEGATRON = """\
#!/bin/bash
GPUS=8
HIDDEN=512  # of the model
ARGS=(
    --num-layers 6
    --hidden-size $HIDDEN
    --num-attention-heads 8 --group-query-attention --num-query-groups 2
    --seq-length 1024 --max-position-embeddings 4096
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --rotary-percent 0.5
    --use-rope-scaling
    --window-size 127,0
    --init-method-std 0.01
    --vocab-size ${VOCAB:-32000}
    --make-vocab-size-divisible-by 64
    --num-experts 8 --moe-router-topk 2 --moe-z-loss-coeff 1e-3
    --moe-layer-freq '([0]*1+[1]*5)'
)
torchrun --nproc_per_node $GPUS --nnodes 2 pretrain_gpt.py "${ARGS[@]}" \\
    --micro-batch-size 1 --global-batch-size 64 \\
    --train-samples 6400 --lr-warmup-fraction 0.1 --lr-decay-style WSD --lr-wsd-decay-iters 20 \\
    --lr 3e-4 --min-lr 3e-5 --bf16 --use-distributed-optimizer \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size $((1 * 2)) \\
    --reset-position-ids --eod-mask-loss \\
    --data-path 0.3 data/a 0.7 data/b --rampup-batch-size 8 8 100 \\
    --save out --muon-momentum 0.9 --no-such-flag 3
"""
TORCHTITAN = """\
[job]
dump_folder = "./outputs"

[model]
name = "llama3"
flavor = "8B"

[optimizer]
lr = 3e-4

[lr_scheduler]
warmup_steps = 20
decay_ratio = 0.1
min_lr_factor = 0.1

[training]
local_batch_size = 2
seq_len = 4096
steps = 1000
dataset = "c4"

[parallelism]
data_parallel_shard_degree = 4
data_parallel_replicate_degree = 2

[checkpoint]
interval = 100
"""
NANOTRON = """\
general: {project: p, run: tiny_%date, seed: 42}
model:
  dtype: bfloat16
  init_method: {std: 0.025}
  model_config: {hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 256,
                 intermediate_size: 128, hidden_act: silu, is_llama_config: true,
                 z_loss_coefficient: 1.0e-4}
optimizer:
  zero_stage: 1
  learning_rate_scheduler: {learning_rate: 3.0e-4, lr_warmup_steps: 2, lr_decay_style: cosine,
                            lr_decay_steps: 13, lr_decay_starting_step: null}
parallelism: {dp: 2, tp: 2, pp: 1, tp_mode: REDUCE_SCATTER, pp_engine: 1f1b}
tokens: {batch_accumulation_per_replica: 4, micro_batch_size: 3, sequence_length: 32,
         train_steps: 15}
checkpoints: {checkpoint_interval: 10, checkpoints_path: out}
"""
NEMO = """\
run: {name: tiny, time_limit: "0-01:00:00"}
trainer: {num_nodes: 2, devices: 4, precision: bf16, max_steps: 100, val_check_interval: 0.5}
exp_manager: {explicit_log_dir: out, name: x}
model:
  micro_batch_size: 1
  global_batch_size: 16
  encoder_seq_length: 512
  num_layers: 4
  hidden_size: 128
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  num_attention_heads: 4
  rotary_percentage: 0.5
  tensor_model_parallel_size: 2
  optim: {name: distributed_fused_adam, lr: 1e-4, betas: [0.9, 0.98],
          sched: {name: CosineAnnealing}}
  data: {data_prefix: [1.0, data/a], splits_string: "98,2,0", reset_position_ids: false}
  rampup_batch_size: [4, 4, 64]
"""
BRIDGE = """\
train: {train_iters: 10, global_batch_size: 8, micro_batch_size: 1, eval_iters: 0,
        rampup_batch_size: [4, 2, 16]}
model: {seq_length: 128, tensor_model_parallel_size: 1, num_layers: 2, hidden_size: 64,
        num_attention_heads: 4, vocab_size: 100}
optimizer: {lr: 0.0003}
scheduler: {lr_warmup_iters: 2, lr_decay_style: cosine}
peft: {dim: 8}
"""
DEEPSPEED = """\
{
\t"train_batch_size": "auto",
\t"train_micro_batch_size_per_gpu": 4,
\t"gradient_accumulation_steps": 2,
\t"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"},
\t\t"zero_quantized_weights": true},
\t"bf16": {"enabled": true},
\t"fp16": {"enabled": false},
\t"optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.8, 0.999]}}
}
"""
AXOLOTL = """\
base_model: Meta-Llama-3-8B
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
sequence_len: 2048
adapter: lora
lora_r: 8
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
max_steps: 200
num_epochs: 1
warmup_ratio: 0.1
learning_rate: 2e-5
optimizer: adamw_torch
lr_scheduler: cosine
bf16: auto
gradient_checkpointing: true
"""
LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen-None
stage: sft
finetuning_type: lora
lora_target: all
cutoff_len: 1024
template: qwen
dataset: identity
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
deepspeed: examples/ds_z3_config.json
"""
FILES = {
    "Megatron-LM": ("train.sh", MEGATRON),
    "torchtitan": ("llama3_8b.toml", TORCHTITAN),
    "nanotron": ("tiny.yaml", NANOTRON),
    "NeMo": ("nemo.yaml", NEMO),
    "Megatron-Bridge": ("override.yaml", BRIDGE),
    "DeepSpeed": ("ds.json", DEEPSPEED),
    "axolotl": ("lora.yaml", AXOLOTL),
    "LLaMA-Factory": ("sft.yaml", LLAMA_FACTORY),
}


def brought(tool: str, **how: int) -> tuple[Brought, dict[str, str]]:
    """The result, and field by name."""
    file, text = FILES[tool]
    done = bring(text, Path(file), **how)  # type: ignore[arg-type]
    assert done.tool == tool
    return done, {one.name: f"{one.field}={one.reason}" for one in done.names if one.field}


def reasons(done: Brought, outcome: str) -> dict[str, tuple[int, str]]:
    return {one.name: (one.line, one.reason) for one in done.names if one.outcome == outcome}


@pytest.mark.parametrize("tool", TABLES)
def test_every_row_is_a_field_of_a_spec_with_a_reader_that_is_there(tool: str) -> None:
    table = table_of(tool)
    assert table is not None
    paths = [row.field for row in table.rows.values()] + list(table.defaults)
    paths += [path for row in table.rows.values() for path in (*row.also, *row.without)]
    for path in paths:
        if path is not None and not path.startswith("@") and path != "model":
            assert annotation_at(RunSpec, tuple(path.split("."))) is not None, path
    assert {row.reader for row in table.rows.values()} <= {None, *_READERS}


def test_no_reader_is_without_a_row() -> None:
    tables = [table for name in TABLES if (table := table_of(name)) is not None]
    assert {row.reader for table in tables for row in table.rows.values()} - {None} == {*_READERS}


def test_a_script_of_megatron_lm(tmp_path: Path) -> None:
    done, fields = brought("Megatron-LM")
    assert fields["hidden-size"] == "model.hidden=512"
    assert fields["vocab-size"] == "model.vocab=32000"
    assert fields["add-qkv-bias"] == "model.bias=qkv"
    assert fields["window-size"] == "model.attention.window=128"
    assert fields["moe-layer-freq"] == "model.moe.dense_layers=1"
    assert fields["pipeline-model-parallel-size"] == "parallel.pp=2"
    assert fields["data-path"] == "data.sources=data/a, data/b"
    dropped, missing = reasons(done, "dropped"), reasons(done, "no field")
    assert dropped["save"][0] == 31 and "saves, resumes" in dropped["save"][1]
    assert missing["no-such-flag"] == (31, "hpctrain does not know this name")
    (tmp_path / "spec.yaml").write_text(done.text.replace("document_end: ASK", "document_end: 2"))
    spec = load_run_spec(tmp_path / "spec.yaml").document
    assert spec.resources.gpus == 16
    # of 8, 8, 16, 24, 32, 56 and then 64 samples; a tenth of 6,400 is warm-up
    assert spec.batch.megatron_ramp_up == (8, 8, 100)
    assert [spec.batch.sizes.samples_after(steps) for steps in (1, 2, 3, 4, 6)] == [
        8,
        16,
        32,
        56,
        144,
    ]
    assert (spec.train_steps, spec.schedule.warmup_steps) == (104, 14)
    assert (spec.schedule.style, spec.schedule.wsd_decay_steps) == ("wsd", 20)
    assert (spec.model.init_std, spec.model.vocab_multiple, spec.model.bias) == (0.01, 64, "qkv")
    assert spec.model.moe is not None and spec.model.moe.z_loss == 1e-3
    scaling = spec.model.rotates.scaling
    assert scaling is not None and (scaling.kind, scaling.original_seq) == ("llama3", 8192)
    assert (spec.data.documents, spec.data.mask_document_ends) == ("restart", True)
    assert spec.model.dropout == 0.1 and spec.optimizer.beta2 == 0.999, "Megatron-LM's defaults"


OPTIONS = """\
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 --vocab-size 99
--train-iters 5 --global-batch-size 8 --bf16 --mock-data --use-distributed-optimizer
--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2 --cp-comm-type a2a+p2p
--use-precision-aware-optimizer --exp-avg-dtype fp16 --exp-avg-sq-dtype fp8 --main-grads-dtype bf16
--main-params-dtype fp16 --num-distributed-optimizer-instances 2 --attention-backend fused
--calculate-per-token-loss --data-args-path data/args.txt
"""


def test_options_of_optimizer_attention_and_loss_have_fields(tmp_path: Path) -> None:
    done = bring(OPTIONS, Path("a.txt"))
    assert reasons(done, "no field") == {}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "args.txt").write_text("0.3 data/a\n0.7 data/b\n")
    (tmp_path / "spec.yaml").write_text(done.text)
    spec = load_run_spec(tmp_path / "spec.yaml").document
    assert [(one.path, one.weight) for one in spec.data.sources] == [
        ("data/a", 0.3),
        ("data/b", 0.7),
    ]
    own = spec.engine.megatron
    assert (own.exp_avg_dtype, own.exp_avg_sq_dtype, own.main_params_dtype) == (
        *("fp16", "fp8", "fp16"),
    )
    assert own.use_precision_aware_optimizer and not own.grad_reduce_in_fp32
    assert (own.num_distributed_optimizer_instances, own.attention_backend) == (2, "fused")
    assert own.hierarchical_context_parallel_sizes == (2, 2) and own.calculate_per_token_loss


def test_muon_has_a_field_and_its_momentum_with_it() -> None:
    plain, muon = (
        bring(f"{OPTIONS}--muon-momentum 0.9 {more}\n", Path("a.txt"))
        for more in ("", "--optimizer muon")
    )
    assert "without `optimizer: muon`" in reasons(plain, "no field")["muon-momentum"][1]
    assert "kind: muon" in muon.text and "momentum: 0.9" in muon.text


def test_a_file_of_data_arguments_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(OPTIONS)
    done = hpctrain("init", "--from", "a.txt", "--name", "one")
    assert done.exit_code == 0, done.transcript()
    said = " ".join(done.stderr.split())
    assert "`data.sources`: data/args.txt: " in said, done.transcript()


def test_a_list_of_arguments_and_the_yaml_of_megatrons_tests() -> None:
    words = "--num-layers 2 --hidden-size 64\n--num-attention-heads 4 --seq-length 32 --lr 1e-3\n"
    yaml = "MODEL_ARGS:\n  --num-layers: 2\n  --hidden-size: 64\n  --seq-length: 32\n"
    for text, file in ((words, "arguments.txt"), (yaml, "model_config.yaml")):
        found = {one.name: one.field for one in bring(text, Path(file)).names}
        assert (found["num-layers"], found["hidden-size"]) == ("model.layers", "model.hidden")


def test_a_file_of_torchtitan(tmp_path: Path) -> None:
    done, fields = brought("torchtitan")
    assert fields["model.flavor"] == "model.preset=llama-3-8b"
    assert reasons(done, "no field")["training.dataset"][0] == 20
    (tmp_path / "spec.yaml").write_text(done.text)
    spec = load_run_spec(tmp_path / "spec.yaml").document
    assert (spec.engine.name, spec.resources.gpus, spec.optimizer.shard_gpus) == ("fsdp", 8, 4)
    assert (spec.batch.global_, spec.schedule.wsd_decay_steps) == (16, 100)
    assert spec.optimizer.min_lr == pytest.approx(3e-5)


def test_a_file_of_nanotron(tmp_path: Path) -> None:
    done, _ = brought("nanotron")
    assert reasons(done, "no field")["model.model_config.z_loss_coefficient"][0] == 7
    (tmp_path / "spec.yaml").write_text(done.text)
    spec = load_run_spec(tmp_path / "spec.yaml").document
    assert (spec.resources.gpus, spec.batch.global_, spec.schedule.decay_steps) == (4, 24, 15)
    assert (spec.name, spec.model.init_std, spec.optimizer.zero) == ("tiny_-date", 0.025, 1)


def test_a_file_of_nemo_with_references() -> None:
    done, fields = brought("NeMo")
    assert fields["model.ffn_hidden_size"] == "model.ffn=512"
    assert fields["trainer.num_nodes"] == "resources.gpus=8"
    assert fields["model.optim.betas"] == "optimizer.beta1=0.9"
    assert "beta2: 0.98" in done.text and "partial: 0.5" in done.text
    assert fields["model.rampup_batch_size"] == "batch.ramp_up.start=4"
    assert "    increment: 4  # from" in done.text and "    samples: 64  # from" in done.text
    assert reasons(done, "dropped")["model.data.reset_position_ids"][1] == "as without it"


def test_a_file_of_megatron_bridge() -> None:
    done, fields = brought("Megatron-Bridge")
    assert fields["model.num_layers"] == "model.layers=2" and fields["peft.dim"] == "lora.rank=8"
    assert "evaluation" not in done.text, "no batches"
    assert fields["train.rampup_batch_size"] == "batch.ramp_up.start=4"


def test_a_file_of_deepspeed_with_tabs() -> None:
    done, fields = brought("DeepSpeed", gpus=16)
    assert fields["gradient_accumulation_steps"] == "batch.global=128"
    assert fields["zero_optimization.offload_optimizer.device"] == "optimizer.offload=cpu"
    assert reasons(done, "no field")["zero_optimization.zero_quantized_weights"][0] == 6
    assert reasons(done, "dropped")["train_batch_size"][1].startswith("whoever reads")


def test_files_of_fine_tuning() -> None:
    done, fields = brought("axolotl")
    assert fields["base_model"] == "model.preset=llama-3-8b"
    assert fields["warmup_ratio"] == "schedule.warmup_steps=20"
    assert reasons(done, "no field")["num_epochs"][0] == 12
    done, fields = brought("LLaMA-Factory")
    assert "ASK: the directory of Qwen/Qwen-None" in done.text
    assert fields["deepspeed"] == "optimizer.zero=3" and "name: deepspeed" in done.text
    assert "prompts" in reasons(done, "no field")["stage"][1]


def test_the_command_writes_the_spec_and_says_what_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text(MEGATRON)
    done = hpctrain("init", "--from", "train.sh", "--gpus", "32", "--name", "mine")
    assert done.exit_code == 0, done.transcript()
    assert "NO FIELD" in done.stdout and "model.layers" in done.stdout
    assert "Megatron-LM, 44 names: 39 understood, 2 without a field, 3 left out" in done.stderr
    assert "`data.document_end`: a question is open here" in done.stderr
    assert "gpus: 32" in Path("mine.yaml").read_text()
    shown = hpctrain("init", "-", "--from", "train.sh")
    assert shown.stdout.startswith("# Made of train.sh")
    assert hpctrain("init", "--from", "train.sh", "--model", "gpt2").exit_code == 2


@pytest.mark.parametrize("tool", FILES)
@pytest.mark.parametrize("verb", ["validate", "plan"])
def test_such_a_file_is_no_spec_and_its_error_names_the_way(
    tool: str, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, text = FILES[tool]
    Path(file).write_text(text)
    where = ("-p", "a100x1") if verb == "plan" else ()
    done = hpctrain(verb, *where, file)
    assert done.exit_code == 3, done.transcript()
    expected = f"{file}:1:1: this is no spec of a run, but a configuration of {tool}"
    assert expected in done.stderr
    assert f"hint: `hpctrain init --from {file}` makes a spec of it" in done.stderr


def test_other_files_are_named_with_what_reads_them() -> None:
    config = '{"model_type": "llama", "hidden_size": 64, "architectures": []}'
    for file, text, hint in (
        ("config.json", config, "hpctrain init --model"),
        ("job.sh", "#!/bin/bash\n#SBATCH --nodes=2\npython train.py\n", "hpctrain adopt"),
        ("notes.txt", "hello\n", "known: Megatron-LM"),
    ):
        with pytest.raises(InvalidInputError) as raised:
            bring(text, Path(file))
        assert hint in (raised.value.problems[0].hint or "")


def test_a_name_of_another_tool_in_a_spec_has_its_field_as_the_hint(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("name: a\nmodel: {num_layers: 2, num_hidden_layers: 2}\n")
    with pytest.raises(InvalidInputError) as raised:
        load_run_spec(path)
    hints = {one.hint for one in raised.value.problems if "unknown key" in one.message}
    assert {hint.partition("`;")[0] for hint in hints if hint} == {
        "this is Megatron-LM's name of `model.layers",
        "this is the name in config.json of `model.layers",
    }


@pytest.mark.parametrize("tool", FILES)
def test_any_text_is_read_or_refused(tool: str) -> None:
    """Lines are lost, doubled and broken by characters that the forms know."""
    file, text = FILES[tool]
    random = Random(37)
    for _ in range(40):
        changed = text
        for _ in range(random.randint(1, 4)):
            at, length = random.randrange(len(changed)), random.choice((0, 1, 40, 400))
            noise = "".join(random.choices("-=$(){}[]\"'\\ \n\t:#,.*+01aZ", k=random.randint(0, 9)))
            changed = changed[:at] + noise + changed[at + length :] or " "
        with suppress(InvalidInputError):
            bring(changed, Path(file))
