"""Plan a service on one cluster or on several: the model's shape, a trace, the GPU's constants.

Belongs here: what is read from files for it, and which refusal belongs to which file. Does not
belong here: decisions (`hpctrain.serve.plan`), printing (`hpctrain.serve.serve_text`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.base.errors import InvalidInputError, RefusedPlanError
from hpctrain.base.frozen import Frozen
from hpctrain.base.units import Bandwidth, FlopRate
from hpctrain.checkpoints.staged import CONFIG_NAME, tensor_bytes
from hpctrain.job.prepare import load_knowledge
from hpctrain.records.find import find_run, runs_directory
from hpctrain.serve.plan.documents import Clarification, ServicePlan
from hpctrain.spec.calibration import SiteCalibration
from hpctrain.spec.catalogue import Gpu
from hpctrain.spec.loader import (
    Loaded,
    load_run_spec,
    load_serving_calibration,
    partition_profile,
)
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.service import ServiceSpec

if TYPE_CHECKING:
    from hpctrain.serve.plan.candidates import ModelFacts
    from hpctrain.serve.plan.service_plan import ServiceRequest
    from hpctrain.serve.plan.traffic import Trace

# Standard deviation of the logarithm of measured over predicted seconds of processors in place of
# GPUs, of which nobody knows how fast they are.
EMULATED_ERROR = 0.7
# One core that computes in place of a GPU: a few operations per cycle, a share of the main memory.
CORE_RATE, CORE_BANDWIDTH = FlopRate(30e9), Bandwidth(8e9)


class RefusedCluster(Frozen):
    """A cluster on which the service has no plan; `reason` has a line for each shape."""

    profile: str
    reason: str
    hint: str | None = None


class PlannedService(Frozen):
    """Plans of a service, the cheapest first, and clusters without one.

    `clarifications` are there instead of plans where a limit does not name its latency.
    """

    service: str
    plans: tuple[ServicePlan, ...] = ()
    refused: tuple[RefusedCluster, ...] = ()
    clarifications: tuple[Clarification, ...] = ()

    @property
    def chosen(self) -> ServicePlan | None:
        """The cheapest plan."""
        return self.plans[0] if self.plans else None


def plan_service(
    spec: Loaded[ServiceSpec],
    profiles: Sequence[Loaded[ClusterProfile]],
    runs: Path | None = None,
) -> PlannedService:
    """Plan a service on each cluster, and order the plans by what they cost.

    `runs`: where the run of `weights.run` is; default: as for other commands. Raises
    InvalidInputError with the position of what is wrong; RefusedPlanError where no cluster has a
    plan.
    """
    from hpctrain.serve.load.trace_file import read_trace
    from hpctrain.serve.plan.service_plan import clarify, plan_on_cluster

    model, file = read_model(spec, runs), spec.document.traffic.trace
    trace = None if file is None else read_trace(Path(file))
    requests = [service_request(spec, profile, model, trace) for profile in profiles]
    if spec.document.objectives.p99 is not None:
        return PlannedService(
            service=spec.document.name,
            clarifications=tuple(clarify(request) for request in requests),
        )
    plans, refused, errors = [], [], []
    for request in requests:
        try:
            plans.append(plan_on_cluster(request))
        except RefusedPlanError as error:
            errors.append(error.at(spec.problem))
            name = request.profile.name
            refused.append(RefusedCluster(profile=name, reason=str(error), hint=error.hint))
    if not plans:
        raise errors[0]
    # by money, and plans without prices behind them by GPU-hours
    plans.sort(
        key=lambda plan: (
            plan.cost_per_hour is None,
            plan.cost_per_hour or plan.gpu_hours_per_hour or float(plan.gpus),
        )
    )
    return PlannedService(service=spec.document.name, plans=tuple(plans), refused=tuple(refused))


def service_request(
    spec: Loaded[ServiceSpec],
    cluster: Loaded[ClusterProfile],
    model: ModelFacts,
    trace: Trace | None = None,
    *,
    measured: bool = True,
) -> ServiceRequest:
    """Join what a plan is made of; without what the site has measured if not `measured`.

    Raises InvalidInputError for a GPU that nobody knows.
    """
    from hpctrain.plan.cost.from_spec import fabric_of
    from hpctrain.serve.plan.candidates import EngineFacts
    from hpctrain.serve.plan.measured_speed import AS_PREDICTED, MeasuredSpeed
    from hpctrain.serve.plan.promises import ModelError
    from hpctrain.serve.plan.service_plan import ServiceRequest
    from hpctrain.serve.plan.serving_machine import offer_of, serving_machine

    service = spec.document
    own = partition_profile(cluster, service.resources.partition)
    profile = own.document
    knowledge = load_knowledge(own)
    gpu = knowledge.gpu
    if profile.gpu.emulated:
        # Slurm only counts such a GPU: processes compute on a core of a CPU.
        gpu = Gpu(
            name="emulated",
            generation="other",
            memory=profile.gpu.memory,
            peak={"fp32": CORE_RATE, "bf16": CORE_RATE},
            memory_bandwidth=CORE_BANDWIDTH,
            nvlink_bandwidth=profile.nvlink.bandwidth,
            nvlink_domain=profile.nvlink.domain,
            network_bandwidth=profile.network.nic_bandwidth,
            per_node=profile.gpu.per_node,
            source="one core of a CPU, roughly",
        )
    if gpu is None:
        message = f"profile {profile.name} has no speed of its GPUs: a service is not planned"
        raise InvalidInputError([own.problem("gpu", message, "name the GPU in `gpu.model`")])
    serving, training = load_serving_calibration(), knowledge.calibration
    machine = serving_machine(gpu, serving, training, fabric_of(training, profile.network.fabric))
    speed, site = AS_PREDICTED, profile.calibration
    if measured and isinstance(site, SiteCalibration) and service.engine.name in site.serving:
        found = site.serving[service.engine.name]
        speed = MeasuredSpeed(
            decode_factor=found.decode_factor,
            prompt_factor=found.prompt_factor,
            request_seconds=found.request_seconds,
            log_deviation=found.error,
        )
    error = speed.log_deviation
    if error is None:
        unseen = serving.engine(service.engine.name).unseen_error
        error = EMULATED_ERROR if profile.gpu.emulated else unseen
    return ServiceRequest(
        spec=service,
        profile=profile,
        offer=offer_of(profile, gpu, machine, service.resources),
        model=model,
        engine=EngineFacts(
            service.engine,
            serving.engine(service.engine.name),
            speed,
            shares_prefixes=service.engine.name != "transformers",
        ),
        error=ModelError(error),
        trace=trace,
    )


def read_model(spec: Loaded[ServiceSpec], runs: Path | None = None) -> ModelFacts:
    """Find the model's shape: in the spec, else beside the weights, else in the spec of their run.

    Sizes and number formats come from the weights' files where they are there; a plan can be made
    before. Raises InvalidInputError, NoSuchRunError.
    """
    from hpctrain.serve.plan.described_model import (
        described_model,
        model_facts,
        stored_precision,
    )

    service = spec.document
    path = Path(service.weights.path) if service.weights.path is not None else None
    config = None if path is None else _read_config(spec, path)
    size = None if path is None or config is None else _size(spec, path)
    where = "model" if service.model is not None else "weights"
    try:
        if service.model is not None:
            stored = stored_precision(config) if config is not None else "bf16"
            return model_facts(service.model, stored, size)
        if config is not None:
            return described_model(config, size)
        if service.weights.run is not None:
            run = find_run(runs_directory(runs), service.weights.run)
            trained = load_run_spec(run.layout.spec).document
            return model_facts(trained.model, "fp32" if trained.precision == "fp32" else "bf16")
    except ValueError as error:
        hint = "give the shape by `model` (or the name of a published one)"
        raise InvalidInputError([spec.problem(where, f"`{where}`: {error}", hint)]) from None
    message = f"`weights.path`: there is no {CONFIG_NAME} in {path}"
    hint = "stage the weights before, or plan without them: `model: llama-3-70b`"
    raise InvalidInputError([spec.problem("weights.path", message, hint)])


def _read_config(spec: Loaded[ServiceSpec], path: Path) -> dict[str, Any] | None:
    """Read config.json; None where there is none. Raises InvalidInputError."""
    try:
        config = json.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        message = f"`weights.path`: {path / CONFIG_NAME} cannot be read: {error}"
        raise InvalidInputError([spec.problem("weights.path", message)]) from None
    if not isinstance(config, dict):
        message = f"`weights.path`: {path / CONFIG_NAME} is no JSON object"
        raise InvalidInputError([spec.problem("weights.path", message)])
    return config


def _size(spec: Loaded[ServiceSpec], path: Path) -> float | None:
    """Add up the weights by their headers; None where they are not all there yet."""
    try:
        return float(tensor_bytes(path))
    except InvalidInputError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"`weights.path`: the safetensors files cannot be read: {error}"
        raise InvalidInputError([spec.problem("weights.path", message)]) from None
