"""YAML that is meant to do harm: it must be refused, soon, and without running anything."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from wrong_specs import VALID, problems_of, shown

from hpctrain.spec.loader import load_run_spec

LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
TOO_MUCH = "too deep or too large"

ENDLESS = {
    "billion laughs": LAUGHS,
    "nested lists": "[" * 50_000,
    "nested mappings": "{a: " * 50_000,
    "nested dashes": "- " * 50_000,
    "nested keys": "? " * 50_000,
    "many items": "- x\n" * 6_000,
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_structures_stop_at_the_limit(tmp_path: Path, name: str) -> None:
    start = time.process_time()
    problems = problems_of(tmp_path, ENDLESS[name])
    assert TOO_MUCH in problems[0].message
    assert len(problems) == 1
    assert time.process_time() - start < 10


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!python/name:os.system",
                                 "!include", "!!binary", "!!int"])  # fmt: skip
def test_tags_are_refused(tmp_path: Path, tag: str) -> None:
    text = VALID.replace("name: tiny", f"name: {tag} tiny")
    assert shown(tmp_path, problems_of(tmp_path, text)) == [
        f"1:7: `name`: YAML tags such as `{tag}` are not supported | remove the tag"
    ]


def test_a_value_cannot_contain_itself(tmp_path: Path) -> None:
    text = VALID + "data: &d {sources: [*d]}\n"
    [line] = shown(tmp_path, problems_of(tmp_path, text))
    assert line.startswith("8:21: `data.sources[0]`: `*d` refers to nothing that is complete")


def test_a_problem_in_an_alias_is_reported_once(tmp_path: Path) -> None:
    text = VALID.replace("global: 8", "global: &n 012").replace("gpus: 4", "gpus: *n")
    assert [problem.line for problem in problems_of(tmp_path, text)] == [3]


def test_aliases_are_copies(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(VALID.replace("global: 8", "global: &n 8").replace("gpus: 4", "gpus: *n"))
    loaded = load_run_spec(file, ["batch.global=16"])
    assert (loaded.document.batch.global_, loaded.document.resources.gpus) == (16, 8)


def test_a_yaml_1_1_line_does_not_change_the_meaning(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text("%YAML 1.1\n---\n" + VALID.replace("gpus: 4", "gpus: 4, walltime: 24:00:00"))
    assert load_run_spec(file).document.resources.walltime == 86400


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    text = VALID.replace("name: tiny", '"\\e[31mred\\a": "\\e]0;x"\nname: "\\e[2J"')
    for problem in problems_of(tmp_path, text, "\x1b[1m=2"):
        assert str(problem).isprintable()
        assert (problem.hint or "").isprintable()


@pytest.mark.parametrize(
    ("field", "old"),
    [
        ("layers", "layers: 4"),
        ("hidden", "hidden: 128"),
        ("heads", "heads: 4"),
        ("vocab", "vocab: 1024"),
        ("seq", "seq: 128"),
        ("global", "global: 8"),
        ("gpus", "gpus: 4"),
    ],
)
def test_a_number_that_would_be_counted_for_ever_is_refused_at_its_place(
    tmp_path: Path, field: str, old: str
) -> None:
    """Layers are counted one by one, and of widths and GPUs every divisor is tried."""
    assert old in VALID
    text = VALID.replace(old, f"{field}: 1000000000000")
    [line] = shown(tmp_path, problems_of(tmp_path, text))
    assert f".{field}`: must be at most 10" in line or ".heads`: must be at most 65536" in line
    assert line[0].isdigit(), line
