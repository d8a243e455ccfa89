"""State how jobs are asked for at a site: options of sbatch that all jobs have.

Belongs here: `slurm` of a profile. Does not belong here: its partitions (`detected_partitions`),
whether a run can live with it (`doctor`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.site.facts import SiteFacts
from hpctrain.site.hardware import NodeGroup, groups_of
from hpctrain.site.profile_text import Stated, Tree, guess
from hpctrain.site.survey_texts import NodeSurvey
from hpctrain.slurm.cluster_records import PartitionFacts
from hpctrain.slurm.settings import seconds_of

CONFIG_SHOWN = "scontrol show config"
PARTITION_SHOWN = "scontrol show partition"


def slurm_section(
    facts: SiteFacts,
    group: NodeGroup,
    default: PartitionFacts,
    partitions: Sequence[Tree],
) -> tuple[Tree, list[str]]:
    """State options and partitions, and what a person has to decide."""
    cluster, config = facts.cluster, facts.cluster.config
    remarks: list[str] = []
    section: dict[str, Tree] = {"gpu_request": _gpu_request(facts, group, default, remarks)}
    accounting = cluster.accounting
    if accounting is not None and accounting.accounts:
        shown = f"sacctmgr show user {facts.login.user} withassoc"
        section["account"] = Stated(accounting.accounts[0], f"{shown}: the first of yours")
        if accounting.default_account == accounting.accounts[0]:
            section["account"] = Stated(accounting.accounts[0], f"{shown}, DefaultAccount")
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
    section["partitions"] = partitions
    if facts.survey is not None:
        remarks += _survey_remarks(facts.survey)
    return section, remarks


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


def _exclusive(group: NodeGroup, default: PartitionFacts) -> Stated:
    if default.whole_nodes:
        return Stated(True, f"OverSubscribe=EXCLUSIVE of {PARTITION_SHOWN}")
    if group.is_one_machine:
        return guess(False, "small jobs share the few nodes of one machine")
    return guess(True, "training takes whole nodes; some sites refuse --exclusive")


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
