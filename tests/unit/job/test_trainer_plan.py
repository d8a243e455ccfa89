"""What people are told before the queue about a run with a trainer of its own, and its start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from command_line import Outcome, hpctrain, on_terminal

from hpctrain.job.trainer_forecast import KnownPace, known_pace, trainer_facts
from hpctrain.job.trainer_run import PreparedTrainerRun, prepare_any
from hpctrain.plan.forecast.documents import Forecast
from hpctrain.plan.forecast.predict import forecast as closed_form
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind, Ledger
from hpctrain.records.run_records import SaveRecord, StepMetrics, append_metrics, append_save
from hpctrain.simulate.forecasts import forecast_run, scenario_of
from hpctrain.spec.loader import adapter_names

ROOT = Path(__file__).resolve().parents[3]
SPEC = """\
name: own
trainer:
  adapter: dcp
  command: [python, train.py, --output, "{output}", --resume, "{resume}"]
  signal: {save: TERM}
  metrics: [{output: 'step (?P<step>\\d+)'}]
  done: {step: 200000}
resources: {gpus: 16}
"""
LEVEL_1 = ["--set", "trainer.signal=null"]
LEVEL_0 = [*LEVEL_1, "--set", "trainer.checkpoint=null", "--set", "trainer.command=[python, a.py]"]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    file = tmp_path / "own.yaml"
    file.write_text(SPEC)
    (tmp_path / "train.py").touch()
    return file


def plan(spec: Path, *options: str, code: int = 0) -> Outcome:
    outcome = hpctrain("plan", "-p", "a100x64", str(spec), *options)
    assert outcome.exit_code == code, outcome.transcript()
    return outcome


def forecast(spec: Path, *options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(spec, *options, "--json").stdout)["forecast"]
    return found


def prepared(spec: Path, runs: Path, *overrides: str) -> PreparedTrainerRun:
    found = prepare_any(spec, "a100x64", overrides, runs=runs)
    assert isinstance(found, PreparedTrainerRun)
    return found


def measured_run(
    spec: Path, runs: Path, *overrides: str, steps: int = 100, each: float = 2.0, save: float = 5.0
) -> RunLayout:
    """Write a run whose only launch has started in 30 s, and saved for `save` s every 20 steps."""
    run = prepared(spec, runs, *overrides)
    layout = RunLayout(runs / run.run_id)
    layout.directory.mkdir(parents=True)
    for path, text in run.own_texts(layout):
        path.write_text(text)
    layout.plan.write_text(run.plan.model_dump_json())
    ledger, time = Ledger(layout.ledger), 1e9
    ledger.append(EventKind.LAUNCH_STARTED, time=time, epoch=1, launch=1, resume_step=0)
    time += 30.0
    for step in range(1, steps + 1):
        time += each
        known = dict.fromkeys(StepMetrics.model_fields)
        del known["schema_version"], known["profiled"]
        row = known | {"step": step, "epoch": 1, "time": time}
        append_metrics(layout, StepMetrics.model_validate(row))
        if step % 20 == 0:
            row = {"step": step, "epoch": 1, "time": time, "stall_seconds": None}
            row |= {"publish_seconds": 1.0, "size_bytes": 10}
            append_save(layout, SaveRecord.model_validate(row))
            time += save
    return layout


# -- Text -----------------------------------------------------------------------------------------


def test_nothing_is_said_that_nobody_knows(spec: Path) -> None:
    """No parameters, tokens, layout or memory: of this trainer nobody has told them."""
    text = plan(spec, "--step-time", "1.9s").stdout + plan(spec).stdout
    assert not re.search(r"param|token|tp 1|MFU|GiB|Fits|micro", text), text
    assert text.count("Memory    unknown: hpctrain does not know what this trainer needs") == 2
    known = json.loads(plan(spec, "--step-time", "1.9s", "--json").stdout)
    assert known["forecast"]["tokens"] is None
    assert known["forecast"]["checkpoint"]["total_bytes"] is None
    assert known["plan"]["kind"] == "trainer" and known["plan"]["level"] == 3
    assert [one["number"] for one in known["levels"]] == [0, 1, 2, 3, 4]


def test_time_is_unknown_until_somebody_says_it(spec: Path) -> None:
    text = plan(spec).stdout
    assert text.startswith("Takes     unknown until steps are measured; `--step-time 1.9s`")
    assert "Costs" not in text and "forecast" not in json.loads(plan(spec, "--json").stdout)
    text = plan(spec, "--set", "trainer.done={}", "--set", "trainer.done.file=final.pt").stdout
    assert text.startswith("Takes     unknown: the run ends with a file")


def test_level_next_one_and_commands_are_told(spec: Path) -> None:
    expected = """\
Level     3 of 4: restarts, resumes, saves when asked, reports steps
Next      level 4 (`trainer.talks`): all ranks save and stop at the same step
Done      when it exits with 0 and step 200,000 is reported or saved
First     python train.py --output {output}
Later     python train.py --output {output} --resume {resume}
Needs     `dcp.save(..., checkpoint_id={output}/step-N)`"""
    for words in (["plan", "-p", "a100x64"], ["submit", "--dry-run", "-p", "a100x64"]):
        outcome = hpctrain(*words, str(spec))
        assert expected in (outcome.stdout if words[0] == "plan" else outcome.stderr)
    alone = hpctrain("validate", str(spec))
    assert alone.stdout == f"{spec}: ok (run spec)\n" and expected in alone.stderr
    told = hpctrain("validate", "-p", "a100x64", str(spec)).stdout
    told = " ".join(told.split())
    for sentence in (
        "ok trainer: level 3 of 4: restarts, resumes, saves when asked, reports steps",
        "note plan: next is level 4 (`trainer.talks`): all ranks save and stop at the same step",
        "ok trainer: done when it exits with 0 and step 200,000 is reported or saved",
        "ok trainer: the first launch runs python train.py --output {output}",
        "? trainer: it needs `dcp.save(",
    ):
        assert sentence in told, told


@pytest.mark.parametrize(
    ("overrides", "level"),
    [
        (LEVEL_0, "0 of 4: restarts; also reports steps"),
        (LEVEL_1, "1 of 4: restarts, resumes; also reports steps"),
        (["--set", "trainer.metrics=[]"], "2 of 4: restarts, resumes, saves when asked"),
        (
            ["--set", "trainer.talks=true"],
            "4 of 4: restarts, resumes, saves when asked, reports steps, agrees on stops",
        ),
    ],
)
def test_each_level_is_told(spec: Path, overrides: list[str], level: str) -> None:
    text = plan(spec, *overrides).stdout
    assert f"Level     {level}\n" in text
    assert ("Next" in text) is not level.startswith("4")


@pytest.mark.parametrize(
    ("silence", "line", "check"),
    [
        (
            "",
            "Unseen    hangs: it tells no steps, and `trainer.silence` is not set\n",
            "note trainer: unseen are hangs: it tells no steps, and `trainer.silence` is not set",
        ),
        (
            "  silence: 45min\n",
            "Hangs     after 45 min without a line or a changed file (`trainer.silence`)\n",
            "ok trainer: hangs are noticed after 45 min without a line or a changed file",
        ),
    ],
)
def test_what_shows_a_hang_without_steps_is_told(
    spec: Path, silence: str, line: str, check: str
) -> None:
    without = SPEC.replace("  metrics: [{output: 'step (?P<step>\\d+)'}]\n", "")
    spec.write_text(without.replace("  done:", f"{silence}  done:"))
    assert line in plan(spec).stdout
    assert line in hpctrain("validate", str(spec)).stderr
    told = " ".join(hpctrain("validate", "-p", "a100x64", str(spec)).stdout.split())
    assert check in told, told


def test_the_supervisor_misses_output_as_long_as_the_spec_says(spec: Path, tmp_path: Path) -> None:
    by_steps = prepared(spec, tmp_path).supervise
    assert (by_steps.life, by_steps.stall_seconds) == ("steps", 600.0)
    without = ("trainer.metrics=[]", "trainer.silence=45min")
    by_output = prepared(spec, tmp_path, *without).supervise
    assert (by_output.life, by_output.stall_seconds) == ("output", 2700.0)
    untold = prepared(spec, tmp_path, without[0]).supervise
    assert (untold.life, untold.stall_seconds) == ("steps", 600.0)


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        ((), 600.0),
        (("trainer.silence=45min",), 2700.0),
        (("resources.walltime=10:00:00",), 18000.0),
    ],
)
def test_a_hang_costs_what_it_takes_to_see_it(
    spec: Path, tmp_path: Path, overrides: tuple[str, ...], seconds: float
) -> None:
    """Without steps and without a word in the spec: half of the time limit in the mean."""
    if overrides:
        overrides = ("trainer.metrics=[]", *overrides)
    job = prepared(spec, tmp_path, *overrides).job
    facts = trainer_facts(job, KnownPace(step_seconds=2.0, source="measured"))
    assert facts is not None
    expected = closed_form(job.spec, job.profile, facts)
    assert scenario_of(job, facts, expected).stall_seconds == seconds


def test_lines_fit_into_80_columns(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(spec.parent)
    for options in (["--step-time", "1.9s", "--deadline", "30d"], []):
        text = click.unstyle(on_terminal(80, "plan", "-p", "a100x64", spec.name, *options))
        assert not [line for line in text.splitlines() if len(line) > 80]


def test_how_a_launcher_and_a_script_are_shown(spec: Path) -> None:
    text = plan(
        spec,
        "--set",
        "trainer.launch=accelerate",
        "--set",
        "trainer.launcher_arguments=[--mixed_precision, bf16]",
        "--set",
        "trainer.command=[train.py, two words, '{resume}']",
    ).stdout
    assert "First     accelerate launch --mixed_precision bf16 train.py 'two words'\n" in text
    spec.write_text(re.sub("command: .*", "script: python a.py $HPCTRAIN_CHECKPOINT", SPEC))
    text = plan(spec).stdout
    assert "First     the script, $HPCTRAIN_CHECKPOINT is empty\n" in text


def test_a_script_that_is_not_there_is_refused(spec: Path) -> None:
    (spec.parent / "train.py").unlink()
    outcome = hpctrain("validate", "-p", "a100x64", str(spec))
    assert outcome.exit_code == 3
    assert "own.yaml:4:12: `trainer.command`: train.py is not in" in " ".join(
        outcome.stderr.split()
    )


# -- Options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--explain"], "--explain: hpctrain chooses no layout for this trainer"),
        (["--apply"], "--apply: hpctrain chooses no layout for this trainer"),
        (["--by", "time"], "--by: hpctrain chooses no layout for this trainer"),
        (["--gpus", "8,16"], "--gpus: how fast this trainer is on other numbers of GPUs"),
        (["--verify"], "--verify: hpctrain builds no model for this trainer"),
        (["--deadline", "3d"], "--budget and --deadline need a forecast, and there is none"),
        (["--step-time", "0s"], "--step-time: must be above 0"),
        (["--like", "nobody"], "no run `nobody`"),
    ],
)
def test_what_says_nothing_of_a_trainer_is_refused(
    spec: Path, options: list[str], reason: str
) -> None:
    outcome = hpctrain("plan", "-p", "a100x64", str(spec), *options)
    assert outcome.exit_code in (2, 6)
    assert reason in " ".join(outcome.stderr.split()), outcome.stderr


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize("options", [["--step-time", "2s"], ["--like", "x"]])
def test_engines_have_their_steps_predicted(command: str, options: list[str]) -> None:
    own = str(ROOT / "examples/gpt175b.yaml")
    outcome = hpctrain(command, "-p", "a100x64", own, *options)
    assert outcome.exit_code == 2
    assert f"{options[0]} is for specs with `trainer:`" in outcome.stderr


def test_deadline_and_budget(spec: Path) -> None:
    """200,000 steps of 1.9 s are 4.4 days on 16 GPUs, about 3,000 USD."""
    met = plan(spec, "--step-time", "1.9s", "--deadline", "6d", "--budget", "4000usd")
    assert "meets 4,000 USD and 6 d" in met.stdout
    late = plan(spec, "--step-time", "1.9s", "--deadline", "3d", code=4)
    assert "no plan of 1 option meets 3 d" in late.stdout
    dear = plan(spec, "--step-time", "1.9s", "--budget", "1000usd", code=4)
    assert re.search(r"of the run \([\d,]+ of 200,000 steps\)", dear.stdout), dear.stdout


def test_other_commands_say_in_one_sentence_what_they_cannot_do(spec: Path) -> None:
    outcome = hpctrain("footprint", "-p", "a100x64", str(spec))
    assert outcome.exit_code == 3
    assert "own.yaml:2:1: this run has a trainer of its own" in outcome.stderr


# -- What earlier runs have measured --------------------------------------------------------------


def test_the_last_run_with_the_same_command_is_measured(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    monkeypatch.setenv("HPCTRAIN_RUNS", str(runs))
    run = measured_run(spec, runs)
    pace = known_pace(prepared(spec, runs).job, runs, None, None)
    assert pace == KnownPace(
        step_seconds=2.0,
        source=f"measured by 99 steps of run {run.directory.name}",
        start_seconds=30.0,
        save_seconds=5.0,
        steps_between_saves=20,
    )
    text = plan(spec).stdout
    assert f"Step      2 s a step, measured by 99 steps of run {run.directory.name}\n" in text
    assert "Saves     every 20 steps (40 s), each stops training for 5 s\n" in text
    assert "30 s per restart" in text and "Assumed   save" not in text


def test_a_given_step_time_wins_over_the_measured_one(spec: Path, tmp_path: Path) -> None:
    measured_run(spec, tmp_path)
    pace = known_pace(prepared(spec, tmp_path).job, tmp_path, 7.0, None)
    assert pace is not None and pace.source == "by --step-time"
    assert (pace.step_seconds, pace.save_seconds, pace.start_seconds) == (7.0, 5.0, 30.0)


@pytest.mark.parametrize(
    "override",
    ["name=other", "resources.gpus=8", "trainer.command=[python, other.py, '{resume}']"],
)
def test_another_run_is_measured_only_when_it_is_named(
    spec: Path, tmp_path: Path, override: str
) -> None:
    run = measured_run(spec, tmp_path, override)
    job = prepared(spec, tmp_path).job
    assert known_pace(job, tmp_path, None, None) is None
    pace = known_pace(job, tmp_path, None, run.directory.name)
    assert pace is not None and pace.step_seconds == 2.0
    assert ("8 GPUs" in pace.source) is ("gpus" in override)


def test_too_few_steps_say_nothing(spec: Path, tmp_path: Path) -> None:
    run = measured_run(spec, tmp_path, steps=15)
    outcome = plan(spec, "--like", run.directory.name, "--runs", str(tmp_path), code=2)
    assert "has reported 20 steps" in outcome.stderr and "--step-time" in outcome.stderr
    assert plan(spec, "--runs", str(tmp_path)).stdout.startswith("Takes     unknown until")


def test_a_run_of_an_engine_is_no_measure(spec: Path, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "gpt-0001")
    layout.directory.mkdir()
    layout.train_config.write_text('{"engine": "native"}')
    Ledger(layout.ledger).append(EventKind.SUBMITTING)
    outcome = plan(spec, "--like", "gpt-0001", "--runs", str(tmp_path), code=2)
    assert "--like: run `gpt-0001` has an engine of hpctrain" in outcome.stderr


# -- The forecast ---------------------------------------------------------------------------------


def played(spec: Path, *overrides: str, pace: KnownPace | None = None) -> Forecast:
    job = prepared(spec, spec.parent / "runs", *[one for one in overrides if one != "--set"]).job
    facts = trainer_facts(job, pace or KnownPace(step_seconds=1.0, source=""))
    assert facts is not None
    return forecast_run(job, facts)


def test_a_measured_run_is_played_as_it_was(spec: Path) -> None:
    pace = KnownPace(
        step_seconds=2.0,
        source="",
        start_seconds=30.0,
        save_seconds=5.0,
        steps_between_saves=1000,
    )
    found = played(spec, pace=pace)
    assert found.times.training_seconds == pytest.approx(400_000)
    assert found.interval.steps == 1000 and found.interruptions.restart_seconds == 30.0
    assert found.times.saving_seconds == pytest.approx(200 * 5.0, rel=0.05)


def test_without_a_signal_the_time_limit_costs_work(spec: Path) -> None:
    every = KnownPace(step_seconds=1.0, source="", save_seconds=1.0, steps_between_saves=7000)
    walltime = ["resources.walltime=6h"]
    saves, loses = (
        played(spec, *walltime, *more, pace=every)
        for more in ([], [one for one in LEVEL_1 if one != "--set"])
    )
    assert loses.times.redone_seconds > 3600 > 10 * saves.times.redone_seconds
    assert loses.times.total_seconds > saves.times.total_seconds


def test_without_checkpoints_a_run_longer_than_its_time_limit_never_ends(spec: Path) -> None:
    told = plan(spec, *LEVEL_0, "--step-time", "1.9s").stdout
    assert "starts over in each attempt of" in told and "it would never end" in told
    short = plan(spec, *LEVEL_0, "--step-time", "0.1s").stdout
    assert "Saves     none\n" in short and "none, each launch starts over" in short


def test_a_save_that_nobody_has_measured_is_assumed_and_said(spec: Path) -> None:
    text = plan(spec, "--step-time", "1s").stdout
    assert "stops training for 2 min (at most, by `trainer.signal.seconds`; not measured)" in text
    assert "the best interval (the trainer decides; not measured)" in text
    text = plan(spec, *LEVEL_1, "--step-time", "1s").stdout
    assert "stops training for 60 s (not measured, nor in `trainer.signal.seconds`)" in text


def test_simulate_plays_what_plan_forecasts(spec: Path) -> None:
    words = ["-p", "a100x64", str(spec), "--step-time", "1.9s", "--json"]
    simulated = json.loads(hpctrain("simulate", *words, "--spares", "0").stdout)["simulation"]
    scenario, planned = simulated["scenario"], forecast(spec, "--step-time", "1.9s")
    assert scenario["step_seconds"] == 1.9 and scenario["saves_at_limit"]
    assert simulated["written"]["interval_seconds"] == planned["interval"]["seconds"]
    assert scenario["work_seconds"] == pytest.approx(200_000 * 1.9)


def test_simulate_says_what_it_needs(spec: Path) -> None:
    outcome = hpctrain("simulate", "-p", "a100x64", str(spec))
    assert outcome.exit_code == 2 and "unknown until steps are measured" in " ".join(
        outcome.stderr.split()
    )
    words = [*LEVEL_0, "--step-time", "0.1s", "--interval", "10min"]
    outcome = hpctrain("simulate", "-p", "a100x64", str(spec), *words)
    assert outcome.exit_code == 2 and "this trainer saves nothing" in outcome.stderr
    outcome = hpctrain("simulate", "-p", "a100x64", str(spec), *words[:-2])
    assert outcome.exit_code == 0, outcome.stderr


# -- Adapters -------------------------------------------------------------------------------------


def test_adapters_are_listed_with_what_was_checked() -> None:
    lines = hpctrain("adapters").stdout.splitlines()
    assert lines[0].split() == ["NAME", "TITLE", "LEVEL", "CHECKED"]
    by_name = {line.split()[0]: line for line in lines[1:]}
    assert "run with transformers" in by_name["hf"] and "read with axolotl" in by_name["axolotl"]
    listed = json.loads(hpctrain("adapters", "--json").stdout)["adapters"]
    assert {one["name"] for one in listed} == set(by_name)
    complete = next(one["checkpoint"]["complete"] for one in listed if one["name"] == "hf")
    assert complete["json"] == ["trainer_state.json"]


def test_an_adapter_is_shown_with_what_it_needs(tmp_path: Path) -> None:
    text = hpctrain("adapters", "hf").stdout
    assert "path: " in text and "needs:" in text and "# default" not in text
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: hf\ntitle: mine\nlaunch: srun\n")
    text = hpctrain("adapters", str(mine)).stdout
    assert "launch: srun  # mine.yaml:3" in text and "# hf.yaml:" in text
    wrong = hpctrain("adapters", "hff")
    assert wrong.exit_code == 3 and "no adapter is called `hff`" in wrong.stderr


@pytest.mark.parametrize("name", adapter_names())
def test_init_writes_a_first_spec(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each adapter: at most 12 lines, valid as it is, and it asks what only its user knows."""
    monkeypatch.chdir(tmp_path)
    outcome = hpctrain("init", "--trainer", name, "-p", "a100x64")
    assert outcome.exit_code == 0 and outcome.stdout == "my-trainer.yaml\n"
    text = Path("my-trainer.yaml").read_text()
    assert len(text.splitlines()) <= 12 and max(map(len, text.splitlines())) <= 100
    told = hpctrain("validate", "my-trainer.yaml")
    assert told.exit_code == 0 and "2 questions are open" in told.stderr
    refused = hpctrain("init", "--trainer", name)
    assert refused.exit_code == 2 and "is left as it is" in refused.stderr


def test_init_refuses_what_does_not_go_together() -> None:
    outcome = hpctrain("init", "--trainer", "hf", "--model", "llama-3-8b")
    assert outcome.exit_code == 2 and "--model is for hpctrain's engines" in outcome.stderr
    assert "did you mean `hf`?" in hpctrain("init", "-", "--trainer", "hff").stderr
