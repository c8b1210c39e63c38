"""Two ranks, each on a pretend CUDA device, compute what one does. Runs in its process: ``tests/test_cuda_path.py``.

Ranks are forked, as nothing has been computed in this process and the imports need not be made again.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.fabric.strategies import ddp

from tests.pretend_cuda.device import pretend_cuda
from tests.pretend_cuda.federations import fit


def free_port() -> str:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def train(rank: int, ranks: int, port: str, root: Path) -> None:
    """One of several processes that torchrun starts on machines with one device each; rank 0 saves the weights."""
    several: dict[str, Any] = {"trainer__strategy": "ddp", "trainer__num_nodes": ranks} if ranks > 1 else {}
    if ranks > 1:
        os.environ |= {
            "TORCHELASTIC_RUN_ID": "pretended", "RANK": str(rank), "LOCAL_RANK": "0", "GROUP_RANK": str(rank),
            "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
    backend = mock.patch.object(ddp, "_get_default_process_group_backend_for_device", return_value="gloo")
    with backend, pretend_cuda() as device:
        result = fit("semifl", device, root, trainer__precision="64-true", trainer__clients_at_once="auto", **several)
    assert all(round_.uploaded < 3 for round_ in result.rounds) == (ranks > 1)
    if rank == 0:
        torch.save(result.model, root / "weights.pt")


def test_two_ranks_give_the_weights_of_one(tmp_path: Path) -> None:
    forking, port = multiprocessing.get_context("fork"), free_port()
    processes = []
    for ranks in (1, 2):
        (root := tmp_path / str(ranks)).mkdir()
        processes += [forking.Process(target=train, args=(rank, ranks, port, root)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    alone, together = (torch.load(tmp_path / str(ranks) / "weights.pt") for ranks in (1, 2))
    assert alone.keys() == together.keys()
    for name, t in alone.items():
        torch.testing.assert_close(together[name], t, rtol=0, atol=1e-10)
