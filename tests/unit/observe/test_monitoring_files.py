"""What an administrator gets to watch runs: alert rules, dashboards, and what real programs say."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from command_line import hpctrain
from fetched_prometheus import fetched_prometheus
from ruamel.yaml import YAML

from hpctrain.cli.main import cli
from hpctrain.judge.causes import FAILURE_CAUSES
from hpctrain.observe.dashboard_data import DASHBOARD_NAMES
from hpctrain.observe.families import FAMILIES
from hpctrain.observe.monitoring import RULES, with_delays
from hpctrain.runs.state import RunState
from hpctrain.serve.replica_lives import ASKED_FOR

ROOT = Path(__file__).resolve().parents[3]
PLAYED = tuple(
    ROOT / "tests" / "observe_rules" / name
    for name in ("alerts-test.yaml", "alerts-over-days-test.yaml")
)
# The commands about services.
SERVE = {"plan", "up", "status", "scale", "restart", "down", "test"}
DOCUMENT = ROOT / "docs" / "alerts.md"
_LABELS = {family.sample_name: {*family.all_labels} for family in FAMILIES}
_LABELS |= {
    f"{family.name}_count": {*family.all_labels}
    for family in FAMILIES
    if family.type == "histogram"
}
# Of Prometheus itself.
_LABELS |= {"up": {"job", "instance"}}
_SELECTOR = re.compile(r"\b((?:hpctrain_\w+|up\b))(?:\{([^}]*)\})?")


def rules() -> list[dict[str, Any]]:
    document = YAML(typ="safe", pure=True).load(RULES.read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def selectors() -> Iterator[tuple[str, dict[str, str]]]:
    """Every metric in the rules that is not a recorded one, with the labels that are compared."""
    for rule in rules():
        text = re.sub(r"\w+:\w+(:\w+)?", "", rule["expr"])
        without_labels = re.sub(r"\b(by|on|group_left|group_right) *\([^)]*\)", "", text)
        for name, braces in _SELECTOR.findall(without_labels):
            if name == "hpctrain_run_state" and not braces:
                continue  # the label of the state set has the name of its family
            compared = re.findall(r'(\w+) *=~? *"([^"]*)"', braces)
            yield name, dict(compared)


def promtool(*words: str) -> str:
    command = [fetched_prometheus().promtool, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly("a real Prometheus, which is fetched")
def test_promtool_accepts_the_rules() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(RULES))


@pytest.mark.parametrize("played", PLAYED, ids=lambda path: path.stem)
@pytest.mark.nightly("a real Prometheus, which is fetched")
def test_promtool_plays_them(played: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", str(played))


def test_each_alert_is_played_firing_and_not_firing() -> None:
    text = "".join(path.read_text() for path in PLAYED)
    for name in {rule["alert"] for rule in alerts()}:
        blocks = re.findall(
            rf'expr: .*ALERTS\{{alertname="{name}"[^\n]*\n?[^\n]*exp_samples: *(\S+)', text
        )
        assert "[]}" in blocks or "[]" in blocks, f"{name} is never expected to be silent"
        assert set(blocks) - {"[]}", "[]"}, f"{name} is never expected to fire"


def test_every_metric_and_label_is_exposed() -> None:
    found = list(selectors())
    assert len(found) > 30
    for name, compared in found:
        assert name in _LABELS, f"nothing exposes {name}"
        unknown = set(compared) - _LABELS[name]
        assert not unknown, f"{name} has no label {unknown}"


def test_every_recorded_name_is_recorded_before_it_is_used() -> None:
    known: set[str] = set()
    for rule in rules():
        used = set(re.findall(r"\b(?:run|cluster|service):\w+(?::\w+)?", rule["expr"]))
        assert used <= known, f"{rule.get('record') or rule['alert']} uses {used - known}"
        if "record" in rule:
            known.add(rule["record"])


def test_states_and_causes_are_those_of_the_program() -> None:
    states, causes = set(), []
    for _, compared in selectors():
        if "hpctrain_run_state" in compared:
            states |= set(compared["hpctrain_run_state"].split("|"))
        if "cause" in compared:
            causes.append(set(compared["cause"].split("|")))
    assert states == {"RUNNING", "PENDING", "UNKNOWN"} and states <= set(RunState)
    assert Counter(map(frozenset, causes)) == Counter(
        {frozenset(FAILURE_CAUSES): 2, frozenset({"hang"}): 2}
    )


def test_what_ends_a_replica_without_a_failure_is_known() -> None:
    """All other causes are failures of a service: also those that no retry helps."""
    (left_out,) = (
        set(match[1].split("|"))
        for rule in rules()
        if (match := re.search(r'cause!~"([^"]*)"', rule["expr"]))
    )
    assert left_out == {str(cause) for cause in ASKED_FOR}


def test_a_person_is_told_what_to_type() -> None:
    """Each alert has a severity, a page, and commands that exist."""
    known = cli.list_commands(click.Context(cli))
    headings = DOCUMENT.read_text().lower()
    for rule in alerts():
        notes = rule["annotations"]
        assert set(notes) == {"summary", "description", "runbook"}, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket", "info")
        assert notes["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"
        assert f"\n### {rule['alert'].lower()}\n" in headings
        commands = re.findall(
            r"hpctrain ([a-z]+)(?: ([a-z]+))?(?= \{\{| -| *$|`|,)", notes["description"]
        )
        assert commands or "sinfo" in notes["description"], rule["alert"]
        for command, part in commands:
            parts = SERVE if command == "serve" else {""}
            assert command in known and part in parts, f"hpctrain {command} {part}"


def test_ten_kinds_of_trouble() -> None:
    """NaN and spikes have one alert each."""
    names = {rule["alert"] for rule in alerts()}
    assert len([name for name in names if "Service" not in name]) == 11
    assert len([name for name in names if "Service" in name]) == 7


def test_a_rehearsal_shortens_what_alerts_wait_and_nothing_else() -> None:
    text = RULES.read_text()
    assert with_delays("      for: 15m\n", 0.01) == "      for: 9000ms\n"
    assert with_delays("      for: 2h\n", 0) == "      for: 0ms\n"
    waits = [rule["for"] for rule in alerts() if "for" in rule]
    shortened = with_delays(text, 1 / 60)
    assert [line for line in shortened.splitlines() if "for: " in line and "ms" in line] == [
        f"        for: {int(wait.removesuffix('m')) * 1000}ms" for wait in waits
    ]
    assert re.sub(r"\n +for: \S+", "", shortened) == re.sub(r"\n +for: \S+", "", text)


def aggregations_of_series(expression: str) -> Iterator[str]:
    """What is before the outermost parenthesis with a clause `by` around each metric of a run."""
    openers: list[str] = []
    for index, letter in enumerate(expression):
        if letter == "(":
            openers.append(expression[:index].split("\n")[-1].strip())
        elif letter == ")":
            openers.pop()
        elif re.match(r"(?<![\w:])hpctrain_run_\w+(?!\w)", expression[index:]) and (
            not re.match(r"[\w:\"{]", expression[index - 1])
        ):
            yield next((one for one in openers if re.search(r"\bby \(.*\)$", one)), "")


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule.get("alert", "recorded")))
def test_two_exporters_that_see_a_service_give_one_alert(rule: dict[str, Any]) -> None:
    """The maximum of equal series comes before anything else is done with them."""
    for found in re.finditer(r"hpctrain_service_\w+", rule["expr"]):
        before = rule["expr"][: found.start()]
        if found.start() and before[-1] == ":":
            continue  # a recorded one
        assert re.search(r"max by \(service(, \w+)*\) \(\s*((rate|m\w+_over_time)\()?$", before), (
            rule["expr"]
        )


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule.get("alert", "recorded")))
def test_two_exporters_that_see_a_run_give_one_alert(rule: dict[str, Any]) -> None:
    for opener in aggregations_of_series(rule["expr"]):
        assert re.search(r"\b(max|sum) by \(run(, \w+)?\)$", opener), rule["expr"]


# -- `hpctrain monitoring`: what an administrator gets, and that nothing of theirs is replaced --


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
