"""The section of an external Megatron-LM in the spec, its contradictions, and its abilities.

Belongs here: arguments of `pretrain_gpt.py` that a spec may not set, because a field of the spec or
hpctrain itself sets them; its abilities. Does not belong here: rendering arguments (see
`hpctrain.engines.megatron_lm`), checking that a checkout has an argument (its own parser does that
when the job starts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from hpctrain.spec.document import Contradiction, Document
from hpctrain.spec.engines import megatron
from hpctrain.spec.engines.abilities import (
    MEGATRON_CORE,
    MODEL_AXES,
    OFFLOAD_WORD,
    WORDS_OF_EVERY_ENGINE,
    Choices,
    EngineAbilities,
)
from hpctrain.spec.engines.megatron import ENVIRONMENT, MESH_WORDS, ZERO_WORDS
from hpctrain.spec.other_tools import NameRow, table_of

if TYPE_CHECKING:
    from hpctrain.spec.engine import EngineSpec

MEGATRON_LM_ENTRY = "pretrain_gpt.py"
ArgumentName = Annotated[str, Field(pattern=r"^[a-z][A-Za-z0-9_-]*$")]
ArgumentValue = bool | int | float | str | tuple[int | float | str, ...]

# Field of the spec -> the arguments that it sets, without dashes, with names of several versions.
_BY_FIELD: dict[str, str] = {
    "model.layers": "num-layers encoder-num-layers decoder-num-layers",
    "model.hidden": "hidden-size",
    "model.ffn": "ffn-hidden-size",
    "model.heads": "num-attention-heads",
    "model.kv_heads": "group-query-attention num-query-groups",
    "model.head_dim": "kv-channels",
    "model.vocab": "vocab-size padded-vocab-size",
    "model.vocab_multiple": "make-vocab-size-divisible-by",
    "model.seq": "seq-length encoder-seq-length decoder-seq-length max-position-embeddings",
    "model.activation": "swiglu squared-relu openai-gelu",
    "model.norm": "normalization",
    "model.norm_epsilon": "norm-epsilon layernorm-epsilon",
    "model.positions": "position-embedding-type use-rotary-position-embeddings rope-type "
    "no-position-embedding",
    "model.rope_base": "rotary-base",
    "model.tied": "untie-embeddings-and-output-weights",
    "model.bias": "disable-bias-linear add-bias-linear",
    "model.dropout": "hidden-dropout attention-dropout",
    "model.moe": "num-experts moe-layer-freq moe-ffn-hidden-size moe-router-topk "
    "moe-shared-expert-intermediate-size",
    "model.mla": "multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim "
    "qk-pos-emb-head-dim v-head-dim",
    "model.mtp_layers": "mtp-num-layers",
    "model.pretrained": "pretrained-checkpoint finetune",
    "data.sources": "data-path train-data-path valid-data-path test-data-path data-args-path "
    "per-split-data-args-path mock-data",
    "data.split": "split",
    "data.cache": "data-cache-path",
    "batch.global": "global-batch-size batch-size",
    "batch.micro": "micro-batch-size",
    "batch.ramp_up": "rampup-batch-size step-batch-size-schedule",
    "budget": "train-iters train-samples",
    "precision": "bf16 fp16",
    "optimizer.lr": "lr",
    "optimizer.min_lr": "min-lr",
    "optimizer.beta1": "adam-beta1",
    "optimizer.beta2": "adam-beta2",
    "optimizer.epsilon": "adam-eps",
    "optimizer.weight_decay": "weight-decay",
    "optimizer.clip_grad": "clip-grad",
    "optimizer.zero": "use-distributed-optimizer",
    "optimizer.offload": "optimizer-cpu-offload",
    "optimizer.overlap_grad_reduce": "overlap-grad-reduce",
    "optimizer.overlap_param_gather": "overlap-param-gather",
    "schedule.style": "lr-decay-style",
    "schedule.wsd_decay_steps": "lr-wsd-decay-iters lr-wsd-decay-samples",
    "schedule.wsd_style": "lr-wsd-decay-style",
    "schedule.warmup_steps": "lr-warmup-iters lr-warmup-samples lr-warmup-fraction",
    "schedule.decay_steps": "lr-decay-iters lr-decay-samples",
    "parallel.tp": "tensor-model-parallel-size model-parallel-size",
    "parallel.pp": "pipeline-model-parallel-size",
    "parallel.vpp": "num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank",
    "parallel.stages": "pipeline-model-parallel-layout decoder-first-pipeline-num-layers "
    "decoder-last-pipeline-num-layers account-for-embedding-in-pipeline-split "
    "account-for-loss-in-pipeline-split",
    "parallel.cp": "context-parallel-size",
    "parallel.ep": "expert-model-parallel-size",
    "parallel.etp": "expert-tensor-parallel-size",
    "parallel.order": "use-tp-pp-dp-mapping",
    "parallel.sequence_parallel": "sequence-parallel",
    "recompute": "recompute-granularity recompute-method "
    "recompute-activations checkpoint-activations",
    "recompute_layers": "recompute-num-layers",
    "recompute_modules": "recompute-modules",
    "checkpoint.every_steps": "save-interval persistent-save-interval",
    "checkpoint.keep": "save-retain-interval most-recent-k",
    "checkpoint.asynchronous": "async-save use-persistent-ckpt-worker",
    "evaluation.every_steps": "eval-interval",
    "evaluation.batches": "eval-iters",
    "engine.implementation": "transformer-impl",
    **{
        f"engine.megatron.{name}": name.replace("_", "-")
        for name in (
            *("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"),
            *("main_params_dtype", "num_distributed_optimizer_instances", "attention_backend"),
            *("hierarchical_context_parallel_sizes", "calculate_per_token_loss"),
        )
    },
    "engine.megatron.grad_reduce_in_fp32": "grad-reduce-in-bf16 main-grads-dtype "
    "accumulate-allreduce-grads-in-fp32",
    "engine.deterministic": "deterministic-mode",
    "engine.collective_timeout": "distributed-timeout-minutes",
    "resources.min_nodes": "dist-ckpt-optim-fully-reshardable",
    "logging.every_steps": "log-interval",
    "seed": "seed",
}
# Arguments that would bypass hpctrain's control of a launch.
_OWN = (
    "save load ckpt-format ckpt-step use-dist-ckpt dist-ckpt-format exit-on-missing-checkpoint "
    "no-save-optim no-save-rng no-load-optim no-load-rng override-ckpt-iteration "
    "non-persistent-save-interval non-persistent-ckpt-type use-checkpoint-args "
    "use-mp-args-from-checkpoint-args ckpt-convert-format ckpt-convert-save "
    "exit-interval exit-duration-in-mins exit-signal exit-signal-handler "
    "exit-signal-handler-for-dataloader exit-signal-handler-for-training "
    "distributed-backend local-rank fake-process-group skip-train test-mode "
    "inprocess-restart enable-ft-package adlr-autoresume yaml-cfg perform-rl-step "
    "phase-transition-iterations iterations-to-skip"
)
# Arguments that no field expresses and that a run of hpctrain excludes, by the reason.
_EXCLUDED = {
    "a step has the batch that the spec says": "decrease-batch-size-if-needed",
    "the plan would be that of another model, see `model.pattern` and `model.activation`": (
        "hybrid-layer-pattern hybrid-override-pattern heterogeneous-layers-config-path quick-geglu"
    ),
    "its checkpoints have a form that hpctrain does not read; engine `fsdp` shards parameters": (
        "use-torch-fsdp2 use-megatron-fsdp use-custom-fsdp data-parallel-sharding-strategy"
    ),
}
EXCLUDED = {name: why for why, names in _EXCLUDED.items() for name in names.split()}
FIELD_OF = {name: field for field, names in _BY_FIELD.items() for name in names.split()}
KEPT_BACK = frozenset(_OWN.split())


def refusal(name: str) -> tuple[str, str] | None:
    """Explain why a spec may not set the argument `name`, and what to do; None if it may."""
    plain = name.replace("_", "-")
    if plain in EXCLUDED:
        return f"--{plain}: {EXCLUDED[plain]}", "remove it"
    field = FIELD_OF.get(plain) or FIELD_OF.get(plain.removeprefix("no-"))
    if field is not None:
        return f"`{field}` decides --{plain}", f"remove it, and set `{field}`"
    if plain in KEPT_BACK:
        return f"hpctrain decides --{plain}: it saves, resumes and ends launches", "remove it"
    return None


def misuse(value: ArgumentValue) -> tuple[str, str] | None:
    """Explain what is wrong with the value of an argument, and what to do; None if valid."""
    if value is False:
        return "a switch is on, or it is not given", "remove it, or write `no-...: true`"
    words = value if isinstance(value, tuple) else (value,)
    if isinstance(value, tuple) and any(str(word).startswith("-") for word in words):
        return "an element beginning with `-` would be read as another argument", "remove it"
    if not words or any(not str(word).isprintable() or not str(word) for word in words):
        return "not a word for a command line", "give a value, or `true` for a switch"
    return None


# Sections of a spec in which an argument may say the same as its field.
_COMPARED = ("model", "optimizer", "parallel", "precision", "engine")


def contradictions(engine: EngineSpec, choices: Choices) -> Iterator[Contradiction]:
    """Find arguments that say otherwise than the field that decides them.

    Of the model's parts, arguments that its field leaves open are taken as they are.
    """
    yield from megatron.contradictions(engine, choices)
    for name, value in engine.arguments.items():
        row, plain = _row(name), name.replace("_", "-")
        if row is None or row.field is None or (misuse(value) or plain in EXCLUDED):
            continue
        field, section = row.field, row.field.partition(".")[0]
        ours: object = engine if section == "engine" else getattr(choices, section, None)
        if section not in _COMPARED or ours is None:
            continue
        part = ours
        for step in field.split(".")[1:]:
            ours = getattr(part := ours, step, None)
        if section == "parallel" and not choices.layout_given:  # the planner chooses
            ours = None
        theirs = row.values.get(str(value).lower() if value is True else str(value), value)
        guarded = plain in FIELD_OF
        is_open = ours is None or (
            isinstance(part, Document)
            and ours == type(part).model_fields[field.rpartition(".")[2]].default
        )
        if theirs == ours or (row.reader is None and is_open and not guarded):
            continue
        if guarded or row.reader is None:
            is_known = f", and is {_shown(ours)}, not {_shown(theirs)}" if ours is not None else ""
            message = f"`{field}` decides --{plain}{is_known}"
            hint = f"remove it, and set `{field}`"
            yield Contradiction(("engine", "arguments", name), message, hint)


def _row(name: str) -> NameRow | None:
    table = table_of("megatron_lm")
    return None if table is None else table.rows.get(name.replace("_", "-"))


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_compared(name: str) -> bool:
    """Whether `contradictions` compares an argument with its field, in place of a refusal."""
    row = _row(name)
    if row is None or row.field is None or row.reader is not None:
        return False
    return row.field.partition(".")[0] in _COMPARED and name.replace("_", "-") not in EXCLUDED


def first_wrong(arguments: Mapping[str, ArgumentValue]) -> tuple[str, str, str] | None:
    """Find the first invalid argument: its name, what is wrong, what to do."""
    for name, value in arguments.items():
        wrong = (None if _is_compared(name) else refusal(name)) or misuse(value)
        if wrong is not None:
            return name, *wrong
    return None


def wrong_settings(engine: EngineSpec) -> Iterator[Contradiction]:
    """Find a missing checkout, and the first argument that a spec may not set."""
    yield from megatron.wrong_settings(engine)
    if engine.checkout is None:
        message = "engine megatron-lm needs `checkout`, the directory of the Megatron-LM"
        hint = "add `checkout: /path/to/Megatron-LM`"
        yield Contradiction(("engine", "name"), message, hint)
    wrong = first_wrong(engine.arguments)
    if wrong is not None:
        name, message, hint = wrong
        yield Contradiction(("engine", "arguments", name), message, hint)


def profiler_arguments(steps: tuple[int, ...]) -> str:
    """Write the arguments that make Megatron-LM trace these steps itself."""
    return (
        f"Megatron-LM's own `engine.arguments`: {{profile: true, "
        f"profile-step-start: {steps[0]}, profile-step-end: {steps[-1] + 1}, "
        "use-pytorch-profiler: true}"
    )


ABILITIES = EngineAbilities(
    name="megatron-lm",
    title="an external Megatron-LM",
    packages=("torch",),
    document="hpctrain.engines.megatron_lm:MegatronLmConfig",
    fill="hpctrain.engines.megatron_lm:megatron_lm_config",
    program="hpctrain.train.engines.megatron_lm.program",
    preflight="hpctrain.train.engines.megatron.preflight",
    rules="hpctrain.plan.abilities.trainable_megatron_lm",
    verifier="hpctrain.train.engines.megatron.verify",
    export="hpctrain.convert.run_checkpoint:export_megatron",
    settings={"megatron": "{}", "checkout": "", "entry": MEGATRON_LM_ENTRY, "arguments": "{}"},
    wrong_settings=wrong_settings,
    contradictions=contradictions,
    model_classes=MEGATRON_CORE,
    pads_vocab=True,
    masks_document_ends=False,  # its NullTokenizer has an end of documents of its own
    chooses_router_losses=True,
    splits_experts=True,  # --expert-tensor-parallel-size
    axes=MODEL_AXES,
    zero_stages=(0, 1),
    optimizers=("adamw", "muon"),  # --optimizer muon, with the package emerging_optimizers
    offloads=("none", "cpu"),  # --optimizer-cpu-offload
    recomputes=("none", "selective", "full"),
    recomputes_some=True,  # --recompute-method block
    precisions=("fp32", "fp16", "bf16", "fp8", "fp4"),  # 8 and 4 bits by `engine.arguments`
    checkpoint_files_per_rank=2,  # its writer has two threads
    checkpoint_files_of_leader=3,
    calibration="megatron-core",
    gradient_addition="product",
    chooses_overlap=True,
    saves_by_steps_only=True,
    environment=ENVIRONMENT,
    own_profiler=profiler_arguments,
    words=(*ZERO_WORDS, OFFLOAD_WORD, *WORDS_OF_EVERY_ENGINE, *MESH_WORDS),
)
