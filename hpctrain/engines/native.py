"""PyTorch's own data parallelism, FSDP and DDP: from spec and plan to `train.json`.

Belongs here: the document and the pure function that fills it. Does not belong here: torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hpctrain.engines.module import ModuleConfig, module_config
from hpctrain.spec.engines.native import DdpSpec
from hpctrain.spec.engines.registry import abilities_of

if TYPE_CHECKING:
    from hpctrain.plan.job import TrainingJob


class NativeConfig(ModuleConfig):
    """A model of Hugging Face's classes under `fully_shard` or `DistributedDataParallel`.

    `shard_size` ranks share one copy of model and optimizer (FSDP; 1 with DDP). There are
    `data_parallel_size` / `shard_size` copies (HSDP if more than 1).
    """

    engine: Literal["fsdp", "ddp"]
    shard_size: int = 1
    # True: weights are sharded again after the forward pass (ZeRO-3); False: kept until the end of
    # the backward pass (gradients and optimizer are still sharded: ZeRO-2)
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    muon_momentum: float = 0.95
    ddp: DdpSpec = DdpSpec()
    # ranks of one node, for hierarchical sums
    node_size: int = 1

    @property
    def computes_on_host(self) -> bool:
        return self.cpu_offload

    @property
    def layout_words(self) -> str:
        copies = self.data_parallel_size // self.shard_size
        return f"dp {self.data_parallel_size} · shard {self.shard_size} · copies {copies}"


def native_config(job: TrainingJob) -> NativeConfig:
    """Fill the document of engine `fsdp` or `ddp` from a plan."""
    plan = job.plan
    sharded = abilities_of(plan.engine).shards
    return NativeConfig(
        **dict(module_config(job)),
        shard_size=plan.shard_gpus or plan.layout.dp if sharded else 1,
        reshard_after_forward=plan.zero == 3,
        cpu_offload=plan.offload == "cpu",
        optimizer=job.spec.optimizer.kind,
        muon_momentum=job.spec.optimizer.momentum,
        ddp=job.spec.engine.ddp,
        node_size=plan.nodes.gpus_per_node,
    )
