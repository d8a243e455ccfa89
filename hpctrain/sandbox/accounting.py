"""Give a sandbox its accounting: a database, slurmdbd, and the records without which no job starts.

Belongs here: slurmdbd.conf, the command lines of MariaDB, and registering cluster, account and user
before slurmctld starts (later it refuses a database that gives the cluster another id). Does not
belong here: starting daemons (see `daemons`), the keys of slurm.conf (see `config`).

Sources: slurmdbd.conf(5), mariadbd(8), mariadb-install-db(1), sacctmgr(1), and trials on Slurm
22.05.8, 24.11.5 and 26.05.5.
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.sandbox.config import Site, quoted
from hpctrain.sandbox.paths import SandboxPaths
from hpctrain.sandbox.programs import Programs, call, daemon_environment

# What every user of the sandbox belongs to; sites call theirs by the name of a project.
ACCOUNT = "default"
_DATABASE_TIMEOUT_SECONDS = 300.0


def slurmdbd_conf(site: Site) -> str:
    """Generate the file of slurmdbd, which must be readable by its user only."""
    paths = site.paths
    plugins = f"PluginDir={quoted(site.plugins)}\n" if site.plugins else ""
    return f"""\
# Made by `hpctrain sandbox`; written anew by every start.
AuthType=auth/munge
AuthInfo={quoted(f"socket={paths.munge_socket}")}
DbdHost=localhost
DbdPort={site.ports.accounting}
SlurmUser={site.user}
# Otherwise it listens on all network devices.
CommunicationParameters=NoInAddrAny
{plugins}StorageType=accounting_storage/mysql
# By the socket that MYSQL_UNIX_PORT names; the database knows its user by that of the process.
StorageHost=localhost
StorageUser={site.user}
PidFile={quoted(paths.pid_file("slurmdbd"))}
LogFile={quoted(paths.log("slurmdbd"))}
"""


def database_argv(paths: SandboxPaths, programs: Programs, user: str) -> list[str]:
    """Build the command line of a small MariaDB without a network port."""
    return [
        programs["mariadbd"],
        "--no-defaults",
        f"--basedir={_base(programs)}",
        f"--datadir={paths.database}",
        # A mariadbd that starts removes temporary tables of any other one in the same directory.
        f"--tmpdir={paths.database_scratch}",
        f"--socket={paths.database_socket}",
        f"--pid-file={paths.pid_file('mariadbd')}",
        f"--log-error={paths.log('mariadbd')}",
        f"--user={user}",
        "--skip-networking",
        "--performance-schema=OFF",
        # Small: a sandbox has some hundred jobs. The lock timeout is what slurmdbd asks for.
        "--innodb-buffer-pool-size=32M",
        "--innodb-log-file-size=16M",
        "--innodb-lock-wait-timeout=900",
        "--innodb-flush-log-at-trx-commit=0",
    ]


def create_database(paths: SandboxPaths, programs: Programs, user: str) -> None:
    """Make the system tables of MariaDB, once. Raises SlurmError with its message."""
    if (paths.database / "mysql").is_dir():
        return
    argv = [
        programs["mariadb-install-db"],
        "--no-defaults",
        f"--basedir={_base(programs)}",
        f"--datadir={paths.database}",
        "--auth-root-authentication-method=socket",
        f"--auth-root-socket-user={user}",
        "--skip-test-db",
        "--skip-name-resolve",
        f"--user={user}",
    ]
    paths.database_scratch.mkdir(mode=0o700, exist_ok=True)
    environment = daemon_environment(paths.slurm_conf, programs)
    environment["TMPDIR"] = str(paths.database_scratch)
    call(argv, environment, timeout_seconds=_DATABASE_TIMEOUT_SECONDS, directory=paths.directory)


def register(site: Site, programs: Programs, cluster: str) -> None:
    """Tell slurmdbd of the cluster, one account and the user if they are new.

    Raises SlurmError when slurmdbd refuses, SlurmUnreachableError when it does not answer.
    """
    user = site.user
    environment = daemon_environment(site.paths.slurm_conf, programs)

    def sacctmgr(*words: str) -> str:
        return call([programs["sacctmgr"], *words], environment)

    known = sacctmgr("--noheader", "--parsable2", "show", "associations", "format=cluster,user")
    if f"{cluster}|{user}" in known.splitlines():
        return
    if cluster not in sacctmgr("-nP", "show", "cluster", "format=cluster").split():
        sacctmgr("-i", "add", "cluster", cluster)
    sacctmgr("-i", "add", "account", ACCOUNT, f"cluster={cluster}", "Description=sandbox")
    sacctmgr("-i", "add", "user", user, f"account={ACCOUNT}", f"cluster={cluster}")
    # root has an account of the same name from the beginning, which would be the default one.
    sacctmgr("-i", "modify", "user", user, "set", f"DefaultAccount={ACCOUNT}")


def _base(programs: Programs) -> Path:
    """Return the directory that has MariaDB's bin, sbin and share: /usr, or that of an unpacked."""
    return Path(programs["mariadbd"]).resolve().parent.parent
