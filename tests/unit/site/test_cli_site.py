"""`profile detect`, `profile check` and `doctor` at the command line, with a Slurm of texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from command_line import hpctrain
from foreign_clusters import DGX_H100, UNIVERSITY, Answers
from virtual_clock import VirtualClock

from hpctrain.slurm import cluster_queries
from hpctrain.spec.loader import load_profile

OUT = "dgx.yaml"


@pytest.fixture
def dgx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Answers:
    monkeypatch.chdir(tmp_path)
    return serve(monkeypatch, DGX_H100)


def serve(
    monkeypatch: pytest.MonkeyPatch, texts: dict[str, str], failures: Mapping[str, str] = {}
) -> Answers:
    """Let all queries be answered by these texts."""
    answers = Answers(texts, failures)
    usual = cluster_queries.ClusterQueries.__init__.__kwdefaults__
    assert usual is not None
    changed = {**usual, "run": answers, "pause": lambda _: None}
    monkeypatch.setattr(cluster_queries.ClusterQueries.__init__, "__kwdefaults__", changed)
    return answers


def test_a_profile_goes_to_stdout_and_remarks_to_stderr(dgx: Answers, tmp_path: Path) -> None:
    done = hpctrain("profile", "detect")
    assert done.exit_code == 0
    assert done.stdout.startswith("# Detected by") and "6 queries; " in done.stderr
    assert "\n  gpu.memory\n" in done.stderr, "guesses are listed"
    assert all(len(line) <= 80 for line in done.stderr.splitlines())
    (tmp_path / OUT).write_text(done.stdout)
    assert load_profile(tmp_path / OUT).document.name == "dgx"


def test_a_file_is_written_once(dgx: Answers) -> None:
    done = hpctrain("profile", "detect", "-o", OUT)
    assert done.exit_code == 0 and not done.stdout and f"Wrote {OUT}" in done.stderr
    before = len(dgx.asked)
    again = hpctrain("profile", "detect", "-o", OUT)
    assert again.exit_code == 2 and len(dgx.asked) == before, "refused before Slurm is asked"
    assert hpctrain("profile", "check", OUT).exit_code == 0
    listed = hpctrain("profiles", f"./{OUT}")
    assert listed.exit_code == 0 and "dgx.yaml:" in listed.stdout


def test_check_ends_with_3_and_names_the_line(dgx: Answers, tmp_path: Path) -> None:
    hpctrain("profile", "detect", "-o", OUT)
    path = tmp_path / OUT
    path.write_text(path.read_text().replace("kill_wait: 30s", "kill_wait: 45s"))
    line = path.read_text()[: path.read_text().index("kill_wait:")].count("\n") + 1
    done = hpctrain("profile", "check", OUT)
    assert done.exit_code == 3 and f"loses work: {OUT}:{line}:" in done.stdout
    assert all(len(one) <= 80 for one in done.stdout.splitlines())
    found = json.loads(hpctrain("profile", "check", OUT, "--json").stdout)
    assert [one["field"] for one in found["differences"]] == ["slurm.kill_wait"]


def test_what_is_harmless_is_told_and_accepted(dgx: Answers, tmp_path: Path) -> None:
    hpctrain("profile", "detect", "-o", OUT)
    path = tmp_path / OUT
    path.write_text(path.read_text().replace("kill_wait: 30s", "kill_wait: 20s"))
    done = hpctrain("profile", "check", OUT)
    assert done.exit_code == 0 and "harmless: " in done.stdout


def test_doctor_ends_in_what_will_not_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    serve(monkeypatch, UNIVERSITY)
    hpctrain("profile", "detect", "-o", "uni.yaml")
    text = (tmp_path / "uni.yaml").read_text()
    (tmp_path / "uni.yaml").write_text(text.replace("slurm:\n", "continuation: chain\nslurm:\n"))
    done = hpctrain("doctor", "-p", "uni.yaml", "--runs", "/scratch/runs")
    assert done.exit_code == 0 and all(len(one) <= 80 for one in done.stdout.splitlines())
    last = done.stdout.partition("What will not work:")[2]
    assert "sbatch from nodes of `gpu`: not allowed" in last and "[AllocNodes" in last
    found = json.loads(hpctrain("doctor", "-p", "uni.yaml", "--json").stdout)["findings"]
    assert [one["topic"] for one in found if one["state"] == "fails"] == ["sbatch on nodes"]


def test_without_a_controller_the_machine_is_judged_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, virtual_clock: VirtualClock
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = serve(monkeypatch, DGX_H100, {"config": "away"})
    done = hpctrain("doctor")
    assert done.exit_code == 5 and "Python of" in done.stdout and "no answer" in done.stderr
    assert "nothing was found" not in done.stdout
    assert len(answers.asked) == cluster_queries.ATTEMPTS
    assert hpctrain("profile", "check", "h100x16").exit_code == 5
    assert hpctrain("profile", "detect").exit_code == 5


def test_a_machine_without_slurm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, virtual_clock: VirtualClock
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = hpctrain("profile", "detect")
    assert done.exit_code == 5 and "cannot run `scontrol`" in done.stderr


def test_slurm_that_is_not_on_path_is_found_in_the_usual_places(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "opt"
    place.mkdir()
    (place / "scontrol").touch(mode=0o755)
    monkeypatch.setattr(cluster_queries, "USUAL_PLACES", ("/nowhere", str(place)))
    monkeypatch.setenv("PATH", str(tmp_path))
    done = hpctrain("profile", "detect")
    assert done.exit_code == 5 and f"export PATH={place}:$PATH" in " ".join(done.stderr.split())


def test_an_unknown_partition(dgx: Answers) -> None:
    done = hpctrain("profile", "detect", "--partition", "nowhere")
    assert done.exit_code == 3 and "there are: batch, spot, admin" in done.stderr
