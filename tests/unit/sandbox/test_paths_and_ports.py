"""Sockets, ports, versions of programs, Slurms that can be fetched, and what is missing."""

from __future__ import annotations

import re
import socket
import subprocess
import tomllib
from pathlib import Path

import pytest

from hpctrain.base.errors import SlurmError, SlurmUnreachableError, UsageError
from hpctrain.sandbox import debian
from hpctrain.sandbox import paths as ports_module
from hpctrain.sandbox.debian import default_cache, fetch_slurm, slurm_directory
from hpctrain.sandbox.paths import Ports, are_free, find_ports, sockets_fit
from hpctrain.sandbox.programs import call, find_programs, parse_version
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import default_shape


def test_a_name_fits_as_long_as_the_kernel_can_bind_it(tmp_path: Path) -> None:
    step = "/spool/n0/n0_4294967295.4294967295"
    longest = Path("/" + "a" * (107 - len(step) - 1))
    assert sockets_fit(longest, "n0")
    assert not sockets_fit(longest, "n10")
    assert not sockets_fit(Path("/my cluster"), "n0"), "gres.conf has lists of devices"
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError, match="too long"):
        probe.bind(f"{longest}b{step}")


def test_a_taken_port_spoils_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not where the sandboxes of other tests take and release theirs meanwhile.
    monkeypatch.setattr(ports_module, "LOWEST", 32701)
    monkeypatch.setattr(ports_module, "HIGHEST", 32767)
    ports = find_ports(3)
    assert are_free(ports)
    with socket.create_server(("127.0.0.1", ports.prometheus)):
        assert not are_free(ports)
        assert are_free(Ports(ports.controller, 2))


def test_two_sandboxes_that_start_together_have_ports_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their daemons listen seconds after the ports were found free."""
    monkeypatch.setattr(ports_module, "LOWEST", 32401)
    monkeypatch.setattr(ports_module, "HIGHEST", 32700)
    blocks = [find_ports(1) for _ in range(6)]
    numbers = [number for ports in blocks for number in (ports.controller, ports.first_node)]
    assert len(set(numbers)) == len(numbers)


def test_ports_lie_below_the_ephemeral_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest block, whatever other sandboxes have taken of it."""
    monkeypatch.setattr(ports_module.random, "randint", lambda lowest, highest: highest)
    monkeypatch.setattr(ports_module, "are_free", lambda ports: True)
    monkeypatch.setattr(ports_module, "_reserve", lambda ports: True)
    ports = find_ports(1000)
    assert ports.prometheus == ports_module.HIGHEST
    assert ports.prometheus < 32768


@pytest.mark.parametrize(
    ("answer", "version"), [("slurm-wlm 22.05.8\n", (22, 5)), ("slurm 25.11.0-0rc1", (25, 11))]
)
def test_versions(answer: str, version: tuple[int, int]) -> None:
    assert parse_version(answer) == version


def test_an_answer_without_version_is_an_error() -> None:
    with pytest.raises(SlurmError, match="no version"):
        parse_version("slurm")


def test_missing_programs_are_named_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("hpctrain.sandbox.programs._SYSTEM_DIRECTORIES", ())
    with pytest.raises(SlurmUnreachableError, match="slurmctld, slurmd") as caught:
        find_programs()
    assert caught.value.hint == "sudo apt-get install slurmctld slurmd slurm-client munge"


def test_without_a_database_a_slurm_has_no_accounting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing is named alone, with the way that needs no root first."""
    for name in ("slurmctld", "slurmd", "scontrol", "sinfo", "squeue", "scancel", "sacct"):
        (tmp_path / name).write_text("#!/bin/sh\necho slurm 24.11.5\n")
        (tmp_path / name).chmod(0o755)
    for name in ("munged", "munge", "slurmdbd", "sacctmgr"):
        (tmp_path / name).symlink_to("slurmctld")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("hpctrain.sandbox.programs._SYSTEM_DIRECTORIES", ())
    assert find_programs().version == (24, 11)
    with pytest.raises(SlurmUnreachableError, match="not found here: mariadbd, mariadb-install-db"):
        find_programs(accounting=True)


def test_a_call_that_fails_repeats_the_words_of_the_program() -> None:
    with pytest.raises(SlurmError, match="sh failed with exit code 3: no luck"):
        call(["/bin/sh", "-c", "echo no luck >&2; exit 3"], {}, timeout_seconds=300)


def test_a_call_that_hangs_is_given_up() -> None:
    with pytest.raises(SlurmUnreachableError, match=r"sleep gave no answer in 0\.1 s"):
        call(["/bin/sleep", "600"], {}, timeout_seconds=0.1)


def test_there_is_no_sandbox_in_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no sandbox"):
        Sandbox.open(tmp_path)


def test_a_broken_state_file_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "sandbox.json").write_text('{"shape": 1}')
    with pytest.raises(UsageError, match="cannot be read"):
        Sandbox.open(tmp_path)


def test_down_never_removes_a_directory_that_is_no_sandbox(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="no sandbox"):
        Sandbox(tmp_path).down()
    assert (tmp_path / "thesis.tex").exists()


def test_create_refuses_a_directory_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="not empty"):
        Sandbox.create(tmp_path, default_shape())


def test_create_refuses_a_place_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot make a sandbox"):
        Sandbox.create(tmp_path / "file", default_shape())


def test_create_refuses_to_replace_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "sandbox.json").touch()
    with pytest.raises(UsageError, match="holds a sandbox already"):
        Sandbox.create(tmp_path, default_shape())


# Which Slurms can be named, where they are kept, and what is said when one cannot be fetched.


def acting(monkeypatch: pytest.MonkeyPatch, place: Path, text: str) -> None:
    """A script in the place of the one that unpacks."""
    script = place / "acting"
    script.write_text(text)
    monkeypatch.setattr(debian, "_SCRIPT", script)


def unpacks(version: str) -> str:
    """It makes a Slurm whose programs all print this version."""
    return f"""\
mkdir -p "$2/bin" "$2/plugins"
for name in slurmctld slurmd slurmstepd scontrol sinfo squeue scancel munged munge; do
    printf '#!/bin/sh\\necho slurm-wlm {version}\\n' >"$2/bin/$name"
    chmod +x "$2/bin/$name"
done
"""


def test_the_script_is_installed_with_what_it_sources() -> None:
    script = debian._SCRIPT
    sourced = re.findall(r'^source ".*/([\w.-]+)"$', script.read_text(), re.MULTILINE)
    pyproject = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())
    installed = pyproject["tool"]["setuptools"]["package-data"]["hpctrain"]
    assert sourced
    assert {f"sandbox/{name}" for name in (script.name, *sourced)} <= set(installed)
    done = subprocess.run(["bash", str(script)], cwd="/", capture_output=True, text=True)
    assert done.returncode == 2
    assert "slurm-from-debian SUITE DIRECTORY" in done.stderr


def test_a_release_lies_in_the_cache_and_a_directory_is_itself(tmp_path: Path) -> None:
    assert slurm_directory("24.11", tmp_path) == tmp_path / "24.11"
    assert slurm_directory(str(tmp_path), Path("/cache")) == tmp_path


@pytest.mark.parametrize(
    ("slurm", "message"),
    [("23.11", "no Debian suite has Slurm 23.11"), ("./nowhere", "no directory ./nowhere")],
)
def test_what_is_neither_is_refused_with_the_releases(slurm: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        slurm_directory(slurm, Path("/cache"))
    assert "22.05, 24.11, 26.05" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("variable", "below"), [("/caches", "/caches"), ("", "~/.cache"), ("relative", "~/.cache")]
)
def test_the_cache_is_where_caches_belong(
    variable: str, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert default_cache() == Path(below).expanduser() / "hpctrain" / "slurm"


def test_what_was_fetched_has_the_version_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting(monkeypatch, tmp_path, unpacks("24.11.5"))
    assert fetch_slurm("24.11", tmp_path / "cache") == tmp_path / "cache" / "24.11"
    acting(monkeypatch, tmp_path, unpacks("26.11.1"))
    with pytest.raises(SlurmError, match=r"forky has Slurm 26\.11 now, and not 26\.05"):
        fetch_slurm("26.05", tmp_path / "cache")


def test_no_network_is_told_from_everything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting(monkeypatch, tmp_path, "echo == fetching >&2; echo error: nobody there >&2; exit 69")
    with pytest.raises(SlurmUnreachableError, match=r"Slurm 24\.11: nobody there"):
        fetch_slurm("24.11", tmp_path)
    acting(monkeypatch, tmp_path, "echo error: a bad signature >&2; exit 1")
    with pytest.raises(SlurmError, match="a bad signature") as caught:
        fetch_slurm("24.11", tmp_path)
    assert not isinstance(caught.value, SlurmUnreachableError)


def test_a_cache_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SlurmError, match=r"cannot unpack Slurm 24\.11 into"):
        fetch_slurm("24.11", tmp_path / "file")
