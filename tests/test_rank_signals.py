"""One SIGINT or SIGTERM to a run with forked ranks: it ends after its round, with all its processes, and resumes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint, StaticBatchNorm
from lightning_fedssl.distributed.rank_watch import is_alive
from lightning_fedssl.storage import checkpoint_file
from tests.forked_command import ForkedCommand, own_environment
from tests.toy import ToyData, assert_same, toy_semifl, toy_trainer, weights

SCRIPT = """
import os
import sys
from pathlib import Path
from tests.test_rank_signals import callbacks
from tests.toy import ToyData, toy_semifl, toy_trainer
os.setsid()
trainer = toy_trainer(
    Path(sys.argv[-1]), max_rounds=1000, strategy="forked", devices=2, enable_progress_bar=True, callbacks=callbacks(),
    logger=False,
)
trainer.fit(toy_semifl(), ToyData())
print("ended in order")
"""


def callbacks() -> list[FederatedCallback]:
    """Checkpoints that are due in no round: the last one is written because the run is stopped."""
    return [StaticBatchNorm(source="moments"), FederatedCheckpoint(every_n_rounds=1000)]


def to_rank_0(process: subprocess.Popen[str], number: int) -> None:
    """As ``kill`` does."""
    process.send_signal(number)


def to_rank_1(process: subprocess.Popen[str], number: int) -> None:
    """As a program does that ends single processes."""
    (child,) = children(process)
    os.kill(child, number)


def to_all(process: subprocess.Popen[str], number: int) -> None:
    """As Ctrl-C in a terminal does, and the end of a job."""
    os.killpg(process.pid, number)


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


class StopAfter(FederatedCallback):
    """Ends a run after a round."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        trainer.should_stop = trainer.round_index == self.last


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux")
@pytest.mark.parametrize(
    ("send", "number"), [(to_rank_0, signal.SIGTERM), (to_all, signal.SIGINT), (to_rank_1, signal.SIGTERM)]
)
def test_a_signal_ends_all_ranks_and_the_run_resumes(
    tmp_path: Path, send: Callable[[subprocess.Popen[str], int], None], number: int
) -> None:
    process = ForkedCommand(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=Path(__file__).parent.parent, env={**own_environment(), "PYTHONPATH": "."},
    )  # fmt: skip
    try:
        ranks = [process.pid, *signalled_in_round_3(process, send, number)]
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert len(ranks) == 2
    assert process.returncode == 0, output
    assert "ended in order" in output
    assert not any(is_alive(pid) for pid in ranks)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nothing is left of its session
    (stopped,) = map(int, re.findall(r"stopped after round (\d+); resume with --ckpt_path last", output))
    (path,) = tmp_path.rglob("last.ckpt")
    assert checkpoint_file.load(path)["round"] == stopped >= 3

    resumed, whole = toy_semifl(), toy_semifl()
    for algorithm, ckpt_path, ranks_given in ((resumed, path, {"strategy": "forked", "devices": 2}), (whole, None, {})):
        trainer = toy_trainer(
            tmp_path / "later", max_rounds=1000, logger=False, callbacks=[*callbacks(), StopAfter(stopped + 1)],
            **ranks_given,
        )  # fmt: skip
        trainer.fit(algorithm, ToyData(), ckpt_path=ckpt_path)
        assert trainer.round_index == stopped + 1
    assert_same(weights(resumed), weights(whole))


class Terminated(FederatedCallback):
    """Sends SIGTERM to rank 1 alone before the first round."""

    def on_train_start(self, trainer: Any, algorithm: Any) -> None:
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux")
def test_a_signal_to_one_rank_before_the_first_round_leaves_no_folder(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, strategy="forked", devices=2, callbacks=Terminated())
    with pytest.raises(SystemExit) as ended:
        trainer.fit(toy_semifl(), ToyData())
    assert ended.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.rglob("version_*")) == []


def signalled_in_round_3(
    process: subprocess.Popen[str], send: Callable[[subprocess.Popen[str], int], None], number: int
) -> list[int]:
    """Send the signal after round 3, and return the processes that the process has forked."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("round 3/"):
            forked = children(process)
            send(process, number)
            return forked
    raise AssertionError("there was no round 3")
