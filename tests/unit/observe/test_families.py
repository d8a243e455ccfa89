"""The table of metric families, and the text that is made of it."""

from __future__ import annotations

import math
import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as older_families

from hpctrain.observe.families import BY_NAME, FAMILIES
from hpctrain.observe.samples import Samples, exposed, own_sample
from hpctrain.telemetry.scraped_text import Histogram

# Base units of OpenMetrics that we use; a rate of tokens has none.
UNITS = {"seconds", "bytes", "ratio", ""}


def test_names_follow_openmetrics() -> None:
    assert len(BY_NAME) == len(FAMILIES), "a name occurs twice"
    for family in FAMILIES:
        assert re.fullmatch(r"hpctrain(_[a-z]+)+", family.name), family.name
        assert family.unit in UNITS, family.name
        assert family.unit == "" or family.name.endswith(f"_{family.unit}"), family.name
        for unit in UNITS - {"", family.unit}:
            assert not family.name.endswith(f"_{unit}"), f"{family.name} has no unit {unit}"
        assert not family.name.endswith(("_total", "_info", "_count", "_sum", "_bucket"))
        assert family.help.endswith("."), family.name


def test_no_family_has_a_label_for_ranks() -> None:
    allowed = {"node", "job", "part", "axis", "stage", "cause", "category", "window", "currency"}
    allowed |= {"user", "account", "cluster", "engine", "model", "layout", "gpu"}
    allowed.add("hpctrain_run_state")
    of_runs = [family for family in FAMILIES if family.subject == "run"]
    assert {label for family in of_runs for label in family.labels} <= allowed


def samples() -> Samples:
    """Hostile values in every kind of family."""
    out = Samples("run", 'bad"run\\\n')
    out.put_info(
        user="<script>",
        account=None,
        cluster="c",
        engine="ddp",
        model="m",
        layout="tp 1",
        gpu=None,
    )
    out.put_state("RUNNING", ["RUNNING", "NOT SUBMITTED"])
    out.put("loss", math.nan)
    out.put("step", 12)
    out.put("step_seconds", None)
    out.put_each("launch_ends", "cause", {'quo"te': 2, "hang": 1})
    return out


def test_the_text_is_read_as_it_was_meant() -> None:
    text = exposed(samples().samples, open_metrics=True).decode()
    assert text.endswith("# EOF\n")
    found = {metric.name: metric for metric in text_string_to_metric_families(text)}
    assert set(found) == {
        *("hpctrain_run", "hpctrain_run_state", "hpctrain_run_loss", "hpctrain_run_step"),
        "hpctrain_run_launch_ends",
    }
    (info,) = found["hpctrain_run"].samples
    assert info.labels["run"] == 'bad"run\\\n'
    assert (info.name, info.labels["user"], info.labels["account"]) == (
        "hpctrain_run_info",
        "<script>",
        "",
    )
    states = {
        one.labels["hpctrain_run_state"]: one.value for one in found["hpctrain_run_state"].samples
    }
    assert states == {"RUNNING": 1.0, "NOT SUBMITTED": 0.0}
    assert math.isnan(found["hpctrain_run_loss"].samples[0].value)
    ends = {one.labels["cause"]: one.value for one in found["hpctrain_run_launch_ends"].samples}
    assert ends == {'quo"te': 2.0, "hang": 1.0}


def test_node_exporter_can_read_the_older_text() -> None:
    """Its collector knows neither infos nor state sets, and no `# UNIT`."""
    text = exposed(samples().samples, open_metrics=False).decode()
    assert "# EOF" not in text and "# UNIT" not in text
    types = {metric.name: metric.type for metric in older_families(text)}
    assert set(types.values()) <= {"gauge", "counter"}
    names = {sample.name for metric in older_families(text) for sample in metric.samples}
    assert {"hpctrain_run_info", "hpctrain_run_launch_ends_total"} <= names


def test_every_family_can_be_written() -> None:
    """prometheus_client checks units, types and names of samples as OpenMetrics wants them."""
    everything, serving = Samples("run", "one"), Samples("service", "two")
    for family in FAMILIES:
        if family.subject == "run":
            everything._put(family, 1.0, dict.fromkeys(family.labels, "x"))
        elif family.subject == "service" and family.type == "histogram":
            name = family.name.removeprefix("hpctrain_service_")
            one = Histogram(((1.0, 2.0), (math.inf, 3.0)), 4.5)
            serving.put_histogram(name, one, **dict.fromkeys(family.labels, "x"))
        elif family.subject == "service":
            serving._put(family, 1.0, dict.fromkeys(family.labels, "x"))
    own = [
        own_sample(family.name, 1, **dict.fromkeys(family.labels, "x"))
        for family in FAMILIES
        if not family.subject
    ]
    text = exposed([*everything.samples, *serving.samples, *own], open_metrics=True).decode()
    assert {metric.name for metric in text_string_to_metric_families(text)} == set(BY_NAME)
    assert all(f"# HELP {name} " in text for name in BY_NAME)


@pytest.mark.parametrize("labels", [{}, {"cause": "hang", "rank": "3"}])
def test_labels_that_a_family_does_not_have_are_a_bug(labels: dict[str, str]) -> None:
    with pytest.raises(AssertionError):
        Samples("run", "one").put("launch_ends", 1, **labels)
