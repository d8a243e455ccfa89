"""The words of `--engines` and `--variant`: what they set, and what is refused and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import UsageError
from hpctrain.base.units import Duration
from hpctrain.job.prepare import load_inputs
from hpctrain.spec.engines.registry import ENGINES
from hpctrain.spec.loader import load_run_spec
from hpctrain.spec.run import RunSpec
from hpctrain.trials.variants import (
    Variant,
    engine_overrides,
    parse_variant,
    parse_variants,
    sizes,
    training_digest,
    trial_name,
    trial_overrides,
)

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
GPT1300M = EXAMPLES / "gpt1300m.yaml"  # engine fsdp
GPT175B = EXAMPLES / "gpt175b.yaml"  # engine megatron, with tensors and pipeline


# DeepSpeed refuses bf16 at stage 0, which the specs of examples have.
NEEDS = {
    ("deepspeed", "zero0"): ["precision=fp32"],
    ("megatron-lm", ""): ["engine.checkout=/opt/megatron-lm"],
}


def loaded(path: Path, *overrides: str) -> RunSpec:
    return load_run_spec(path, overrides).document


def test_the_bare_own_engine_is_the_spec_as_it_is() -> None:
    assert engine_overrides("fsdp", "fsdp") == ()


@pytest.mark.parametrize(
    ("expression", "fields"),
    [
        ("fsdp:zero2", {"engine.name": "fsdp", "optimizer.zero": 2}),
        ("fsdp+offload", {"optimizer.offload": "cpu", "optimizer.zero": None}),
        ("fsdp:zero3+shard8", {"optimizer.zero": 3, "optimizer.shard_gpus": 8}),
        ("deepspeed:zero1", {"engine.name": "deepspeed", "optimizer.zero": 1}),
        ("deepspeed:zero3+offload", {"optimizer.zero": 3, "optimizer.offload": "cpu"}),
        ("deepspeed:zero3+offload-nvme", {"optimizer.offload": "nvme"}),
        ("deepspeed:zero3+offload-weights", {"engine.deepspeed.offload_parameters": "cpu"}),
        ("ddp", {"engine.name": "ddp", "optimizer.zero": None, "parallel.pp": 1}),
        ("ddp+powersgd", {"engine.ddp.hook": "powersgd"}),
        ("ddp+recompute+micro4", {"recompute": "full", "batch.micro": 4}),
        ("megatron:zero0", {"engine.name": "megatron", "optimizer.zero": 0}),
        ("megatron+tp2+pp4", {"parallel.tp": 2, "parallel.pp": 4}),
    ],
)
@pytest.mark.parametrize("spec", [GPT1300M, GPT175B], ids=["fsdp spec", "megatron spec"])
def test_words_set_fields_of_any_spec(
    expression: str, fields: dict[str, object], spec: Path
) -> None:
    own_engine = loaded(spec).engine.name
    found = loaded(spec, *engine_overrides(expression, own_engine))
    for path, value in fields.items():
        here: object = found
        for part in path.split("."):
            here = getattr(here, part)
        assert here == value, path


def test_every_word_is_accepted_by_the_spec_of_each_of_its_engines() -> None:
    """A table that names a field or value that does not exist would only fail when it is used."""
    # words that mean something only together with another one
    together = {"offload-nvme": "zero3+", "offload-weights": "zero3+"}
    tried = 0
    for engine, abilities in ENGINES.items():
        for word in abilities.words:
            text = word.text.replace("#", "2")
            needs = NEEDS.get((engine, text)) or NEEDS.get((engine, "")) or []
            overrides = engine_overrides(f"{engine}:{together.get(text, '')}{text}", "fsdp")
            assert loaded(GPT1300M, *overrides, *needs).engine.name == engine
            tried += 1
    assert tried > 50


def test_what_other_engines_need_is_taken_out() -> None:
    spec = ("optimizer.shard_gpus=8", "optimizer.zero=3", "optimizer.offload=cpu")
    found = loaded(GPT1300M, *spec, *engine_overrides("ddp", "fsdp"))
    optimizer = found.optimizer
    assert (optimizer.shard_gpus, optimizer.zero, optimizer.offload) == (None, None, "none")
    assert found.parallel != "auto", "with `auto` an offload is an offer and no order"


def test_settings_that_one_engine_reads_are_no_hindrance_for_another() -> None:
    spec = [
        *("engine.name=deepspeed", "engine.deepspeed.nvme_path=/scratch", "optimizer.zero=3"),
        *("optimizer.offload=nvme", "engine.deepspeed.gather_bucket=1MiB"),
    ]
    assert loaded(GPT1300M, *spec, *engine_overrides("fsdp", "deepspeed")).engine.name == "fsdp"
    other = loaded(GPT1300M, *spec, *engine_overrides("deepspeed:zero2", "deepspeed"))
    assert other.engine.deepspeed.nvme_path is None and other.optimizer.offload == "none"
    assert other.engine.deepspeed.gather_bucket == 2**20, "what is no sharding stays"
    slow = ["engine.name=ddp", "engine.ddp.hook=powersgd", "engine.ddp.bucket=8MiB"]
    assert loaded(GPT1300M, *slow, *engine_overrides("fsdp", "ddp")).engine.ddp.hook == "none"
    kept = loaded(GPT1300M, *slow, *engine_overrides("ddp+recompute", "ddp"))
    assert kept.engine.ddp.bucket == 8 * 2**20 and kept.recompute == "full"
    local = ["engine.implementation=local", "optimizer.overlap_grad_reduce=false"]
    freed = loaded(GPT175B, *local, *engine_overrides("fsdp", "megatron"))
    assert freed.engine.implementation == "auto" and freed.optimizer.overlap_grad_reduce
    lm = ["engine.name=megatron-lm", "engine.checkout=/opt/lm", "engine.entry=train.py"]
    assert loaded(GPT1300M, *lm, *engine_overrides("megatron", "megatron-lm")).engine.entry


def test_a_layout_of_megatron_is_freed_for_others_and_kept_for_itself() -> None:
    kept = loaded(GPT175B, *engine_overrides("megatron+micro2", "megatron")).parallel
    assert kept == loaded(GPT175B).parallel
    freed = loaded(GPT175B, *engine_overrides("fsdp", "megatron")).parallel
    assert freed != "auto" and (freed.tp, freed.pp) == (1, 1)
    assert loaded(GPT1300M, *engine_overrides("megatron", "fsdp")).parallel == "auto"


def test_a_free_variant_has_fields_and_perhaps_an_engine() -> None:
    told = parse_variant("large: batch.micro=4, recompute_modules=[mlp, moe], seed=7", "fsdp")
    fields = ("batch.micro=4", "recompute_modules=[mlp, moe]", "seed=7")
    assert told == Variant("large", fields)
    mixed = parse_variant("mine: fsdp:zero2, batch.micro=4", "fsdp")
    assert mixed.overrides[0] == "engine.name=fsdp" and mixed.overrides[-1] == "batch.micro=4"
    one = parse_variant("x: environment.variables.A=b: c", "fsdp")
    assert one.overrides == ("environment.variables.A=b: c",)


@pytest.mark.parametrize(
    ("engines", "others", "words"),
    [
        ("fdsp", [], "no engine `fdsp`; did you mean `fsdp`?"),
        ("fsdp,", [], "an empty name"),
        ("fsdp:zero1", [], "engine fsdp knows no word `zero1`; did you mean"),
        ("ddp+offload", [], "engine ddp knows no word `offload`"),
        ("deepspeed:zero3+ofload", [], "did you mean `offload`?"),
        ("fsdp+shard", [], "knows no word `shard`"),
        ("fsdp+shard0", [], "knows no word `shard0`"),
        ("fsdp,fsdp", [], "two variants are named `fsdp`"),
        ("fsdp", ["fsdp: seed=7"], "two variants are named `fsdp`"),
        ("", [], "nothing to compare"),
        ("", ["seed=7"], "expected `NAME: FIELD=VALUE"),
        ("", ["a b: seed=7"], "expected `NAME: FIELD=VALUE"),
        ("", ["large: fsdpp, seed=7"], "no engine `fsdpp`"),
    ],
)
def test_what_is_not_known_is_refused(engines: str, others: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_variants(engines, others, "fsdp")
    assert words in str(caught.value)


def test_a_trial_is_the_same_run_but_short() -> None:
    whole = loaded(GPT1300M)
    short = loaded(GPT1300M, *trial_overrides(whole, "gpt-a", 20, Duration(600)))
    assert short.train_steps == 20 and short.name == "gpt-a"
    assert short.schedule.decay_steps == whole.train_steps, "the learning rate is that of the run"
    assert short.schedule.warmup_steps == whole.schedule.warmup_steps
    assert (short.checkpoint.every_steps, short.checkpoint.every) == (20, None)
    assert short.evaluation.every_steps == 20, "once, at the end"
    assert short.supervise.failures_without_progress == 1, "a crash is a result"
    untouched = ("model", "data", "batch", "optimizer", "parallel", "engine", "seed", "precision")
    assert all(getattr(short, name) == getattr(whole, name) for name in untouched)


def test_what_does_not_evaluate_does_not_begin_to() -> None:
    whole = loaded(GPT1300M, "evaluation.every_steps=")
    short = loaded(GPT1300M, *trial_overrides(whole, "gpt-a", 20, Duration(600)))
    assert short.evaluation.every_steps == 500, "the override of the user comes with the trial"
    assert "evaluation.every_steps=20" not in trial_overrides(whole, "gpt-a", 20, Duration(600))


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        (engine_overrides("deepspeed:zero3+offload+recompute+micro1", "fsdp"), True),
        (("precision=fp32", "resources.gpus=4"), True),
        (("seed=7",), False),
        (("optimizer.lr=1e-4",), False),
        (("batch.global=256",), False),
        (("model.layers=12",), False),
        (engine_overrides("megatron", "fsdp"), False),
    ],
)
def test_which_trials_must_have_the_same_losses(overrides: tuple[str, ...], same: bool) -> None:
    digests = {training_digest(loaded(GPT1300M, *more)) for more in ((), overrides)}
    assert (len(digests) == 1) is same


def test_names_of_trials_are_names_of_runs() -> None:
    assert trial_name("gpt", "deepspeed:zero3+offload") == "gpt-deepspeed-zero3-offload"
    long = trial_name("x" * 63, "deepspeed:zero3+offload")
    assert len(long) == 63 and loaded(GPT1300M, f"name={long}").name == long


def test_strong_scaling_keeps_the_batch_and_weak_scaling_that_of_a_gpu() -> None:
    whole = loaded(GPT1300M)  # 512 samples on 8 GPUs
    strong = sizes(whole, (4, 1, 4), weak=False)
    assert [(v.name, v.overrides) for v in strong] == [
        ("gpus1", ("resources.gpus=1",)),
        ("gpus4", ("resources.gpus=4",)),
    ]
    weak = sizes(whole, (1, 16), weak=True)
    assert [v.overrides[1] for v in weak] == ["batch.global=64", "batch.global=1024"]
    with pytest.raises(UsageError, match="no whole"):
        sizes(loaded(GPT1300M, "batch.global=4", "resources.gpus=8"), (1,), weak=True)


def test_examples_of_the_help_can_be_planned() -> None:
    overrides = engine_overrides("deepspeed:zero3+offload", "fsdp")
    spec, _ = load_inputs(GPT1300M, "a100x1", overrides)
    assert spec.document.engine.name == "deepspeed"
