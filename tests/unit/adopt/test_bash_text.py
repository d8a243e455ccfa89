"""Splitting scripts into statements and words, against what bash does with the same text."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from job_scripts import SHAPES, combined_scripts

from hpctrain.adopt.bash_text import Part, Statement, Word, statements_of
from hpctrain.adopt.variables import Variables, shell_text


def words_of(text: str) -> list[str]:
    """The words that the last statement of a text becomes, after its assignments."""
    variables = Variables("/here")
    *before, last = statements_of(text)
    for statement in before:
        for word in statement.words:
            first, *more = word.parts
            name, _, rest = first.text.partition("=")
            value = Word((Part("text", rest, first.quoted), *more), word.items)
            variables.assign(
                name.removesuffix("+"), value, line=1, exported=False, add=name.endswith("+")
            )
    return [shell_text(text) for word in last.words for text in variables.split(word)]


# What bash prints for each word is asked of bash itself.
TEXTS = (
    "p a 'b c' \"d e\" f\\ g",
    "X=1\np $X ${X} \"$X\" '$X' \\$X a${X}b",
    'X="a b  c"\np $X "$X" -$X-',
    'X=" a b "\np x$X"y"',
    "X=\np $X \"$X\" a$X ''",
    'A=(--a 1 \'b c\')\np ${A[@]} "${A[@]}" x"${A[@]}"y "${A[*]}" $A',
    "A=(1)\nA+=(2 3)\np ${A[@]}",
    'A=()\np "${A[@]}" ${A[@]} z',
    "N=4\nM=$((N * 2 + 1))\np $M $((M / 2)) $(( (M - 1) % 3 ))",
    'p ${UNSET_X:-default} ${UNSET_Y-b c} "${UNSET_Z:-b c}"',
    "p ${UNSET_X:=first} $UNSET_X",
    "C=x\nC=\"$C --y\"\nC+=' z'\np $C",
    "p \\\n  one \\\n  two # comment",
    'p "a\\$b" "a\\"b" "a\\nb" \'a\\b\'',
    "p a#b '#c' # d",
    "p --x={a} 'x;y' \"x|y\"",
    "p a; p b & p c && p last",
)


@pytest.mark.parametrize("text", TEXTS)
def test_words_are_those_of_bash(text: str) -> None:
    bash = shutil.which("bash")
    assert bash
    script = f"p() {{ printf '<%s>' \"$@\"; echo; }}\n{text}\nwait"
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, timeout=20)
    printed = sorted(done.stdout.splitlines())
    ours = "".join(f"<{word}>" for word in words_of(text)[1:])
    assert ours in printed, done.stdout + done.stderr


def lines(text: str) -> list[tuple[int, int, str | None]]:
    return [(one.first_line, one.last_line, one.block) for one in statements_of(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n\n# c\nb \\\n  c\nd", [(1, 1, None), (4, 5, None), (6, 6, None)]),
        ("if a; then\n  b\nfi\nc", [(1, 3, "if"), (4, 4, None)]),
        ("if a; then if b; then c; fi; fi; d", [(1, 1, "if"), (1, 1, None)]),
        ("for x in 1 2\ndo\n echo $x\ndone > f\nd", [(1, 4, "for"), (5, 5, None)]),
        ("for ((i=0; i<3; i++)); do\n a\ndone\nd", [(1, 3, "for"), (4, 4, None)]),
        ("case $1 in\n a) b ;;\n (c) d;;\n *) e ;;\nesac\nf", [(1, 5, "case"), (6, 6, None)]),
        ("f() {\n a\n}\nf", [(1, 3, "function"), (4, 4, None)]),
        ("function f {\n if a; then b; fi\n}\nf", [(1, 3, "function"), (4, 4, None)]),
        ("function f() { a; }\nf", [(1, 1, "function"), (2, 2, None)]),
        ("( cd x\n a )\nb", [(1, 2, "("), (3, 3, None)]),
        ("{ a\n b\n}\nc", [(1, 3, "{"), (4, 4, None)]),
        ("while read x; do\n [[ $x == (a|b) ]] && c\ndone < f\nd", [(1, 3, "while"), (4, 4, None)]),
        ('cat <<EOF > f\nif then "\nEOF\nb', [(1, 3, None), (4, 4, None)]),
        ("cat <<'A' <<-B\nx\nA\n\ty\n\tB\nb", [(1, 5, None), (6, 6, None)]),
        ("X=$(a \"b)\" 'c)' $(d))\ne", [(1, 1, None), (2, 2, None)]),
        ("X=`a 'b'`\nA=(1\n# two\n2)\ne", [(1, 1, None), (2, 4, None), (5, 5, None)]),
        ("echo if\necho done", [(1, 1, None), (2, 2, None)]),
        ("a '\nb\n' c\nd", [(1, 3, None), (4, 4, None)]),
    ],
)
def test_statements_have_their_lines(
    text: str, expected: list[tuple[int, int, str | None]]
) -> None:
    assert lines(text) == expected


def test_what_is_never_closed_is_one_broken_statement() -> None:
    for text in ('a\nb "c\nd\n', "a\nb $(c\nd\n", "a\nif b; then\n c 'd\nfi\n"):
        good, *_, bad = statements_of(text)
        assert (good.first_line, good.broken) == (1, None)
        assert bad.broken is not None
        assert (bad.first_line, bad.last_line) == (2, len(text.splitlines()))


def test_operators_and_redirections_belong_to_their_statement() -> None:
    first, second, third, fourth = statements_of(["a 2>&1 | b -x > f; c &\nd", " true"][0])
    assert [one.operator for one in first.redirections] == ["2>&"]
    assert (second.joined, second.redirections[0].target.literal) == ("|", "f")
    assert (third.background, fourth.background) == (True, False)


def test_bash_accepts_all_scripts_of_the_tests(tmp_path: str) -> None:
    texts = [shape.text for shape in SHAPES] + [text for text, _ in combined_scripts().values()]
    for text in texts[:40]:
        done = subprocess.run(
            ["bash", "-n"], input=text, capture_output=True, text=True, timeout=20
        )
        assert done.returncode == 0, done.stderr + text
        assert not [one for one in statements_of(text) if one.broken]


def test_an_empty_script_has_no_statements() -> None:
    assert statements_of("") == ()
    assert statements_of("# only\n\n") == ()
    assert isinstance(statements_of("a")[0], Statement)
