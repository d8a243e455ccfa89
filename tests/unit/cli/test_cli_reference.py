"""`explain`, `examples`, and what the shell completes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from command_line import hpctrain

from hpctrain.cli.main import cli
from hpctrain.spec.loader import load_spec
from hpctrain.spec.reference import examples

ROOT = Path(__file__).resolve().parents[3]


def completed(*words: str) -> list[str]:
    *before, last = words
    shell = ShellComplete(cli, {}, "hpctrain", "_HPCTRAIN_COMPLETE")
    return [item.value for item in shell.get_completions(list(before), last)]


def test_fields_of_set_are_completed_and_their_values() -> None:
    assert completed("plan", "--set", "parallel.vp") == ["parallel.vpp"]
    assert completed("submit", "--set", "check") == [
        "checkpoint.",
        *(name for name in completed("submit", "--set", "checkpoint.") if "." in name),
    ]
    assert completed("plan", "--set", "precision=b") == ["precision=bf16"]
    assert completed("explain", "batch.m") == ["batch.micro"]


def test_explain_a_field() -> None:
    text = hpctrain("explain", "batch.micro", "--in", str(ROOT / "examples/gpt175b.yaml")).stdout
    assert "Meaning   Sequences per GPU and microbatch" in text
    assert "Default   auto" in text and "Value     1 (gpt175b.yaml:29)" in text
    assert "(`hpctrain examples gpt-tiny`)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_explain_a_section_lists_its_fields() -> None:
    text = hpctrain("explain", "checkpoint").stdout
    assert "  keep: whole number at least 1 · 2" in text
    assert "      Newest verified checkpoints to keep" in text


def test_explain_a_value_of_a_profile() -> None:
    text = hpctrain("explain", "network.nic_bandwidth", "-p", "a100x64").stdout
    assert "(cluster profile)" in text and "(a100x64.yaml:" in text


def test_explain_without_a_field_lists_sections() -> None:
    lines = hpctrain("explain").stdout.splitlines()
    assert lines[1].startswith("name") and any(line.startswith("parallel ") for line in lines)
    assert any(
        line.startswith("slurm")
        for line in hpctrain("explain", "--as", "profile").stdout.splitlines()
    )


def test_explain_refuses_what_is_not_there() -> None:
    done = hpctrain("explain", "paralel.tp")
    assert done.exit_code == 2 and "did you mean `parallel.tp`" in done.stderr


@pytest.mark.parametrize("name", list(examples()))
def test_an_example_is_printed_as_it_is(name: str, tmp_path: Path) -> None:
    done = hpctrain("examples", name)
    assert done.stdout == (examples()[name]).read_text()
    if "profile" not in name:
        file = tmp_path / "mine.yaml"
        file.write_text(done.stdout)
        load_spec(file)


def test_the_list_of_examples_fits_a_terminal() -> None:
    text = hpctrain("examples").stdout
    assert max(map(len, text.splitlines())) <= 80 and "gpt175b\n" in text
    assert "there is no example `gpt9`" in hpctrain("examples", "gpt9").stderr
