"""The GPU catalogue: figures of data sheets, and finding the GPU of a profile.

Belongs here: the document behind `gpus.yaml`, and the rule that matches names. Does not belong
here: reading the file (see `spec.loader`), shares of the peak that kernels reach, facts about one
cluster (see `spec.profile`, which overrides the catalogue).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.base.units import Bandwidth, ByteSize, FlopRate, short_bytes
from hpctrain.spec.document import Document
from hpctrain.spec.engines.registry import EngineName
from hpctrain.spec.fields import did_you_mean, nearest
from hpctrain.spec.positions import Parsed
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import VariableName

Generation = Literal["volta", "ampere", "ada", "hopper", "blackwell", "cdna2", "cdna3", "other"]

# The same GPU is "80 GB" on the box (80e9 bytes), 81920 MiB in nvidia-smi (7.4% more) and 79.2 GiB
# in torch. No two models of one name are nearer to each other than 17% (H100 with 80 and 94 GB).
MEMORY_TOLERANCE = 0.12

_IGNORED_WORDS = {"nvidia", "amd", "tesla", "geforce", "instinct", "gpu", "hbm2", "hbm2e", "hbm3",
             "hbm3e"}  # fmt: skip


class Gpu(Document):
    """One GPU model: rates of the data sheet, dense and in one direction."""

    name: str = Field(min_length=1, description="As in published tables")
    aliases: tuple[str, ...] = Field((), description="Other spellings, among them names of GRES")
    generation: Generation = Field(description="Architecture: what calibrated constants belong to")
    memory: ByteSize = Field(gt=0, description="As the driver reports it")
    unified_memory: bool = Field(
        False, description="The CPUs of its node have no memory but that of the GPUs"
    )
    peak: dict[Literal["fp32", "fp16", "bf16", "fp8", "fp4"], FlopRate] = Field(
        min_length=1, description="Dense peak rate of each precision that the GPU has"
    )
    memory_bandwidth: Bandwidth = Field(gt=0, description="Of the GPU's memory")
    nvlink_bandwidth: Bandwidth = Field(
        gt=0, description="NVLink, xGMI or PCIe inside `nvlink_domain`, per GPU and direction"
    )
    nvlink_domain: int = Field(ge=1, description="GPUs that reach each other at that rate")
    network_bandwidth: Bandwidth = Field(
        gt=0, description="Network cards, per GPU and direction, in the maker's reference system"
    )
    host_bandwidth: Bandwidth | None = Field(
        None, gt=0, description="To the host's memory, per GPU and direction; default: PCIe 4 x16"
    )
    per_node: int = Field(8, ge=1, description="GPUs of one node of that system")
    source: str = Field(min_length=3, description="Data sheet that the figures come from")


class GpuVariable(Document):
    """One environment variable that training on GPUs of a generation wants, and why."""

    name: VariableName = Field(description="Name of the variable")
    value: str = Field(description="Text, so put numbers in quotes")
    reason: str = Field(min_length=3, description="Why it is set")
    source: str = Field(min_length=3, description="Who documents or has measured that")
    generations: tuple[Generation, ...] = Field(min_length=1, description="On GPUs of these")
    engines: tuple[EngineName, ...] = Field((), description="For these engines; default: for all")
    layout: Literal["any", "model_parallel", "data_parallel"] = Field(
        "any", description="model_parallel: where tp or cp is above 1; data_parallel: where not"
    )

    def concerns(self, gpu: Gpu, engine: str, *, model_parallel: bool) -> bool:
        """Tell whether a run of this engine wants it; `model_parallel`: tp or cp is above 1."""
        layouts = ("any", "model_parallel" if model_parallel else "data_parallel")
        return (
            gpu.generation in self.generations
            and (not self.engines or engine in self.engines)
            and self.layout in layouts
        )


class GpuCatalogue(Document):
    """All known GPUs; of several that a name fits equally well, the first one is meant."""

    gpus: tuple[Gpu, ...] = Field(description="The GPUs")
    variables: tuple[GpuVariable, ...] = Field(
        (), description="Environment variables by generation; a profile's own come first"
    )

    @model_validator(mode="after")
    def _unique_names(self) -> Self:
        for name, count in Counter(gpu.name for gpu in self.gpus).items():
            if count > 1:
                raise ValueError(f"GPU `{name}` is there {count} times: keep one")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(gpu.name for gpu in self.gpus)

    def variables_for(
        self, gpu: Gpu, engine: str, *, model_parallel: bool
    ) -> tuple[GpuVariable, ...]:
        """List the variables that a run of `engine` wants on this GPU.

        `model_parallel`: tp or cp is above 1.
        """
        return tuple(
            variable
            for variable in self.variables
            if variable.concerns(gpu, engine, model_parallel=model_parallel)
        )

    def extended(self, others: GpuCatalogue) -> GpuCatalogue:
        """This catalogue with what `others` lists before its own, in place of the same names."""
        kept = tuple(gpu for gpu in self.gpus if gpu.name not in others.names)
        named = {variable.name for variable in others.variables}
        variables = tuple(variable for variable in self.variables if variable.name not in named)
        return GpuCatalogue(gpus=(*others.gpus, *kept), variables=(*others.variables, *variables))


def match_gpu(catalogue: GpuCatalogue, name: str, memory_bytes: float | None = None) -> Gpu | None:
    """Find the GPU of a name or alias with the nearest memory; None if there is none.

    `memory_bytes`: as a driver or vendor states it, within 12% of the catalogue's; None: any.
    """
    named = _named(catalogue, name)
    if memory_bytes is None:
        return named[0] if named else None
    closest = min(named, key=lambda gpu: _distance(gpu, memory_bytes), default=None)
    fits = closest is not None and _distance(closest, memory_bytes) <= MEMORY_TOLERANCE
    return closest if fits else None


def usual_type(gpu: Gpu, name: str = "") -> str:
    """Return the spelling of `gpu.type` for a GPU: the alias with the words of `name`, if any."""
    own = gpu.name.lower().replace(" ", "-")
    spellings = [own, *gpu.aliases] if own.isalnum() else [*gpu.aliases, own]
    if name in spellings:
        return name
    alike = (one for one in spellings if _words(one) == _words(name))
    return next(alike, spellings[0])


def find_gpu(
    catalogue: GpuCatalogue, name: str, memory_bytes: float | None = None, origin: str | None = None
) -> Gpu:
    """Find a GPU. Raises InvalidInputError with the known GPUs and how to add one.

    `origin`: position of the name, as in `Loaded.origin` (`FILE:LINE` or `--set`).
    """
    found = match_gpu(catalogue, name, memory_bytes)
    if found is not None:
        return found
    raise InvalidInputError([_unknown(catalogue, name, memory_bytes, origin)])


def cluster_gpu(
    catalogue: GpuCatalogue, profile: ClusterProfile, origin: Mapping[str, str] | None = None
) -> Gpu:
    """Combine profile and catalogue into the GPU of a cluster; the profile has priority.

    Found by `gpu.model`, else by `gpu.type` and `gpu.memory`. A profile with `gpu.peak` and
    `gpu.memory_bandwidth` needs no catalogue. `origin` is that of the loaded profile, for the
    position in the error. Raises InvalidInputError for a GPU that neither describes.
    """
    given, origin = profile.gpu, origin or {}
    if given.model is not None:
        found: Gpu | None = find_gpu(catalogue, given.model, None, origin.get("gpu.model"))
    else:
        found = match_gpu(catalogue, given.type, given.memory)
    if found is None and (not given.peak or given.memory_bandwidth is None):
        problem = _unknown(catalogue, given.type, given.memory, origin.get("gpu.type"))
        raise InvalidInputError([problem])
    memory_bandwidth = given.memory_bandwidth
    if memory_bandwidth is None:
        assert found is not None
        memory_bandwidth = found.memory_bandwidth
    return Gpu(
        name=found.name if found else given.type,
        generation=found.generation if found else "other",
        memory=given.memory,
        peak={
            **(found.peak if found else {}),
            **{precision: rate for precision, rate in given.peak.items()},
        },
        memory_bandwidth=memory_bandwidth,
        nvlink_bandwidth=profile.nvlink.bandwidth,
        nvlink_domain=profile.nvlink.domain,
        network_bandwidth=Bandwidth(
            profile.network.nics_per_node * profile.network.nic_bandwidth / given.per_node
        ),
        host_bandwidth=found.host_bandwidth if found else None,
        per_node=given.per_node,
        source=f"{found.source}; profile {profile.name}" if found else f"profile {profile.name}",
    )


def _named(catalogue: GpuCatalogue, name: str) -> list[Gpu]:
    words = _words(name)
    return [g for g in catalogue.gpus if words in map(_words, (g.name, *g.aliases))]


def _words(name: str) -> frozenset[str]:
    """Split a name into its distinctive words: `NVIDIA A100-SXM4-80GB` is `A100-80GB SXM`."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return frozenset(
        re.sub(r"^sxm\d$", "sxm", word) for word in words if word not in _IGNORED_WORDS
    )


def _distance(gpu: Gpu, memory_bytes: float) -> float:
    return abs(float(gpu.memory) / memory_bytes - 1)


def _unknown(
    catalogue: GpuCatalogue, name: str, memory_bytes: float | None, origin: str | None
) -> Problem:
    named = _named(catalogue, name)
    if named and memory_bytes is not None:
        sizes = ", ".join(f"{short_bytes(gpu.memory)} ({gpu.name})" for gpu in named)
        message = f"GPU `{name}` with {short_bytes(memory_bytes)} is not in the catalogue, "
        message += f"which has it with {sizes}"
        hint = "correct `gpu.memory`, or name the nearest one in `gpu.model`, or describe it"
    else:
        message = f"GPU `{name}` is not in the catalogue"
        spellings = [one for gpu in catalogue.gpus for one in (gpu.name, *gpu.aliases)]
        near = nearest(name, spellings)[:1]
        listed = f"known: {', '.join(catalogue.names)};"
        hint = f"did you mean `{near[0]}`?" if near else listed
        hint += " to add it, describe it"
    hint += ": `gpu.peak` and `gpu.memory_bandwidth` in the profile, or an entry in a "
    hint += "`gpus.yaml` beside the profiles"
    file, _, line = (origin or "").rpartition(":")
    if file and line.isdecimal():
        return Problem(message, file=file, line=int(line), hint=hint)
    return Problem(message, file=origin, hint=hint)


# -- Published models by name: `model: llama-3-8b` instead of a dozen fields --------------------


CATALOGUE = FilePath(__file__).resolve().with_name("models.yaml")
MODEL, PRESET = "model", "preset"


class ModelPreset(Document):
    """One published model. `shape`: fields of `model`; `parameters`: as published, each once."""

    name: str = Field(min_length=2)
    parameters: int = Field(ge=1)
    source: str = Field(min_length=3)
    shape: dict[str, Any]


class ModelPresets(Document):
    """All of them, in the order of the file."""

    presets: tuple[ModelPreset, ...]

    def named(self, name: str) -> ModelPreset | None:
        return next((one for one in self.presets if one.name == name), None)


def expand_preset(parsed: Parsed, catalogue: ModelPresets) -> None:
    """Replace the name of a model by its fields; those that the file gives stay.

    Fields of the catalogue have the place of the name. An unknown name is a problem of the file.
    """
    model = parsed.data.get(MODEL) if isinstance(parsed.data, dict) else None
    given = model if isinstance(model, dict) else {}
    where = (MODEL, PRESET) if PRESET in given else (MODEL,)
    name, place = given.pop(PRESET, model), parsed.values[where]
    if not isinstance(name, str):
        message = f"`{MODEL}.{PRESET}`: expected the name of a model"
        parsed.problems.append(place.problem(message))
        parsed.broken.add((MODEL,))
        return
    found = catalogue.named(name)
    if found is None:
        names = [one.name for one in catalogue.presets]
        hint = did_you_mean(name, names) or f"presets are {', '.join(names)}"
        parsed.problems.append(place.problem(f"`{MODEL}`: no preset is called `{name}`", hint))
        parsed.broken.add((MODEL,))
        parsed.data[MODEL] = dict(given)
        return
    parsed.values.pop((MODEL, PRESET), None)
    parsed.data[MODEL] = {**found.shape, **given}
    for field in found.shape.keys() - given.keys():
        parsed.values[MODEL, field] = place
