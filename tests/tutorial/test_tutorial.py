"""docs/tutorial.md as a person follows it, from the wheel, on a real Slurm.

Every command of the page is typed in its order; what it prints is compared with the page.
`--write-golden` writes other outputs into the page and leaves commands as they are; review the
diff, and put `…` where a line depends on the moment.
"""

from __future__ import annotations

import contextlib
import difflib
import grp
import os
import pwd
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
from another_user import AnotherUser, another_user_or_none, public_directory
from command_line import on_terminal
from installed_wheel import ROOT, install_wheel
from tutorial_page import Block, Command, blocks_of, differs, rewritten, shown
from typed_shell import COLUMNS, TypedShell, typed_shell

from hpctrain.base.errors import UsageError
from hpctrain.sandbox.sandbox import Sandbox

PAGE = ROOT / "docs" / "tutorial.md"
_PATIENCE_SECONDS = 300.0
_PAUSE_SECONDS = 2.0


@dataclass
class Reader:
    """Somebody who follows the page: a shell, a directory, and perhaps a colleague."""

    shell: TypedShell
    place: Path
    colleague: AnotherUser | None
    outputs: dict[int, list[str]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    @property
    def names(self) -> dict[str, str]:
        """What is called otherwise on the page, the longest first."""
        ours = pwd.getpwuid(os.getuid()).pw_name
        found = {
            str(self.place / "first-run"): "/users/ben/first-run",
            str(self.place / "venv"): "/users/ben/venv",
            str(self.place / "project"): "/project/llm",
        }
        if self.colleague is not None:
            group = grp.getgrgid(self.colleague.account.pw_gid).gr_name
            found |= {group: "llm", self.colleague.name: "ada", f"by {ours}": "by ben"}
            found |= {f"belongs to {ours}": "belongs to ben", f" {ours} ": " ben "}
            found |= {f"Owner      {ours}": "Owner      ben"}
        return found

    def follow(self, block: Block) -> None:
        """Type the commands of a block, and note where the page says something else."""
        last = block.commands[-1]
        for command in block.commands:
            if command.prompt == "ada$ " and self.colleague is None:
                continue  # only root can be two people
            code, lines = self._typed(command)
            if command is last and block.until is not None:
                code, lines = self._repeated(command, block.until, code, lines)
            expected = block.exit_code if command is last else 0
            printed = "\n".join(lines)
            assert code == expected, f"line {command.first_line + 1}: exit {code}\n{printed}"
            self._compare(block, command, lines)

    def _repeated(
        self, command: Command, until: str, code: int, lines: list[str]
    ) -> tuple[int, list[str]]:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not re.search(until, "\n".join(lines)):
            assert time.monotonic() < deadline, f"`{command.text}` never matched {until}: {lines}"
            while not re.search(until, "\n".join(self._look(command))):
                assert time.monotonic() < deadline, f"`{command.text}` never matched {until}"
                time.sleep(_PAUSE_SECONDS)
            code, lines = self._typed(command)
        return code, lines

    def _look(self, command: Command) -> list[str]:
        """What the command prints now: in this process, as starting a Python costs more."""
        if command.prompt != "$ ":
            return self._typed(command)[1]
        program, *words = shlex.split(command.text)
        assert program == "hpctrain"
        _, printed = self.shell.type("env")
        variables = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
        with (
            mock.patch.dict(os.environ, variables, clear=True),
            contextlib.chdir(self.place / "first-run"),
        ):
            printed, _, _ = on_terminal(COLUMNS, *words).rpartition("exit code ")
        return shown(printed, self.names)

    def _typed(self, command: Command) -> tuple[int, list[str]]:
        text = command.text
        for real, name in self.names.items():
            if name.startswith("/") or name == "llm":
                text = re.sub(rf"(?<![\w/]){re.escape(name)}(?![\w-])", real, text)
        if command.prompt == "$ ":
            code, printed = self.shell.type(text)
        else:
            code, printed = self._typed_by_colleague(text)
        return code, shown(printed, self.names)

    def _typed_by_colleague(self, text: str) -> tuple[int, str]:
        assert self.colleague is not None
        sandbox = Sandbox.open(self.place / "first-run" / ".sandbox")
        ada = self.colleague.client_of(sandbox)
        runs = {"HPCTRAIN_RUNS": str(self.place / "project" / "runs")}
        ada = AnotherUser(ada.account, {**ada.environment, **runs})
        program, *words = shlex.split(text)
        assert program == "hpctrain"
        printed, _, code = ada.call(on_terminal, COLUMNS, *words).rpartition("exit code ")
        return int(code), printed

    def _compare(self, block: Block, command: Command, lines: list[str]) -> None:
        long = [line for line in lines if len(line) > COLUMNS and "/users/ben" not in line]
        if not differs(command.lines, lines, live=block.live, loose=block.loose):
            return
        self.outputs[command.first_line] = lines
        diff = difflib.unified_diff(command.lines, lines, "page", "now", lineterm="")
        where = f"line {command.first_line + 1}: {command.prompt}{command.text}"
        self.differences.append("\n".join([where, *diff, *long]))


@pytest.fixture
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """In a directory that others may enter: a working directory, the wheel, a project's place."""
    with public_directory() as place:
        install_wheel(tmp_path_factory.mktemp("wheel"), place / "venv")
        for name in ("first-run", "project"):
            (place / name).mkdir(mode=0o755)
        variables = {
            "PATH": f"{place / 'venv' / 'bin'}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(place / "venv"),
            "HOME": str(place),
            "LANG": "C.UTF-8",
            "TERM": "xterm",
            "NO_COLOR": "1",
            "TZ": "UTC0",
            "OMP_NUM_THREADS": "1",
        }
        try:
            with typed_shell(place / "first-run", variables) as shell:
                yield Reader(shell, place, another_user_or_none())
        finally:
            with contextlib.suppress(UsageError):
                Sandbox.open(place / "first-run" / ".sandbox").down()


@pytest.mark.nightly("minutes of typing; the README's commands are typed in every run")
def test_the_page_says_what_happens(reader: Reader, pytestconfig: pytest.Config) -> None:
    page = PAGE.read_text()
    blocks = blocks_of(page)
    try:
        for block in blocks:
            reader.follow(block)
    finally:
        if pytestconfig.getoption("--write-golden") and reader.outputs:
            PAGE.write_text(rewritten(page, reader.outputs))
    if not pytestconfig.getoption("--write-golden"):
        found = "\n\n".join(reader.differences)
        assert not found, f"{found}\n\n--write-golden writes these outputs into {PAGE.name}"
