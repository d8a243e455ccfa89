"""What is believed of a site's multipliers, and how its own runs change that.

The model: log(measured) = log(predicted) + effects . m + rest(place) + noise, where m is one draw
per site from N(mean, covariance), rest is one Gaussian process per site, which configurations that
are alike share, and noise is one draw per configuration. All are Gaussian, so that what runs teach
has a closed form (Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, eq. 2.8).
Belongs here: belief, update, predictive deviation. Does not belong here: the prior's figures
(`hpctrain.spec.calibration`), effects (`cost.multipliers`), places (`cost.multipliers`), intervals
(`intervals`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hpctrain.plan.cost.case import Floats
from hpctrain.plan.cost.multipliers import alike, weights_of

# Degrees of freedom of the noise where it is taken as Student's t: one odd run counts less.
FREEDOM = 4.0
# Squared: the 90 % quantile of that distribution over the normal one (NIST/SEMATECH e-Handbook,
# tables 1.3.6.7.2 and 1.3.6.7.1), so that intervals of a normal distribution do.
TAILS = (1.533 / 1.282) ** 2
# The packaged noise counts as much as so many own runs: some sites repeat themselves within a
# percent, others vary by ten.
NOISE_TRUST = 5.0
_ROUNDS = 50
_SETTLED = 1e-10


@dataclass(frozen=True)
class Rest:
    """What is left of a configuration's error, and shared by those alike: a Gaussian process.

    `deviation` before any run; `reach` in doublings (`cost.multipliers`); `seen`: places of runs,
    [places, axes].
    """

    deviation: float
    reach: float
    seen: Floats

    def weights(self, places: Floats) -> Floats:
        """Compute how what was seen continues at these places: [places, seen]."""
        if not len(self.seen):
            return np.zeros((len(places), 0))
        return weights_of(places, self.seen, self.reach)

    def unseen(self, places: Floats) -> Floats:
        """Compute the variance that no seen place explains, of each place: [places]."""
        known = np.zeros(len(places))
        if len(self.seen):
            known = (self.weights(places) * alike(places, self.seen, self.reach)).sum(axis=1)
        return np.asarray(self.deviation**2 * np.maximum(1 - known, 0.0))


@dataclass(frozen=True)
class Belief:
    """Mean and covariance of the logarithms of n multipliers, then of the rest at each seen place.

    Shapes [n + seen] and [n + seen, n + seen]. `noise_factor`: variance of the site's own noise
    over the packaged one. Without `rest` nothing is shared but the multipliers, and no places are
    needed; else `places` are those of the rows of `effects`.
    """

    mean: Floats
    covariance: Floats
    noise_factor: float = 1.0
    rest: Rest | None = None

    def shift(self, effects: Floats, places: Floats | None = None) -> Floats:
        """Compute the expected logarithm of measured over predicted: [rows]."""
        return np.asarray(self._joined(effects, places) @ self.mean)

    def variance(self, effects: Floats, places: Floats | None = None) -> Floats:
        """Compute the variance of that logarithm without noise: [rows].

        Never below 0, where a covariance that was written with six digits might have it.
        """
        known = np.maximum(_quadratic(self._joined(effects, places), self.covariance), 0.0)
        if self.rest is None or places is None:
            return known
        return known + self.rest.unseen(places)

    def deviation(
        self, effects: Floats, noise: Floats | float, places: Floats | None = None
    ) -> Floats:
        """Compute the deviation of that logarithm for runs with noise: [rows].

        Where 80 of 100 runs lie, it stands for the wider tails of the noise.
        """
        own = TAILS * self.noise_factor * np.square(noise)
        return np.asarray(np.sqrt(self.variance(effects, places) + own))

    def parts(self, effects: Floats, noise: Floats | float, places: Floats | None = None) -> Floats:
        """Compute what each multiplier, the rest and the noise add to that variance, of one row.

        Shape [n + 2]; their sum is the square of `deviation`. What runs have taught of two together
        is shared by both, so that a part may be a little below 0.
        """
        joined = self._joined(effects, places)[0]
        shares = joined * (self.covariance @ joined)
        count = effects.shape[1]
        unseen = 0.0 if self.rest is None or places is None else self.rest.unseen(places)[0]
        alike = shares[count:].sum() + unseen
        own = TAILS * self.noise_factor * np.square(np.ravel(noise)[0])
        return np.asarray([*shares[:count], alike, own])

    def difference(
        self, effects: Floats, noise: Floats | float, places: Floats | None = None
    ) -> Floats:
        """Compute the deviation of the difference of each row's logarithm to the first's: [rows].

        What both share cancels out. `noise`: all of one row that the other does not share.
        """
        joined = self._joined(effects, places)
        shared = _quadratic(joined - joined[:1], self.covariance)
        return np.asarray(np.sqrt(shared + 2 * TAILS * self.noise_factor * np.square(noise)))

    def _joined(self, effects: Floats, places: Floats | None) -> Floats:
        """Append what the rest at seen places does to each row."""
        if self.rest is None or not len(self.rest.seen):
            return effects
        assert places is not None, "what is alike is told by places"
        return np.column_stack([effects, self.rest.weights(places)])


def _quadratic(effects: Floats, covariance: Floats) -> Floats:
    return np.asarray(np.einsum("ri,ij,rj->r", effects, covariance, effects))


@dataclass(frozen=True)
class Observations:
    """Runs of one site, arrays of shape [runs].

    `errors`: logarithms of measured over predicted; `effects`: [runs, multipliers]; `noise`:
    deviation of each; `places`: [runs, axes], where a belief has a rest.
    """

    errors: Floats
    effects: Floats
    noise: Floats
    places: Floats | None = None


def updated(
    prior: Belief, seen: Observations, freedom: float = FREEDOM, trust: float = NOISE_TRUST
) -> Belief:
    """Update a belief by runs, whatever their order.

    Runs of one configuration count as one, with their median: the noise is the model's error of a
    configuration, which repeats. Gaussian noise of the given deviation where `freedom` and `trust`
    are infinite. Else Student's t, by the weights of its mixture of Gaussians (Lange, Little and
    Taylor 1989, JASA 84, 881-896), and a variance of the site's own, with a conjugate prior that
    counts as `trust` runs; both by expectation and maximisation.
    """
    one = _by_configuration(seen)
    count = len(one.errors)
    if not count:
        return prior
    prior, one = _at_places(prior, one)
    weights, factor, belief = np.ones(count), prior.noise_factor, prior
    for _ in range(_ROUNDS):
        belief = _gaussian(prior, one, weights / factor)
        left = one.errors - one.effects @ belief.mean
        square = (left**2 + _quadratic(one.effects, belief.covariance)) / one.noise**2
        before = np.append(weights, factor)
        if np.isfinite(freedom):
            weights = (freedom + 1) / (freedom + square / factor)
        if np.isfinite(trust):
            factor = float((trust * prior.noise_factor + weights @ square) / (trust + count))
        if np.abs(np.append(weights, factor) - before).max() < _SETTLED:
            break
    return replace(belief, noise_factor=factor, rest=prior.rest)


def _at_places(prior: Belief, seen: Observations) -> tuple[Belief, Observations]:
    """Let the rest at each place that is seen be one more unknown of a belief that has seen none.

    Runs without places, measured rates, say nothing about the rest.
    """
    rest = prior.rest
    if rest is None or seen.places is None:
        return prior, seen
    assert not len(rest.seen), "a belief meets all runs of a site at once"
    places, at = np.unique(seen.places, axis=0, return_inverse=True)
    size, count = len(prior.mean), len(places)
    covariance = np.zeros((size + count, size + count))
    covariance[:size, :size] = prior.covariance
    covariance[size:, size:] = rest.deviation**2 * alike(places, places, rest.reach)
    effects = np.column_stack([seen.effects, np.eye(count)[at.reshape(-1)]])
    mean = np.concatenate([prior.mean, np.zeros(count)])
    known = replace(prior, mean=mean, covariance=covariance, rest=replace(rest, seen=places))
    return known, replace(seen, effects=effects)


def _gaussian(prior: Belief, seen: Observations, weights: Floats) -> Belief:
    """Update by Gaussian noise whose variance is divided by `weights`."""
    effects = seen.effects
    spread = effects @ prior.covariance @ effects.T + np.diag(seen.noise**2 / weights)
    gain = np.linalg.solve(spread, effects @ prior.covariance).T
    mean = prior.mean + gain @ (seen.errors - effects @ prior.mean)
    covariance = prior.covariance - gain @ effects @ prior.covariance
    return Belief(mean, (covariance + covariance.T) / 2)


def _by_configuration(seen: Observations) -> Observations:
    """Join runs with equal effects and places, and sort, so that sums have one order."""
    if not len(seen.errors):
        return seen
    where = np.zeros((len(seen.errors), 0)) if seen.places is None else seen.places
    keys = np.round(np.column_stack([seen.effects, seen.noise, where]), 9)
    _, groups = np.unique(keys, axis=0, return_inverse=True)
    groups = groups.reshape(-1)
    members = [np.flatnonzero(groups == number) for number in range(groups.max() + 1)]
    first = np.array([some[0] for some in members])
    return Observations(
        errors=np.array([np.median(seen.errors[some]) for some in members]),
        effects=seen.effects[first],
        noise=seen.noise[first],
        places=None if seen.places is None else seen.places[first],
    )
