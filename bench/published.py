"""Published measurements as typed rows: the border between other people's tables and our bench.

Belongs here: reading the CSV files (columns as in their README), what a number, a flag or a
precision may look like there, and the facts that only stand in the free text of `notes`. Does not
belong here: shapes of models (`published_models`), what recipes set (`published_recipes`), and any
measurement: those stay in the files.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

NOTHING = frozenset({"", "-", "--", "?", "n/a", "na", "nan", "none", "null", "unknown"})
FLAGS = {
    **dict.fromkeys(("yes", "y", "true", "1", "on"), True),
    **dict.fromkeys(("no", "n", "false", "0", "off"), False),
}
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?")


class Complaint(NamedTuple):
    """Something that could not be read as it stands; the row itself is never dropped for it."""

    line: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One measured configuration. Blank cells are None; sizes are counts, not bytes.

    `params_b` is in 10^9 parameters, `step_seconds` in seconds, `memory_gb` in the unit that the
    source uses (the README of the data says which). `oom` is set where the source reports that
    the configuration does not fit. `line` counts from 1 and the header is line 1.
    """

    line: int
    source: str = ""
    framework: str = ""
    model: str = ""
    params_b: float | None = None
    num_layers: int | None = None
    hidden: int | None = None
    ffn_hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    vocab: int | None = None
    seq_len: int | None = None
    gpu: str = ""
    gpus: int | None = None
    tp: int | None = None
    pp: int | None = None
    vp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    sequence_parallel: bool | None = None
    recompute: str = ""
    zero_stage: int | None = None
    precision: str = ""
    micro_batch: float | None = None
    global_batch: int | None = None
    step_seconds: float | None = None
    step_seconds_origin: str = ""
    memory_gb: float | None = None
    source_url_or_repo_path: str = ""
    notes: str = ""
    oom: bool = False

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches per step and data parallel rank, where the row determines it."""
        sizes = (self.global_batch, self.micro_batch, self.dp)
        if any(not size for size in sizes):
            return None
        return max(1, round(sizes[0] / (sizes[1] * sizes[2])))  # type: ignore[operator]


def family_of(source: str) -> str:
    """Whose measurements a source has: its name without a release, which is not another source."""
    return re.sub(r"\s+v?\d+\.\d[\d.]*.*$", "", source).strip()


KINDS = {f.name: str(f.type).removesuffix(" | None") for f in fields(PublishedRow)}
COLUMNS = tuple(name for name in KINDS if name not in ("line", "oom"))


class ReadRows(list[PublishedRow]):
    """The rows of one file, in its order, and `complaints` about cells that made no sense."""

    def __init__(self, rows: list[PublishedRow], complaints: list[Complaint]) -> None:
        super().__init__(rows)
        self.complaints = complaints


def read_rows(path: Path | str) -> ReadRows:
    """Every row of a published table; as many rows as the file has records.

    Missing columns count as blank, unknown ones are named in a complaint, and a cell that is not
    what its column holds becomes None with a complaint. Raises OSError and UnicodeDecodeError as
    `open` does, nothing for the content.
    """
    complaints: list[Complaint] = []
    rows: list[PublishedRow] = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restkey="", restval="")
        complaints += _header_complaints(reader.fieldnames or ())
        before = reader.line_num
        for record in reader:
            rows.append(_timed(_row(before + 1, record, complaints), complaints))
            before = reader.line_num
    return ReadRows(rows, complaints)


def _header_complaints(names: object) -> list[Complaint]:
    present = {str(name).strip() for name in names}  # type: ignore[attr-defined]
    optional = {"step_seconds", "step_seconds_origin"}  # the out-of-memory file has neither
    missing = [name for name in COLUMNS if name not in present | optional]
    extra = sorted(present - set(COLUMNS))
    found = [Complaint(1, f"no column `{name}`; taken as blank") for name in missing]
    return found + [Complaint(1, f"unknown column `{name}` is not read") for name in extra]


def _row(line: int, record: Mapping[str, object], complaints: list[Complaint]) -> PublishedRow:
    if record.get(""):
        complaints.append(Complaint(line, f"cells beyond the last column: {record['']}"))
    cells = {str(k).strip(): str(v or "").strip() for k, v in record.items() if k}
    values = {name: _cell(line, name, cells.get(name, ""), complaints) for name in COLUMNS}
    oom = any(cells.get(name, "").upper() == "OOM" for name in ("memory_gb", "step_seconds"))
    return PublishedRow(line=line, oom=oom, **values)  # type: ignore[arg-type]


def _timed(row: PublishedRow, complaints: list[Complaint]) -> PublishedRow:
    """The row without its step time where that is no measurement of speed; its bytes stay."""
    text = f"{row.source} / {row.framework} / {row.model} / {row.notes}"
    for pattern, reason in NO_SPEED:
        if row.step_seconds is not None and re.search(pattern, text, re.IGNORECASE):
            complaints.append(Complaint(row.line, reason))
            return replace(row, step_seconds=None)
    return row


NO_SPEED = (
    # Functional tests of Megatron-LM run with --deterministic-mode, NCCL_ALGO=Ring and cuBLAS
    # workspaces that repeat (tests/functional_tests/test_cases/*/*_memory_speed/model_config.yaml).
    (
        r"megatron-lm ci\b|functional test|(?<!non-)(?<!non)deterministic",
        "deterministic test: its time measures no speed",
    ),
    # Megatron-Bridge docs/performance-summary-archive.md, 26.06.01: "performance regression in
    # GPT-OSS 120B pre-training is a known issue", NVIDIA/cudnn-frontend issue 256.
    (
        r"megatron-bridge 26\.06\.01\b.*gpt[-_ ]?oss[-_ ]?120b",
        "its source calls the time a known regression of this release",
    ),
)


def _cell(line: int, name: str, text: str, complaints: list[Complaint]) -> object:
    kind = KINDS[name]
    if kind == "str":
        return text
    if text.lower() in NOTHING or text.upper() == "OOM":
        return None
    value, reason = _flag(text) if kind == "bool" else _number(text, whole=kind == "int")
    if reason:
        complaints.append(Complaint(line, f"{name}: {reason}"))
    return value


def _flag(text: str) -> tuple[bool | None, str]:
    value = FLAGS.get(text.lower())
    return value, "" if value is not None else f"`{text}` is neither yes nor no"


def _number(text: str, whole: bool) -> tuple[float | int | None, str]:
    """`1,024`, `~512`, `8x` and `256 (32 nodes)` are read by their first number, with a reason."""
    plain = re.sub(r"(?<=\d)[,_'](?=\d{3}\b)", "", text.lower())
    found = NUMBER.search(plain)
    if found is None:
        return None, f"`{text}` is not a number"
    value = float(found.group())
    odd = f"read {found.group()} from `{text}`" if found.group() != plain else ""
    if not whole:
        return value, odd
    if value != int(value):
        return None, f"`{text}` is not a whole number"
    return int(value), odd


PRECISIONS = (
    # First match wins; `alt` before the plain name. Source of the words: the README of the data.
    (re.compile(r"nv-?fp4|fp4"), "nvfp4"),
    (re.compile(r"mx-?fp8|fp8[-_ ]?mx"), "mxfp8"),
    (re.compile(r"fp8|e4m3|hybrid"), "fp8"),
    (re.compile(r"bf-?16|bfloat16"), "bf16"),
    (re.compile(r"fp-?16|float16|half"), "fp16"),
    (re.compile(r"tf-?32"), "tf32"),
    (re.compile(r"fp-?32|float32|single"), "fp32"),
)
GRANULARITIES = (
    (re.compile(r"fp8[-_ ]?cs|current"), "current"),
    (re.compile(r"fp8[-_ ]?ds|delayed"), "delayed"),
    (re.compile(r"fp8[-_ ]?(sc|block)|sub-?channel|blockwise"), "block"),
    (re.compile(r"mx"), "mx"),
)


def precision_of(row: PublishedRow) -> str:
    """One of nvfp4, mxfp8, fp8, bf16, fp16, tf32, fp32; a blank is bf16, before 2021 fp16.

    `fp8 (alt granularity in parentheses)` of Megatron-Bridge 25.09 is the second figure of a cell
    `a (b)`. Its legend (docs/performance-summary-archive.md): scales for 32 elements on Blackwell,
    which is MXFP8, and for blocks of 128 on Hopper.
    """
    text = row.precision.lower()
    if _alternative(row) and re.match(r"gb?\d|b\d", row.gpu, re.IGNORECASE):
        return "mxfp8"
    for pattern, name in PRECISIONS:
        if pattern.search(text):
            return name
    return "fp16" if re.match(r"v100|p100", row.gpu, re.IGNORECASE) else "bf16"


def _alternative(row: PublishedRow) -> bool:
    return bool(re.search(r"fp8.*\balt\b", row.precision, re.IGNORECASE))


def fp8_granularity_of(row: PublishedRow) -> str | None:
    """`current`, `delayed`, `block` or `mx`, where the precision says so; else None."""
    if precision_of(row) == "mxfp8":
        return "mx"
    if _alternative(row):
        return "block"
    text = row.precision.lower()
    return next((name for pattern, name in GRANULARITIES if pattern.search(text)), None)


@dataclass(frozen=True, kw_only=True)
class NoteFacts:
    """What the notes and the names say beyond the columns; None where they say nothing."""

    attention: str | None = None  # flash1, flash2, fused, torch
    rms_kernel: bool | None = None
    recompute: str | None = None  # none, full, selective
    mtp: bool | None = None
    token_drop: bool = False
    mixed_precision: str | None = None  # llm-foundry: DEFAULT, PURE, AMP_BF16
    activation_offload: bool | None = None
    grad_accum: int | None = None
    date: str | None = None  # of the block of trials, month and day
    schedule: str | None = None
    micro_batches: int | None = None
    main_grad: str | None = None
    overlap: bool | None = None
    experts: int | None = None
    top_k: int | None = None
    expert_ffn: int | None = None
    dense_layers: int | None = None
    embedding_slots: bool = False
    proxy: bool = False
    lora: bool = False
    untied: bool = False


def facts_of(row: PublishedRow) -> NoteFacts:
    """Facts in free text. Each pattern names the source whose wording it reads."""
    notes, model = row.notes.lower(), row.model.lower()
    return NoteFacts(
        attention=_attention(notes),
        rms_kernel="rms kernel" in notes if "attention kernel:" in notes else None,  # Aleph Alpha
        recompute=_recompute(notes),
        mtp=_mtp(f"{model} {notes}"),
        token_drop="tokendrop" in model + notes or "token drop" in notes,  # Megatron-Bridge 25.09
        mixed_precision=_word(r"mp mode (\w+)", row.notes),  # llm-foundry
        activation_offload=_yes(r"activation cpu offload (\w+)", notes),  # llm-foundry
        grad_accum=_count(r"grad-accum (\d+)", notes),  # llm-foundry
        date=_word(r"source date (\d\d-\d\d)", notes),  # BLOOM
        schedule=_word(r"schedule ([\w-]+)", row.framework),  # Zero-Bubble
        micro_batches=_count(r"(\d+) microbatches", notes),  # Zero-Bubble
        main_grad="fp32" if re.search(r"fp32 (grad|gradient) accumul", notes) else None,
        overlap=False if "no comm overlap" in notes else None,  # SimuMax
        experts=_count(r"(\d+) experts", notes),
        top_k=_count(r"top-?(\d+)", notes),
        expert_ffn=_count(r"moe_ffn (\d+)", notes),  # Megatron-LM CI
        dense_layers=_count(r"(\d+) dense layer", notes),
        embedding_slots="embedding layers counted as pipeline slots" in notes
        or "embedding slots" in notes,  # BLOOM
        proxy="proxy" in model + notes or bool(re.search(r"\d+[- ]?layers?\b", model)),
        lora="lora" in model or "lora" in notes,
        # Megatron-LM CI: --untie-embeddings-and-output-weights in every *_memory_speed case
        untied="untied" in notes or "megatron-lm ci" in row.source.lower(),
    )


def _attention(notes: str) -> str | None:
    """The kernel. TransformerEngine's unfused attention is two products around a softmax kernel
    (attention/dot_product_attention/softmax.py), as Megatron's own was: not PyTorch's operations.
    """
    if "unfused attention" in notes:  # Megatron-LM CI, --attention-backend: unfused
        return "fused"
    kernel = _word(r"attention kernel: ([\w.]+)", notes) or ""
    if "flash" in kernel:
        return "flash1" if re.search(r"v1|attention1", kernel) else "flash2"
    return kernel or None


def _recompute(notes: str) -> str | None:
    kind = _word(r"activation checkpointing: (\w+)", notes)  # Aleph Alpha
    if kind:
        return {"disabled": "none", "every_layer": "full"}.get(kind, kind)
    return "full" if "full activation checkpointing" in notes else None  # BLOOM


def _mtp(text: str) -> bool | None:
    """Whether the run predicted further tokens (MTP), where name or notes say so."""
    if re.search(r"mtp (layers? )?(is |are )?(not stated|unknown)", text):
        return None
    if re.search(r"\b(w/o|without|no|0) mtp", text):
        return False
    return True if "mtp" in text else None


def _word(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text, re.IGNORECASE)
    return found.group(1) if found else None


def _count(pattern: str, text: str) -> int | None:
    found = _word(pattern, text)
    return int(found) if found else None


def _yes(pattern: str, text: str) -> bool | None:
    return FLAGS.get((_word(pattern, text) or "").lower())
