"""DeepSpeed: from spec and plan to `train.json`, and from that to DeepSpeed's own `ds_config.json`.

Belongs here: both documents and the pure functions that fill them. Does not belong here: torch,
deepspeed, contradictions in a spec (see `hpctrain.spec.engines.deepspeed`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from hpctrain.engines.module import ModuleConfig, module_config
from hpctrain.plan.layout_words import DEFAULT_ORDER, Offload, Order

if TYPE_CHECKING:
    from hpctrain.plan.job import TrainingJob

_ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
# Weights below this many times the hidden size (biases, norms) stay whole on every rank: gathering
# them costs more than keeping them (as transformers/integrations/deepspeed.py, trainer_config_*).
_WHOLE_PER_HIDDEN = 10
# runtime/zero/offload_config.py: elements of one buffer between NVMe and memory
_LEAST_SWAP_BUFFER = 100_000_000


class DeepSpeedConfig(ModuleConfig):
    """A model of Hugging Face's classes under `deepspeed.initialize`."""

    engine: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: Offload = "none"
    offload_parameters: Offload = "none"
    nvme_path: str | None = None
    # PyTorch's AdamW; False: DeepSpeed's own, which a compiler builds on the nodes
    torch_adam: bool = True
    overlap_comm: bool = False
    reduce_bucket_elements: int
    gather_bucket_elements: int
    # precision of gradient sums over ranks; None: that of the computation
    communication_dtype: Literal["fp32", "bf16"] | None = None
    # transformer layers of each stage of a pipeline, the first stage first; empty: no pipeline
    pipeline_stages: tuple[int, ...] = ()
    # ranks that split each weight, next to each other
    tensor_parallel: int = 1
    # axes from the nearest ranks to the farthest: of one stage or of one pipeline
    parallel_order: Order = DEFAULT_ORDER

    @property
    def computes_on_host(self) -> bool:
        return self.offload_optimizer != "none"

    @property
    def pipelines_near(self) -> bool:
        return bool(self.pipeline_stages) and self.parallel_order != DEFAULT_ORDER

    @property
    def library_config(self) -> dict[str, Any]:
        return ds_config(self)

    @property
    def world_size(self) -> int:
        stages = max(1, len(self.pipeline_stages))
        return self.tensor_parallel * stages * self.data_parallel_size

    def pipeline_stage(self, rank: int) -> int:
        """Find the stage of a rank: ranks vary over tp first, then over dp and pp in the layout's
        order."""
        inner = self.tensor_parallel
        if self.parallel_order == DEFAULT_ORDER:
            inner *= self.data_parallel_size
        return rank // inner % max(1, len(self.pipeline_stages))

    @property
    def layout_words(self) -> str:
        tensors = f"tp {self.tensor_parallel} · " if self.tensor_parallel > 1 else ""
        pipeline = f"pp {len(self.pipeline_stages)} · " if self.pipeline_stages else ""
        return f"{tensors}{pipeline}dp {self.data_parallel_size} · ZeRO {self.zero_stage}"


def deepspeed_config(job: TrainingJob) -> DeepSpeedConfig:
    """Fill the document of engine `deepspeed` from a plan."""
    spec, plan = job.spec, job.plan
    own, element_bytes = spec.engine.deepspeed, _ELEMENT_BYTES[plan.precision]
    uses_nvme = "nvme" in (plan.offload, own.offload_parameters)
    stages = tuple(sum(stage.chunk_layers) for stage in plan.stages)
    return DeepSpeedConfig(
        **dict(module_config(job)),
        zero_stage=cast(Literal[0, 1, 2, 3], plan.zero),
        offload_optimizer=plan.offload,
        offload_parameters=own.offload_parameters,
        nvme_path=own.nvme_path if uses_nvme else None,
        torch_adam=own.adam == "torch" or (own.adam == "auto" and plan.offload == "none"),
        # behind a pipeline DeepSpeed sums gradients after all passes (runtime/engine.py,
        # _configure_zero_optimizer)
        overlap_comm=(
            spec.optimizer.overlap_grad_reduce and plan.layout.dp > 1 and plan.layout.pp == 1
        ),
        # DeepSpeed fills memory of this size in every step, however few gradients there are
        reduce_bucket_elements=max(1, min(int(own.reduce_bucket) // element_bytes, plan.learned)),
        gather_bucket_elements=max(1, int(own.gather_bucket) // element_bytes),
        communication_dtype=None if own.reduce_precision == "auto" else own.reduce_precision,
        pipeline_stages=stages if plan.layout.pp > 1 else (),
        tensor_parallel=plan.layout.tp,
        parallel_order=plan.layout.order,
    )


def ds_config(config: DeepSpeedConfig) -> dict[str, Any]:
    """Render the configuration of `deepspeed.initialize`, as plain values of JSON."""
    settings: dict[str, Any] = dict(
        train_batch_size=config.global_batch_size,
        train_micro_batch_size_per_gpu=config.micro_batch_size,
        gradient_accumulation_steps=config.microbatches,
        gradient_clipping=config.clip_grad,
        optimizer=dict(
            type="AdamW",
            params=dict(
                lr=config.lr,  # set again before each step (see `hpctrain.train.schedule`)
                betas=[config.adam_beta1, config.adam_beta2],
                eps=config.adam_eps,
                weight_decay=config.weight_decay,
                torch_adam=config.torch_adam,
                adam_w_mode=True,
                **(dict(fused=True) if config.torch_adam else {}),
            ),
        ),
        # DeepSpeed would refuse PyTorch's AdamW on offloaded state, which needs no compiler
        zero_force_ds_cpu_optimizer=False,
        zero_optimization=_zero(config),
        # ranks need not agree on a tag: the run's manifest names the checkpoint to load
        checkpoint=dict(tag_validation="Ignore"),
        # it would wait for the GPU twice a step
        timers=dict(throughput=dict(enabled=False)),
    )
    if config.precision == "bf16":
        settings["bf16"] = dict(enabled=True)
        # microbatches add up in fp32, as with the other engines
        settings["data_types"] = dict(grad_accum_dtype="fp32")
    if config.tensor_parallel > 1 and not config.pipeline_stages:
        # with a pipeline, the trainer passes all axes to DeepSpeed itself
        # (train/engines/deepspeed/pipeline_stages.py)
        settings["tensor_parallel"] = dict(
            autotp_size=config.tensor_parallel, vocab_parallel_lm_head=True
        )
    if config.communication_dtype is not None:
        settings["communication_data_type"] = config.communication_dtype
    return settings


def _zero(config: DeepSpeedConfig) -> dict[str, Any]:
    stage = config.zero_stage
    settings: dict[str, Any] = dict(stage=stage)
    if stage == 0:
        return settings
    settings |= dict(
        overlap_comm=config.overlap_comm,
        contiguous_gradients=True,
        reduce_bucket_size=config.reduce_bucket_elements,
    )
    if config.offload_optimizer != "none":
        settings["offload_optimizer"] = _home(config, config.offload_optimizer)
    if stage < 3:
        return settings | dict(allgather_bucket_size=config.gather_bucket_elements)
    if config.offload_parameters != "none":
        settings["offload_param"] = _home(config, config.offload_parameters)
        if config.offload_parameters == "nvme":
            # a buffer holds the largest part of a weight on one rank, that of the embedding
            largest = max(config.model.vocab, config.model.ffn_size) * config.model.hidden
            elements = max(_LEAST_SWAP_BUFFER, -(-largest // config.data_parallel_size))
            settings["offload_param"]["buffer_size"] = elements
    return settings | dict(
        stage3_prefetch_bucket_size=config.gather_bucket_elements,
        stage3_param_persistence_threshold=_WHOLE_PER_HIDDEN * config.model.hidden,
    )


def _home(config: DeepSpeedConfig, device: str) -> dict[str, Any]:
    """Configure an offload device; on NVMe with a directory of the run alone, which DeepSpeed
    empties (runtime/swap_tensor/partitioned_param_swapper.py, _configure_aio)."""
    home: dict[str, Any] = dict(device=device, pin_memory=True)
    if device == "nvme":
        assert config.nvme_path is not None, "offload to nvme without a directory"
        home["nvme_path"] = f"{config.nvme_path}/hpctrain-{config.run_name}"
    return home
