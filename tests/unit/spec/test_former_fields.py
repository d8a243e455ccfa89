"""Fields that have gone: their defaults, which run directories contain, are left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from wrong_specs import VALID, problems_of

from hpctrain.records.supervise_config import ChannelSettings, RollbackSettings
from hpctrain.spec.loader import GONE, forget_former_fields, load_run_spec

# As a former version wrote them, in sections that this one has.
FORMER = f"""{VALID.replace("lr: 1e-3", "lr: 1e-3, name: adamw")}
profile: {{steps: [3], start: null, count: 1, shapes: false, largest: 512MiB, flops: false}}
supervise: {{storm_window: '00:30:00', rollback: {{other_nodes: true}}}}
engine: {{ddp: {{powersgd_rank: 4}}}}
notify: {{channels: [{{kind: slack, url_file: /a, url_env: null}}]}}
"""


def test_a_spec_of_a_former_version_is_read(tmp_path: Path) -> None:
    former, now = tmp_path / "former.yaml", tmp_path / "now.yaml"
    former.write_text(FORMER)
    channel = "notify: {channels: [{kind: slack, url_file: /a}]}"
    now.write_text(f"{VALID}profile: {{steps: [3]}}\n{channel}\n")
    assert load_run_spec(former).document == load_run_spec(now).document


@pytest.mark.parametrize(
    ("field", "other"),
    [("largest: 512MiB", "largest: 1GiB"), ("flops: false", "flops: 0"), ("'00:30:00'", "1h")],
)
def test_another_value_is_an_unknown_key(tmp_path: Path, field: str, other: str) -> None:
    (problem,) = problems_of(tmp_path, FORMER.replace(field, other))
    assert "unknown key" in problem.message and problem.line is not None


def test_documents_of_a_run_that_goes_on_are_read_with_any_value() -> None:
    values = {"ddp": {"hook": "powersgd", "powersgd_rank": 8}, "flops_steps": [3], "seed": 1}
    forget_former_fields(values, only_defaults=False)
    assert values == {"ddp": {"hook": "powersgd"}, "seed": 1}
    assert RollbackSettings.model_validate_json('{"other_nodes": false}') == RollbackSettings()
    channel = {"name": "slack", "kind": "slack", "url_env": "HOOK"}
    assert ChannelSettings.model_validate_json(json.dumps(channel)).url_file is None


def test_no_field_of_today_has_gone() -> None:
    from hpctrain.spec.reference import fields_of

    today = {path for kind in ("spec", "profile", "service") for path in fields_of(kind)}
    assert not today & {path.replace("channels.", "channels[].") for path in GONE}
