"""Arguments of an external Megatron-LM that contradict the plan are refused where they stand."""

from __future__ import annotations

from pathlib import Path

import pytest
from wrong_specs import VALID, problems_of, shown

from hpctrain.plan.abilities.trainable import untrainable_fields
from hpctrain.spec.engines.megatron_lm import FIELD_OF, KEPT_BACK, refusal
from hpctrain.spec.loader import load_run_spec

CHECKOUT = "checkout: /opt/Megatron-LM"
ENGINE = f"engine: {{name: megatron-lm, {CHECKOUT}"


# (what stands behind the checkout, the problem)
WRONG = [
    ("arguments: {tensor-model-parallel-size: 4}",
     "8:97: `engine.arguments.tensor-model-parallel-size`: `parallel.tp` decides "
     "--tensor-model-parallel-size | remove it, and set `parallel.tp`"),
    ("arguments: {lr: 0.1}",
     "8:73: `engine.arguments.lr`: `optimizer.lr` decides --lr"
     " | remove it, and set `optimizer.lr`"),
    ("arguments: {no_bf16: true}",
     "8:78: `engine.arguments.no_bf16`: `precision` decides --no-bf16"
     " | remove it, and set `precision`"),
    ("arguments: {save: /elsewhere}",
     "8:75: `engine.arguments.save`: hpctrain decides --save: it saves, resumes and ends launches"
     " | remove it"),
    ("arguments: {exit-duration-in-mins: 60}",
     "8:92: `engine.arguments.exit-duration-in-mins`: hpctrain decides --exit-duration-in-mins: "
     "it saves, resumes and ends launches | remove it"),
    ("arguments: {log-throughput: false}",
     "8:85: `engine.arguments.log-throughput`: a switch is on, or it is not given"
     " | remove it, or write `no-...: true`"),
    ("arguments: {cuda-graph-modules: [attn, --lr]}",
     "8:89: `engine.arguments.cuda-graph-modules`: an element beginning with `-` would be read as "
     "another argument | remove it"),
    ("arguments: {--attention-backend: flash}",
     "8:69: `engine.arguments.--attention-backend`: expected an argument without dashes such as "
     "`attention-backend`"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected"), WRONG)
def test_a_contradiction_has_a_place_and_a_hint(
    tmp_path: Path, arguments: str, expected: str
) -> None:
    text = f"{VALID}{ENGINE}, {arguments}}}\n"
    assert shown(tmp_path, problems_of(tmp_path, text)) == [expected]


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (
            "engine: {name: megatron-lm}",
            "8:16: `engine.name`: engine megatron-lm needs `checkout`, the directory of the "
            "Megatron-LM | add `checkout: /path/to/Megatron-LM`",
        ),
        (
            f"engine: {{name: megatron, {CHECKOUT}}}",
            "8:36: `engine.checkout`: this is for an external Megatron-LM, and megatron would not "
            "read it | remove it, or set `engine.name: megatron-lm`",
        ),
    ],
)
def test_the_checkout_and_its_engine(tmp_path: Path, engine: str, expected: str) -> None:
    assert shown(tmp_path, problems_of(tmp_path, f"{VALID}{engine}\n")) == [expected]


def test_what_nobody_decides_may_be_given(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(f"{VALID}{ENGINE}, arguments: {{attention-backend: flash, num-workers: 4}}}}\n")
    engine = load_run_spec(path, ()).document.engine
    assert engine.arguments == {"attention-backend": "flash", "num-workers": 4}
    assert engine.entry == "pretrain_gpt.py"


def test_names_are_known_in_both_spellings_and_negated() -> None:
    assert refusal("seq_length") == refusal("seq-length")
    assert refusal("no-overlap-grad-reduce") is not None
    assert refusal("num-workers") is None
    assert not FIELD_OF.keys() & KEPT_BACK


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("checkpoint.every=1h", "checkpoint.every"),
        ("supervise.rollback.spike=10", "supervise.rollback.spike"),
        ("supervise.rollback.mode=act", "supervise.rollback.skip_steps"),
        ("supervise.speed_check.mode=report", "supervise.speed_check.mode"),
        ("model.mtp_layers=1", "model.mtp_layers"),
        ("precision=fp8", "precision"),
        ("data.format=packed", "data.format"),
    ],
)
def test_what_megatron_lm_cannot_do_is_refused(tmp_path: Path, override: str, field: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(f"{VALID}{ENGINE}}}\n")
    assert untrainable_fields(load_run_spec(path, ()).document) == []
    spec = load_run_spec(path, (override,)).document
    assert [name for name, _ in untrainable_fields(spec)] == [field]
