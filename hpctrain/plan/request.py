"""The input of the planner: a spec, a cluster, and the data sheet of its GPU.

Belongs here: the record that every step of planning takes. Does not belong here: decisions, or
anything that needs NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hpctrain.plan.abilities.trainable_megatron import own_layers_for
from hpctrain.plan.documents import Goal
from hpctrain.plan.model.parameters import ModelCounts, count_model
from hpctrain.spec.calibration import Calibration, SiteLearning, Uncertainty
from hpctrain.spec.catalogue import Generation, Gpu
from hpctrain.spec.engines.abilities import MEGATRON_CORE
from hpctrain.spec.engines.megatron import Fp8Recipe, with_fp8_recipe
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec


@dataclass(frozen=True)
class Knowledge:
    """Constants of the cost model. `gpu`: the GPU with its links, None if it is not listed.

    `uncertainty`: how far they may be off; None: predictions are without intervals. `learned`: what
    the site's own runs have taught, by engine; `outdated`: engines of which that no longer holds,
    because the constants have changed. `measured`: names of multipliers that were measured at the
    site one by one, without a run.
    """

    gpu: Gpu | None
    calibration: Calibration
    uncertainty: Uncertainty | None = None
    learned: Mapping[str, SiteLearning] = field(default_factory=dict)
    outdated: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanRequest:
    """What to plan, on which cluster, and by which goal plans are compared.

    Without `knowledge` of a GPU no time is predicted. `spec` has its `engine.implementation` and
    `engine.megatron.fp8_recipe` chosen: what is planned and priced here is what the ranks have to
    find.
    """

    spec: RunSpec
    profile: ClusterProfile
    knowledge: Knowledge | None = None
    goal: Goal = "time"

    def __post_init__(self) -> None:
        spec, engine = self.spec, self.spec.engine
        if engine.abilities.model_classes == MEGATRON_CORE and engine.implementation == "auto":
            # the layers of megatron-core that the profile promises
            promised = self.profile.software.transformer_engine and not self.profile.gpu.emulated
            fused = promised and own_layers_for(spec.model) is None
            chosen = "transformer_engine" if fused else "local"
            engine = engine.model_copy(update={"implementation": chosen})
        if spec.precision == "fp8" and engine.megatron.fp8_recipe == "auto":
            # current scaling as the recipes of Megatron-Bridge for Hopper, block scaling in
            # hardware (MXFP8) on Blackwell
            blackwell = self.generation == "blackwell"
            engine = with_fp8_recipe(engine, "mxfp8" if blackwell else "tensorwise")
        if engine is not spec.engine:
            object.__setattr__(self, "spec", spec.model_copy(update={"engine": engine}))

    @cached_property
    def counts(self) -> ModelCounts:
        """Parameters and operations of the spec, counted at the first use."""
        return count_model(self.spec)

    @property
    def generation(self) -> Generation | None:
        """Generation of the GPU; None if it is not known."""
        return self.knowledge.gpu.generation if self.knowledge and self.knowledge.gpu else None

    @property
    def fp8_recipe(self) -> Fp8Recipe | None:
        """How `precision: fp8` scales; None at another precision."""
        chosen = self.spec.engine.megatron.fp8_recipe
        return None if self.spec.precision != "fp8" or chosen == "auto" else chosen
