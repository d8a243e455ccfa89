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
