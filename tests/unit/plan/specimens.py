"""Specs and profiles for the tests of the planner, built in Python."""

from __future__ import annotations

from typing import Any

from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec

GPT175B = dict(layers=96, hidden=12288, heads=96, vocab=51200, seq=2048, tied=False)
GPT_TINY = dict(layers=4, hidden=128, heads=4, vocab=512, seq=64)
LLAMA7B = dict(family="llama", layers=32, hidden=4096, ffn=11008, heads=32, vocab=32000, seq=4096)
LLAMA405B = dict(
    family="llama",
    layers=126,
    hidden=16384,
    ffn=53248,
    heads=128,
    kv_heads=8,
    vocab=128256,
    seq=8192,
)

DEEPSEEK_V3: dict[str, Any] = dict(
    family="llama",
    layers=61,
    hidden=7168,
    ffn=18432,
    heads=128,
    vocab=129280,
    seq=4096,
    moe=dict(experts=256, top_k=8, ffn=2048, shared_ffn=2048, dense_layers=3),
    mla=dict(q_rank=1536, kv_rank=512),
)
DEEPSEEK_V2: dict[str, Any] = dict(
    family="llama",
    layers=60,
    hidden=5120,
    ffn=12288,
    heads=128,
    vocab=102400,
    seq=4096,
    moe=dict(experts=160, top_k=6, ffn=1536, shared_ffn=3072, dense_layers=1),
    mla=dict(q_rank=1536, kv_rank=512),
)
DEEPSEEK_V2_LITE: dict[str, Any] = dict(
    family="llama",
    layers=27,
    hidden=2048,
    ffn=10944,
    heads=16,
    vocab=102400,
    seq=4096,
    moe=dict(experts=64, top_k=6, ffn=1408, shared_ffn=2816, dense_layers=1),
    mla=dict(kv_rank=512),
)
MIXTRAL: dict[str, Any] = dict(
    family="llama",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    vocab=32000,
    seq=4096,
    moe=dict(experts=8, top_k=2, ffn=14336),
)


def run_spec(
    model: dict[str, Any] = GPT_TINY,
    gpus: int = 4,
    batch: int = 8,
    micro: int | str = 1,
    parallel: dict[str, Any] | str = "auto",
    resources: dict[str, Any] | None = None,
    **others: Any,
) -> RunSpec:
    """A valid spec; `others` are further top-level keys of the document."""
    document: dict[str, Any] = dict(
        name="specimen",
        model=model,
        batch={"global": batch, "micro": micro},
        budget={"steps": 10},
        optimizer={"lr": 1e-3},
        parallel=parallel,
        checkpoint={"every_steps": 5},
        resources={"gpus": gpus, **(resources or {})},
    )
    return RunSpec.model_validate({**document, **others})


def cluster(
    nodes: int = 64,
    per_node: int = 8,
    gpu_memory: str = "80GiB",
    reserved: str = "2GiB",
    domain: int = 8,
    partition: dict[str, Any] | None = None,
    **others: Any,
) -> ClusterProfile:
    """A cluster of A100-like nodes; `others` are further top-level keys of the document."""
    document: dict[str, Any] = dict(
        name="testbed",
        nodes={"count": nodes, "cpus": 128, "memory": "1TiB"},
        gpu={
            "type": "a100",
            "per_node": per_node,
            "memory": gpu_memory,
            "reserved": reserved,
        },
        nvlink={"domain": domain, "bandwidth": "300GB/s"},
        network={"fabric": "infiniband", "nics_per_node": 8, "nic_bandwidth": "200Gb/s"},
        filesystems=[
            {
                "name": "scratch",
                "path": "/scratch",
                "kind": "lustre",
                "write_bandwidth": "100GB/s",
                "read_bandwidth": "100GB/s",
            }
        ],
        slurm={"partitions": [{"name": "gpu", "default": True, **(partition or {})}]},
    )
    return ClusterProfile.model_validate({**document, **others})
