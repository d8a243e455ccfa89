"""`compare` and `scale` as people type them: tables, exit codes, going on, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Outcome, hpctrain
from trained_trials import SPEC, train
from virtual_clock import VirtualClock

from hpctrain.records.layout import RunLayout
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.trials import comparison_plot

GPT = str(Path(__file__).resolve().parents[3] / "examples/gpt1300m.yaml")
NEW = ("compare", "tiny.yaml", "-p", "sandbox", "--steps", "6", "--engines", "ddp,fsdp")
PREDICT = ("compare", GPT, "-p", "a100x1", "--predict", "--engines")


@pytest.fixture(autouse=True)
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr("hpctrain.slurm.client.SlurmClient", lambda: fake)
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(SPEC)
    return fake


def done(*arguments: str, code: int = 0) -> Outcome:
    outcome = hpctrain(*arguments)
    assert outcome.exit_code == code, outcome.transcript()
    return outcome


def directory() -> str:
    (found,) = Path("runs").glob("compare-*")
    return str(found)


def finish(names: str, seconds: float) -> None:
    (run,) = Path("runs").glob(names)
    train(RunLayout(run.absolute()), seconds)


def test_predictions_fit_into_80_columns_and_need_no_slurm(slurm: FakeSlurm) -> None:
    slurm.away = True
    engines = "fsdp,ddp,deepspeed:zero3+offload,deepspeed:zero0"
    text = done(*PREDICT, engines).stdout
    assert not [line for line in text.splitlines() if len(line) > 80]
    assert "with DeepSpeed bf16 drifts at ZeRO stage 0" in text.replace("\n  ", " ")
    assert "with room" in text and "COST USD" in text
    told = json.loads(done(*PREDICT, engines, "--json").stdout)["comparison"]
    assert [trial["state"] for trial in told["trials"]] == ["PREDICTED"] * 3 + ["REFUSED"]
    assert told["trials"][0]["gpu_hours"] > 0 and not Path("runs").exists()


def test_the_document_shows_what_is_printed_now() -> None:
    root = Path(__file__).resolve().parents[3]
    spec = str(root / "examples/gpt1300m-one-node/full.yaml")
    engines = "fsdp,ddp,deepspeed:zero3+offload,megatron"
    printed = done("compare", "-p", "a100x1", spec, "--engines", engines, "--predict").stdout
    document = (root / "docs/comparing.md").read_text()
    assert f"--engines {engines} --predict\n{printed}```" in document
    from hpctrain.spec.engines.registry import ENGINES

    words = {word.text.replace("#", "N") for one in ENGINES.values() for word in one.words}
    words -= {"zero1", "zero2"}
    assert not [word for word in words if f"`{word}`" not in document], "a word nobody can find"


def test_sizes_are_predicted_against_the_smallest() -> None:
    text = done("scale", GPT, "-p", "a100x1", "--gpus", "8,2,4", "--predict").stdout
    assert not [line for line in text.splitlines() if len(line) > 80]
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["2", "4", "8"] and rows[0][4] == "1.00"


def test_a_comparison_from_the_first_word_to_the_plot(slurm: FakeSlurm) -> None:
    begun = done(*NEW, "-y", "--no-wait")
    assert len(slurm.scripts) == 2 and f"`hpctrain compare {directory()}` continues" in begun.stderr
    assert "PENDING" in begun.stdout and "reference" not in begun.stdout
    assert not Path(directory(), "comparison.png").exists(), "a plot is drawn of what is over"
    finish("tiny-ddp-*", 1.0)
    finish("tiny-fsdp-*", 2.0)
    over = done("compare", directory())
    assert len(slurm.scripts) == 2
    assert not [line for line in over.stdout.splitlines() if len(line) > 80]
    assert "reference" in over.stdout and "same" in over.stdout
    assert "- ddp: the fastest of 2, with room: 8 samples/s" in over.stdout
    assert Path(directory(), "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert f"Plot  {Path(directory()).absolute()}" in over.stderr


def test_sizes_from_the_first_word_to_the_plot() -> None:
    done("scale", "tiny.yaml", "-p", "sandbox", "--steps", "6", "--gpus", "1,2", "-y", "--no-wait")
    finish("tiny-gpus1-*", 2.0)
    finish("tiny-gpus2-*", 1.1)
    over = done("scale", directory(), "--plot", "mine.svg")
    assert not [line for line in over.stdout.splitlines() if len(line) > 80]
    assert "2 GPUs: 1.82 times the pace of 1, 91 % efficient." in over.stdout
    assert "All sizes learn the same" in over.stdout
    assert "<svg" in Path("mine.svg").read_text()


def test_exit_codes(slurm: FakeSlurm) -> None:
    slurm.refusal = "Invalid account"
    refused = done(*NEW, "-y", code=7)
    assert "Invalid account" in refused.stdout and "no trial has worked" in refused.stderr
    slurm.away = True
    done("compare", directory(), "--set", "seed=1", code=2)
    huge = ("compare", "tiny.yaml", "-p", "sandbox", "--variant", "huge: model.hidden=65536")
    assert "no layout fits" in done(*huge, "--predict", code=4).stdout
    assert "no layout fits" in done(*huge, "-y", code=7).stdout
    assert "Unable to contact slurm" in done(*NEW, "-y", code=5).stderr
    assert not list(Path("runs").glob("*/comparison.png")), "there is nothing to draw"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "tiny.yaml", "--engines", "ddp"), "a spec needs a cluster: --profile"),
        (("compare", "tiny.yaml", "-p", "sandbox"), "say what to compare: --engines or --variant"),
        (("compare", "tiny.yaml", "-p", "sandbox", "--engines", "ddq"), "did you mean `ddp`?"),
        (("scale", "tiny.yaml", "-p", "sandbox", "--gpus", "1,x"), "no list of GPU counts"),
        (NEW, "no terminal to ask on"),
        ((*NEW, "--plot", "a.txt"), "expected a name ending in .png"),
        ((*NEW, "--steps", "2"), "--steps"),
        ((*NEW, "--walltime", "soon"), "--walltime"),
    ],
)
def test_mistakes_end_it_before_anything_is_submitted(
    arguments: tuple[str, ...], words: str, slurm: FakeSlurm
) -> None:
    assert words in done(*arguments, code=2).stderr and not slurm.scripts


def test_who_leaves_is_told_how_to_come_back(virtual_clock: VirtualClock) -> None:
    def leave() -> None:
        raise KeyboardInterrupt

    virtual_clock.at(1.0, leave)
    left = done(*NEW, "-y", code=130)
    assert f"the trials continue in Slurm; `hpctrain compare {directory()}`" in left.stderr


def test_without_matplotlib_there_are_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_plot, "can_plot", lambda: False)
    done(*NEW, "-y", "--no-wait")
    finish("tiny-ddp-*", 1.0)
    finish("tiny-fsdp-*", 2.0)
    over = done("compare", directory())
    assert "no plot without matplotlib" in over.stderr and "fastest" in over.stdout
    refused = done(*PREDICT, "fsdp", "--plot", "a.png", code=2)
    assert "--plot needs matplotlib" in refused.stderr


def test_a_directory_without_a_record_is_no_comparison() -> None:
    assert "no comparison in" in done("compare", ".", code=6).stderr
