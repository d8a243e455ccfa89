"""The lines of `plan --verify`."""

from __future__ import annotations

from hpctrain.engines.verification import Verification, VerifiedStage
from hpctrain.job.verify import verification_lines


def stage(index: int, planned: int, built: int, kept: int | None = None) -> VerifiedStage:
    return VerifiedStage(
        index=index,
        rank=64 * index,
        planned_parameters=planned,
        built_parameters=built,
        equal=planned == built,
        planned_kept_bytes=None if kept is None else kept + kept // 100,
        measured_kept_bytes=kept,
    )


def lines(*stages: VerifiedStage, remarks: tuple[str, ...] = ()) -> list[str]:
    shown = verification_lines(
        Verification(
            run_name="tiny",
            megatron_core_version="0.16.1",
            torch_version="2",
            equal=all(one.equal for one in stages),
            stages=stages,
            remarks=remarks,
        )
    )
    assert all(len(line) <= 80 for line in shown), shown
    return shown


def test_equal() -> None:
    assert lines(stage(0, 2822731776, 2822731776, 2**30), stage(1, 5, 5, 2**30)) == [
        "Verify    one rank of each stage, built by megatron-core 0.16.1 on no GPU",
        "STAGE  RANK        PLANNED          BUILT            KEPT  MEASURED",
        "    0     0  2,822,731,776  2,822,731,776  equal  1.0 GiB   1.0 GiB",
        "    1    64              5              5  equal  1.0 GiB   1.0 GiB",
        "parameters are equal on all 2 stages; activations that one microbatch keeps are",
        "planned within 1.0% of what was measured",
    ]


def test_different_names_the_worst_stage() -> None:
    shown = " ".join(lines(stage(0, 10, 10), stage(1, 1000, 1001), stage(2, 900, 1000)))
    assert "parameters differ on 2 of 3 stages, most on stage 2: planned -100" in shown
    assert shown.count("DIFFERENT") == 2


def test_nothing_measured_is_a_dash_and_no_claim() -> None:
    shown = lines(stage(0, 10, 10), remarks=("activations are not measured: " + "why " * 30,))
    assert shown[2].endswith("equal     -         -")
    assert "planned within" not in " ".join(shown)
    assert shown[3] == "parameters are equal on the one stage"
    assert shown[4].startswith("- activations are not measured: why")
    assert shown[5].startswith("  why")


def test_the_largest_plans_still_fit() -> None:
    shown = lines(*(stage(n, 10**11 + n, 10**11, 10**14) for n in range(128)))
    assert max(len(line) for line in shown) <= 80
    assert sum("DIFFERENT" in line for line in shown) >= 127
