"""Which sample comes next when data is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.records.run_records import SkipList, SkippedData
from hpctrain.train.datasets.skipped_samples import Skips, parse_skips, read_skips


def _skips(*ranges: tuple[int, int]) -> Skips:
    listed = [
        SkippedData(from_samples=first, to_samples=end, reason="", time=0.0)
        for first, end in ranges
    ]
    return parse_skips(SkipList(skips=tuple(listed)).model_dump_json(), Path("skips.json"))


@pytest.mark.parametrize(
    ("consumed", "expected"),
    [(0, 0), (15, 15), (16, 32), (31, 32), (32, 32), (40, 64), (48, 64), (63, 64), (64, 64)],
)
def test_next_sample(consumed: int, expected: int) -> None:
    """Two ranges that overlap are left out as one, in whatever order they were written."""
    assert _skips((48, 64), (16, 32), (40, 56)).next_sample(consumed) == expected


def test_the_last_checkpoint_before_each_range_is_pinned() -> None:
    steps = {1: 8, 2: 16, 3: 40, 4: 48}
    assert _skips((16, 32)).pinned(steps) == {2}
    assert _skips((16, 32), (47, 56)).pinned(steps) == {2, 3}
    assert _skips((7, 32)).pinned(steps) == set()
    assert Skips().pinned(steps) == set()


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "skips.json"
    assert read_skips(path) is None
    assert parse_skips(None, path).next_sample(5) == 5
    for text in ("", "[]", '{"skips": [{"from_samples": 9}]}'):
        with pytest.raises(InvalidInputError, match=r"skips\.json: is no list of skipped data"):
            parse_skips(text, path)
    with pytest.raises(InvalidInputError, match="skips from sample 8 to 4"):
        _skips((8, 4))
    path.mkdir()
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_skips(path)
