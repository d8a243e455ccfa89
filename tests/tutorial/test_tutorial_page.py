"""How the page is compared: what has to be the same, and what may differ."""

from __future__ import annotations

import pytest
from tutorial_page import blocks_of, differs, rewritten, shown

PAGE = """\
# Page

<!-- live; exit 3; until: 6[0-9] steps -->
```console
$ hpctrain status \\
> night
Time  3.05 min, 47.4% of it
ada$ hpctrain stop night
asked
```

```sh
$ not a block
```
"""


def test_commands_outputs_and_what_is_said_about_a_block() -> None:
    (block,) = blocks_of(PAGE)
    assert (block.live, block.exit_code, block.until) == (True, 3, "6[0-9] steps")
    first, second = block.commands
    assert first.text == "hpctrain status \\\nnight" and first.lines == [
        "Time  3.05 min, 47.4% of it"
    ]
    assert (second.prompt, second.text, second.lines) == ("ada$ ", "hpctrain stop night", ["asked"])


def test_a_directive_that_means_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="`liv` means nothing"):
        blocks_of(PAGE.replace("live", "liv"))


@pytest.mark.parametrize(
    ("expected", "found", "live", "other"),
    [
        (["52-63 d, 57.7 d"], ["52-63 d, 57.7 d"], False, False),
        (["52-63 d, 57.7 d"], ["52-63 d, 57.8 d"], False, True),
        (["Time  3.05 min"], ["Time  12 s"], True, False),
        (["Time  3.05 min · 0 failures"], ["Time  12 s · 1 failure"], True, True),
        (["step 60   16.9 MiB   good"], ["step 60   9 KiB   good"], True, False),
        (["step 60"], ["step 50"], True, True),
        (["a … z"], ["a b c z"], False, False),
        (["a", "…", "z"], ["a", "z"], False, False),
        (["a", "…", "z"], ["a", "b", "c", "z"], False, False),
        (["a", "…", "z"], ["a", "b"], False, True),
        (["a"], ["a", "b"], False, True),
    ],
)
def test_what_may_differ(expected: list[str], found: list[str], live: bool, other: bool) -> None:
    assert differs(expected, found, live=live) is other


def test_names_of_the_page_and_lines_that_are_gone() -> None:
    text = "asking Slurm\r            \rRun night-0a1f of root in /tmp/x/w  \r\n\r\n"
    assert shown(text, {"/tmp/x/w": "/users/ben", "root": "ben"}) == [
        "Run night-7b02 of ben in /users/ben"
    ]


def test_only_outputs_are_written_anew() -> None:
    (block,) = blocks_of(PAGE)
    page = rewritten(PAGE, {block.commands[0].first_line: ["new", "lines"]})
    assert page == PAGE.replace("Time  3.05 min, 47.4% of it", "new\nlines")
