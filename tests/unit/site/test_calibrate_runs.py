"""`hpctrain calibrate RUN ...`: own runs correct the planner, or are refused with one reason."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome
from command_line import hpctrain as typed
from gpu_report_specimens import axis, write_report
from gpu_report_specimens import speed_check as checked

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.plan_text import plan_lines
from hpctrain.job.prepare import load_knowledge
from hpctrain.plan.documents import Plan
from hpctrain.plan.planner import make_plan
from hpctrain.plan.uncertainty.intervals import TIME_NAMES
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind, Ledger
from hpctrain.records.run_records import (
    RankTimes,
    SaveRecord,
    append_save,
    read_record,
    write_record,
)
from hpctrain.records.software import SoftwareFacts, SoftwareRecord, write_software
from hpctrain.records.speed_checks import SlowPart, SpeedCheck, write_speed_check
from hpctrain.runs.run_documents import known_plan
from hpctrain.site.calibrate import calibrate
from hpctrain.site.calibrate_runs import calibrate_runs
from hpctrain.site.own_runs import planned_again, read_measured_run
from hpctrain.spec.calibration import SiteCalibration
from hpctrain.spec.loader import (
    find_profile,
    load_calibration,
    load_catalogue,
    load_profile,
    load_run_spec,
    load_uncertainty,
    partition_profile,
)
from tests.judged_runs import NOW, has_trained, submitted

SLOWER = 1.12
RUNS: dict[str, Sequence[str]] = {
    "one": ("parallel.tp=2", "parallel.pp=2"),
    "two": ("parallel.tp=4", "parallel.pp=1"),
    "three": ("parallel.tp=1", "parallel.pp=4"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def site(here: Path) -> Path:
    """A copy of a packaged profile, of a directory that the user may write to."""
    path = here / "sites" / "ours.yaml"
    path.parent.mkdir()
    text = find_profile("h100x16").read_text().replace("name: h100x16", "name: ours")
    path.write_text(text)
    return path


def hpctrain(*words: object) -> Outcome:
    """Run a command; paths are written out."""
    return typed(*map(str, words))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of runs that tests copy: planning them takes longer than calibrating."""
    runs = tmp_path_factory.mktemp("made")
    found = {name: trained(runs, name).directory for name in RUNS}
    other = trained(runs, "other", "parallel.tp=2", "parallel.pp=1", "batch.global=256")
    return {**found, "other": other.directory}


@pytest.fixture
def copied(here: Path, made: dict[str, Path]) -> dict[str, RunLayout]:
    """The runs, below the current directory."""
    return {
        name: RunLayout(shutil.copytree(path, here / "runs" / path.name))
        for name, path in made.items()
    }


def trained(
    here: Path,
    name: str,
    *changes: str,
    slower: float = SLOWER,
    slower_passes: float = SLOWER,
    steps: int = 60,
) -> RunLayout:
    """A run of llama-7b on 64 H100s whose steps take `slower` times as long as planned."""
    options = ("resources.gpus=64", f"name={name}", *RUNS.get(name, ()), *changes)
    run, ranks = submitted(here / "runs", "llama7b", "h100x16", options)
    plan = known_plan(run.layout)
    assert plan is not None
    assert plan.step_seconds is not None
    seconds = plan.step_seconds * slower
    has_trained(run.layout, [5 * seconds, 2 * seconds, *([seconds] * steps)])
    peak = plan.memory[plan.peak_stage]
    allocated = round(1.06 * (peak.total_bytes - peak.reserved_bytes))
    row: dict[str, Any] = {
        "compute_seconds": (slower_passes * planned_passes(plan),) * ranks,
        "nodes": tuple(f"n{rank // 8:04d}" for rank in range(ranks)),
        "peak_memory_bytes": (allocated,) * ranks,
        "reserved_memory_bytes": (round(1.05 * allocated),) * ranks,
    }
    write_record(
        run.layout.rank_times, RankTimes(epoch=1, first_step=2, last_step=20, time=NOW, **row)
    )
    return run.layout


def planned_passes(plan: Plan) -> float:
    assert plan.prediction is not None
    parts = plan.prediction.parts
    inside = parts.tensor_messages_seconds + parts.context_messages_seconds
    return parts.compute_seconds + parts.recompute_seconds + inside


def speed_check(launch: int, rate: float, *slow: SlowPart) -> SpeedCheck:
    """What a launch has measured before training: one rate of products, FLOP/s."""
    return SpeedCheck(
        epoch=launch,
        time=NOW,
        seconds=3.0,
        nodes=("n0000",),
        accelerator="cuda",
        precision="bf16",
        product_mnk=(8192, 8192, 8192),
        product_flops_per_second=(rate,),
        slow=slow,
    )


def refusal(*directories: Path, profile: Path | None = None) -> str:
    with pytest.raises(InvalidInputError) as caught:
        calibrate_runs(directories, str(profile) if profile else "h100x16")
    return str(caught.value)


def planned(profile: Path, spec: Path) -> Plan:
    loaded = load_profile(profile)
    return make_plan(load_run_spec(spec).document, loaded.document, load_knowledge(loaded))


def planned_seconds(profile: Path, spec: Path) -> float:
    seconds = planned(profile, spec).step_seconds
    assert seconds is not None
    return seconds


def test_three_runs_correct_a_fourth_one_until_the_file_is_deleted(
    copied: dict[str, RunLayout], site: Path
) -> None:
    runs, other = [copied[name].directory for name in RUNS], copied["other"]
    before = planned_seconds(site, other.spec)
    done = calibrate_runs(runs, str(site))
    assert "plans use it from now on" in done.usage
    assert Path(done.path) == site.with_name("ours.calibration.yaml")
    (engine,) = done.engines
    assert engine.engine == "megatron"
    assert [run.run for run in engine.learned.runs] == sorted(run.name for run in runs)
    assert engine.learned.error < 0.06
    after = planned_seconds(site, other.spec)
    assert after / before == pytest.approx(SLOWER, abs=0.025)
    told = "\n".join(plan_lines(planned(site, other.spec)))
    assert "Learned   from 3 runs of this cluster until" in told
    Path(done.path).unlink()
    assert planned_seconds(site, other.spec) == before
    assert "Learned" not in "\n".join(plan_lines(planned(site, other.spec)))


@pytest.mark.parametrize(
    ("line", "output", "found"),
    [
        ("", "ours.calibration.yaml", True),
        ("", "ours.other.yaml", False),
        ("", "../ours.calibration.yaml", False),
        ("calibration: named.yaml\n", "named.yaml", True),
        ("calibration: named.yaml\n", "ours.calibration.yaml", False),
    ],
)
def test_whether_plans_use_the_file_is_said_as_it_is(
    line: str, output: str, found: bool, copied: dict[str, RunLayout], site: Path
) -> None:
    site.write_text(f"{site.read_text()}{line}")
    if line:
        empty = "gpu: H100-80GB SXM\nprovenance: nothing yet\n"
        site.with_name("named.yaml").write_text(empty)
    done = calibrate_runs([copied["one"].directory], str(site), site.parent / output)
    assert done.usage.startswith("plans use it from now on") is found
    certainty = planned(site, copied["one"].spec).certainty
    assert certainty is not None
    assert (certainty.calibrated is not None) is found


def test_a_layout_that_was_measured_is_planned_as_measured(
    copied: dict[str, RunLayout], site: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one run shows beyond the common factor counts for it, and hardly for others."""
    found = load_uncertainty()
    shared = {**found.time.multipliers, "everything": 0.3}
    own = {"multipliers": shared, "rest": 0.1, "reach": 0.5, "noise": 0.01}
    time = found.time.model_copy(update=own)
    prior = found.model_copy(update={"time": time})
    monkeypatch.setattr("hpctrain.job.prepare.load_uncertainty", lambda: prior)
    odd = trained(here, "odd", "parallel.tp=8", "parallel.pp=1", slower=SLOWER * 1.15)
    runs = [*(copied[name].directory for name in RUNS), odd.directory]
    before = planned_seconds(site, odd.spec), planned_seconds(site, copied["other"].spec)
    (engine,) = calibrate_runs(runs, str(site)).engines
    after = planned_seconds(site, odd.spec), planned_seconds(site, copied["other"].spec)
    assert after[0] / before[0] == pytest.approx(SLOWER * 1.15, abs=0.03)
    assert after[1] / before[1] == pytest.approx(SLOWER, abs=0.04)
    names = engine.learned.time.names
    assert names[: len(TIME_NAMES)] == TIME_NAMES
    assert set(names[len(TIME_NAMES) :]) == {f"like {run.name}" for run in runs}
    (told,) = (one for one in engine.multipliers if one.name == f"like {odd.run_id}")
    assert told.factor > 1.05
    assert told.after < told.before == 0.1
    (row,) = (one for one in engine.learned.runs if one.run == odd.run_id)
    assert row.after_seconds == pytest.approx(after[0], rel=0.02), "as `plan` has it"


def test_the_order_of_runs_changes_nothing(copied: dict[str, RunLayout], site: Path) -> None:
    runs = [copied[name].directory for name in RUNS]
    files = []
    for order in (runs, runs[::-1]):
        files.append(Path(calibrate_runs(order, str(site)).path).read_text())
    assert files[0] == files[1]


def test_memory_is_learned_from_what_was_allocated_and_reserved(
    copied: dict[str, RunLayout], site: Path
) -> None:
    layout = copied["one"]
    (engine,) = calibrate_runs([layout.directory], str(site)).engines
    (run,) = engine.learned.runs
    assert run.measured_bytes is not None
    assert run.before_bytes is not None
    assert run.after_bytes is not None
    assert abs(run.after_bytes - run.measured_bytes) < 0.5 * abs(
        run.before_bytes - run.measured_bytes
    )
    plan = planned(site, layout.spec)
    assert plan.certainty is not None
    assert str(plan.certainty.calibrated).startswith("1 run of this cluster")
    inside = max(stage.total_bytes - stage.reserved_bytes for stage in plan.memory)
    assert inside == pytest.approx(run.after_bytes, rel=0.01)


def test_ranks_tell_slow_computation_from_slow_waiting(here: Path, site: Path) -> None:
    """Steps 12 % longer: once because passes are, once although they are as planned."""
    factors = []
    for passes in (SLOWER, 1.0):
        layout = trained(here, "one", f"seed={round(100 * passes)}", slower_passes=passes)
        (engine,) = calibrate_runs([layout.directory], str(site)).engines
        factors.append({one.name: one.factor for one in engine.multipliers})
    computing, waiting = factors
    assert computing["attention"] > waiting["attention"]
    # a multiplier that the runs have not moved is not told
    assert computing.get("network", 1.0) < waiting.get("network", 1.0)


@pytest.mark.parametrize(
    "ran",
    [
        dict(recompute="full", recompute_layers=5),
        dict(recompute="selective", recompute_modules=("mlp",)),
        dict(recompute="none", activation_offload_layers=8),
    ],
)
def test_what_a_run_has_recomputed_and_offloaded_is_planned_again(
    ran: dict[str, Any], copied: dict[str, RunLayout], site: Path
) -> None:
    layout = copied["two"]
    plan = json.loads(layout.plan.read_text())
    layout.plan.write_text(json.dumps({**plan, **ran}))
    loaded = load_profile(site)
    knowledge = load_knowledge(loaded)
    assert knowledge.gpu is not None
    run = read_measured_run(layout.directory, knowledge.gpu, load_catalogue())
    again = planned_again(run, loaded.document, knowledge).plan
    assert {name: getattr(again, name) for name in ran} == ran


def test_runs_as_planned_correct_nothing(here: Path, site: Path) -> None:
    layout = trained(here, "one", "seed=7", slower=1.0, slower_passes=1.0)
    before = planned_seconds(site, layout.spec)
    (engine,) = calibrate_runs([layout.directory], str(site)).engines
    assert max(map(abs, engine.learned.time.mean)) < 1e-3
    assert planned_seconds(site, layout.spec) == pytest.approx(before, rel=1e-3)
    certainty = planned(site, layout.spec).certainty
    assert certainty is not None
    assert certainty.calibrated is not None


def test_steps_that_no_constant_explains_teach_nothing(here: Path, site: Path) -> None:
    slow = trained(here, "one", "seed=8", slower=4.0)
    assert "its steps took 4 times as long as planned, which no constant" in refusal(
        slow.directory, profile=site
    )


def test_more_runs_than_ten_are_refused(
    here: Path, copied: dict[str, RunLayout], site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [copied[name].directory for name in RUNS]
    monkeypatch.setattr("hpctrain.site.calibrate_runs.MOST_RUNS", 2)
    with pytest.raises(InvalidInputError, match="3 runs of megatron are more than 2"):
        calibrate_runs(runs, str(site))
    assert not site.with_name("ours.calibration.yaml").exists()


def test_what_other_engines_have_taught_stays(
    here: Path, copied: dict[str, RunLayout], site: Path
) -> None:
    calibrate_runs([copied["one"].directory], str(site))
    other = trained(here, "fsdp", "engine.name=fsdp", "recompute=none")
    done = calibrate_runs([other.directory], str(site))
    assert [engine.engine for engine in done.engines] == ["fsdp"]
    calibration = load_profile(site).document.calibration
    assert isinstance(calibration, SiteCalibration)
    assert sorted(calibration.learned) == ["fsdp", "megatron"]
    again = calibrate_runs([copied["two"].directory], str(site))
    assert [run.run for run in again.engines[0].learned.runs] == [copied["two"].run_id]


def test_warm_up_saves_and_other_launches_do_not_count(here: Path, site: Path) -> None:
    layout = trained(here, "one", steps=80)
    plain = calibrate_runs([layout.directory], str(site)).engines[0].learned.runs[0]
    plan = known_plan(layout)
    assert plan is not None
    assert plan.step_seconds is not None
    assert plain.measured_seconds == pytest.approx(SLOWER * plan.step_seconds, rel=1e-3)
    # a second launch on a slow node, and saves at every third step
    has_trained(layout, [9 * plan.step_seconds] * 200, epoch=2, first_step=83)
    slow = SlowPart(part="gpu", message="rank 3 is slow")
    write_speed_check(layout, speed_check(2, 6e14, slow))
    for step in range(12, 60, 3):
        save = SaveRecord(
            step=step, epoch=1, time=NOW, stall_seconds=2, publish_seconds=3, size_bytes=1
        )
        append_save(layout, save)
    run = calibrate_runs([layout.directory], str(site)).engines[0].learned.runs[0]
    assert run.measured_seconds == plain.measured_seconds
    assert run.steps < plain.steps - 25


def test_ranks_of_other_launches_teach_nothing(copied: dict[str, RunLayout], site: Path) -> None:
    """The last window is that of a launch on half the nodes, whose GPUs hold more."""
    layout = copied["one"]
    plain = calibrate_runs([layout.directory], str(site)).engines[0].learned
    assert plain.memory is not None
    times = read_record(layout.rank_times, RankTimes)
    assert times is not None
    more = [round(1.5 * size) for size in times.peak_memory_bytes]
    Ledger(layout.ledger).append(EventKind.LAUNCH_STARTED, epoch=2, launch_nodes=4)
    later = times.model_copy(update={"epoch": 2, "peak_memory_bytes": tuple(more)})
    write_record(layout.rank_times, later)
    learned = calibrate_runs([layout.directory], str(site)).engines[0].learned
    assert learned.memory is None
    assert learned.runs[0].measured_seconds == plain.runs[0].measured_seconds


def test_a_run_that_teaches_nothing_is_refused_with_one_reason(
    here: Path, copied: dict[str, RunLayout], site: Path
) -> None:
    short = trained(here, "one", "seed=9", steps=4)
    assert "has 3 steps that count, 10 are needed" in refusal(short.directory, profile=site)
    other = copied["two"]
    facts = SoftwareFacts(python="3.11", torch="2.8.0", gpus=("NVIDIA B200",), open_files=1024)
    write_software(other, [SoftwareRecord(epoch=1, nodes=("n0000",), ranks=64, facts=facts)])
    assert "ran on `B200-SXM`, and the profile's GPU is `H100-80GB SXM`" in refusal(
        other.directory, profile=site
    )
    third = copied["three"]
    plan = json.loads(third.plan.read_text())
    third.plan.write_text(json.dumps({**plan, "accelerator": "cpu"}))
    assert "ran on CPUs" in refusal(third.directory, profile=site)
    shutil.rmtree(third.directory)
    third.directory.mkdir()
    third.metrics.write_text("")
    assert "has no plan" in refusal(third.directory, profile=site)


def test_runs_of_another_gpu_are_refused_although_no_rank_has_reported_it(
    copied: dict[str, RunLayout],
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        calibrate_runs([copied["one"].directory], "a100x64")
    said = "ran on `H100-80GB SXM`, and the profile's GPU is `A100-80GB SXM`"
    assert said in str(caught.value)


def test_runs_of_another_profile_and_odd_ones_are_mentioned(
    here: Path, copied: dict[str, RunLayout], site: Path
) -> None:
    odd = trained(here, "two", "seed=8", slower=2.5)
    done = calibrate_runs([odd.directory, copied["one"].directory], str(site))
    assert any(
        "submitted with profile h100x16, which is right if ours" in one for one in done.remarks
    )
    (remark,) = [one for one in done.remarks if "still measures" in one]
    assert remark.startswith(odd.run_id)
    alone = calibrate_runs([copied["one"].directory], "h100x16", here / "x.yaml")
    assert alone.remarks == ()


def test_what_is_no_run_is_named(here: Path, copied: dict[str, RunLayout], site: Path) -> None:
    empty = here / "empty"
    empty.mkdir()
    told = hpctrain("calibrate", "empty", "-p", site)
    assert "empty: is no run that has trained, no comparison and no service" in told.stderr
    above = hpctrain("calibrate", "runs", "-p", site)
    assert f"give the runs in it: runs/{copied['one'].directory.name}" in above.stderr
    mixed = hpctrain("calibrate", copied["one"].directory, "empty", "-p", site)
    assert "`empty` is not" in mixed.stderr


def test_runs_say_where_they_ran_before_their_profile_is_asked(
    here: Path, copied: dict[str, RunLayout], site: Path
) -> None:
    run, _ = submitted(here / "runs", "gpt-tiny", "sandbox", ())
    has_trained(run.layout, [0.1] * 40)
    told = hpctrain("calibrate", run.layout.directory)
    assert f"{run.layout.directory}: ran on CPUs: nothing follows for GPUs" in told.stderr
    own = copied["one"]
    own.profile.write_text(own.profile.read_text().replace("name: h100x16", "name: theirs"))
    lost = hpctrain("calibrate", own.directory)
    assert "was submitted with profile `theirs`, which is not found by its name" in lost.stderr
    assert "--profile FILE" in lost.stderr


def test_engines_learn_one_after_the_other(copied: dict[str, RunLayout], site: Path) -> None:
    """Also of a packaged profile, whose file no plan reads: the second call goes on from it."""
    from hpctrain.spec.calibration import SiteCalibration
    from hpctrain.spec.loader import load_document

    path = Path(calibrate_runs([copied["one"].directory], "h100x16").path)
    text = path.read_text()
    path.write_text(text.replace("  megatron:\n", "  fsdp:\n"))
    calibrate_runs([copied["two"].directory], "h100x16")
    found = load_document(SiteCalibration, path).document
    assert set(found.learned) == {"fsdp", "megatron"}
    assert found.provenance.startswith("own runs: 2")


def test_one_bad_run_does_not_keep_others_from_teaching(
    here: Path, copied: dict[str, RunLayout], site: Path
) -> None:
    good, short = copied["one"], trained(here, "two", "seed=9", steps=3)
    done = calibrate_runs([short.directory, good.directory], str(site))
    assert len(done.engines[0].learned.runs) == 1
    (reason,) = done.refused
    assert "steps that count" in reason


def test_what_was_learned_with_other_constants_is_left_aside(
    copied: dict[str, RunLayout], site: Path
) -> None:
    layout = copied["one"]
    path = Path(calibrate_runs([layout.directory], str(site)).path)
    before = planned_seconds(site, layout.spec)
    lines = path.read_text().splitlines(keepends=True)
    indent = next(line for line in lines if "constants:" in line).partition("constants")[0]
    changed = [
        f"{indent}constants: '0123456789abcdef'\n" if "constants:" in line else line
        for line in lines
    ]
    path.write_text("".join(changed))
    assert planned_seconds(site, layout.spec) < 0.95 * before
    warnings = planned(site, layout.spec).warnings
    assert any("What runs of megatron have taught here is not used" in one for one in warnings)


def test_what_was_learned_of_other_multipliers_is_left_aside(
    copied: dict[str, RunLayout], site: Path
) -> None:
    layout = copied["one"]
    path = Path(calibrate_runs([layout.directory], str(site)).path)
    text = path.read_text()
    assert text.count("elementwise") == 1
    path.write_text(text.replace("elementwise", "norms"))
    plan = planned(site, layout.spec)
    assert plan.certainty is not None
    assert plan.certainty.calibrated is None
    assert any("have taught here is not used" in one for one in plan.warnings)


def test_runs_teach_about_the_partition_with_their_gpus_alone(
    copied: dict[str, RunLayout], site: Path
) -> None:
    """Planning for the other partition is neither refused nor corrected."""
    own = "{type: a100, per_node: 8, memory: 80GiB, model: A100-80GB SXM}"
    other = f"    - {{name: older, max_walltime: 1d, gpu: {own}}}\n"
    site.write_text(site.read_text().replace("  partitions:\n", f"  partitions:\n{other}"))
    layout = copied["one"]
    calibrate_runs([layout.directory], str(site))
    knowing = []
    for partition in (None, "older"):
        loaded = partition_profile(load_profile(site), partition)
        knowing.append(load_knowledge(loaded))
    assert [bool(one.learned) for one in knowing] == [True, False]
    assert knowing[1].calibration is load_calibration()


def test_rates_count_of_runs_that_teach_alone(here: Path, site: Path) -> None:
    """A run on other GPUs has measured these before training."""
    good, refused = trained(here, "one", "seed=5"), trained(here, "two", "seed=6")
    alone = calibrate_runs([good.directory], str(site)).engines[0].learned
    plan = json.loads(refused.plan.read_text())
    refused.plan.write_text(json.dumps({**plan, "accelerator": "cpu"}))
    check = speed_check(1, 3e14)
    write_speed_check(refused, check)
    done = calibrate_runs([good.directory, refused.directory], str(site))
    assert done.engines[0].learned.time == alone.time
    write_speed_check(good, check)
    slower = calibrate_runs([good.directory], str(site)).engines[0].learned
    products = slower.time.names.index("products")
    assert slower.time.mean[products] > alone.time.mean[products] + 0.004


def test_each_rate_of_a_launch_settles_its_own_multiplier(here: Path, site: Path) -> None:
    """Links that are as in the catalogue times the packaged share, but half as fast between
    nodes."""
    layout = trained(here, "one", "seed=5", slower=1.0, slower_passes=1.0)
    alone = calibrate_runs([layout.directory], str(site)).engines[0].learned.time
    calibration = load_calibration()
    inside = 450e9 * calibration.gpus["hopper"].nvlink_efficiency
    between = 50e9 * calibration.fabrics["infiniband"].network_efficiency
    axes = [
        axis("tp", 8, 1, "all_gather", inside),
        axis("dp", 2, 8, "all_gather", between / 2),
    ]
    check = SpeedCheck.model_validate(checked(axes=axes, product_flops_per_second=[]))
    write_speed_check(layout, check)
    seen = calibrate_runs([layout.directory], str(site)).engines[0].learned.time
    means, before = (dict(zip(one.names, one.mean, strict=True)) for one in (seen, alone))
    assert means["network"] == pytest.approx(math.log(2), abs=0.05)
    assert abs(means["nvlink"]) < 0.05
    assert means["attention"] == pytest.approx(before["attention"], abs=0.02)


def test_a_report_says_which_runs_it_makes_forget(
    here: Path, copied: dict[str, RunLayout], site: Path
) -> None:
    calibrate_runs([copied["one"].directory], str(site))
    done = calibrate(write_report(here), str(site))
    name = copied["one"].run_id
    assert any(f"what these have taught: {name}" in one for one in done.remarks)
    again = calibrate(write_report(here), str(site))
    assert not again.remarks


def test_the_command_shows_before_and_after_in_80_columns(
    copied: dict[str, RunLayout], site: Path
) -> None:
    runs = [copied[name].directory for name in ("one", "two")]
    told = hpctrain("calibrate", *runs, "-p", site)
    lines = told.stdout.splitlines()
    assert max(len(line) for line in lines if not line.startswith("mind ")) <= 80
    assert "engine megatron: calibrated on 2 runs: ±" in told.stdout
    assert "-10.7%" in told.stdout, "12 % slower than planned"
    assert "to undo it, delete the file" in told.stderr
    document = json.loads(hpctrain("calibrate", *runs, "-p", site, "--json").stdout)
    assert document["learning"]["engines"][0]["engine"] == "megatron"


def test_a_comparison_teaches_by_its_trials(
    here: Path, copied: dict[str, RunLayout], site: Path
) -> None:
    from hpctrain.trials.documents import ComparisonRecord, TrialRecord

    names = [copied[name].directory.name for name in ("one", "two")]
    trials = tuple(
        TrialRecord(
            name=name,
            overrides=(),
            gpus=64,
            global_batch=128,
            sample_length=4096,
            train_steps=100,
            precision="bf16",
            training="x",
            run_id=name,
        )
        for name in names
    )
    record = ComparisonRecord(
        kind="engines",
        comparison_id="compare-x",
        run_name="llama",
        profile_name="h100x16",
        steps=60,
        weak=False,
        unit="tokens",
        gpu_memory_bytes=80 * 2**30,
        price_per_gpu_hour=None,
        trials=trials,
    )
    directory = here / "runs" / "compare-x"
    directory.mkdir()
    (directory / "comparison.json").write_text(record.model_dump_json())
    done = calibrate_runs([directory, here / "runs" / names[0]], str(site))
    assert [run.run for run in done.engines[0].learned.runs] == sorted(names), "each run once"


def test_several_results_have_to_be_runs(
    here: Path, copied: dict[str, RunLayout], site: Path
) -> None:
    layout = copied["one"]
    report = here / "gpu-report.json"
    report.write_text("{}")
    told = hpctrain("calibrate", layout.directory, report, "-p", site)
    assert told.exit_code == 2
    assert "several results have to be runs" in told.stderr
