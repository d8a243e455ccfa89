"""A second user of this machine, for what a team does with one directory of runs.

Belongs here: calling functions and the command line as that user, and giving them rights as the
README tells people to. Does not belong here: what is asserted about it.

Only root can become somebody else; the fixture `another_user` skips, with that reason, elsewhere.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import importlib
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import pytest
from command_line import Outcome
from command_line import hpctrain as command

import hpctrain
from hpctrain.sandbox.sandbox import Sandbox

NAME = "nobody"
_PATIENCE_SECONDS = 300.0
_PACKAGE = Path(hpctrain.__file__).parent
# What a login node needs of Python; no engines.
_WANTED = {*sys.stdlib_module_names, "hpctrain", "click", "pydantic", "rich", "ruamel", "jinja2"}
_WITH_TORCH = ("train", "prepare", "convert")
_IMPORT = re.compile(r"^\s*(?:from ([\w.]+) import|import ([\w.]+))", re.MULTILINE)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class AnotherUser:
    """Somebody with an account of this machine and no rights of ours.

    `environment` is added to theirs: a Slurm that they may use, for one (see `client_of`).
    """

    account: pwd.struct_passwd
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.account.pw_name

    def call(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        """What `function` returns when this user calls it.

        Raises RuntimeError in the words of the exception that ended it.
        """
        import_what_root_hides()
        context = get_context("fork")  # not a new interpreter: it may lie where only root reads
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=self._live, args=(theirs, function, arguments))
        process.start()
        theirs.close()
        try:
            assert ours.poll(_PATIENCE_SECONDS), f"{function} gave {self.name} no answer"
            result, failure = ours.recv()
        except EOFError:
            process.join()
            raise RuntimeError(f"{function} died with exit code {process.exitcode}") from None
        finally:
            process.join(timeout=1)
            process.kill()
        if failure:
            raise RuntimeError(failure)
        return result  # type: ignore[no-any-return]

    def hpctrain(self, *arguments: str) -> Outcome:
        """`hpctrain ARGUMENTS`, typed by this user."""
        return self.call(command, *arguments)

    @contextlib.contextmanager
    def attending(self) -> Iterator[Bystander]:
        """The same, for a caller that is about to start threads: nobody may fork after that."""
        import_what_root_hides()
        context = get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=self._attend, args=(theirs, ours), daemon=True)
        process.start()
        theirs.close()
        try:
            yield Bystander(self, ours)
        finally:
            ours.close()
            process.join(timeout=5)
            process.kill()

    def allow(self, path: Path, rights: str) -> None:
        """As the README says it: `setfacl -m u:USER:RIGHTS PATH`. Skips the test without it."""
        if shutil.which("setfacl") is None:
            pytest.skip("setfacl is not installed (package acl)")
        rule = ["setfacl", "-m", f"u:{self.name}:{rights}", str(path)]
        done = subprocess.run(rule, capture_output=True, text=True, timeout=30, check=False)
        if "not supported" in done.stderr:
            pytest.skip(f"the file system of {path} knows no ACLs: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr

    def client_of(self, sandbox: Sandbox) -> AnotherUser:
        """The same user as a user of this sandbox: its slurmds are root's and serve everybody."""
        _open_to_all(sandbox)
        return AnotherUser(self.account, {**self.environment, **sandbox.environment()})

    def _live(
        self, answer: Connection, function: Callable[..., object], arguments: tuple[object, ...]
    ) -> None:
        try:
            self._become()
            answer.send((function(*arguments), ""))
        except BaseException as error:
            answer.send((None, f"{type(error).__name__}: {error}"))

    def _attend(self, questions: Connection, ours: Connection) -> None:
        """Answers one command after the other until the other end is closed."""
        ours.close()
        self._become()
        with contextlib.suppress(EOFError):
            while True:
                questions.send(command(*questions.recv()))

    def _become(self) -> None:
        """For good: this process is of no use to root any more."""
        os.setgroups([])
        os.setgid(self.account.pw_gid)
        os.setuid(self.account.pw_uid)
        os.umask(0o022)
        os.chdir("/")
        os.environ.update(
            {**self.environment, "HOME": "/nonexistent", "USER": self.name, "LOGNAME": self.name}
        )


@dataclass(frozen=True)
class Bystander:
    """Another user in a process that waits for commands to type; one caller at a time."""

    user: AnotherUser
    _pipe: Connection

    def hpctrain(self, *arguments: str) -> Outcome:
        """`hpctrain ARGUMENTS`, typed by this user."""
        self._pipe.send(arguments)
        assert self._pipe.poll(_PATIENCE_SECONDS), f"{self.user.name} got no answer"
        return self._pipe.recv()  # type: ignore[no-any-return]


def another_user_or_none() -> AnotherUser | None:
    """Only root can become another user."""
    return AnotherUser(pwd.getpwnam(NAME)) if os.geteuid() == 0 else None


@contextlib.contextmanager
def another_user_attending(sandbox: Sandbox) -> Iterator[Bystander | None]:
    """Another user of this sandbox who waits for commands to type; None where there is none."""
    user = another_user_or_none()
    if user is None:
        yield None
        return
    with user.client_of(sandbox).attending() as bystander:
        yield bystander


@contextlib.contextmanager
def public_directory() -> Iterator[Path]:
    """A directory that everybody may enter; those of pytest are closed to others."""
    place = Path(tempfile.mkdtemp(prefix="ht-", dir="/tmp"))
    try:
        place.chmod(0o755)
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _open_to_all(sandbox: Sandbox) -> None:
    """What clients and jobs need: configuration, munge's socket and the nodes' copies of scripts.

    slurmd runs the copy as the job's user; where that user may not reach it, execve fails and the
    job ends 2 (seen with 22.05.8).
    """
    paths = sandbox.paths
    spools = [paths.spool / node for node in sandbox.state.shape.node_names]
    ways = (sandbox.directory.parent, sandbox.directory, paths.sockets, paths.spool, *spools)
    for directory in ways:
        directory.chmod(directory.stat().st_mode | 0o011)
    paths.slurm_conf.chmod(0o644)


@functools.cache
def import_what_root_hides() -> None:
    """Import what hpctrain imports late, once, before the first fork.

    Python's own library may be out of reach of another user (an interpreter below /root).
    """
    for encoding in ("utf-8-sig", "latin-1", "idna"):
        codecs.lookup(encoding)
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path.relative_to(_PACKAGE).parts[0] in _WITH_TORCH:
            continue
        for name in sorted(_imported(path)):
            words = name.split(".")
            if words[0] in _WANTED and not {*words[1:2]} & {*_WITH_TORCH}:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)


def _imported(path: Path) -> set[str]:
    """What the lines that begin an import name; to parse 900 files would take seconds."""
    return {first or second for first, second in _IMPORT.findall(path.read_text())}
