"""`data.sources` by a file, documents in samples, and wsd: what fits together and what not."""

from __future__ import annotations

from pathlib import Path

import pytest
from wrong_specs import VALID, problems_of

from hpctrain.spec.loader import load_run_spec


def test_sources_stand_in_a_file_beside_the_spec(tmp_path: Path) -> None:
    (tmp_path / "blend.txt").write_text("0.3 data/a\n0.7 data/b\n")
    (tmp_path / "spec.yaml").write_text(VALID + "data: {sources: blend.txt}\n")
    data = load_run_spec(tmp_path / "spec.yaml").document.data
    assert [(one.weight, one.path) for one in data.sources] == [(0.3, "data/a"), (0.7, "data/b")]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("data: {sources: none.txt}", "none.txt: no such file"),
        ("data: {sources: odd.txt}", "odd.txt has no weights and prefixes by turns"),
        ("data: {documents: restart}", "`document_end` goes with `documents`"),
        ("data: {document_end: 3}", "`document_end` goes with `documents`"),
        (
            "data: {documents: separate, document_end: 3}",
            "megatron-core knows documents as joined or restart",
        ),
        (
            "data: {documents: restart, document_end: 3}\nengine: {name: fsdp}",
            "FSDP knows documents as joined or separate",
        ),
        (
            "data: {mask_document_ends: true, document_end: 3}\n"
            "engine: {name: megatron-lm, checkout: /opt/M}",
            "an external Megatron-LM knows no ends of documents",
        ),
        ("schedule: {style: wsd}", "`style: wsd` and `wsd_decay_steps` go together"),
        ("schedule: {wsd_decay_steps: 3}", "`style: wsd` and `wsd_decay_steps` go together"),
        ("schedule: {wsd_style: cosine}", "wsd_style is for `style: wsd`, not for cosine"),
        ("schedule: {style: wsd, wsd_decay_steps: 1000000}", "are more than the"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, end: str, expected: str) -> None:
    (tmp_path / "odd.txt").write_text("0.3 data/a 0.7")
    messages = [one.message for one in problems_of(tmp_path, f"{VALID}{end}\n")]
    assert any(expected in message for message in messages), messages


def test_a_resnet_draws_its_weights_by_its_widths(tmp_path: Path) -> None:
    model = "model: {family: resnet, layers: 18, vocab: 10, init_std: 0.1}"
    text = VALID.replace("model: {layers: 4, hidden: 128, heads: 4, vocab: 1024, seq: 128}", model)
    messages = [one.message for one in problems_of(tmp_path, text)]
    assert any("init_std: the first weights of a ResNet" in one for one in messages), messages


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("vocab_multiple: 64", "FSDP pads no vocabulary"),
        (
            "moe: {experts: 4, top_k: 1, ffn: 64, z_loss: 0.1}",
            "FSDP has no such loss of the router",
        ),
        ("moe: {experts: 4, top_k: 1, ffn: 64, balance: none}", "FSDP has no such loss"),
    ],
)
def test_parts_that_an_engine_has_not(tmp_path: Path, more: str, expected: str) -> None:
    text = VALID.replace("heads:", f"{more}, heads:", 1) + "engine: {name: fsdp}\n"
    messages = [one.message for one in problems_of(tmp_path, text)]
    assert any(expected in message for message in messages), messages
