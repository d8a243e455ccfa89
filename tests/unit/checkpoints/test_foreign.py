"""Checkpoints of other trainers: when one is complete, how they are found, linked and put back."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from hpctrain.checkpoints import foreign
from hpctrain.checkpoints.foreign import (
    Found,
    find_checkpoints,
    link_checkpoint,
    own_name,
    put_back,
    unpublished,
    what_is_missing,
)
from hpctrain.checkpoints.publish import Fence, publish, quarantine
from hpctrain.records.manifest import Manifest, checkpoint_name, digest_file, partial_name
from hpctrain.spec.trainer import CompleteSpec, ForeignCheckpointSpec


def rules(**given: object) -> CompleteSpec:
    return CompleteSpec.model_validate(given)


def spec(path: str, **complete: object) -> ForeignCheckpointSpec:
    return ForeignCheckpointSpec.model_validate({"path": path, "complete": complete})


def write(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")


def missing(path: Path, complete: CompleteSpec, ranks: int = 1) -> str | None:
    return what_is_missing(Found(7, path), complete, path.parent, ranks)


# -- Each rule, kept and broken --------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def real_files(at: Path) -> None:
    """A checkpoint that meets every rule below, by the libraries that write such files."""
    dcp.save({"w": torch.arange(64.0)}, checkpoint_id=at / "dist", no_dist=True)
    for path in (at / "dist").iterdir():
        path.rename(at / path.name)
    (at / "dist").rmdir()
    torch.save({"w": torch.arange(64.0)}, at / "optimizer.pt")
    save_file({"w": torch.arange(64.0)}, at / "model.safetensors")
    write(at, "config.json", "rng_0.pth", "rng_1.pth", "parts/one.json")
    (at.parent / "latest").write_text("step-7\n")


TRACKER = {"tracker": {"file": "latest", "text": "step-{step}"}}
RULES: tuple[tuple[str, dict[str, object], Callable[[Path], object], str], ...] = (
    ("a file", {"files": ["config.json"]}, lambda at: (at / "config.json").unlink(), "config.json"),
    (
        "a glob",
        {"files": ["*.json"]},
        lambda at: [p.unlink() for p in at.rglob("*.json")],
        "*.json",
    ),
    ("absent", {"absent": ["incomplete"]}, lambda at: write(at, "incomplete"), "still there"),
    ("absent glob", {"absent": ["*.tmp"]}, lambda at: write(at, "a/b.tmp"), "*.tmp"),
    ("ranks", {"each_rank": ["rng_{rank}.pth"]}, lambda at: (at / "rng_1.pth").unlink(), "rng_1"),
    ("json", {"json": ["config.json"]}, lambda at: (at / "config.json").write_text("{"), "JSON"),
    (
        "json bytes",
        {"json": ["config.json"]},
        lambda at: (at / "config.json").write_bytes(b"\xff\0"),
        "JSON",
    ),
    ("no json", {"json": ["x.json"]}, lambda at: None, "x.json is not there"),
    (
        "tensors",
        {"safetensors": ["*.safetensors"]},
        lambda at: cut(at / "model.safetensors"),
        "header",
    ),
    ("zip", {"zip": ["optimizer.pt"]}, lambda at: cut(at / "optimizer.pt"), "end"),
    ("dcp", {"dcp": True}, lambda at: (at / "__0_0.distcp").unlink(), "__0_0.distcp"),
    (
        "no metadata",
        {"dcp": True},
        lambda at: (at / ".metadata").unlink(),
        ".metadata is not there",
    ),
    ("half metadata", {"dcp": True}, lambda at: cut(at / ".metadata"), "not whole"),
    ("tracker", TRACKER, lambda at: (at.parent / "latest").write_text("step-6"), "names no step 7"),
    (
        "odd tracker",
        TRACKER,
        lambda at: (at.parent / "latest").write_text("epoch"),
        "names no step 7",
    ),
    ("no tracker", TRACKER, lambda at: (at.parent / "latest").unlink(), "latest is not there"),
)


@pytest.mark.parametrize(
    ("given", "spoil", "words"), [r[1:] for r in RULES], ids=[r[0] for r in RULES]
)
def test_a_rule_holds_for_what_it_is_about(
    tmp_path: Path, given: dict[str, object], spoil: Callable[[Path], object], words: str
) -> None:
    at = tmp_path / "step-7"
    at.mkdir()
    real_files(at)
    if words != "x.json is not there":
        assert missing(at, rules(**given), ranks=2) is None
    spoil(at)
    found = missing(at, rules(**given), ranks=2)
    assert found is not None and words in found


def test_a_later_step_in_the_tracker_completes_earlier_ones(tmp_path: Path) -> None:
    write(tmp_path / "step-7", "a")
    (tmp_path / "latest").write_text("0012\n")
    assert missing(tmp_path / "step-7", rules(tracker={"file": "latest"})) is None


def test_a_file_of_each_rank_is_only_asked_of_several(tmp_path: Path) -> None:
    write(tmp_path / "step-7", "rng_state.pth")
    each = rules(each_rank=["rng_state_{rank}.pth"])
    assert missing(tmp_path / "step-7", each, ranks=1) is None
    assert missing(tmp_path / "step-7", each, ranks=2) == "rng_state_0.pth is not there"


def test_an_empty_directory_and_one_that_goes_are_incomplete(tmp_path: Path) -> None:
    (tmp_path / "step-7").mkdir()
    assert missing(tmp_path / "step-7", rules()) == "it is empty"
    assert missing(tmp_path / "gone", rules()) is not None


def test_a_checkpoint_that_is_a_file_is_meant_by_a_dot(tmp_path: Path) -> None:
    path = tmp_path / "step-7.ckpt"
    torch.save({"w": torch.arange(9.0)}, path)
    assert missing(path, rules(zip=["."], files=["."])) is None
    cut(path)
    assert missing(path, rules(zip=["."])) is not None
    write(tmp_path / "step-8", "a")
    assert missing(tmp_path / "step-8", rules(files=["."])) is not None


# -- Cut short -------------------------------------------------------------------------------------

HF = {
    "files": ["trainer_state.json"],
    "absent": ["checkpoint-is-incomplete.txt"],
    "each_rank": ["rng_state_{rank}.pth"],
    "json": ["trainer_state.json"],
}
# In the order in which the trainer of Hugging Face was seen to write them.
HF_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "training_args.bin"),
    *("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"),
)


@pytest.mark.parametrize("written", range(len(HF_FILES) + 1))
def test_a_save_that_ends_after_any_file_but_the_last_does_not_count(
    tmp_path: Path, written: int
) -> None:
    at = tmp_path / "checkpoint-7"
    at.mkdir()
    write(at, *HF_FILES[:written])
    assert (missing(at, rules(**HF), ranks=2) is None) == (written == len(HF_FILES))


def test_a_metadata_of_several_ranks_needs_all_their_files(tmp_path: Path) -> None:
    """As torch writes it: strings of the pickle are read, nothing of it is run."""
    at = tmp_path / "step-7"
    tensors = {f"w{n}": torch.full((32,), float(n)) for n in range(8)}
    writer = dcp.FileSystemWriter(at, single_file_per_rank=False)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    shards = sorted(path for path in at.iterdir() if path.suffix == ".distcp")
    assert len(shards) == len(tensors)
    assert missing(at, rules(dcp=True)) is None
    for path in shards:
        content = path.read_bytes()
        path.unlink()
        assert missing(at, rules(dcp=True)) == f"{path.name} is not there"
        path.write_bytes(content)
    assert missing(at, rules(dcp=True)) is None


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    at, mark = tmp_path / "step-7", tmp_path / "run"
    write(at, "a")
    (at / ".metadata").write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % os.fsencode(mark))
    assert missing(at, rules(dcp=True)) is None
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["zip", "safetensors"])
def test_a_real_file_that_is_cut_anywhere_is_not_whole(tmp_path: Path, kind: str) -> None:
    at = tmp_path / "step-7"
    at.mkdir()
    path = at / "weights"
    tensors = {f"layer.{n}": torch.randn(40 + n) for n in range(6)}
    if kind == "zip":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    whole, asked = path.read_bytes(), rules(**{kind: ["weights"]})
    assert missing(at, asked) is None
    lengths = {0, 1, 7, 8, 9, len(whole) - 22, len(whole) - 1}
    lengths |= set(random.Random(1).sample(range(len(whole)), 150))
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        assert missing(at, asked) is not None, f"{length} of {len(whole)} bytes"
    path.write_bytes(whole + b"\0")
    assert missing(at, asked) is not None


def test_a_header_that_lies_about_itself_is_refused(tmp_path: Path) -> None:
    at = tmp_path / "step-7"
    write(at, "a")
    for header in (b"[]", b"{", b'{"w": 1}', b'{"w": {"data_offsets": [0]}}', b"\xff" * 4):
        (at / "a").write_bytes(len(header).to_bytes(8, "little") + header)
        assert missing(at, rules(safetensors=["a"])) is not None, header
    (at / "a").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    assert missing(at, rules(safetensors=["a"])) is not None


# -- Finding ---------------------------------------------------------------------------------------


def steps(output: Path, path: str) -> list[tuple[int, str]]:
    found = find_checkpoints(output, spec(path))
    return [(one.step, str(one.path.relative_to(output))) for one in found]


def test_steps_are_found_in_their_order_with_leading_zeros(tmp_path: Path) -> None:
    names = ("checkpoint-100", "checkpoint-20", "checkpoint-0003", "checkpoint-best", "checkpoint-")
    for name in (*names, "old-checkpoint-7", "checkpoint-8.tmp", "checkpoint-000"):
        (tmp_path / name).mkdir()
    assert steps(tmp_path, "checkpoint-{step}") == [
        (0, "checkpoint-000"),
        (3, "checkpoint-0003"),
        (20, "checkpoint-20"),
        (100, "checkpoint-100"),
    ]


def test_globs_stand_for_anything_in_names_and_directories(tmp_path: Path) -> None:
    for name in ("a/ck/epoch=0-step=10.ckpt", "b/ck/epoch=12-step=20.ckpt", "a/ck/last.ckpt"):
        write(tmp_path, name)
    assert steps(tmp_path, "*/ck/epoch=*-step={step}.ckpt") == [
        (10, "a/ck/epoch=0-step=10.ckpt"),
        (20, "b/ck/epoch=12-step=20.ckpt"),
    ]
    assert steps(tmp_path, "c*/ck/epoch=*-step={step}.ckpt") == []


def test_an_absolute_path_is_outside_of_the_output(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "s5", "a")
    found = find_checkpoints(tmp_path / "output", spec(f"{tmp_path}/elsewhere/s{{step}}"))
    assert found == [Found(5, tmp_path / "elsewhere" / "s5")]


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path / "nowhere", spec("checkpoint-{step}")) == []
    (tmp_path / "file").write_text("")
    assert find_checkpoints(tmp_path, spec("file/checkpoint-{step}")) == []


# -- Linking, publishing, putting back -------------------------------------------------------------


@pytest.fixture(params=["copied", "linked"])
def linked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the files are too large to be copied."""
    if request.param == "linked":
        monkeypatch.setattr(foreign, "AUTO_DEEP_LIMIT_BYTES", -1)
    return bool(request.param == "linked")


def published(root: Path, found: Found) -> Path:
    root.mkdir(exist_ok=True)
    partial = root / partial_name(found.step, 1)
    names = link_checkpoint(found, partial)
    manifest = Manifest(
        step=found.step,
        epoch=1,
        engine="trainer",
        layout="",
        world_size=1,
        consumed_samples=None,
        time=1.0,
        files=tuple(digest_file(partial, name) for name in sorted(names)),
    )
    return publish(root, manifest, Fence(1, lambda: 1))


def test_a_published_checkpoint_outlives_the_trainers_own(tmp_path: Path, linked: bool) -> None:
    own = tmp_path / "output" / "step-7"
    write(own, "a", "deep/b")
    final = published(tmp_path / "checkpoints", Found(7, own))
    assert ((own / "a").stat().st_ino == (final / "step-7" / "a").stat().st_ino) == linked
    for path in sorted(own.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert own_name(final) == "step-7"
    assert (final / "step-7" / "deep" / "b").read_text() == "{}"


def test_a_copy_does_not_change_when_the_trainer_writes_over_its_files(tmp_path: Path) -> None:
    own = tmp_path / "output" / "step-7"
    write(own, "a")
    final = published(tmp_path / "checkpoints", Found(7, own))
    (own / "a").write_text("written once more")
    assert (final / "step-7" / "a").read_text() == "{}"


def test_what_an_earlier_call_has_left_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "step-7", "a")
    write(tmp_path / "partial", "step-7/of-another-try")
    names = link_checkpoint(Found(7, tmp_path / "step-7"), tmp_path / "partial")
    assert names == ["step-7/a"]
    assert [p.name for p in (tmp_path / "partial" / "step-7").iterdir()] == ["a"]


def test_files_are_copied_where_no_link_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(foreign, "AUTO_DEEP_LIMIT_BYTES", -1)
    monkeypatch.setattr(os, "link", refuse)
    write(tmp_path / "step-7", "a")
    link_checkpoint(Found(7, tmp_path / "step-7"), tmp_path / "partial")
    assert (tmp_path / "partial" / "step-7" / "a").read_text() == "{}"


@pytest.mark.parametrize("is_file", [False, True])
def test_the_chosen_one_is_put_where_its_trainer_looks(tmp_path: Path, is_file: bool) -> None:
    own = tmp_path / "old" / "ck" / "step-7"
    write(own.parent if is_file else own, *(["step-7"] if is_file else ["a", "deep/b"]))
    published(tmp_path / "checkpoints", Found(7, own))
    tracked = spec("ck/step-{step}", tracker={"file": "latest", "text": "step-{step}"})
    for _ in range(2):  # an outage in between makes it happen again
        (tmp_path / "new").mkdir(exist_ok=True)
        put_back(tmp_path / "checkpoints", 7, tmp_path / "new", tracked)
    assert (tmp_path / "new" / "latest").read_text() == "step-7"
    found = find_checkpoints(tmp_path / "new", tracked)
    assert [one.step for one in found] == [7]
    assert found[0].files() == ((".",) if is_file else ("a", "deep/b"))


def test_a_checkpoint_of_nobody_cannot_be_put_back(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / checkpoint_name(7)).mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="no checkpoint of a trainer"):
        put_back(tmp_path / "checkpoints", 7, tmp_path, spec("step-{step}"))


@pytest.mark.parametrize("path", ["/scratch/ck/step-{step}", "logs/version_*/step-{step}"])
def test_what_cannot_be_put_back_alone_is_refused(path: str) -> None:
    ForeignCheckpointSpec(path=path)
    with pytest.raises(ValueError, match="needs a path below"):
        ForeignCheckpointSpec(path=path, found=True)


def test_only_what_is_newer_than_all_published_is_offered(tmp_path: Path) -> None:
    root, output = tmp_path / "checkpoints", tmp_path / "output"
    for step in (10, 20, 30):
        write(output / f"step-{step}", "a")
    found = find_checkpoints(output, spec("step-{step}"))
    assert [one.step for one in unpublished(root, found)] == [10, 20, 30]
    published(root, found[1])
    assert [one.step for one in unpublished(root, found)] == [30]
    quarantine(root, root / checkpoint_name(20), "damaged")
    assert json.dumps([one.step for one in unpublished(root, found)]) == "[10, 20, 30]"
