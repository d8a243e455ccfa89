"""`init`: from nothing to a spec that plans at once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import hpctrain, on_terminal
from variants import varied

from hpctrain.job.plan import load, plan_option
from hpctrain.plan.model.parameters import total_parameters
from hpctrain.site.init import Wishes, fitting_gpus, named_model, spec_text
from hpctrain.spec.loader import load_presets, load_run_spec

PRESETS = [one.name for one in load_presets().presets]

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 688,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("preset", varied(PRESETS, *PRESETS[::3]))
def test_every_published_model_is_a_spec_that_plans(preset: str) -> None:
    done = hpctrain("init", "--model", preset, "--gpus", "256", "-p", "a100x64")
    assert done.exit_code == 0, done.transcript()
    assert done.stdout == f"{preset}.yaml\n" and "Fits      yes" in done.stderr
    assert load_run_spec(f"{preset}.yaml").document.resources.gpus == 256


@pytest.mark.parametrize("preset", varied(PRESETS, *PRESETS[::4], "llama-3-70b", "gpt3-175b"))
def test_without_a_number_every_published_model_gets_gpus_that_suffice(preset: str) -> None:
    wishes = Wishes(named_model(preset), 8)
    gpus = fitting_gpus(wishes, "a100x64")
    assert gpus == {"llama-3-70b": 16, "gpt3-175b": 64, "llama-3-405b": 128}.get(preset, gpus)
    Path("spec.yaml").write_text(spec_text(replace(wishes, gpus=gpus)))
    planned = plan_option(load(Path("spec.yaml"), "a100x64"), "time", before_seconds=0)
    assert planned.plan is not None, planned.refusal


def test_more_than_a_node_is_taken_and_said_where_nobody_gave_a_number() -> None:
    done = hpctrain("init", "-m", "llama-3-70b", "-p", "a100x64")
    assert done.exit_code == 0, done.transcript()
    assert "llama-3-70b does not fit 8 GPUs: the spec takes 16" in done.stderr
    assert load_run_spec("llama-3-70b.yaml").document.resources.gpus == 16
    given = hpctrain("init", "given.yaml", "-m", "llama-3-70b", "-p", "a100x64", "--gpus", "8")
    assert given.exit_code == 4 and load_run_spec("given.yaml").document.resources.gpus == 8


def test_the_whole_way_of_a_newcomer() -> None:
    """init, plan --apply, validate: nothing but the wheel, no example opened."""
    made = hpctrain("init", "--model", "llama-3-8b", "--gpus", "16", "-p", "a100x64")
    assert "Next  hpctrain plan -p a100x64 llama-3-8b.yaml --apply" in made.stderr
    planned = hpctrain("plan", "-p", "a100x64", "llama-3-8b.yaml", "--apply")
    assert planned.exit_code == 0 and "wrote `parallel.tp" in planned.stderr, planned.transcript()
    text = Path("llama-3-8b.yaml").read_text()
    assert "# `hpctrain plan --apply` writes the layout here" in text and "  tp: " in text
    checked = hpctrain("validate", "-p", "a100x64", "llama-3-8b.yaml")
    assert "ok    plan: " in checked.stdout and "made up" in checked.stdout


def test_budget_batch_and_rate_follow_the_size() -> None:
    hpctrain("init", "--model", "llama-2-7b", "--gpus", "64")
    document = load_run_spec("llama-2-7b.yaml").document
    tokens = document.train_steps * document.batch.global_ * document.model.seq
    assert tokens == pytest.approx(20 * total_parameters(document.model), rel=0.01)
    assert document.batch.global_ * document.model.seq == pytest.approx(2e6, rel=0.1)
    assert document.optimizer.lr == pytest.approx(1.2e-4)
    asked = hpctrain("init", "asked.yaml", "-m", "llama-2-7b", "--gpus", "24", "--tokens", "6B")
    assert asked.exit_code == 0
    document = load_run_spec("asked.yaml").document
    assert document.batch.global_ % 24 == 0, "every GPU gets the same"
    tokens = document.train_steps * document.batch.global_ * document.model.seq
    assert tokens == pytest.approx(6e9, rel=0.01)


@pytest.mark.parametrize("tokens", ["1", "500k", "40M"])
def test_a_short_budget_has_a_small_batch(tokens: str) -> None:
    """GPT-3's batches are those of 300 billion tokens; a first try on a laptop has fewer."""
    Path("my-llama").mkdir()
    Path("my-llama/config.json").write_text(json.dumps(CONFIG))
    done = hpctrain("init", "-m", "my-llama", "--data", "x", "--tokens", tokens, "--gpus", "2")
    assert done.exit_code == 0, done.transcript()
    document = load_run_spec("my-llama.yaml").document
    steps, least = document.train_steps, 1 if tokens == "1" else 250
    assert steps >= least and document.batch.global_ >= 2
    assert f"; {steps:,} step" in Path("my-llama.yaml").read_text(), "as the comment says"
    assert document.evaluation.every_steps is not None
    assert document.evaluation.every_steps <= steps


@pytest.mark.parametrize("with_weights", [False, True])
def test_a_directory_of_hugging_face(with_weights: bool) -> None:
    Path("my-llama").mkdir()
    Path("my-llama/config.json").write_text(json.dumps(CONFIG))
    if with_weights:
        Path("my-llama/model.safetensors").touch()
    done = hpctrain("init", "-m", "my-llama", "--data", "data/text", "-p", "a100x1")
    assert done.exit_code == 0, done.transcript()
    document = load_run_spec("my-llama.yaml").document
    model = document.model
    assert (model.family, model.layers, model.kv_heads, model.ffn) == ("llama", 4, 2, 688)
    assert model.pretrained == ("my-llama" if with_weights else None)
    assert document.engine.name == ("fsdp" if with_weights else "megatron")
    assert document.data.sources[0].path == "data/text"
    assert document.resources.gpus == 8, "a node of the profile"


def test_questions_on_a_terminal() -> None:
    shown = on_terminal(80, "init", typed="llama-2-7b\ndata/web\n16\n")
    assert "Model (a name of `hpctrain init --list`" in shown and "GPUs [8]" in shown
    document = load_run_spec("llama-2-7b.yaml").document
    assert document.resources.gpus == 16 and document.data.sources[0].path == "data/web"


def test_nothing_is_overwritten() -> None:
    Path("gpt2.yaml").write_text("mine")
    done = hpctrain("init", "-m", "gpt2")
    assert done.exit_code == 2 and "exists, and is left as it is" in done.stderr
    assert Path("gpt2.yaml").read_text() == "mine"
    printed = hpctrain("init", "-", "-m", "gpt2")
    assert printed.stdout.endswith("resources:\n  gpus: 8\n") and printed.exit_code == 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ((), 2, "give a --model"),
        (("-m", "lama-2-7b"), 2, "did you mean `llama-2-7b`"),
        (("-m", "other"), 3, "does not know models of type"),
        (("-m", "broken"), 3, "broken/config.json:1:2: this is no JSON: Expecting"),
        (("-m", "gpt2", "--tokens", "many"), 2, "--tokens"),
        (("none/here.yaml", "-m", "gpt2"), 2, "cannot be written: No such file"),
        (("-m", "gpt2", "-p", "a100x64", "--gpus", "1000"), 4, "more than the 512"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], code: int, says: str) -> None:
    for name, text in (("other", '{"model_type": "longt5"}'), ("broken", "{")):
        Path(name).mkdir()
        Path(name, "config.json").write_text(text)
    done = hpctrain("init", *words)
    assert done.exit_code == code and says in done.stderr, done.transcript()


def test_the_list_has_every_model_with_its_source() -> None:
    lines = hpctrain("init", "--list").stdout.splitlines()
    assert len(lines) == 1 + len(load_presets().presets)
    assert any(line.split()[:3] == ["llama-3-8b", "llama", "8.03B"] for line in lines)
