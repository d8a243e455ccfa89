"""Judge memory: the fullest GPU's distance to its limit, and changes that save or use memory.

Belongs here: that question, and the changes worth predicting. Does not belong here: predictions
(the planner's, see `hpctrain.diagnose.of_run`).
"""

from __future__ import annotations

from hpctrain.diagnose.facts import (
    DiagnosisInput,
    Measurement,
    Planned,
    Suggestion,
    TopicFinding,
    fine,
    unknown,
)
from hpctrain.diagnose.waiting import NO_WINDOW, OLD_RECORD
from hpctrain.records.run_records import RankTimes
from hpctrain.spec.engines.registry import abilities_of

_NEAR, _ROOMY = 0.92, 0.6
_FRAGMENTED = 0.15
_GIB = 2**30


def memory(facts: DiagnosisInput) -> TopicFinding:
    """Judge whether memory is short, or unused although it could save time."""
    ranks, planned = facts.ranks, facts.planned
    if ranks is None:
        return unknown("memory", NO_WINDOW)
    peak, reserved = ranks.peak_memory_bytes, ranks.reserved_memory_bytes
    if not peak:
        return unknown("memory", OLD_RECORD)
    if max(reserved) == 0:
        largest = max(peak) / _GIB
        words = f"trained on CPUs, up to {largest:.2g} GiB per process: says nothing of a GPU"
        return unknown("memory", words)
    if planned is None:
        return unknown("memory", "plan.json cannot be read, so the GPU's memory is not known")
    limit = planned.plan.gpu_memory_bytes
    worst = max(range(len(reserved)), key=lambda rank: reserved[rank])
    share = reserved[worst] / limit
    predicted = planned.plan.memory[planned.plan.peak_stage].total_bytes / _GIB
    proof = Measurement(
        words=f"{ranks.named(worst)}: {peak[worst] / _GIB:.4g} GiB allocated at most, "
        f"{reserved[worst] / _GIB:.4g} GiB taken, of {limit / _GIB:.4g} GiB; "
        f"planned {predicted:.4g} GiB",
        source=f"{ranks.source}, plan.json",
    )
    if share >= _NEAR:
        words = f"{ranks.named(worst)} has taken {share:.0%} of its GPU: the next peak may not fit"
        remedies = (*_defragment(ranks, planned, worst), *_savings(planned))
        return _yes(words, proof, remedies)
    spending = _spending(planned) if share <= _ROOMY else ()
    if spending:
        words = f"at most {share:.0%} of a GPU is used, and what saves memory costs time"
        return _yes(words, proof, spending)
    return fine("memory", f"at most {share:.0%} of a GPU is used", proof)


def _yes(words: str, proof: Measurement, remedies: tuple[Suggestion, ...]) -> TopicFinding:
    return TopicFinding(
        topic="memory", answer="yes", words=words, evidence=(proof,), remedies=remedies
    )


def _defragment(ranks: RankTimes, planned: Planned, worst: int) -> tuple[Suggestion, ...]:
    """Suggest expandable segments if PyTorch reserves much more than it ever allocated."""
    unused = ranks.reserved_memory_bytes[worst] - ranks.peak_memory_bytes[worst]
    name = "PYTORCH_CUDA_ALLOC_CONF"
    if (
        unused < _FRAGMENTED * planned.plan.gpu_memory_bytes
        or name in planned.spec.environment.variables
    ):
        return ()
    words = f"{unused / _GIB:.3g} GiB are taken and were never used at once: let segments grow"
    change = f"environment.variables.{name}=expandable_segments:True"
    return (Suggestion(words=words, changes=(change,)),)


def _savings(planned: Planned) -> tuple[Suggestion, ...]:
    """List changes that save memory, usually cheapest first; the predictions then decide."""
    spec, plan, abilities = planned.spec, planned.plan, abilities_of(planned.plan.engine)
    found = []
    if plan.batch.micro_batch > 1:
        half = plan.batch.micro_batch // 2
        found.append(Suggestion(words="accumulate more, smaller microbatches",
                            changes=(f"batch.micro={half}",)))  # fmt: skip
    if spec.precision == "fp32":
        found.append(Suggestion(words="weights and activations in half precision",
                            changes=("precision=bf16",)))  # fmt: skip
    if plan.recompute == "none" and "selective" in abilities.recomputes:
        change = ("recompute=selective",)
        found.append(
            Suggestion(words="compute attention again in the backward pass", changes=change)
        )
    if plan.recompute != "full":
        found.append(Suggestion(words="compute all activations again", changes=("recompute=full",)))
    alternative = None if abilities.shards else abilities.sharding_alternative
    if plan.layout.dp > 1 and alternative is not None:
        words = "shard weights, gradients and optimizer over ranks"
        found.append(Suggestion(words=words, changes=(f"engine.name={alternative}",)))
    elif plan.layout.dp > 1:
        for stage in (stage for stage in abilities.zero_stages if stage > plan.zero):
            change = (f"optimizer.zero={stage}",)
            found.append(Suggestion(words=f"shard more (ZeRO {stage})", changes=change))
    if plan.offload == "none" and "cpu" in abilities.offloads:
        words = "optimizer state in the host's memory"
        found.append(Suggestion(words=words, changes=("optimizer.offload=cpu",)))
    return tuple(found)


def _spending(planned: Planned) -> tuple[Suggestion, ...]:
    """List changes that use more memory to save time."""
    spec, plan = planned.spec, planned.plan
    found = []
    if plan.offload != "none":
        words = "keep the optimizer state on the GPU"
        found.append(Suggestion(words=words, changes=("optimizer.offload=none",)))
    if plan.recompute != "none":
        words = "keep all activations instead of computing them again"
        found.append(Suggestion(words=words, changes=("recompute=none",)))
    if plan.batch.accumulation > 1 and plan.batch.accumulation % 2 == 0 and plan.layout.pp == 1:
        words = "larger microbatches"
        change = (f"batch.micro={2 * plan.batch.micro_batch}",)
        found.append(Suggestion(words=words, changes=change))
    if plan.zero == 3 and 2 in spec.engine.abilities.zero_stages:
        words = "keep weights gathered between the passes"
        found.append(Suggestion(words=words, changes=("optimizer.zero=2",)))
    return tuple(found)
