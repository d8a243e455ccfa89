"""How a published run trained, beyond the columns of its row.

Belongs here: the schema of `recipes.yaml` and `bridge_recipes.yaml`, which of their rules a row
matches, and the order in which defaults, rules, notes and columns overrule each other. Does not
belong here: what the settings cost, and the settings themselves (they stand in the YAML files with
their sources).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field
from ruamel.yaml import YAML

from bench.model_registry import load_registry
from bench.published import (
    NoteFacts,
    PublishedRow,
    facts_of,
    fp8_granularity_of,
    precision_of,
)
from hpctrain.spec.document import Document
from hpctrain.spec.engines.abilities import GradientAddition

RULES = Path(__file__).with_name("recipes.yaml")
BRIDGE = Path(__file__).with_name("bridge_recipes.yaml")
Switch = bool | Literal["auto"]
Engine = Literal["megatron", "megatron-fsdp", "fsdp", "deepspeed", "ddp"]
Schedule = Literal["none", "1f1b", "interleaved", "zb-1p", "zb-2p", "zb-v"]


class Settings(Document):
    """What a rule may set; None leaves it to earlier rules. Meanings: `Recipe`."""

    engine: Engine | None = None
    zero: int | None = Field(None, ge=0, le=3)
    shard_groups: int | None = None
    sequence_parallel: Switch | None = None
    tp_overlap: Switch | None = None
    p2p_overlap: bool | None = None
    grad_overlap: bool | None = None
    param_overlap: bool | None = None
    moe_overlap: bool | None = None
    recompute: Literal["none", "selective", "full"] | None = None
    recompute_modules: tuple[str, ...] | None = None
    recompute_layers: int | None = None
    grad_dtype: Literal["param", "bf16", "fp32"] | None = None
    sum_dtype: Literal["fp32"] | None = None
    whole_sums: bool | None = None
    addition: GradientAddition | None = None
    stage_split: bool | None = None
    equal_modules: bool | None = None
    moment_dtype: Literal["bf16", "fp32"] | None = None
    master_dtype: Literal["bf16", "fp32"] | None = None
    fp8_params: Switch | None = None
    fp8_attention: bool | None = None
    offload_activation_layers: int | None = None
    offload_modules: tuple[str, ...] | None = None
    offload_optimizer: float | None = None
    graphs: Literal["none", "layer", "full"] | None = None
    graph_scope: tuple[str, ...] | None = None
    dispatcher: Literal["alltoall", "allgather", "deepep", "hybridep"] | None = None
    balanced: bool | None = None
    capacity_factor: float | None = None
    fused_experts: bool | None = None
    cross_entropy: Literal["unfused", "native", "te"] | None = None
    attention: Literal["torch", "fused", "flash1", "flash2", "te"] | None = None
    layout: str | None = None
    account_embedding: bool | None = None
    account_loss: bool | None = None
    mtp: bool | None = None
    micro_batch: int | None = None
    vp: int | None = None


class When(Document):
    """Regular expressions, searched without regard to case; all given ones must match.

    `source` is searched in source and framework: a table may name its software in either.
    """

    source: str = ""
    framework: str = ""
    model: str = ""
    gpu: str = ""
    precision: str = ""
    notes: str = ""


class Layout(Document):
    """Sizes that must be equal where the row prints them; `stages` is pp x vp, a blank vp is 1."""

    stages: int | None = None
    tp: int | None = None
    pp: int | None = None
    vp: int | None = None
    cp: int | None = None
    ep: int | None = None


class Rule(Document):
    """One family or rule; `why` is its source."""

    model_config = ConfigDict(populate_by_name=True)

    name: str
    when: When
    why: str = Field(min_length=10)
    layout: Layout = Layout()
    settings: Settings = Field(alias="set")


class RuleFile(Document):
    """The whole of `recipes.yaml`."""

    families: tuple[Rule, ...]
    rules: tuple[Rule, ...]


class Cell(Document):
    """One line of the Megatron-Bridge table; `where` maps containers to precisions."""

    model_config = ConfigDict(populate_by_name=True)

    where: dict[str, str] = Field(alias="in")
    layouts: tuple[str, ...] = ()
    settings: Settings = Field(alias="set")

    def precisions(self, container: str) -> set[str]:
        """The precisions of this line in one container."""
        found = (v for k, v in self.where.items() if container in k.split())
        return {precision for text in found for precision in text.split()}


class BridgeFile(Document):
    """The whole of `bridge_recipes.yaml`: registry model -> GPU -> lines."""

    recipes: dict[str, dict[str, tuple[Cell, ...]]]

    def containers(self) -> list[str]:
        """Every container of the table, oldest first."""
        lines = (c for gpus in self.recipes.values() for cells in gpus.values() for c in cells)
        names = {name for cell in lines for key in cell.where for name in key.split()}
        return sorted(names, key=_version)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one published run trained.

    `recompute_layers` counts layers of a pipeline stage (0: all); `recompute_modules` are
    Megatron's names. `shard_groups` are copies of the sharded state (HSDP; 1: sharded over all).
    `grad_dtype` is of the gradients' buffer and reduction (`param`: as the parameters);
    `sum_dtype` is of the reduction alone, `whole_sums`: an all-reduce, whatever is sharded;
    `addition`: how a microbatch's gradients join the others. `stage_split`: messages between
    stages are split over tensor parallel ranks (None: as the software has it).
    `equal_modules`: stages have as many modules each, embedding, norm and head included.
    `fp8_params`: the gather of the distributed optimizer moves fp8. `capacity_factor` 0: dropless.
    `layout` is Megatron's `--pipeline-model-parallel-layout`. `account_*`: the embedding, or head
    and loss, takes the place of a layer. `mtp`: the model's layers that predict further tokens
    train too. `rules` names what was applied, in order; `filled` what no source states and a
    default decided.
    """

    precision: str
    fp8_granularity: str | None = None
    engine: Engine = "megatron"
    schedule: Schedule = "1f1b"
    vp: int = 1
    micro_batch: float = 1
    zero: int = 1
    shard_groups: int = 1
    sequence_parallel: bool = False
    tp_overlap: bool = False
    p2p_overlap: bool = False
    grad_overlap: bool = True
    param_overlap: bool = True
    moe_overlap: bool = False
    recompute: str = "none"
    recompute_modules: tuple[str, ...] = ()
    recompute_layers: int = 0
    grad_dtype: str = "fp32"
    sum_dtype: str | None = None
    whole_sums: bool = False
    addition: GradientAddition = "product"
    stage_split: bool | None = None
    equal_modules: bool = False
    moment_dtype: str = "fp32"
    master_dtype: str = "fp32"
    fp8_params: bool = False
    fp8_attention: bool = False
    offload_activation_layers: int = 0
    offload_modules: tuple[str, ...] = ()
    offload_optimizer: float = 0.0
    graphs: str = "none"
    graph_scope: tuple[str, ...] = ()
    dispatcher: str = "alltoall"
    balanced: bool = True
    capacity_factor: float = 0.0
    fused_experts: bool = False
    cross_entropy: str = "native"
    attention: str = "te"
    rms_kernel: bool | None = None
    layout: str | None = None
    account_embedding: bool = False
    account_loss: bool = False
    mtp: bool = False
    lora: bool = False
    rules: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()


@cache
def load_rules(path: Path = RULES) -> RuleFile:
    """The rules; raises pydantic's ValidationError for a wrong file."""
    return RuleFile.model_validate(_yaml(path))


@cache
def load_bridge(path: Path = BRIDGE) -> BridgeFile:
    """The table of Megatron-Bridge; raises pydantic's ValidationError for a wrong file."""
    return BridgeFile.model_validate(_yaml(path))


def _yaml(path: Path) -> object:
    return YAML(typ="safe").load(path.read_text(encoding="utf-8"))


def recipe_of(row: PublishedRow) -> Recipe:
    """The recipe of a row: families, rules, the Bridge table, its notes, its columns; never fails.

    `filled` names sequence_parallel, recompute, zero, micro_batch, vp and precision where the row
    leaves them blank, whether or not a rule knows them: `rules` tells which did.
    """
    model = load_registry().find(row.model) or row.model
    chosen: dict[str, object] = {}
    names = []
    for rule in (*load_rules().families, *load_rules().rules):
        if _matches(rule, row, model):
            chosen |= rule.settings.model_dump(exclude_none=True)
            names.append(rule.name)
    cell = bridge_cell(row, model)
    if cell:
        chosen |= cell.settings.model_dump(exclude_none=True)
        names.append("bridge-table")
    chosen |= _noted(facts_of(row)) | _printed(row)
    return _recipe(row, chosen, tuple(names))


def gpu_name(row: PublishedRow) -> str:
    """`H100-80GB SXM` -> `H100`, `B200-SXM` -> `B200`."""
    found = re.search(r"[A-Z]{1,3}\d{2,3}", row.gpu.upper())
    return found.group() if found else row.gpu.upper()


def _matches(rule: Rule, row: PublishedRow, model: str) -> bool:
    text = {
        "source": product_names(f"{row.source} {row.framework}"),
        "framework": product_names(row.framework),
        "model": model,
        "gpu": gpu_name(row),
        "precision": precision_of(row),
        "notes": row.notes,
    }
    wanted = {name: p for name, p in rule.when if p}
    given = {name: getattr(row, name) for name in ("tp", "pp", "vp", "cp", "ep")}
    given["stages"] = row.pp and row.pp * (row.vp or 1)
    return all(re.search(p, text[name], re.IGNORECASE) for name, p in wanted.items()) and all(
        given[name] in (None, size) for name, size in rule.layout if size
    )


def product_names(text: str) -> str:
    """The text without the `NeMo` of `NeMo AutoModel`: PyTorch FSDP2, not NeMo on Megatron-core."""
    return re.sub(r"nemo", "", text, flags=re.IGNORECASE) if _AUTOMODEL.search(text) else text


_AUTOMODEL = re.compile(r"auto[-_ ]?model", re.IGNORECASE)


def bridge_cell(row: PublishedRow, model: str) -> Cell | None:
    """The line of the Megatron-Bridge table for a row that its recipes ran, or None.

    The container is the row's (of dgxc-benchmarking the one of its date), else the newest older
    one. Precision: the row's, else another of fp8's kinds, else any. Of several lines the one
    whose layout has most sizes in common, the first of equals.
    """
    bridge = re.search(r"megatron-bridge", f"{row.source} {row.framework}", re.IGNORECASE)
    found = re.search(r"(?<![\d.])(\d\d\.\d\d(?:\.\d\d)?)", row.source) if bridge else None
    cells = load_bridge().recipes.get(model, {}).get(gpu_name(row), ())
    if not found or not cells:
        return None
    usable = [c for c in load_bridge().containers() if _version(c) <= _version(found.group(1))]
    for container in reversed(usable):
        here = [(cell, cell.precisions(container)) for cell in cells]
        for wanted in _precisions(row):
            fitting = [cell for cell, precisions in here if wanted(precisions)]
            if fitting:
                return max(fitting, key=lambda cell: _common(cell, row))
    return None


def _version(container: str) -> tuple[int, ...]:
    return tuple(int(part) for part in container.split("."))


def _precisions(row: PublishedRow) -> list:  # type: ignore[type-arg]
    kind = {"block": "fp8-block", "delayed": "fp8-delayed"}.get(fp8_granularity_of(row) or "")
    name = kind or precision_of(row)
    return [
        lambda given: name in given,
        lambda given: "fp8" in name and any("fp8" in other for other in given),
        bool,
    ]


def _common(cell: Cell, row: PublishedRow) -> int:
    """Most sizes that one of the cell's layouts shares with the row; a blank vp is 1."""
    printed = {"tp": row.tp, "pp": row.pp, "vp": row.vp or 1, "cp": row.cp, "ep": row.ep or 1}
    printed["mbs"] = int(row.micro_batch or 1)
    words = {f"{name}{size}" for name, size in printed.items()}
    return max((len(words & set(layout.split())) for layout in cell.layouts), default=0)


def _noted(facts: NoteFacts) -> dict[str, object]:
    """Settings that the notes or the names give."""
    given = {
        "attention": facts.attention,
        "recompute": facts.recompute,
        "grad_dtype": facts.main_grad,
        "grad_overlap": facts.overlap,
        "param_overlap": facts.overlap,
        "tp_overlap": facts.overlap,
        "capacity_factor": 1.0 if facts.token_drop else None,
        "mtp": facts.mtp,
        "rms_kernel": facts.rms_kernel,
        "lora": facts.lora or None,
        "account_embedding": facts.embedding_slots or None,
        "account_loss": facts.embedding_slots or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _printed(row: PublishedRow) -> dict[str, object]:
    """Settings that the columns print; `selective` without modules is the attention's core."""
    words = row.recompute.lower()
    kind = next((k for k in ("full", "selective", "none") if k in words), None)
    if kind is None and words in ("no", "off", "0", "false"):
        kind = "none"
    given: dict[str, object] = {
        "sequence_parallel": row.sequence_parallel,
        "zero": row.zero_stage,
        "recompute": kind,
        "micro_batch": row.micro_batch,
        "vp": row.vp,
    }
    count = re.search(r"(\d+)\s*layers", words)
    if count:
        given["recompute_layers"] = int(count.group(1))
    return {name: value for name, value in given.items() if value is not None}


BLANKS = ("sequence_parallel", "recompute", "zero_stage", "micro_batch", "vp", "precision")


def _recipe(row: PublishedRow, chosen: dict[str, object], names: tuple[str, ...]) -> Recipe:
    known = {f.name for f in fields(Recipe)}
    assert known.issuperset(chosen), chosen.keys() - known
    tensor = (row.tp or 1) > 1
    for name in ("sequence_parallel", "tp_overlap"):
        if chosen.get(name) in ("auto", True):
            chosen[name] = tensor
    if chosen.get("engine") == "megatron-fsdp" and row.zero_stage is None:
        # data_parallel_sharding_strategy optim_grads_params: Megatron-Bridge v0.3.0
        # scripts/performance/utils/overrides.py, NeMo v2.4.0 scripts/performance/helpers.py
        chosen["zero"] = 3
    precision = precision_of(row)
    chosen["fp8_params"] = _fp8_params(chosen.get("fp8_params"), row)
    recipe = Recipe(
        precision=precision,
        fp8_granularity=fp8_granularity_of(row),
        rules=names,
        filled=tuple(name for name in BLANKS if getattr(row, name) in (None, "")),
        **chosen,  # type: ignore[arg-type]
    )
    if recipe.recompute == "selective" and not recipe.recompute_modules:
        recipe = replace(recipe, recompute_modules=("core_attn",))
    if recipe.recompute != "selective":
        recipe = replace(recipe, recompute_modules=())
    return replace(recipe, schedule=_schedule(row, recipe.vp))


def _fp8_params(given: object, row: PublishedRow) -> bool:
    """`auto`: with fp8 but not in blocks (Megatron-Bridge training/mixed_precision.py)."""
    able = precision_of(row) in ("fp8", "mxfp8") and fp8_granularity_of(row) != "block"
    return able if given == "auto" else bool(given)


SCHEDULES: dict[str, Schedule] = {
    "1f1b": "1f1b",
    "1f1b-i": "interleaved",
    "zb-1p": "zb-1p",
    "zb-2p": "zb-2p",
    "zb-v": "zb-v",
}


def _schedule(row: PublishedRow, vp: int) -> Schedule:
    """Named by Zero-Bubble's framework column; else by the pipeline and its chunks."""
    named = SCHEDULES.get((facts_of(row).schedule or "").lower())
    if named:
        return named
    if (row.pp or 1) == 1:
        return "none"
    return "interleaved" if vp > 1 else "1f1b"
