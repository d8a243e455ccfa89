"""`hpctrain monitoring`: what an administrator gets, and that nothing of theirs is replaced."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from command_line import hpctrain
from fetched_prometheus import fetched_prometheus
from ruamel.yaml import YAML

from hpctrain.observe.dashboard_data import DASHBOARD_NAMES


def names_below(directory: Path) -> set[str]:
    return {
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    }


def test_it_writes_what_it_lists(tmp_path: Path) -> None:
    listed = hpctrain("monitoring", "--list")
    outcome = hpctrain("monitoring", str(tmp_path / "new"))
    assert (listed.exit_code, outcome.exit_code) == (0, 0), outcome.stderr
    names = names_below(tmp_path / "new")
    assert names == set(listed.stdout.split())
    assert {"README.md", "prometheus.yml", "alertmanager.yml"} <= names
    assert {f"grafana/dashboards/{name}.json" for name in DASHBOARD_NAMES} <= names
    assert [name for name in names if name.startswith("rules/") and name.endswith(".yaml")]


def test_a_listing_writes_nothing(tmp_path: Path) -> None:
    outcome = hpctrain("monitoring", str(tmp_path / "new"), "--list")
    assert f"{tmp_path}/new/README.md" in outcome.stdout
    assert not (tmp_path / "new").exists()


def test_changed_files_are_kept_without_force(tmp_path: Path) -> None:
    assert hpctrain("monitoring", str(tmp_path)).exit_code == 0
    assert hpctrain("monitoring", str(tmp_path)).exit_code == 0, "equal files are no obstacle"
    (tmp_path / "prometheus.yml").write_text("ours\n")
    (tmp_path / "README.md").unlink()
    refused = hpctrain("monitoring", str(tmp_path))
    assert refused.exit_code == 2 and "prometheus.yml" in refused.stderr
    assert not (tmp_path / "README.md").exists(), "nothing is written"
    assert hpctrain("monitoring", str(tmp_path), "--force").exit_code == 0
    assert (tmp_path / "prometheus.yml").read_text() != "ours\n"


def test_a_directory_is_needed() -> None:
    assert hpctrain("monitoring").exit_code == 2


@pytest.mark.nightly("a real Prometheus, which is fetched")
def test_programs_accept_the_examples(tmp_path: Path) -> None:
    programs = fetched_prometheus()
    hpctrain("monitoring", str(tmp_path))
    command = [programs.promtool, "check", "config", "prometheus.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"SUCCESS: \d+ rules found", done.stdout + done.stderr)


@pytest.mark.nightly("a real Prometheus, which is fetched")
def test_amtool_accepts_the_routes(tmp_path: Path) -> None:
    programs = fetched_prometheus()
    hpctrain("monitoring", str(tmp_path))
    command = [str(programs.directory / "bin" / "amtool"), "check-config", "alertmanager.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["dashboards", "datasources"])
def test_provisioning_has_what_grafana_reads(name: str, tmp_path: Path) -> None:
    hpctrain("monitoring", str(tmp_path))
    place = tmp_path / "grafana" / "provisioning" / name / "hpctrain.yaml"
    document = YAML(typ="safe", pure=True).load(place.read_text())
    assert document["apiVersion"] == 1
    (entry,) = document["providers" if name == "dashboards" else "datasources"]
    assert entry["type"] == ("file" if name == "dashboards" else "prometheus")
    if name == "dashboards":
        assert entry["options"]["path"] in (tmp_path / "README.md").read_text()
