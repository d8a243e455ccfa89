"""The software of a launch in `describe`."""

from __future__ import annotations

from hpctrain.records.software import Library, SoftwareFacts, SoftwareRecord
from hpctrain.runs.describe import software_lines

FACTS = SoftwareFacts(
    python="3.12.3",
    torch="2.13.0+cu130",
    cuda_build="13.0",
    driver="580.65.06",
    driver_cuda="13.0",
    nccl="2.28.3",
    gpus=("NVIDIA H100 80GB HBM3",) * 8,
    megatron_core="0.16.1",
    transformer_engine=Library(version="2.9.0"),
    attention=("cuDNN", "flash-attn 2.8.3"),
    apex_wgrad=Library(error="ImportError: libcudart.so.12"),
    triton=Library(version="3.5.0"),
    compiler="/usr/bin/gcc",
    open_files=65536,
)


def test_equal_nodes_are_one_block() -> None:
    (record,) = [SoftwareRecord(epoch=3, nodes=("n0", "n1"), ranks=16, facts=FACTS)]
    assert software_lines([record]) == [
        "Software of launch 3",
        "  python, torch      3.12.3, 2.13.0+cu130",
        "  CUDA               13.0, driver 580.65.06 (up to CUDA 13.0), NCCL 2.28.3",
        "  GPUs of a rank     8 x NVIDIA H100 80GB HBM3",
        "  megatron-core      0.16.1",
        "  TransformerEngine  2.9.0, attention: cuDNN, flash-attn 2.8.3",
        "  Apex wgrad         cannot be imported (ImportError: libcudart.so.12)",
        "  triton, compiler   3.5.0, /usr/bin/gcc",
        "  open files         65,536 at most",
    ]


def test_warnings_about_the_engine_s_library_are_shown() -> None:
    odd = FACTS.model_copy(update={"remarks": ("megatron-core 0.20.0 is not tested",)})
    (record,) = [SoftwareRecord(epoch=1, nodes=("n0",), ranks=1, facts=odd)]
    assert software_lines([record])[-1] == "  warning            megatron-core 0.20.0 is not tested"


def test_other_nodes_are_named() -> None:
    cpu = SoftwareFacts(python="3.11.7", torch="2.13.0+cpu", open_files=1024)
    nodes = tuple(f"n{number}" for number in range(6))
    lines = software_lines(
        [
            SoftwareRecord(epoch=1, nodes=nodes, ranks=6, facts=cpu),
            SoftwareRecord(epoch=1, nodes=("n9",), ranks=1, facts=FACTS),
        ]
    )
    assert lines[1:4] == [
        "  on n0, n1, n2, n3 and 2 more",
        "  python, torch      3.11.7, 2.13.0+cpu",
        "  open files         1,024 at most",
    ]
    assert lines[4] == "  on n9"
    assert software_lines([]) == []
