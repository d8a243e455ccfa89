"""Starts the router of a service on this login node, detached from the terminal.

Belongs here: whether this node lets it run on, starting it, and that there is one only. Does not
belong here: its run directory, and a router in a job (`serve_router`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.errors import UsageError
from hpctrain.records.requests import take_back
from hpctrain.records.run_records import read_record
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.service_records import Address, ServiceEventKind, ServiceLedger

# How long the router may take until its address is there.
_START_SECONDS = 90.0
# logind.conf(5): what a user leaves running ends with the last session unless the user lingers.
_LOGIND = (Path("/etc/systemd/logind.conf"), Path("/etc/systemd/logind.conf.d"))
_LINGER = Path("/var/lib/systemd/linger")


def start_router_here(service: ServiceLayout, environment: Mapping[str, str]) -> Address:
    """Start the router on this node, detached from this terminal, and return its address.

    Raises UsageError where the node ends what users leave running, where a router answers already,
    or where it does not come up, with what it said.
    """
    refuse_where_sessions_end()
    run, standing = service.router, read_record(service.address, Address)
    if not run.ledger.exists():
        raise UsageError(f"{service.directory} has no router: `hpctrain serve up` first")
    if runs_here(service):
        where = f" on {standing.node}" if standing is not None else ""
        raise UsageError(f"the router of `{service.service_id}` runs{where} already")
    take_back(run)
    log = run.logs / "login.log"
    command = [sys.executable, "-m", "hpctrain.serve.router", "--login", str(service.directory)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=service.directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    ServiceLedger(service.ledger).append(
        ServiceEventKind.ROUTER_STARTED, node=os.uname().nodename, reason="on this node"
    )
    deadline = clock.monotonic() + _START_SECONDS
    while clock.monotonic() < deadline:
        address = read_record(service.address, Address)
        if address is not None and address != standing:
            return address
        if process.poll() is not None:
            break
        clock.sleep(0.1)
    lines = log.read_text(errors="replace").strip().splitlines()[-3:]
    raise UsageError("the router did not come up: " + " / ".join(lines), hint=f"see {log}")


def runs_here(service: ServiceLayout) -> bool:
    """Whether a router on a login node holds the lock of the service."""
    with service.login_lock.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def refuse_where_sessions_end() -> None:
    """Raise UsageError where logind ends the processes of users that log out."""
    if not kills_user_processes(_LOGIND):
        return
    with contextlib.suppress(KeyError):
        if (_LINGER / pwd.getpwuid(os.getuid()).pw_name).exists():
            return
    raise UsageError(
        "this node ends the processes of users that log out (KillUserProcesses), the router too",
        hint="`loginctl enable-linger`, or `router.place: job`",
    )


def kills_user_processes(places: tuple[Path, ...]) -> bool:
    """Whether the settings of logind say so; the last word counts. Unreadable ones say nothing."""
    killing = False
    for place in places:
        files = sorted(place.glob("*.conf")) if place.is_dir() else [place]
        for path in files:
            with contextlib.suppress(OSError):
                for line in path.read_text(errors="replace").splitlines():
                    name, _, value = line.partition("=")
                    if name.strip() == "KillUserProcesses":
                        killing = value.strip().lower() in ("yes", "true", "on", "1")
    return killing
