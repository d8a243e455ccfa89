"""Rung 3: one GPU: its rates, every engine with and without TransformerEngine, planned jobs.

Belongs here: starting these programs and reading their results. Does not belong here: the tests
(`tests/gpu`), the jobs (`bench/one_gpu`), the measurement of rates (see `rates`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from bench.gpu.rung import Found, Site, failed, not_run, passed, run_program
from hpctrain.store.gpu_report import KernelRates, RungCheck, StepTime
from hpctrain.store.speed_checks import SpeedCheck

RATES_SECONDS, TESTS_SECONDS, OVERHEAD_SECONDS, JOBS_SECONDS = 300.0, 7200.0, 1800.0, 3600.0


def run(site: Site, found: Found) -> Iterator[RungCheck]:
    """Measure the device, run the tests of one GPU one after the other, then planned jobs."""
    yield measure_rates(site, found)
    yield from run_tests(site)
    if site.emulated:
        yield not_run("cost of the trainer", "emulated on CPU: `make bench` measures it on CPUs")
        yield not_run("planned jobs", "emulated on CPU: they are planned for a GPU")
        return
    ended = run_program(["-m", "bench.overhead", "--gpu"], OVERHEAD_SECONDS)
    judge = passed if ended.code == 0 else failed
    yield judge("cost of the trainer", ended.tail, ended.seconds)
    yield from run_jobs(site, found)


def measure_rates(site: Site, found: Found) -> RungCheck:
    """Measure every GPU that this process sees."""
    result = site.directory / "rates.json"
    result.unlink(missing_ok=True)
    words = ["-m", "bench.gpu.rates", str(result), *(["--emulate-gpu"] if site.emulated else [])]
    ended = run_program(words, RATES_SECONDS)
    if ended.code != 0 or not result.exists():
        return failed("rates", ended.tail, ended.seconds)
    parts = []
    for check, rates in json.loads(result.read_text()):
        found.speed.append(SpeedCheck.model_validate(check))
        found.kernels.append(KernelRates.model_validate(rates))
        product = found.speed[-1].product_flops_per_second[0] or 0.0
        stream = found.kernels[-1].stream_bytes_per_second or 0.0
        attention = found.kernels[-1].attention_flops_per_second or 0.0
        parts.append(
            f"products {product / 1e12:.3g} TFLOP/s, elementwise {stream / 1e9:.4g} GB/s, "
            f"attention {attention / 1e12:.3g} TFLOP/s"
        )
    return passed("rates", "; ".join(parts), ended.seconds)


def run_tests(site: Site, *words: str) -> Iterator[RungCheck]:
    """Run tests/gpu in one process, because one of them fills the GPU; a check for each test."""
    result = site.directory / "tests.xml"
    result.unlink(missing_ok=True)
    command = ["-m", "pytest", "-q", "-p", "no:xdist", "tests/gpu", f"--junitxml={result}", *words]
    wanted = {"GPU_TESTS": "emulated" if site.emulated else "cuda"}
    ended = run_program(command, TESTS_SECONDS, wanted)
    if not result.exists():
        yield failed("tests of one GPU", ended.tail, ended.seconds)
        return
    checks = list(read_tests(result))
    yield from checks
    if not checks:
        yield failed("tests of one GPU", f"none was collected: {ended.tail}", ended.seconds)


def read_tests(path: Path) -> Iterator[RungCheck]:
    """Read the results that pytest wrote (JUnit XML); a skipped test counts as not run."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name, seconds = case.get("name", "?").removeprefix("test_"), float(case.get("time", "0"))
        bad = case.find("failure")
        bad = case.find("error") if bad is None else bad
        skipped = case.find("skipped")
        if bad is not None:
            text = (bad.get("message") or "") + "\n" + (bad.text or "")[-800:]
            yield failed(name, text.strip(), seconds)
        elif skipped is not None:
            yield not_run(name, (skipped.get("message") or "").removeprefix("Skipped: "))
        else:
            yield passed(name, "", seconds)


def run_jobs(site: Site, found: Found) -> Iterator[RungCheck]:
    """Plan jobs for the profile's GPU and train them."""
    name = "planned jobs"
    if site.profile is None:
        yield not_run(name, "needs the profile of this GPU: make gpu RUNG=3 PROFILE=...")
        return
    result = site.directory / "jobs.json"
    result.unlink(missing_ok=True)
    words = ["-m", "bench.one_gpu", "--profile", site.profile, "--result", str(result)]
    ended = run_program(words, JOBS_SECONDS)
    if result.exists():
        for step in json.loads(result.read_text()):
            found.steps.append(StepTime.model_validate(step))
    judge = passed if ended.code == 0 else failed
    yield judge(name, ended.tail, ended.seconds)
