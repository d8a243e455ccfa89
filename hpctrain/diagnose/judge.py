"""Answer all questions of a diagnosis, sorted by possible gain.

Belongs here: that order, shares of a step, memory, gradient buckets, the course of a run and its
check before training. Does not belong here: who waits for whom (`waiting`, `messages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from statistics import mean, median, quantiles

from hpctrain.diagnose.facts import (
    DiagnosisInput,
    Measurement,
    Planned,
    SpeedFacts,
    Suggestion,
    TopicFinding,
    fine,
    unknown,
)
from hpctrain.diagnose.messages import communication, pipeline
from hpctrain.diagnose.waiting import NO_WINDOW, OLD_RECORD, data_loading, imbalance
from hpctrain.records.run_records import RankTimes
from hpctrain.spec.engines.registry import abilities_of
from hpctrain.telemetry.traces import Message, TraceSummary

# -- Judge memory: the fullest GPU's distance to its limit, and changes that save or use memory -


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
        return _memory_finding(words, proof, remedies)
    spending = _spending(planned) if share <= _ROOMY else ()
    if spending:
        words = f"at most {share:.0%} of a GPU is used, and what saves memory costs time"
        return _memory_finding(words, proof, spending)
    return fine("memory", f"at most {share:.0%} of a GPU is used", proof)


def _memory_finding(
    words: str, proof: Measurement, remedies: tuple[Suggestion, ...]
) -> TopicFinding:
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


# ----------------------------------------------------------------------------------------------


# -- Judge gradient buckets of DDP and DeepSpeed: their number, and the cost of the last one ----
# A bucket is sent during the backward pass; the last one, ready at its end, overlaps with nothing.
# A single bucket hides nothing, and hundreds of small ones each cost a start.


_BUCKET_SHARE = 0.05
_TOO_MANY = 200
_USEFUL = 8  # buckets: at most an eighth of the gradients is exposed
_LEAST_BYTES = 8 * 2**20  # of gradients: below that no bucket size matters
_SMALL_BYTES = 4096  # smaller messages are barriers and sums of losses, not gradients
_MIB = 2**20


def buckets(facts: DiagnosisInput) -> TopicFinding:
    """Judge whether another bucket size would hide more communication."""
    planned = facts.planned
    if planned is None:
        return unknown("buckets", "plan.json cannot be read")
    abilities, size = abilities_of(planned.plan.engine), None
    if abilities.bucket is not None and planned.plan.zero in abilities.bucket_stages:
        size = int(attrgetter(abilities.bucket)(planned.spec))
    if abilities.sums_behind_pipeline and planned.plan.layout.pp > 1:
        # of DeepSpeed runtime/pipe/engine.py, _exec_reduce_grads
        words = f"a pipeline of {abilities.title}'s sums gradients after its passes"
        return fine("buckets", words)
    if size is None:
        return fine("buckets", f"{planned.plan.engine} has no size of buckets to choose here")
    if planned.plan.layout.dp == 1:
        return fine("buckets", "gradients are summed over one rank only")
    for trace in facts.traces:
        gradients = [
            message
            for message in trace.messages
            if message.kind in ("all_reduce", "reduce_scatter", "reduce")
            and (message.size_bytes or _SMALL_BYTES) >= _SMALL_BYTES
        ]
        if gradients:
            return _buckets_by_trace(planned, trace, gradients, size)
    return _buckets_by_plan(planned, size)


def _buckets_by_trace(
    planned: Planned, trace: TraceSummary, sent: list[Message], size: int
) -> TopicFinding:
    last, step = sent[-1], trace.step_seconds
    known = [message.size_bytes for message in sent if message.size_bytes is not None]
    bounds = [f"{bound / _MIB:.3g}" for bound in sorted({min(known), max(known)})] if known else []
    sizes = f", {' to '.join(bounds)} MiB" if bounds else ""
    proof = Measurement(
        words=f"{len(sent)} messages of gradients in a step{sizes}; of the last one "
        f"{last.exposed_seconds:.4g} s of {last.seconds:.4g} s are hidden by nothing "
        f"(step {step:.4g} s)",
        source=trace.file,
    )
    if last.exposed_seconds < _BUCKET_SHARE * step and len(sent) <= _TOO_MANY:
        number = "one bucket, which" if len(sent) == 1 else f"{len(sent)} buckets, the last one"
        return fine("buckets", f"{number} hardly shows", proof)
    if len(sent) > _TOO_MANY:
        words = f"{len(sent)} messages are so many that each one's start counts"
        gain = None
    else:
        share = last.exposed_seconds / step
        words = f"the last of {len(sent)} buckets shows with {share:.0%} of a step"
        gain = last.exposed_seconds
    return _buckets_finding(planned, words, proof, size, gain)


def _buckets_by_plan(planned: Planned, size: int) -> TopicFinding:
    """Judge without a trace, by the number of buckets that the gradients fill."""
    gradients = planned.gradient_bytes
    count = max(1, round(gradients / size))
    proof = Measurement(
        words=f"{gradients / _MIB:.4g} MiB of gradients in buckets of {size / _MIB:.4g} MiB",
        source="plan.json, spec.yaml",
    )
    if gradients < _LEAST_BYTES:
        return fine("buckets", f"gradients are {gradients / _MIB:.2g} MiB only", proof)
    if count == 1:
        return _buckets_finding(
            planned, "one bucket holds all gradients: nothing hides it", proof, size, None
        )
    if count > _TOO_MANY:
        return _buckets_finding(
            planned, f"about {count} buckets: each one's start counts", proof, size, None
        )
    return fine("buckets", f"about {count} buckets", proof)


def _buckets_finding(
    planned: Planned, words: str, proof: Measurement, size: int, gain: float | None
) -> TopicFinding:
    better = max(1, round(planned.gradient_bytes / _USEFUL / _MIB))
    name = abilities_of(planned.plan.engine).bucket
    remedies: tuple[Suggestion, ...] = ()
    if not 0.5 <= better * _MIB / size <= 2 and better * _MIB < planned.gradient_bytes:
        remedy = Suggestion(words=f"about {_USEFUL} buckets", changes=(f"{name}={better}MiB",))
        remedies = (remedy,)
    else:
        why = (
            "the gradients are too few" if better == 1 else "the buckets are already of a good size"
        )
        remedies = (
            Suggestion(words=f"{why}: fewer messages help, see the question of communication"),
        )
    return TopicFinding(
        topic="buckets",
        answer="yes",
        words=words,
        evidence=(proof,),
        remedies=remedies,
        gain_seconds=gain,
    )


# ----------------------------------------------------------------------------------------------


# -- Judge the course of a run: time of saves, first steps of launches, occasional slow steps ---


_SHARE = 0.03
_UNSTEADY = 1.3  # the slowest twentieth over the median
_FEWEST = 20
_NO_STEPS = "no usual step is through yet: the first one of a launch does not count"


def saves(facts: DiagnosisInput) -> TopicFinding:
    """Judge whether training stalls for checkpoints."""
    recorded, steps = facts.saves, facts.steps
    if recorded is None or steps is None or not steps.all_seconds:
        return unknown("saves", "no save is through yet")
    share = recorded.stall_seconds / (steps.all_seconds + recorded.stall_seconds)
    proof = Measurement(
        words=f"saves while training: {recorded.count}, {recorded.stall_seconds:.4g} s of standing "
        f"still in all; steps took {steps.all_seconds:.4g} s",
        source="saves.jsonl, metrics.jsonl",
    )
    if share < _SHARE:
        return fine("saves", f"{share:.1%} of the time", proof)
    remedies = [
        Suggestion(words="save as often as saves and failures make it worth (Young/Daly)",
               changes=("checkpoint.every=auto",))
    ]  # fmt: skip
    if not recorded.asynchronous:
        words = "write in the background"
        remedies.insert(0, Suggestion(words=words, changes=("checkpoint.asynchronous=true",)))
    return TopicFinding(
        topic="saves",
        answer="yes",
        words=f"training stands still for {share:.0%} of the time",
        evidence=(proof,),
        remedies=tuple(remedies),
        gain_seconds=share * (facts.step_seconds or 0.0) / (1 - share),
    )


def warm_up(facts: DiagnosisInput) -> TopicFinding:
    """Judge the cost of the first steps of launches (connections, compilation, caches)."""
    steps = facts.steps
    if steps is None or steps.median_seconds is None:
        return unknown("warm_up", _NO_STEPS)
    share = steps.lost_seconds / steps.all_seconds
    proof = Measurement(
        words=f"first steps of {steps.launches} launches took {steps.lost_seconds:.4g} s more than "
        f"others, of {steps.all_seconds:.4g} s of steps",
        source="metrics.jsonl",
    )
    if steps.launches == 1 or share < _SHARE:
        launches = "one launch" if steps.launches == 1 else f"{steps.launches} launches"
        return fine("warm_up", f"{share:.1%} of the steps' time, {launches}", proof)
    return TopicFinding(
        topic="warm_up",
        answer="yes",
        words=f"first steps of {steps.launches} launches are {share:.0%} of the steps' time",
        evidence=(proof,),
        remedies=(
            Suggestion(
                words="`hpctrain goodput` says why the run starts so often, and what that costs"
            ),
        ),
        gain_seconds=share * steps.median_seconds,
    )


def unsteady(facts: DiagnosisInput) -> TopicFinding:
    """Judge whether some steps take much longer than the median, for example after saves."""
    steps = facts.steps
    if steps is None or len(steps.usual) < _FEWEST:
        count = 0 if steps is None else len(steps.usual)
        return unknown("unsteady", f"{count} usual steps are too few to tell ({_FEWEST})")
    middle = steps.median_seconds
    assert middle is not None
    slowest = sorted(sorted(steps.usual, key=lambda step: -step[1])[:3])
    listed = ", ".join(f"{step} ({seconds:.4g} s)" for step, seconds in slowest)
    slow = quantiles((seconds for _, seconds in steps.usual), n=20)[-1]
    proof = Measurement(
        words=f"median {middle:.4g} s, slowest twentieth from {slow:.4g} s; slowest steps {listed}",
        source="metrics.jsonl",
    )
    if slow < _UNSTEADY * middle:
        return fine(
            "unsteady", f"the slowest twentieth is {slow / middle - 1:.0%} above the median", proof
        )
    return TopicFinding(
        topic="unsteady",
        answer="yes",
        words=f"the slowest twentieth of the steps takes {slow / middle:.1f} times the median",
        evidence=(proof,),
        remedies=(
            Suggestion(
                words="compare these steps with saves (`hpctrain checkpoints`), evaluations and "
                "what else ran on the nodes"
            ),
        ),
        gain_seconds=max(0.0, mean(seconds for _, seconds in steps.usual) - middle),
    )


# ----------------------------------------------------------------------------------------------


_JUDGES = (
    data_loading,
    communication,
    imbalance,
    pipeline,
    buckets,
    memory,
    saves,
    warm_up,
    unsteady,
)
_ORDER = {"yes": 0, "no": 1, "unknown": 2}


def judge(facts: DiagnosisInput) -> tuple[TopicFinding, ...]:
    """Answer all questions: problems first, by gain, then `no`, then `unknown`."""
    answers = [judge_topic(facts) for judge_topic in _JUDGES]
    if facts.speed is not None:  # a launch may start without a check
        answers.append(hardware(facts.speed))
    return tuple(sorted(answers, key=lambda a: (_ORDER[a.answer], -(a.gain_seconds or 0.0))))


def shares(facts: DiagnosisInput) -> dict[str, float]:
    """Compute the share of each part of a step, at the median rank; empty if not known."""
    ranks, step = facts.ranks, facts.step_seconds
    if ranks is None or not ranks.step_seconds or not step:
        return {}
    parts = {
        "passes" if not any(ranks.backward_seconds) else "forward": ranks.compute_seconds,
        "backward": ranks.backward_seconds,
        "data": ranks.data_seconds,
        "optimizer": ranks.optimizer_seconds,
        "rest": ranks.rest_seconds,
    }
    return {name: median(each) / step for name, each in parts.items() if any(each)}


# -- Judge the check of GPUs and links that a launch has made before training -------------------


_MOST_FAR = 4


def hardware(speed: SpeedFacts) -> TopicFinding:
    """Judge whether a GPU or a link was slow before training, or CPUs are far from their GPU."""
    if not speed.slow and speed.far:
        ranks = "1 rank runs" if len(speed.far) == 1 else f"{len(speed.far)} ranks run"
        return TopicFinding(
            topic="hardware",
            answer="yes",
            words=f"{ranks} on CPUs that are far from their GPU",
            evidence=_measured(speed, speed.far[:_MOST_FAR]),
            remedies=(_BIND,),
        )
    if not speed.slow:
        return fine("hardware", f"{speed.ranks} ranks were as fast as their peers and the plan")
    parts = "1 part was" if len(speed.slow) == 1 else f"{len(speed.slow)} parts were"
    if speed.nodes:
        where = f" on {', '.join(speed.nodes[:4])}"
        remedies = [
            Suggestion(words="have these nodes looked at: clocks, temperature, cables, other jobs"),
            Suggestion(
                words="let the supervisor replace such nodes",
                changes=("supervise.speed_check.mode=exclude",),
            ),
        ]
    else:
        where = ", and no single node is the reason"
        compare = (
            "compare the profile's figures and variables with what the site has: "
            "`hpctrain describe` lists all measurements"
        )
        remedies = [Suggestion(words=compare)]
    return TopicFinding(
        topic="hardware",
        answer="yes",
        words=f"{parts} slow{where}",
        evidence=_measured(speed, (*speed.slow, *speed.far[:_MOST_FAR])),
        remedies=(*remedies, *([_BIND] if speed.far else [])),
    )


_BIND = Suggestion(
    words="give each rank CPUs of its GPU's NUMA node: `cpu-bind` of `slurm.options.srun`, or "
    "numactl as `software.commands.wrapper` of the profile"
)


def _measured(speed: SpeedFacts, sentences: Sequence[str]) -> tuple[Measurement, ...]:
    return tuple(Measurement(words=one, source=speed.source) for one in sentences)
