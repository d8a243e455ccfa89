"""The page about a run: what it shows, that nothing in it can act or load, and who may read it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.base.durable import append_line
from hpctrain.base.errors import NoSuchRunError
from hpctrain.cli.main import cli
from hpctrain.records.find import RunFiles
from hpctrain.records.kept_code import keep_script
from hpctrain.records.ledger import EventKind
from hpctrain.report.collect import (
    RunReport,
    ScriptVersion,
    Unread,
    collect_reports,
    script_versions,
)
from hpctrain.report.run_page import write_page
from tests.fabricated_runs import LAUNCHED, STARTED, SUBMITTED, Said, ended, fabricate, said
from tests.unit.page.markup_reader import Page, read
from tests.unit.report.conftest import collected

EVIL = "<script>alert(1)</script>\"onload='x'&"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
SECTIONS = ["Overview", "Learning", "Time", "Speed", "Memory", "Communication", "Checkpoints",
            "Events", "Software and script"]  # fmt: skip


def is_harmless(markup: str) -> Page:
    """Nothing is executed, and nothing is loaded from anywhere."""
    found = read(markup)
    assert not found.all("script") and not found.all("iframe") and not found.all("object")
    for element in found.elements:
        for name, value in element.attributes.items():
            assert not name.startswith("on"), element
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                assert value.startswith(("#", "data:")), element
    policies = [one for one in found.all("meta") if "http-equiv" in one.attributes]
    assert [one.attributes["content"] for one in policies] == [POLICY]
    style = "".join(one.text for one in found.all("style"))
    assert "url(" not in style and "@import" not in style
    return found


def cells(page: Page, row: str) -> list[str]:
    """The cells of the table's row that begins with a text."""
    found = [one.text.strip() for one in page.all("td")]
    start = found.index(row)
    return found[start : start + 4]


def test_a_page_has_every_section_and_the_contents_lead_to_them(report: RunReport) -> None:
    page = is_harmless(write_page([report]))
    assert [one.text for one in page.all("h2")] == SECTIONS
    anchors = {one.attributes["id"] for one in page.all("section")}
    assert {one.attributes["href"] for one in page.all("a")} == {f"#{one}" for one in anchors}
    empty = [one.text for one in page.all("p", "nothing")]
    assert empty == ["All launches have found the same."]
    assert len(page.all("svg", "chart")) == 14


def test_plan_and_reality_stand_beside_each_other(report: RunReport) -> None:
    page = read(write_page([report]))
    plan, speed = report.plan, report.speed
    assert plan is not None and plan.step_seconds is not None and speed is not None
    assert speed.step_seconds / plan.step_seconds == pytest.approx(1.07, abs=0.005)
    shown = [f"{1000 * seconds:.0f} ms" for seconds in (plan.step_seconds, speed.step_seconds)]
    assert cells(page, "Step time")[1:3] == shown
    worse = [one.text for one in page.all("span", "worse")]
    assert worse[0] == f"{speed.step_seconds / plan.step_seconds - 1:+.1%}"


def test_launches_are_marked_where_they_begin_with_their_causes(report: RunReport) -> None:
    page = read(write_page([report]))
    titles = [one.text for one in page.all("title")]
    crash = "Launch 3, attempt 3, continues from step 360 after: node failure. node n0007 does not"
    assert [one for one in titles if one.startswith(crash) and one.endswith("24 steps lost")]
    assert [one for one in titles if "after: preempted" in one and "lost" not in one]
    assert "dropped, trained again" in [one.text for one in page.all("li")]


def test_the_waterfall_and_the_losses_are_those_of_goodput(report: RunReport) -> None:
    spent = report.goodput
    assert spent is not None and sum(spent.seconds.values()) == pytest.approx(spent.wall_seconds)
    assert (spent.lost_steps, spent.failures) == (24, 1)
    page = read(write_page([report]))
    titles = [one.text for one in page.all("title")]
    assert f"in the queue: 5.17 h, {18600 / spent.wall_seconds:.1%} of the wall time" in titles
    assert cells(page, "node failure")[:2] == ["node failure", "1"]


def test_the_slow_node_is_named(report: RunReport) -> None:
    text = write_page([report])
    assert "Slower than the middle node: n0003 (+1" in text
    assert len(read(text).all("rect", "c8")) >= 1


def test_messages_are_shown_by_axis_and_by_rank(report: RunReport) -> None:
    assert report.messages is not None
    assert [one.axis for one in report.messages.axes] == ["tp", "dp", "pp"]
    assert report.messages.unit == "rank" and len(report.messages.matrix) == 64
    pairs = sum(value > 0 for row in report.messages.matrix for value in row)
    page = read(write_page([report]))
    assert len(page.all("rect", "heat")) == pairs


def test_several_runs_are_compared(run: RunFiles, other: RunFiles) -> None:
    page = is_harmless(write_page(collected(run, other)))
    assert cells(page, "optimizer.lr")[1:3] == ["2e-05", "4e-05"]
    heads = [one.text for one in page.all("h3")]
    assert heads[:6] == ["Results", "Loss", "Step time", "Throughput",
                         "Productive share of the wall time", "Where the time went"]  # fmt: skip
    ids = [one.attributes["id"] for one in page.elements if "id" in one.attributes]
    assert len(ids) == len(set(ids)) and "run-2-learning" in ids


def test_what_stands_in_records_cannot_act(report: RunReport) -> None:
    """The message of a rank in `reported_runs` is one as well."""
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in write_page([report])
    assert report.story is not None
    first = report.story.attempts[0]
    launch = first.launches[0].model_copy(
        update={"cause": EVIL, "reason": EVIL, "evidence": (EVIL, f"`{EVIL}`")}
    )
    attempt = first.model_copy(update={"launches": (launch,), "nodes": EVIL, "reason": EVIL})
    evil = report.model_copy(
        update={
            "run_id": EVIL,
            "directory": EVIL,
            "cluster": EVIL,
            "account": EVIL,
            "status": report.status.model_copy(update={"reason": f"`{EVIL}` {EVIL}"}),
            "story": report.story.model_copy(
                update={"attempts": (attempt, *report.story.attempts)}
            ),
            "spec": {EVIL: EVIL},
            "happenings": ((0, EVIL, EVIL),),
            "scripts": (
                ScriptVersion(sha256=EVIL, job_ids=(), text="1"),
                ScriptVersion(sha256=EVIL, job_ids=(1,), text=EVIL, changes=(EVIL,)),
            ),
            "unread": (Unread(part=EVIL, reason=EVIL),),
        }
    )
    for reports in ([evil], [evil, report]):
        page = is_harmless(write_page(reports))
        assert EVIL in page.all("title")[0].text or len(reports) > 1
        assert EVIL in [one.text for one in page.all("pre")]


@pytest.mark.parametrize(
    "entries",
    [SUBMITTED, (*SUBMITTED, STARTED), (*SUBMITTED, STARTED, LAUNCHED),
     (*SUBMITTED, STARTED, LAUNCHED, *ended("crash", EVIL, "stop")),
     (*SUBMITTED, said(EventKind.CONTROL, action="stop", user=EVIL, reason=EVIL))],
)  # fmt: skip
def test_a_run_of_which_little_is_known_has_a_page(tmp_path: Path, entries: Sequence[Said]) -> None:
    run = fabricate(tmp_path, entries=entries)
    page = is_harmless(write_page(collect_reports([run], None)))
    text = " ".join(one.text for one in page.elements)
    assert "plan cannot be read: plan.json cannot be read" in text
    assert "No step has been trained yet." in text


def test_damaged_files_are_named_and_take_no_other_part_with_them(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=(*SUBMITTED, STARTED, LAUNCHED), steps=30)
    for path in (run.layout.spec, run.layout.plan, run.layout.rank_times, run.layout.communication,
                 run.layout.software_lock):  # fmt: skip
        path.write_text("{ [ broken")
    run.layout.script.unlink()
    run.layout.checkpoints.rmdir()
    append_line(run.layout.metrics, '{"step": 31, "torn')
    run.layout.saves.write_text('{"schema_version": 9, "step": 1}\n')
    page = is_harmless(write_page(collect_reports([run], None)))
    text = " ".join(one.text for one in page.elements)
    for words in (
        "spec cannot be read: ",
        "checkpoints cannot be read: ",
        "script cannot be read: ",
        "has format version 9",
        "Cannot be shown: ",
    ):
        assert words in text, words


def test_a_run_without_losses_that_are_numbers(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=(*SUBMITTED, STARTED, LAUNCHED), steps=2, last_loss=None)
    page = is_harmless(write_page(collect_reports([run], None)))
    assert not re.search(r"\bnan\b|\binf\b", " ".join(str(one.attributes) for one in page.elements))


def test_the_page_of_a_long_run_is_small(report: RunReport) -> None:
    """Its curves have as many points as those of a run of a million steps."""
    points = tuple((float(step), 1.0 + step % 7) for step in range(2400))
    assert report.curves is not None
    names = ("loss", "loss_mean", "gradient_norm", "learning_rate", "step_seconds",
             "tokens_per_second", "mfu")  # fmt: skip
    curves = report.curves.model_copy(update=dict.fromkeys(names, points))
    assert len(write_page([report.model_copy(update={"curves": curves})])) < 700_000


def test_speed_is_that_of_usual_steps(report: RunReport) -> None:
    """The first step of each launch takes three times as long."""
    assert report.curves is not None and report.speed is not None
    slowest = max(value for _, value in report.curves.step_seconds if value is not None)
    assert slowest < 1.2 * report.speed.step_seconds
    assert report.speed.steps == 600 - 3


# -- Which scripts the jobs of a run had: one copy of each text, and the lines that differ ------


FIRST = "#!/bin/bash\n#SBATCH --nodes=2\nsrun train\n"


def submit(run: RunFiles, text: str, job_id: int) -> None:
    run.layout.script.write_text(text)
    run.ledger.append(EventKind.SUBMITTED, job_id=job_id, script_sha256=keep_script(run.layout))


def made(runs: Path) -> RunFiles:
    return fabricate(runs, entries=(said(EventKind.SUBMITTING),))


def test_the_same_script_is_kept_once(tmp_path: Path) -> None:
    run = made(tmp_path)
    submit(run, FIRST, 1)
    submit(run, FIRST, 2)
    kept = list((run.layout.directory / "scripts").iterdir())
    assert [path.stat().st_mode & 0o777 for path in kept] == [0o600]
    (one,) = script_versions(run.layout, run.ledger.events())
    assert (one.job_ids, one.text, one.changes) == ((1, 2), FIRST, ())


def test_an_edited_script_is_another_version(tmp_path: Path) -> None:
    run = made(tmp_path)
    submit(run, FIRST, 1)
    submit(run, FIRST.replace("=2", "=3"), 2)
    run.layout.script.write_text(FIRST)
    first, second, edited = script_versions(run.layout, run.ledger.events())
    assert (first.job_ids, second.job_ids, edited.job_ids) == ((1,), (2,), ())
    assert second.changes[1:4] == (" #!/bin/bash", "-#SBATCH --nodes=2", "+#SBATCH --nodes=3")
    assert edited.sha256 == first.sha256 and "+#SBATCH --nodes=2" in edited.changes


def test_a_run_of_an_older_hpctrain_has_kept_none(tmp_path: Path) -> None:
    run = fabricate(tmp_path)  # its ledger has the digest of another text
    old, now = script_versions(run.layout, run.ledger.events())
    assert (old.text, now.text, now.changes) == (None, "#!/bin/bash\n", ())


def test_a_submission_does_not_fail_for_its_copy(tmp_path: Path) -> None:
    run = made(tmp_path)
    (run.layout.directory / "scripts").write_text("in the way")
    assert keep_script(run.layout) is None
    run.layout.script.unlink()
    assert keep_script(run.layout) is None


# -- `hpctrain report`: where the page goes, and who may read it --------------------------------


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    directory = tmp_path / "runs"
    directory.mkdir()
    fabricate(directory, "gpt-a", entries=(*SUBMITTED, STARTED, LAUNCHED), steps=5)
    fabricate(directory, "gpt-b", entries=(*SUBMITTED, STARTED, LAUNCHED), steps=7)
    return directory


def written(*words: str, runs: Path) -> str:
    result = CliRunner().invoke(cli, ["report", *words, "--runs", str(runs), "--offline"],
                                catch_exceptions=False)  # fmt: skip
    assert result.exit_code == 0, result.output
    return result.output


def test_the_page_is_a_private_file_with_the_name_of_the_run(
    two_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o2770)  # what is made here belongs to a group, and mostly may be read by it
    monkeypatch.chdir(tmp_path)
    old = os.umask(0)
    try:
        assert written("gpt-a", runs=two_runs) == "gpt-a.html\n"
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "gpt-a.html").stat().st_mode) == 0o600


def test_several_runs_go_into_one_file(two_runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "both.html"
    assert written("gpt-a", "gpt-b", "-o", str(page), runs=two_runs) == f"{page}\n"
    assert "2 runs side by side" in page.read_text()


def test_a_run_that_is_named_twice_is_one_run(two_runs: Path) -> None:
    assert "side by side" not in written("gpt-a", "gpt-a", "-o", "-", runs=two_runs)


def test_a_dash_is_stdout(two_runs: Path) -> None:
    output = written("gpt-b", "-o", "-", runs=two_runs)
    assert output.startswith("<!doctype html>") and output.rstrip().endswith("</html>")


def test_slurm_is_not_asked_offline(two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Slurm was asked")

    monkeypatch.setattr("hpctrain.slurm.client.run_command", refuse)
    assert "Slurm was not asked" in written("gpt-a", "-o", "-", runs=two_runs)


def test_a_run_that_is_not_there(two_runs: Path) -> None:
    with pytest.raises(NoSuchRunError, match="no run `gpt-c`"):
        written("gpt-c", runs=two_runs)
