"""What scripts and people rely on: streams, exit codes, suggestions, JSON, no terminal, pipes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from command_line import hpctrain, on_terminal
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, ended, fabricate, said
from token_files import write_tokens
from virtual_clock import VirtualClock
from waiting import wait_until

from hpctrain.base.errors import (
    DoesNotFitError,
    HpctrainError,
    InvalidInputError,
    LimitError,
    NoSuchRunError,
    NotConfirmedError,
    Problem,
    RunFailedError,
    SlurmRefusedError,
    SlurmUnreachableError,
    UsageError,
)
from hpctrain.cli.failures import extras
from hpctrain.cli.main import EXIT_CODES, cli
from hpctrain.page.output import json_out
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import StepMetrics
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = [sys.executable, "-c", "from hpctrain.cli.main import main; main()"]
TINY = ["--profile", "sandbox", "examples/gpt-tiny.yaml"]
GPT175B = ["--profile", "a100x64", "examples/gpt175b.yaml"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the examples and the data of the tiny one."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "data").mkdir()
    write_tokens(tmp_path / "data/text")
    (tmp_path / "data/tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr("hpctrain.slurm.client.SlurmClient", lambda: fake)
    return fake


def stub_sbatch(directory: Path, text: str = "echo 4711") -> dict[str, str]:
    """An environment whose sbatch keeps its argv and its script, and says `text`."""
    program = directory / "bin/sbatch"
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
printf '%s\\n' "$@" >'{directory}/argv'
env >'{directory}/environment'
for last; do :; done
if [ -f "$last" ]; then cat "$last"; else cat; fi >'{directory}/script'
{text}
"""
    )
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:/usr/bin:/bin"}


@pytest.fixture
def sbatch(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub's environment is that of this process."""
    monkeypatch.setenv("PATH", stub_sbatch(here)["PATH"])


def start(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background jobs ignore SIGINT, and so would everything that they start
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


# -- words that are misspelt -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["sumbit"], "Did you mean 'submit'?"),
        (["plan", "--profil", "x", "y"], "Did you mean '--profile'?"),
        (["sandbox", "upp"], "Did you mean 'up'?"),
        (["schema", "specc"], "`spec`"),
        (["plan", "-p", "a100x46", "examples/gpt-tiny.yaml"], "`a100x64`"),
        (["plan", "-p", "sandbox", "examples/gpt-tiny.yml"], "`gpt-tiny.yaml`"),
        (["plan", *TINY, "--set", "parallel.tpp=2"], "`parallel.tp`"),
    ],
)
def test_suggestions(arguments: list[str], suggestion: str) -> None:
    outcome = hpctrain(*arguments)
    assert outcome.exit_code in (2, 3) and suggestion in outcome.stderr, outcome.transcript()
    assert outcome.stdout == ""


def test_names_of_runs_are_suggested(here: Path) -> None:
    fabricate(here / "runs", "gpt-tiny-7f3a")
    outcome = hpctrain("describe", "gpt-tyni-7f3a")
    assert outcome.exit_code == 6 and "did you mean `gpt-tiny-7f3a`?" in outcome.stderr


# -- errors ----------------------------------------------------------------------------------

EXPECTED = [
    (HpctrainError("x"), 1),
    (UsageError("x"), 2),
    (InvalidInputError([Problem("x", "f.yaml", 1, 2)]), 3),
    (DoesNotFitError("x"), 4),
    (LimitError("x"), 4),
    (SlurmRefusedError("x"), 5),
    (SlurmUnreachableError("x"), 5),
    (NoSuchRunError("x"), 6),
    (RunFailedError("x"), 7),
    (ZeroDivisionError("x"), 1),
    (KeyboardInterrupt(), 130),
    (EOFError(), 130),
]


@pytest.mark.parametrize(("error", "code"), EXPECTED, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("debug", [False, True])
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, debug: bool
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("hpctrain.records.find.all_runs", fail)
    outcome = hpctrain("status", debug=debug)
    assert outcome.exit_code == code
    assert outcome.stdout == "" and outcome.stderr
    wanted = debug and isinstance(error, Exception) and not isinstance(error, EOFError)
    assert ("Traceback" in outcome.stderr) == wanted


ENVIRONMENT = [
    (ModuleNotFoundError("x", name="matplotlib.pyplot"), 2, "pip install 'hpctrain[plots]'"),
    (ModuleNotFoundError("x", name="hpctrain.nothing"), 1, "a bug of hpctrain"),
    (MemoryError(), 7, "enough memory"),
    (PermissionError(13, "Permission denied", "/a/b"), 7, "/a/b: Permission denied"),
    (NotConfirmedError("nothing was done"), 8, "nothing was done"),
]


@pytest.mark.parametrize(("error", "code", "words"), ENVIRONMENT, ids=str)
def test_what_the_machine_lacks_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("hpctrain.records.find.all_runs", fail)
    outcome = hpctrain("status")
    assert outcome.exit_code == code and words in outcome.stderr, outcome.stderr
    assert ("a bug" in outcome.stderr) == (code == 1)


def test_data_without_the_packages_is_no_bug(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tokenizers", "torch"):
        absent = f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')"
        (here / f"{name}.py").write_text(absent)
    (here / "a.txt").write_text("text")
    monkeypatch.setenv("PYTHONPATH", f"{here}:{os.environ.get('PYTHONPATH', '')}")
    outcome = hpctrain("data", "prepare", "a.txt", "--output", "out")
    assert outcome.exit_code == 2, outcome.transcript()
    assert "a Python package that is not installed" in outcome.stderr
    assert "pip install 'hpctrain[megatron]'" in outcome.stderr


def test_extras_are_those_of_the_package() -> None:
    """The extra that a message names installs the package that is missing."""
    text = (ROOT / "pyproject.toml").read_text()
    offered = tomllib.loads(text)["project"]["optional-dependencies"]
    distributions = {"PIL": "pillow", "sklearn": "scikit-learn", "megatron": "megatron-core"}
    distributions["prometheus_client"] = "prometheus-client"
    for name, extra in extras().items():
        wanted = distributions.get(name, name)
        assert any(re.split(r"[><=\[]", one)[0] == wanted for one in offered[extra]), name


@pytest.mark.parametrize(("stdout", "code"), [(">/dev/full", 7), (">&-", 0)])
def test_an_output_that_takes_nothing(stdout: str, code: int) -> None:
    command = f'exec "$0" -c "$1" profiles {stdout}'
    done = subprocess.run(
        ["sh", "-c", command, *(PROGRAM[0], PROGRAM[2])],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stderr
    assert "a bug" not in done.stderr and "Exception ignored" not in done.stderr
    assert ("standard output: No space left on device" in done.stderr) == (code == 7)


def test_the_readme_has_the_meaning_of_7_that_help_has() -> None:
    [meaning] = re.findall(r"^7 (.*)$", EXIT_CODES, re.MULTILINE)
    assert f"| 7 | {meaning} |" in (ROOT / "README.md").read_text()


def test_a_no_is_no_interruption(here: Path, slurm: FakeSlurm) -> None:
    shown = on_terminal(80, "submit", *TINY, typed="n\n")
    assert "[y/N]" in shown and "nothing was done" in shown and "interrupted" not in shown
    assert shown.endswith("exit code 8\n") and not (here / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["validate", "examples/gpt-tiny.yaml"], "reading examples/gpt-tiny.yaml ..."),
        (["validate", "-p", "sandbox", "examples/gpt-tiny.yaml"], "planning examples/gpt-tiny"),
        (["submit", *TINY, "-y"], "planning, and checking all that could end the run ..."),
        pytest.param(
            ["submit", *TINY, "-y"],
            "writing the run directory, and submitting ...",
            marks=pytest.mark.variant,
        ),
        pytest.param(
            ["submit", *TINY, "--prepare"],
            "writing the run directory ...",
            marks=pytest.mark.variant,
        ),
        (["submit", *TINY, "--check"], "asking Slurm ..."),
        (["resume", "done-0001"], "checking what would end the run again"),
        (["resubmit", "done-0001", "-y"], "submitting ..."),
        (["archive", "done-0001"], "packing run done-0001, and reading it back ..."),
    ],
)
def test_what_takes_long_says_so_on_a_terminal_only(
    here: Path,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    class Soon:
        """A timer that is over at once."""

        def __init__(self, _seconds: float, function: Callable[[], None]) -> None:
            self.start = function

        def cancel(self) -> None: ...
        def join(self) -> None: ...

    fabricate(here / "runs", "done-0001", SUBMITTED, done=True)
    assert said not in hpctrain(*arguments).stderr
    monkeypatch.setattr("hpctrain.page.output.threading.Timer", Soon)
    assert said in on_terminal(120, *arguments)


def test_every_line_of_a_message_is_marked() -> None:
    outcome = hpctrain("plan", "-p", "sandbox", "examples/gpt175b.yaml")
    message = outcome.stderr.split("\n\n")[0].splitlines()
    assert len(message) == 2 and all(line.startswith("error: ") for line in message)


def test_all_problems_of_two_files_at_once(here: Path) -> None:
    (here / "spec.yaml").write_text("name: a\nnonsense: 1\n")
    (here / "profile.yaml").write_text("name: b\nrubbish: 1\n")
    outcome = hpctrain("plan", "--profile", "./profile.yaml", "spec.yaml")
    assert outcome.exit_code == 3 and outcome.stdout == ""
    assert "spec.yaml:2:1: `nonsense`" in outcome.stderr
    assert "profile.yaml:2:1: `rubbish`" in outcome.stderr


def test_validate_prints_nothing_on_stdout_when_one_file_is_wrong(here: Path) -> None:
    (here / "spec.yaml").write_text("name: a\nnonsense: 1\n")
    outcome = hpctrain("validate", "examples/gpt-tiny.yaml", "spec.yaml")
    assert outcome.exit_code == 3 and outcome.stdout == ""
    good = hpctrain(
        "validate", "examples/gpt-tiny.yaml", str(ROOT / "cluster_profiles/a100x1.yaml")
    )
    assert good.exit_code == 0
    assert [line.split(": ")[1] for line in good.stdout.splitlines()] == [
        "ok (run spec)",
        "ok (cluster profile)",
    ]


@pytest.mark.parametrize("value", ["a b", "it's", "$(id)", "a\nb", "../x", "-rf", "\u00fc", "a/b"])
def test_a_name_that_is_no_name_is_refused(value: str) -> None:
    outcome = hpctrain("plan", *TINY, "--set", f"name={json.dumps(value)}")
    assert outcome.exit_code == 3 and outcome.stdout == "", outcome.transcript()


def test_interrupt_from_outside(here: Path) -> None:
    fabricate(here / "runs", "gpt-tiny-7f3a")
    process = start("status", "--watch", environment={**os.environ, "PATH": "/nowhere"})
    assert process.stdout is not None
    assert "gpt-tiny-7f3a" in "".join(process.stdout.readline() for _ in range(2))
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in stderr


def test_an_interrupt_during_the_imports(here: Path) -> None:
    """The first of them is click: here one that takes long."""
    (here / "click.py").write_text(
        "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(60)\n"
    )
    text = (ROOT / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["scripts"] == {"hpctrain": "hpctrain.cli.start:main"}
    process = subprocess.Popen(
        [sys.executable, "-m", "hpctrain", "--version"],
        env={**os.environ, "PYTHONPATH": f"{here}:{ROOT}"},
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background command, as these tests may be, ignores it and hands that on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: (here / "importing").exists() or process.poll() is not None)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (130, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["profiles"],
        pytest.param(["schema", "spec"], marks=pytest.mark.variant),
        ["submit", *TINY, "--dry-run"],
        pytest.param(["--help"], marks=pytest.mark.variant),
    ],
)
def test_a_reader_that_goes_away(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*PROGRAM, *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300
    )
    os.close(writing)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Broken pipe" not in done.stderr
    assert "Exception ignored" not in done.stderr


# -- submitting ------------------------------------------------------------------------------


def test_without_terminal_and_without_yes_nothing_is_submitted(here: Path, sbatch: None) -> None:
    done = hpctrain("submit", *TINY)
    assert done.exit_code == 2 and "`-y` answers yes" in done.stderr and done.stdout == ""
    assert not (here / "argv").exists() and not (here / "runs").exists()


@pytest.mark.parametrize("command", ["cancel", "resubmit"])
def test_the_other_questions_do_not_hang_either(here: Path, slurm: FakeSlurm, command: str) -> None:
    fabricate(here / "runs", "gpt-tiny-7f3a")
    outcome = hpctrain(command, "gpt-tiny")
    assert outcome.exit_code == 2 and "-y" in outcome.stderr


def test_dry_run_prints_what_sbatch_gets(here: Path, sbatch: None) -> None:
    shown = hpctrain("submit", *TINY, "--dry-run")
    stdout = shown.stdout
    assert shown.exit_code == 0 and "Plan " in shown.stderr
    assert stdout.startswith("#!/bin/bash\n") and "Plan " not in stdout
    assert not (here / "runs").exists() and not (here / "script").exists()

    checked = hpctrain("submit", *TINY, "--check")
    assert checked.stdout == "" and checked.exit_code == 0
    assert (here / "script").read_text() == stdout
    assert "--test-only" in (here / "argv").read_text().split()
    assert not (here / "runs").exists(), "--check leaves nothing behind"

    submitted = hpctrain("submit", *TINY, "-y")
    run_id = submitted.stdout.strip()
    assert submitted.exit_code == 0
    assert (here / "script").read_text() == stdout
    directory = here / "runs" / run_id
    assert (directory / "job.sbatch").read_text() == stdout
    assert (here / "argv").read_text().split() == [
        "--parsable",
        f"--chdir={directory}",
        str(directory / "job.sbatch"),
    ]


def test_options_of_the_shell_do_not_reach_sbatch(
    here: Path, sbatch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert hpctrain("submit", *TINY, "-y").exit_code == 0
    seen = (here / "environment").read_text()
    assert "SBATCH_" not in seen and "SLURM_JOB_ID" not in seen


def test_values_of_inherited_variables_are_written_nowhere(
    here: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "do-not-write-me-9b1d")
    setting = "environment.inherit=[WANDB_API_KEY]"
    outcome = hpctrain("submit", *TINY, "--set", setting, "-y", "--json")
    assert outcome.exit_code == 0, outcome.transcript()
    run = here / "runs" / json.loads(outcome.stdout)["submitted"]["run_id"]
    # the code of hpctrain is an archive
    texts = {path: path.read_text(errors="replace") for path in run.rglob("*") if path.is_file()}
    assert {"job.sbatch", "spec.yaml", "ledger.jsonl"} <= {path.name for path in texts}
    assert "WANDB_API_KEY" in texts[run / "job.sbatch"]
    everything = "\n".join((*texts.values(), *slurm.scripts.values(), outcome.transcript()))
    assert "do-not-write-me" not in everything


def test_refused_by_slurm(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "sbatch: error: Batch job submission failed: Invalid account or account/partition"
    monkeypatch.setenv("PATH", stub_sbatch(here, f"echo '{words}' >&2; exit 1")["PATH"])
    done = hpctrain("submit", *TINY, "-y")
    assert done.exit_code == 5 and done.stdout == "" and words in done.stderr
    assert not list((here / "runs").iterdir()), "a submission that was refused is no run"


def test_everything_but_slurm_works_without_slurm(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabricate(here / "runs", "gpt-tiny-7f3a", [*SUBMITTED, STARTED], steps=4)
    monkeypatch.setenv("PATH", "/nowhere")
    for arguments in (
        ["submit", *TINY, "--dry-run"],
        ["plan", *GPT175B, "--json"],
        ["profiles"],
        ["validate", "examples/gpt-tiny.yaml"],
        ["status"],
        ["describe", "gpt-tiny"],
    ):
        done = hpctrain(*arguments)
        assert done.exit_code == 0 and done.stdout, done.transcript()
    done = hpctrain("submit", *TINY, "-y")
    assert done.exit_code == 5 and "cannot run `sbatch`" in done.stderr and done.stdout == ""


def test_spec_from_stdin(slurm: FakeSlurm) -> None:
    text = (ROOT / "examples/gpt-tiny.yaml").read_text()
    from_file = hpctrain("submit", *TINY, "--dry-run")
    from_stdin = hpctrain("submit", "--profile", "sandbox", "-", "--dry-run", stdin=text)
    assert from_stdin.exit_code == 0 and from_stdin.stdout == from_file.stdout
    wrong = hpctrain("plan", "--profile", "sandbox", "-", stdin="name: [")
    assert wrong.exit_code == 3 and "error: stdin:1" in wrong.stderr
    assert hpctrain("validate", "-", stdin=text).exit_code == 0


def test_spec_from_a_pipe(here: Path) -> None:
    """`<(cat spec.yaml)` of a shell: the text is there once, and the commands look twice."""
    for command in ("plan -p sandbox", "validate -p sandbox", "validate"):
        read, write = os.pipe()
        os.write(write, Path("examples/gpt-tiny.yaml").read_bytes())
        os.close(write)
        outcome = hpctrain(*command.split(), f"/dev/fd/{read}")
        os.close(read)
        assert outcome.exit_code == 0, outcome.transcript()
        assert "Ready" not in outcome.stdout  # a command could not name what has been read


def test_an_endless_file_is_read_in_part(here: Path) -> None:
    limited = "ulimit -v 4000000; exec " + shlex.join([*PROGRAM, "validate", "/dev/zero"])
    ended = subprocess.run(["sh", "-c", limited], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 3 and "larger than 1 MiB" in ended.stderr


def test_options_that_would_be_ignored_are_refused(here: Path) -> None:
    fabricate(here / "runs", "gpt-tiny-7f3a")
    for arguments in (
        ["submit", *TINY, "--dry-run", "--json"],
        ["submit", *TINY, "--check", "--json"],
        ["status", "--json", "--watch"],
        ["status", "--every", "1min"],
        ["logs", "gpt-tiny", "--attempt", "1"],
        ["logs", "gpt-tiny", "--attempt", "1", "--rank", "0", "-f"],
    ):
        outcome = hpctrain(*arguments)
        assert outcome.exit_code == 2, outcome.transcript()
        assert outcome.stdout == "" or "error" in json.loads(outcome.stdout), outcome.transcript()


# -- a terminal ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("y", 0),
        pytest.param("n", 8, marks=pytest.mark.variant),
        pytest.param("\x04", 130, marks=pytest.mark.variant),
    ],
)
def test_the_question_on_a_terminal(here: Path, answer: str, code: int) -> None:
    """Yes, no, and Ctrl-D, typed on a real pseudo terminal."""
    environment = stub_sbatch(here)
    keyboard, terminal = os.openpty()
    os.write(keyboard, f"{answer}\n".encode())
    done = subprocess.run(
        [*PROGRAM, "submit", *TINY],
        env=environment,
        stdin=terminal,
        capture_output=True,
        text=True,
        timeout=300,
    )
    os.close(terminal)
    os.close(keyboard)
    assert "Submit to partition `train`?" in done.stderr
    assert done.returncode == code, done.stderr
    assert bool(done.stdout) == (here / "argv").exists() == (answer == "y")


def test_tables_fit_a_narrow_terminal() -> None:
    screen, terminal = os.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    subprocess.run(
        [*PROGRAM, "profiles"], env=environment, stdout=terminal, timeout=300, check=True
    )
    os.close(terminal)
    text = os.read(screen, 100_000).decode()
    os.close(screen)
    assert not re.search(r"\x1b\[[\d;]*[34]\dm", text), "NO_COLOR is set, so bold is all there is"
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert "a100x64" in plain and max(len(line) for line in plain.splitlines()) <= 80


# -- status and JSON -------------------------------------------------------------------------


def test_status_when_slurm_is_away_still_shows_progress(here: Path, slurm: FakeSlurm) -> None:
    fabricate(here / "runs", "gpt-tiny-7f3a", [*SUBMITTED, STARTED, LAUNCHED], steps=23)
    slurm.away = True
    shown = hpctrain("status").stdout
    assert "UNKNOWN" in shown and "23/60" in shown and "Slurm does not answer" in shown


def test_status_says_that_more_runs_have_failed(here: Path, slurm: FakeSlurm) -> None:
    """Only the newest of those that are over is a row."""
    over = [*SUBMITTED, said(EventKind.ACTION, action="stop", cause="gpu_oom", exit_code=1)]
    for number in range(3):
        fabricate(here / "runs", f"gpt-tiny-000{number}", over)
    shown = hpctrain("status")
    assert shown.stdout.count("FAILED") == 1, shown.transcript()
    assert "2 more runs have failed; `-a` shows them" in shown.stderr
    assert "more runs" not in hpctrain("status", "-a").stderr


def test_loss_that_is_not_a_number(here: Path, slurm: FakeSlurm, capsys: object) -> None:
    fabricate(here / "runs", "gpt-tiny-7f3a", SUBMITTED, steps=2, last_loss=float("nan"))
    document = json.loads(hpctrain("status", "--json").stdout, parse_constant=pytest.fail)
    assert document["runs"][0]["loss"] is None
    assert "-" in hpctrain("status").stdout


def test_nan_becomes_null(capsys: pytest.CaptureFixture[str]) -> None:
    values = {name: 1 for name in StepMetrics.model_fields}
    row = StepMetrics.model_validate({**values, "loss_hex": "nan", "loss": float("nan")})
    json_out("row", row)
    shown = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert shown["row"]["loss"] is None and shown["schema_version"] == 1


def json_commands() -> list[str]:
    found = []

    def walk(group: click.Group, words: str) -> None:
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if isinstance(command, click.Group):
                walk(command, f"{words}{name} ")
            elif command and any("--json" in p.opts for p in command.params):
                found.append(words + name)

    walk(cli, "")
    return found


def test_json_of_every_command_that_has_it(here: Path, slurm: FakeSlurm) -> None:
    job = slurm.submit("#!/bin/sh\n")
    slurm.records[job.job_id] = replace(slurm.records[job.job_id], state=JobState.FAILED)
    stopped = [*SUBMITTED, STARTED, *ended("crash", "boom", "stop")]
    fabricate(here / "runs", "gpt-tiny-7f3a", stopped, steps=3)
    examples = {
        "plan": GPT175B,
        "validate": TINY,
        "footprint": GPT175B,
        "submit": [*TINY, "-y"],
        "status": ["-a"],
        "describe": ["gpt-tiny-7f3a"],
        "diagnose": ["gpt-tiny-7f3a"],
        "report": ["--week"],
        "profiles": ["a100x64"],
        "watch": [],
        "why": ["gpt-tiny-7f3a"],
        "goodput": ["gpt-tiny-7f3a"],
        "checkpoints": ["gpt-tiny-7f3a"],
        "nodes": ["--cluster", "a100x64"],
        "simulate": ["--gpus", "512", "--trials", "2"],
        "compare": [*TINY, "--engines", "ddp,fsdp", "--predict"],
        "adapters": [],
        "scale": [*TINY, "--gpus", "1,2", "--set", "parallel=auto", "--predict"],
    }
    # tests/unit/actions: test_data.py, test_calibrate.py, test_actions_notify.py, test_sweep.py;
    # tests/engines, test_cli_site.py
    elsewhere = {"data prepare", "data show", "data verify", "calibrate", "convert"}
    elsewhere |= {"profile check", "doctor", "notify", "sweep submit", "sweep status"}
    # tests/unit/serve/test_serve_command.py
    elsewhere |= {"serve plan", "serve status", "serve test"}
    elsewhere |= {"schema"}  # tests/golden/test_verbs.py
    elsewhere |= {"adopt"}  # tests/unit/adopt/test_adopt_command.py
    elsewhere |= {"try"}  # tests/slurm/test_rehearsal.py
    assert set(json_commands()) == examples.keys() | elsewhere
    for command, arguments in examples.items():
        outcome = hpctrain(command, *arguments, "--json")
        assert outcome.exit_code == 0, outcome.transcript()
        document = json.loads(outcome.stdout, parse_constant=pytest.fail)
        more = {"forecast", "advice", "spot"} if command == "plan" else set()
        assert document["schema_version"] == 1 and len(document) == 2 + len(more), document.keys()
        assert more <= document.keys()
    assert len(json.loads(hpctrain("profiles", "--json").stdout)["profiles"]) == 6


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "--version"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "hpctrain" in done.stdout


def test_a_broken_profile_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.yaml").write_text("x: [")
    monkeypatch.setenv("HPCTRAIN_PROFILE_PATH", f"{tmp_path}:{tmp_path}/none")
    done = hpctrain("profiles")
    assert done.exit_code == 0 and "a100x64" in done.stdout
    assert f"warning: {tmp_path}/bad.yaml:1:5: not valid YAML" in done.stderr
    assert f"warning: {tmp_path}/none in $HPCTRAIN_PROFILE_PATH is no directory" in done.stderr


def test_status_waits_and_fails_with_the_run(
    here: Path, slurm: FakeSlurm, virtual_clock: VirtualClock
) -> None:
    fabricate(here / "runs", "failed-0001", [*SUBMITTED, STARTED, *ended("crash", "x", "stop")])
    fabricate(here / "runs", "done-0002", SUBMITTED, done=True)
    assert hpctrain("status", "--wait", "failed").exit_code == 7
    assert hpctrain("status", "--wait", "done").exit_code == 0
    assert hpctrain("status", "--wait", "--watch", "done").exit_code == 0
    job = slurm.submit("")
    naps = virtual_clock.pauses

    def finish() -> None:
        slurm.records[job.job_id] = replace(slurm.records[job.job_id], state=JobState.FAILED)

    virtual_clock.at(1.0, finish)
    fabricate(here / "runs", "waiting-0003", SUBMITTED)
    assert hpctrain("status", "--wait", "waiting").exit_code == 7
    assert len(naps) == 1 and naps[0] >= 10, "squeue(1) asks not to be polled"
    slurm.records[job.job_id] = replace(slurm.records[job.job_id], state=JobState.RUNNING)
    virtual_clock.at(virtual_clock.passed_seconds + 1.0, finish)
    assert hpctrain("status", "--wait", "--every", "2min", "waiting").exit_code == 7
    assert naps[1:] == [120.0]
    refused = hpctrain("status", "--wait", "--every", "2s", "waiting")
    assert refused.exit_code == 2 and "`limits.poll`" in refused.stderr


def test_status_shows_unfinished_runs_and_the_last_finished_one(
    here: Path, slurm: FakeSlurm
) -> None:
    for run_id in ("done-0001", "done-0002"):
        fabricate(here / "runs", run_id, SUBMITTED, done=True)
    fabricate(here / "runs", "open-0003", SUBMITTED)
    assert [line.split()[0] for line in hpctrain("status").stdout.splitlines()[1:]] == [
        "done-0002",
        "open-0003",
    ]
    assert len(hpctrain("status", "-a").stdout.splitlines()) == 4
    assert len(hpctrain("status", "-n", "1").stdout.splitlines()) == 2


# -- tables and pipes ------------------------------------------------------------------------


def test_tables_are_never_cut_in_a_pipe(
    here: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "dumb")
    reason = "a reason of many words\nand two lines " * 20
    stopped = [*SUBMITTED, STARTED, *ended("crash", "x", "stop")]
    stopped[-1][1]["reason"] = reason.strip()
    fabricate(here / "runs", "gpt-tiny-7f3a", stopped)
    lines = hpctrain("status").stdout.splitlines()
    assert len(lines) == 2 and lines[1].endswith(reason.strip().replace("\n", " "))


def test_tables_hold_no_colour_and_no_markup(here: Path, slurm: FakeSlurm) -> None:
    stopped = [*SUBMITTED, STARTED, *ended("crash", "x", "stop")]
    stopped[-1][1]["reason"] = "[red]not markup[/red] [link=x]"
    fabricate(here / "runs", "gpt-tiny-7f3a", stopped)
    shown = hpctrain("status").stdout
    assert "[red]not markup[/red] [link=x]" in shown and "\x1b" not in shown


@pytest.mark.parametrize("columns", ["80"])
def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    shown = hpctrain("--help").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert CliRunner().invoke(cli, ["--version"]).output.startswith("hpctrain, version ")


@pytest.mark.parametrize("kind", ["spec", "profile"])
def test_a_schema_is_an_object_that_editors_can_read(kind: str) -> None:
    schema = json.loads(hpctrain("schema", kind).stdout)
    assert schema["type"] == "object"
    assert "name" in schema["properties"]


def test_errors_and_hints_are_wrapped_between_words_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    shown = on_terminal(60, "init", "-m", "no-such-model-of-anybody-at-all")
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 60 and lines[0].startswith("error: `no-such-model")
    assert all(
        line.startswith(("error: ", "hint: ", "       ", "      ", "exit")) or not line
        for line in lines
    ), shown
    done = hpctrain("init", "-m", "no-such-model-of-anybody-at-all")
    assert max(map(len, done.stderr.splitlines())) > 60, "one line elsewhere, for programs"
