"""Starts a service: everything is looked at, its directory is written, its jobs are submitted.

Replicas and the router's job are submitted at once, because both may wait in the queue; from then
on the controller in the router's job decides. Belongs here: these steps, for a new service and for
one that is there, and what would end a job in the queue or at its start. Does not belong here:
planning (`make_plan`), the documents of the jobs (`service_job`), ending it (`control`).
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import InvalidInputError, Problem, SlurmRefusedError, UsageError
from hpctrain.checkpoints.discover import good_steps
from hpctrain.checkpoints.staged import open_staged
from hpctrain.convert.of_spec import convert_weights
from hpctrain.records.find import all_services, find_run, new_run_id
from hpctrain.records.manifest import checkpoint_name
from hpctrain.records.requests import user_name
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import RouterSettings, ServiceEventKind, ServiceLedger
from hpctrain.serve.engines.registry import SERVING_ENGINES
from hpctrain.serve.make_plan import plan_service
from hpctrain.serve.replicas import start_replica
from hpctrain.serve.router.haproxy import (
    find_haproxy_before_router,
    require_certificate,
    token_digests,
)
from hpctrain.serve.service_job import (
    ServiceInputs,
    engine_start,
    replica_documents,
    router_documents,
    router_settings,
    write_prototype,
    write_router,
)
from hpctrain.serve.start_router import start_router, start_router_here
from hpctrain.slurm.client import SlurmClient
from hpctrain.spec.loader import Loaded, load_named_profile, load_service_spec, partition_profile
from hpctrain.spec.positions import write_resolved
from hpctrain.spec.service import ServiceSpec

_PYTHON_SECONDS = 30.0
_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")


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
    site = partition_profile(cluster, loaded.document.resources.partition)
    return ServiceInputs(loaded, site, planned.chosen, weights)


def _with_absolute_paths(spec: Loaded[ServiceSpec]) -> Loaded[ServiceSpec]:
    """Make the paths of a spec absolute: they are relative to where `serve up` is typed.

    A word without a slash is a program on PATH, and one with `$` is known in the job only.
    """

    def absolute(path: str | None) -> str | None:
        return None if path is None else os.path.abspath(os.path.expanduser(path))

    def program(word: str | None) -> str | None:
        return word if word is None or "/" not in word or "$" in word else absolute(word)

    service = spec.document
    weights, router, tls = service.weights, service.router, service.router.tls
    adapters = {name: absolute(path) for name, path in weights.adapters.items()}
    if tls is not None:
        both = {"certificate": absolute(tls.certificate), "key": absolute(tls.key)}
        tls = tls.model_copy(update=both)
    changed = {
        "weights": weights.model_copy(
            update={"path": absolute(weights.path), "adapters": adapters}
        ),
        "router": router.model_copy(
            update={
                "program": program(router.program),
                "token_file": absolute(router.token_file),
                "tls": tls,
            }
        ),
        "engine": service.engine.model_copy(update={"python": program(service.engine.python)}),
        "traffic": service.traffic.model_copy(update={"trace": absolute(service.traffic.trace)}),
    }
    return replace(spec, document=service.model_copy(update=changed))


def require_router_files(router: RouterSettings) -> None:
    """Check the files, the port and the HAProxy of a router before anything is submitted.

    Raises InvalidInputError with what clients would find out later.
    """
    problems = []
    if router.port is not None and router.ports is not None:
        first, last = router.ports
        if not first <= router.port <= last:
            ports = f"{first}-{last}, which this site allows"
            problems.append(Problem(f"router.port {router.port} is outside of {ports}"))
    for path in filter(None, [router.token_file, router.key]):
        # a missing file is told below
        if os.path.exists(path) and os.stat(path).st_mode & (stat.S_IROTH | stat.S_IWOTH):
            words = "every user of this machine can read it"
            problems.append(Problem(words, path, hint="chmod 600"))
    if problems:
        raise InvalidInputError(problems)
    if router.token_file is not None:
        token_digests(Path(router.token_file))
    if router.certificate is not None and router.key is not None:
        require_certificate(Path(router.certificate), Path(router.key))
    if router.name == "vllm-router" and "$" not in (router.python or ""):
        find_haproxy_before_router(router)


def service_weights(spec: Loaded[ServiceSpec], runs: Path) -> Path:
    """Find the weights of a spec: a directory, or the newest good checkpoint of a run.

    Raises InvalidInputError for weights that are not there or not complete, NoSuchRunError.
    """
    weights = spec.document.weights
    if weights.path is not None:
        path = Path(weights.path)
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
    run = find_run(runs, weights.run)
    steps = good_steps(run.layout.checkpoints)
    if not steps:
        message = f"`weights.run`: run `{run.run_id}` has no checkpoint to serve"
        raise InvalidInputError([spec.problem("weights.run", message)])
    return run.layout.checkpoints / checkpoint_name(steps[0])


def running_service(runs: Path, inputs: ServiceInputs) -> ServiceLayout | None:
    """Find the service of the spec's name that is up; None if there is none.

    Raises UsageError if there are several.
    """
    name = inputs.spec.document.name
    found = [
        one
        for one in all_services(runs)
        if one.service_id.rpartition("-")[0] == name
        and one.settings.exists()
        and not one.down_request.exists()
    ]
    if len(found) > 1:
        ids = ", ".join(f"`{one.service_id}`" for one in found)
        raise UsageError(
            f"several services are called `{name}`: {ids}",
            hint="end all but one (`hpctrain serve down`), or start another one (`--new`)",
        )
    return found[0] if found else None


def service_scripts(inputs: ServiceInputs) -> tuple[str, str]:
    """Render the scripts of a replica and of the router, as `start_service` would write them."""
    service = ServiceLayout(Path(inputs.spec.document.name).absolute())
    return (
        replica_documents(service, inputs).script,
        router_documents(service, inputs).script,
    )


def start_service(
    inputs: ServiceInputs,
    runs: Path,
    slurm: SlurmClient,
    service: ServiceLayout | None = None,
) -> StartedService:
    """Write a service directory and start the service; a given `service` is written anew.

    What runs of it goes on with what it began with until a rolling restart. Raises
    InvalidInputError with all that would end a replica in the queue or at its start, UsageError for
    a directory that cannot be written, SlurmRefusedError when Slurm takes none of its jobs, and
    then a new service is gone; SlurmUnreachableError when Slurm has not answered, and then the
    directory stays.
    """
    problems = list(_problems(inputs, slurm))
    if problems:
        raise InvalidInputError(problems)
    spec, is_new = inputs.spec.document, service is None
    if service is None:
        service_id = new_run_id(runs, spec.name, inputs.spec.digest, inputs.profile.digest)
        service = ServiceLayout((runs / service_id).absolute())
        try:
            service.create()
        except OSError as error:
            raise UsageError(f"{service.directory} cannot be made: {error.strerror}") from error
    if spec.weights.run is not None:
        target = service.directory / f"weights-{inputs.weights.name}"
        if not (target / "config.json").exists():
            shutil.rmtree(target, ignore_errors=True)
            convert_weights(inputs.weights, target, python=inputs.python)
        inputs = replace(inputs, weights=target)
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
    service.down_request.unlink(missing_ok=True)
    ledger = ServiceLedger(service.ledger)
    ledger.append(ServiceEventKind.UP_REQUESTED, user=user_name(), replicas=inputs.plan.count)
    jobs, router_job, url = [], None, None
    try:
        # The replicas of a new service first, because they wait the longest.
        for number in range(1, inputs.plan.count + 1) if is_new else ():
            name = ReplicaName(number, 1)
            ledger.append(
                ServiceEventKind.START_REPLICA,
                replica=str(name),
                user=user_name(),
                reason="serve up",
            )
            jobs.append(start_replica(service, name, slurm))
        if spec.router.place == "login":
            url = start_router_here(service, os.environ).url
        else:
            router_job = start_router(service, slurm)
    except SlurmRefusedError:
        if is_new:
            shutil.rmtree(service.directory)
        raise
    return StartedService(service.service_id, service.directory, router_job, url, tuple(jobs))


def _problems(inputs: ServiceInputs, slurm: SlurmClient) -> Iterator[Problem]:
    """Look at everything that would end a replica in the queue or at its start.

    Asks Slurm whether it would take the job. Raises InvalidInputError for documents that cannot be
    rendered, SlurmUnreachableError.
    """
    spec = inputs.spec
    script = replica_documents(ServiceLayout(Path(spec.document.name)), inputs).script
    for name, path in spec.document.weights.adapters.items():
        if not any((Path(path) / file).is_file() for file in _ADAPTER_FILES):
            field = f"weights.adapters.{name}"
            missing = " and no ".join(_ADAPTER_FILES)
            yield spec.problem(field, f"`{field}`: {path} has no {missing}")
    # The engine has to be in the Python that will start it, where that is on this machine.
    start, engine = engine_start(inputs), SERVING_ENGINES[inputs.plan.replica.engine]
    words, python = engine.command(start).words, start.python
    in_image = inputs.profile.document.software.container is not None
    if "-m" in words and not in_image and "$" not in python and os.access(python, os.X_OK):
        package = words[words.index("-m") + 1].partition(".")[0]
        if _lacks(python, package):
            message = f"{python}, which is to start {engine.title}, has no {package}"
            hint = f"install {engine.title} there, or name another Python: `engine.python`"
            yield spec.problem("engine.python", message, hint)
    try:
        slurm.test_only(script)
    except SlurmRefusedError as error:
        yield Problem(f"Slurm would refuse a replica: {error}", hint=error.hint)


def _lacks(python: str, package: str) -> bool:
    """Whether an interpreter says that it has no such package."""
    try:
        found = subprocess.run(
            [python, "-P", "-c", _FIND, package],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PYTHON_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return found.returncode != 0
