"""Nothing broken reaches the queue: one list of checks for `validate -p`, `plan` and `submit`."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from another_user import AnotherUser, public_directory
from command_line import hpctrain
from token_files import write_tokens

SPEC = """\
name: small
model: {layers: 4, hidden: 128, heads: 4, vocab: 512, seq: 128}
data:
  sources:
    - path: data/text
batch: {global: 8, micro: 2}
budget: {steps: 60}
parallel:
  tp: 2
  pp: 2
precision: fp32
optimizer: {lr: 1e-3}
checkpoint: {every_steps: 20}
resources: {gpus: 4}
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_tokens(tmp_path / "data/text")
    file = tmp_path / "small.yaml"
    file.write_text(SPEC)
    return file


def random_index() -> None:
    Path("data/text.idx").write_bytes(random.Random(3).randbytes(500))


def directory() -> None:
    Path("data/text.bin").unlink()
    Path("data/text.bin").mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda: Path("data/text.bin").write_bytes(b""), "text.bin"),
        (lambda: os.truncate("data/text.bin", 1000), "has 1000 bytes"),
        (random_index, "is not a Megatron index"),
        (directory, "is not a file"),
    ],
)
@pytest.mark.parametrize("command", ["validate", "submit"])
def test_damaged_data_ends_with_3_at_its_line(
    spec: Path, damage: Callable[[], object], words: str, command: str
) -> None:
    damage()
    more = ("-y",) if command == "submit" else ()
    done = hpctrain(command, "-p", "sandbox", "small.yaml", *more)
    assert done.exit_code == 3, done.transcript()
    assert f"{spec.name}:5:13: `data.sources[0].path`: " in done.stderr and words in done.stderr
    assert not Path("runs").exists(), "nothing is left of what was refused"


def test_made_up_data_have_to_be_meant(spec: Path) -> None:
    """A trial of a hundred steps needs no data; a longer run says so or has some."""
    text = SPEC.replace("data:\n  sources:\n    - path: data/text\n", "")
    spec.write_text(text)
    assert "made up" in hpctrain("validate", "-p", "sandbox", "small.yaml").stdout
    longer = ("-p", "sandbox", "small.yaml", "--set", "budget.steps=101")
    refused = hpctrain("validate", *longer)
    assert refused.exit_code == 3 and "101 steps would train on made-up samples" in refused.stderr
    assert "data: {made_up: true}" in refused.stderr
    assert hpctrain("validate", *longer, "--set", "data.made_up=true").exit_code == 0
    planned = hpctrain("plan", *longer)
    assert planned.exit_code == 0 and "Ready     no: data (1 problem)" in planned.stdout


def test_layout_limits_and_data_are_told_at_once_with_their_places(spec: Path) -> None:
    spec.write_text(SPEC.replace("tp: 2", "tp: 3").replace("data/text", "data/none"))
    done = hpctrain("validate", "-p", "sandbox", "small.yaml", "--set", "resources.partition=none")
    assert done.exit_code == 4, "as without the data"
    for words in (
        "small.yaml:9:7: heads 4 is not divisible by tp 3",
        "small.yaml:5:13: `data.sources[0].path`",
        "--set resources.partition=none: cluster sandbox has no partition `none`",
    ):
        assert words in done.stderr, done.stderr
    document = hpctrain("validate", "-p", "sandbox", "small.yaml", "--json").stdout
    (plan, *_) = [c for c in json.loads(document)["checks"] if c["subject"] == "plan"]
    assert plan["state"] == "fails" and plan["problems"][0]["line"] == 9
    assert "FAILS plan: 6 problems" in done.stdout and "FAILS data: 2 problems" in done.stdout


def test_the_training_python_has_what_the_engine_imports(spec: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '[\"torch\"]'\n")
    python.chmod(0o755)
    profile = tmp_path / "mine.yaml"
    profile.write_text(f"extends: sandbox\nname: mine\nsoftware: {{python: {python}}}\n")
    done = hpctrain("validate", "-p", str(profile), "small.yaml")
    assert done.exit_code == 3, done.transcript()
    assert f"{python}, which is to train, has no torch" in done.stderr
    assert "pip install 'hpctrain[megatron]'" in done.stderr


def test_plan_says_whether_it_could_be_submitted(spec: Path) -> None:
    ready = hpctrain("plan", "-p", "sandbox", "small.yaml").stdout
    assert "Ready     yes" in ready and "hpctrain submit -p sandbox small.yaml" in ready
    Path("data/text.idx").unlink()
    done = hpctrain("plan", "-p", "sandbox", "small.yaml")
    assert done.exit_code == 0 and "Ready     no: data (1 problem)" in done.stdout
    assert "hpctrain validate -p sandbox small.yaml" in done.stdout


def files_closed(place: Path) -> None:
    (place / "data/text.bin").chmod(0)


def directory_closed(place: Path) -> None:
    (place / "data").chmod(0o700)


@pytest.mark.parametrize("close", [files_closed, directory_closed])
def test_data_that_somebody_may_not_read_are_a_problem_at_their_line(
    close: Callable[[Path], None], another_user: AnotherUser
) -> None:
    with public_directory() as place:
        (place / "data").mkdir()
        write_tokens(place / "data/text")
        spec = place / "small.yaml"
        spec.write_text(SPEC.replace("data/text", str(place / "data/text")))
        close(place)
        done = another_user.hpctrain("validate", "-p", "sandbox", str(spec))
        assert done.exit_code == 3, done.transcript()
        assert "FAILS data: " in done.stdout and "software: " in done.stdout
        assert "small.yaml:5:13: `data.sources[0].path`: " in done.stderr
        assert "text.bin cannot be read: Permission denied" in done.stderr
        shown = another_user.hpctrain("data", "show", str(place / "data/text"))
        assert shown.exit_code == 3 and "cannot be read: Permission denied" in shown.stderr


def test_arrays_in_a_closed_directory_are_a_problem_at_their_line(
    another_user: AnotherUser,
) -> None:
    with public_directory() as place:
        (place / "data").mkdir(mode=0o700)
        spec = place / "small.yaml"
        source = f"format: packed\n  sources:\n    - path: {place}/data/text"
        spec.write_text(SPEC.replace("sources:\n    - path: data/text", source))
        done = another_user.hpctrain("validate", "-p", "sandbox", str(spec))
        assert done.exit_code == 3, done.transcript()
        assert "small.yaml:6:13: `data.sources[0].path`: " in done.stderr
        assert "cannot be read: Permission denied" in done.stderr


def test_a_read_that_fails_midway_leaves_the_other_checks(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "data/text.bin")

    monkeypatch.setattr("hpctrain.job.preflight.check_samples", fail)
    done = hpctrain("validate", "-p", "sandbox", "small.yaml")
    assert done.exit_code == 3 and "software: " in done.stdout
    assert "small.yaml:5:5: `data.sources`: data/text.bin cannot be read: Input" in done.stderr


def test_a_place_in_which_no_directory_can_be_made_is_no_full_one(spec: Path) -> None:
    done = hpctrain("validate", "-p", "sandbox", "small.yaml", "--runs", "/proc/x")
    assert done.exit_code == 3, done.transcript()
    assert "/proc/x does not exist, and no directory can be made in /proc" in done.stderr
    assert "checkpoint.keep" not in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not JSON", "tokenizer.json is no tokenizer: "),
        ("\0\xff", "tokenizer.json is no tokenizer: "),
        (json.dumps({"model": {"vocab": {"a": 0, "b": 512}}}), "vocabulary of 513 tokens, the mod"),
        (json.dumps({"model": {"vocab": [["a", 0.0]] * 600}}), "vocabulary of 600 tokens"),
        (
            json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 700}]}),
            "vocabulary of 701 tokens",
        ),
    ],
)
def test_a_tokenizer_that_is_none_or_of_another_model(spec: Path, content: str, words: str) -> None:
    spec.write_text(SPEC.replace("data:\n", "data:\n  tokenizer: data/tokenizer.json\n"))
    Path("data/tokenizer.json").write_text(content, encoding="latin-1")
    done = hpctrain("validate", "-p", "sandbox", "small.yaml")
    assert done.exit_code == 3, done.transcript()
    assert "small.yaml:4:14: `data.tokenizer`: " in done.stderr and words in done.stderr
    for fitting in ('{"model": {"vocab": {"a": 0, "b": 511}}}', "{}"):
        Path("data/tokenizer.json").write_text(fitting)
        assert hpctrain("validate", "-p", "sandbox", "small.yaml").exit_code == 0


def test_a_tokenizer_that_somebody_may_not_read(another_user: AnotherUser) -> None:
    with public_directory() as place:
        (place / "data").mkdir()
        write_tokens(place / "data/text")
        tokenizer = place / "tokenizer.json"
        tokenizer.touch(mode=0)
        spec = place / "small.yaml"
        text = SPEC.replace("data/text", str(place / "data/text"))
        spec.write_text(text.replace("data:\n", f"data:\n  tokenizer: {tokenizer}\n"))
        done = another_user.hpctrain("validate", "-p", "sandbox", str(spec))
        assert done.exit_code == 3, done.transcript()
        assert f"`data.tokenizer`: {tokenizer} cannot be read: Permission denied" in done.stderr


def test_a_broken_sidecar_is_noted(spec: Path) -> None:
    Path("data/text.json").write_text('{"documents": ')
    done = hpctrain("validate", "-p", "sandbox", "small.yaml")
    assert done.exit_code == 0, done.transcript()
    said = " ".join(done.stdout.split())
    assert "note data: 1 source of tokens; " in said
    assert "text.json is not as `data prepare` writes it" in said


def test_an_interpreter_that_is_not_on_its_file_system(spec: Path, tmp_path: Path) -> None:
    """Where the file system is here, the file ought to be; elsewhere only the nodes may have it."""
    profile, shared = tmp_path / "mine.yaml", tmp_path / "shared"
    text = (
        f"extends: sandbox\nname: mine\nsoftware: {{python: {shared}/env/bin/python}}\n"
        f"filesystems:\n  - {{name: shared, path: {shared}, kind: lustre, write_bandwidth: 1GB/s, "
        "read_bandwidth: 1GB/s}\n"
    )
    profile.write_text(text)
    assert hpctrain("validate", "-p", str(profile), "small.yaml").exit_code == 0
    shared.mkdir()
    done = hpctrain("validate", "-p", str(profile), "small.yaml")
    assert done.exit_code == 3 and "mine.yaml:3:20: `software.python`: " in done.stderr
    assert f"{shared}/env/bin/python does not exist" in done.stderr


@pytest.mark.parametrize(("machine", "name"), [(62, "x86_64"), (183, "aarch64")])
def test_an_interpreter_for_other_processors(
    machine: int, name: str, spec: Path, tmp_path: Path
) -> None:
    """As on a login node of x86_64 before nodes with Grace; a script says nothing about it."""
    program = tmp_path / "python"
    program.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(11) + machine.to_bytes(2, "little"))
    program.chmod(0o755)
    profile = tmp_path / "mine.yaml"
    for nodes in ("x86_64", "aarch64"):
        profile.write_text(
            f"extends: sandbox\nname: mine\nsoftware: {{python: {program}}}\n"
            f"nodes: {{architecture: {nodes}}}\n"
        )
        done = hpctrain("validate", "-p", str(profile), "small.yaml")
        words = f"{program} is a program for {name}, and the nodes are {nodes}"
        assert (done.exit_code == 3 and words in done.stderr) is (nodes != name), done.transcript()
    program.write_text("#!/bin/sh\necho '[]'\n")
    assert hpctrain("validate", "-p", str(profile), "small.yaml").exit_code == 0


def test_the_disk_of_this_machine_is_not_that_of_another_place(spec: Path) -> None:
    """A profile whose shared file systems are not here: whoever plans there has its disk."""
    trial = ("small.yaml", "--set", "data={}", "--set", "precision=bf16")
    done = hpctrain("validate", "-p", "a100x64", *trial)
    assert "?     space: this machine has no /scratch of a100x64: not looked for" in done.stdout
    site = spec.parent / "site.yaml"
    shared = f"filesystems: [{{name: scratch, path: {spec.parent}, kind: nfs}}]"
    site.write_text(f"extends: a100x64\nname: site\n{shared}\n")
    assert "files are left for" in hpctrain("validate", "-p", str(site), *trial).stdout


HEADS = SPEC.replace("hidden: 128, heads: 4", "hidden: 512, heads: 4, head_dim: SIZE")


@pytest.mark.parametrize(
    ("size", "engine", "fused"),
    [
        (128, "megatron", True),
        (100, "megatron", False),
        (320, "megatron", False),
        (100, "fsdp", True),  # PyTorch pads it
        (320, "fsdp", True),  # by its other kernel
        (324, "fsdp", False),
    ],
)
def test_heads_that_no_fused_kernel_takes_are_told(
    spec: Path, size: int, engine: str, fused: bool
) -> None:
    text = HEADS.replace("SIZE", str(size)).replace("precision: fp32", "precision: bf16")
    spec.write_text(text.replace("parallel:\n  tp: 2\n  pp: 2\n", ""))
    trial = ("-p", "a100x1", "small.yaml", "--set", f"engine.name={engine}", "--set", "data={}")
    done = hpctrain("plan", *trial, "--json")
    assert done.exit_code == 0, done.transcript()
    told = [one for one in json.loads(done.stdout)["plan"]["warnings"] if "fused kernel" in one]
    assert bool(told) is not fused and all(f"heads of {size} " in one for one in told)
    if engine == "megatron":
        divided = hpctrain("validate", *trial, "--set", "parallel.cp=2")
        assert ("fused kernels of attention divide" in divided.stderr) is not fused
