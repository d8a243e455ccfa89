"""The process that writes a rank's part of checkpoints where CUDA forbids a fork.

A child of fork inherits a CUDA context that it must not touch, and on some drivers crashes for
it. This process is started anew, never uses CUDA, and serves all saves of a launch. It reads jobs
from a pipe and tensors from shared memory (see `host_buffers`). Belongs here: its loop. Does not
belong here: the other end of the pipe, and one job (see `writer`).
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection

from hpctrain.train.launchers.agent_ranks import die_with_parent
from hpctrain.train.stop import LEFT_TO_RANKS


def main(arguments: list[str]) -> None:
    """Serve jobs until the rank closes its end; `arguments`: pipe, memory, id of the rank."""
    for number in LEFT_TO_RANKS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_RANKS)
    pipe, memory, rank_pid = map(int, arguments)
    die_with_parent()
    if os.getppid() != rank_pid:  # the rank ended before the line above
        return
    os.nice(5)  # training goes first
    from hpctrain.train.saving.host_buffers import BufferReader  # imports torch
    from hpctrain.train.saving.writer import run_job

    connection, reader = Connection(pipe), BufferReader(memory)
    while True:
        try:
            size_bytes = int.from_bytes(connection.recv_bytes(), "big")
            data = connection.recv_bytes()
        except EOFError:
            return
        connection.send(run_job(reader.loads(data, size_bytes)))


if __name__ == "__main__":
    main(sys.argv[1:])
