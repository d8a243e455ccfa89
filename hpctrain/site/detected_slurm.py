"""State how jobs are asked for at a site: partitions that the user may use, options of sbatch.

Belongs here: `slurm` of a profile. Does not belong here: hardware (`detected`), whether a run can
live with it (`doctor`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.nodes.survey_texts import NodeSurvey
from hpctrain.site.facts import LoginFacts, SiteFacts
from hpctrain.site.hardware import NodeGroup, groups_of
from hpctrain.site.preemption import preemption_of
from hpctrain.site.profile_text import Stated, Tree, guess
from hpctrain.slurm.cluster_records import Accounting, PartitionFacts
from hpctrain.slurm.settings import seconds_of
from hpctrain.units import Duration

CONFIG_SHOWN = "scontrol show config"
PARTITION_SHOWN = "scontrol show partition"


def usable_partitions(
    facts: SiteFacts, group: NodeGroup, wanted: str | None
) -> tuple[list[PartitionFacts], list[str]]:
    """List the partitions with nodes of the group that the user may use, and why others not."""
    usable, left_out = [], []
    for partition in facts.cluster.partitions:
        if partition.name not in group.partitions:
            continue
        reason = refusal(partition, facts.login, facts.cluster.accounting)
        if reason is not None and partition.name != wanted:
            left_out.append(f"partition `{partition.name}` is left out: {reason}")
        else:
            usable.append(partition)
    return usable, left_out


def refusal(
    partition: PartitionFacts, login: LoginFacts, accounting: Accounting | None
) -> str | None:
    """Say why a user's job is refused there; None if nothing that is known speaks against it."""
    accounts = accounting.accounts if accounting is not None else ()
    allowed, denied = partition.allow_accounts, partition.deny_accounts
    if not partition.is_up:
        return "it is not up"
    if partition.root_only:
        return "only root may submit to it (RootOnly)"
    if partition.reservation_only:
        return "it takes jobs in reservations only (ReqResv)"
    if accounts and allowed and not set(accounts) & set(allowed):
        return f"it is for accounts {', '.join(allowed)}, and yours are {', '.join(accounts)}"
    if accounts and set(accounts) <= set(denied):
        return f"it is closed to accounts {', '.join(denied)}"
    groups = partition.allow_groups
    if groups and login.groups and not set(groups) & set(login.groups):
        return f"it is for groups {', '.join(groups)}"
    return None


def slurm_section(
    facts: SiteFacts,
    group: NodeGroup,
    partitions: Sequence[PartitionFacts],
    wanted: str | None,
) -> tuple[Tree, list[str]]:
    """State options and partitions, and what a person has to decide."""
    cluster, config = facts.cluster, facts.cluster.config
    default = _default(partitions, wanted)
    remarks: list[str] = []
    section: dict[str, Tree] = {"gpu_request": _gpu_request(facts, group, default, remarks)}
    accounting = cluster.accounting
    if accounting is not None and accounting.accounts:
        shown = f"sacctmgr show user {facts.login.user} withassoc"
        section["account"] = Stated(accounting.accounts[0], f"{shown}: the first of yours")
        if accounting.default_account == accounting.accounts[0]:
            section["account"] = Stated(accounting.accounts[0], f"{shown}, DefaultAccount")
    feature = _feature(facts, group, default)
    if feature is not None:
        section["constraint"] = Stated(
            feature, f"ActiveFeatures: nodes of {default.name} with other GPUs do not have it"
        )
    section["exclusive"] = _exclusive(group, default)
    consumable = "MEMORY" in config.get("SelectTypeParameters").upper()
    section["all_memory"] = Stated(
        consumable,
        f"SelectTypeParameters={config.get('SelectTypeParameters') or '(null)'}, so memory is "
        + ("allocated" if consumable else "not allocated"),
    )
    kill_wait = seconds_of(config, "KillWait")
    if kill_wait is not None:
        section["kill_wait"] = Stated(f"{kill_wait}s", f"KillWait of {CONFIG_SHOWN}")
    section["partitions"] = [_partition(facts, one, one is default) for one in partitions]
    if facts.survey is not None:
        remarks += _survey_remarks(facts.survey)
    return section, remarks


def _default(partitions: Sequence[PartitionFacts], wanted: str | None) -> PartitionFacts:
    for one in partitions:
        if one.name == wanted:
            return one
    return next((one for one in partitions if one.default), partitions[0])


def _gpu_request(
    facts: SiteFacts, group: NodeGroup, default: PartitionFacts, remarks: list[str]
) -> Stated:
    others = groups_of(facts.cluster.nodes_of(default.name))
    types = sorted({one.type for one in others})
    if len(types) > 1 and group.type:
        words = f"nodes of partition {default.name} have {', '.join(types)}: the type says which"
        return Stated("gres-typed", words)
    if len(types) > 1:
        remarks.append(
            f"partition `{default.name}` has nodes with {len(others)} kinds of GPUs, and Gres "
            "names no type: name a feature in slurm.constraint"
        )
    return Stated("gres", f"Gres of scontrol show node, GresTypes of {CONFIG_SHOWN}")


def _feature(facts: SiteFacts, group: NodeGroup, default: PartitionFacts) -> str | None:
    """Find a feature that tells the group's nodes from others of the partition with that type."""
    names = {node.name for node in group.nodes}
    others = [
        node
        for node in facts.cluster.nodes_of(default.name)
        if node.name not in names and group.type in {kind for kind, _ in node.gpus}
    ]
    if not others:
        return None
    taken = frozenset().union(*(node.features for node in others))
    return min(group.common_features - taken, default=None)


def _exclusive(group: NodeGroup, default: PartitionFacts) -> Stated:
    if default.whole_nodes:
        return Stated(True, f"OverSubscribe=EXCLUSIVE of {PARTITION_SHOWN}")
    if group.is_one_machine:
        return guess(False, "small jobs share the few nodes of one machine")
    return guess(True, "training takes whole nodes; some sites refuse --exclusive")


def _partition(facts: SiteFacts, partition: PartitionFacts, is_default: bool) -> Tree:
    section: dict[str, Tree] = {"name": Stated(partition.name, PARTITION_SHOWN)}
    if is_default:
        section["default"] = (
            Stated(True, f"Default=YES of {PARTITION_SHOWN}")
            if partition.default
            else guess(True, "a profile needs one; Slurm's own default is not in this profile")
        )
    if partition.max_seconds is not None:
        limit = str(Duration(partition.max_seconds))
        section["max_walltime"] = Stated(limit, f"MaxTime of {PARTITION_SHOWN}")
    if partition.max_nodes is not None:
        section["max_nodes"] = Stated(partition.max_nodes, f"MaxNodes of {PARTITION_SHOWN}")
    section["priority_tier"] = Stated(partition.priority_tier, f"PriorityTier of {PARTITION_SHOWN}")
    taken = preemption_of(facts.cluster, partition)
    mode = "off" if taken.mode == "suspend" else taken.mode
    if mode == "off":
        return section
    grace = f"{taken.grace_seconds}s"
    section["preemption"] = {
        "mode": Stated(mode, taken.source, taken.is_guess),
        "grace": Stated(grace, taken.source, taken.is_guess),
        "user_signal": Stated(
            taken.user_signal, f"PreemptParameters, SlurmctldParameters of {CONFIG_SHOWN}"
        ),
    }
    return section


def _survey_remarks(survey: NodeSurvey) -> list[str]:
    found = []
    if survey.may_submit is False:
        found.append(
            f"a job on {survey.host} cannot submit jobs, which continuation `chain` needs: "
            f"{survey.submit_words.splitlines()[-1] if survey.submit_words else 'refused'}"
        )
    soft = survey.limits.get("memlock", (-1, -1))[0]
    if soft != -1 and survey.ports:
        found.append(f"{survey.host}: memlock is limited to {soft} bytes, and RDMA needs it to pin")
    return found
