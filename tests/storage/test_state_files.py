"""States of clients in files of their own beside ``last.ckpt``."""

from __future__ import annotations

import io
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.algorithms import SemiFL
from lightning_fedssl.storage import checkpoint_file, state_files
from lightning_fedssl.storage.files import write_synced
from tests.toy import ToyData, assert_same, toy_semifl, toy_trainer, weights
from tests.trainer.helpers import StopAfter


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_file, "LARGE", 0)


def run(folder: Path, rounds: int = 4, **more: Any) -> SemiFL:
    algorithm: SemiFL = toy_semifl()
    ckpt_path = more.pop("ckpt_path", None)
    trainer = toy_trainer(folder, max_rounds=rounds, clients_per_round=2, logger=False, **more)
    trainer.fit(algorithm, ToyData(), ckpt_path=ckpt_path)
    return algorithm


def test_a_round_writes_the_states_that_it_changed_and_a_resumed_run_has_its_bits(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    parts, written = tmp_path / "parts", []
    for stop in (1, 2, 3, 4):
        last = run(parts, callbacks=StopAfter(stop), ckpt_path="last" if stop > 1 else None)
        folder = parts / "checkpoints" / "last.states"
        written.append({path.name: path.stat().st_mtime_ns for path in folder.iterdir()})
    assert_same(weights(last), weights(whole))
    states, kept = last.clients.state_dict(), whole.clients.state_dict()
    assert states.keys() == kept.keys()
    for client, state in kept.items():
        assert_same(states[client], state)
    for before, after in itertools.pairwise(written):
        changed = after.keys() - before.keys()
        assert 0 < len(changed) <= 2 + 1  # the drawn clients and the server
        assert all(after[name] == before[name] for name in after.keys() & before.keys())
    assert len(written[-1]) == len(kept) + 1
    light = torch.load(folder.with_suffix(".ckpt"), weights_only=True)["federation"]
    assert light["clients"] == light["server_optimizer"] == {}


def test_states_that_are_not_there_begin_anew_only_if_that_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, callbacks=StopAfter(2))
    shutil.rmtree(tmp_path / "checkpoints" / "last.states")
    with pytest.raises(ValueError, match=r"lacks the states .* --trainer\.allow_changed true"):
        run(tmp_path, ckpt_path="last")
    assert len(run(tmp_path, ckpt_path="last", allow_changed=True).clients) > 0
    assert "going on without states" in caplog.text


def test_a_changed_state_is_noticed(tmp_path: Path) -> None:
    run(tmp_path, callbacks=StopAfter(2))
    file = next((tmp_path / "checkpoints" / "last.states").iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match=rf"{file.name} was changed or damaged"):
        run(tmp_path, ckpt_path="last")


@pytest.mark.parametrize("content", [[1], {"a": 1}, None])
def test_a_file_of_states_that_holds_something_else_is_refused(content: object, tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(content, stream)
    written = stream.getvalue() if content else b"no file of torch"
    path = tmp_path / f"0-{state_files._digest(written)}.pt"
    path.write_bytes(written)
    with pytest.raises(ValueError, match=path.name):
        state_files.read(path)


def test_a_folder_that_a_disk_adds_stays(tmp_path: Path) -> None:
    (tmp_path / "@eaDir").mkdir()
    (tmp_path / "1-a.pt").touch()
    (tmp_path / "2-b.pt").touch()
    state_files.keep(tmp_path, ["2-b.pt"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2-b.pt", "@eaDir"]


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one_with_its_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tmp_path, callbacks=StopAfter(2))
    expected = first.clients.state_dict()

    def full(path: Path, write: Any) -> None:
        if path.name == "last.ckpt":
            raise OSError(28, "No space left on device")
        write_synced(path, write)

    monkeypatch.setattr(checkpoint_file, "write_synced", full)
    with pytest.raises(OSError, match="No space"):
        run(tmp_path, ckpt_path="last")
    path = tmp_path / "checkpoints" / "last.ckpt"
    loaded = checkpoint_file.load(path)
    assert checkpoint_file.read_states(loaded, path) == []
    for client, state in expected.items():
        assert_same(loaded["federation"]["clients"][client], state)


def test_a_file_is_written_where_no_folder_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows; elsewhere the folder's entry is synced, too."""

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("lightning_fedssl.storage.files.os.open", refuse)
    write_synced(tmp_path / "file", lambda file: file.write(b"content"))
    assert (tmp_path / "file").read_bytes() == b"content"
