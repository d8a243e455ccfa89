"""`plan` with its options: what is printed, in how many columns, and with which exit code."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from command_line import Outcome, hpctrain, on_terminal

ROOT = Path(__file__).resolve().parents[3]
GPT175B = str(ROOT / "examples/gpt175b.yaml")
LLAMA7B = str(ROOT / "examples/llama7b.yaml")
TINY = str(ROOT / "examples/gpt-tiny.yaml")
FREE = ["--set", "parallel=auto", "--set", "batch.micro=auto", "--set", "recompute=auto"]


def variant(options: list[str]) -> Any:
    return pytest.param(options, marks=pytest.mark.variant)


def plan(profile: str, spec: str, *options: str, code: int = 0) -> Outcome:
    outcome = hpctrain("plan", "-p", profile, spec, *options)
    assert outcome.exit_code == code, outcome.transcript()
    return outcome


def document(profile: str, spec: str, *options: str, code: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(plan(profile, spec, *options, "--json", code=code).stdout)
    return told


@pytest.mark.parametrize(
    "options",
    [
        variant(["a100x64", GPT175B, *FREE, "--explain"]),
        variant(["a100x64", GPT175B, "--explain"]),
        ["a100x1", LLAMA7B, "--deadline", "48h"],
        variant(["islands10b", LLAMA7B, *FREE, "--set", "resources.gpus=64", "--explain"]),
        ["sandbox", TINY, *FREE, "--explain"],
    ],
)
def test_lines_fit_into_80_columns(options: list[str]) -> None:
    lines = click.unstyle(on_terminal(80, "plan", "-p", *options)).splitlines()
    assert not [line for line in lines if len(line) > 80]


def test_a_pipe_gets_whole_paragraphs() -> None:
    told = plan("a100x64", GPT175B, *FREE, "--explain")
    submitted = hpctrain("submit", "-p", "a100x64", GPT175B, "--dry-run")
    for text in (told.stdout, submitted.stderr):
        assert re.search(r"^Plan .* 174.6B parameters$", text, re.MULTILINE), text


def test_advice_is_a_command_that_can_be_pasted(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(Path(GPT175B).read_text())
    first = document("a100x64", str(own))["advice"][0]["command"]
    assert first == f"hpctrain plan -p a100x64 {own} --apply"
    assert hpctrain(*shlex.split(first)[1:]).exit_code == 0


def test_before_and_below_the_plan_training_takes_as_long() -> None:
    text = plan("a100x64", GPT175B).stdout
    before = re.search(r"; ([\d.]+) d of it training", text)
    assert before is not None
    assert f"= {before[1]} d of training" in text


def test_explain_says_what_others_lose_and_how_long_it_took() -> None:
    text = plan("a100x64", GPT175B, *FREE, "--explain", "--top", "3").stdout
    assert "candidates in " in text and " break a rule" in text
    assert "Winner    tp " in text
    doubt = text[text.index("Doubt     of ±") : text.index("Search    ")]
    assert "what layouts like this one share " in doubt.replace("\n          ", " ")
    others = text[text.index("Other meshes") : text.index("The winner with")]
    assert others.count(" · pp ") == 3
    assert "% · pp" not in others and "%" in others


def test_explain_sets_a_given_layout_beside_the_best_one() -> None:
    told = document("a100x64", GPT175B, "--explain", "--top", "2")["explanation"]
    assert told["given"]["layout"]["tp"] == 8 and told["given"]["layout"]["vpp"] == 3
    assert told["given"]["step_seconds"] >= told["winner"]["step_seconds"] / 1.01
    assert len(told["others"]) == 2 and told["search_seconds"] > 0
    text = plan("a100x64", GPT175B, "--explain").stdout
    assert "Given     " in text


def test_json_has_the_same_as_the_text() -> None:
    told = document("a100x64", GPT175B, *FREE, "--explain")
    plan_told, explanation = told["plan"], told["explanation"]
    assert explanation["winner"]["step_seconds"] == pytest.approx(plan_told["step_seconds"])
    counts = explanation["counts"]
    assert counts == plan_told["search"]
    assert counts["enumerated"] == sum(counts[n] for n in ("infeasible", "too_large", "fitting"))
    assert told["forecast"]["step_seconds"] == plan_told["step_seconds"]
    assert told["spot"]["recommended"] in ("spot", "on demand")


def test_sizes_are_compared_and_the_best_is_shown() -> None:
    sizes = ["--gpus", "64,100,128,1024"]
    text = plan("a100x64", GPT175B, *FREE, *sizes, "--by", "gpu-hours").stdout
    rows = [line.split() for line in text.splitlines()[1:5]]
    assert [row[0] for row in rows] == ["64", "100", "128", "1024"]
    assert "100 GPUs do not fill nodes of 8 GPUs" in text and "more than the 512" in text
    hours = {int(row[0]): float(row[4].replace(",", "")) for row in rows if row[1] != "-"}
    best = min(hours, key=lambda gpus: hours[gpus])
    assert f"({best // 8} nodes x 8 GPUs)" in text
    fastest = document("a100x64", GPT175B, *FREE, *sizes)["plan"]
    assert fastest["layout"]["tp"] * fastest["layout"]["pp"] * fastest["layout"]["dp"] == 128


def test_when_no_size_works_the_last_refusal_is_told() -> None:
    outcome = plan("a100x64", GPT175B, "--gpus", "100,1024", code=4)
    assert "1024 GPUs are more than the 512" in outcome.stderr and outcome.stdout == ""


def test_the_cheapest_plan_within_budget_and_deadline() -> None:
    told = document("a100x64", GPT175B, *FREE, "--budget", "1100000usd", "--deadline", "70d")
    assert told["budget"]["chosen"] is not None
    cost = told["forecast"]["cost"]
    assert cost["amount"] <= 1_100_000 and cost["currency"] == "USD"
    spread = told["forecast"]["spread"]
    assert spread["most_seconds"] <= 70 * 86400
    assert cost["least_amount"] < cost["amount"] < cost["most_amount"] <= 1_100_000
    assert cost["most_amount"] == spread["most_gpu_hours"] * cost["per_gpu_hour"]


def test_what_is_missing_is_said_with_exit_code_4() -> None:
    outcome = plan("a100x64", GPT175B, *FREE, "--budget", "1000usd", "--deadline", "2d", code=4)
    assert "no plan of" in outcome.stdout and "the deadline needs at least" in outcome.stdout
    assert "no plan meets the budget" in outcome.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "64,x"], "is no list of GPU counts"),
        (["--gpus", "0"], "is no list of GPU counts"),
        (["--top", "-1"], "--top"),
        (["--by", "luck"], "luck"),
        (["--budget", "many"], "--budget"),
        (["--deadline", "soon"], "--deadline"),
        (["--budget", "5eur"], "EUR cannot be compared"),
    ],
)
def test_wrong_options_are_refused(options: list[str], words: str) -> None:
    assert words in plan("a100x64", GPT175B, *options, code=2).stderr


def test_a_budget_needs_a_predicted_time() -> None:
    outcome = plan("sandbox", TINY, "--deadline", "1d", code=2)
    assert "need a predicted step time" in outcome.stderr


def profile_with(tmp_path: Path, old: str, new: str) -> str:
    text = (ROOT / "cluster_profiles/a100x64.yaml").read_text()
    assert old in text
    path = tmp_path / "site.yaml"
    path.write_text(text.replace(old, new))
    return str(path)


def test_a_gpu_that_nobody_knows_is_refused_with_its_position(tmp_path: Path) -> None:
    text = (ROOT / "cluster_profiles/a100x64.yaml").read_text()
    start = text.index("  peak:")
    path = tmp_path / "site.yaml"
    path.write_text(
        (text[:start] + text[text.index("nvlink:") :]).replace("type: a100", "type: z9")
    )
    line = path.read_text().splitlines().index("  type: z9") + 1
    error = plan(str(path), GPT175B, code=3).stderr
    assert f"site.yaml:{line}: GPU `z9` is not in the catalogue" in error
    assert "to add it" in error


def test_a_gpu_with_peak_and_bandwidth_needs_no_catalogue(tmp_path: Path) -> None:
    path = profile_with(tmp_path, "  type: a100\n", "  type: z9\n  memory_bandwidth: 3TB/s\n")
    assert document(path, GPT175B)["plan"]["step_seconds"] > 0


def test_peak_left_empty_on_purpose_means_no_times(tmp_path: Path) -> None:
    told = document("sandbox", TINY)
    assert told.keys() == {"schema_version", "plan"}
    assert told["plan"]["step_seconds"] is None and told["plan"]["prediction"] is None
    assert any("Step time is not predicted" in reason for reason in told["plan"]["reasons"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("precision=fp16", "not in fp16"),
        pytest.param("optimizer.offload=cpu", "state on cpu", marks=pytest.mark.variant),
    ],
)
def test_submit_refuses_what_plan_only_warns_about(override: str, words: str) -> None:
    options = ["--set", override, "--set", "parallel=auto"]
    assert words in plan("a100x64", GPT175B, *options).stderr
    outcome = hpctrain("submit", "-p", "a100x64", GPT175B, *options, "--dry-run")
    assert outcome.exit_code == 3 and outcome.stdout == ""
    errors = [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]
    (line,) = [line for line in errors if "data." not in line]
    assert words in line and f"--set {override}: " in line


@pytest.mark.variant("test_sizes_are_compared_and_the_best_is_shown")
def test_the_least_memory_can_be_asked_for() -> None:
    quick = document("a100x64", GPT175B, *FREE)["plan"]
    lean = document("a100x64", GPT175B, *FREE, "--by", "memory")["plan"]

    def peak(one: dict[str, Any]) -> int:
        return max(sum(stage.values()) for stage in one["memory"])

    assert peak(lean) < peak(quick) and lean["step_seconds"] > quick["step_seconds"]
