"""Each question has its yes, its no and its unknown, and names the right rank, axis and change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hpctrain.diagnose.facts import (
    AxisFacts,
    MessageFacts,
    Planned,
    SaveFacts,
    SpeedFacts,
    StepFacts,
    TopicFinding,
    stage_of,
)
from hpctrain.diagnose.facts import DiagnosisInput as Facts
from hpctrain.diagnose.judge import (
    buckets,
    hardware,
    judge,
    memory,
    saves,
    shares,
    unsteady,
    warm_up,
)
from hpctrain.diagnose.messages import communication, pipeline
from hpctrain.diagnose.waiting import data_loading, imbalance
from hpctrain.job.plan import load
from hpctrain.plan.planner import make_plan
from hpctrain.records.run_records import RankTimes
from hpctrain.telemetry.traces import Message, TraceSummary

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
GIB, MIB = 2**30, 2**20
DDP = ("engine.name=ddp", "precision=fp32", "resources.gpus=16", "model.layers=4")
ZERO2 = ("engine.name=deepspeed", "optimizer.zero=2", "resources.gpus=16")
STAGES = (*ZERO2, "optimizer.zero=1", "parallel.pp=2", "parallel.tp=1")
HALF = "engine.ddp.bucket=1GiB"


@cache
def planned(*changes: str, example: str = "gpt1300m", profile: str = "a100x64") -> Planned:
    inputs = load(EXAMPLES / f"{example}.yaml", profile, changes)
    return Planned(
        inputs.spec, inputs.profile, make_plan(inputs.spec, inputs.profile, inputs.knowledge)
    )


def ranks(count: int = 4, per_node: int = 2, **columns: object) -> RankTimes:
    """Four ranks on two nodes; a column is one number for all or one for each."""
    usual = dict(
        compute_seconds=1.0,
        backward_seconds=0.0,
        data_seconds=0.01,
        optimizer_seconds=0.1,
        step_seconds=1.2,
        peak_memory_bytes=50 * GIB,
        reserved_memory_bytes=60 * GIB,
    )
    given = {name: f"{name}_seconds" for name in ("compute", "backward", "data", "step")}
    given["reserved_bytes"] = "reserved_memory_bytes"
    told = {
        name: value if isinstance(value, tuple) else (value,) * count
        for name, value in {**usual, **{given[name]: columns[name] for name in columns}}.items()
    }
    nodes = tuple(f"n{rank // per_node}" for rank in range(count))
    return window_of(nodes, **told)


def window_of(nodes: tuple[str, ...], **columns: object) -> RankTimes:
    window = {"epoch": 1, "first_step": 21, "last_step": 40, "time": 0.0, "nodes": nodes}
    return RankTimes.model_validate(window | columns)


def facts(**columns: object) -> Facts:
    return Facts("run", ranks=ranks(**columns), planned=planned())


def steps(*seconds: float, launches: int = 1, lost: float = 0.0) -> StepFacts:
    return StepFacts(launches, tuple(enumerate(seconds, 2)), lost, sum(seconds) + lost)


def message(size: int | None, seconds: float, exposed: float, kind: str = "all_reduce") -> Message:
    return Message(kind, 0.0, seconds, exposed, size)


def trace(*messages: Message, exposed: float = 0.0, rank: int = 0) -> TraceSummary:
    sent = sum(one.seconds for one in messages)
    name = f"e000001-rank-{rank:06d}-steps-3-3.json.gz"
    return TraceSummary(name, 1, rank, (3,), 100, True, True, 1.0, sent, exposed, {}, messages)


def sent(axis: str, times: float, share: float) -> Facts:
    """A step of which an axis takes this share, and so many times what the plan assumes."""
    parts = planned(*TP2).plan.prediction
    assert parts is not None
    named = {"tp": parts.parts.tensor_messages_seconds, "dp": parts.parts.data_messages_seconds}
    seconds = times * named.get(axis, 1.0)
    messages = MessageFacts(203, seconds / share, (AxisFacts(axis, 24, 10**9, seconds),))
    return replace(facts(), planned=planned(*TP2), messages=messages)


OLD = window_of(("n0", "n0"), compute_seconds=(1.0, 1.0))
TP2 = ("parallel.tp=2", "parallel.pp=1")
PP = dict(example="gpt175b")

# (question, facts, answer, what its words or its evidence or its changes say)
Row = tuple[Callable[[Facts], TopicFinding], Callable[[], Facts], str, tuple[str, ...]]
TABLE: dict[str, Row] = {
    "data everywhere": (
        data_loading, lambda: facts(data=0.3), "yes", ("every rank waits: 25% of a step",)),
    "data, few CPUs": (
        data_loading,
        lambda: replace(facts(data=0.3), planned=planned("resources.cpus_per_gpu=2")), "yes",
        ("resources.cpus_per_gpu=16",)),
    "data on one rank": (
        data_loading, lambda: facts(data=(0.01, 0.01, 0.01, 0.4)), "yes",
        ("rank 3 on n1 waits, the others for it: 33%", "other jobs of n1")),
    "no data": (data_loading, lambda: facts(data=0.05), "no", ("at most 4.2% of a step",)),
    "data before a window": (data_loading, lambda: Facts("run"), "unknown", ("no window",)),
    "data of an old record": (
        data_loading, lambda: Facts("run", ranks=OLD, steps=steps(1.0)), "unknown",
        ("older version",)),
    "a slow rank": (
        imbalance, lambda: facts(compute=(1.0, 1.3, 1.0, 1.0)), "yes",
        ("rank 1 on n0 takes 1.30 times the middle", "n0 looked at", "exclude_nodes=act")),
    "a slow node": (
        imbalance, lambda: facts(count=6, compute=(1.0, 1.0, 1.0, 1.0, 1.4, 1.3)), "yes",
        ("all ranks on n2 are slow, up to 1.40 times",)),
    "a slow rank lets others wait in backward": (
        imbalance,
        lambda: facts(compute=(0.3, 0.4, 0.3, 0.3), backward=(0.8, 0.7, 0.8, 0.8), step=1.3),
        "yes",
        ("rank 1 on n0 takes 1.33", "the others wait for it", "take 0.89 s, its own 0.79 s")),
    "equal ranks": (imbalance, lambda: facts(), "no", ("at most 0% above",)),
    "one rank": (imbalance, lambda: facts(count=1), "no", ("one rank only",)),
    "stages differ by design": (
        imbalance,
        lambda: Facts("run", ranks=ranks(512, 8, compute=tuple(1.0 + 0.5 * stage_of(
            planned(**PP).plan.layout, rank) for rank in range(512)), step=9.0),
            planned=planned(**PP)),
        "no", ("at most 0%",)),
    "communication by times": (
        communication, lambda: facts(step=1.6), "yes",
        ("about 31% of a step", "mostly along dp", "a trace tells", "network")),
    "communication behind backward passes": (
        communication,
        lambda: facts(compute=0.2, backward=(0.9, 0.8, 0.9, 0.9)), "yes",
        ("about 33% of a step", "rank 1: backward passes take 0.8 s")),
    "no communication": (communication, lambda: facts(), "no", ("about 7% of a step",)),
    "communication by a trace": (
        communication,
        lambda: replace(facts(), traces=(trace(message(64 * MIB, 0.4, 0.3), exposed=0.3),
                                         trace(message(64 * MIB, 0.5, 0.4), exposed=0.4, rank=1))),
        "yes", ("30% of a step is communication", "rank 0: 0.4 s of messages",
                "67108864 B, goes at up to 1.68e+08 B/s")),
    "a trace says otherwise than times": (
        communication,
        lambda: replace(facts(step=1.6), traces=(trace(message(1, 0.4, 0.0)),)),
        "no", ("0% of a step is not hidden",)),
    "communication along tp": (
        communication,
        lambda: replace(facts(step=1.6), planned=planned(*TP2, "engine.name=megatron")),
        "yes", ("parallel=auto",)),
    "communication of DDP over nodes": (
        communication, lambda: replace(facts(step=1.6), planned=planned(*DDP)), "yes",
        ("engine.ddp.hook=hierarchical",)),
    "messages as planned": (
        communication, lambda: sent("tp", 1.5, 0.9), "no",
        ("hidden or not: tp", "(24 calls, 1 GB)", "communication.json, step 203")),
    "messages slower than planned": (
        communication, lambda: sent("tp", 3.0, 0.5), "yes",
        ("messages take along tp", "3.0 times what the plan assumes", "speed_check")),
    "much slower and yet a small part of a step": (
        communication, lambda: sent("tp", 3.0, 0.07), "no", ("not hidden",)),
    "gradients that the plan hides": (
        communication, lambda: sent("dp", 9.0, 0.5), "no", ("not hidden",)),
    "messages without a prediction": (
        communication, lambda: sent("other", 1.0, 0.1), "no", ("other 1 s",)),
    "slower messages, and exposed": (
        communication, lambda: replace(sent("tp", 3.0, 0.5), ranks=ranks(step=1.6)),
        "yes", ("is communication that nothing hides", "3.0 times what the plan assumes")),
    "slower messages before a window": (
        communication, lambda: replace(sent("tp", 3.0, 0.5), ranks=None), "yes", ("3.0 times",)),
    "communication, too early": (
        communication, lambda: Facts("run"), "unknown", ("a trace tells: `profile:",)),
    "a pipeline": (
        pipeline,
        lambda: Facts("run", ranks=ranks(512, 8, step=1.6), planned=planned(
            "batch.global=64", "batch.micro=1", **PP)),
        "yes", ("stages stand still for about", "(pp - 1) / (vpp x microbatches)")),
    "a pipeline with backward passes of its own": (
        pipeline,
        lambda: Facts("run", ranks=ranks(512, 8, compute=0.5, backward=0.5, step=1.6),
                      planned=planned("batch.global=64", "batch.micro=1", **PP)),
        "yes", ("stages stand still for about 18%", "stages compute 1, 1",)),
    "a short bubble": (
        pipeline,
        lambda: Facts("run", ranks=ranks(512, 8, step=1.16), planned=planned(**PP)),
        "no", ("of a step",)),
    "no pipeline": (pipeline, lambda: facts(), "no", ("no pipeline",)),
    "a pipeline without a plan": (pipeline, lambda: Facts("run"), "unknown", ("plan.json",)),
    "the last bucket shows": (
        buckets,
        lambda: Facts("run", planned=planned(*DDP, HALF), traces=(trace(
            message(512 * MIB, 0.1, 0.0), message(512 * MIB, 0.2, 0.2), exposed=0.2),)),
        "yes", ("the last of 2 buckets shows with 20%", "engine.ddp.bucket=")),
    "good buckets": (
        buckets,
        lambda: Facts("run", planned=planned(*DDP), traces=(trace(
            *[message(25 * MIB, 0.01, 0.0)] * 40, message(32, 0.1, 0.1)),)),
        "no", ("40 buckets, the last one hardly shows",)),
    "too many buckets": (
        buckets, lambda: Facts("run", planned=planned(*DDP, "engine.ddp.bucket=1MiB")), "yes",
        ("each one's start counts", "engine.ddp.bucket=")),
    "one bucket": (
        buckets, lambda: Facts("run", planned=planned(*DDP, "engine.ddp.bucket=64GiB")), "yes",
        ("one bucket holds all gradients",)),
    "buckets of DeepSpeed": (
        buckets,
        lambda: Facts("run", planned=planned(*ZERO2, "engine.deepspeed.reduce_bucket=1MiB")),
        "yes", ("engine.deepspeed.reduce_bucket=",)),
    "buckets behind a pipeline of DeepSpeed": (
        buckets,
        lambda: Facts("run", planned=planned(*STAGES, "engine.deepspeed.reduce_bucket=1MiB")),
        "no", ("sums gradients after its passes",)),
    "no buckets": (buckets, lambda: facts(), "no", ("no size of buckets",)),
    "memory is nearly full": (
        memory, lambda: facts(reserved_bytes=(60 * GIB, 60 * GIB, 78 * GIB, 60 * GIB)), "yes",
        ("rank 2 on n1 has taken 98%", "expandable_segments", "batch.micro=", "recompute=full",
         "optimizer.offload=cpu")),
    "memory of DDP is nearly full": (
        memory, lambda: replace(facts(reserved_bytes=78 * GIB), planned=planned(*DDP)), "yes",
        ("engine.name=fsdp", "precision=bf16")),
    "memory lies idle": (
        memory,
        lambda: replace(facts(reserved_bytes=30 * GIB), planned=planned("recompute=full")),
        "yes", ("what saves memory costs time", "recompute=none")),
    "memory is used well": (memory, lambda: facts(reserved_bytes=65 * GIB), "no", ("81%",)),
    "memory of a CPU": (
        memory, lambda: facts(reserved_bytes=0), "unknown", ("trained on CPUs",)),
    "saves": (
        saves, lambda: Facts("run", steps=steps(*[1.0] * 90), saves=SaveFacts(5, 10.0, False)),
        "yes", ("stands still for 10%", "checkpoint.asynchronous=true", "checkpoint.every=auto")),
    "short saves": (
        saves, lambda: Facts("run", steps=steps(*[1.0] * 90), saves=SaveFacts(5, 1.0, True)),
        "no", ("1.1% of the time",)),
    "no save yet": (saves, lambda: Facts("run", steps=steps(1.0)), "unknown", ("no save",)),
    "started again and again": (
        warm_up, lambda: Facts("run", steps=steps(*[1.0] * 30, launches=6, lost=20.0)), "yes",
        ("first steps of 6 launches are 40%", "hpctrain goodput")),
    "started once": (
        warm_up, lambda: Facts("run", steps=steps(*[1.0] * 30, lost=20.0)), "no", ("one launch",)),
    "unsteady": (
        unsteady, lambda: Facts("run", steps=steps(*[1.0] * 36, *[3.0] * 4)), "yes",
        ("3.0 times the median", "slowest steps 38 (3 s)")),
    "steady": (unsteady, lambda: Facts("run", steps=steps(*[1.0] * 40)), "no", ("0% above",)),
    "too few steps": (unsteady, lambda: Facts("run", steps=steps(1.0)), "unknown", ("too few",)),
}  # fmt: skip


def said(finding: TopicFinding) -> str:
    """Everything in it, in one text."""
    evidence = [f"{one.words} [{one.source}]" for one in finding.evidence]
    remedies = [f"{one.words} {' '.join(one.changes)}" for one in finding.remedies]
    return "\n".join([finding.words, *evidence, *remedies])


@pytest.mark.parametrize("case", TABLE)
def test_each_question(case: str) -> None:
    question, made, answer, words = TABLE[case]
    finding = question(made())
    assert finding.answer == answer, said(finding)
    for each in words:
        assert each in said(finding), said(finding)
    assert (finding.gain_seconds is not None) <= (answer == "yes")
    assert bool(finding.remedies) == (answer == "yes"), "who says yes says what to do"


def test_ranks_that_run_far_from_their_gpu_stand_out() -> None:
    words = "rank 3 on node n1 runs on CPUs of NUMA node 1, its GPU is on node 0"
    found = hardware(SpeedFacts(2, 4, far=(words,)))
    assert (found.answer, found.words) == ("yes", "1 rank runs on CPUs that are far from their GPU")
    assert [one.words for one in found.evidence] == [words]
    assert "`cpu-bind`" in found.remedies[0].words and "wrapper" in found.remedies[0].words
    both = hardware(SpeedFacts(2, 4, slow=("rank 1 is slow",), nodes=("n0",), far=(words,)))
    assert [one.words for one in both.evidence] == ["rank 1 is slow", words]
    assert both.words == "1 part was slow on n0" and both.remedies[-1] == found.remedies[0]
    assert hardware(SpeedFacts(2, 4)).answer == "no"


def test_nothing_is_advised_that_deepspeed_leaves_out_in_a_pipeline() -> None:
    """It sums gradients behind all passes there, whatever `overlap_comm` says."""
    apart = "optimizer.overlap_grad_reduce=false"
    waiting = facts(step=2.2)
    assert apart.replace("false", "true") in said(
        communication(replace(waiting, planned=planned(*ZERO2, apart)))
    )
    staged = planned(*STAGES, apart, "batch.global=64")
    finding = communication(replace(waiting, planned=staged))
    assert finding.answer == "yes" and "overlap_grad_reduce" not in said(finding)


def test_the_first_finding_is_the_one_with_most_to_gain() -> None:
    found = judge(facts(data=0.2, compute=(1.0, 1.0, 1.0, 1.5)))
    assert [one.topic for one in found[:2]] == ["imbalance", "data"]
    assert [one.gain_seconds for one in found[:2]] == [0.5, 0.2]
    order = [one.answer for one in found]
    assert order == sorted(order, key=["yes", "no", "unknown"].index)


def test_nothing_stands_out_of_a_good_run() -> None:
    made = Facts(
        "run",
        ranks=ranks(reserved_bytes=65 * GIB),
        steps=steps(*[1.2] * 60),
        saves=SaveFacts(2, 0.5, True),
        planned=planned(),
    )
    assert {one.answer for one in judge(made)} == {"no"}


def test_nothing_known_is_unknown_and_no_guess() -> None:
    assert {one.answer for one in judge(Facts("run"))} == {"unknown"}
    old = {one.topic: one.answer for one in judge(Facts("run", ranks=OLD, steps=steps(1.0)))}
    assert old["imbalance"] == "no" and old["data"] == old["memory"] == "unknown"


def test_parts_of_the_middle_rank() -> None:
    assert shares(facts(step=2.0, compute=(1.0, 1.0, 1.0, 1.9)))["passes"] == 0.5
    assert "forward" in shares(facts(backward=0.3)) and shares(Facts("run")) == {}
