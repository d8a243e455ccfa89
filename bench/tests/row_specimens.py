"""Rows as open tables print them, made up: one for each kind of software that they name."""

from __future__ import annotations

import csv
from pathlib import Path

from bench.published import COLUMNS, KINDS, PublishedRow, read_rows

SHARED = dict(seq_len="2048", precision="bf16", micro_batch="1", recompute="none", cp="1")
GPT = dict(
    SHARED,
    source="Narayanan2021 T1",
    framework="Megatron-LM",
    model="GPT 7.5B",
    params_b="7.5",
    num_layers="36",
    hidden="4096",
    ffn_hidden="16384",
    heads="32",
    kv_heads="32",
    vocab="51200",
    gpu="A100-80GB SXM",
    gpus="128",
    tp="4",
    pp="1",
    dp="32",
    zero_stage="0",
    sequence_parallel="no",
    global_batch="512",
    recompute="full",
    step_seconds="10",
    memory_gb="40",
)
DEEPSEEK = dict(
    SHARED,
    source="Megatron-Bridge 26.02.01",
    framework="Megatron-Bridge/core",
    model="DeepSeek-V3",
    seq_len="4096",
    gpu="GB200-NVL72",
    gpus="256",
    tp="1",
    pp="4",
    vp="4",
    ep="64",
    dp="64",
    precision="mxfp8",
    global_batch="2048",
    step_seconds="12",
    notes="MoE routing force-balanced, dropless",
)
LLAMA = dict(
    SHARED,
    source="dgxc-benchmarking v25.04",
    framework="NeMo",
    model="Llama 3.1 405B",
    seq_len="8192",
    gpu="H100-80GB SXM",
    gpus="512",
    tp="8",
    pp="8",
    vp="8",
    cp="2",
    dp="4",
    precision="fp8",
    global_batch="256",
    step_seconds="20",
)
FOUNDRY = dict(
    SHARED,
    source="MosaicML llm-foundry",
    framework="PyTorch FSDP (Composer/llm-foundry)",
    model="MPT-7b",
    num_layers="32",
    hidden="4096",
    ffn_hidden="16384",
    heads="32",
    gpu="H100-80GB SXM",
    gpus="64",
    tp="1",
    pp="1",
    dp="64",
    zero_stage="3",
    micro_batch="6",
    global_batch="384",
    step_seconds="2",
    notes="grad-accum 1; MP mode PURE; activation CPU offload False",
)
BLOOM = dict(
    SHARED,
    source="BLOOM prequel sweep",
    framework="Megatron-DeepSpeed",
    model="GPT 181B",
    params_b="181",
    hidden="14336",
    heads="112",
    vocab="250880",
    gpu="A100-80GB SXM",
    gpus="384",
    tp="4",
    pp="12",
    dp="8",
    zero_stage="1",
    recompute="full",
    global_batch="2048",
    step_seconds="100",
    memory_gb="60",
    notes="full activation checkpointing; Mem = nvidia-smi on first/last node; embedding slots",
)
ALEPH = dict(
    SHARED,
    source="Aleph Alpha layouts",
    framework="Aleph Alpha Scaling (Megatron-style 3D, 1F1B, no interleaving)",
    model="LLaMA 13B",
    params_b="13",
    num_layers="40",
    hidden="5120",
    ffn_hidden="13824",
    heads="40",
    vocab="128000",
    gpu="A100-80GB SXM",
    gpus="32",
    tp="2",
    pp="2",
    dp="8",
    zero_stage="1",
    sequence_parallel="yes",
    global_batch="2048",
    step_seconds="60",
    notes="attention kernel: torch; activation checkpointing: every_layer",
)
BUBBLE = dict(
    SHARED,
    source="Zero-Bubble PP",
    framework="Megatron-LM fork, schedule ZB-2p",
    model="GPT 6.2B",
    params_b="6.2",
    num_layers="30",
    hidden="4096",
    heads="32",
    seq_len="1024",
    gpu="A100-80GB SXM",
    gpus="8",
    tp="1",
    pp="8",
    dp="1",
    micro_batch="3",
    global_batch="72",
    step_seconds="2.5",
    memory_gb="70",
    notes="24 microbatches; max_memory_reserved",
)
HYBRID = dict(
    SHARED,
    source="Megatron-Bridge 26.06",
    framework="Megatron-Bridge/core",
    model="Nemotron_3_Nano",
    seq_len="8192",
    gpu="B300-SXM",
    gpus="8",
    ep="8",
    dp="8",
    tp="1",
    pp="1",
    precision="mxfp8",
    micro_batch="4",
    global_batch="512",
    step_seconds="13",
)
ALL = (GPT, DEEPSEEK, LLAMA, FOUNDRY, BLOOM, ALEPH, BUBBLE, HYBRID)


def write(path: Path, *records: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> Path:
    """A table with these columns; the cells of others are left out."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(records)
    return path


def rows(folder: Path, *records: dict[str, str]) -> list[PublishedRow]:
    return list(read_rows(write(folder / "rows.csv", *records)))


BLANK = {name: "" if kind == "str" else None for name, kind in KINDS.items()}
