"""What is read: values, overrides, origins, digests, the resolved text, profiles by name."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from wrong_specs import VALID, problems_of, shown

from hpctrain.base.errors import InvalidInputError
from hpctrain.spec.loader import (
    PACKAGED_PROFILES,
    find_profile,
    load_profile,
    load_run_spec,
    profile_names,
    site_names,
)
from hpctrain.spec.positions import write_resolved
from hpctrain.spec.run import ParallelSpec

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
PROFILES = sorted(PACKAGED_PROFILES.glob("*.yaml"))


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    file = tmp_path / "spec.yaml"
    file.write_text(VALID)
    return file


def test_values_of_yaml_1_2(spec_file: Path) -> None:
    text = VALID.replace("gpus: 4", "gpus: 0x10, walltime: 24:00:00")
    spec_file.write_text(text.replace("{steps: 60}", "{tokens: 300B}"))
    spec = load_run_spec(spec_file).document
    assert spec.optimizer.lr == 1e-4 * 10
    assert spec.resources.walltime == 86400
    assert spec.budget.tokens == 300e9
    assert spec.resources.gpus == 16


def test_bom_and_windows_line_ends(spec_file: Path) -> None:
    plain = load_run_spec(spec_file)
    spec_file.write_bytes(b"\xef\xbb\xbf" + VALID.replace("\n", "\r\n").encode())
    assert load_run_spec(spec_file).digest == plain.digest


def test_folded_text_is_one_line() -> None:
    profile = load_profile(PACKAGED_PROFILES / "sandbox.yaml").document
    (reason,) = [one.reason for one in profile.environment if one.name == "OMP_NUM_THREADS"]
    assert reason.isprintable() and "down; one" in reason


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Input:
        buffer = io.BytesIO(VALID.encode())

    monkeypatch.setattr(sys, "stdin", Input())
    loaded = load_run_spec("-")
    assert (loaded.document.name, loaded.origin["name"]) == ("tiny", "stdin:1")


def test_origin_and_file_hold_no_directory(spec_file: Path) -> None:
    loaded = load_run_spec(spec_file, ["resources.gpus=8"])
    assert loaded.file == "spec.yaml"
    assert loaded.origin["model.layers"] == "spec.yaml:2"
    assert loaded.origin["resources.gpus"] == "--set"
    assert "seed" not in loaded.origin
    assert str(spec_file.parent) not in write_resolved(loaded)


def test_digest_depends_on_values_only(spec_file: Path) -> None:
    first = load_run_spec(spec_file).digest
    spec_file.write_text("# comment\nseed: 1234\n" + VALID)
    assert load_run_spec(spec_file).digest == first
    assert load_run_spec(spec_file, ["seed=1"]).digest != first


def test_override_replaces_auto_and_adds_sections(spec_file: Path) -> None:
    spec_file.write_text(VALID + "parallel: auto\n")
    spec = load_run_spec(spec_file, ["parallel.tp=2", "parallel.pp=2", "data.cache=/x"]).document
    assert spec.parallel == ParallelSpec(tp=2, pp=2)
    assert spec.data.cache == "/x"
    assert load_run_spec(spec_file, ["parallel.tp=2", "parallel=auto"]).document.parallel == "auto"


def test_override_reaches_list_items_and_lists(spec_file: Path) -> None:
    spec_file.write_text(VALID + "data: {sources: [{path: a}, {path: b}]}\n")
    spec = load_run_spec(spec_file, ["data.sources[1].path=c", "parallel.stages=[4]"]).document
    assert [source.path for source in spec.data.sources] == ["a", "c"]
    assert isinstance(spec.parallel, ParallelSpec)
    assert spec.parallel.stages == (4,)


def test_override_forgets_what_it_replaces(spec_file: Path) -> None:
    spec_file.write_text(VALID + "parallel: {tp: 2}\n")
    loaded = load_run_spec(spec_file, ["parallel=auto"])
    assert loaded.origin["parallel"] == "--set"
    assert "parallel.tp" not in loaded.origin


def test_override_repairs_a_wrong_value(spec_file: Path) -> None:
    spec_file.write_text(VALID.replace("layers: 4", "layers: many"))
    assert load_run_spec(spec_file, ["model.layers=4"]).document.model.layers == 4


WRONG_OVERRIDES = [
    ("parallel.tpp=8", "`parallel.tpp`: unknown key | did you mean `parallel.tp`?"),
    ("tp=8", "`tp`: unknown key | did you mean `parallel.tp`?"),
    ("paralel.tp=8", "`paralel`: unknown key | did you mean `parallel`?"),
    ("parallel.tp=x", "`parallel.tp`: expected an integer, got `x`"),
    ("seed", "expected PATH=VALUE | for example --set parallel.tp=8"),
    ("=1", "expected PATH=VALUE | for example --set parallel.tp=8"),
    ("a..b=1", "expected PATH=VALUE | for example --set parallel.tp=8"),
    ("name={a: 1}", "expected one value, got a mapping"),
    ("name=[a", "a list that is opened with `[` is not closed"),
    ("seed=012", "`012` starts with a zero"),
    ("data.sources[0].path=x", "`data.sources`: expected a list, got a mapping"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG_OVERRIDES)
def test_wrong_override(tmp_path: Path, text: str, expected: str) -> None:
    [line] = shown(tmp_path, problems_of(tmp_path, VALID, text))
    assert line.startswith(f"--set {text}: {expected}")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_load_and_survive_writing(file: Path, tmp_path: Path) -> None:
    loaded = load_run_spec(file, ["seed=7"])
    again = tmp_path / "resolved.yaml"
    again.write_text(write_resolved(loaded))
    assert load_run_spec(again).document == loaded.document
    assert load_run_spec(again).digest == loaded.digest
    assert "seed: 7  # --set" in again.read_text()
    assert loaded.document.name == file.stem


@pytest.mark.parametrize("file", PROFILES, ids=lambda file: file.stem)
def test_profiles_load_and_survive_writing(file: Path, tmp_path: Path) -> None:
    loaded = load_profile(file)
    again = tmp_path / "resolved.yaml"
    again.write_text(write_resolved(loaded))
    assert load_profile(again).document == loaded.document
    assert loaded.document.name == file.stem
    assert all(variable.reason for variable in loaded.document.environment)


def test_strange_text_survives_writing(spec_file: Path, tmp_path: Path) -> None:
    strange = ["yes", "1", "1e3", "~", " a ", "a: b", "# x", "- a", "'\"\\", "$$(x)\n\t", "\u2028",
               "\x7f\x85\x1b", "\ufeff", "caf\u00e9", "\U0001f600", "", "0x1", "24:00:00", "<<",
               ".inf", "a #b", "a:", "null", "!t", "&a", "*a", "%d", "@", "`", "=",
               "{a", "]"]  # fmt: skip
    variables = {f"V{index}": text for index, text in enumerate(strange)}
    spec_file.write_text(VALID + f"environment: {{variables: {json.dumps(variables)}}}\n")
    spec = load_run_spec(spec_file)
    assert dict(spec.document.environment.variables) == variables
    again = tmp_path / "again.yaml"
    again.write_text(write_resolved(spec), encoding="utf-8")
    assert load_run_spec(again).document == spec.document


def test_profiles_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    own = tmp_path / "sandbox.yaml"
    own.write_text("x: 1\n")
    assert {"a100x1", "a100x64", "gb200nvl72", "h100x16", "sandbox"} <= set(profile_names())
    assert find_profile("sandbox") == PACKAGED_PROFILES / "sandbox.yaml"
    assert find_profile("sandbox", [tmp_path / "none", tmp_path]) == own
    assert find_profile("./x/mine") == Path("x/mine")
    assert find_profile("mine.yaml") == Path("mine.yaml")


def test_unknown_profile_names_the_nearest_and_all(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("")
    with pytest.raises(InvalidInputError) as caught:
        find_profile("a100x46", [tmp_path])
    [problem] = caught.value.problems
    assert str(problem) == "no cluster profile is called `a100x46`"
    assert problem.hint is not None
    assert problem.hint.startswith("did you mean `a100x64`")
    names = profile_names([tmp_path])
    assert {"gb200nvl72", "mine"} < set(names)
    short = ", ".join(name for name in names if name not in site_names([tmp_path]))
    assert problem.hint.endswith(
        f"Known profiles: {short}, and those of `hpctrain profiles --sites`"
    )


def test_profile_needs_one_default_partition(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(PROFILES[-1].read_text().replace("default: true", "default: false"))
    with pytest.raises(InvalidInputError, match="`slurm`: exactly one partition must have"):
        load_profile(file)


def test_sandbox_profile_is_what_the_sandbox_is() -> None:
    profile = load_profile(find_profile("sandbox")).document
    assert (profile.nodes.count, profile.gpu.per_node, profile.gpu.type) == (4, 2, "a100")
    train, urgent = profile.slurm.partitions
    assert (train.preemption.mode, train.preemption.grace, train.default) == ("requeue", 20, True)
    assert urgent.priority_tier > train.priority_tier
    assert profile.gpu.peak == {}


def test_importing_the_loader_is_light() -> None:
    code = (
        "import sys, hpctrain.spec.loader\n"
        "heavy = {'pydantic', 'ruamel.yaml', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_loading_takes_little_time() -> None:
    load_run_spec(EXAMPLES[0])
    taken = []
    for _ in range(5):
        start = time.process_time()
        load_run_spec(EXAMPLES[0])
        taken.append(time.process_time() - start)
    assert min(taken) < 0.06


def test_a_problem_is_placed_at_the_value_or_what_is_around_it(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(VALID)
    loaded = load_run_spec(file, ["precision=fp32"])
    at = str(file)
    assert str(loaded.problem("optimizer.lr", "wrong")).startswith(f"{at}:")
    assert loaded.problem("optimizer.lr", "wrong").line == loaded.places["optimizer.lr"].line
    absent = loaded.problem("optimizer.offload", "missing", "add it")
    assert (absent.line, absent.hint) == (loaded.places["optimizer"].line, "add it")
    assert str(loaded.problem("precision", "wrong")) == "--set precision=fp32: wrong"
    assert str(loaded.problem("evaluation.batches", "wrong")) == "spec.yaml: wrong"


def test_a_pipe_is_read_to_its_end_and_kept(tmp_path: Path) -> None:
    """Commands load a spec more than once, and a pipe gives its text once."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        with open(pipe, "w") as stream:
            for line in VALID.splitlines(keepends=True):
                stream.write(line)
                stream.flush()

    writer = threading.Thread(target=write)
    writer.start()
    first = load_run_spec(pipe)
    writer.join()
    assert load_run_spec(pipe).document == first.document


def test_a_pipe_without_a_writer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.spec.files._WRITER_SECONDS", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InvalidInputError, match="a pipe into which nobody writes"):
        load_run_spec(pipe)
