"""Lines of ranks in the log of a node, as slurmstepd and agents write it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hpctrain.records.old_launches import LOG_NAME, LabelledLines, lines_of_rank

# What slurmstepd 22.05.8 wrote of ranks that printed 1022 to 1025 and 2048 times the same letter.
LENGTHS = (1022, 1023, 1024, 1025, 2048)


def stepd(rank: int, line: bytes) -> bytes:
    """A line in pieces of at most 1024 bytes, of which its newline is one."""
    text = line + b"\n"
    pieces = [text[start : start + 1024] for start in range(0, len(text), 1024)]
    return b"".join(b"%d: %s\n" % (rank, piece.removesuffix(b"\n")) for piece in pieces)


def test_lines_that_slurm_has_cut_are_whole_again(tmp_path: Path) -> None:
    path = tmp_path / "step0-node0000.log"
    path.write_bytes(b"".join(stepd(rank, b"y" * n) for n in LENGTHS for rank in (3, 12)))
    assert [len(line) for line in lines_of_rank(path, 12)] == list(LENGTHS)
    assert {len(line) for line in path.read_bytes().splitlines()} > {len(b"12: ") + 1024}


def test_pieces_of_several_ranks_are_not_mixed() -> None:
    text = b"1: %s\n2: short\n1: rest\n2: last" % (b"x" * 1024)
    lines = LabelledLines()
    assert [*lines.feed(text), *lines.finish()] == [
        (2, b"short"),
        (1, b"x" * 1024 + b"rest"),
        (2, b"last"),
    ]


def test_text_arrives_in_any_portions() -> None:
    """A log is followed while it grows."""
    text = b"".join(stepd(rank, b"%d-%d" % (rank, n) * 300) for n in range(9) for rank in (0, 7))
    whole = [*LabelledLines().feed(text)]
    dice = random.Random(4)
    lines, found, start = LabelledLines(), [], 0
    while start < len(text):
        size = dice.randrange(1, 700)
        found += lines.feed(text[start : start + size])
        start += size
    assert [*found, *lines.finish()] == whole
    assert len(whole) == 18


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"12: text: more", (12, b"text: more")),
        (b"  7: right-justified", (7, b"right-justified")),
        (b"0: ", (0, b"")),
        (b"0:   indented", (0, b"  indented")),
        (b"of an agent", (None, b"of an agent")),
        (b"12:no label", (None, b"12:no label")),
        (b"2026-11-23 01:02: x", (None, b"2026-11-23 01:02: x")),
    ],
)
def test_what_a_label_is(line: bytes, found: tuple[int | None, bytes]) -> None:
    assert [*LabelledLines().feed(line + b"\n")] == [found]


def test_what_is_left_of_a_killed_rank_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"4: %s\n4: last words" % (b"x" * 1024))
    assert list(lines_of_rank(path, 4)) == [b"x" * 1024 + b"last words"]
    path.write_bytes(b"4: %s" % (b"x" * 1024))
    assert list(lines_of_rank(path, 4)) == [b"x" * 1024]


def test_names() -> None:
    for name, parts in {
        "step0-rank0003.log": ("0", "3", None),
        "step12-node0001.log": ("12", None, "1"),
    }.items():
        match = LOG_NAME.fullmatch(name)
        assert match is not None
        numbers = [value and str(int(value)) for value in match.group("step", "rank", "node")]
        assert tuple(numbers) == parts
    for name in ("step0-rank3.log.old", "slurm-4.out", "round0-rank0001.log"):
        assert LOG_NAME.fullmatch(name) is None
