"""`hpctrain serve`: what it prints and how it ends, without Slurm and engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import hpctrain

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "serve70b" / "full.yaml"


def test_a_plan_as_json_has_promises_that_hold() -> None:
    done = hpctrain("serve", "plan", "-p", "h100x16", str(EXAMPLE), "--json")
    assert done.exit_code == 0, done.stderr
    (plan,) = json.loads(done.stdout)["service_plan"]["plans"]
    assert plan["promises"] and all(one["holds"] for one in plan["promises"])
    assert all(one["predicted_seconds"] <= one["limit_seconds"] for one in plan["promises"])
    assert plan["cost_per_hour"] > 0 and plan["replica"]["gpu"].startswith("H100")


def test_a_limit_without_its_latency_is_priced_and_refused() -> None:
    words = ("serve", "plan", "-p", "h100x16", str(EXAMPLE), "--set", "objectives.p99=500ms")
    done = hpctrain(*words)
    assert done.exit_code == 3 and "objectives.p99" in done.stdout
    assert all(f"\n  {name} " in done.stdout for name in ("ttft", "tpot", "e2e"))


def test_weights_that_are_not_there_are_named_with_their_line() -> None:
    done = hpctrain("serve", "up", "-p", "h100x16", str(EXAMPLE), "--dry-run")
    assert done.exit_code == 3 and f"{EXAMPLE}:" in done.stderr and "weights.path" in done.stderr


@pytest.mark.parametrize("words", [("status",), ("scale", "2"), ("restart",), ("down", "-y")])
def test_a_service_that_does_not_exist(words: tuple[str, ...], tmp_path: Path) -> None:
    command, *rest = words
    done = hpctrain("serve", command, "chat", *rest, "--runs", str(tmp_path))
    assert done.exit_code == 6 and "no service `chat`" in done.stderr


def test_a_number_of_replicas_is_one(tmp_path: Path) -> None:
    done = hpctrain("serve", "scale", "chat", "many", "--runs", str(tmp_path))
    assert done.exit_code == 2 and "`many`" in done.stderr


def test_no_services_are_an_empty_table(tmp_path: Path) -> None:
    done = hpctrain("serve", "status", "--runs", str(tmp_path), "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["services"] == []
