"""Many processes make what one makes; what is finished stays, and is looked at before use."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from dataset_specimens import write_folder
from prepared_specimens import (
    digests,
    made,
    review,
    run,
    talk,
    write_lines,
    write_tokenizer,
    wrong,
)

from hpctrain.data.making import __main__, stages
from hpctrain.data.making.shards import read_plan

SMALL = ("--shard-bytes", 700)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_lines(tmp_path / "in" / "a.jsonl", [talk(n) for n in range(23)])
    write_lines(tmp_path / "in" / "b.jsonl", [talk(n, 1) for n in range(40, 50)])
    write_lines(tmp_path / "reviews.jsonl", [review(n) for n in range(60)])
    write_lines(tmp_path / "texts" / "c.jsonl", [review(n) for n in range(60)])
    (tmp_path / "texts" / "d.txt").write_text("one whole document <|im_end|>\n" * 20)
    return tmp_path


def request(kind: str, place: Path, tokenizer: Path) -> tuple[object, ...]:
    if kind == "packed":
        return (place / "in", "--format", kind, "--tokenizer", tokenizer, "--seq", 128)
    if kind == "examples":
        options = ("--format", kind, "--tokenizer", tokenizer, "--seq", 12)
        return (place / "reviews.jsonl", *options)
    if kind == "tokens":
        return (place / "texts", "--tokenizer", tokenizer)
    return (place / "texts", "--vocab-size", 280)


@pytest.mark.parametrize("kind", ["tokens", "own tokens", "packed", "examples"])
def test_many_processes_make_the_same_bytes(
    kind: str, place: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = request(kind, place, tokenizer)
    whole = made(capsys, *wanted, "--output", place / "one" / "data")
    cut = made(capsys, *wanted, "--output", place / "two" / "data", *SMALL, "--workers", 3)
    assert digests(place / "one") == digests(place / "two")
    assert whole["dataset"] == cut["dataset"]
    assert not list(place.glob("*/.*")), "no staging directory is left"


def killed_at_shard(number: int, argv: list[str]) -> None:
    """The program in another process, which gets SIGKILL when it begins with that shard."""
    child = os.fork()
    if child == 0:
        original, begun = stages.build_shard, []

        def counted(*arguments: Any) -> Any:
            begun.append(1)
            if len(begun) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments)

        stages.build_shard = counted
        os._exit(__main__.main(argv))
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_what_is_finished_is_not_made_again(
    place: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = place / "out" / "data"
    argv = [*map(str, request("packed", place, tokenizer)), "--output", str(output)]
    argv += map(str, SMALL)
    killed_at_shard(4, argv)
    directory = place / "out" / ".data.partial" / "shards"
    plan = read_plan(directory)
    assert plan is not None and len(plan.shards) > 6
    first, second, third = (directory / f"{one.key}.npz" for one in plan.shards[:3])
    assert not (directory / f"{plan.shards[3].key}.npz").exists()
    raw = bytearray(second.read_bytes())
    raw[len(raw) // 2] ^= 1
    second.write_bytes(raw)
    third.with_suffix(".json").write_text("{")
    code = __main__.main(argv)
    said = capsys.readouterr().err
    assert code == 0
    assert (
        said.count("was there") == 1
        and said.count(f"of {len(plan.shards)} made\n") == len(plan.shards) - 1
    )
    assert not directory.exists() and not first.exists()
    made(capsys, *argv[:-2], "--output", place / "again" / "data")
    assert digests(place / "again")["data.npz"] == digests(place / "out")["data.npz"]


def test_a_wrong_line_has_its_place_and_costs_one_shard(
    place: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, lines = place / "in" / "a.jsonl", [talk(n) for n in range(23)]
    broken = [*lines[:20], {"messages": [{"role": "user"}]}, *lines[21:]]
    write_lines(path, broken)
    wanted = (*request("packed", place, tokenizer), "--output", place / "out" / "data", *SMALL)
    problem = wrong(capsys, 3, *wanted, "--workers", 2)
    assert (problem["file"], problem["line"]) == (str(path), 21)
    assert "message 1 has no `role` or no `content`" in problem["message"]
    assert __main__.main([*map(str, wanted)]) == 3
    assert f"error: {path}:21: message 1" in capsys.readouterr().err
    write_lines(path, lines)
    code = __main__.main([*map(str, wanted)])
    said = capsys.readouterr().err
    assert code == 0 and said.count(" made\n") <= 2 < said.count("was there")


def test_shares_are_made_elsewhere_and_merged(
    place: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = (*request("tokens", place, tokenizer), *SMALL, "--output", place / "two" / "data")
    made(capsys, *request("tokens", place, tokenizer), "--output", place / "one" / "data")
    plan = made(capsys, *wanted, "--stage", "plan")
    assert plan["missing"] == plan["shards"] > 4
    directory = plan["directory"]
    first = made(capsys, "--shards", directory, "--share", "0/2")
    assert 0 < first["missing"] < plan["missing"]
    problem = wrong(capsys, 1, *wanted, "--stage", "merge")
    assert f"{first['missing']} of {plan['shards']} shards are missing" in problem["message"]
    assert made(capsys, *wanted, "--stage", "plan")["missing"] == first["missing"]
    assert made(capsys, "--shards", directory, "--share", "1/2")["missing"] == 0
    made(capsys, *wanted, "--stage", "merge")
    same, other = digests(place / "one"), digests(place / "two")
    assert {**same, "data.json": ""} == {**other, "data.json": ""}
    assert made(capsys, *wanted, "--stage", "plan")["status"] == "unchanged"


def test_whoever_merges_hears_why_a_share_failed(
    place: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place / "texts" / "c.jsonl"
    path.write_text(path.read_text() + '{"text": 3}\n')
    wanted = (*request("tokens", place, tokenizer), *SMALL, "--output", place / "out" / "data")
    directory = made(capsys, *wanted, "--stage", "plan")["directory"]
    share = wrong(capsys, 3, "--shards", directory)
    merge = wrong(capsys, 3, *wanted, "--stage", "merge")
    assert share == merge
    assert (merge["file"], merge["line"]) == (str(path), 61)
    assert "has no text in field `text`" in merge["message"]


def test_a_damaged_shard_is_found_when_merging(
    place: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = (*request("examples", place, tokenizer), *SMALL, "--output", place / "out" / "data")
    directory = Path(made(capsys, *wanted, "--stage", "plan")["directory"])
    made(capsys, "--shards", directory)
    victim = sorted(directory.glob("*.npz"))[1]
    raw = bytearray(victim.read_bytes())
    raw[-200] ^= 1
    victim.write_bytes(raw)
    problem = wrong(capsys, 1, *wanted, "--stage", "merge")
    assert f"{victim} is not what it was" in problem["message"]
    assert made(capsys, *wanted)["status"] == "written", "and is made again"


def test_an_input_that_changes_between_plan_and_shards_is_noticed(
    place: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = (*request("examples", place, tokenizer), "--output", place / "out" / "data")
    directory = made(capsys, *wanted, "--stage", "plan")["directory"]
    path = place / "reviews.jsonl"
    path.write_text(path.read_text().replace("good", "Good"))
    assert wrong(capsys, 3, "--shards", directory)["message"] == (
        "changed while the dataset was made"
    )


def test_a_process_that_dies_is_told(
    place: Path,
    tokenizer: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent, original = os.getpid(), stages.build_shard

    def dies(recipe: Any, sources: Any) -> Any:
        if os.getpid() != parent and sources[0].start == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(recipe, sources)

    monkeypatch.setattr(stages, "build_shard", dies)
    wanted = (*request("examples", place, tokenizer), "--output", place / "out" / "data", *SMALL)
    problem = wrong(capsys, 1, *wanted, "--workers", 2)
    assert "was killed" in problem["message"] and "out of memory" in problem["hint"]


def test_images_are_all_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_folder(tmp_path / "photos", per_class=4)
    wanted = (root, "--format", "images", "--output", tmp_path / "out" / "photos")
    options = ("--shard-bytes", 2000, "--workers", 2)
    victim = root / "class-1" / "ä2.png"
    whole = victim.read_bytes()
    victim.write_bytes(whole[:100])
    problem = wrong(capsys, 3, *wanted, *options)
    assert problem["file"] == str(victim) and "cannot be decoded" in problem["message"]
    victim.write_bytes(whole)
    report = made(capsys, *wanted, *options)["dataset"]
    assert (report["samples"], report["directory"]) == (12, str(root))
    assert report["classes"] == ["class-0", "class-1", "class-2"]


def test_plans_of_old_versions_are_not_gone_on_with(
    place: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = (*request("tokens", place, tokenizer), *SMALL, "--output", place / "out" / "data")
    directory = Path(made(capsys, *wanted, "--stage", "plan")["directory"])
    plan = json.loads((directory / "plan.json").read_text())
    (directory / "plan.json").write_text(json.dumps({**plan, "unknown": 1}))
    code, failure = run(capsys, "--shards", directory)
    assert code == 3 and "has no plan" in failure["problems"][0]["message"]
    assert made(capsys, *wanted)["status"] == "written"
