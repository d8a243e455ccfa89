"""Starts a service: everything is looked at, its directory is written, its jobs are submitted.

Replicas and the router's job are submitted at once, because both may wait in the queue; from then
on the controller in the router's job decides. Belongs here: these steps, for a new service and for
one that is there. Does not belong here: planning (`serve_plan`), the jobs themselves
(`serve_replicas`, `serve_router`), ending it (`serve_down`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import InvalidInputError, Problem, SlurmRefusedError, UsageError
from hpctrain.checkpoints.discover import good_steps
from hpctrain.checkpoints.staged import open_staged
from hpctrain.convert.of_spec import convert_weights
from hpctrain.job.preflight import Check
from hpctrain.records.find import all_services, find_run, new_run_id
from hpctrain.records.manifest import checkpoint_name
from hpctrain.records.requests import user_name
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import ServiceEventKind, ServiceLedger
from hpctrain.serve.engines.registry import SERVING_ENGINES
from hpctrain.serve.make_plan import plan_service
from hpctrain.serve.plan.documents import ServicePlan
from hpctrain.serve.replica.config import ReplicaConfig
from hpctrain.serve.replica_prototype import replica_documents, write_prototype
from hpctrain.serve.replicas import start_replica
from hpctrain.serve.router_on_login_node import start_router_here
from hpctrain.serve.service_job import ServiceInputs
from hpctrain.serve.settings import require_router_files, router_settings
from hpctrain.serve.start_router import router_documents, start_router, write_router
from hpctrain.slurm.client import SlurmClient
from hpctrain.spec.loader import Loaded, load_service_spec, partition_profile
from hpctrain.spec.profiles import load_named_profile
from hpctrain.spec.resolved import write_resolved
from hpctrain.spec.service import ServiceSpec

_PYTHON_SECONDS = 30.0
_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


@dataclass(frozen=True)
class StartedService:
    """A service whose jobs Slurm has accepted.

    `router_job` is None for a router on the login node, which answers at `url` by then. `replicas`
    are the jobs that were submitted now; the controller submits all others.
    """

    service_id: str
    directory: Path
    router_job: int | None
    url: str | None
    replicas: tuple[int, ...]


def prepare_service(
    spec: Path, profile: str, overrides: Sequence[str] = (), *, runs: Path
) -> ServiceInputs:
    """Read both documents, find the weights and the router's files, and plan; writes nothing.

    Raises InvalidInputError with all problems of what was read, RefusedPlanError.
    """
    loaded = _with_absolute_paths(load_service_spec(spec, overrides))
    cluster = load_named_profile(profile)
    require_router_files(router_settings(loaded.document, cluster.document))
    weights = service_weights(loaded, runs)
    planned = plan_service(loaded, [cluster], runs)
    if planned.chosen is None:
        message = "a limit without the name of its latency: ttft, tpot or e2e"
        hint = f"`hpctrain serve plan -p {profile} {spec}` says what each would cost"
        raise InvalidInputError([loaded.problem("objectives.p99", message, hint)])
    partition = loaded.document.resources.partition
    site = partition_profile(cluster, partition)
    return ServiceInputs(loaded, site, planned.chosen, weights)


def _with_absolute_paths(spec: Loaded[ServiceSpec]) -> Loaded[ServiceSpec]:
    """Make the paths of a spec absolute: they are relative to where `serve up` is typed.

    A word without a slash is a program on PATH, and one with `$` is known in the job only.
    """
    service = spec.document
    adapters = {name: _absolute(path) for name, path in service.weights.adapters.items()}
    weights = service.weights.model_copy(
        update={"path": _absolute(service.weights.path), "adapters": adapters}
    )
    tls = service.router.tls
    if tls is not None:
        both = {"certificate": _absolute(tls.certificate), "key": _absolute(tls.key)}
        tls = tls.model_copy(update=both)
    router = service.router.model_copy(
        update={
            "program": _absolute_program(service.router.program),
            "token_file": _absolute(service.router.token_file),
            "tls": tls,
        }
    )
    engine = service.engine.model_copy(update={"python": _absolute_program(service.engine.python)})
    traffic = service.traffic.model_copy(update={"trace": _absolute(service.traffic.trace)})
    parts = {"weights": weights, "router": router, "engine": engine, "traffic": traffic}
    return replace(spec, document=service.model_copy(update=parts))


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(os.path.expanduser(path))


def _absolute_program(word: str | None) -> str | None:
    return word if word is None or "/" not in word or "$" in word else _absolute(word)


def running_service(runs: Path, inputs: ServiceInputs) -> ServiceLayout | None:
    """Find the service of the spec's name that is up; None if there is none.

    Raises UsageError if there are several.
    """
    name = inputs.spec.document.name
    found = [one for one in all_services(runs) if _is_up(one, name)]
    if len(found) > 1:
        ids = ", ".join(f"`{one.service_id}`" for one in found)
        raise UsageError(
            f"several services are called `{name}`: {ids}",
            hint="end all but one (`hpctrain serve down`), or start another one (`--new`)",
        )
    return found[0] if found else None


def _is_up(service: ServiceLayout, name: str) -> bool:
    named = service.service_id.rpartition("-")[0] == name
    return named and service.settings.exists() and not service.down_request.exists()


def service_scripts(inputs: ServiceInputs) -> tuple[str, str]:
    """Render the scripts of a replica and of the router, as `start_service` would write them."""
    service = ServiceLayout(Path(inputs.spec.document.name).absolute())
    return (
        replica_documents(service, inputs).script,
        router_documents(service, inputs).script,
    )


def service_weights(spec: Loaded[ServiceSpec], runs: Path) -> Path:
    """Find the weights of a spec; of a run the directory to which they are converted at the start.

    Raises InvalidInputError for weights that are not there or not complete, NoSuchRunError.
    """
    weights = spec.document.weights
    if weights.path is not None:
        path = Path(os.path.abspath(os.path.expanduser(weights.path)))
        try:
            open_staged(path)
        except InvalidInputError as error:
            raise InvalidInputError(
                [
                    spec.problem("weights.path", f"`weights.path`: {one.message}", one.hint)
                    for one in error.problems
                ]
            ) from error
        return path
    assert weights.run is not None, "the spec has one of the two"
    return _checkpoint(spec, runs, weights.run)


def _checkpoint(spec: Loaded[ServiceSpec], runs: Path, name: str) -> Path:
    """The newest good checkpoint of a run. Raises InvalidInputError if it has none."""
    run = find_run(runs, name)
    steps = good_steps(run.layout.checkpoints)
    if not steps:
        message = f"`weights.run`: run `{run.run_id}` has no checkpoint to serve"
        raise InvalidInputError([spec.problem("weights.run", message)])
    return run.layout.checkpoints / checkpoint_name(steps[0])


def service_checks(inputs: ServiceInputs, slurm: SlurmClient) -> tuple[Check, ...]:
    """Look at everything that would end a replica in the queue or at its start.

    Asks Slurm whether it would take the job. Raises InvalidInputError for documents that cannot be
    rendered, SlurmUnreachableError.
    """
    service = ServiceLayout(Path(inputs.spec.document.name))
    documents = replica_documents(service, inputs)
    return (
        *_plan_checks(inputs.plan),
        *_adapter_checks(inputs.spec),
        _engine_check(inputs, documents.own),
        _slurm_check(documents.script, slurm),
    )


def start_service(
    inputs: ServiceInputs,
    runs: Path,
    slurm: SlurmClient,
    environment: Mapping[str, str] | None = None,
    service: ServiceLayout | None = None,
) -> StartedService:
    """Write a service directory and start the service; a given `service` is written anew.

    What runs of it goes on with what it began with until a rolling restart. Raises
    InvalidInputError with all that `service_checks` finds, UsageError for a directory that cannot
    be written, SlurmRefusedError when Slurm takes none of its jobs, and then a new service is gone;
    SlurmUnreachableError when Slurm has not answered, and then the directory stays.
    """
    failed = [problem for check in service_checks(inputs, slurm) for problem in check.problems]
    if failed:
        raise InvalidInputError(failed)
    is_new = service is None
    if service is None:
        service = _made(inputs, runs)
    inputs = _with_own_weights(service, inputs)
    _write_documents(service, inputs)
    service.down_request.unlink(missing_ok=True)
    ServiceLedger(service.ledger).append(
        ServiceEventKind.UP_REQUESTED, user=user_name(), replicas=inputs.plan.count
    )
    try:
        return _started(service, inputs, slurm, environment or os.environ, is_new)
    except SlurmRefusedError:
        if is_new:
            shutil.rmtree(service.directory)
        raise


def _made(inputs: ServiceInputs, runs: Path) -> ServiceLayout:
    """Make the directory of a new service. Raises UsageError."""
    name = inputs.spec.document.name
    service_id = new_run_id(runs, name, inputs.spec.digest, inputs.profile.digest)
    service = ServiceLayout((runs / service_id).absolute())
    try:
        service.create()
    except OSError as error:
        raise UsageError(f"{service.directory} cannot be made: {error.strerror}") from error
    return service


def _with_own_weights(service: ServiceLayout, inputs: ServiceInputs) -> ServiceInputs:
    """Convert the checkpoint of a run into the service directory, if that is what is served."""
    if inputs.spec.document.weights.run is None:
        return inputs
    target = service.directory / f"weights-{inputs.weights.name}"
    if not (target / "config.json").exists():
        shutil.rmtree(target, ignore_errors=True)
        convert_weights(inputs.weights, target, python=inputs.python)
    return replace(inputs, weights=target)


def _write_documents(service: ServiceLayout, inputs: ServiceInputs) -> None:
    """Write everything that jobs and commands read of a service. Raises UsageError."""
    try:
        for path, text in (
            (service.spec, write_resolved(inputs.spec)),
            (service.profile, write_resolved(inputs.profile)),
            (service.plan, inputs.plan.model_dump_json(indent=1)),
        ):
            replace_text(path, text, mode=0o600)
        write_prototype(service, replica_documents(service, inputs))
    except OSError as error:
        where = error.filename or service.directory
        raise UsageError(f"{where} cannot be written: {error.strerror}") from error
    write_router(service, inputs)


def _started(
    service: ServiceLayout,
    inputs: ServiceInputs,
    slurm: SlurmClient,
    environment: Mapping[str, str],
    is_new: bool,
) -> StartedService:
    """Submit the jobs: of a new service those of the replicas first, for they wait the longest."""
    jobs = []
    for number in range(1, inputs.plan.count + 1) if is_new else ():
        name = ReplicaName(number, 1)
        ServiceLedger(service.ledger).append(
            ServiceEventKind.START_REPLICA, replica=str(name), user=user_name(), reason="serve up"
        )
        jobs.append(start_replica(service, name, slurm))
    router_job, url = None, None
    if inputs.spec.document.router.place == "login":
        url = start_router_here(service, environment).url
    else:
        router_job = start_router(service, slurm)
    return StartedService(service.service_id, service.directory, router_job, url, tuple(jobs))


# -- checks ------------------------------------------------------------------------------------


def _plan_checks(plan: ServicePlan) -> Iterator[Check]:
    replica = plan.replica
    size = f"{replica.gpus} {replica.gpu}"
    words = f"{plan.replicas} replicas and {plan.spare} spare ones, each of {size}"
    yield Check(subject="plan", state="works", sentence=words)
    for promise in plan.promises:
        if not promise.holds:
            late = f"{promise.latency} {promise.percentile} {promise.predicted_seconds:.3g} s"
            sentence = f"{late} is predicted, beyond {promise.limit_seconds:.3g} s"
            yield Check(subject="plan", state="limited", sentence=sentence)
    for warning in plan.warnings:
        yield Check(subject="plan", state="limited", sentence=warning)


def _adapter_checks(spec: Loaded[ServiceSpec]) -> Iterator[Check]:
    for name, path in spec.document.weights.adapters.items():
        files = ("adapter_model.safetensors", "adapter_model.bin")
        if any((Path(path) / file).is_file() for file in files):
            yield Check(subject="weights", state="works", sentence=f"adapter {name} is there")
            continue
        field = f"weights.adapters.{name}"
        problem = spec.problem(field, f"`{field}`: {path} has no {' and no '.join(files)}")
        yield Check(subject="weights", state="fails", sentence=str(problem), problems=(problem,))


def _engine_check(inputs: ServiceInputs, config: ReplicaConfig) -> Check:
    """Look for the engine in the Python that will start it, where that is on this machine."""
    start, engine = config.start, SERVING_ENGINES[config.engine]
    words = engine.command(start).words
    package = words[words.index("-m") + 1].partition(".")[0] if "-m" in words else None
    python = start.python
    in_image = inputs.profile.document.software.container is not None
    if package is None or in_image or "$" in python or not os.access(python, os.X_OK):
        sentence = f"{engine.title} is looked for at the start of a job, in {python}"
        return Check(subject="engine", state="unknown", sentence=sentence)
    try:
        found = subprocess.run(
            [python, "-P", "-c", _FIND, package],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PYTHON_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        sentence = f"{python} does not answer: {error}"
        return Check(subject="engine", state="unknown", sentence=sentence)
    if found.returncode == 0:
        return Check(subject="engine", state="works", sentence=f"{python} has {package}")
    hint = f"install {engine.title} there, or name another Python: `engine.python`"
    message = f"{python}, which is to start {engine.title}, has no {package}"
    problem = inputs.spec.problem("engine.python", message, hint)
    return Check(subject="engine", state="fails", sentence=message, problems=(problem,))


def _slurm_check(script: str, slurm: SlurmClient) -> Check:
    """Have Slurm look at the script of a replica. Raises SlurmUnreachableError."""
    try:
        answer = slurm.test_only(script)
    except SlurmRefusedError as error:
        problem = Problem(f"Slurm would refuse a replica: {error}", hint=error.hint)
        return Check(subject="Slurm", state="fails", sentence=str(error), problems=(problem,))
    return Check(subject="Slurm", state="works", sentence=answer.text)
