"""Real child processes in place of Slurm commands: hanging, missing, signalled."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.errors import SlurmRefusedError, SlurmUnreachableError
from hpctrain.slurm import RequeueResult, SlurmClient
from hpctrain.slurm.process import Command, CommandResult, accepted, hint_about, run_command


def shim(directory: Path, name: str, body: str) -> dict[str, str]:
    """An environment in which `name` is a shell script."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return {"PATH": f"{directory}:/usr/bin:/bin"}


def test_a_hanging_command_ends_with_the_time_limit_and_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, started = shim(tmp_path, "squeue", "exec sleep 600"), time.monotonic()
    begun: list[subprocess.Popen[str]] = []

    def popen(*words: Any, **options: Any) -> subprocess.Popen[str]:
        begun.append(real(*words, **options))
        return begun[-1]

    real = subprocess.Popen
    monkeypatch.setattr("hpctrain.slurm.process.subprocess.Popen", popen)
    with pytest.raises(SlurmUnreachableError, match=r"`squeue --states=all` within 0\.5 s"):
        SlurmClient(environment, timeout_seconds=0.5).jobs([1])
    assert time.monotonic() - started < 300
    assert [process.returncode for process in begun] == [-signal.SIGKILL]


def test_a_hanging_submission_warns_that_the_job_may_exist(tmp_path: Path) -> None:
    environment = shim(tmp_path, "sbatch", "exec sleep 600")
    with pytest.raises(SlurmUnreachableError) as caught:
        SlurmClient(environment, timeout_seconds=0.3).submit("#!/bin/sh\n")
    assert "may have been accepted" in (caught.value.hint or "")


def test_a_hanging_requeue_is_unreachable(tmp_path: Path) -> None:
    environment = shim(tmp_path, "scontrol", "exec sleep 600")
    answer = SlurmClient(environment, timeout_seconds=0.3).requeue(7)
    assert answer.result is RequeueResult.UNREACHABLE


def test_a_missing_command_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SlurmUnreachableError, match="cannot run `scontrol`") as caught:
        SlurmClient({"PATH": str(tmp_path)}).config()
    assert "login node" in (caught.value.hint or "")


def test_output_that_is_not_utf8_is_still_read(tmp_path: Path) -> None:
    environment = shim(tmp_path, "x", r"printf 'a\377b'; printf e >&2; exit 3")
    answer = run_command(Command(("x",), environment, 300.0))
    assert (answer.returncode, answer.stdout, answer.stderr) == (3, "a�b", "e")


def test_a_script_is_handed_over_on_standard_input(tmp_path: Path) -> None:
    environment = shim(tmp_path, "sbatch", f"cat > {tmp_path}/got; echo 5")
    text = "#!/bin/sh\necho 'a b' \"$(id)\" ü\n"
    assert SlurmClient(environment, timeout_seconds=300.0).submit(text).job_id == 5
    assert (tmp_path / "got").read_text() == text


SENDER = "for s in TERM HUP INT USR1 USR2; do kill -$s $$; done; echo survived"


def test_a_shielded_command_survives_the_signals_of_a_job_end(tmp_path: Path) -> None:
    environment = shim(tmp_path, "x", SENDER)
    shielded = run_command(Command(("x",), environment, 300.0, shielded=True))
    assert (shielded.returncode, shielded.stdout) == (0, "survived\n")
    assert run_command(Command(("x",), environment, 300.0)).returncode == -signal.SIGTERM


def test_the_shield_leaves_our_own_signals_as_they_were(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    run_command(Command(("x",), shim(tmp_path, "x", "exit 0"), 10.0, shielded=True))
    with pytest.raises(SlurmUnreachableError):
        run_command(Command(("missing",), {"PATH": str(tmp_path)}, 10.0, shielded=True))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_the_room_is_light() -> None:
    code = "import sys, hpctrain.slurm, hpctrain.slurm.fake; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stdout.split())
    assert not loaded & {"pydantic", "click", "jinja2", "rich", "torch", "json", "asyncio"}
    ours = {name for name in loaded if name.startswith("hpctrain.")}
    allowed = {
        "hpctrain.base",
        "hpctrain.base.errors",
        "hpctrain.base.units",
        "hpctrain.base.durable",
        "hpctrain.base.printable_text",
        "hpctrain.version",
    }
    assert {name for name in ours if not name.startswith("hpctrain.slurm")} <= allowed


# -- Hints about refusals, by Slurm's words -----------------------------------------------------


_FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("Invalid account or account/partition combination specified", "sacctmgr show assoc"),
        ("Invalid qos specification", "`resources.qos`"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "resources.walltime"),
        ("Requested node configuration is not available", "profile check"),
        ("Invalid generic resource (gres) specification", "slurm.gpu_request"),
    ],
)
def test_a_refusal_says_what_helps(words: str, hint: str) -> None:
    with pytest.raises(SlurmRefusedError) as refused:
        accepted(["sbatch"], CommandResult(1, "", f"{_FAILED}{words}\n"))
    assert words in str(refused.value) and hint in str(refused.value.hint)
    assert refused.value.__notes__ == [f"hint: {refused.value.hint}"], "a traceback has it, too"


def test_no_configuration_is_no_login_node() -> None:
    words = "sbatch: fatal: Could not establish a configuration source"
    with pytest.raises((SlurmRefusedError, SlurmUnreachableError)) as refused:
        accepted(["sbatch"], CommandResult(1, "", words))
    assert "login node" in str(refused.value.hint)


def test_unknown_words_have_no_hint() -> None:
    assert hint_about("the moon is full") is None
