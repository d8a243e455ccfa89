"""`python -m hpctrain.supervise --run-directory DIRECTORY -- srun ...`, as job scripts end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hpctrain.base.errors import HpctrainError, RunFailedError, UsageError


def parse(arguments: list[str]) -> tuple[Path, list[str]]:
    """Split the command line into the run directory and the srun command."""
    if len(arguments) < 4 or arguments[0] != "--run-directory" or arguments[2] != "--":
        raise UsageError(
            "usage: python -m hpctrain.supervise --run-directory DIRECTORY -- srun ..."
        )
    return Path(arguments[1]), arguments[3:]


def main() -> int:
    """Run the supervisor; the exit code becomes the job's."""
    # Until the supervisor catches them (its imports take a while) they would kill this process.
    early = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, early)
    try:
        run_directory, argv = parse(sys.argv[1:])
        from hpctrain.records.kept_code import unread_archive
        from hpctrain.records.layout import RunLayout
        from hpctrain.slurm.client import SlurmClient
        from hpctrain.supervise.loop import Supervisor, end_without_settings, wait_for_settings

        run = RunLayout(run_directory.absolute())
        unread = unread_archive(run, os.environ.get("PYTHONPATH", ""), __file__)
        if unread is not None:
            raise RunFailedError(
                f"{unread}, the code of hpctrain that the run keeps, cannot be read",
                hint=f"`hpctrain upgrade {run.run_id}` puts the installed hpctrain into its place, "
                f"`hpctrain resume {run.run_id}` goes on",
            )
        if not wait_for_settings(run.supervise_config, early):
            return end_without_settings(os.environ, SlurmClient(shielded=True))
        return Supervisor(run_directory, argv, os.environ).run()
    except HpctrainError as error:
        print(f"hpctrain: error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hpctrain: hint: {error.hint}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
