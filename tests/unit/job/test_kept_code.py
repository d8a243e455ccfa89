"""The archive of hpctrain that a run keeps: what is in it, and that jobs need nothing else."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.base.errors import UsageError
from hpctrain.job import kept_code
from hpctrain.job.kept_code import keep_checkout_changes, keep_code
from hpctrain.records.find import RunFiles
from hpctrain.records.kept_code import archive_name, current_archive, parse_archive_name
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.runs.control import upgrade
from hpctrain.version import __version__

# What a job runs, by the words of its script and of its processes; none of them needs an engine.
_ENTRIES = (
    "hpctrain.supervise.__main__",
    "hpctrain.supervise.preflight",
    "hpctrain.supervise.evaluation_result",
    "hpctrain.tracking.__main__",
    "hpctrain.observe.attempt_exporter",
    "hpctrain.serve.replica.__main__",
    "hpctrain.serve.router.__main__",
    "hpctrain.data.making.container_image",
    "hpctrain.train.entry",
    "hpctrain.train.startup",
    "hpctrain.train.agent",
    "hpctrain.train.engines.megatron_lm.program",
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache after a first submission: packing takes a second, which few tests are about."""
    place = tmp_path_factory.mktemp("packed")
    layout = RunLayout(place / "runs/gpt-0001")
    layout.create()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        keep_code(layout)
    return place / "cache"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(packed, tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/hpctrain"


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "runs/gpt-7f3a")
    layout.create()
    return layout


def in_archive(archive: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program that finds hpctrain in the archive only, in another directory."""
    environment = {**os.environ, "PYTHONPATH": str(archive)}
    argv = [sys.executable, "-P", "-c", program]
    return subprocess.run(
        argv, env=environment, capture_output=True, text=True, cwd=archive.parent.parent
    )


def test_jobs_import_everything_from_the_archive(run: RunLayout) -> None:
    name = keep_code(run)
    assert parse_archive_name(name) is not None and f"-{__version__}-" in name
    program = (
        f"import importlib, sys\n"
        f"for entry in {_ENTRIES!r}: importlib.import_module(entry)\n"
        "found = {m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'hpctrain'}\n"
        "compiled = sum(file.endswith('.pyc') for file in found)\n"
        f"outside = [file for file in found if {name!r} not in file]\n"
        "print(len(found) > 100, compiled == len(found), outside)"
    )
    done = in_archive(run.current_code.resolve(), program)
    assert done.stdout.split("\n")[0] == "True True []", done.stderr


def test_a_traceback_shows_the_lines_of_the_archive(run: RunLayout) -> None:
    name = keep_code(run)
    archive = run.current_code.resolve()
    program = (
        "import traceback\n"
        "from hpctrain.base.durable import append_line\n"
        "try: append_line(1, 2)\n"
        "except TypeError: traceback.print_exc()"  # as the trainer and the supervisor write it
    )
    done = in_archive(archive, program)
    assert f'File "{name}/hpctrain/' in done.stderr, done.stderr
    lines = done.stderr.splitlines()
    place = max(n for n, line in enumerate(lines) if f'File "{name}' in line)
    with zipfile.ZipFile(archive) as packed:
        module = lines[place].split('"')[1].removeprefix(f"{name}/")
        text = packed.read(module).decode()
    assert lines[place + 1].strip() in text


def test_the_same_code_is_packed_once(
    run: RunLayout, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = keep_code(run)
    packed = run.current_code.read_bytes()
    assert (cache / name).read_bytes() == packed
    (cache / name).unlink()
    other = RunLayout(run.directory.parent / "gpt-0000")
    other.create()
    assert keep_code(other) == name
    packed = other.current_code.read_bytes()
    monkeypatch.setattr(kept_code, "_packed", lambda *_: pytest.fail("packed again"))
    third = RunLayout(run.directory.parent / "gpt-1111")
    third.create()
    keep_code(third)
    assert third.current_code.read_bytes() == packed
    mode = stat.S_IMODE((third.kept_software / name).stat().st_mode)
    assert mode == 0o600


def test_a_cache_that_others_can_write_is_not_trusted(run: RunLayout, cache: Path) -> None:
    name = keep_code(run)
    parts = len(zipfile.ZipFile(run.current_code).namelist())
    (cache / name).write_bytes(b"PK\x05\x06" + bytes(18))  # an archive, with nothing in it
    (cache / name).chmod(0o666)
    other = RunLayout(run.directory.parent / "gpt-0000")
    other.create()
    keep_code(other)
    assert len(zipfile.ZipFile(other.current_code).namelist()) == parts


def cut(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:-1000])


def emptied(archive: Path) -> None:
    archive.write_bytes(b"PK\x05\x06" + bytes(18))


def flipped(archive: Path) -> None:
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 0xFF
    archive.write_bytes(data)


def loop_flipped(archive: Path) -> None:
    """Change the compressed supervisor, which every job imports, compiled and as text."""
    data = bytearray(archive.read_bytes())
    with zipfile.ZipFile(archive) as opened:
        for name in ("hpctrain/supervise/loop.py", "hpctrain/supervise/loop.pyc"):
            entry = opened.getinfo(name)
            first = entry.header_offset + 30 + len(name)
            for place in range(first, first + entry.compress_size, 64):
                data[place] ^= 0xFF  # a single byte may be one of a docstring
    archive.write_bytes(data)


@pytest.mark.parametrize(
    "damage", [flipped, *(pytest.param(one, marks=pytest.mark.variant) for one in (cut, emptied))]
)
def test_a_damaged_archive_is_written_anew(
    run: RunLayout, cache: Path, damage: Callable[[Path], None]
) -> None:
    """Also where the one that is kept for further submissions is damaged."""
    name = keep_code(run)
    for archive in (cache / name, run.kept_software / name):
        damage(archive)
    assert keep_code(run) == name
    done = in_archive(run.current_code.resolve(), "import hpctrain; print(hpctrain.__file__)")
    assert name in done.stdout and zipfile.ZipFile(run.current_code).testzip() is None


def test_a_job_takes_no_other_code_for_an_archive_that_cannot_be_read(run: RunLayout) -> None:
    """Python would pass over it, and import whatever is installed by now."""
    keep_code(run)
    archive = run.current_code.resolve()
    installed = Path(kept_code.__file__).parents[2]
    argv = ["-P", "-m", "hpctrain.supervise", "--run-directory", ".", "--", "srun"]
    for damage in (emptied, cut, loop_flipped):
        keep_code(run)
        damage(archive)
        done = subprocess.run(
            [sys.executable, *argv],
            env={**os.environ, "PYTHONPATH": f"{archive}:{installed}"},
            cwd=run.directory,
            capture_output=True,
            text=True,
        )
        assert done.returncode, "it has begun with other code"
        if damage is loop_flipped:
            assert done.returncode == 1 and "zipimport" in done.stderr, "the import ends it"
        else:
            assert done.returncode == 7 and f"error: {archive}, the code of" in done.stderr
            assert f"`hpctrain upgrade {run.run_id}`" in done.stderr


@pytest.mark.variant("test_a_cache_that_others_can_write_is_not_trusted")
def test_a_home_without_room_does_not_matter(
    run: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_code(run)
    assert zipfile.is_zipfile(run.current_code)


def test_what_is_not_committed_in_a_checkout_is_kept(run: RunLayout, tmp_path: Path) -> None:
    checkout = tmp_path / "Megatron-LM"
    checkout.mkdir()
    keep_checkout_changes(run, checkout)
    assert not run.checkout_changes.exists(), "no checkout of git"
    git = ("git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b")
    (checkout / "model.py").write_text("layers = 1\n")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run([*git, *words], check=True)
    keep_checkout_changes(run, checkout)
    assert not run.checkout_changes.exists(), "everything is committed"
    (checkout / "model.py").write_text("layers = 2\n")
    (checkout / "kernels").mkdir()
    (checkout / "kernels/new.py").write_text("fast = True\n")
    before = (checkout / ".git/index").read_bytes()
    keep_checkout_changes(run, checkout)
    kept = run.checkout_changes.read_text()
    assert "+layers = 2" in kept and "+fast = True" in kept
    assert (checkout / ".git/index").read_bytes() == before
    for words in (("stash", "-q", "-u"), ("apply", str(run.checkout_changes))):
        subprocess.run([*git, *words], check=True)
    assert (checkout / "kernels/new.py").read_text() == "fast = True\n", "it can be made again"


def test_a_run_of_an_older_hpctrain_cannot_be_moved(run: RunLayout) -> None:
    with pytest.raises(UsageError, match="keeps no code"):
        upgrade(RunFiles(run))
    assert RunFiles(run).ledger.events() == []


def test_a_run_whose_settings_cannot_be_read_stays_where_it_is(run: RunLayout) -> None:
    run.kept_software.joinpath("hpctrain-0.0.1-0123456789ab.zip").touch()
    kept_code.use_archive(run, "hpctrain-0.0.1-0123456789ab.zip")
    run.supervise_config.write_text('{"schema_version": 99}')
    with pytest.raises(Exception, match="format version 99"):
        upgrade(RunFiles(run))
    assert current_archive(run) == "hpctrain-0.0.1-0123456789ab.zip"
    assert EventKind.UPGRADED not in {event.event for event in RunFiles(run).ledger.events()}


def test_names() -> None:
    name = archive_name("0.1.0rc1", "0123456789abcdef")
    assert name == "hpctrain-0.1.0rc1-0123456789ab.zip"
    assert parse_archive_name(name) == ("0.1.0rc1", "0123456789ab")
    assert parse_archive_name("current") is None and parse_archive_name("site-packages") is None
