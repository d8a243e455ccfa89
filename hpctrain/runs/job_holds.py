"""Texts about jobs that Slurm holds after it could not start them: the cause and the cure. Pure.

Belongs here: one text per hold, shared by `status`, `why` and `watch`. Does not belong here: how
Slurm spells a hold (`hpctrain.slurm.reasons`), what is done about it (`watch_rules`).

Sources: slurm.conf(5), MaxBatchRequeue and SchedulerParameters (no_env_cache,
requeue_setup_env_fail); sbatch(1), --export and --get-user-env; scontrol(1), release.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.slurm.reasons import JobHold


@dataclass(frozen=True)
class HoldText:
    """`short` for a table; `cause` and `cure` as sentences without a full stop."""

    short: str
    cause: str
    cure: str


# Nobody has requested these holds, so that a user does not expect them.
BY_SLURM = (JobHold.LAUNCH_FAILED, JobHold.USER_ENVIRONMENT, JobHold.REQUEUE_LIMIT)
_RELEASE = "`hpctrain resume` releases it"
_TEXTS = {
    JobHold.ADMIN: HoldText(
        "held by an administrator", "an administrator holds it", "only they can release it"
    ),
    JobHold.LAUNCH_FAILED: HoldText(
        "held: the launch failed",
        "a prolog or the launch of the script failed on a node, which Slurm has drained",
        _RELEASE,
    ),
    JobHold.USER_ENVIRONMENT: HoldText(
        "held: the login environment could not be read",
        "a login shell of yours failed or took too long on a node, which Slurm has drained: the "
        "site has SchedulerParameters=requeue_setup_env_fail or no_env_cache, and --export with a "
        "list or --get-user-env starts such a shell",
        "repair ~/.bash_profile and ~/.profile first, because each further try costs a node; then "
        + _RELEASE,
    ),
    JobHold.REQUEUE_LIMIT: HoldText(
        "held: launched too often",
        "Slurm has started it again as often as MaxBatchRequeue allows (5 by default): launches "
        "that failed, and from Slurm 24.05 on ends within a grace without `scontrol requeue`",
        f"{_RELEASE}, and the count begins anew; where it may not, an administrator does",
    ),
}
_OTHERS = HoldText("held", "it is held", _RELEASE)


def hold_text(hold: JobHold) -> HoldText:
    """Return the texts about a hold."""
    return _TEXTS.get(hold, _OTHERS)
