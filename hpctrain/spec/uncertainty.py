"""How far the planner may be off on a site that it has not seen, and what own runs have taught.

Belongs here: the documents behind `catalogue/uncertainty.yaml` and behind what `hpctrain calibrate`
learns. Does not belong here: fitting the prior (`bench/fit_uncertainty.py`), the update
(`hpctrain.plan.uncertainty`), reading files (`spec.loader`). All deviations are of logarithms: 0.1
is about 10 %.
"""

from __future__ import annotations

from math import sqrt
from typing import Annotated

from pydantic import Field, model_validator

from hpctrain.spec.document import Document

Deviation = Annotated[float, Field(ge=0, le=3)]
# of what runs teach: e^5 is a factor of 150, and steps are refused beyond one of 3
Logarithm = Annotated[float, Field(ge=-5, le=5)]
Variance = Annotated[float, Field(ge=-25, le=25)]
_ROUNDED = 1e-4  # share of a covariance, which is written with six digits
Probability = Annotated[float, Field(ge=0, le=1)]


class Doubt(Document):
    """The prior of one quantity: how much a site as a whole can be off, and each of its runs.

    `multipliers`: deviation of each multiplier between sites. `classes`: of a common factor on all
    runs of a site for which the planner knows less. `noise`: of what is left in a single
    configuration; `class_noise` adds to it by class; `layout_noise` of it is not shared by layouts
    of one model. `rest`: of what is left besides, and shared by configurations that are alike;
    `reach`: how many doublings apart those may be. `widening`: factor on the normal distribution's
    quantile, so that as many unseen rows lie inside as are promised; `learned_widening` the same
    once own runs have taught.
    """

    multipliers: dict[str, Deviation]
    classes: dict[str, Deviation] = Field({}, description="By reason why less is known")
    noise: Deviation
    class_noise: dict[str, Deviation] = Field({}, description="By reason why less is known")
    layout_noise: Deviation
    rest: Deviation = 0.0
    reach: float = Field(1.0, gt=0, le=20)
    widening: float = Field(1.0, gt=0, le=5)
    learned_widening: float = Field(1.0, gt=0, le=5)


class Uncertainty(Document):
    """Both priors, and the GPUs and networks whose constants were fitted to measurements.

    `other_network`: deviation of the multiplier `network` on a fabric that is not among them.
    """

    time: Doubt
    memory: Doubt
    measured_gpus: tuple[str, ...] = Field(description="By catalogue name")
    measured_fabrics: tuple[str, ...] = Field(description="As profiles call them")
    other_network: Deviation
    provenance: str = Field(min_length=3, description="What the figures were fitted to")


class OwnRun(Document):
    """One run that a site has calibrated with: which one, when, where, with which software."""

    run: str = Field(min_length=1, description="Its id, or the name of a job of `make gpu`")
    day: str = Field(description="Of its last step, UTC: 2026-11-26")
    nodes: tuple[str, ...] = Field((), description="On which it ran")
    steps: int = Field(ge=1, description="That were counted")
    hpctrain: str = Field("", description="Version that trained it")
    software: str = Field("", description="PyTorch, as its ranks found it")
    measured_seconds: float = Field(gt=0, description="Of a step, as measured")
    before_seconds: float = Field(gt=0, description="As planned without own runs")
    after_seconds: float = Field(gt=0, description="As planned with them")
    measured_bytes: float | None = Field(None, gt=0, description="Reserved on the fullest GPU")
    before_bytes: float | None = Field(None, gt=0, description="As planned without own runs")
    after_bytes: float | None = Field(None, gt=0, description="As planned with them")


class LearnedMultiplier(Document):
    """One multiplier as a factor on time or memory, and how sure it was before and is after.

    `before` and `after` are deviations of its logarithm: two sites in three are that near.
    """

    name: str
    factor: float
    before: float
    after: float


class LearnedRest(Document):
    """What runs have shown of what configurations that are alike err by together.

    `deviation`, `reach`: before any run, as packaged then. `places`: where the runs are, on `axes`
    (`hpctrain/plan/cost/multipliers.py`).
    """

    deviation: Deviation = Field(description="Of its logarithm before any run")
    reach: float = Field(gt=0, le=20, description="In doublings")
    axes: tuple[str, ...] = Field(description="What a place has a number for")
    places: tuple[tuple[float, ...], ...] = Field(description="A row for each of the last names")


class Learned(Document):
    """What is believed of one quantity's multipliers after the update; logarithms."""

    names: tuple[str, ...] = Field(
        description="Of the multipliers, then `like RUN` for each place (docs/certainty.md)"
    )
    mean: tuple[Logarithm, ...] = Field(description="Of the logarithm of each: 0 as packaged")
    covariance: tuple[tuple[Variance, ...], ...] = Field(description="Of these logarithms")
    noise_factor: float = Field(
        1.0, gt=0, description="Variance of this site's noise over the packaged one"
    )
    rest: LearnedRest | None = Field(None, description="Shared by configurations that are alike")

    @model_validator(mode="after")
    def _fits_together(self) -> Learned:
        size = len(self.names)
        if len(self.mean) != size or len(self.covariance) != size:
            raise ValueError("names, mean and covariance differ in length")
        if any(len(row) != size for row in self.covariance):
            raise ValueError("the covariance is not square")
        if len(set(self.names)) != size:
            raise ValueError("a name is there twice")
        if any(self.covariance[one][one] < 0 for one in range(size)):
            raise ValueError("the covariance has a negative variance")
        for one in range(size):
            for other in range(one):
                self._check_pair(one, other)
        if self.rest is not None and any(
            len(place) != len(self.rest.axes) for place in self.rest.places
        ):
            raise ValueError("a place has not as many numbers as there are axes")
        return self

    @property
    def multipliers(self) -> tuple[str, ...]:
        """The names without those of places, which are the last ones."""
        return self.names[: len(self.names) - len(self.rest.places if self.rest else ())]

    def _check_pair(self, one: int, other: int) -> None:
        """Refuse a covariance that no two quantities can have. Raises ValueError."""
        value, mirrored = self.covariance[one][other], self.covariance[other][one]
        limit = sqrt(self.covariance[one][one] * self.covariance[other][other])
        if abs(value - mirrored) > _ROUNDED * limit:
            raise ValueError(f"the covariance is not symmetric in row {one + 1}")
        if abs(value) > (1 + _ROUNDED) * limit:
            raise ValueError(f"the covariance in row {one + 1} exceeds what its variances allow")


class SiteLearning(Document):
    """What the runs of one engine on one cluster have taught; `hpctrain calibrate RUN ...`."""

    time: Learned = Field(description="Of the seconds of a step")
    memory: Learned | None = Field(None, description="Of the bytes of the fullest GPU")
    runs: tuple[OwnRun, ...] = Field(min_length=1, description="From which it was learned")
    error: Deviation = Field(
        description="Half the width of the 68 % interval of the next step time: 0.03 is 3 %"
    )
    constants: str = Field(
        min_length=8,
        description="Digest of the constants that are corrected: with others it is left aside",
    )
