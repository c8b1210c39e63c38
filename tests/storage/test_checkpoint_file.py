import os
import resource
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.storage import checkpoint_file
from tests.toy import ToyData, toy_semifl, toy_trainer

FEDERATION: dict[str, Any] = {
    "parameters": {}, "buffers": {}, "extra": {}, "server_optimizer": {}, "clients": {},
    "client_states_left_out": False, "version": 0, "states": {},
}  # fmt: skip
OTHERS = {
    "format": checkpoint_file.FORMAT, "algorithm": "A", "seed": 0, "partition": "", "metrics": {}, "total_bytes": 0.0,
    "callbacks": {},
    "model": {"algorithm": "A", "arguments": {}, "settings": {}, "network": {"class_path": None}, "metric_rounds": {}},
}  # fmt: skip


def some_checkpoint(**more: Any) -> checkpoint_file.Checkpoint:
    return {"state_dict": {"w": torch.arange(5.0)}, "round": 3, "federation": FEDERATION, **OTHERS, **more}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    checkpoint_file.save(some_checkpoint(), path)
    with pytest.raises(TypeError, match=r"checkpoint\['bad'\] is a function"):
        checkpoint_file.save(some_checkpoint(bad=lambda: None), path)
    assert checkpoint_file.load(path)["round"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (defaultdict(int, a=1), r"checkpoint\['callbacks'\]\['Own'\] is a defaultdict"),
        ({"pairs": [Pair(1, 2)]}, r"checkpoint\['callbacks'\]\['Own'\]\['pairs'\]\[0\] is a Pair"),
        ({np.int64(3): 1}, r"the key .*3.* of checkpoint\['callbacks'\]\['Own'\] is a int64"),
        ({"a": {np.str_("b"): 1}}, r"the key .*b.* of checkpoint\['callbacks'\]\['Own'\]\['a'\] is a str_"),
        ({Path("x"): 1}, r"the key .*x.* of checkpoint\['callbacks'\]\['Own'\] is a PosixPath"),
        ({"empty": b""}, r"\['empty'\] is a bytes"),
        ({(1, Path("x")): 1}, r"the key .*\[1\] is a PosixPath"),
    ],
)
def test_what_could_not_be_read_back_is_not_saved(tmp_path: Path, state: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        checkpoint_file.save(some_checkpoint(callbacks={"Own": state}), tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())


def test_kill_during_save_never_loses_the_last_good_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    weights = torch.zeros(500_000)
    for pause in (0.01, 0.033, 0.071):
        checkpoint_file.save(some_checkpoint(state_dict={"w": weights + 1}, round=1), path)
        child = os.fork()
        if child == 0:
            for number in range(2, 100_000):
                checkpoint_file.save(some_checkpoint(state_dict={"w": weights + number}, round=number), path)
            os._exit(0)
        time.sleep(pause)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        loaded = checkpoint_file.load(path)
        assert loaded["round"] >= 1
        assert torch.equal(loaded["state_dict"]["w"], weights + loaded["round"])


def test_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    checkpoint_file.save(some_checkpoint(), path)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ValueError, match=r"last\.ckpt is truncated or damaged"):
        checkpoint_file.load(path)


def test_a_changed_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    checkpoint_file.save(some_checkpoint(), path)
    content, refused = path.read_bytes(), 0
    for place in range(3, len(content), 29):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            loaded = checkpoint_file.load(path)
        except ValueError:
            refused += 1
        else:  # between the records
            assert torch.equal(loaded.pop("state_dict")["w"], torch.arange(5.0))
            assert loaded == {name: value for name, value in some_checkpoint().items() if name != "state_dict"}
    assert refused > 20


def test_other_files_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothere"):
        checkpoint_file.load(tmp_path / "nothere.ckpt")
    torch.save({"a": 1}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="is not a checkpoint of a federated run"):
        checkpoint_file.load(tmp_path / "other.ckpt")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"state_dict": {"w": torch.tensor([1.0, torch.nan])}}, "w is not finite"),
        ({"federation": FEDERATION | {"parameters": {"v": torch.tensor(torch.inf)}}}, "v is not finite"),
        ({"round": -5}, "its round is -5"),
        ({"round": 1.5}, r"checkpoint\['round'\] is missing in .*odd\.ckpt, or has another type"),
        ({"callbacks": {3: {}}}, r"checkpoint\['callbacks'\]\[3\] is missing"),
        ({"model": {}}, r"checkpoint\['model'\]\['algorithm'\] is missing"),
        ({"federation": {**FEDERATION, "clients": 5}}, r"checkpoint\['federation'\]\['clients'\] is missing"),
        ({"federation": {**FEDERATION, "server_optimizer": {"w": "x"}}}, r"\['server_optimizer'\]\['w'\] is missing"),
        ({"state_dict": {"w": torch.eye(2).to_sparse()}}, r"checkpoint\['state_dict'\]\['w'\] is missing"),
        ({"format": 1}, "has the format 1"),
    ],
)
def test_other_formats_and_impossible_values_are_refused(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    checkpoint_file.save(some_checkpoint() | wrong, tmp_path / "odd.ckpt")
    with pytest.raises(ValueError, match=message):
        checkpoint_file.load(tmp_path / "odd.ckpt")


class Code:
    """Runs code where pickle reads it."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return Path.touch, (self.made,)


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    torch.save(some_checkpoint(callbacks={"Own": Code(tmp_path / "made")}), tmp_path / "hostile.ckpt")
    with pytest.raises(ValueError, match="nothing in it ran"):
        checkpoint_file.load(tmp_path / "hostile.ckpt")
    assert not (tmp_path / "made").exists()


class SecondRun(FederatedCallback):
    """Starts another run in the same folder while its own run trains."""

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        toy_trainer(Path(trainer.default_root_dir), max_rounds=1, logger=False).fit(toy_semifl(), ToyData())


def test_two_runs_at_the_same_time_do_not_share_a_folder_of_checkpoints(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_rounds": 1, "logger": False}
    with pytest.raises(ValueError, match=r"another run is training now.*checkpoints.*trainer\.default_root_dir"):
        toy_trainer(tmp_path, callbacks=[SecondRun()], **options).fit(toy_semifl(), ToyData())
    toy_trainer(tmp_path, **options).fit(toy_semifl(), ToyData())  # the folder is free after an error


@contextmanager
def small_disk(kind: str, folder: Path) -> Iterator[None]:
    """Inside, 60 kB can be written: to a file, or to a folder."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if kind == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
        elif subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", folder], check=False).returncode:
            pytest.skip("no file system can be mounted here")
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if kind == "tmpfs":
            subprocess.run(["umount", folder], check=False)


@pytest.mark.parametrize("kind", ["limit", "tmpfs"])
def test_a_full_disk_is_named_and_the_older_checkpoint_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "last.ckpt"
    with small_disk(kind, tmp_path):
        checkpoint_file.save(some_checkpoint(), path)
        with pytest.raises(OSError, match=r"(File too large|No space left on device).*last\.ckpt"):
            checkpoint_file.save(some_checkpoint(state_dict={"w": torch.zeros(30_000)}), path)
        assert checkpoint_file.load(path)["round"] == some_checkpoint()["round"]
        assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def written(run: Path, *names: str, stamp: int, **more: Any) -> None:
    """Checkpoints of a run, with a time."""
    for name in names:
        checkpoint_file.save(some_checkpoint(**more), run / f"checkpoints/{name}.ckpt")
        os.utime(run / f"checkpoints/{name}.ckpt", (stamp, stamp))


def test_last_and_best_mean_the_newest_run_that_has_a_checkpoint(tmp_path: Path) -> None:
    runs = [tmp_path / f"lightning_logs/version_{version}" for version in range(4)]
    written(runs[0], "last", stamp=200)  # the clock was set back
    written(runs[1], "last", stamp=100)
    (runs[2] / "checkpoints").mkdir(parents=True)  # killed before its first checkpoint
    (runs[2] / "checkpoints/best.ckpt").touch()
    runs[3].mkdir()
    assert checkpoint_file.find("last", tmp_path) == runs[1] / "checkpoints/last.ckpt"
    written(tmp_path / "own", "last", stamp=300)  # of a logger without versions: the date is all there is
    assert checkpoint_file.find("last", tmp_path) == tmp_path / "own/checkpoints/last.ckpt"
    assert checkpoint_file.find("some/path.ckpt", tmp_path) == Path("some/path.ckpt")


def state_of_best(round_index: int) -> dict[str, Any]:
    return {"callbacks": {"FederatedCheckpoint{}": {"best_value": 0.5, "best_round": round_index}, "Other": [1]}}


def test_best_is_never_that_of_an_older_run(tmp_path: Path) -> None:
    older, newest = (tmp_path / f"lightning_logs/version_{version}" for version in (0, 1))
    written(older, "best", "last", stamp=100, **state_of_best(3))
    written(newest, "last", stamp=200, callbacks={"FederatedCheckpoint{}": {"best_value": None, "best_round": 0}})
    assert checkpoint_file.find("last", tmp_path) == newest / "checkpoints/last.ckpt"
    with pytest.raises(FileNotFoundError, match=r"version_1.*best\.ckpt does not exist: give the folder"):
        checkpoint_file.find("best", tmp_path)


def test_a_resumed_run_that_gets_no_better_has_the_best_checkpoint_of_the_first(tmp_path: Path) -> None:
    never_better = FederatedCheckpoint(monitor="client/trained")  # the same value in each round: best is round 1
    toy_trainer(tmp_path, max_rounds=2, callbacks=never_better).fit(toy_semifl(), ToyData())
    longer = toy_trainer(tmp_path, max_rounds=3, callbacks=FederatedCheckpoint(monitor="client/trained"))
    longer.fit(toy_semifl(), ToyData(), ckpt_path="last")
    assert checkpoint_file.find("best", tmp_path).parent.parent == Path(str(longer.log_dir))
    assert checkpoint_file.load(checkpoint_file.find("best", tmp_path))["round"] == 1
