"""What a killed run leaves is removed by the next run of the folder; what a live run uses stays."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.storage import checkpoint_file, client_store, temporary
from lightning_fedssl.storage.client_store import ClientStore
from lightning_fedssl.trainer import checkpointing
from tests.toy import ToyData, assert_same, toy_semifl, toy_trainer, weights

SETTINGS: dict[str, Any] = {"client_store": "disk", "max_rounds": 4}


def momentum() -> Any:
    """SemiFL whose clients have a state."""
    return toy_semifl(keep_client_optimizer=True)


class KilledWhileItSaves(FederatedCallback):
    """The process ends by SIGKILL in the middle of writing the checkpoint of round 3."""

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        if trainer.round_index == 3:
            torch.save = self.half  # type: ignore[assignment]

    @staticmethod
    def half(value: Any, file: Any) -> None:
        file.write(b"PK half of it")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def killed_run(folder: Path) -> None:
    """A run in a process of its own; it is killed."""
    child = os.fork()
    if child == 0:
        try:
            checkpointing.INSIDE = -1  # clients' states in files
            toy_trainer(folder, **SETTINGS, callbacks=KilledWhileItSaves()).fit(momentum(), ToyData())
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def leftovers(folder: Path) -> list[str]:
    """Temporary files and folders below a folder."""
    found = [*folder.rglob("*.partial"), *folder.rglob("clients-*")]
    return sorted(path.relative_to(folder).as_posix() for path in found)


def test_the_next_run_removes_what_a_kill_left_and_nothing_of_a_live_run(tmp_path: Path) -> None:
    killed_run(tmp_path)
    left = leftovers(tmp_path)
    assert [Path(name).name.split(".")[1] if "." in name else "clients" for name in left] == ["last", "clients"]

    live_folder = tmp_path / "lightning_logs/version_7"
    live = ClientStore()
    live.keep_on_disk(live_folder)
    live.put(0, "optimizer", {"m": torch.ones(3)})
    (live_folder / "checkpoints").mkdir()
    descriptor, partial = temporary.new_partial(live_folder / "checkpoints/last.ckpt")
    of_live = set(leftovers(tmp_path)) - set(left)
    mine = tmp_path / "clients-of-mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("not yours")

    resumed, whole = momentum(), momentum()
    toy_trainer(tmp_path, **SETTINGS).fit(resumed, ToyData(), ckpt_path="last")
    assert not set(left) & set(leftovers(tmp_path))
    assert {*of_live, "clients-of-mine"} <= set(leftovers(tmp_path))
    assert (mine / "notes.txt").is_file()
    assert torch.equal(live.get(0, "optimizer")["m"], torch.ones(3))
    os.close(descriptor)

    toy_trainer(tmp_path / "whole", **SETTINGS).fit(whole, ToyData())
    assert_same(weights(resumed), weights(whole))
    client_store.remove_what_kills_left(tmp_path)
    assert not Path(partial).exists()


class TerminatedAtTheStart(FederatedCallback):
    """The process receives SIGTERM before the first round."""

    def on_fit_start(self, trainer: Any, algorithm: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_before_the_first_round_leaves_no_run_folder(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            toy_trainer(tmp_path, callbacks=TerminatedAtTheStart()).fit(toy_semifl(), ToyData())
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
    assert not list(tmp_path.rglob("version_*"))


def test_a_folder_with_files_of_others_loses_ours_alone(tmp_path: Path) -> None:
    descriptor, folder = temporary.new_clients_folder(tmp_path)
    ours = "3.optimizer.0123456789abcdef.safetensors"
    for name in (ours, "mine.txt"):
        (folder / name).write_text("x")
    client_store.remove_what_kills_left(tmp_path)
    assert (folder / ours).is_file(), "it is locked"
    os.close(descriptor)
    client_store.remove_what_kills_left(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path: Path) -> None:
    def write(file: IO[bytes]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: '.*/model\.json'"):
        checkpoint_file.write_whole(tmp_path / "model.json", write)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_another_process_took_for_a_leftover_is_made_anew(tmp_path: Path, monkeypatch: Any) -> None:
    real, removed = temporary._lock, list[Path]()

    def removed_first(descriptor: int, default: bool = True) -> bool:
        if not removed:
            (path,) = tmp_path.glob(".a.*")
            path.unlink()
            removed.append(path)
        return real(descriptor, default)

    monkeypatch.setattr(temporary, "_lock", removed_first)
    checkpoint_file.write_whole(tmp_path / "a", lambda file: file.write(b"whole"))
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
