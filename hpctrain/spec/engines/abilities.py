"""Describe an engine without importing any of its code: one record per engine.

Belongs here: the record, and the types of its fields. Does not belong here: any engine (each has a
module beside this one), the table of engines (see `registry`), code that trains.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hpctrain.spec.data import Documents
from hpctrain.spec.document import Contradiction
from hpctrain.spec.model import ModelSpec

if TYPE_CHECKING:
    from hpctrain.spec.data import DataSpec
    from hpctrain.spec.engine import EngineSpec
    from hpctrain.spec.run import OptimizerSpec, ParallelSpec

Axis = Literal["tp", "pp", "vpp", "cp", "ep"]
Home = Literal["none", "cpu", "nvme"]
Recompute = Literal["none", "selective", "full"]
RecomputeModule = Literal["core_attn", "mlp", "moe", "layernorm", "moe_act", "mla_up_proj"]
Precision = Literal["fp32", "fp16", "bf16", "fp8", "fp4"]
# How a microbatch's weight gradients join those of earlier ones. product: the product that computes
# them adds (Megatron's gradient_accumulation_fusion); main: a kernel adds them to main gradients
# (Megatron's distributed_data_parallel.py, `main_grad.add_`; DeepSpeed's BF16_Optimizer,
# update_hp_grads); autograd: PyTorch adds to `grad` from the second microbatch on (AccumulateGrad);
# block: FSDP copies them into the block that is reduced (_fsdp_collectives.py, foreach_reduce);
# joined: its first version, where autograd has joined them before (torch.split) and which then
# changes their type and divides them (_runtime_utils.py).
GradientAddition = Literal["product", "main", "autograd", "block", "joined"]
MODEL_AXES: tuple[Axis, ...] = ("tp", "pp", "vpp", "cp", "ep")

# Libraries whose classes the engines train.
MEGATRON_CORE, TRANSFORMERS = "megatron", "transformers"


@dataclass(frozen=True)
class Word:
    """A word after an engine's name in `--engines`, and the fields of the spec that it sets.

    `#` in it stands for a number, also in the overrides.
    """

    text: str
    overrides: tuple[str, ...]

    def match(self, word: str) -> tuple[str, ...] | None:
        """Return the overrides of `word`; None if it does not match."""
        pattern = re.escape(self.text).replace(r"\#", "([1-9][0-9]*)")
        found = re.fullmatch(pattern, word)
        if found is None:
            return None
        number = found[1] if found.groups() else ""
        return tuple(override.replace("#", number) for override in self.overrides)


def zero_word(stage: int) -> Word:
    """Make the word `zero2`."""
    return Word(f"zero{stage}", (f"optimizer.zero={stage}",))


OFFLOAD_WORD = Word("offload", ("optimizer.offload=cpu",))
WORDS_OF_EVERY_ENGINE = (
    Word("recompute", ("recompute=full",)),
    Word("no-recompute", ("recompute=none",)),
    Word("bf16", ("precision=bf16",)),
    Word("fp32", ("precision=fp32",)),
    Word("micro#", ("batch.micro=#",)),
)
TENSOR_WORD = Word("tp#", ("parallel.tp=#",))
PIPELINE_WORD = Word("pp#", ("parallel.pp=#",))
CONTEXT_WORD = Word("cp#", ("parallel.cp=#",))


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The fields of a spec outside of `engine` that may contradict an engine's settings.

    `parallel` is the layout of one GPU where the planner chooses it: then `layout_given` is False.
    `model` None: it is invalid.
    """

    optimizer: OptimizerSpec
    precision: str
    parallel: ParallelSpec
    layout_given: bool
    recompute: str = "auto"
    recompute_modules: tuple[str, ...] = ()
    recompute_layers: int | None = None
    activation_offload_layers: int | Literal["auto"] = 0
    model: ModelSpec | None = None
    data: DataSpec | None = None


@dataclass(frozen=True, kw_only=True)
class EngineAbilities:
    """Name, abilities and settings of one engine, and the modules that contain its code.

    Modules are named, not imported, because most commands need no code of an engine. They are
    imported by these names only, never by what a document contains.
    """

    name: str
    # as people write it
    title: str

    # packages that its trainer imports, and the extra of hpctrain's distribution that installs them
    packages: tuple[str, ...] = ("torch",)
    extra: str | None = None
    extra_packages: tuple[str, ...] = ()  # that this extra brings, by the names that are imported

    # -- modules -----------------------------------------------------------------------------
    # `module:name` of the class of its train.json, below `hpctrain.engines.training.TrainConfig`
    document: str
    # `module:name` of the function (spec, plan, peak FLOP/s of a GPU) -> that document
    fill: str
    # has `join` and `build` (`hpctrain.train.engine.Room`); None: `program` trains
    assembly: str | None = None
    # has `run(job, keeper, digests)`, which runs an external training program
    program: str | None = None
    # has `engine_problems(config, run)`, which a rank calls before torch is imported
    preflight: str | None = None
    # function without arguments -> `hpctrain.train.software.LibraryFindings`: imports the engine's
    # library and checks it, before any process group exists
    library_check: str | None = None
    # `hpctrain.plan.abilities.trainable.Rules`
    rules: str | None = None
    # program that builds the stages of a plan without GPUs, for `plan --verify`
    verifier: str | None = None
    # `module:name` of the function (train.json, checkpoint, directory) -> `ConversionReport`, which
    # writes a checkpoint as a Hugging Face directory; None: it cannot be converted
    export: str | None = None

    # -- settings that it alone reads ----------------------------------------------------------
    # field of `engine` -> the YAML value that resets it to its default
    settings: Mapping[str, str] = field(default_factory=dict)
    # contradictions within `engine`, and with other sections of the spec
    wrong_settings: Callable[[EngineSpec], Iterator[Contradiction]] = lambda engine: iter(())
    contradictions: Callable[[EngineSpec, Choices], Iterator[Contradiction]] = (
        lambda engine, choices: iter(())
    )

    # -- models and data -----------------------------------------------------------------------
    # values of `precision` that hpctrain trains; others can be planned
    trained_precisions: tuple[str, ...] = ("bf16", "fp32")
    # library of the trained classes: decides the initial weights and the kept activations
    model_classes: str = TRANSFORMERS
    # families that it trains; None: all
    families: tuple[str, ...] | None = None
    # samples that are packed sequences of tokens
    reads_packed: bool = False
    # kind of directory that `model.pretrained` names (`hpctrain.checkpoints.staged`)
    weights: Literal["hugging_face", "megatron_core"] = "hugging_face"
    # rows of the embedding are padded to a multiple of `model.vocab_multiple` x tp
    pads_vocab: bool = False
    # values of `data.documents`, and whether it reads `data.mask_document_ends`
    documents: tuple[Documents, ...] = ("joined",)
    masks_document_ends: bool = True
    # reads `model.moe.balance` and `z_loss`
    chooses_router_losses: bool = False

    # -- splitting over ranks --------------------------------------------------------------------
    axes: tuple[Axis, ...] = ()
    # of `axes`, those that can be planned but that hpctrain does not train
    planned_axes: tuple[Axis, ...] = ()
    sequence_parallel: bool = True
    # tp ranks share a key/value head if there are fewer heads than ranks
    copies_kv_heads: bool = True
    # messages between pipeline stages are split over tp even without sequence parallelism
    splits_stage_messages: bool = False
    zero_stages: tuple[int, ...] = (0,)
    # values of `optimizer.kind`; another one than AdamW is not sharded
    optimizers: tuple[str, ...] = ("adamw",)
    # sharding over a subset of the ranks, with replicas (HSDP, `optimizer.shard_gpus`)
    shards_over_part: bool = False
    # ZeRO stage 3 together with tensor parallelism
    stage3_with_tensors: bool = True
    # reads `parallel.etp`
    splits_experts: bool = False

    # -- memory and time -------------------------------------------------------------------------
    # number formats that can be planned
    precisions: tuple[str, ...] = ("fp32", "fp16", "bf16", "fp8")
    # reads `recompute_layers`
    recomputes_some: bool = False
    # reads `activation_offload_layers`
    offloads_activations: bool = False
    offloads: tuple[Home, ...] = ("none",)
    # of `offloads`, those that can be planned but that hpctrain does not train
    planned_offloads: tuple[Home, ...] = ()
    recomputes: tuple[Recompute, ...] = ("none", "full")
    # the generation of software in `calibration.yaml` whose constants apply
    calibration: str
    # how a microbatch's weight gradients join those before it
    gradient_addition: GradientAddition = "autograd"
    # gradients are summed after all passes of a pipeline, without overlap
    sums_behind_pipeline: bool = False
    # reads `optimizer.overlap_grad_reduce`
    chooses_overlap: bool = False
    # weights stay in fp32, and each operation selects its precision (torch.autocast)
    autocast: bool = False
    # an fp32 main copy of trainable weights only
    main_copy_of_trained_only: bool = False

    # -- checkpoints and control -----------------------------------------------------------------
    # checkpoints contain weights once, in fp32, at any precision
    one_copy_checkpoints: bool = False
    # files of a checkpoint: at most so many written by each rank, and so many by rank 0
    checkpoint_files_per_rank: int = 1
    checkpoint_files_of_leader: int = 2
    # a checkpoint can be loaded at another ZeRO stage
    resumes_other_stage: bool = True
    # saves at fixed steps only, never on request
    saves_by_steps_only: bool = False
    # variables that must be set before torch is imported
    environment: Mapping[str, str] = field(default_factory=dict)

    # -- profiling -------------------------------------------------------------------------------
    # chosen steps -> the arguments that make its own program trace them; None: hpctrain traces
    own_profiler: Callable[[tuple[int, ...]], str] | None = None

    # -- comparing and advising ------------------------------------------------------------------
    # words of `--engines` after its name, in the order in which messages list them
    words: tuple[Word, ...] = WORDS_OF_EVERY_ENGINE
    # overrides that reset its own sharding and offload to their plain form
    plain: tuple[str, ...] = ()
    # dotted field with a directory on each node's NVMe, and one with the home of weights
    nvme_directory: str | None = None
    weight_home: str | None = None
    # dotted field with the size of a bucket of gradients, and the ZeRO stages that have buckets
    bucket: str | None = None
    bucket_stages: tuple[int, ...] = ()
    # dotted field of a hook that compresses gradients, and one with the precision of sums
    gradient_hook: str | None = None
    sum_precision: str | None = None
    # the engine to recommend if this one cannot shard
    sharding_alternative: str | None = None

    @property
    def trained_axes(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.axes if axis not in self.planned_axes)

    @property
    def trained_offloads(self) -> tuple[Home, ...]:
        return tuple(home for home in self.offloads if home not in self.planned_offloads)

    @property
    def shards(self) -> bool:
        """Whether the optimizer state can be sharded over ranks."""
        return self.zero_stages != (0,)

    @property
    def reads_images(self) -> bool:
        """Whether its library has models of images."""
        return self.model_classes != MEGATRON_CORE
