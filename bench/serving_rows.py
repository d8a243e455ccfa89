"""Published measurements of inference as typed rows, and the replica that each one ran on.

Belongs here: reading the CSV file (columns as in the README of the data), and the documented rules
for what a source leaves blank. Does not belong here: shapes of models (`public_models.yaml`),
formulas (`hpctrain.serve.plan`), errors (`serving_accuracy`).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from bench.cases import shape_of
from bench.published import PublishedRow
from bench.published_models import UnknownModel, model_of
from bench.serving_protocols import AS_DEFAULT, INFERENCE_X, BenchmarkRun, Protocol, inference_x
from bench.serving_recipes import PoolRecipe, Recipe, recipes_of
from hpctrain.plan.cost.case import Shape
from hpctrain.serve.plan.served_model import (
    PartFormats,
    ReplicaLayout,
    ServedModel,
    served_model,
    weight_bytes,
)
from hpctrain.spec.catalogue import Gpu, GpuCatalogue, match_gpu


class NotPriced(Exception):
    """A row that does not say enough, with the reason."""


@dataclass(frozen=True, kw_only=True)
class ServingRow:
    """One measurement; seconds and tokens. None: the source does not say."""

    line: int
    source: str
    ref: str
    model: str
    weights: str
    gpu: str
    n_gpus: float | None
    tp: str
    pp: float | None
    ep_dp: str
    engine: str
    dataset: str
    prompt_tokens: float | None
    output_tokens: float | None
    load_kind: str
    load_value: float | None
    request_rate: float | None
    token_rate: float | None
    ttft_mean: float | None
    ttft_p99: float | None
    tpot_mean: float | None
    e2e_mean: float | None
    note: str
    version: str = ""


@dataclass(frozen=True)
class Pool:
    """Replicas of one kind: how many, and how each is laid out."""

    replicas: float
    layout: ReplicaLayout


@dataclass(frozen=True)
class ServingCase:
    """What a row ran: `prefill` is None where one replica does both."""

    row: ServingRow
    gpu: Gpu
    engine: str
    served: ServedModel
    pool: Pool
    prefill: Pool | None = None
    drafted_tokens: int = 0
    protocol: Protocol = AS_DEFAULT
    assumed: tuple[str, ...] = ()


def number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if value == value else None


def read_serving_rows(path: Path) -> list[ServingRow]:
    with path.open(newline="", encoding="utf-8") as file:
        return [serving_row(line, cells) for line, cells in enumerate(csv.DictReader(file), 2)]


def serving_row(line: int, cells: dict[str, str]) -> ServingRow:
    def seconds(*names: str) -> float | None:
        found = next((v for v in (number(cells.get(name)) for name in names) if v), None)
        return None if found is None else found / 1e3

    return ServingRow(
        line=line,
        source=cells.get("source") or "",
        ref=cells.get("source_ref") or "",
        model=cells.get("model") or "",
        weights=(cells.get("weights") or "").lower(),
        gpu=cells.get("gpu") or "",
        n_gpus=number(cells.get("n_gpus")) or None,
        tp=cells.get("tp") or "",
        pp=number(cells.get("pp")) or None,
        ep_dp=cells.get("ep_dp") or "",
        engine=cells.get("engine") or "",
        dataset=cells.get("dataset") or "",
        prompt_tokens=number(cells.get("isl")) or None,
        output_tokens=number(cells.get("osl")) or None,
        load_kind=cells.get("load_kind") or "",
        load_value=number(cells.get("load_value")),
        request_rate=number(cells.get("req_s")),
        token_rate=number(cells.get("out_tok_s")),
        ttft_mean=seconds("ttft_mean_ms", "ttft_p50_ms"),
        ttft_p99=seconds("ttft_p99_ms"),
        tpot_mean=seconds("tpot_mean_ms", "tpot_p50_ms"),
        e2e_mean=seconds("e2e_mean_ms"),
        note=cells.get("note") or "",
        version=cells.get("engine_version") or "",
    )


# -- models and formats ---------------------------------------------------------------------------

# Linear attention blocks, weights and bytes of state of each, beside the attention blocks that the
# registry counts: Qwen3.5-397B has Gated DeltaNet in three of four layers (HF config.json:
# 16 key and 64 value heads of 128; in_proj of q, k, v, z, two gates; fp32 state of 64 x 128 x 128).
DELTA_NET = (
    45,
    4096 * (2 * 16 * 128 + 2 * 64 * 128 + 2 * 64) + 64 * 128 * 4096,
    64 * 128 * 128 * 4,
)
DELTA_NET_EVERY = 4
SPARSE_KEYS = 2048  # DeepSeek sparse attention: index_topk of HF zai-org/GLM-5


@cache
def model_shape(name: str) -> tuple[Shape, tuple[float, float, float], int]:
    try:
        shape = shape_of(model_of(PublishedRow(line=0, model=name)))
    except UnknownModel as error:
        raise NotPriced(f"model `{name}` is not known") from error
    if re.search(r"qwen-?3\.5-?397b", name, re.IGNORECASE):
        return replace(shape, attention_blocks=shape.layers / DELTA_NET_EVERY), DELTA_NET, 0
    if re.search(r"glm-?5", name, re.IGNORECASE):
        return shape, (0, 0, 0), SPARSE_KEYS
    return shape, (0, 0, 0), 0


def stated_weights(row: ServingRow, gpu: Gpu) -> str:
    """The precision of a row: its column, its model's name, or what its source ran.

    MLPerf's tables leave it blank: its submissions of Llama 2 70B and Mixtral ran FP4 on Blackwell,
    FP8 where the GPU has it, and 4-bit weights on Jetson (the systems' JSON files).
    """
    named = row.weights
    if not named:
        found = re.search(r"nvfp4|fp8|fp4|int4|awq|mxfp4", row.model.lower())
        named = found.group(0) if found else ""
    if not named and "mlperf" in row.source.lower():
        named = "fp4" if "fp4" in gpu.peak else "fp8" if "fp8" in gpu.peak else "int4"
    if not named and re.search(r"deepseek|minimax", row.model.lower()):
        named = "fp8"  # as their makers publish the weights
    if not named and "gpt-oss" in row.model.lower():
        named = "fp4"
    return {"awq": "int4", "": "bf16", "fp16": "bf16"}.get(named, named)


def formats_of(
    row: ServingRow, weights: str, engine: str, shape: Shape, generation: str
) -> PartFormats:
    """Formats of a model's parts.

    4-bit checkpoints of mixtures of experts keep attention in 16 bits (gpt-oss: MXFP4 experts;
    NVIDIA's NVFP4 and Moonshot's INT4 checkpoints: hf_quant_config.json, `exclude_modules`).
    TensorRT-LLM's quantised checkpoints have an FP8 cache, as InferenceX's scripts for Blackwell
    have where the weights are in 4 or 8 bits (--kv-cache-dtype).
    """
    experts = float(shape.moe_blocks) > 0
    narrow = weights in ("fp8", "fp4") and (
        engine.startswith("tensorrt-llm") or (of_inference_x(row) and generation == "blackwell")
    )
    cache = "fp8" if narrow else "bf16"
    if "gpt-oss" in row.model.lower():
        return PartFormats("bf16", "bf16", "mxfp4", cache)
    if experts and weights in ("fp4", "nvfp4", "int4"):
        return PartFormats("bf16", weights if weights != "int4" else "bf16", weights, cache)
    if weights == "fp8" and re.search(r"deepseek|qwen-?3|minimax|glm-?5|kimi", row.model.lower()):
        weights = "fp8-blocks"  # as their makers publish it: `weight_block_size` [128, 128]
    return PartFormats(weights, weights, weights, cache)


# -- GPUs, engines, layouts ------------------------------------------------------------------------

GPU_NAMES = (
    (r"gb300", "GB300"),
    (r"gb200", "GB200"),
    (r"b300", "B300-SXM"),
    (r"b200", "B200-SXM"),
    (r"gh200.*144", "GH200-144GB"),
    (r"gh200", "GH200-96GB"),
    (r"h200", "H200-141GB SXM"),
    (r"h100.*nvl", "H100-94GB NVL"),
    (r"h100.*pcie", "H100-80GB PCIe"),
    (r"h100", "H100-80GB SXM"),
    (r"mi300x", "MI300X"),
    (r"mi325x", "MI325X"),
    (r"rtx ?(pro )?6000 ?pro|rtx pro 6000", "RTX PRO 6000 Blackwell"),
    (r"l40s", "L40S"),
    (r"4090", "RTX 4090"),
    (r"nd96asr|a100.*40", "A100-40GB SXM"),
    (r"nc96ads|a100.*pcie", "A100-80GB PCIe"),
    (r"a100", "A100-80GB SXM"),
)


def gpu_of(row: ServingRow, catalogue: GpuCatalogue) -> Gpu:
    for pattern, name in GPU_NAMES:
        if re.search(pattern, row.gpu.lower()):
            found = match_gpu(catalogue, name)
            assert found is not None, name
            return found
    named = match_gpu(catalogue, row.gpu) if row.gpu else None
    if named is None:
        raise NotPriced(f"GPU `{row.gpu}` is not in the catalogue" if row.gpu else "no GPU named")
    return named


def engine_of(row: ServingRow) -> str:
    """The key of the engine's constants: the engine, and the year of older generations.

    MLPerf v4.1 and tables of that time ran engines with other schedulers and kernels.
    TensorRT-LLM before 1.2 and SGLang before 0.5.8 are of 2025, as is what was measured then.
    """
    text = f"{row.engine} {row.source}".lower()
    older = bool(re.search(r"tensorrt (9|10)\.|cuda 12\.[2-5]|0\.4\.|0\.5\.2|0\.5\.0 perf", text))
    for pattern, name in (
        ("sglang", "sglang"),
        ("trtllm|tensorrt|nim", "tensorrt-llm"),
        ("vllm", "vllm"),
        ("mlperf", "tensorrt-llm"),
    ):
        if re.search(pattern, text):
            aged = older or ("mlperf" in text and name == "tensorrt-llm")
            if aged and name != "sglang":
                return f"{name}-2024"
            return f"{name}-2025" if name != "vllm" and of_2025(row) else name
    return "other"


def of_2025(row: ServingRow) -> bool:
    """Tell whether a row's engine is of a generation before 2026, by version or day.

    Images of Dynamo before 0.7 hold TensorRT-LLM before 1.2.
    """
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", row.version)
    if not numbers:
        return measured_on(row) < "2026" and of_inference_x(row)
    version = tuple(int(text) for text in numbers.groups())
    if version[0] == 0:
        return version < ((0, 7, 0) if "trt" in row.engine else (0, 5, 8))
    return version < (1, 2, 0)


def measured_on(row: ServingRow) -> str:
    """The day of a measurement; empty where its source does not say."""
    found = re.search(r"measured=(\d{4}-\d\d-\d\d)", row.ref)
    return found.group(1) if found else ""


def whole(text: str | None) -> int:
    return int(text) if text else 0


@dataclass(frozen=True)
class Deployment:
    """What a row ran on: `prefill` computes prompts elsewhere, if it is there."""

    pool: Pool
    prefill: Pool | None = None
    drafted_tokens: int = 0
    assumed: tuple[str, ...] = ()


def deployment_of(row: ServingRow, gpu: Gpu, weights: str, served: ServedModel) -> Deployment:
    """Pools and layouts of a row: its columns, then what its benchmark's recipes say."""
    framework = {"trtllm": "trt"}.get(row.engine, row.engine)
    lengths = (row.prompt_tokens or 0, row.output_tokens or 0)
    listed = recipes_of(row.model, weights, row.gpu, framework, lengths)
    if row.note.startswith("disagg") or re.match(r"P\d", row.tp):
        return disaggregated(row, listed)
    shape = served.shape
    moe = float(shape.moe_blocks) > 0
    found = re.match(r"adp(\d*) mtp(\d*) mep(\d*)", row.ep_dp)
    tp = whole(row.tp) if row.tp.isdigit() else 0
    dp = max(1, whole(found.group(1))) if found else 1
    if not tp:
        layout = fewest_gpus(served, gpu)
        count = max(1.0, (row.n_gpus or 1) / float(layout.gpus))
        return Deployment(Pool(count, layout), assumed=("tp",))
    ep, moe_tp = (whole(found.group(n)) for n in (3, 2)) if found else (0, 0)
    gpus = group_size(row, tp, dp, moe_tp, ep)
    split = gpus >= tp and (float(shape.heads) % tp or (tp > ONE_NODE and of_inference_x(row)))
    if split:  # no tensor parallel size: all pools together
        return of_recipe(row, [one for one in listed if one.prefill and one.gpus == tp])
    layout = ReplicaLayout(
        tp=min(tp, gpus),
        pp=int(row.pp or 1),
        ep=max(1, min(ep, gpus)) if moe else 1,
        dp=gpus // tp if gpus > tp else 1,
    )
    alike = [
        one
        for one in listed
        if one.prefill is None
        and (one.decode.group, one.decode.dp) == (gpus, layout.dp > 1)
        and max(1, one.decode.ep) == layout.ep
    ]
    return Deployment(Pool(1, layout), None, drafted_in(row, alike))


def drafted_in(row: ServingRow, listed: Sequence[Recipe]) -> int:
    """Tokens that were drafted: those of the recipes of that version and day; 0 if they differ."""
    known = [one for one in listed if row.version in one.versions]
    same = {one.drafted for one in known if one.prefill} or {
        one.drafted for one in nearest(row, known)
    }
    return same.pop() if len(same) == 1 else 0


def nearest(row: ServingRow, listed: Sequence[Recipe]) -> list[Recipe]:
    """Those that were new on the day of the measurement, else those that were known by then."""
    day = measured_on(row)
    fresh = [one for one in listed if one.since == day]
    return fresh or [one for one in listed if not day or one.since <= day] or list(listed)


def of_recipe(row: ServingRow, listed: Sequence[Recipe]) -> Deployment:
    """The pools of the recipe that fits best: streams, then version, then without speculation."""
    fitting = [one for one in listed if one.ran(row.load_value or 0)]
    if not fitting:
        raise NotPriced(f"layout `{row.tp}` names no pools, and no recipe of its benchmark fits")
    best = min(fitting, key=lambda one: (row.version not in one.versions, one.drafted))
    assert best.prefill is not None
    decode, prefill = (
        Pool(one.replicas, replica_layout(one)) for one in (best.decode, best.prefill)
    )
    return Deployment(decode, prefill, best.drafted)


def replica_layout(pool: PoolRecipe) -> ReplicaLayout:
    if pool.dp:
        return ReplicaLayout(tp=1, ep=pool.ep, dp=pool.group)
    return ReplicaLayout(tp=pool.tp, ep=pool.ep)


ONE_NODE = 8  # GPUs at most where InferenceX lets one replica do both prompts and answers
HOLDS = 0.75  # of a GPU's memory that weights may take where a row names no layout


def fewest_gpus(served: ServedModel, gpu: Gpu) -> ReplicaLayout:
    """The replica of rows that name none (MLPerf): the smallest one that holds the weights."""
    sizes = [ReplicaLayout(tp) for tp in (1, 2, 4, 8)]
    held = [one for one in sizes if weight_bytes(served, one) <= HOLDS * float(gpu.memory)]
    return (held or sizes[-1:])[0]


def disaggregated(row: ServingRow, listed: Sequence[Recipe]) -> Deployment:
    """Pools of a row such as `P4 D8` with `P x2 adp1 mep1 D x1 adp8 mep8`.

    Where the counts are blank, the columns of decode repeat those of prefill; recipes of the
    benchmark with the same prefill group and decode size stand in.
    """
    sizes = re.match(r"P(\d+) D(\d+)", row.tp)
    pools = re.match(r"P x(\d*) adp(\d+) mep(\d+) D x(\d*) adp(\d+) mep(\d+)", row.ep_dp)
    if not sizes or not pools:
        raise NotPriced("the layout of prefill and decode is not said")
    first, second = int(sizes.group(1)), int(sizes.group(2))
    counts = [whole(pools.group(n)) for n in (1, 4)]
    if not all(counts):
        alike = [
            one
            for one in listed
            if one.prefill and (one.prefill.tp, one.decode.tp) == (first, second)
        ]
        whole_sum = [one for one in listed if first == second == one.gpus and one.prefill]
        return of_recipe(row, alike or whole_sum)
    parts = []
    for tp, column in ((first, 2), (second, 5)):
        dp, ep = int(pools.group(column)), max(1, int(pools.group(column + 1)))
        parts.append(ReplicaLayout(tp, 1, min(ep, tp * dp), dp))
    prefill, decode = (Pool(n, part) for n, part in zip(counts, parts, strict=True))
    alike = [
        one
        for one in listed
        if one.prefill
        and (one.prefill.replicas, one.decode.replicas) == tuple(counts)
        and (one.prefill.group, one.decode.group) == (parts[0].group, parts[1].group)
        and one.ran(row.load_value or 0)
    ]
    return Deployment(decode, prefill, drafted_in(row, alike))


def of_inference_x(row: ServingRow) -> bool:
    """Tell whether a row is InferenceX's, which AIConfigurator's sample copies without its name."""
    return "silicon_sample.csv" in row.ref and "source_file=/Users" not in row.ref


def protocol_of(row: ServingRow, gpu: Gpu, engine: str, weights: str, ran: Deployment) -> Protocol:
    """How the row's benchmark loads and sets up the server; others than InferenceX: as defaults."""
    if not of_inference_x(row):
        return AS_DEFAULT
    if ran.prefill is not None:
        return INFERENCE_X
    return inference_x(
        BenchmarkRun(
            engine=engine.removesuffix("-2025"),
            model=row.model.lower(),
            weights=weights,
            generation=gpu.generation,
            tp=int(float(ran.pool.layout.group)),
            streams=row.load_value or 1.0,
            prompt_tokens=row.prompt_tokens or 0.0,
            output_tokens=row.output_tokens or 0.0,
            drafted_tokens=ran.drafted_tokens,
            dp=int(float(ran.pool.layout.dp)),
            day=measured_on(row),
        )
    )


def group_size(row: ServingRow, tp: int, dp: int, moe_tp: int, ep: int) -> int:
    """GPUs of one stage of a replica.

    AIConfigurator's dumps write tp x ep for tp where experts are shared (README of the data; their
    ids say `tp4_ep4` where the column has 16): two equal factors stand for one.
    """
    if row.ep_dp.startswith("adp "):  # its other tables: attention's and experts' groups alike
        return max(tp, moe_tp * ep)
    if moe_tp == ep > 1:
        return ep
    return max(tp, ep) if tp == 1 and dp > 1 else tp


# Mean prompt tokens of MLPerf's datasets, which its logs leave out: OpenOrca for Llama 2 70B, and
# the mixture of OpenOrca, GSM8K and MBXP for Mixtral (mlcommons/inference, language/README.md).
MLPERF_PROMPT_TOKENS = 294.0


def serving_case(row: ServingRow, catalogue: GpuCatalogue) -> ServingCase:
    """What a row ran. Raises NotPriced with the reason."""
    gpu, engine = gpu_of(row, catalogue), engine_of(row)
    shape, recurrent, sparse = model_shape(row.model)
    if row.prompt_tokens is None and "mlperf" in row.source.lower():
        row = replace(row, prompt_tokens=MLPERF_PROMPT_TOKENS)
    weights = stated_weights(row, gpu)
    formats = formats_of(row, weights, engine, shape, gpu.generation)
    served = served_model(shape, formats, gpu, recurrent=recurrent, sparse_keys=sparse)
    ran = deployment_of(row, gpu, weights, served)
    protocol = protocol_of(row, gpu, engine, weights, ran)
    return ServingCase(
        row, gpu, engine, served, ran.pool, ran.prefill, ran.drafted_tokens, protocol, ran.assumed
    )
