"""Which backend carries which tensors."""

from __future__ import annotations

import pytest

from hpctrain.train import device


def test_host_tensors_need_gloo_beside_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses tensors on the host, which FSDP with CPU offload sums and hands out."""
    assert device.backend() == device.backend(host_tensors=True) == "gloo"
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    assert device.backend() == "nccl"
    assert device.backend(host_tensors=True) == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("local_rank", "visible", "index"), [(0, 8, 0), (7, 8, 7), (3, 1, 0), (0, 1, 0)]
)
def test_a_rank_takes_its_gpu_or_the_only_one(local_rank: int, visible: int, index: int) -> None:
    """`--gpus-per-task` shows each task a single GPU. Ranks that would share one are refused before
    (test_software_agreement.py)."""
    assert device.gpu_index(local_rank, visible) == index
