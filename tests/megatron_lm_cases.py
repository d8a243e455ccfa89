"""Plans as arguments of an external Megatron-LM: what is planned, and the words that it becomes.

The words are compared in tests/unit/engines; a real parser reads them in tests/engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planned_job import planned_job

from hpctrain.engines.megatron_lm import MegatronLmConfig, Places, arguments, megatron_lm_config
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec
from hpctrain.spec.run import RunSpec

ROOT = Path(__file__).resolve().parents[1]
FRESH = Places(save="/run/.saving", data_cache="/run/cache")
RESUMED = Places(save="/run/.saving", data_cache="/run/cache", load="/run", load_step=40)
EXPERTS = dict(experts=8, top_k=2, ffn=1024, shared_ffn=2048, dense_layers=1)
LATENT = dict(kv_rank=512, nope_dim=64, rope_dim=32, value_dim=96)
SETTINGS: dict[str, Any] = dict(
    use_precision_aware_optimizer=True,
    exp_avg_dtype="bf16",
    exp_avg_sq_dtype="fp8",
    main_params_dtype="fp16",
    grad_reduce_in_fp32=False,
    num_distributed_optimizer_instances=2,
    hierarchical_context_parallel_sizes=(2, 2),
    attention_backend="fused",
    calculate_per_token_loss=True,
    cross_entropy_loss_fusion=True,
    tp_comm_overlap=True,
)
GROWING = {"global": 64, "ramp_up": dict(start=16, increment=16, samples=150)}


@dataclass(frozen=True)
class Case:
    """An example with sections changed, some of its words, and names that it must not have.

    A `model` stands in place of the whole section. A switch has no value.
    """

    example: str = "llama7b"
    profile: str = "a100x1"
    changes: Mapping[str, Any] = field(default_factory=dict)
    places: Places = FRESH
    words: Mapping[str, str] = field(default_factory=dict)
    without: Sequence[str] = ()
    model: Mapping[str, Any] | None = None

    def config(self) -> MegatronLmConfig:
        """Plan it for an external Megatron-LM."""
        site = load_profile(find_profile(self.profile)).document
        return megatron_lm_config(planned_job(self.spec(), site))

    def spec(self) -> RunSpec:
        base = load_run_spec(ROOT / "examples" / f"{self.example}.yaml", ()).document
        document = base.model_dump(mode="json", by_alias=True)
        document["engine"] = {"name": "megatron-lm", "checkout": "/opt/Megatron-LM"}
        for section, values in self.changes.items():
            before = document[section]
            document[section] = {**before, **values} if isinstance(before, dict) else values
        document["model"] = self.model or document["model"]
        return RunSpec.model_validate(document)


def given(config: MegatronLmConfig, places: Places = FRESH, **how: bool) -> dict[str, str]:
    """Arguments by name; a switch is empty."""
    found: dict[str, str] = {}
    name = ""
    for word in arguments(config, places, **how):
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            assert name not in found, f"{name} twice"
            found[name] = value
        else:
            found[name] = f"{found[name]} {word}".strip()
    return found


def switches(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "")


CASES = {
    "gpt175b": Case(
        "gpt175b", "a100x64",
        words={
            "num-layers": "96", "hidden-size": "12288", "ffn-hidden-size": "49152",
            "num-attention-heads": "96", "seq-length": "2048", "tensor-model-parallel-size": "8",
            "pipeline-model-parallel-size": "8", "num-virtual-stages-per-pipeline-rank": "3",
            "data-path": "0.8 data/web 0.2 data/books",
            "position-embedding-type": "learned_absolute",
            **switches("sequence-parallel", "bf16", "use-distributed-optimizer"),
            **switches("exit-signal-handler"),
        },
        without=(
            "swiglu", "num-experts", "load", "mock-data", "disable-bias-linear", "rotary-base",
            "ckpt-step", "exit-on-missing-checkpoint",
        ),
    ),
    "resumed": Case(
        "gpt175b", "a100x64", places=RESUMED,
        words={"load": "/run", "ckpt-step": "40", **switches("exit-on-missing-checkpoint")},
    ),
    "elastic": Case("gpt175b", "a100x64", dict(resources=dict(min_nodes=32))),
    "llama": Case(
        words={
            **switches("swiglu", "disable-bias-linear", "untie-embeddings-and-output-weights"),
            "normalization": "RMSNorm", "rotary-base": "10000", "eval-interval": "200",
            "data-path": "data/domain",  # one source has no weight
            "eval-iters": "8",
        },
        without=("muon-momentum",),
    ),
    "uneven": Case(
        "llama7b", "a100x64",
        dict(
            parallel=dict(tp=2, pp=4, order="tp-cp-ep-pp-dp", stages=(9, 8, 8, 7)),
            recompute="full",
            resources=dict(gpus=16),
        ),
        words={
            **switches("use-tp-pp-dp-mapping"), "context-parallel-size": "1",
            "pipeline-model-parallel-layout": "|".join(
                ("E" + "t" * 9, "t" * 8, "t" * 8, "t" * 7 + "L")
            ),
            "recompute-granularity": "full", "recompute-method": "uniform",
            "recompute-num-layers": "1",
        },
        without=("num-virtual-stages-per-pipeline-rank", "recompute-modules"),
    ),
    "some layers": Case(
        "llama7b", "a100x64",
        dict(recompute="full", recompute_layers=2, resources=dict(gpus=64)),
        words={"recompute-method": "block", "recompute-num-layers": "2"},
    ),
    "nothing recomputed": Case(
        "llama7b", "a100x64", dict(recompute="none", resources=dict(gpus=64)),
        without=(
            "recompute-granularity", "recompute-method", "recompute-num-layers",
            "recompute-modules",
        ),
    ),
    "attention recomputed": Case(
        "llama7b", "a100x64", dict(recompute="selective", resources=dict(gpus=64)),
        words={"recompute-granularity": "selective", "recompute-modules": "core_attn"},
        without=("recompute-method", "recompute-num-layers"),
    ),
    "axes": Case(
        "llama7b", "a100x64",
        dict(
            parallel=dict(tp=2, pp=2, vpp=2, cp=2),
            recompute="selective",
            recompute_modules=("core_attn", "mlp"),
            optimizer=dict(offload="cpu"),
            resources=dict(gpus=16),
        ),
        words=switches("optimizer-cpu-offload", "use-precision-aware-optimizer"),
    ),
    "experts": Case(
        changes=dict(parallel=dict(tp=2, ep=4), model=dict(moe=EXPERTS, layers=4)),
        words={
            "num-experts": "8", "moe-layer-freq": "([0]*1+[1]*3)",
            "expert-model-parallel-size": "4", "expert-tensor-parallel-size": "1",
        },
    ),
    "parts": Case(
        changes=dict(
            parallel=dict(ep=4),
            schedule=dict(style="wsd", wsd_decay_steps=500, wsd_style="minus_sqrt"),
            model=dict(
                layers=4,
                bias="qkv",
                init_std=0.01,
                vocab_multiple=256,
                rope=dict(partial=0.5, scaling=dict(kind="linear", factor=2.0)),
                moe=dict(EXPERTS, balance="seq_aux_loss", balance_loss=0.02, z_loss=1e-3),
            ),
        ),
    ),
    "latent": Case(
        changes=dict(parallel={}, model=dict(mla=LATENT, layers=4, mtp_layers=1)),
        words={"kv-lora-rank": "512", "mtp-num-layers": "1"},
        without=("kv-channels", "q-lora-rank", "group-query-attention"),
    ),
    "exact": Case("gpt-tiny", "sandbox", dict(engine=dict(deterministic=True))),
    "tiny": Case("gpt-tiny", "sandbox", dict(engine=dict(implementation="local"))),
    "fp32": Case(
        "gpt-tiny", "sandbox", dict(data=dict(sources=()), optimizer=dict(zero=0)),
        words=switches("mock-data"), without=("data-path", "split"),
    ),
    "not evaluated": Case(
        "gpt-tiny", "sandbox", dict(evaluation=dict(every_steps=None)), words={"eval-iters": "0"}
    ),
    # Megatron-LM's lines are its only sign of life; the log gets as many as the spec says.
    "seldom logged": Case(changes=dict(logging=dict(every_steps=100)), words={"log-interval": "1"}),
    "settings": Case(
        "llama7b", "a100x64",
        dict(
            parallel=dict(tp=2, cp=4), resources=dict(gpus=16), engine=dict(megatron=SETTINGS)
        ),
        words={
            **switches("use-precision-aware-optimizer", "grad-reduce-in-bf16", "tp-comm-overlap"),
            **switches("calculate-per-token-loss", "cross-entropy-loss-fusion"),
            "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "fp8", "main-params-dtype": "fp16",
            "main-grads-dtype": "bf16", "num-distributed-optimizer-instances": "2",
            "hierarchical-context-parallel-sizes": "2 2", "cp-comm-type": "a2a+p2p",
            "attention-backend": "fused", "tp-comm-bootstrap-backend": "nccl",
        },
    ),
    "without settings": Case(
        "llama7b", "a100x64", dict(parallel=dict(tp=2, cp=4), resources=dict(gpus=16))
    ),
    "muon": Case(
        "llama7b", "a100x64",
        dict(
            optimizer=dict(kind="muon", momentum=0.9), parallel=dict(tp=8), resources=dict(gpus=16)
        ),
        words={"optimizer": "muon", "muon-momentum": "0.9"},
        without=("use-distributed-optimizer", "overlap-param-gather"),
    ),
    "grows": Case(
        changes=dict(
            batch=GROWING,
            budget={"steps": 12, "tokens": None},
            schedule=dict(warmup_steps=5, style="wsd", wsd_decay_steps=2),
        ),
        words={
            "rampup-batch-size": "16 16 150", "global-batch-size": "64",
            "train-samples": str(176 + 5 * 64), "lr-decay-samples": str(176 + 5 * 64),
            "lr-warmup-samples": str(4 * 16 + 32), "lr-wsd-decay-samples": "128",
        },
        without=("train-iters", "lr-decay-iters", "lr-warmup-iters"),
    ),
    "own": Case(
        changes=dict(
            engine=dict(
                arguments={
                    "log-throughput": True,
                    "high-priority-stream-groups": ["dp", "pp"],
                    "initial-loss-scale": -1.5,
                }
            )
        ),
        words={
            **switches("log-throughput"), "high-priority-stream-groups": "dp pp",
            "initial-loss-scale": "-1.5",
        },
    ),
}  # fmt: skip
