"""The file that `hpctrain calibrate` writes: which one it is, what it keeps, what may be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import hpctrain

from hpctrain.base.errors import InvalidInputError, StorageError
from hpctrain.job.plan_text import plan_lines
from hpctrain.job.prepare import load_knowledge
from hpctrain.plan.cost.multipliers import MEMORY
from hpctrain.plan.planner import make_plan
from hpctrain.plan.uncertainty.intervals import TIME_NAMES
from hpctrain.site.calibrate import (
    calibration_target,
    how_plans_use,
    write_site_calibration,
)
from hpctrain.spec.calibration import (
    Learned,
    OwnRun,
    SiteCalibration,
    SiteLearning,
    constants_digest,
)
from hpctrain.spec.loader import load_calibration, load_profile, load_run_spec
from hpctrain.spec.run import RunSpec
from tests.judged_runs import EXAMPLES

H100 = "H100-80GB SXM"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile of a directory that the user may write to."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "sites" / "ours.yaml"
    path.parent.mkdir()
    path.write_text("extends: h100x16\nname: ours\n")
    return path


def belief(names: tuple[str, ...]) -> Learned:
    """What has no mean but the first multiplier's, all with a deviation of 10 %."""
    count = len(names)
    rows = tuple(tuple(0.01 * (one == other) for other in range(count)) for one in range(count))
    return Learned(names=names, mean=(0.1, *[0.0] * (count - 1)), covariance=rows)


def learned(time: Learned | None = None) -> SiteCalibration:
    run = OwnRun(
        run="a-1f2e",
        day="2026-11-26",
        steps=50,
        measured_seconds=2.0,
        before_seconds=1.8,
        after_seconds=2.0,
    )
    taught = SiteLearning(
        time=time or belief(TIME_NAMES),
        memory=belief(MEMORY),
        runs=(run,),
        error=0.03,
        constants=constants_digest(load_calibration()),
    )
    return SiteCalibration(gpu=H100, learned={"megatron": taught}, provenance="own runs: 1")


def example() -> RunSpec:
    return load_run_spec(EXAMPLES / "llama7b.yaml").document


def planned_text(site: Path) -> str:
    loaded = load_profile(site)
    spec = example()
    return "\n".join(plan_lines(make_plan(spec, loaded.document, load_knowledge(loaded))))


def test_the_file_lies_beside_its_profile_and_is_used(site: Path) -> None:
    target = calibration_target(str(site), None)
    assert (target.path, target.before) == (site.with_name("ours.calibration.yaml"), None)
    write_site_calibration(target.path, learned())
    assert how_plans_use(target.path, str(site)).startswith("plans use it from now on")
    assert "Learned   from 1 run of this cluster until 2026-11-26 (a-1f2e)" in planned_text(site)


def test_a_profile_on_the_search_path_has_it_beside_it_too(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTRAIN_PROFILE_PATH", str(site.parent))
    target = calibration_target("ours", None)
    assert target.path == site.with_name("ours.calibration.yaml")
    write_site_calibration(target.path, learned())
    assert how_plans_use(target.path, "ours").startswith("plans use it from now on")


def test_a_file_that_the_profile_names_is_the_one_to_write_before_it_exists(site: Path) -> None:
    site.write_text("extends: h100x16\nname: ours\ncalibration: measured.yaml\n")
    target = calibration_target(str(site), None)
    assert target.path == site.with_name("measured.yaml")
    write_site_calibration(target.path, learned())
    assert how_plans_use(target.path, str(site)).startswith("plans use it from now on")
    elsewhere = site.with_name("other.yaml")
    write_site_calibration(elsewhere, learned())
    assert "write `calibration: other.yaml` into" in how_plans_use(elsewhere, str(site))


def test_a_packaged_profile_does_not_take_it_and_its_file_is_gone_on_from(site: Path) -> None:
    target = calibration_target("h100x16", None)
    assert target.path == Path("h100x16.calibration.yaml")
    write_site_calibration(target.path, learned())
    said = how_plans_use(target.path, "h100x16")
    assert "no plan uses it yet" in said
    assert "`extends: h100x16`" in said
    assert calibration_target("h100x16", None).before == learned()


def test_rates_are_never_used_silently(site: Path) -> None:
    rates = SiteCalibration(gpu=H100, product_efficiency=0.5, provenance="by hand")
    write_site_calibration(site.with_name("ours.calibration.yaml"), rates)
    assert "Measured  on this cluster, in place of packaged rates: products" in planned_text(site)
    site.with_name("ours.calibration.yaml").unlink()
    assert "Measured" not in planned_text(site)


def test_what_cannot_be_written_is_one_error_about_the_file_that_was_meant(site: Path) -> None:
    with pytest.raises(StorageError) as caught:
        write_site_calibration(Path("missing/x.yaml"), learned())
    assert str(caught.value) == "missing/x.yaml: cannot be written: No such file or directory"
    assert "--output" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("names: [products, ", "names: [attention, ", "a name is there twice"),
        ("mean: [0.1, ", "mean: [90.0, ", "must be at most 5"),
        ("- [0.01, 0.0, ", "- [-0.01, 0.0, ", "the covariance has a negative variance"),
        ("- [0.01, 0.0, ", "- [0.01, 0.004, ", "the covariance is not symmetric in row 2"),
        (f"gpu: {H100}", "gpu: A100-80GB SXM", "was measured on `A100-80GB SXM`"),
    ],
)
def test_a_file_edited_wrongly_is_an_error_with_its_line(
    site: Path, old: str, new: str, said: str
) -> None:
    path = site.with_name("ours.calibration.yaml")
    write_site_calibration(path, learned())
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    told = hpctrain("plan", "-p", str(site), str(EXAMPLES / "llama7b.yaml"))
    assert told.exit_code == 3
    assert said in told.stderr
    assert told.stderr.startswith(f"error: {path}:"), "with the line"


def test_multipliers_of_another_version_are_left_aside_loudly(site: Path) -> None:
    path = site.with_name("ours.calibration.yaml")
    names = ("products of old", *TIME_NAMES[1:])
    write_site_calibration(path, learned(belief(names)))
    loaded = load_profile(site)
    made = make_plan(example(), loaded.document, load_knowledge(loaded))
    assert any("What runs of megatron have taught here is not used" in one for one in made.warnings)


def test_the_order_of_multipliers_in_the_file_means_nothing(site: Path) -> None:
    path = site.with_name("ours.calibration.yaml")
    texts = []
    for names in (TIME_NAMES, TIME_NAMES[:1] + TIME_NAMES[:0:-1]):
        write_site_calibration(path, learned(belief(names)))
        texts.append(planned_text(site))
    assert texts[0] == texts[1]


def test_a_pair_cannot_vary_more_than_its_members() -> None:
    rows = ((0.01, 0.02), (0.02, 0.01))
    with pytest.raises(ValueError, match="exceeds what its variances allow"):
        Learned(names=("a", "b"), mean=(0.0, 0.0), covariance=rows)


def test_a_calibration_of_another_gpu_names_the_place_of_that_gpu(site: Path) -> None:
    path = site.with_name("ours.calibration.yaml")
    write_site_calibration(path, learned().model_copy(update={"gpu": "B200-SXM"}))
    with pytest.raises(InvalidInputError) as caught:
        load_knowledge(load_profile(site))
    (problem,) = caught.value.problems
    assert (problem.file, problem.line) == (str(path), 4)
