"""What published inference rows ran on: columns, doubtful columns, recipes of the benchmark."""

from __future__ import annotations

import math
from functools import cache

import pytest

from bench.calibrate_serving import FEWEST_ROWS, LEFT_OUT, unseen_errors
from bench.serving_accuracy import default_table, document
from bench.serving_predictions import Prediction, kind_of, predictions, read_cases
from bench.serving_rows import NotPriced, ServingCase, serving_case, serving_row
from hpctrain.serve.plan.served_model import EIGHT_BLOCKS, EXPANDED, FOUR, weight_bytes
from hpctrain.spec.loader import load_catalogue

INFERENCE_X = "ai-dynamo/aiconfigurator silicon_sample.csv id=x_tp{tp}_ep{ep}_1 | 2026-04-06.csv"


def case(**cells: str) -> ServingCase:
    plain = {
        "source": "somebody",
        "model": "meta-llama/Llama-3.1-70B",
        "weights": "fp8",
        "gpu": "h200_sxm",
        "n_gpus": "8",
        "tp": "8",
        "engine": "vllm",
        "isl": "1024",
        "osl": "1024",
        "load_kind": "concurrency",
        "load_value": "16",
    }
    return serving_case(serving_row(2, plain | cells), load_catalogue())


def layout(found: ServingCase) -> tuple[float, float, float]:
    one = found.pool.layout
    return float(one.tp), float(one.ep), float(one.dp)


def test_a_dense_model_is_split_over_all_its_gpus() -> None:
    found = case()
    assert layout(found) == (8, 1, 1) and found.prefill is None
    assert found.protocol.length_share == 1.0


@pytest.mark.parametrize(
    ("tp", "ep_dp", "expected"),
    [
        ("16", "adp1 mtp4 mep4", (4, 4, 1)),  # tp x ep in the column
        ("64", "adp1 mtp8 mep8", (8, 8, 1)),
        ("1", "adp8 mtp1 mep8", (1, 8, 8)),
        ("8", "adp1 mtp8 mep1", (8, 1, 1)),
        ("8", "adp1 mtp1 mep8", (8, 8, 1)),
    ],
)
def test_doubtful_columns_of_experts(
    tp: str, ep_dp: str, expected: tuple[float, float, float]
) -> None:
    group = int(max(expected))
    ref = INFERENCE_X.format(tp=group, ep=int(expected[1]))
    found = case(
        model="deepseek-ai/DeepSeek-R1",
        gpu="b200_sxm",
        tp=tp,
        ep_dp=ep_dp,
        source_ref=ref,
        n_gpus="",
    )
    assert layout(found) == expected


def test_lengths_of_inference_x_are_drawn_below_the_stated_ones() -> None:
    assert case(source_ref=INFERENCE_X.format(tp=8, ep=1)).protocol.length_share == 0.9


def test_separate_pools_as_the_columns_say() -> None:
    found = case(
        model="deepseek-ai/DeepSeek-V3",
        gpu="gb200",
        engine="trtllm",
        tp="P4 D8",
        ep_dp="P x1 adp1 mep4 D x4 adp1 mep8",
        note="disagg; as published",
    )
    assert found.prefill is not None
    assert (found.prefill.replicas, found.pool.replicas) == (1, 4)
    assert layout(found) == (8, 8, 1)


def test_blank_pools_come_from_the_recipes_of_the_benchmark() -> None:
    found = case(
        model="deepseek-ai/DeepSeek-R1",
        gpu="h200_sxm",
        engine="trtllm",
        tp="P8 D8",
        ep_dp="P x adp1 mep8 D x adp1 mep8",
        load_value="36",  # 4 streams for each of nine decode replicas
        note="disagg; as published",
    )
    assert found.prefill is not None and found.pool.replicas == 9


def test_formats_of_published_checkpoints() -> None:
    blocks = case(model="deepseek-ai/DeepSeek-R1")
    assert blocks.served.expert_operands == EIGHT_BLOCKS
    hopper = case(model="openai/gpt-oss-120b", weights="fp4")
    assert hopper.served.expert_operands == EXPANDED and hopper.served.attention_bytes == 2
    blackwell = case(weights="fp4", gpu="b200_sxm")
    assert blackwell.served.mlp_operands == FOUR


def test_mlperf_rows_run_on_as_few_gpus_as_hold_the_weights() -> None:
    cells = {"source": "MLPerf Inference v4.1", "model": "llama2-70b-99", "weights": "", "tp": ""}
    found = case(**cells, gpu="NVIDIA H100-SXM-80GB", engine="TensorRT 10.2.0", n_gpus="8")
    assert layout(found)[0] == 2 and found.pool.replicas == 4
    assert float(weight_bytes(found.served, found.pool.layout)) < 0.75 * float(found.gpu.memory)
    assert found.engine == "tensorrt-llm-2024"


def test_rows_that_say_too_little_are_refused_with_the_reason() -> None:
    with pytest.raises(NotPriced, match="no GPU named"):
        case(gpu="")
    with pytest.raises(NotPriced, match="is not known"):
        case(model="nobody/Nothing-1B")
    with pytest.raises(NotPriced, match="lengths"):
        kind_of(case(isl="").row)


def test_errors_of_unseen_rows_by_engine_and_of_all() -> None:
    vllm, sglang = case(tpot_mean_ms="10"), case(tpot_mean_ms="10", engine="sglang")
    few = case(tpot_mean_ms="10", engine="trtllm")
    near, far = 0.01 * math.exp(0.1), 0.01 * math.exp(-0.3)
    unseen = [Prediction(vllm, 1.0, 1.0, near, 1.0, True)] * FEWEST_ROWS
    unseen += [Prediction(sglang, 1.0, 1.0, far, 1.0, True)] * (2 * FEWEST_ROWS)
    unseen += [Prediction(few, 1.0, 1.0, 9.0, 1.0, True)] * (FEWEST_ROWS - 1)
    unseen += [Prediction(case(), 1.0, 1.0, 9.0, 1.0, True)]  # says no TPOT
    found = unseen_errors(unseen)
    assert set(found) == {"vllm", "sglang", "other"}
    assert found["vllm"] == pytest.approx(0.14826)
    assert found["sglang"] == found["other"] == pytest.approx(3 * 0.14826)


def test_all_loads_of_a_configuration_are_left_out_together() -> None:
    fold = LEFT_OUT["fold"]
    assert len({fold(case(load_value=n)) for n in ("1", "16", "64")}) == 1
    assert len({fold(case(gpu=gpu)) for gpu in ("h100_sxm", "h200_sxm", "b200_sxm", "gb200")}) > 1
    dumps = ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3")
    assert len({fold(case(model=model)) for model in dumps}) == 1


@cache
def report() -> dict[str, object]:
    try:
        table = default_table()
    except SystemExit:
        pytest.skip("no open table beside the repository")
    cases, refused = read_cases(table)
    return document(predictions(cases), refused)


def test_the_open_table_within_what_docs_say() -> None:
    figures = report()["all"]
    assert isinstance(figures, dict)
    assert figures["refused_as_oom"] == 0
    assert figures["tpot_median_error"] < 0.08
    assert figures["ttft_mean_median_error"] < 0.25
    assert figures["ttft_p99_median_error"] < 0.25
