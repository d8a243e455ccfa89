"""`hpctrain calibrate`: what was measured becomes what the planner uses, or is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import hpctrain
from gpu_report_specimens import (
    H100_BYTES,
    RANKS,
    axis,
    kernel_rates,
    one_gpu_step,
    speed_check,
    write_report,
)
from ruamel.yaml import YAML

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.prepare import load_knowledge
from hpctrain.plan.cost.from_spec import calibration_of, machine_of, software_of
from hpctrain.site.calibrate import calibrate
from hpctrain.spec.loader import (
    PACKAGED_PROFILES,
    find_profile,
    load_calibration,
    load_profile,
    profile_names,
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(path: Path, *profile: str) -> str:
    with pytest.raises(InvalidInputError) as caught:
        calibrate(path, *profile)
    return str(caught.value)


def site_profile(here: Path, name: str) -> Path:
    """A copy of a packaged profile that names a calibration."""
    path = here / "ours.yaml"
    shutil.copy(find_profile(name), path)
    path.write_text(f"{path.read_text()}calibration: {name}.calibration.yaml\n")
    return path


def test_measured_rates_become_shares_of_the_data_sheet(here: Path) -> None:
    done = calibrate(write_report(here))
    site = done.site
    assert site.gpu == "H100-80GB SXM"
    # a product of 8192 at 700 TFLOP/s of 989.4, less the waiting for memory and tails
    assert site.product_efficiency is not None and 0.70 < site.product_efficiency < 0.80
    assert site.memory_efficiency == pytest.approx(3.0e12 / 3.35e12, rel=1e-3)
    # 450 TFLOP/s of causal sequences of 4096, 4096 / (4096 + 550) of the rate of long ones
    assert site.flash_efficiency == pytest.approx(4.5e14 / 9.894e14 * 4646 / 4096, rel=1e-3)
    assert site.nvlink_bandwidth == pytest.approx(3.6e11), "the all-gather, not the all-reduce"
    assert site.network_bandwidth == pytest.approx(4.4e10)
    assert "2 nodes" in site.provenance and "2025-10-09" in site.provenance


def test_the_share_gives_the_measured_time_of_the_product_again(here: Path) -> None:
    """The planner's own formula, with the constants that came out of it."""
    from dataclasses import fields

    from hpctrain.plan.cost.blocks import product_seconds
    from hpctrain.plan.cost.case import Case, Mesh, Shape

    calibrate(write_report(here))
    knowledge = load_knowledge(load_profile(site_profile(here, "h100x16")))
    assert knowledge.gpu is not None
    software = software_of(knowledge.calibration.software["megatron-core"])
    fabric = knowledge.calibration.fabrics["infiniband"]
    machine = machine_of(
        knowledge.gpu, calibration_of(knowledge.calibration, knowledge.gpu), fabric
    )
    ones: dict[str, Any] = {f.name: 1.0 for f in fields(Mesh)}
    shape = Shape(**{f.name: 1.0 for f in fields(Shape)})
    case = Case(shape, Mesh(**ones | {"low": 0, "element_bytes": 2}), machine, software)
    seconds = float(product_seconds(case, 8192, 8192, 8192))
    assert 2 * 8192**3 / seconds == pytest.approx(7.0e14, rel=2e-3)


def test_the_planner_uses_the_file_that_the_profile_names(here: Path) -> None:
    spec = here / "spec.yaml"
    spec.write_text(Path(__file__).parents[3].joinpath("examples/gpt1300m.yaml").read_text())
    before = json.loads(hpctrain("plan", "-p", "h100x16", str(spec), "--json").stdout)
    slow = speed_check(product_flops_per_second=[3.5e14] * RANKS)
    written = calibrate(write_report(here, speed=[slow]))
    assert written.path == "h100x16.calibration.yaml"
    profile = site_profile(here, "h100x16")
    after = hpctrain("plan", "-p", str(profile), str(spec), "--json")
    assert after.exit_code == 0, after.stderr
    planned = json.loads(after.stdout)["plan"]["step_seconds"]
    assert planned > 1.3 * before["plan"]["step_seconds"], "half the rate of products"


def test_a_profile_carries_the_figures_not_the_file_name(here: Path) -> None:
    """A run keeps a copy of its profile, and the file may be gone or changed by then."""
    calibrate(write_report(here))
    path = site_profile(here, "h100x16")
    loaded = load_profile(path)
    assert loaded.document.calibration == calibrate(write_report(here)).site
    plain = load_profile(find_profile("h100x16"))
    assert loaded.digest != plain.digest
    inline = here / "inline.yaml"
    text = path.read_text().replace("calibration: h100x16.calibration.yaml\n", "")
    site = YAML(typ="safe").load((here / "h100x16.calibration.yaml").read_text())
    inline.write_text(f"{text}calibration: {json.dumps(site)}\n")
    assert load_profile(inline).digest == loaded.digest


def test_a_calibration_is_no_profile_and_a_missing_one_is_named(here: Path) -> None:
    calibrate(write_report(here))
    profile = site_profile(here, "h100x16")
    assert profile_names([here]) == sorted({*profile_names([PACKAGED_PROFILES]), "ours"})
    (here / "h100x16.calibration.yaml").unlink()
    shown = hpctrain("validate", str(profile))
    assert shown.exit_code == 3
    last = len(profile.read_text().splitlines())
    assert f"ours.yaml:{last}:" in shown.stderr and "no such file" in shown.stderr
    assert "hpctrain calibrate" in shown.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("calibration: 5", "ours.yaml:{}:14: `calibration`: expected a mapping or text, got `5`"),
        (
            "calibration: {gpu: H100-80GB SXM, product_efficiency: 1.5, provenance: mine}",
            "`calibration.product_efficiency`: must be at most 1.0, got `1.5`",
        ),
        (
            "calibration: {gpu: H100-80GB SXM, nvlink_bandwidth: 300, provenance: mine}",
            "expected a bandwidth such as `300GB/s`",
        ),
    ],
)
def test_a_wrong_calibration_in_a_profile_has_its_position(
    line: str, message: str, here: Path
) -> None:
    path = here / "ours.yaml"
    path.write_text(f"{find_profile('h100x16').read_text()}{line}\n")
    shown = hpctrain("validate", str(path))
    last = len(path.read_text().splitlines())
    assert shown.exit_code == 3 and message.format(last) in shown.stderr, shown.stderr


def test_a_calibration_of_another_gpu_is_refused_by_the_planner(here: Path) -> None:
    calibrate(write_report(here))
    profile = site_profile(here, "h100x16")
    other = find_profile("a100x1").read_text()
    profile.write_text(f"{other}calibration: h100x16.calibration.yaml\n")
    spec = Path(__file__).parents[3] / "examples/gpt1300m.yaml"
    shown = hpctrain("plan", "-p", str(profile), str(spec))
    assert shown.exit_code == 3
    assert "measured on `H100-80GB SXM`, and this cluster has `A100-80GB SXM`" in shown.stderr


ABOVE = [
    (dict(product_flops_per_second=[7e14] * 3 + [1.2e15]), "1200 TFLOP/s is above the data sheet"),
    (dict(product_flops_per_second=[1e13]), "10 TFLOP/s is less than 5% of the data sheet"),
    (dict(axes=[axis("tp", 8, 1, "all_gather", 5e11)]), "500 GB/s is above the data sheet"),
    (dict(axes=[axis("tp", 8, 1, "all_reduce", 9.5e11)]), "950 GB/s is above the data sheet"),
    (dict(axes=[axis("dp", 2, 8, "all_gather", 6e10)]), "60 GB/s is above the data sheet, 50 GB/s"),
    (dict(gpu="NVIDIA A100-SXM4-80GB"), "measured on `A100-80GB SXM`, and the profile's GPU"),
    (dict(gpu="NVIDIA H200", total_memory_bytes=[143771 * 2**20]), "measured on `H200"),
    (dict(gpu=None, accelerator="cpu"), "measured on a CPU in the place of a GPU"),
]


@pytest.mark.parametrize(("changes", "message"), ABOVE, ids=[message for _, message in ABOVE])
def test_what_cannot_be_true_is_refused_with_its_position(
    changes: dict[str, Any], message: str, here: Path
) -> None:
    path = write_report(here, speed=[speed_check(**changes)], kernels=[])
    said = refusal(path)
    assert message in said
    first = said.splitlines()[0]
    file, line, column = first.split(": ")[0].rsplit(":", 2)
    assert file == str(path)
    stands = path.read_text().splitlines()[int(line) - 1][int(column) - 1 :]
    assert any(str(value) in stands for value in _leaves(changes)), stands
    assert not (here / "h100x16.calibration.yaml").exists()


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in _leaves(part)]
    if isinstance(value, list):
        return [leaf for part in value for leaf in _leaves(part)]
    return ["null" if value is None else json.dumps(value)]


def test_an_all_reduce_that_the_switch_adds_is_no_error(here: Path) -> None:
    """480 GB/s on eight H100 with NVLink SHARP: each byte is sent once. The share is at most 1."""
    path = write_report(here, speed=[speed_check(axes=[axis("tp", 8, 1, "all_reduce", 4.8e11)])])
    site = calibrate(path).site
    assert site.nvlink_bandwidth == pytest.approx(4.5e11)
    assert site.network_bandwidth is None


def test_a_group_over_two_nodes_gives_the_rate_of_the_cards(here: Path) -> None:
    """16 ranks, 8 on each node: each GPU takes in 1/8 of half of the tensor."""
    whole, seconds = 2**28, 2**28 / 2 / 8 / 4.2e10
    bus = whole / seconds * 15 / 16
    path = write_report(here, speed=[speed_check(axes=[axis("dp", 16, 1, "all_gather", bus)])])
    assert calibrate(path).site.network_bandwidth == pytest.approx(4.2e10, rel=1e-3)


def test_small_messages_do_not_count(here: Path) -> None:
    small = axis("tp", 8, 1, "all_gather", 1e10) | {"message_bytes": 2**16}
    path = write_report(
        here, speed=[speed_check(axes=[small, axis("tp", 8, 1, "all_gather", 3e11)])]
    )
    assert calibrate(path).site.nvlink_bandwidth == pytest.approx(3e11)


def test_jobs_of_a_report_are_met_and_measured_rates_stay(here: Path) -> None:
    """A rate was measured; what jobs take longer is not put down to it."""
    alone = calibrate(write_report(here, steps=[one_gpu_step(1.0)]))
    [planned] = [step.packaged_seconds for step in alone.steps]
    rates = calibrate(write_report(here)).site
    assert planned is not None
    slower = [one_gpu_step(planned * 1.1, number) for number in range(3)]
    done = calibrate(write_report(here, steps=slower))
    assert not done.remarks
    assert done.site.product_efficiency == rates.product_efficiency
    [learned] = done.site.learned.values()
    assert len(learned.runs) == 3
    for step in done.steps:
        assert step.packaged_seconds is not None
        assert step.calibrated_seconds is not None
        way = step.measured_seconds - step.packaged_seconds
        assert 0.3 < (step.calibrated_seconds - step.packaged_seconds) / way < 1


def test_jobs_far_slower_than_measured_rates_allow_are_named(here: Path) -> None:
    slow = [one_gpu_step(1.2, number) for number in range(3)]
    done = calibrate(write_report(here, steps=slow))
    assert len([one for one in done.remarks if "find out why" in one]) == 3


def test_jobs_that_no_constant_explains_teach_nothing_and_are_named(here: Path) -> None:
    slow = [one_gpu_step(500.0, number) for number in range(2)]
    alone = calibrate(write_report(here)).site
    done = calibrate(write_report(here, steps=slow))
    assert done.site == alone
    assert len(done.remarks) == 2
    assert all("teaches nothing: its steps took" in one for one in done.remarks)


def test_the_rates_of_a_run_before_training_are_enough(here: Path) -> None:
    (here / "run").mkdir()
    lines = [json.dumps(speed_check()), json.dumps(speed_check(epoch=2))]
    (here / "run" / "speed.jsonl").write_text("\n".join(lines) + "\n")
    assert "--profile" in hpctrain("calibrate", "run").stderr
    done = calibrate(here / "run", "h100x16")
    assert done.site.nvlink_bandwidth == pytest.approx(3.6e11)
    wrong = json.dumps(speed_check(product_flops_per_second=[2e15]))
    (here / "run" / "speed.jsonl").write_text(f"{lines[0]}\n{wrong}\n")
    assert "run/speed.jsonl:2: product_flops_per_second[0]: 2000 TFLOP/s" in refusal(
        Path("run"), "h100x16"
    )


def test_the_command_prints_what_changed_in_80_columns(here: Path) -> None:
    path = write_report(here, steps=[one_gpu_step(1.2, number) for number in range(3)])
    shown = hpctrain("calibrate", str(path))
    assert shown.exit_code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80, lines
    [nvlink] = [line for line in lines if line.startswith("NVLink")]
    packaged = 450 * load_calibration().gpus["hopper"].nvlink_efficiency
    words = [f"{packaged:.1f}", "GB/s", "360.0", "GB/s", f"{360 / packaged:.2f}", "16", "ranks"]
    assert nvlink.split()[-7:] == words
    assert "no plan uses it yet; to use it, write a profile with `extends: h100x16`" in shown.stderr
    body = json.loads(hpctrain("calibrate", str(path), "--json").stdout)
    assert body["calibration"]["site"]["gpu"] == "H100-80GB SXM"


def test_new_rates_say_what_runs_had_taught_on_other_ones(here: Path) -> None:
    first = write_report(here, steps=[one_gpu_step(0.65, number) for number in range(3)])
    before = calibrate(first)
    assert not before.remarks
    taught = [run.run for one in before.site.learned.values() for run in one.runs]
    again = calibrate(write_report(here, steps=[]))
    assert taught
    assert any("not kept" in one and taught[0] in one for one in again.remarks)


def test_copies_of_a_launch_stand_for_elementwise_kernels(here: Path) -> None:
    check = speed_check(copy_bytes_per_second=[2.8e12] * RANKS)
    alone = write_report(here, speed=[check], kernels=[])
    assert calibrate(alone).site.memory_efficiency == pytest.approx(2.8e12 / 3.35e12, rel=1e-3)
    both = write_report(here, speed=[check])
    assert calibrate(both).site.memory_efficiency == pytest.approx(3.0e12 / 3.35e12, rel=1e-3)


def test_a_file_that_is_no_report_is_one_clear_error(here: Path) -> None:
    (here / "other.json").write_text('{"kind": "something"}')
    shown = hpctrain("calibrate", "other.json")
    assert shown.exit_code == 3 and "other.json:1:" in shown.stderr, shown.stderr
    empty = write_report(here, speed=[], kernels=[])
    assert "no rate" in refusal(empty) and "rung 3" in hpctrain("calibrate", str(empty)).stderr


def test_rates_of_one_gpu_alone_are_a_calibration(here: Path) -> None:
    done = calibrate(write_report(here, speed=[], kernels=[kernel_rates(memory_bytes=H100_BYTES)]))
    assert done.site.product_efficiency is None and done.site.memory_efficiency is not None
