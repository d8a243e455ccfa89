"""What the search proposes for engines of megatron-core passes the checks that every launch makes.

The rules of the planner and the checks of the trainer are written down twice, for the one works on
arrays of layouts and the other one on a configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specimens import cluster, run_spec
from test_search import MOE, SMALL

from hpctrain.engines.megatron import megatron_config
from hpctrain.plan.job import TrainingJob
from hpctrain.plan.planner import _assemble
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.search.layouts import Found, search
from hpctrain.plan.search.space import freedom_of
from hpctrain.records.layout import RunLayout
from hpctrain.train.engines.megatron.preflight import engine_problems

H100 = dict(type="h100", per_node=8, reserved="100MiB", model="H100-80GB SXM", memory="80GiB")
EXPERTS = {**MOE, "moe": dict(experts=8, top_k=2, ffn=512)}
BIASED = {**EXPERTS, "bias": True, "positions": "learned"}
AWAY = dict(activation_offload_layers="auto")


def own(**settings: Any) -> dict[str, Any]:
    return dict(engine={"megatron": settings})


GRAPHS = own(cuda_graph_impl="local")
SPECS: dict[str, dict[str, Any]] = {
    "dense": dict(model=SMALL),
    "offloading": dict(model=SMALL, **AWAY),
    "prediction layers": dict(model={**SMALL, "mtp_layers": 1}),
    "experts": dict(model=EXPERTS),
    "dense and expert layers": dict(model=MOE),
    "biased experts": dict(model=BIASED),
    "flex": dict(model=EXPERTS, **own(moe_token_dispatcher_type="flex")),
    "shared expert": dict(model=MOE, **own(moe_shared_expert_overlap=True)),
    "graphs": dict(model=SMALL, **GRAPHS, **AWAY),
    "graphs of dropout": dict(model={**SMALL, "family": "gpt", "dropout": 0.1}, **GRAPHS),
}
WITH_ENGINE: dict[str, dict[str, Any]] = {
    "8 bits": dict(model=SMALL, precision="fp8"),
    "8 bits with experts": dict(model=EXPERTS, precision="fp8"),
    "hidden messages": dict(model=SMALL, **own(tp_comm_overlap=True)),
    "deferred gradients": dict(model=SMALL, **own(defer_embedding_wgrad_compute=True)),
}
CASES = [
    *((name, True) for name in (*SPECS, *WITH_ENGINE)),
    *((name, False) for name in ("dense", "offloading", "experts", "graphs of dropout")),
]


def one_of_each_kind(found: Found) -> list[int]:
    """A row that fits for every combination of recomputation, offload and some axes in use."""
    columns, rows = found.columns, np.flatnonzero(found.fits)
    kinds = np.column_stack(
        [
            *(columns.recompute, columns.recompute_modules, columns.recompute_layers > 0),
            *(columns.offloaded_layers > 0, columns.etp > 0, columns.tp > 1, columns.pp > 1),
        ]
    )[rows]
    _, first = np.unique(kinds, axis=0, return_index=True)
    return [int(row) for row in rows[np.sort(first)]]


@pytest.mark.parametrize(("name", "installed"), CASES)
def test_the_engine_takes_one_proposal_of_each_kind(
    name: str, installed: bool, tmp_path: Path
) -> None:
    """`installed`: the profile promises TransformerEngine."""
    spec = run_spec(**dict(gpus=8, batch=32, micro="auto") | {**SPECS, **WITH_ENGINE}[name])
    profile = cluster(gpu=H100, software={"transformer_engine": installed})
    request = PlanRequest(spec, profile)
    found = search(request, freedom_of(request))
    rows = one_of_each_kind(found)
    assert rows
    refused = {
        problem.message
        for row in rows
        for problem in engine_problems(
            megatron_config(TrainingJob(request.spec, profile, _assemble(found, row))),
            RunLayout(tmp_path),
        )
    }
    assert not refused


def test_activations_are_offloaded_where_the_engine_can() -> None:
    spec = run_spec(**dict(gpus=8, batch=32, micro="auto") | SPECS["offloading"])
    offloaded = []
    for installed in (True, False):
        profile = cluster(gpu=H100, software={"transformer_engine": installed})
        request = PlanRequest(spec, profile)
        offloaded.append(bool(search(request, freedom_of(request)).columns.offloaded_layers.any()))
    assert offloaded == [True, False]
