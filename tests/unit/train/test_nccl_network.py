"""Which network NCCL has chosen, read from a log with the lines of NCCL 2.21 to 2.28."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.train.speed_check import NetworkLog, open_network_log

NEW, OLD = (2, 27, 5), (2, 21, 5)
IB = """\
n1:924:1152 [5] NCCL INFO NET/Plugin: Could not find: libnccl-net.so.
n1:924:1152 [5] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.1.0.7<0>
n1:924:1152 [5] NCCL INFO Using network IB
"""
TCP = """\
n1:924:1152 [5] NCCL INFO NET/IB : No device found.
n1:924:1152 [5] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0>
n1:924:1152 [5] NCCL INFO Using network Socket
"""
EFA = "n1:924:1152 [5] NCCL INFO Using network AWS Libfabric\n"


def opened(environment: dict[str, str], version: tuple[int, ...] = NEW) -> NetworkLog:
    log = open_network_log(version, environment)
    assert log is not None
    return log


@pytest.mark.parametrize(
    ("text", "network"),
    [(IB, "IB"), (TCP, "Socket"), (EFA, "AWS Libfabric"), (IB + TCP, "Socket"), ("", "")],
)
def test_the_network_of_the_newest_communicator(text: str, network: str) -> None:
    environment: dict[str, str] = {}
    log = opened(environment)
    path = Path(environment["NCCL_DEBUG_FILE"])
    path.write_text(text)
    assert log.read() == network
    log.close()
    assert not path.exists() and log.read() == ""


class Nccl:
    def __init__(self, environment: dict[str, str]) -> None:
        self.environment, self.read_again = environment, dict[str, str]()

    def ncclResetDebugInit(self) -> None:
        self.read_again = dict(self.environment)


def test_the_variables_of_the_site_come_back_and_nccl_reads_them() -> None:
    environment = {"NCCL_DEBUG": "WARN", "PATH": "/bin"}
    nccl = Nccl(environment)
    log = opened(environment)
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["NCCL_DEBUG_SUBSYS"] == "INIT,NET"
    assert os.stat(environment["NCCL_DEBUG_FILE"]).st_mode & 0o777 == 0o600
    log.close(nccl)
    assert nccl.read_again == environment == {"NCCL_DEBUG": "WARN", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("environment", "version"),
    [
        ({"NCCL_DEBUG": "INFO"}, NEW),
        ({"NCCL_DEBUG": "trace"}, NEW),
        ({"NCCL_DEBUG_FILE": "/tmp/mine.%h"}, NEW),
        ({"NCCL_DEBUG": "WARN"}, OLD),
    ],
)
def test_no_output_is_taken_from_a_person(
    environment: dict[str, str], version: tuple[int, ...]
) -> None:
    before = dict(environment)
    assert open_network_log(version, environment) is None
    assert environment == before


def test_an_old_nccl_without_output_is_read_and_left_as_it_is() -> None:
    environment: dict[str, str] = {}
    log = opened(environment, OLD)
    nccl = Nccl(environment)
    log.close(nccl)
    assert environment == {} and nccl.read_again == {}
