"""Requests of people to a service, its settings, and what `serve status` is told by files."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
from serving_documents import endpoint_of, service_plan, service_spec_text

from hpctrain.base.errors import InvalidInputError, NoSuchRunError, UsageError
from hpctrain.records.find import find_service
from hpctrain.records.run_records import read_record, write_record
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import (
    ReplicaState,
    RestartRequest,
    Rotation,
    ScaleRequest,
    ServiceState,
    read_service_settings,
)
from hpctrain.runs.service_status import service_status
from hpctrain.serve.control import request_restart, request_scale
from hpctrain.serve.jobs import SlurmReplicaJobs
from hpctrain.serve.router import programs
from hpctrain.serve.router.haproxy import find_haproxy_before_router
from hpctrain.serve.router.job import RouterJob, place_of
from hpctrain.serve.service_job import router_settings, service_settings
from hpctrain.serve.start_router import kills_user_processes
from hpctrain.serve.up import prepare_service, require_router_files
from hpctrain.slurm.client import SlurmClient
from hpctrain.spec.loader import load_service_spec
from hpctrain.spec.profile import ClusterProfile, MetricsProfile
from hpctrain.spec.service import ServiceSpec

SITE = Path(__file__).resolve().parents[3] / "cluster_profiles" / "a100x64.yaml"


@pytest.fixture
def site(packaged_profile: ClusterProfile) -> ClusterProfile:
    return packaged_profile.model_copy(update={"metrics": MetricsProfile(ports="9400-9499")})


@pytest.fixture(scope="module")
def packaged_profile() -> ClusterProfile:
    from hpctrain.spec.loader import load_profile

    return load_profile(SITE).document


def spec_of(place: Path, more: str) -> ServiceSpec:
    path = place / "service.yaml"
    path.write_text(service_spec_text(place) + more)
    return load_service_spec(path).document


@pytest.fixture
def service(tmp_path: Path, site: ClusterProfile) -> ServiceLayout:
    made = ServiceLayout(tmp_path / "runs" / "chat-7f3a")
    made.create()
    made.spec.write_text("kind: service\n")
    text = "replicas: {min: 1, max: 3}\n"
    spec = spec_of(tmp_path, text)
    most = spec.resources.model_copy(update={"max_gpus": 3})
    spec = spec.model_copy(update={"resources": most})
    settings = service_settings(spec, site, service_plan(), made.service_id)
    made.settings.write_text(settings.model_dump_json())
    return made


def test_settings_of_spec_profile_and_plan(tmp_path: Path, site: ClusterProfile) -> None:
    text = (
        "replicas: {min: 0, max: 5, idle: 10min, react: true, time_zone: Europe/Berlin, "
        "hours: {'20:30': 0.5, '08:00': 1}}\n"
        "router: {rate_limit: 3, token_file: tokens, cpus: 6, policy: cache_aware}\n"
    )
    settings = service_settings(spec_of(tmp_path, text), site, service_plan(), "chat-7f3a")
    scaling, router = settings.scaling, settings.router
    assert (scaling.count, scaling.spare, scaling.least, scaling.most) == (2, 1, 0, 5)
    assert scaling.capacity_rate == 8.0, "of one replica that carries"
    assert scaling.hours == ((480, 1.0), (1230, 0.5))
    assert (scaling.idle_seconds, scaling.most_jobs, scaling.react) == (600.0, None, True)
    assert (router.ports, router.processes, router.rate_limit) == ((9400, 9499), 3, 3.0)
    assert router.token_file == str(Path("tokens").absolute())


def test_what_of_a_router_can_never_work(tmp_path: Path, site: ClusterProfile) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("t\n")
    tokens.chmod(0o644)

    def check(router: str) -> None:
        spec = spec_of(tmp_path, f"router: {{name: haproxy, {router}}}\n")
        require_router_files(router_settings(spec, site))

    def refused(router: str) -> str:
        with pytest.raises(InvalidInputError) as error:
            check(router)
        return str(error.value)

    assert "every user" in refused(f"token_file: {tokens}")
    assert "9400-9499" in refused("port: 8080")
    assert "cannot be read" in refused(f"token_file: {tmp_path}/none")
    assert "cannot be read" in refused(f"tls: {{certificate: {tmp_path}/c, key: {tmp_path}/k}}")
    (tmp_path / "key").write_text("no key\n")
    (tmp_path / "key").chmod(0o600)
    both = f"tls: {{certificate: {tokens}, key: {tmp_path}/key}}"
    assert "no certificate to serve with" in refused(both)
    tokens.chmod(0o600)
    check(f"token_file: {tokens}, port: 9400")


@pytest.mark.parametrize("asked", ["token_file: {place}/tokens", "rate_limit: 2"])
def test_what_vllm_router_has_not_needs_haproxy(
    tmp_path: Path, site: ClusterProfile, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(programs.shutil, "which", lambda *_, **__: None)
    (tmp_path / "tokens").write_text("t\n")
    (tmp_path / "tokens").chmod(0o600)
    text = f"router: {{{asked.format(place=tmp_path)}}}\n"
    router = router_settings(spec_of(tmp_path, text), site)
    there = Path(router.python or "").with_name("haproxy")
    with pytest.raises(InvalidInputError) as error:
        require_router_files(router)
    (problem,) = error.value.problems
    assert f"`router.{asked.partition(':')[0]}`" in problem.message
    assert "install the package haproxy" in (problem.hint or "")
    with pytest.raises(InvalidInputError, match="HAProxy is not on this machine"):
        prepare_service(tmp_path / "service.yaml", str(SITE), runs=tmp_path / "runs")
    require_router_files(router.model_copy(update={"token_file": None, "rate_limit": None}))
    there.touch(0o700)
    require_router_files(router)
    assert find_haproxy_before_router(router) == str(there)


def test_the_routers_job_on_a_node_without_haproxy(
    service: ServiceLayout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(programs.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = read_service_settings(service.settings)

    def make(**changes: object) -> None:
        router = settings.router.model_copy(update={"program": "/bin/true", **changes})
        own = settings.model_copy(update={"router": router})
        jobs = SlurmReplicaJobs(service, SlurmClient())
        RouterJob(service, own, place_of({}, tmp_path), jobs)

    with pytest.raises(InvalidInputError, match=r"needs it for `router\.rate_limit`"):
        make(rate_limit=1.0)
    make()
    assert "clients reach vllm-router itself" in capsys.readouterr().out


def test_scaling_by_hand(service: ServiceLayout) -> None:
    request_scale(service, 3)
    standing = read_record(service.scale_request, ScaleRequest)
    assert standing is not None
    assert standing.replicas == 3
    for wrong in (-1, 4):
        with pytest.raises(UsageError):
            request_scale(service, wrong)
    request_scale(service, None)
    service.down_request.touch()
    with pytest.raises(UsageError, match="to end"):
        request_scale(service, 1)


def test_one_restart_at_a_time(service: ServiceLayout) -> None:
    request_restart(service, "new\nengine", compare=False)
    standing = read_record(service.restart_request, RestartRequest)
    assert standing is not None
    assert (standing.reason, standing.compare) == ("new engine", False)
    with pytest.raises(UsageError, match="being restarted"):
        request_restart(service)


def test_a_restart_needs_room(service: ServiceLayout) -> None:
    text = service.settings.read_text().replace('"most_jobs":3', '"most_jobs":2')
    service.settings.write_text(text)
    with pytest.raises(UsageError, match="one replica more"):
        request_restart(service)


def test_status_of_files(service: ServiceLayout) -> None:
    now = time.time()
    assert service_status(service).state == "starting"
    replicas = (
        ReplicaState(name="r001-g001", phase="ready", job_id=1, node="n1", since=now - 90),
        ReplicaState(
            name="r002-g001", phase="failed", job_id=2, node=None, since=now - 9, reason="weights"
        ),
    )
    state = ServiceState(epoch=1, time=now, wanted=2, reason="why", replicas=replicas)
    write_record(service.state, state)
    write_record(service.rotation, Rotation(epoch=1, time=now, replicas=("r001-g001",)))
    first_name = ReplicaName(1, 1)
    endpoint = endpoint_of(first_name, lease_until=now + 10, walltime_ends=now + 3600)
    write_record(service.endpoint(first_name), endpoint)
    found = service_status(service, now + 1)
    first = found.replicas[0]
    assert (found.state, found.ready, found.wanted, found.reason) == ("serving", 1, 2, "why")
    assert (first.in_rotation, first.load_seconds) == (True, 33.0)
    assert first.age_seconds == pytest.approx(91)
    assert first.lease_seconds == pytest.approx(9)
    assert first.walltime_seconds == pytest.approx(3599)
    assert found.problems == ("r002-g001 has failed: weights",)
    stale = service_status(service, now + 60)
    assert stale.state == "stale"
    assert any("no router" in words for words in stale.problems)
    assert any("lease" in words for words in stale.problems)
    service.down_request.touch()
    assert service_status(service, now + 1).state == "ending"


def test_finding_a_service(service: ServiceLayout) -> None:
    runs = service.directory.parent
    (runs / "a-run").mkdir()
    assert find_service(runs, "chat") == service
    with pytest.raises(NoSuchRunError) as missing:
        find_service(runs, "chap-7f3a")
    assert "chat-7f3a" in (missing.value.hint or "")


@pytest.mark.parametrize(
    ("text", "kills"),
    [
        ("[Login]\n#KillUserProcesses=yes\n", False),
        ("KillUserProcesses=yes\n", True),
        ("KillUserProcesses=yes\nKillUserProcesses=no\n", False),
    ],
)
def test_login_nodes_that_end_what_users_leave(tmp_path: Path, text: str, kills: bool) -> None:
    (tmp_path / "logind.conf").write_text(text)
    (tmp_path / "more").mkdir()
    places = (tmp_path / "logind.conf", tmp_path / "more", tmp_path / "none")
    assert kills_user_processes(places) == kills
