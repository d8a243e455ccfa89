"""The search against brute force, on a small grid; bounds, refusals, and what error costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from serving_offers import TPOT, demand, engine, model, offer

from hpctrain.serve.plan.candidates import replica_shapes
from hpctrain.serve.plan.promises import ModelError, Objective, promises, tightness
from hpctrain.serve.plan.routing import SimulatedService, Window, simulate_open
from hpctrain.serve.plan.search import (
    FIRST_LOOK,
    LAST_LOOK,
    SECOND_LOOK,
    bound,
    confirmed,
    highest_rate,
    search,
    simulated,
    with_errors,
)
from hpctrain.serve.plan.traffic import draw_requests


def test_no_shape_and_number_is_cheaper_than_the_one_found() -> None:
    """Brute force: every shape with every smaller number of replicas, as long as the last look."""
    asked, small = demand(12.0), engine(batch_tokens=2048)
    found = search(offer(), model(), small, asked)
    assert found.best is not None
    best, _ = confirmed(found.best, asked)
    shapes, _ = bound(offer(), model(), small, asked)
    cheaper = []
    for (one,) in shapes:
        if not one.shape.decided:
            continue
        for count in range(1, 13):
            if count * one.shape.hourly >= best.hourly:
                break
            got = simulated(one, one.tables.cautious, count, asked, LAST_LOOK)
            if tightness(got, asked.objectives)[0] <= 1:
                cheaper.append((str(one.shape), count))
    assert not cheaper
    assert best.holds and best.hourly == best.count * best.bounded.shape.hourly


def test_one_replica_fewer_does_not_hold() -> None:
    asked = demand(40.0)
    found = search(offer(), model(), engine(), asked)
    assert found.best is not None
    best, fewer = confirmed(found.best, asked)
    if fewer is None:
        got = simulated(
            best.bounded, best.bounded.tables.cautious, best.count - 1, asked, LAST_LOOK
        )
        assert tightness(got, asked.objectives)[0] > 1
    else:
        assert not fewer.holds and fewer.count == best.count - 1


def test_dearer_gpus_are_chosen_where_they_cost_less_in_the_end() -> None:
    asked = demand(30.0)
    hopper = search(offer(price=2.0), model(), engine(batch_tokens=2048), asked).best
    ampere = search(
        offer("A100-80GB SXM", price=1.9), model(), engine(batch_tokens=2048), asked
    ).best
    assert hopper is not None and ampere is not None
    assert hopper.hourly < ampere.hourly
    cheap = search(
        offer("A100-80GB SXM", price=0.3), model(), engine(batch_tokens=2048), asked
    ).best
    assert cheap is not None and cheap.hourly < hopper.hourly


def test_the_error_of_the_cost_model_costs_replicas() -> None:
    counts = []
    for deviation in (0.0, 0.1, 0.25):
        asked = demand(40.0, error=ModelError(deviation))
        found = search(offer(), model(), engine(tp=4, batch_tokens=2048), asked).best
        assert found is not None
        counts.append(confirmed(found, asked)[0].count)
    assert counts == sorted(counts) and counts[0] < counts[-1]


def test_promises_have_an_interval_around_what_is_predicted() -> None:
    asked = demand()
    found = search(offer(), model(), engine(tp=4, batch_tokens=2048), asked).best
    assert found is not None
    for one in promises(with_errors(found, asked), asked.objectives):
        assert one.low_seconds < one.predicted_seconds < one.high_seconds
        # at least the error of the model itself, and at a load like this more
        assert one.high_seconds > one.predicted_seconds * asked.error.slow * 0.97
        assert one.holds and one.predicted_seconds < one.limit_seconds


def test_promises_hold_if_they_do_with_cautious_iterations() -> None:
    asked = demand(objectives=(TPOT,))
    found = search(offer(), model(), engine(tp=4, batch_tokens=2048), asked).best
    assert found is not None
    outcomes = with_errors(found, asked)
    [kept] = promises(outcomes, asked.objectives)
    usual = kept.predicted_seconds
    between = replace(TPOT, limit_seconds=usual * 1.02)
    assert kept.holds and not promises(outcomes, (between,))[0].holds


def test_a_longer_look_may_take_more_replicas() -> None:
    asked = demand(40.0)
    found = search(offer(), model(), engine(tp=4, batch_tokens=2048), asked).best
    assert found is not None
    settled, _ = confirmed(found, asked)
    fewer = replace(found, count=settled.count - 2)
    again, below = confirmed(fewer, asked)
    assert again.holds and again.count == settled.count
    assert below is not None and not below.holds


def test_short_looks_are_those_of_a_long_simulation_in_the_mean() -> None:
    """Beginning in the middle, warm-up and cool-down leave no bias worth a replica."""
    asked, count = demand(100.0), 13
    [choices] = [
        found
        for found in bound(offer(), model(), engine(tp=4, batch_tokens=2048), asked)[0]
        if found[0].shape.decided
    ]
    one = choices[0]
    service = SimulatedService(one.tables.cautious, one.limits, count)
    requests = draw_requests(asked.traffic, 12_000, seed=99)
    long = simulate_open(service, requests, asked.rate, Window(0.1, 0.15, begun=50))
    for looks, seeds in ((FIRST_LOOK, 8), (SECOND_LOOK, 3)):
        got = [
            simulated(one, one.tables.cautious, count, replace(asked, seed=seed), looks)
            for seed in range(seeds)
        ]
        for share in (0.5, 0.99):
            mean = np.mean([np.quantile(found.tpot_seconds, share) for found in got])
            assert mean == pytest.approx(np.quantile(long.tpot_seconds, share), rel=0.06)


def test_a_plan_carries_a_little_more_than_it_has_to() -> None:
    asked = demand()
    found = search(offer(), model(), engine(tp=4, batch_tokens=2048), asked).best
    assert found is not None
    rate = highest_rate(found, asked)
    assert asked.rate <= rate < asked.rate * (found.count + 1.5) / found.count


def test_people_decide_about_fewer_bits() -> None:
    asked = demand()
    found = search(offer(), model(), engine(), asked)
    assert found.best is not None and found.best.bounded.shape.precision == "bf16"
    [other] = [one for one in found.others if not one.bounded.shape.decided]
    assert other.bounded.shape.precision == "fp8" and other.hourly < found.best.hourly
    decided = search(offer(), model(), engine(precision="fp8", kv_precision="fp8"), asked).best
    assert decided is not None and decided.hourly <= other.hourly
    # a GPU without 8-bit products has no such shapes
    shapes = replica_shapes(offer("A100-80GB SXM"), model(), engine())
    assert {shape.precision for shape in shapes} == {"bf16"}


def test_limits_that_no_gpu_keeps_say_so_before_anything_is_simulated() -> None:
    asked = demand(objectives=(Objective("e2e", "p99", 0.5),))
    found = search(offer(), model(), engine(), asked)
    assert found.best is None and not found.failing
    assert any("even without other requests p99 of e2e is" in one.reason for one in found.unusable)


def test_weights_that_do_not_fit_say_so_and_pipelines_join_nodes() -> None:
    asked = demand(2.0, objectives=(Objective("tpot", "p99", 0.5),))
    small = offer(per_node=2, most_replica_gpus=8)
    found = search(small, model(), engine(), asked)
    assert found.best is not None
    memory = [one.reason for one in found.unusable if one.shape.tp == 1]
    assert any("leave nothing of 72 GiB for keys" in reason for reason in memory)
    huge = search(small, model("llama-3-405b"), engine(), asked)
    assert huge.best is None
    room = replace(small, most_replica_gpus=64)
    piped = search(room, model("llama-3-405b"), engine(), asked).best
    assert piped is not None and piped.bounded.shape.pp > 1 and piped.bounded.shape.tp == 2


def test_memory_that_activations_take_is_not_there_for_keys() -> None:
    """Weights leave room for one long request, if iterations are small."""
    asked = demand(1.0, objectives=(Objective("tpot", "p99", 0.2),))

    def budgets(**choices: object) -> set[int]:
        tight = engine(tp=2, memory_fraction=0.88, **choices)
        bounded, _ = bound(offer(), model(), tight, asked)
        decided = [one for choice in bounded for one in choice if one.shape.decided]
        return {one.limits.batch_tokens for one in decided}

    assert budgets() == {512, 1024, 2048, 4096, 8192}
    assert budgets(max_length=8192) == {512, 1024, 2048}
    assert search(offer(), model(), engine(tp=2, memory_fraction=0.88), asked).best is not None


def test_gpus_that_are_not_there_are_not_planned() -> None:
    found = search(offer(most_gpus=16), model(), engine(), demand(100.0))
    assert found.best is None
    assert any("there are 16" in one.reason for one in found.unusable)


def test_above_a_node_whole_nodes_are_paid() -> None:
    assert offer().billed_gpus(4) == 4
    assert offer().billed_gpus(8) == 8
    assert offer(per_node=6).billed_gpus(8) == 12


def test_a_decided_number_of_replicas_is_judged_and_not_changed() -> None:
    found = search(offer(), model(), engine(tp=4), demand(count=2))
    assert found.best is None and found.failing[0].count == 2
    enough = search(offer(), model(), engine(tp=4), demand(count=9)).best
    assert enough is not None and enough.count == 9


@pytest.mark.parametrize("rate", [10.0, 40.0])
def test_bounds_are_not_above_what_holds(rate: float) -> None:
    asked = demand(rate, error=ModelError(0.0))
    found = search(offer(), model(), engine(tp=4, batch_tokens=2048), asked).best
    assert found is not None
    assert found.bounded.least_replicas(asked) <= found.count
    assert found.count <= 2 * found.bounded.least_replicas(asked)


def test_tables_are_the_cost_function() -> None:
    shape = next(one for one in replica_shapes(offer(), model(), engine()) if one.tp == 4)
    table = shape.table(700.0)
    from hpctrain.serve.plan.step_time import IterationLoad

    generator = np.random.default_rng(1)
    worst = 0.0
    for _ in range(300):
        prompt = int(generator.choice([0, 1, *generator.integers(2, 8192, 3)]))
        sequences = int(generator.integers(0 if prompt else 1, 512))
        keys = float(generator.uniform(10, 3000))
        context = float(generator.uniform(10, 1400))
        load = IterationLoad(prompt, keys, sequences, context)
        exact = float(shape.predicted_seconds(load))
        got = table.seconds(prompt, prompt * keys, sequences, sequences * context)
        worst = max(worst, abs(got / exact - 1))
    # the corner between launching kernels and the GPU's work is not linear in keys
    assert worst < 0.06
