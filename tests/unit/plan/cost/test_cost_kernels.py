"""Seconds of single kernels and the choice of their constants, with figures worked out by hand."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
from cost_specimens import case, only_products

from hpctrain.base.errors import InvalidInputError
from hpctrain.plan.cost.blocks import (
    flash_seconds,
    product_seconds,
    quantising_seconds,
    stream,
    unfused_seconds,
)
from hpctrain.plan.cost.case import Machine, Mesh, Shape, Software
from hpctrain.plan.cost.from_spec import (
    calibration_of,
    fabric_of,
    machine_of,
    newer,
    peak_rate,
    software_entry,
    software_name,
    software_of,
)
from hpctrain.spec.calibration import HALF_LENGTH, HALF_LENGTH_CAUSAL
from hpctrain.spec.catalogue import Gpu
from hpctrain.spec.loader import load_calibration, load_catalogue

CALIBRATION = load_calibration()
HOPPER = CALIBRATION.gpus["hopper"]
PLAIN = CALIBRATION.software["megatron-core"]
FABRIC = CALIBRATION.fabrics["infiniband"]


def gpu(peak: dict[str, str], **others: Any) -> Gpu:
    document: dict[str, Any] = dict(
        name="X1",
        generation="hopper",
        memory="80GiB",
        peak=peak,
        memory_bandwidth="3000GB/s",
        nvlink_bandwidth="450GB/s",
        nvlink_domain=8,
        network_bandwidth="400Gb/s",
        per_node=8,
        source="a test",
    )
    return Gpu.model_validate(document | others)


class TestProducts:
    def test_operations_hide_operands_in_part_and_the_result_comes_after(self) -> None:
        # 2 x 1000 x 2000 x 500 = 2e9 operations at half of 1e15; bytes of 16 bits at 80 % of 1e12:
        # operands 2 (1000 x 500 + 500 x 2000) = 3e6, result 2 x 1000 x 2000 = 4e6
        one = case(product_efficiency=0.5, memory_efficiency=0.8)
        expected = math.hypot(4e-6, 3.75e-6) + 5e-6
        assert product_seconds(one, 1000, 2000, 500) == pytest.approx(expected)

    def test_eight_bits_have_their_own_rate_and_move_less(self) -> None:
        # 2e9 / (2e15 / 4) beside 1.5 x 1.5e6 / 1e12, then 1.5 x 2e6 / 1e12
        one = case(low=1, product_efficiency=0.5, low_efficiency=0.25)
        expected = math.hypot(4e-6, 2.25e-6) + 3e-6
        assert product_seconds(one, 1000, 2000, 500) == pytest.approx(expected)

    def test_four_byte_elements_move_twice_as_much(self) -> None:
        expected = math.hypot(2e-6, 6e-6) + 8e-6
        assert product_seconds(case(element_bytes=4), 1000, 2000, 500) == pytest.approx(expected)

    def test_the_last_wave_of_tiles_is_half_empty(self) -> None:
        # as if the result had 1e6 more elements: 2 x 1e6 x 500 / 1e15
        without, with_tail = only_products(), only_products(tail_products=1e6)
        added = product_seconds(with_tail, 1000, 2000, 500) - product_seconds(
            without, 1000, 2000, 500
        )
        assert added == pytest.approx(1e-6)

    def test_a_grouped_kernel_has_one_last_wave(self) -> None:
        one = case(tail_products=1e6)
        single, grouped = (product_seconds(one, 1000, 2000, 500, n) for n in (1, 8))
        tail = 2 * 1e6 * 500 / 1e15
        assert grouped - tail == pytest.approx(8 * (single - tail))

    def test_operands_in_eight_bits_are_quantised(self) -> None:
        # 2 bytes in, two of one byte out
        assert quantising_seconds(case(low=1), 1e9) == pytest.approx(4e-3)
        assert quantising_seconds(case(), 1e9) == 0

    def test_elementwise_kernels_move_bytes(self) -> None:
        assert stream(case(memory_efficiency=0.5), 3e9) == pytest.approx(6e-3)


class TestAttention:
    def test_fused(self) -> None:
        # 2 products x 2 operations x 1e6 pairs x 16 heads x 64 = 4.096e9, at 0.5 x 0.8 of 1e15
        one = case(flash_efficiency=0.5, flash_speed=0.8)
        assert flash_seconds(one, 1e6, 16, backward=False) == pytest.approx(1.024e-5)

    def test_forward_and_backward_passes_have_rates_whose_products_take_as_long_as_both(
        self,
    ) -> None:
        # 2 products at 1.15 of the backward rate b, 5 at b; together 7 at 1e15
        one = case(forward_ratio=1.15)
        forward, backward = (flash_seconds(one, 1e6, 16, backward=b) for b in (False, True))
        assert forward + backward == pytest.approx(7 * 2 * 1e6 * 16 * 64 / 1e15)
        assert backward / forward == pytest.approx(2.5 * 1.15)

    @pytest.mark.parametrize(
        ("head", "causal", "length", "measured"),
        # FlashAttention-3 on H100, forward, TFLOP/s (arXiv 2407.08608, figure 5), 989.4 at most;
        # the rate of long causal sequences and heads of 128 that makes the first line exact
        [
            (64, 1, 16384, 473),
            (64, 1, 4096, 420),
            (128, 0, 16384, 648),
            (128, 0, 2048, 625),
            (64, 0, 16384, 497),
        ],
    )
    def test_a_kernel_benchmark_comes_out(
        self, head: int, causal: int, length: int, measured: float
    ) -> None:
        long = 473 * (16384 + 550) / 16384 * (64 + 54) / 64 * 128 / (128 + 54)
        one = case(
            seq=length, qk_dim=head, value_dim=head, causal=causal, flash_efficiency=long / 1000
        )
        one = replace(
            one,
            machine=replace(
                one.machine,
                half_head=54.0,
                half_length=HALF_LENGTH,
                half_length_causal=HALF_LENGTH_CAUSAL,
            ),
        )
        rate = 2 * 2 * 1e6 * 16 * head / flash_seconds(one, 1e6, 16, backward=False)
        assert rate == pytest.approx(measured * 1e12, rel=0.06)

    def test_large_heads_are_no_faster(self) -> None:
        rates = [
            size / flash_seconds(case(qk_dim=size, value_dim=size, half_head=54.0), 1e6, 16, False)
            for size in (32, 64, 128, 256)
        ]
        assert rates[0] < rates[1] < rates[2]
        assert rates[3] == pytest.approx(rates[2])

    def test_context_parallelism_leaves_shorter_sequences(self) -> None:
        whole, parts = (case(cp=size, half_length_causal=550.0) for size in (1, 4))
        gained = flash_seconds(parts, 1e6, 16, True) / flash_seconds(whole, 1e6, 16, True)
        assert gained == pytest.approx((512 + 550) / 512 * 2048 / (2048 + 550))

    def test_heads_of_queries_and_values_may_differ(self) -> None:
        # one product over 96 and one over 64: 2 x 1e6 x 16 x (96 + 64)
        assert flash_seconds(case(qk_dim=96), 1e6, 16, backward=False) == pytest.approx(5.12e-6)

    def test_unfused_moves_the_matrix_of_scores(self) -> None:
        # 4.096e9 operations at a quarter of 1e15; 6 trips of 1e6 x 16 elements of 2 bytes
        one = case(batched_efficiency=0.25)
        assert unfused_seconds(one, 1e6, 16, 2.0) == pytest.approx(1.6384e-5 + 1.92e-4)
        twice = unfused_seconds(one, 1e6, 16, 4.0)
        assert twice == pytest.approx(3.2768e-5 + 3.84e-4)

    @pytest.mark.parametrize(("size", "slower"), [(64, 1.0), (96, 1.0), (80, 1.0), (100, 3.0)])
    def test_odd_head_sizes_miss_the_tensor_cores(self, size: int, slower: float) -> None:
        one = case(qk_dim=size, value_dim=size, softmax_passes=0.0)
        expected = slower * 2 * 2 * 1e6 * 16 * size / 1e15
        assert unfused_seconds(one, 1e6, 16, 2.0) == pytest.approx(expected)

    def test_fused_attention_does_not_mind_odd_head_sizes(self) -> None:
        one = case(qk_dim=100, value_dim=100)
        assert flash_seconds(one, 1e6, 16, backward=False) == pytest.approx(6.4e-6)


class TestConstants:
    """Which constants a GPU and a precision get."""

    def test_name_goes_before_generation(self) -> None:
        both = CALIBRATION.model_copy(
            update={"gpus": {"hopper": HOPPER, "X1": CALIBRATION.gpus["ampere"], "z": HOPPER}}
        )
        assert calibration_of(both, gpu({"bf16": "1TFLOP/s"})) is both.gpus["X1"]

    def test_generation_goes_before_the_last_resort(self) -> None:
        assert calibration_of(CALIBRATION, gpu({"bf16": "1TFLOP/s"})) is HOPPER

    def test_a_gpu_that_nobody_knows_is_like_the_last_one_listed(self) -> None:
        strange = gpu({"bf16": "1TFLOP/s"}, generation="volta")
        known = {name: CALIBRATION.gpus[name] for name in ("hopper", "ampere")}
        found = calibration_of(CALIBRATION.model_copy(update={"gpus": known}), strange)
        assert found is known["ampere"]

    def test_a_calibration_without_gpus_is_an_error_of_the_user(self) -> None:
        empty = CALIBRATION.model_copy(update={"gpus": {}})
        with pytest.raises(InvalidInputError, match="names no GPU"):
            calibration_of(empty, gpu({"bf16": "1TFLOP/s"}))

    @pytest.mark.parametrize(
        ("peaks", "precision", "wide", "low"),
        [
            ({"bf16": 100, "fp8": 200, "fp4": 400, "fp32": 10}, "bf16", 100, 100),
            ({"bf16": 100, "fp8": 200, "fp4": 400, "fp32": 10}, "fp8", 100, 200),
            ({"bf16": 100, "fp8": 200, "fp4": 400, "fp32": 10}, "fp4", 100, 400),
            ({"bf16": 100, "fp8": 200}, "fp4", 100, 200),
            ({"bf16": 100, "fp16": 90}, "fp8", 100, 100),
            ({"fp16": 90, "fp32": 10}, "bf16", 90, 90),
            ({"bf16": 100, "fp32": 10}, "fp32", 10, 10),
            ({"fp32": 10, "fp8": 50}, "fp16", 10, 10),
        ],
    )
    def test_precisions_fall_back(
        self, peaks: dict[str, int], precision: str, wide: float, low: float
    ) -> None:
        one = gpu({name: f"{rate}TFLOP/s" for name, rate in peaks.items()})
        machine = machine_of(one, HOPPER, FABRIC, precision=precision)
        assert (machine.peak, machine.peak_low) == (wide * 1e12, low * 1e12)

    @pytest.mark.parametrize(
        ("peaks", "precision"),
        [
            ({"bf16": "100TFLOP/s"}, "fp32"),
            ({"fp8": "50TFLOP/s", "fp4": "80TFLOP/s"}, "bf16"),
            ({"fp4": "80TFLOP/s"}, "fp8"),
        ],
    )
    def test_no_narrower_peak_stands_for_one_that_is_not_listed(
        self, peaks: dict[str, str], precision: str
    ) -> None:
        with pytest.raises(InvalidInputError, match=f"has no peak rate of {precision}"):
            peak_rate(gpu(peaks), precision)

    def test_packaged_gpus_list_what_they_have(self) -> None:
        for one in load_catalogue().gpus:
            assert peak_rate(one, "fp32") == float(one.peak["fp32"]), one.name
            assert peak_rate(one, "bf16") == peak_rate(one, "fp16") == float(one.peak["fp16"])
            low = peak_rate(one, "fp8")
            assert low == float(one.peak.get("fp8", one.peak["fp16"])), one.name

    def test_a_machine_is_the_data_sheet_and_the_calibrated_shares(self) -> None:
        shares = HOPPER.model_copy(update={"fp8_efficiency": 0.61, "fp4_efficiency": 0.33})
        fabric = FABRIC.model_copy(update={"network_efficiency": 0.77, "straggling": 0.004})
        one = gpu({"bf16": "1TFLOP/s"})
        machine = machine_of(one, shares, fabric, leaf_gpus=64, oversubscription=2.0)
        assert machine.memory_bandwidth == 3e12
        assert machine.nvlink_bandwidth == 450e9
        assert machine.network_bandwidth == 50e9  # 400 Gb/s
        assert (machine.domain, machine.leaf_gpus, machine.oversubscription) == (8, 64, 2.0)
        flat = machine_of(one, shares, fabric)
        assert (flat.leaf_gpus, flat.oversubscription) == (0, 1)
        assert machine.low_efficiency == 0.61
        assert machine_of(one, shares, fabric, precision="fp4").low_efficiency == 0.33
        assert (machine.network_efficiency, machine.straggling) == (0.77, 0.004)
        for name in (
            *("product_efficiency", "flash_efficiency", "batched_efficiency", "tail_products"),
            *("memory_efficiency", "nvlink_efficiency", "scan_efficiency", "misaligned_cost"),
            "half_head",
        ):
            assert getattr(machine, name) == getattr(shares, name), name

    def test_software_takes_every_constant_of_its_generation(self) -> None:
        marked = {
            name: 0.01 * number
            for number, name in enumerate(type(PLAIN).model_fields, 1)
            if name not in ("description", "provenance")
        }
        software = software_of(PLAIN.model_copy(update=marked))
        elsewhere = {"gradient_bytes"}  # of the mesh
        for name in marked.keys() - elsewhere:
            assert getattr(software, name) == marked[name], name


class TestSoftware:
    @pytest.mark.parametrize(
        ("engine", "name"),
        [
            ("megatron", "megatron-core"),
            ("megatron-lm", "megatron-core"),
            ("megatron-fsdp", "megatron-core"),
            ("fsdp", "fsdp"),
            ("ddp", "fsdp"),
            ("deepspeed", "deepspeed"),
        ],
    )
    def test_an_engine_is_the_software_of_today(self, engine: str, name: str) -> None:
        assert software_name(engine) == name
        assert software_entry(CALIBRATION, engine) is CALIBRATION.software[name]

    @pytest.mark.parametrize("engine", ["megatron", "megatron-lm", "megatron-fsdp"])
    def test_megatron_without_transformer_engine_is_what_it_was_before(self, engine: str) -> None:
        assert software_name(engine, local=True) == "megatron-2022"
        local, core = (software_entry(CALIBRATION, engine, local=one) for one in (True, False))
        assert local.streaming > core.streaming

    @pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
    def test_other_engines_know_no_local_layers(self, engine: str) -> None:
        assert software_name(engine, local=True) == software_name(engine)

    def test_hugging_faces_classes_move_more_than_fused_ones(self) -> None:
        eager, fused = (software_entry(CALIBRATION, "fsdp", eager=one) for one in (True, False))
        assert eager is CALIBRATION.software["hugging-face"]
        assert eager.streaming > fused.streaming

    def test_a_calibration_without_it_is_an_error_of_the_user(self) -> None:
        empty = CALIBRATION.model_copy(update={"software": {}})
        with pytest.raises(InvalidInputError, match="no software `fsdp`"):
            software_entry(empty, "ddp")

    def test_a_fabric_by_its_name(self) -> None:
        assert fabric_of(CALIBRATION, "ethernet") is CALIBRATION.fabrics["ethernet"]
        with pytest.raises(InvalidInputError, match="no fabric `tokenring`"):
            fabric_of(CALIBRATION, "tokenring")

    def test_hopper_and_later_have_newer_kernels(self) -> None:
        names = ("ampere", "hopper", "blackwell", "cdna3")
        found = [newer(gpu({"bf16": "1TFLOP/s"}, generation=one)) for one in names]
        assert found == [False, True, True, False]


class TestPackagedCalibration:
    def test_every_entry_says_where_its_figures_are_from(self) -> None:
        for entries in (CALIBRATION.gpus, CALIBRATION.software):
            for key, entry in entries.items():
                assert entry.provenance.startswith(("bench/", "default: ")), key

    def test_fitted_entries_name_their_rows(self) -> None:
        fitted = [e for e in CALIBRATION.gpus.values() if e.provenance.startswith("bench/")]
        assert len(fitted) >= 3
        assert all("(" in entry.provenance for entry in fitted)

    def test_shares_are_shares(self) -> None:
        for name, entry in CALIBRATION.gpus.items():
            for field in ("product", "fp8", "fp4", "flash", "batched", "memory", "nvlink"):
                assert 0 < getattr(entry, f"{field}_efficiency") < 1, (name, field)


# What hides where a constant says how much, and what graphs leave out, unless a run says otherwise.
SWITCHED_ON = (
    *("overlaps_tensors", "overlaps_gradients", "overlaps_parameters", "overlaps_stages"),
    *("overlaps_experts", "launched_layers", "launched_experts"),
)
ONE_GPU = ("tp", "pp", "vpp", "cp", "ep", "dp", "micro_batch", "accumulation")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (Shape, dict(causal=1, experts=1, top_k=1, vocab_multiple=128, trainable=1)),
        (
            Mesh,
            dict(
                **dict.fromkeys(ONE_GPU, 1),
                full_share=1,
                instances=1,
                near_context=1,
                again_core_attn=1,
                pipeline_outside=1,
                element_bytes=2,
                gradient_bytes=4,
                gather_bytes=2,
                imbalance=1,
            ),
        ),
        (
            Machine,
            dict(
                scan_efficiency=0.05,
                misaligned_cost=3.0,
                host_bandwidth=25e9,
                host_memory_bandwidth=50e9,
                nvme_bandwidth=1.6e9,
                oversubscription=1,
                forward_ratio=1.0,
            ),
        ),
        (
            Software,
            dict(
                **dict.fromkeys(SWITCHED_ON, 1),
                norm_traffic=1,
                main_bytes=12,
                dummy_gradients=1,
                checkpoint_copies=1,
                logit_bytes=4,
                slack=1.0,
                dispatch_efficiency=1.0,
                sharding_efficiency=1.0,
            ),
        ),
    ],
)
def test_what_a_case_does_not_name_is_switched_off(
    record: type, expected: dict[str, float]
) -> None:
    named = {f.name: f.default for f in fields(record) if f.default not in (MISSING, 0)}
    assert named == expected
