"""Rungs 5 and 6: jobs on two and on eight nodes, written for a profile and submitted by it.

Rung 5 measures links between nodes; its script is the one of a run, with other commands in place
of the supervisor. Rung 6 trains 50 steps of a real spec as any run, and compares them with the
plan. Belongs here: writing, submitting, waiting, judging. Does not belong here: the measurement
(see `links`), Slurm's commands (see `hpctrain.slurm`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from bench.gpu.links import LinkReport
from bench.gpu.one_node import link_checks
from bench.gpu.planned_spec import planned_spec
from bench.gpu.rung import ROOT, Found, NotRunError, Site, failed, not_run, passed
from hpctrain.base.errors import RunFailedError
from hpctrain.handle import Run, open_run, submit_run
from hpctrain.job.kept_code import keep_code
from hpctrain.job.prepare import prepare
from hpctrain.records.gpu_report import RungCheck, StepTime
from hpctrain.records.jobs import sbatch_options
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import read_metrics, read_saves
from hpctrain.records.software import read_software
from hpctrain.records.speed_checks import read_speed_checks
from hpctrain.slurm.client import SlurmClient
from hpctrain.spec.loader import load_named_profile, load_run_spec
from hpctrain.spec.profile import ClusterProfile
from hpctrain.trials.judging import counted_steps, spread_of, warm_up_steps
from hpctrain.trials.variants import sizes

STEPS, SAVE_STEPS = 50, 20
_POLL_SECONDS = 5.0
_JOB_FILE, _RESULTS = "job-id", ("links-1.json", "links-2.json")
# Fabrics on which NCCL would be many times slower over TCP sockets.
_NOT_TCP = {"infiniband", "roce", "efa", "slingshot"}
_LEAST_SHARE = 0.5  # of the cards' bandwidth in the profile
_FAR_FROM_PLAN = 1.3  # times as long as planned, or as short

_LINK_SPEC = """\
# A job of this size, for the resources that it asks for: rung 5 of `make gpu`.
name: gpu-rung-links
model: {{family: gpt, layers: 2, hidden: 128, heads: 4, vocab: 512, seq: 64}}
engine: {{name: ddp}}
batch: {{global: {gpus}, micro: 1}}
budget: {{steps: 10}}
optimizer: {{lr: 1e-4}}
checkpoint: {{every_steps: 10}}
resources: {{gpus: {gpus}, walltime: "0:30:00"}}
"""
# The commands of a run's script, with the measurement in place of supervisor and trainer. Twice
# with one port: a port of the first launch that stays taken would fail every restart of a run.
_TEMPLATE = """\
{%% extends "hpctrain/job.sbatch.j2" %%}
{%% block signals %%}
# Rung 5 of `make gpu`: bus bandwidth between nodes
{%% endblock %%}
{%% block launch %%}
# The address of the first node, and a port outside of the ephemeral range
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
MASTER_PORT=$((20000 + SLURM_JOB_ID %% 10000))
export MASTER_ADDR MASTER_PORT
for round in 1 2; do
  {{ script.srun | map('sh') | join(' ') }} \\
    --output="$HPCTRAIN_LOGS/round$round-rank%%4t.log" \\
{{ self.container() -}}
    {{ script.trainer | map('replace', 'hpctrain.train', 'bench.gpu.links') \
| reject('equalto', 'train.json') | map('sh') | join(' ') }} \\
    "links-$round.json" --gpus-per-node=%(per_node)d%(emulated)s
done
{%% endblock %%}
"""


def run_two_nodes(site: Site, found: Found) -> Iterator[RungCheck]:
    """Measure the links of two nodes in a job."""
    profile = _profile(site, nodes=2)
    directory = (site.directory / "two-nodes").resolve()
    if not all((directory / name).exists() for name in _RESULTS):
        script = write_link_job(site, profile, directory)
        if not site.submits:
            yield not_run("job", f"written, not submitted: {script.relative_to(ROOT.parent)}")
            return
        problem = _submit_and_wait(directory, script)
        if problem is not None:
            yield failed("job", problem)
            return
    yield from judge_two_nodes(directory, profile, found)


def _profile(site: Site, nodes: int) -> ClusterProfile:
    """Load the profile. Raises NotRunError without one, or with too few nodes."""
    if site.profile is None:
        number = 5 if nodes == 2 else 6
        message = f"the profile of the cluster: make gpu RUNG={number} PROFILE=NAME"
        raise NotRunError(message)
    profile = load_named_profile(site.profile).document
    if profile.nodes.count < nodes:
        raise NotRunError(f"{nodes} nodes; profile {profile.name} has {profile.nodes.count}")
    return profile


def write_link_job(site: Site, profile: ClusterProfile, directory: Path) -> Path:
    """Write the job's script and the program that it starts; returns the script's path."""
    assert site.profile is not None
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "logs").mkdir(parents=True)
    for name in ("__init__.py", "gpu/__init__.py", "gpu/links.py"):
        target = directory / "bench" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "bench" / name, target)
    per_node = profile.gpu.per_node
    spec = directory / "spec.yaml"
    spec.write_text(_LINK_SPEC.format(gpus=2 * per_node))
    emulated = " --emulate-gpu" if profile.gpu.emulated else ""
    template = _TEMPLATE % {"per_node": per_node, "emulated": emulated}
    (directory / "job.sbatch.j2").write_text(template)
    prepared = prepare(spec, site.profile, runs=directory, template_directory=directory)
    keep_code(RunLayout(directory))  # as `submit` does: the script imports it
    script = directory / "job.sbatch"
    script.write_text(prepared.script)
    return script


def _submit_and_wait(directory: Path, script: Path) -> str | None:
    """Submit the script, or wait for the job of an earlier call; returns what went wrong."""
    slurm, job_file = SlurmClient(), directory / _JOB_FILE
    if not job_file.exists():
        submitted = slurm.submit(script, sbatch_options(directory))
        job_file.write_text(str(submitted.job_id))
    job_id = int(job_file.read_text())
    print(f"      job {job_id}: waiting; the same command waits for it again", flush=True)
    while True:
        record = slurm.history([job_id]).get(job_id)
        if record is None or record.state.is_ended:
            break
        time.sleep(_POLL_SECONDS)
    if all((directory / name).exists() for name in _RESULTS):
        return None
    job_file.unlink()  # the next call submits anew
    state = "unknown to Slurm" if record is None else str(record.state)
    logs = sorted(directory.glob("logs/**/*.log")) + sorted(directory.glob("logs/*.out"))
    texts = [log.read_text(errors="replace")[-600:] for log in logs if log.stat().st_size]
    return f"job {job_id} is {state}, and has not measured: {' | '.join(texts[:3]).strip()}"


def judge_two_nodes(directory: Path, profile: ClusterProfile, found: Found) -> Iterator[RungCheck]:
    """Judge what the two launches of the job have found."""
    first, second = (
        LinkReport.model_validate_json((directory / name).read_text()) for name in _RESULTS
    )
    found.speed.append(first.check)
    yield network_check(first, profile)
    yield from link_checks(first, first.check.seconds)
    yield rate_check(first, profile)
    yield passed(
        "open files", f"{first.open_files:,} of {first.open_files_limit:,} on the largest rank"
    )
    start = second.check.seconds
    yield passed("a second launch on the same port", "", start)
    yield passed("gloo's interface", first.gloo_interface or "chosen by gloo")


def network_check(report: LinkReport, profile: ClusterProfile) -> RungCheck:
    """Name the network that NCCL chose; a fall-back to TCP fails."""
    networks = sorted({name for name in report.check.networks if name})
    cards = "; ".join(sorted(set(report.cards.values())))
    sharp = f"; NVLink SHARP {report.sharp}" if report.sharp else ""
    detail = f"{', '.join(networks) or 'unknown'}{f' ({cards})' if cards else ''}{sharp}"
    fabric = profile.network.fabric
    if report.check.accelerator == "cpu":
        return passed("network", "gloo over TCP: emulated on CPU")
    if fabric in _NOT_TCP and "Socket" in networks:
        return failed(
            "network",
            f"{detail}: NCCL fell back to TCP, and the profile has {fabric}. The plugin of the "
            "network is not found (LD_LIBRARY_PATH, a module or a container), or NCCL_IB_HCA names "
            "no card.",
        )
    return passed("network", detail)


def rate_check(report: LinkReport, profile: ClusterProfile) -> RungCheck:
    """Compare the rate between nodes with the cards of the profile."""
    cards = profile.network.nics_per_node * float(profile.network.nic_bandwidth)
    expected = cards / profile.gpu.per_node
    rates = [
        rate
        for axis in report.check.axes
        if axis.axis == "dp"
        and axis.message_bytes == max(a.message_bytes for a in report.check.axes)
        for rate in axis.bus_bytes_per_second
        if rate is not None and axis.operation == "all_gather"
    ]
    slowest = min(rates, default=0.0)
    detail = (
        f"{slowest / 1e9:.2f} GB/s per GPU on the slowest rank; the profile's cards have "
        f"{expected / 1e9:.2f}"
    )
    if report.check.accelerator == "cuda" and slowest < _LEAST_SHARE * expected:
        hint = "a card is missing in NCCL_IB_HCA, or GPUs and cards are far apart"
        return failed("rate between nodes", f"{detail}: {hint}")
    return passed("rate between nodes", detail)


def run_eight_nodes(site: Site, found: Found) -> Iterator[RungCheck]:
    """Train 50 steps of the user's spec on eight nodes and compare them with the plan."""
    profile = _profile(site, nodes=8)
    yield from train_and_compare(site, profile, 8 * profile.gpu.per_node, found)


def train_and_compare(
    site: Site, profile: ClusterProfile, gpus: int, found: Found
) -> Iterator[RungCheck]:
    """Submit the spec on so many GPUs, or wait for the run of an earlier call."""
    if site.spec is None:
        raise NotRunError("the spec of a real run: make gpu RUNG=6 PROFILE=NAME SPEC=FILE")
    assert site.profile is not None
    spec = Path(site.spec)
    overrides = run_overrides(spec, gpus)
    prepared = prepare(spec, site.profile, overrides, runs=site.directory)
    planned = prepared.plan.step_seconds
    if not site.submits:
        yield not_run("job", f"planned with {planned or 0.0:.3f} s per step, not submitted")
        return
    job_file = site.directory / f"run-{gpus}-gpus"
    if job_file.exists():
        run = open_run(job_file.read_text(), runs=site.directory / "runs")
    else:
        run = submit_run(spec, site.profile, overrides, runs=site.directory / "runs")
        job_file.write_text(run.run_id)
    print(f"      run {run.run_id}: waiting; the same command waits for it again", flush=True)
    try:
        run.wait()
    except RunFailedError as error:
        job_file.unlink()
        yield failed("run", f"{error}; hpctrain why {run.run_id}")
        return
    document = planned_spec(prepared.spec.document, prepared.plan)
    nodes = prepared.plan.nodes.nodes
    yield from judge_run(run, document, gpus, nodes, planned, found)


def run_overrides(spec: Path, gpus: int) -> tuple[str, ...]:
    """List overrides for 50 steps on `gpus` GPUs, with the samples per GPU of the spec."""
    document = load_run_spec(spec).document
    [size] = sizes(document, [gpus], weak=True)
    return (
        *size.overrides,
        f"name={document.name[:50]}-rung",
        f"budget.steps={STEPS}",
        "budget.tokens=",
        f"checkpoint.every_steps={SAVE_STEPS}",
        "checkpoint.every=",
        "resources.walltime=1:00:00",
        "resources.spare_nodes=0",
        "resources.min_nodes=",
    )


def judge_run(
    run: Run, spec: str, gpus: int, nodes: int, planned: float | None, found: Found
) -> Iterator[RungCheck]:
    """Compare the steps of a finished run with its plan; collect its records for the report."""
    layout = run.files.layout
    rows = read_metrics(layout)
    counted = counted_steps(rows, warm_up_steps(len(rows)))
    if not counted:
        yield failed("steps", "no step counts")
        return
    median = spread_of([step.step_seconds for step in counted]).median
    mfus = [row.mfu for row in rows if row.mfu is not None]
    stall = max((save.stall_seconds for save in read_saves(layout)), default=None)
    restart = start_seconds(run)
    found.speed.extend(read_speed_checks(layout))
    found.software.extend(record.facts for record in read_software(layout))
    if planned is None:
        yield not_run("step time against the plan", f"{median:.3f} s; no time is planned")
    else:
        found.steps.append(
            StepTime(
                name=run.run_id,
                spec=spec,
                gpus=gpus,
                nodes=nodes,
                planned_seconds=planned,
                measured_seconds=median,
                mfu=sorted(mfus)[len(mfus) // 2] if mfus else None,
                stall_seconds=stall,
                restart_seconds=restart,
            )
        )
        ratio = median / planned
        detail = f"{median:.3f} s measured, {planned:.3f} s planned, ratio {ratio:.2f}"
        far = not 1 / _FAR_FROM_PLAN < ratio < _FAR_FROM_PLAN
        judge = failed if far else passed
        yield judge("step time against the plan", detail + (": hpctrain diagnose" if far else ""))
    yield passed("MFU", f"{sorted(mfus)[len(mfus) // 2]:.1%}" if mfus else "no peak in the profile")
    yield passed("stall of a save", "-" if stall is None else f"{stall:.2f} s at most")
    yield passed("launch to first step", "-" if restart is None else f"{restart:.0f} s")


def start_seconds(run: Run) -> float | None:
    """Return seconds from the launch to the end of its first step: what each restart costs."""
    launches = [e.time for e in run.files.ledger.events() if e.event is EventKind.LAUNCH_STARTED]
    rows = read_metrics(run.files.layout)
    if not launches or not rows:
        return None
    return rows[0].time - launches[0]
