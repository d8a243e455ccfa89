"""The lines that are known: each example is its own, expressions are safe, a site may add."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import yaml

from hpctrain.base.errors import InvalidInputError
from hpctrain.judge.catalogue import load_signatures
from hpctrain.judge.causes import Cause
from hpctrain.judge.signatures import LONGEST_LINE, Signature, Signatures, Where, unsafe
from hpctrain.spec.loader import profile_names

KNOWN = load_signatures()
PLAIN = [one for one in KNOWN.signatures if one.role != "advice"]
EACH = [(one, where) for one in PLAIN for where in one.where]
WHERE: tuple[Where, ...] = ("rank", "srun", "kernel", "script")

OWN = """
signatures:
  - id: site_scratch
    cause: storage
    role: root
    contains: [scratch is away]
    regex: 'scratch is away on (?P<node>\\S{1,20})'
    where: [rank]
    source: our own wiki
    example: "E: scratch is away on n17"
"""


@pytest.mark.parametrize(("one", "where"), EACH, ids=[f"{s.id}-{w}" for s, w in EACH])
def test_an_example_is_recognised_as_what_it_is(one: Signature, where: Where) -> None:
    match = KNOWN.matcher(where).match(one.example)
    assert match is not None
    assert (match.signature, match.cause, match.role) == (one.id, one.cause, one.role)
    assert (match.hard, match.teardown) == (one.hard, one.teardown)


def test_what_is_specific_stands_before_what_is_general() -> None:
    """Of two that match the first counts: the pairs that overlap are these and no others."""
    overlaps = {
        (one.id, other.id)
        for one in PLAIN
        for other in PLAIN
        if one is not other and set(one.where) & set(other.where) and other.matches(one.example)
    }
    assert overlaps == {
        ("data_loader_shared_memory", "disk_full"),
        ("container_setting", "container_start"),
        ("nccl_infiniband", "peer_lost"),
        ("slurm_preempted", "slurm_step_cancelled"),
        ("slurm_time_limit", "slurm_step_cancelled"),
        ("slurm_requeued", "slurm_step_cancelled"),
        ("slurm_prolog", "slurm_no_launch"),
        ("slurm_controller_away", "slurm_no_launch"),
    }


def test_every_cause_of_machines_and_logs_has_a_line() -> None:
    told = {one.cause for one in KNOWN.signatures} | {one.cause for one in KNOWN.xids}
    # Known by words of the supervisor itself, of people, or by codes of the trainer.
    without = {
        *(Cause.DONE, Cause.YIELDED, Cause.CANCELLED, Cause.SUPERSEDED, Cause.SUPERVISOR_LOST),
        *(Cause.SUSPECT_NUMERICS, Cause.EXTERNAL_SIGNAL, Cause.DEADLINE),
        *(Cause.BAD_CHECKPOINT, Cause.DATA_CHANGED, Cause.ENGINE_EXIT, Cause.NODE_COMMAND),
        *(Cause.ENDED_EARLY, Cause.STARTS_OVER),
    }
    assert set(Cause) - told == without


@pytest.mark.parametrize(
    "line",
    [
        "event=step step=120/5000 loss=2.71828 grad_norm=0.31 learning_rate=0.0003",
        "[rank0]:[W1121 05:33:37.123 socket.cpp:426] [c10d] The server socket has failed to bind "
        "to [::]:25641 (errno: 98 - Address already in use).",
        "CUDA kernel errors might be asynchronously reported at some other API call",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "The failure may be caused by CUDA out of memory on another rank",
        "RuntimeError: DataLoader worker (pid 5) is killed by signal: Terminated. ",
        "loading KeyErrors.json",
        "my_TypeError: x",
        "",
    ],
)
def test_what_says_nothing_is_not_recognised(line: str) -> None:
    assert KNOWN.matcher("rank").match(line) is None


def test_advice_ends_a_line_and_does_not_hide_what_stands_before_it() -> None:
    line = (
        "AcceleratorError: CUDA error: uncorrectable ECC error encountered CUDA kernel errors "
        "might be asynchronously reported at some other API call. CUDA out of memory"
    )
    match = KNOWN.matcher("rank").match(line)
    assert match is not None and match.signature == "gpu_uncorrectable_memory"


def test_a_line_counts_only_where_it_may_stand() -> None:
    nfs = "nfs: server storage01 not responding, still trying"
    assert KNOWN.matcher("kernel").match(nfs)
    assert not KNOWN.matcher("rank").match(nfs)
    xid = "NVRM: Xid (PCI:0000:cb:00): 79, GPU has fallen off the bus."
    assert not KNOWN.matcher("rank").match(xid)


# -- XIDs ------------------------------------------------------------------------------------

XID_LINES = yaml.safe_load(Path(__file__).with_name("xid_lines.yaml").read_text())


@pytest.mark.parametrize(
    ("signature", "role", "hard", "line"), XID_LINES, ids=[row[0] for row in XID_LINES]
)
def test_xids(signature: str, role: str, hard: bool, line: str) -> None:
    match = KNOWN.matcher("kernel").match(line)
    assert match is not None
    assert (match.signature, match.role, match.hard) == (signature, role, hard)
    assert match.cause is Cause.GPU_ERROR


@pytest.mark.parametrize("codes", [KNOWN.xids, KNOWN.sxids], ids=["xids", "sxids"])
def test_a_code_stands_there_once(codes: tuple[object, ...]) -> None:
    numbers = [getattr(one, "code") for one in codes]  # noqa: B009
    assert len(numbers) == len(set(numbers))


def test_only_what_needs_a_reset_or_a_repair_costs_a_node_its_place() -> None:
    hard = {one.code for one in KNOWN.xids if one.hard}
    assert {48, 64, 74, 79, 95, 119, 120, 140} <= hard
    assert not hard & {13, 31, 43, 45, 63, 92, 94, 109, 121, 137, 154}
    assert all(one.role == "root" for one in KNOWN.xids if one.hard)


# -- safety and speed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        ("(", "not a regular expression"),
        ("x.*y", "no bound"),
        ("x.+y", "no bound"),
        (r"x\d{3,}y", "no bound"),
        ("[*+]x*", "no bound"),
        (r"\[x+", "no bound"),
        ("(?:a|b){1,9}", "repeated"),
        ("(?:a{1,9}b){2}", "repeated"),
        (r"(a)\1", "refer back"),
        ("(?P<x>a)(?P=x)", "refer back"),
        (".{0,200}.{0,200}x", "ways"),
        ("a?" * 14, "ways"),
    ],
)
def test_unsafe_expressions_are_refused(regex: str, words: str) -> None:
    assert words in (unsafe(regex) or "")


@pytest.mark.parametrize(
    "regex", [r"\*\*\* x\+", "[*+]{1,3}", "(?:a|b)?c", "(?<!x)y", "a{99}|b{0,98}.{0,99}", r"\(x\)y"]
)
def test_safe_expressions_are_taken(regex: str) -> None:
    assert unsafe(regex) is None


HOSTILE = [
    "A" * 10**6,
    " " * 10**6,
    "0123456789" * 10**5,
    "srun: error: " + "n" * 10**6,
    "DataLoader worker (pid " + "1, " * 10**5,
    "RuntimeError: " * 10**5,
    "Error: Address already " * 50_000,
    "NET/IB Got completion from peer " * 50_000,
    "*** STEP " * 10**5,
    "segfault at " * 10**5,
    "size mismatch for " * 50_000,
    "NVRM: Xid (PCI:" * 50_000,
    "MemoryError" * 10**5,
    "\x1b[" * 10**5,
]


@pytest.mark.parametrize("line", HOSTILE, ids=[line[:12] for line in HOSTILE])
def test_no_line_holds_the_scanner_up(line: str) -> None:
    """A line is cut, so each takes milliseconds; what is not linear takes hours."""
    began = time.process_time()
    for where in WHERE:
        KNOWN.matcher(where).match(line)
    assert time.process_time() - began < 20


@pytest.mark.parametrize("one", PLAIN, ids=lambda one: str(one.id))
def test_each_expression_is_linear_on_its_own_words(one: Signature) -> None:
    """The worst lines for an expression are made of its own beginnings."""
    for seed in (one.contains[0], one.example, one.example[:20], f"{one.contains[0]} 1 "):
        line = (seed * LONGEST_LINE)[:LONGEST_LINE]
        began = time.process_time()
        re.search(one.regex, line)
        assert time.process_time() - began < 20


def test_only_lines_with_a_known_word_are_looked_at() -> None:
    healthy = "\n".join(f"event=step step={n}/5000 loss=2.7" for n in range(2000))
    text = f"{healthy}\ntorch.OutOfMemoryError: CUDA out of memory.\n{healthy}\nKeyError: 'x'"
    found = list(KNOWN.matcher("rank").candidates(text, 10))
    assert [line for _, line in found] == [
        "torch.OutOfMemoryError: CUDA out of memory.",
        "KeyError: 'x'",
    ]
    assert len(list(KNOWN.matcher("rank").candidates("KeyError: x\n" * 50, 10))) == 10


# -- a site's own ----------------------------------------------------------------------------


def test_a_site_adds_replaces_and_does_without(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for directory in (near, far):
        directory.mkdir()
    (far / "signatures.yaml").write_text(
        OWN.replace("storage", "fabric")
        + OWN.partition("signatures:\n")[2]
        .replace("site_scratch", "disk_full")
        .replace("where:", "enabled: false\n    where:")
    )
    (near / "signatures.yaml").write_text(OWN)
    (near / "xids.yaml").write_text(
        "xids: [{code: 109, class: lost, role: root, hard: true, words: Our switch}]"
    )
    own = load_signatures([near, tmp_path / "none", far])
    match = own.matcher("rank").match("E: scratch is away on n17")
    assert match is not None
    assert (match.signature, match.cause, match.node) == ("site_scratch", Cause.STORAGE, "n17")
    assert own.matcher("rank").match("OSError: [Errno 28] No space left on device") is None
    switch = own.matcher("kernel").match("NVRM: Xid (PCI:0000:cb:00): 109, CTX SWITCH TIMEOUT")
    assert switch is not None and switch.hard
    assert len(own.xids) == len(KNOWN.xids)
    assert load_signatures() == KNOWN


def test_files_of_a_site_are_no_profiles(tmp_path: Path) -> None:
    for name in ("signatures.yaml", "xids.yaml", "mine.yaml"):
        (tmp_path / name).write_text("")
    assert set(profile_names([tmp_path])) - set(profile_names()) == {"mine"}


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (("storage", "strorage"), 4, "`signatures[0].cause`"),
        (("role: root", "role: rot"), 5, "`signatures[0].role`"),
        (("{1,20}", "*"), 7, "no bound"),
        (("on n17", "off"), 3, "the example does not match"),
        (("contains: [scratch is away]", "contains: [no]"), 6, "characters at least: 4"),
        (("source:", "sources:"), 9, "unknown key"),
    ],
)
def test_errors_of_a_site_have_their_place(
    tmp_path: Path, change: tuple[str, str], line: int, words: str
) -> None:
    (tmp_path / "signatures.yaml").write_text(OWN.replace(*change))
    with pytest.raises(InvalidInputError) as caught:
        load_signatures([tmp_path])
    told = [str(problem) for problem in caught.value.problems]
    assert any(f"signatures.yaml:{line}:" in one and words in one for one in told), told


def test_the_supervisor_reads_what_submit_wrote() -> None:
    assert Signatures.model_validate_json(KNOWN.to_json()) == KNOWN
