"""Rung 3: one GPU: its rates, every engine with and without TransformerEngine, planned jobs.

Belongs here: starting these programs and reading their results. Does not belong here: the tests
(`tests/gpu`), the jobs (`bench/one_gpu`), the measurement of rates (see `rates`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from bench.gpu.rung import Found, Site, failed, not_run, passed, run_program
from hpctrain.records.gpu_report import KernelRates, RungCheck, StepTime
from hpctrain.records.speed_checks import SpeedCheck

RATES_SECONDS, TESTS_SECONDS, OVERHEAD_SECONDS, JOBS_SECONDS = 300.0, 7200.0, 1800.0, 3600.0
_MOST_WORKERS = 8


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
    """Run tests/gpu: small tests beside each other, then those that fill the GPU or time it.

    They are two programs, because a worker that waited for the GPU would keep the small tests that
    it was given. Yields a check for each test.
    """
    found = 0
    for number, (mark, workers) in enumerate(
        (("not whole_gpu", _workers(site)), ("whole_gpu", ("-p", "no:xdist")))
    ):
        result = site.directory / f"tests-{number}.xml"
        result.unlink(missing_ok=True)
        command = ["-m", "pytest", "-q", *workers, "-m", mark, "tests/gpu"]
        wanted = {"GPU_TESTS": "emulated" if site.emulated else "cuda"}
        ended = run_program([*command, f"--junitxml={result}", *words], TESTS_SECONDS, wanted)
        checks = list(read_tests(result)) if result.exists() else []
        yield from checks
        found += len(checks)
        if not result.exists() or (number and not found):
            what = "none was collected: " if result.exists() else ""
            yield failed("tests of one GPU", f"{what}{ended.tail}", ended.seconds)
            return


def _workers(site: Site) -> tuple[str, ...]:
    """Choose how many tests share the GPU: each has a process or two that start on a CPU.

    Eight of them keep up to 30 GB of its memory.
    """
    processes = min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // 2)
    if site.emulated or processes < 2 or find_spec("xdist") is None:
        return ("-p", "no:xdist")
    return (f"-n{processes}",)


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
