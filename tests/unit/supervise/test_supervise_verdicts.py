"""A verdict for every cause, from lines that real jobs have printed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from supervise_facts import NOTHING, SILENT, job
from told_stories import End, Story

from hpctrain.judge.causes import FINAL_CAUSES, Cause
from hpctrain.judge.classify import classify
from hpctrain.judge.documents import LaunchEvidence, LogFinding, OddRank, Stall
from hpctrain.slurm.messages import read_notice, read_task_failure

NCCL_TIMEOUT = (
    "[rank{rank}]:[E1121 05:33:37.123456789 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog "
    "caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, "
    "NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600060 "
    "milliseconds before timing out."
)
RESET = (
    "DistNetworkError: recvValueWithTimeout failed on SocketImpl(fd=3): Failed to recv, got 0 "
    "bytes. Connection was likely closed. Did the remote server shutdown or crash?"
)
IB = (
    "n3:3468:3905 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer "
    "10.216.210.236<54862> with status=12 opcode=0 len=0 vendor err 129 (Recv)"
)
XID = "NVRM: Xid (PCI:0000:cb:00): {code}, pid=626486, name=pt_main_thread, {words}"
OFF_BUS = XID.format(code=79, words="GPU has fallen off the bus.")
OOM_LINE = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0. "
    "Some of the step tasks have been OOM Killed."
)
CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has 79 GiB."
)
KERNEL_OOM = "Memory cgroup out of memory: Killed process 626486 (python3) total-vm:512000000kB"
NO_MODULE = "ModuleNotFoundError: No module named 'flash_attn'"
STALL = Stall("training", 301.0, 300.0)
ODD = replace(STALL, odd=(OddRank(5, "n2", "read (data.py:81)"),))


def timeouts(*ranks: int) -> dict[int, list[str]]:
    return {rank: [NCCL_TIMEOUT.format(rank=rank)] for rank in ranks}


def resets(*ranks: int, after: float = 103.0) -> tuple[End, ...]:
    return tuple(End(rank, RESET, after + rank / 100) for rank in ranks)


ROWS: dict[str, tuple[LaunchEvidence, Cause]] = {
    # The scheduler.
    "preemption, said only in the log of a rank": (
        Story(
            logs={0: ["slurmstepd: error: *** STEP 5.0 ON n0 CANCELLED AT 2026-03-01T10:00:00 DUE "
                      "TO PREEMPTION ***"]},
            base=SILENT,
        ).evidence(),
        Cause.PREEMPTED,
    ),
    "deadline of the job": (Story().evidence(job=job("DEADLINE")), Cause.DEADLINE),
    "node did not boot": (Story().evidence(job=job("BOOT_FAIL")), Cause.NODE_FAILURE),
    "the whole job killed for memory": (
        Story().evidence(job=job("OUT_OF_MEMORY")), Cause.HOST_OOM,
    ),
    "prolog failed, requeued and held": (
        Story().evidence(job=job("PENDING", "launch_failed_requeued_held", restarts=1)),
        Cause.PROLOG_FAILURE,
    ),
    "login environment failed, requeued and held": (
        Story().evidence(
            job=job("PENDING", "user_env_retrieval_failed_requeued_held", restarts=1)
        ),
        Cause.PROLOG_FAILURE,
    ),
    "launched too often, requeued and held": (
        Story().evidence(
            job=job("REQUEUE_HOLD", "launch_failure_limit_exceeded_requeued_held", restarts=5)
        ),
        Cause.PROLOG_FAILURE,
    ),
    "prolog failed, in words": (
        Story().evidence(job=job("PENDING", "launch failed requeued held")),
        Cause.PROLOG_FAILURE,
    ),
    "prolog failed for the step": (
        Story(
            srun=["srun: error: Task launch for StepId=5.0 failed on node n1: Job prolog failed"]
        ).evidence(started=False),
        Cause.PROLOG_FAILURE,
    ),
    "held by an administrator": (
        Story().evidence(job=job("PENDING", "JobHeldAdmin", restarts=1)), Cause.REQUEUED,
    ),
    "controller away at the start of the step": (
        Story(
            srun=["srun: error: Unable to create step for job 5: Unable to contact slurm "
                  "controller (connect failure)"],
            base=SILENT,
        ).evidence(started=False),
        Cause.CONTROLLER_AWAY,
    ),
    "a node lost, seen by the probe only": (
        Story(ends=resets(0, 1)).evidence(lost_nodes=("n3",)), Cause.NODE_FAILURE,
    ),
    "step that cannot be killed": (
        Story(
            srun=["slurmstepd: error: *** JOB 5 STEPD TERMINATED ON n3 AT 2026-03-01T10:00:00 DUE "
                  "TO JOB NOT ENDING WITH SIGNALS ***"]
        ).evidence(),
        Cause.NODE_FAILURE,
    ),
    # People.
    "asked to hold": (
        Story([End(0, "", outcome="yielded")]).evidence(hold_requested_by="ann"), Cause.YIELDED,
    ),
    "stopped at once, the ranks are killed": (
        Story(srun=["srun: error: n0: tasks 0-7: Killed"]).evidence(stop_requested_by="ann"),
        Cause.YIELDED,
    ),
    "a rank crashes while a person waits for the stop": (
        Story([End(0, "ValueError: no"), *resets(1)]).evidence(stop_requested_by="ann"),
        Cause.CRASH,
    ),
    # GPUs.
    "a GPU falls off the bus": (
        Story(
            logs=timeouts(0, 1, 4, 5, 6, 7),
            kernels={"n1": [(90, OFF_BUS)]},
            srun=["srun: error: n0: task 0: Aborted (core dumped)"],
        ).evidence(),
        Cause.GPU_ERROR,
    ),
    "contained memory error": (
        Story(
            [End(2, "RuntimeError: CUDA error: unknown"), *resets(0, 1)],
            kernels={"n1": [(99, XID.format(code=94, words="Contained ECC error"))]},
        ).evidence(),
        Cause.GPU_ERROR,
    ),
    "uncorrectable memory, told by the rank": (
        Story(
            [End(2, "CUDA error: uncorrectable ECC error encountered CUDA kernel errors might be "
                 "asynchronously reported"), *resets(0, 1)]
        ).evidence(),
        Cause.GPU_ERROR,
    ),
    "Xid 45 and 43 follow from what the rank says": (
        Story(
            [End(2, CUDA_OOM), *resets(0, 1)],
            kernels={"n1": [(99, XID.format(code=45, words="Ch 1")),
                            (99, XID.format(code=43, words="Ch 1"))]},
        ).evidence(),
        Cause.GPU_OOM,
    ),
    "Xid 63 says nothing": (
        Story(
            [End(2, "ValueError: x")],
            kernels={"n1": [(50, XID.format(code=63, words="Row Remapper: New row marked"))]},
        ).evidence(),
        Cause.CRASH,
    ),
    "GPU out of memory": (Story([End(3, CUDA_OOM), *resets(0, 1, 2)]).evidence(), Cause.GPU_OOM),
    "GPU out of memory, the trainer's word": (
        Story([End(3, "no room", cause="gpu_oom"), *resets(0)]).evidence(), Cause.GPU_OOM,
    ),
    # Memory of the host.
    "oom_kill": (
        Story(
            resets(0, 1), srun=["srun: error: n1: task 2: Killed", OOM_LINE]
        ).evidence(),
        Cause.HOST_OOM,
    ),
    "task out of memory": (
        Story(srun=["srun: error: sdumont6156: task 0: Out Of Memory"]).evidence(), Cause.HOST_OOM,
    ),
    "the kernel kills a rank": (
        Story(
            [*resets(0, 1), End(4, "RuntimeError: something odd", 101)],
            kernels={"n1": [(99, KERNEL_OOM)]},
            srun=["srun: error: n1: task 2: Killed"],
        ).evidence(),
        Cause.HOST_OOM,
    ),
    "MemoryError": (
        Story([End(0, "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 29.8 GiB")])
        .evidence(),
        Cause.HOST_OOM,
    ),
    # Data.
    "data loader": (
        Story(
            [End(1, "RuntimeError: DataLoader worker (pid 11011) is killed by signal: Bus error. "
                 "It is possible that dataloader's workers are out of shared memory.")]
        ).evidence(),
        Cause.DATA_LOADER,
    ),
    "data loader killed for memory": (
        Story(
            [End(1, "RuntimeError: DataLoader worker (pid 164244) is killed by signal: Killed. ")],
            kernels={"n0": [(100.5, KERNEL_OOM)]},
        ).evidence(),
        Cause.HOST_OOM,
    ),
    "data loader's words at the end of a run that is done": (
        Story(
            logs={0: ["RuntimeError: DataLoader worker (pid(s) 1448, 8988) exited unexpectedly"]}
        ).evidence(done=True),
        Cause.DONE,
    ),
    "data could not be read, because storage was away": (
        Story(
            [End(1, "reading sample 17 failed", cause="data_loader")],
            logs={1: ["OSError: [Errno 116] Stale file handle: 'data/shard_00017.bin'"]},
        ).evidence(),
        Cause.STORAGE,
    ),
    # Storage.
    "stale file handle": (
        Story([End(1, "OSError: [Errno 116] Stale file handle"), *resets(0)]).evidence(),
        Cause.STORAGE,
    ),
    "input/output error": (
        Story([End(1, "OSError: [Errno 5] Input/output error: 'x'")]).evidence(), Cause.STORAGE,
    ),
    "a mount is missing on one node": (
        Story(
            [End(2, "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.idx'"),
             *resets(0, 1, 4)]
        ).evidence(),
        Cause.STORAGE,
    ),
    "a path is wrong on all nodes": (
        Story(
            [End(r, "FileNotFoundError: [Errno 2] No such file: 'x'") for r in range(8)]
        ).evidence(),
        Cause.CRASH,
    ),
    "disk full in the writer": (
        Story(
            [End(3, "OSError: [Errno 28] No space left on device: '__3_1.distcp'"), *resets(0, 1)]
        ).evidence(),
        Cause.DISK_FULL,
    ),
    "quota exceeded": (
        Story([End(3, "[Errno 122] Disk quota exceeded", cause="disk_full")]).evidence(),
        Cause.DISK_FULL,
    ),
    # Fabric and ports.
    "InfiniBand, and nothing else": (
        Story(
            logs={6: [IB]}, ends=resets(0, 1), srun=["srun: error: n3: task 6: Aborted"]
        ).evidence(),
        Cause.FABRIC,
    ),
    "InfiniBand complains because a peer was killed": (
        Story(
            logs={6: [IB]}, ends=resets(0, 1), srun=["srun: error: n1: task 2: Segmentation fault"]
        ).evidence(),
        Cause.CRASH,
    ),
    "port in use": (
        Story(
            [End(0, "DistNetworkError: The server socket has failed to listen on any local network "
                 "address. The server socket has failed to bind to [::]:29500 (errno: 98 - Address "
                 "already in use).", cause="port"), *resets(1, 2, 3)]
        ).evidence(),
        Cause.PORT,
    ),
    # Numbers.
    "diverged": (
        Story([End(0, "diverged at step 17: loss", cause="diverged", step=17)]).evidence(),
        Cause.DIVERGED,
    ),
    "Megatron leaves with 17": (
        Story(
            srun=["srun: error: n0: task 3: Exited with exit code 17", "srun: error: n0: task 0: "
                  "Terminated"]
        ).evidence(srun_exit_code=143),
        Cause.DIVERGED,
    ),
    "Megatron leaves with 16": (
        Story(
            [End(r, "SystemExit: 16", cause="suspect_numerics") for r in range(4)],
            logs={3: ["ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 3"]},
        ).evidence(),
        Cause.SUSPECT_NUMERICS,
    ),
    "16 without records": (
        Story(srun=["srun: error: n0: task 3: Exited with exit code 16"]).evidence(),
        Cause.SUSPECT_NUMERICS,
    ),
    "not finite, without a word of the trainer": (
        Story(
            [End(3, "RuntimeError: found NaN in local grad norm for bucket #0"), *resets(0, 1)]
        ).evidence(),
        Cause.DIVERGED,
    ),
    # Checkpoints and the program.
    "damaged checkpoint": (
        Story(
            [End(1, "RuntimeError: PytorchStreamReader failed reading zip archive",
                 cause="bad_checkpoint")]
        ).evidence(),
        Cause.BAD_CHECKPOINT,
    ),
    "wrong setting, without a record": (
        Story(srun=["srun: error: n0: task 0: Exited with exit code 78"]).evidence(),
        Cause.CONFIG_ERROR,
    ),
    "import error everywhere": (
        Story([End(r, NO_MODULE, 5 + r / 100) for r in range(8)]).evidence(), Cause.USER_ERROR,
    ),
    "import error on one node": (
        Story([End(r, NO_MODULE, 5 + r / 100) for r in (2, 3)]).evidence(), Cause.CRASH,
    ),
    "type error everywhere, but after steps": (
        Story([End(r, "TypeError: x") for r in range(8)]).evidence(resume_step=10, last_step=12),
        Cause.CRASH,
    ),
    "superseded, by the word of a rank": (
        Story([End(0, "stale epoch: epoch 4 owns the run", cause="superseded")]).evidence(),
        Cause.SUPERSEDED,
    ),
    # Hangs.
    "hang with an odd rank": (
        Story(logs=timeouts(0, 1)).evidence(stall=ODD, srun_exit_code=-9), Cause.HANG,
    ),
    "all time out in a collective before the supervisor sees it": (
        Story(
            logs=timeouts(0, 1, 2, 3, 4, 6, 7),
            srun=["srun: error: n0: task 0: Aborted (core dumped)"],
        ).evidence(),
        Cause.HANG,
    ),
    "hang because storage is away": (
        Story(
            kernels={"n2": [(10, "nfs: server storage01 not responding, still trying")]}
        ).evidence(stall=STALL, srun_exit_code=-9),
        Cause.STORAGE,
    ),
    "hang under a broken GPU": (
        Story(kernels={"n2": [(10, OFF_BUS)]}).evidence(stall=ODD, srun_exit_code=-9),
        Cause.GPU_ERROR,
    ),
    "what a rank survived does not explain a hang": (
        Story(logs={0: ["OSError: [Errno 28] No space left on device"]}).evidence(stall=STALL),
        Cause.HANG,
    ),
    "hang in which peers were lost": (
        Story(logs={0: [RESET]}).evidence(stall=STALL), Cause.HANG,
    ),
    "hang on InfiniBand": (Story(logs={6: [IB]}).evidence(stall=STALL), Cause.FABRIC),
    "hang while a person waits for the stop": (
        Story().evidence(stall=STALL, stop_requested_by="ann"), Cause.HANG,
    ),
    "a node is lost while a person waits for the stop": (
        Story().evidence(lost_nodes=("n3",), stop_requested_by="ann"), Cause.NODE_FAILURE,
    ),
    "no launch while a person waits for the stop": (
        Story(
            srun=["srun: error: Task launch for StepId=5.0 failed on node n1: Job prolog failed"]
        ).evidence(started=False, stop_requested_by="ann"),
        Cause.PROLOG_FAILURE,
    ),
    "a rank dies while a person waits for the stop": (
        Story(srun=["srun: error: n0: task 3: Segmentation fault"]).evidence(
            stop_requested_by="ann"
        ),
        Cause.CRASH,
    ),
    "stopped at once, srun's code for it": (
        Story(srun=["srun: error: n0: task 3: Exited with exit code 143"]).evidence(
            stop_requested_by="ann"
        ),
        Cause.YIELDED,
    ),
    "held by its owner, without a restart": (
        Story().evidence(job=job("PENDING", "JobHeldUser")), Cause.REQUEUED,
    ),
    "memory, said by srun alone, beside an error that nobody knows": (
        Story([End(4, "RuntimeError: something odd")], srun=[OOM_LINE]).evidence(findings=()),
        Cause.HOST_OOM,
    ),
    "echoes came first, then a root": (
        Story([*resets(0, 1, after=10), End(4, CUDA_OOM, 50)]).evidence(), Cause.GPU_OOM,
    ),
    "the log of a rank names what its record does not": (
        Story([End(3, "RuntimeError: worker failed")], logs={3: ["NCCL WARN x", CUDA_OOM]})
        .evidence(),
        Cause.GPU_OOM,
    ),
    "the trainer's word about data, and an error that is not deeper": (
        Story(
            [End(1, "sample 17", cause="data_loader")],
            logs={1: ["RuntimeError: CUDA error: unspecified launch failure"]},
        ).evidence(),
        Cause.DATA_LOADER,
    ),
    "the trainer's word beside an echo": (
        Story([End(3, "Connection reset by peer: no room", cause="gpu_oom")]).evidence(),
        Cause.GPU_OOM,
    ),
    "superseded, though another rank failed first": (
        Story(
            [End(0, CUDA_OOM, 10), End(1, "stale epoch: 4 owns it", 20, cause="superseded")]
        ).evidence(),
        Cause.SUPERSEDED,
    ),
    "a node lost and a GPU broken on another": (
        Story(kernels={"n1": [(90, OFF_BUS)]}).evidence(lost_nodes=("n3",)), Cause.NODE_FAILURE,
    ),
    "a step cancelled, and nothing else": (
        Story(
            srun=["slurmstepd: error: *** STEP 5.0 ON n0 CANCELLED AT 2026-03-01T10:00:00 ***"]
        ).evidence(),
        Cause.UNKNOWN,
    ),
    # Nothing known.
    "only echoes": (Story(resets(0, 1, 2)).evidence(), Cause.CRASH),
    "an error that nobody knows": (
        Story([End(5, "ValueError: rank 5 is wrong", 100), *resets(0, 1)]).evidence(), Cause.CRASH,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_the_cause(name: str) -> None:
    evidence, cause = ROWS[name]
    verdict = classify(evidence)
    assert verdict.cause is cause, verdict
    assert verdict.reason and len(verdict.evidence) <= 6


@pytest.mark.parametrize("name", ROWS)
def test_the_order_of_ranks_does_not_matter(name: str) -> None:
    evidence, cause = ROWS[name]
    first = classify(evidence)
    for seed in range(20):
        generator = random.Random(seed)
        shuffled = replace(
            evidence,
            findings=tuple(generator.sample(evidence.findings, len(evidence.findings))),
            rank_exits=tuple(generator.sample(evidence.rank_exits, len(evidence.rank_exits))),
        )
        verdict = classify(shuffled)
        assert (verdict.cause, verdict.nodes, verdict.hard) == (cause, first.nodes, first.hard)


# -- who and where ---------------------------------------------------------------------------


def named(name: str) -> tuple[int | None, tuple[str, ...], bool]:
    verdict = classify(ROWS[name][0])
    return verdict.rank, verdict.nodes, verdict.hard


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a GPU falls off the bus", (None, ("n1",), True)),
        ("hang under a broken GPU", (None, ("n2",), True)),
        ("contained memory error", (None, ("n1",), False)),
        ("uncorrectable memory, told by the rank", (2, ("n1",), True)),
        ("GPU out of memory", (3, ("n1",), False)),
        ("task out of memory", (None, ("sdumont6156",), False)),
        ("the kernel kills a rank", (None, ("n1",), False)),
        ("a mount is missing on one node", (2, ("n1",), False)),
        ("prolog failed for the step", (None, ("n1",), False)),
        ("a node lost, seen by the probe only", (None, ("n3",), False)),
        ("step that cannot be killed", (None, ("n3",), False)),
        ("hang with an odd rank", (5, ("n2",), False)),
        ("hang because storage is away", (None, ("n2",), False)),
        ("all time out in a collective before the supervisor sees it", (5, (), False)),
        ("an error that nobody knows", (5, ("n2",), False)),
        ("InfiniBand complains because a peer was killed", (2, ("n1",), False)),
        ("disk full in the writer", (3, (), False)),
        ("import error everywhere", (0, (), False)),
        ("wrong setting, without a record", (0, (), False)),
        ("only echoes", (0, (), False)),
    ],
)
def test_rank_and_nodes(name: str, expected: tuple[int | None, tuple[str, ...], bool]) -> None:
    assert named(name) == expected


def test_what_many_nodes_meet_is_not_the_fault_of_one() -> None:
    ends = [End(r, "OSError: [Errno 5] Input/output error", 100 + r) for r in (0, 2, 4)]
    assert classify(Story(ends[:2]).evidence()).nodes == ("n0", "n1")
    assert classify(Story(ends).evidence()).nodes == ()


def test_what_all_nodes_meet_blames_none() -> None:
    ends = [End(r, f"ValueError: row {r} of /data/{r}", 100 + r) for r in range(8)]
    assert classify(Story(ends[:4]).evidence()).nodes == ("n0",)
    assert classify(Story(ends).evidence()).nodes == ()


def test_all_nodes_with_broken_hardware_are_named() -> None:
    kernels = {f"n{n}": [(90.0 + n, OFF_BUS)] for n in range(5)}
    verdict = classify(Story(kernels=kernels).evidence())
    assert (verdict.nodes, verdict.hard) == (("n0", "n1", "n2", "n3", "n4"), True)


def test_only_hold_holds() -> None:
    assert classify(ROWS["asked to hold"][0]).hold
    assert {name for name, row in ROWS.items() if classify(row[0]).hold} == {"asked to hold"}


def test_a_held_job_is_with_slurm_already() -> None:
    for name in ("prolog failed, requeued and held", "held by an administrator"):
        assert classify(ROWS[name][0]).already_requeued
    assert "who alone can release it" in classify(ROWS["held by an administrator"][0]).reason


@pytest.mark.parametrize(
    ("evidence", "step"),
    [
        (ROWS["diverged"][0], 17),
        (replace(ROWS["diverged"][0], last_step=16), 17),
        (replace(ROWS["GPU out of memory"][0], last_step=40), 40),
        (replace(ROWS["hang with an odd rank"][0], last_step=41), 41),
        (replace(ROWS["an error that nobody knows"][0], last_step=42), 42),
        (replace(ROWS["InfiniBand, and nothing else"][0], last_step=43), 43),
        (ROWS["only echoes"][0], None),
    ],
)
def test_the_step(evidence: LaunchEvidence, step: int | None) -> None:
    assert classify(evidence).step == step


# -- root and echo ---------------------------------------------------------------------------


def test_the_earliest_root_over_all_ranks_counts() -> None:
    early, late = End(6, CUDA_OOM, 50), End(1, "OSError: [Errno 5] Input/output error", 60)
    verdict = classify(Story([late, early]).evidence())
    assert (verdict.cause, verdict.rank) == (Cause.GPU_OOM, 6)
    swapped = Story([replace(late, after=40), early]).evidence()
    assert (classify(swapped).cause, classify(swapped).rank) == (Cause.STORAGE, 1)


def test_an_unknown_error_that_came_first_is_the_root() -> None:
    unknown = End(4, "ValueError: wrong", 50)
    verdict = classify(Story([End(1, CUDA_OOM, 60), unknown]).evidence())
    assert (verdict.cause, verdict.rank) == (Cause.CRASH, 4)


def test_echoes_that_came_first_are_no_root() -> None:
    verdict = classify(Story([*resets(0, 1, after=10), End(4, "ValueError: no", 50)]).evidence())
    assert (verdict.rank, verdict.reason) == (4, "rank 4 failed: ValueError: no")


def test_broken_hardware_goes_before_an_earlier_word_of_a_rank() -> None:
    story = Story([End(1, CUDA_OOM, 60)], kernels={"n3": [(80, OFF_BUS)]})
    assert classify(story.evidence()).nodes == ("n3",)


def test_a_stop_for_good_needs_the_word_of_the_rank() -> None:
    """wandb finds its own disk full and goes on; the crash is another's."""
    full = "OSError: [Errno 28] No space left on device: 'wandb/x'"
    survived = Story([End(0, "ValueError: no")], logs={0: [full], 3: [full]})
    assert classify(survived.evidence()).cause is Cause.CRASH
    killed = Story(logs={3: [full]}, srun=["srun: error: n1: task 3: Exited with exit code 1"])
    assert classify(killed.evidence()).cause is Cause.DISK_FULL


def test_a_rank_that_left_well_has_met_nothing() -> None:
    story = Story(
        [End(0, "", outcome="yielded"), End(1, "ValueError: no")],
        logs={0: ["OSError: [Errno 5] Input/output error"]},
    )
    assert classify(story.evidence()).cause is Cause.CRASH


def test_half_of_the_ranks_is_not_everywhere() -> None:
    half = Story([End(r, NO_MODULE, 5) for r in (0, 1)], world_size=4).evidence()
    assert classify(half).cause is Cause.CRASH
    three = Story([End(r, NO_MODULE, 5) for r in (0, 1)], world_size=3).evidence()
    assert classify(three).cause is Cause.USER_ERROR
    two_nodes = Story([End(r, NO_MODULE, 5) for r in (1, 2)], world_size=64).evidence()
    assert classify(two_nodes).cause is Cause.USER_ERROR


def test_an_error_of_the_program_is_no_echo() -> None:
    verdict = classify(Story([End(4, "KeyError: 'x'", 50), *resets(0, 1)]).evidence())
    assert (verdict.cause, verdict.rank) == (Cause.CRASH, 4)


def test_a_collective_in_which_two_were_silent_blames_none() -> None:
    story = Story(logs=timeouts(*range(6)), srun=["srun: error: n0: task 0: Aborted"])
    verdict = classify(story.evidence())
    assert (verdict.cause, verdict.rank, verdict.nodes) == (Cause.HANG, None, ())


def test_a_soft_error_elsewhere_does_not_share_the_blame() -> None:
    soft = XID.format(code=13, words="Graphics SM Warp Exception")
    story = Story(kernels={"n1": [(90, OFF_BUS)], "n2": [(80, soft)]})
    assert classify(story.evidence()).nodes == ("n1",)


def test_causes_of_the_scheduler_are_said_by_the_scheduler() -> None:
    """A site's signature cannot make a crash a preemption, which would cost no budget."""
    odd = LogFinding("site_word", Cause.PREEMPTED, "root", "evicted", rank=0, order=1.0)
    evidence = Story([End(5, "ValueError: x")]).evidence()
    assert classify(replace(evidence, findings=(odd,))).cause is Cause.CRASH


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: Unable to confirm allocation for job 5: Unable to contact slurm controller",
        "srun: error: slurm_receive_msg: Socket timed out on send/recv operation",
        "srun: error: Job prolog failed on node n1",
    ],
)
def test_more_lines_that_are_notices(line: str) -> None:
    assert read_notice(line) and not read_task_failure(line)


def test_a_watchdog_that_aborts_its_rank_is_not_the_root() -> None:
    story = Story(logs=timeouts(*range(8)), srun=["srun: error: n0: task 0: Aborted"])
    assert classify(story.evidence()).cause is Cause.HANG
    alone = Story(srun=["srun: error: n0: task 0: Aborted"])
    verdict = classify(alone.evidence())
    assert (verdict.cause, verdict.rank, verdict.nodes) == (Cause.CRASH, 0, ("n0",))


# -- what is not known -----------------------------------------------------------------------

NOISE = [
    "step 12 loss 3.4",
    "WARNING: deprecated option",
    "some error happened",
    "Traceback (most recent call last):",
    "0x7f1928e6e060: bad things",
    "*** stars ***",
    "Xid of something",
    "srun: warning: nothing",
]


def test_unknown_lines_give_nothing_destructive() -> None:
    for seed in range(300):
        generator = random.Random(seed)
        lines = [generator.choice(NOISE) for _ in range(generator.randrange(6))]
        ends = [End(r, generator.choice(NOISE), r) for r in range(generator.randrange(4))]
        base = generator.choice([NOTHING, SILENT])
        evidence = Story(ends, logs={0: lines, 5: lines}, base=base).evidence()
        verdict = classify(evidence)
        assert verdict.cause in (Cause.CRASH, Cause.UNKNOWN), verdict
        assert not verdict.hard and not verdict.hold and verdict.cause not in FINAL_CAUSES


def test_what_could_not_be_read_is_said() -> None:
    unread = LogFinding(
        "logs_unread", Cause.UNKNOWN, "advice", "3 of 8 logs could not be read in 20 s"
    )
    evidence = Story([End(5, "ValueError: x")]).evidence()
    verdict = classify(replace(evidence, findings=(unread,)))
    assert verdict.cause is Cause.CRASH and verdict.evidence[-1] == unread.line
    known = Story([End(5, CUDA_OOM)]).evidence()
    assert unread.line not in classify(replace(known, findings=(*known.findings, unread))).evidence


# -- fingerprints ----------------------------------------------------------------------------


def print_of(message: str, rank: int = 5, **changes: object) -> str:
    return classify(Story([End(rank, message)]).evidence(**changes)).fingerprint


def test_the_same_failure_has_the_same_fingerprint() -> None:
    one = print_of("ValueError: bad token 17 in /data/shard_3.bin at 0x7f12ab on rank 5", 5)
    other = print_of("ValueError: bad token 934 in /scratch/b/shard_11.bin at 0x99 on rank 1", 1)
    assert one == other and one.startswith("crash: ")
    assert print_of(CUDA_OOM, 3) == print_of(CUDA_OOM.replace("2.50", "11.25"), 6) != ""


def test_different_failures_have_different_fingerprints() -> None:
    prints = {print_of(text) for text in ("ValueError: a", "ValueError: b", "IndexError: a", RESET)}
    assert len(prints) == 4


def test_a_place_of_hanging_is_a_fingerprint() -> None:
    def hung(where: str, silent: float, rank: int = 5) -> str:
        stall = Stall("training", silent, 300.0, (OddRank(rank, f"n{rank}", where),))
        return classify(Story().evidence(stall=stall)).fingerprint

    assert hung("read (data.py:81)", 301) == hung("read (data.py:99)", 555, rank=77)
    assert hung("read (data.py:81)", 301) != hung("all_reduce (dist.py:81)", 301)


def test_a_rank_that_follows_another_is_not_named_though_srun_hears_of_it_first() -> None:
    left = "srun: error: n0: task 0: Exited with exit code 1"
    killed = "srun: error: n1: task 2: Killed"
    for lines in ([left, killed], [killed, left]):
        verdict = classify(Story(resets(0), srun=lines).evidence())
        assert (verdict.rank, verdict.nodes) == (2, ("n1",)), (lines, verdict)
    own = Story([End(0, "ValueError: bad batch")], srun=[left, killed])
    assert classify(own.evidence()).rank == 0


@pytest.mark.parametrize(
    "told",
    [
        "srun: error: Aborting, io error and missing step on node 1",
        "srun: error: Cannot communicate with node 1.  Aborting job.",
    ],
)
def test_a_slurmstepd_that_is_gone_is_named_and_not_whom_srun_has_killed(told: str) -> None:
    lines = (
        "srun: error: _server_write write failed: Bad file descriptor",
        told,
        "srun: error: n0: task 0: Killed",
        "srun: error: Timed out waiting for job step to complete",
    )
    verdict = classify(Story(srun=lines).evidence(nodes=("n0", "n5")))
    assert (verdict.cause, verdict.rank, verdict.nodes) == (Cause.CRASH, None, ("n5",))
    assert verdict.reason == "the slurmstepd of n5 is gone, and srun ended the step"
    verdict = classify(Story(srun=lines).evidence())
    assert "node 1 of the launch" in verdict.reason and not verdict.nodes


def test_what_is_no_failure_has_no_fingerprint() -> None:
    assert classify(ROWS["preemption, said only in the log of a rank"][0]).fingerprint == ""


def test_lines_of_evidence_are_few_and_short() -> None:
    many = tuple(read_notice(f"slurmstepd: error: *** JOB {n} ***") for n in range(20))
    assert len(classify(Story().evidence(srun_exit_code=-9, notices=many)).evidence) == 6
    story = Story([End(r, f"OSError: [Errno 5] {r} " + "x" * 5000, r) for r in range(8)])
    verdict = classify(story.evidence())
    assert 1 <= len(verdict.evidence) <= 6
    assert all(len(line) <= 400 for line in verdict.evidence)


def test_a_silence_of_the_run_directory_explains_a_silence_of_the_ranks() -> None:
    line = "the run directory did not answer for 240 s"
    silent = LogFinding("run_directory_silent", Cause.STORAGE, "cascade", line)
    evidence = replace(NOTHING, stall=Stall("training", 300.0, 90.0), findings=(silent,))
    verdict = classify(evidence)
    assert verdict.cause is Cause.STORAGE, verdict
    assert classify(replace(evidence, findings=())).cause is Cause.HANG
