"""Finds run directories by name, and names new ones.

Belongs here: which directory a name means. Does not belong here: Slurm or the state of a run.
"""

from __future__ import annotations

import functools
import os
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import NoSuchRunError, UsageError
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Ledger
from hpctrain.records.requests import user_name
from hpctrain.records.service_layout import ServiceLayout

RUNS_VARIABLE = "HPCTRAIN_RUNS"


def runs_directory(given: Path | None = None) -> Path:
    """Choose the directory of runs: the given one, else $HPCTRAIN_RUNS, else ./runs."""
    return given or Path(os.environ.get(RUNS_VARIABLE) or "runs")


def users_file(runs: Path, name: str) -> Path:
    """Return this user's `NAME.jsonl`; in a shared directory of runs each user has one."""
    common = runs / f"{name}.jsonl"
    try:
        foreign = common.stat().st_uid != os.getuid()
    except OSError:
        foreign = False
    return runs / f"{name}-{user_name()}.jsonl" if foreign else common


def command_in(runs: Path, words: str, name: str) -> str:
    """Complete the command `hpctrain WORDS NAME`, as somebody has to type it here.

    It has `--runs` for a directory of runs that hpctrain does not choose by itself.
    """
    where = [] if runs.absolute() == runs_directory().absolute() else ["--runs", str(runs)]
    return shlex.join(["hpctrain", *words.split(), name, *where])


@dataclass(frozen=True)
class RunFiles:
    """One run directory and its ledger.

    `unreadable` is the reason why nothing can be read; it is empty for a readable run.
    """

    layout: RunLayout
    unreadable: str = ""

    @property
    def run_id(self) -> str:
        return self.layout.run_id

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.layout.ledger)

    @property
    def owner_id(self) -> int:
        """The user id whose jobs the run has: that of the owner of its directory."""
        return self.layout.directory.stat().st_uid

    @property
    def owner_name(self) -> str | None:
        """The user whose jobs the run has; None where that cannot be found out."""
        return _owner_name(self.layout.directory)

    def command(self, words: str) -> str:
        """Complete the command `hpctrain WORDS` about this run, as somebody has to type it here."""
        return command_in(self.layout.directory.parent, words, self.run_id)

    def refuse_unreadable(self) -> None:
        """Raise UsageError for a run that cannot be read."""
        if self.unreadable:
            me, directory = user_name(), shlex.quote(str(self.layout.directory.absolute()))
            shared = (
                f"its owner shares it with `setfacl -R -m u:{me}:rX,d:u:{me}:rX {directory}`, or "
                "all runs with a group by `run_access: group` in the profile"
            )
            hint = shared if self.owner_name not in (None, me) else None
            raise UsageError(f"run `{self.run_id}` {self.unreadable}", hint=hint)

    def refuse_unless_removable(self, verb: str) -> None:
        """Raise UsageError for a run whose files this user may not remove."""
        if self.layout.directory.is_symlink():
            raise UsageError(
                f"run `{self.run_id}` is a link to {self.layout.directory.readlink()}: nothing was "
                "done",
                hint=f"name the directory behind it: `--runs DIRECTORY` for `hpctrain {verb}`",
            )
        if not os.access(self.layout.directory, os.W_OK | os.X_OK):
            whose = _whose(self.layout.directory)
            word = "remove" if verb == "rm" else verb
            raise UsageError(f"you cannot {word} run `{self.run_id}`, which {whose}")

    def refuse_unless_writable(self, verb: str) -> None:
        """Raise UsageError for a run whose ledger this user may not write into.

        Its jobs are somebody else's, and only their owner can end or submit them.
        """
        if not os.access(self.layout.ledger, os.W_OK):
            whose = _whose(self.layout.directory)
            hint = f"`{self.command('stop')}` makes the request to the run, if you may"
            if verb in ("resume", "submit"):
                hint = "Slurm lets only the owner of a job release it or submit it again"
            raise UsageError(
                f"you cannot {verb} run `{self.run_id}`, which {whose}",
                hint=None if _is_read_only(self.layout.ledger) else hint,
            )

    def refuse_unless_steerable(self, verb: str) -> None:
        """Raise UsageError for a run whose `control/` this user may not write into."""
        control = self.layout.control
        if os.access(control, os.W_OK | os.X_OK):
            return
        me = user_name()
        raise UsageError(
            f"you cannot {verb} run `{self.run_id}`, which {_whose(self.layout.directory)}",
            hint=None
            if _is_read_only(control)
            else f"its owner allows it with `setfacl -m u:{me}:rwx,d:u:{me}:rw {control}`, or for "
            "a whole group and all runs with `run_access: group-control` in the profile",
        )


def is_service(directory: Path) -> bool:
    """Tell whether a directory beside runs is that of a service, whose jobs have run directories of
    their own below it."""
    return os.path.exists(ServiceLayout(directory).spec)


def all_runs(runs: Path) -> list[RunFiles]:
    """List the runs under `runs`, newest ledger last.

    Directories without a ledger are not runs, nor are services.
    Runs that this user may not read, and those whose ledger is damaged, come first, each with the
    reason, so that they hide none of the others.
    """
    try:
        with os.scandir(runs) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(f"{runs} cannot be read: {error.strerror}") from error
    found = [_look_at(RunLayout(runs / name)) for name in names if not name.startswith(".")]
    return [run for _, run in sorted((one for one in found if one), key=lambda one: one[0])]


def _look_at(layout: RunLayout) -> tuple[tuple[int, str], RunFiles] | None:
    """Open a run and return it with its sort key; None for a directory that is no run.

    A service has a ledger, too, and runs below it.
    """
    if os.path.lexists(ServiceLayout(layout.directory).spec):
        return None
    try:
        found = layout.ledger.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        run = RunFiles(layout, _unreadable(layout.directory, error.strerror))
        return (0, layout.run_id), run
    if is_service(layout.directory):
        return None
    if not stat.S_ISREG(found.st_mode):
        return (0, layout.run_id), RunFiles(layout, "is damaged: ledger.jsonl is no file")
    if not os.access(layout.ledger, os.R_OK):
        reason = _unreadable(layout.directory, "Permission denied")
        return (0, layout.run_id), RunFiles(layout, reason)
    return (found.st_mtime_ns, layout.run_id), RunFiles(layout)


def _unreadable(directory: Path, problem: str | None) -> str:
    """Describe why a run cannot be read, with its owner if that can be found out."""
    owner = _owner_name(directory)
    return f"cannot be read: {problem}{f'; it belongs to {owner}' if owner else ''}"


def _whose(directory: Path) -> str:
    """Say why this user may not write: the file system, or the owner of the directory."""
    if _is_read_only(directory):
        return "is on a file system that is read-only here"
    owner = _owner_name(directory)
    return f"belongs to {owner}" if owner else "you may only read"


def _is_read_only(path: Path) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _owner_name(directory: Path) -> str | None:
    try:
        return _name_of(directory.stat().st_uid)
    except OSError:
        return None


@functools.cache
def _name_of(user_id: int) -> str | None:
    """Ask once for each user: a site may have its accounts in a directory service."""
    import pwd

    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return None


def find_run(runs: Path, name: str) -> RunFiles:
    """Find the run of that id or directory, or the only one whose id starts with `name`.

    Parts of a service have its id in front of the names of their directories.

    Raises NoSuchRunError (with the nearest ids) or UsageError when the prefix is ambiguous or the
    run cannot be read.
    """
    runs_found = all_runs(runs)
    exact = [run for run in runs_found if name in (run.run_id, run.layout.directory.name)]
    # An empty name, as of an unset shell variable, is no prefix: `cancel` would take any run.
    matches = exact or [run for run in runs_found if name and run.run_id.startswith(name)]
    if len(matches) == 1:
        matches[0].refuse_unreadable()
        return matches[0]
    if matches:
        ids = ", ".join(f"`{run.run_id}`" for run in matches)
        raise UsageError(f"`{name}` is the start of several runs: {ids}")
    if name and is_service(runs / name):
        hint = f"`{command_in(runs, 'serve status', name)}`"
        raise NoSuchRunError(f"`{name}` is a service, not a run", hint=hint)
    import difflib

    near = difflib.get_close_matches(name, [run.run_id for run in runs_found], n=3, cutoff=0.5)
    if near:
        hint = "did you mean " + " or ".join(f"`{run_id}`" for run_id in near) + "?"
    elif runs_found:
        hint = "`hpctrain status -a` lists all runs"
    else:
        hint = "no run has been submitted here yet"
    raise NoSuchRunError(f"no run `{name}` in {runs}", hint=hint)


def new_run_id(runs: Path, name: str, *digests: str) -> str:
    """Choose `NAME-xxxx`: four hexadecimal digits of spec and profile, or the next free ones."""
    import hashlib  # loads OpenSSL, which `status` does not need

    for number in range(65536):
        text = "\n".join((name, *digests, str(number)))
        run_id = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:4]}"
        if not os.path.lexists(runs / run_id):
            return run_id
    raise UsageError(f"no free run id is left for `{name}` in {runs}", hint="rename the run")


# -- services: directories beside those of runs that have a `service.yaml` ------------------------


def all_services(runs: Path) -> list[ServiceLayout]:
    """The services of a directory of runs, by id; none where there is no such directory.

    Those that others keep private are left out.
    """
    try:
        with os.scandir(runs.absolute()) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(f"{runs} cannot be read: {error.strerror}") from error
    found = [runs.absolute() / name for name in sorted(names) if not name.startswith(".")]
    return [ServiceLayout(directory) for directory in found if is_service(directory)]


def find_service(runs: Path, name: str) -> ServiceLayout:
    """Find the service of that id, or the only one whose id starts with `name`.

    Raises NoSuchRunError (with the nearest ids), or UsageError when the prefix is ambiguous.
    """
    services = all_services(runs)
    exact = [one for one in services if one.service_id == name]
    matches = exact or [one for one in services if name and one.service_id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = ", ".join(f"`{one.service_id}`" for one in matches)
        raise UsageError(f"`{name}` is the start of several services: {ids}")
    import difflib

    near = difflib.get_close_matches(name, [one.service_id for one in services], n=3, cutoff=0.5)
    hint = "did you mean " + " or ".join(f"`{one}`" for one in near) + "?" if near else None
    raise NoSuchRunError(
        f"no service `{name}` in {runs}",
        hint=hint or ("`hpctrain serve up` starts one" if not services else None),
    )
