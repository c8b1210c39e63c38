"""What clients keep: in memory and on disk alike, saved by what has changed, whole whatever happens."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.data.partition.federated_split import FederatedSplit
from lightning_fedssl.schedules import Constant
from lightning_fedssl.state import load_optimizer_state, optimizer_state
from lightning_fedssl.storage import checkpoint_file, client_store
from lightning_fedssl.storage.client_store import ClientStore
from lightning_fedssl.trainer import FederatedTrainer, checkpointing
from lightning_fedssl.trainer.reporting import Reporting
from lightning_fedssl.trainer.run import Status
from tests.algorithms.helpers import METHODS, STATEFUL
from tests.test_resume import StopAfter
from tests.toy import ToyData, assert_same, forked, labeled_clients, toy_fedavg, toy_semifl, toy_trainer, weights


class InFiles(FederatedCallback):
    """Clients' states go into files however small they are; in spawned processes, too."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        checkpointing.INSIDE = -1


@pytest.fixture(autouse=True)
def _limit() -> Any:
    before = checkpointing.INSIDE
    yield
    checkpointing.INSIDE = before


def state_of(value: float, size: int = 5) -> dict[str, Tensor]:
    return {"0.momentum": torch.full((size,), value), "0.step": torch.tensor(value, dtype=torch.float64)}


def stores(tmp_path: Path) -> list[ClientStore]:
    memory, disk = ClientStore(), ClientStore()
    disk.keep_on_disk(tmp_path / "run")
    return [memory, disk]


def assert_same_store(a: ClientStore, b: ClientStore) -> None:
    x, y = a.state_dict(), b.state_dict()
    assert x.keys() == y.keys()
    for client in x:
        assert_same(x[client], y[client])


operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "forget", "replace", "drop"]),
        st.integers(0, 3),
        st.sampled_from(["optimizer", "control"]),
        st.integers(0, 2),
    ),
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(operations)
def test_a_store_on_disk_does_what_one_in_memory_does(tmp_path_factory: Any, operations: Any) -> None:
    both = stores(tmp_path_factory.mktemp("store"))
    for name, client, kind, value in operations:
        for store in both:
            if name in ("put", "forget"):
                store.put(client, kind, state_of(value) if name == "put" else {})
            else:
                store.replace(
                    client, {f"{kind}.{k}": t for k, t in state_of(value).items()} if name == "replace" else {}
                )
    memory, disk = both
    assert_same_store(memory, disk)
    assert len(memory) == len(disk) == len(memory.state_dict())
    assert memory.num_bytes() == disk.num_bytes()
    for kind in ("optimizer", "control"):
        assert memory.having(kind) == disk.having(kind) == [c for c in range(4) if memory.get(c, kind)]
    files = list(disk._folder.glob("*.safetensors")) if disk._folder else []
    assert len(files) == sum(len(disk.having(kind)) for kind in ("optimizer", "control"))


def test_what_is_given_is_a_copy_and_a_change_of_what_was_got_stays_out_of_the_files(tmp_path: Path) -> None:
    given_ = state_of(1.0)
    for store in stores(tmp_path):
        store.put(0, "optimizer", given_)
    disk = store
    given_["0.momentum"].fill_(7)
    assert float(disk.get(0, "optimizer")["0.momentum"][0]) == 1
    disk.get(0, "optimizer")["0.momentum"].fill_(9)
    assert float(disk.get(0, "optimizer")["0.momentum"][0]) == 1


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6, dtype=torch.int64).reshape(2, 3).T,
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(3).expand(2, 3),
        torch.randn(4).bfloat16(),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.tensor(2.5, dtype=torch.float64, requires_grad=True),
    ],
    ids=["transposed", "channels-last", "expanded", "bf16", "bool", "empty", "scalar with gradient"],
)
def test_any_tensor_comes_back_as_it_was(tmp_path: Path, value: Tensor) -> None:
    _, disk = stores(tmp_path)
    disk.put(3, "own", {"a": value, "b": value})
    names = disk.save(tmp_path / "saved")
    again = ClientStore()
    again.load(tmp_path / "saved", names)
    for store in (disk, again):
        for name in "ab":
            found = store.get(3, "own")[name]
            assert torch.equal(found, value)
            assert (found.dtype, found.requires_grad) == (value.dtype, False)


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


@pytest.mark.parametrize("place", [0, 1], ids=["memory", "disk"])
def test_a_save_writes_only_what_has_changed(tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stores(tmp_path)[place]
    for client in range(50):
        store.put(client, "optimizer", state_of(client, 1000))
    folder = tmp_path / "last.clients"
    first = store.save(folder)
    before = inodes(folder)
    made: list[Path] = []

    def noted(real: Any, place: int) -> Any:
        def do(*arguments: Any) -> None:
            made.append(arguments[place])
            real(*arguments)

        return do

    monkeypatch.setattr(client_store, "write_whole", noted(checkpoint_file.write_whole, 0))
    monkeypatch.setattr(os, "link", noted(os.link, 1))
    for client in (7, 11):
        store.put(client, "optimizer", state_of(-client, 1000))
    store.put(12, "optimizer", state_of(12, 1000))  # the same values again
    second = store.save(folder)
    client_store.tidy(folder, second)
    assert len(set(second) - set(first)) == len(made) == 2
    after = inodes(folder)
    assert sorted(after) == sorted(second)
    assert {name: after[name] for name in set(first) & set(second)} == {n: before[n] for n in set(first) & set(second)}
    loaded = ClientStore()
    loaded.load(folder, second)
    assert_same_store(loaded, store)


def test_a_second_checkpoint_shares_its_files_with_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ClientStore()
    for client in range(5):
        store.put(client, "optimizer", state_of(client))
    store.save(tmp_path / "last.clients")
    names = store.save(tmp_path / "best.clients")
    assert inodes(tmp_path / "last.clients") == inodes(tmp_path / "best.clients")

    def refuse(*arguments: Any) -> None:
        raise OSError("no links on this file system")

    monkeypatch.setattr(os, "link", refuse)
    assert store.save(tmp_path / "third.clients") == names
    assert not set(inodes(tmp_path / "third.clients").values()) & set(inodes(tmp_path / "last.clients").values())
    shutil.rmtree(tmp_path / "third.clients")
    store.put(0, "optimizer", state_of(8))
    assert len(store.save(tmp_path / "fourth.clients")) == 5, "what is in memory is written if its file has gone"


def test_a_state_that_stays_the_same_leaves_the_file_of_a_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store and the checkpoint have one file under two names; writing to it could destroy the checkpoint."""
    store, folder = stores(tmp_path)[1], tmp_path / "last.clients"
    store.put(3, "optimizer", state_of(3))
    names = store.save(folder)
    assert (folder / names[0]).stat().st_nlink == 2

    def full(path: Path, content: bytes) -> None:
        path.open("wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    store.put(3, "optimizer", state_of(3))
    with pytest.raises(OSError, match="No space left"):
        store.put(4, "optimizer", state_of(4))
    loaded = ClientStore()
    loaded.load(folder, names)
    assert_same(loaded.get(3, "optimizer"), state_of(3))
    assert store.save(tmp_path / "next.clients")[0] == names[0]
    loaded.load(tmp_path / "next.clients", store.save(tmp_path / "next.clients"))
    assert_same(loaded.get(4, "optimizer"), state_of(4))


def test_files_of_others_stay(tmp_path: Path) -> None:
    store, folder = ClientStore(), tmp_path / "last.clients"
    store.put(0, "optimizer", state_of(1))
    names = store.save(folder)
    stale = ["1.optimizer.0123456789abcdef.safetensors", f".{names[0]}.x7"]
    for name in ("notes.txt", f"{names[0]}.bak", *stale):
        (folder / name).write_text("mine")
    client_store.tidy(folder, names)
    assert sorted(inodes(folder)) == sorted([*names, "notes.txt", f"{names[0]}.bak"])
    client_store.tidy(folder, [])
    assert sorted(inodes(folder)) == sorted(["notes.txt", f"{names[0]}.bak"])


@pytest.mark.parametrize(
    "name", ["../last.ckpt", "0.optimizer.safetensors", "/etc/passwd", "0.a/b.0123456789abcdef.safetensors"]
)
def test_a_list_cannot_name_other_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a client file"):
        ClientStore().load(tmp_path, [name])


def test_copies_are_in_memory_and_outlive_the_store(tmp_path: Path) -> None:
    _, store = stores(tmp_path)
    store.put(1, "control", state_of(4))
    twin, copied, sent = store.clone(), copy.deepcopy(store), pickle.loads(pickle.dumps(store))
    for other in (twin, copied, sent):
        assert_same_store(other, store)
        other.put(1, "control", state_of(5))
        other.put(2, "control", state_of(5))
    assert store.having("control") == [1]
    assert float(store.get(1, "control")["0.step"]) == 4
    folder = store._folder
    assert folder is not None
    assert folder.parent == tmp_path / "run"
    assert len(list(folder.glob("*.safetensors"))) == 1
    del store
    gc.collect()
    assert not folder.exists()
    assert float(copied.get(1, "control")["0.step"]) == 5


def grow(place: str, folder: Path, result: Any) -> None:
    """300 clients of 1 MB; gives the growth of the process after the tenth in MB."""

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

    store, before = ClientStore(), 0.0
    if place == "disk":
        store.keep_on_disk(folder)
    for client in range(300):
        store.put(client, "optimizer", {"m": torch.full((2**18,), float(client))})
        if client == 9:
            before = resident()
    for client in range(300):
        assert float(store.get(client, "optimizer")["m"].sum()) == 2.0**18 * client
    store.save(folder / "last.clients")
    result.send(resident() - before)


@pytest.mark.parametrize(("place", "grows"), [("memory", (150, 2000)), ("disk", (-100, 20))])
def test_memory_grows_with_clients_in_memory_only(tmp_path: Path, place: str, grows: tuple[int, int]) -> None:
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=grow, args=(place, tmp_path, sender))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert grows[0] < receiver.recv() < grows[1]


FORK = multiprocessing.get_context("fork")  # a process that has imported everything


# Checkpoints


def saver(store: ClientStore, round_index: int, weights: Tensor) -> Any:
    """As much of a run as a checkpoint reads."""
    server = SimpleNamespace(parameters={}, buffers={}, momentum={}, version=0, extra={})
    algorithm = torch.nn.Module()
    vars(algorithm).update(
        clients=store, server=server, evaluated_model=lambda: {"w": weights}, hparams={"network": "MLP"},
        network_factory=None, num_classes=3, in_shape=(1, 8, 8), schedule=Constant(),
    )  # fmt: skip
    trainer = SimpleNamespace(clients_per_round=1, precision="32-true", quarantine=None)
    data = ToyData()
    data.split = cast(FederatedSplit, SimpleNamespace(hash=""))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    return SimpleNamespace(
        algorithm=algorithm, hooks=SimpleNamespace(callbacks=[]), seed=0, status=Status(round_index=round_index),
        trainer=trainer, datamodule=data, client_optimizer=optimizer, server_optimizer=optimizer,
        reporting=Reporting(clients_per_round=1),
    )  # fmt: skip


def save_on_and_on(path: Path, place: str, started: Any) -> None:
    """In round r client r mod 7 gets the value r."""
    checkpointing.INSIDE, store = -1, ClientStore()
    if place == "disk":
        store.keep_on_disk(path.parent)
    for round_index in range(100_000):
        store.put(round_index % 7, "optimizer", state_of(round_index, 20_000))
        checkpointing.save(saver(store, round_index, torch.zeros(20_000)), path)
        if round_index == 7:
            started.set()


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_kill_during_save_never_loses_a_client(tmp_path: Path, place: str) -> None:
    """Whatever round the checkpoint is of that is found, its clients' values are of that round."""
    path = tmp_path / "last.ckpt"
    for pause in (0.0, 0.004, 0.011, 0.02, 0.051):
        started = FORK.Event()
        process = FORK.Process(target=save_on_and_on, args=(path, place, started))
        process.start()
        assert started.wait(60)
        time.sleep(pause)
        process.kill()
        process.join()
        loaded = checkpoint_file.load(path)
        store = ClientStore()
        store.load(client_store.files_of(path), loaded["federation"]["client_files"])
        last = loaded["round"]
        assert last >= 7
        for client in range(7):
            assert_same(store.get(client, "optimizer"), state_of(last - (last - client) % 7, 20_000))
    checkpointing.INSIDE = -1
    checkpointing.save(saver(store, last, torch.zeros(1)), path)
    assert len(inodes(client_store.files_of(path))) == 7, "what the kill left behind goes with the next save"


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("places", [("memory", "disk"), ("disk", "memory")], ids=lambda p: f"{p[0]} to {p[1]}")
def test_a_run_with_files_is_the_run_without(tmp_path: Path, name: str, places: tuple[Any, Any]) -> None:
    """Stopped and gone on in the other place, in files; against one run in memory with all in the checkpoint."""
    make, data = METHODS[name]
    whole, first, second = make(), make(), make()
    toy_trainer(tmp_path / "whole").fit(whole, data())
    stopping = [InFiles(), StopAfter(2)]
    toy_trainer(tmp_path / "parts", client_store=places[0], callbacks=stopping).fit(first, data())
    path = checkpoint_file.find("last", tmp_path / "parts")
    assert not checkpoint_file.load(path)["federation"]["clients"]
    assert len(inodes(client_store.files_of(path))) >= len(first.clients) > 0
    resumed = toy_trainer(tmp_path / "parts", client_store=places[1], callbacks=InFiles())
    resumed.fit(second, data(), ckpt_path="last")
    assert_same(weights(second), weights(whole))
    assert_same_store(second.clients, whole.clients)


def test_two_ranks_with_files_are_one(tmp_path: Path) -> None:
    """Two ranks keep files on disk, stop, and go on in memory."""
    common: dict[str, Any] = {"precision": "64-true", "max_rounds": 4, **forked(2)}
    whole, first, second = (toy_fedavg(keep_client_optimizer=True) for _ in range(3))
    toy_trainer(tmp_path / "1", precision="64-true", max_rounds=4).fit(whole, labeled_clients())
    stopping = [InFiles(), StopAfter(2)]
    toy_trainer(tmp_path / "2", callbacks=stopping, client_store="disk", **common).fit(first, labeled_clients())
    assert not list(tmp_path.rglob("clients-*")), "the folders that a run works in go with it"
    toy_trainer(tmp_path / "2", callbacks=InFiles(), **common).fit(second, labeled_clients(), ckpt_path="last")
    path = checkpoint_file.find("last", tmp_path / "2")
    store = ClientStore()
    store.load(client_store.files_of(path), checkpoint_file.load(path)["federation"]["client_files"])
    expected = {**weights(whole), **{f"{c}.{n}": t for c in range(4) for n, t in whole.clients.of(c).items()}}
    found = {**weights(second), **{f"{c}.{n}": t for c in range(4) for n, t in store.of(c).items()}}
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-10)


def trained(tmp_path: Path, **kwargs: Any) -> Path:
    trainer = toy_trainer(tmp_path, **{"callbacks": InFiles()} | kwargs)
    trainer.fit(toy_semifl(), ToyData())
    return Path(str(trainer.log_dir)) / "checkpoints/last.ckpt"


def test_a_checkpoint_that_was_moved_alone_says_what_is_missing(tmp_path: Path) -> None:
    path = trained(tmp_path)
    moved = tmp_path / "elsewhere" / "last.ckpt"
    moved.parent.mkdir()
    shutil.copy(path, moved)
    message = r"ckpt_path: .*elsewhere/last\.ckpt goes with the folder last\.clients beside it.*there is no \d+\.opt"
    with pytest.raises(ValueError, match=message):
        toy_trainer(tmp_path, max_rounds=5).fit(toy_semifl(), ToyData(), ckpt_path=moved)
    toy_trainer(tmp_path, logger=False).test(toy_semifl(), ToyData(), ckpt_path=moved)
    shutil.copytree(path.with_name("last.clients"), moved.with_name("last.clients"))
    toy_trainer(tmp_path, max_rounds=4).fit(toy_semifl(), ToyData(), ckpt_path=moved)
    link = tmp_path / "linked.ckpt"
    link.symlink_to(moved)
    toy_trainer(tmp_path, max_rounds=4).fit(toy_semifl(), ToyData(), ckpt_path=link)


@pytest.mark.parametrize("harm", ["one byte", "cut"])
def test_a_changed_byte_of_a_client_s_file_is_noticed(tmp_path: Path, harm: str) -> None:
    path = trained(tmp_path)
    file = sorted(path.with_name("last.clients").iterdir())[1]
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content if harm == "one byte" else content[:-9])
    with pytest.raises(ValueError, match=rf"{file.name} is truncated or damaged; keep"):
        toy_trainer(tmp_path, max_rounds=5).fit(toy_semifl(), ToyData(), ckpt_path=path)


def test_best_can_be_gone_on_from_and_costs_no_second_copy(tmp_path: Path) -> None:
    """The best round may be an old one: its clients' states are of that round."""

    class Note(FederatedCallback):
        kept: dict[int, Any] = {}  # noqa: RUF012

        def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
            self.kept[trainer.round_index] = copy.deepcopy(algorithm.clients)

    path = trained(
        tmp_path, max_rounds=5, callbacks=[InFiles(), note := Note(), FederatedCheckpoint(best_client_states=True)]
    )
    best = checkpoint_file.load(path.with_name("best.ckpt"))
    store = ClientStore()
    store.load(path.with_name("best.clients"), best["federation"]["client_files"])
    assert_same_store(store, note.kept[best["round"]])
    shared = inodes(path.with_name("best.clients")).items() & inodes(path.with_name("last.clients")).items()
    same = set(best["federation"]["client_files"]) & set(checkpoint_file.load(path)["federation"]["client_files"])
    assert {name for name, _ in shared} == same


def test_a_growing_state_moves_into_files_and_a_run_without_any_takes_them_away(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    class Limit(FederatedCallback):
        def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
            checkpointing.INSIDE = algorithm.clients.num_bytes() - (trainer.round_index == 3)

    toy_trainer(tmp_path, max_rounds=2, logger=False, callbacks=Limit()).fit(toy_semifl(), ToyData())
    assert checkpoint_file.load(folder / "last.ckpt")["federation"]["clients"]
    assert not (folder / "last.clients").exists()
    toy_trainer(tmp_path, max_rounds=3, logger=False, callbacks=Limit()).fit(toy_semifl(), ToyData(), "last")
    assert not checkpoint_file.load(folder / "last.ckpt")["federation"]["clients"]
    assert (folder / "last.clients").is_dir()
    toy_trainer(tmp_path, max_rounds=1, logger=False).fit(toy_fedavg(), labeled_clients())
    assert not (folder / "last.clients").exists()


def test_lightning_s_model_checkpoint_removes_a_checkpoint_with_its_files(tmp_path: Path) -> None:
    own = ModelCheckpoint(tmp_path / "own", filename="{epoch}", save_top_k=1)
    trained(tmp_path, max_rounds=4, callbacks=[InFiles(), own])
    (name,) = [path.stem for path in (tmp_path / "own").glob("*.ckpt")]
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == [f"{name}.ckpt", f"{name}.clients"]


def test_staged_writes_are_seen_by_their_client_alone_until_they_are_committed() -> None:
    store = ClientStore()
    store.put(0, "a", state_of(1.0))
    store.watch_changes()
    with store.stage(0):
        store.put(0, "a", state_of(2.0))
        store.put(5, "b", state_of(3.0))
        assert_same(store.get(0, "a"), state_of(2.0))
    assert_same(store.get(0, "a"), state_of(1.0))
    with store.stage(1):
        store.put(1, "a", state_of(4.0))
        assert_same(store.get(0, "a"), state_of(1.0))
    assert not store.changes()
    store.discard(1)
    store.commit(1)
    store.commit(0)
    assert store.having("a") == [0]
    assert store.having("b") == [5]
    changes = store.changes()
    assert list(changes) == [("a", 0), ("b", 5)]
    other = ClientStore()
    other.apply(changes)
    assert_same_store(other, store)


def test_a_state_that_is_forgotten_is_a_change() -> None:
    store, other = ClientStore(), ClientStore()
    for one in (store, other):
        one.put(0, "a", state_of(1.0))
    store.watch_changes()
    store.put(0, "a", {})
    other.apply(store.changes())
    assert not len(other)


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.client_store is tape: give memory or disk"):
        FederatedTrainer(client_store="tape", accelerator="cpu")  # type: ignore[arg-type]


def test_what_an_optimizer_kept_lies_in_memory_as_its_weight(tmp_path: Path) -> None:
    """A kernel that walks through both side by side would else mix the entries up."""
    weight = torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    optimizer.step()
    _, disk = stores(tmp_path)
    disk.put(0, "optimizer", optimizer_state(optimizer))
    kept = disk.get(0, "optimizer")
    load_optimizer_state(optimizer, kept)
    found = optimizer.state[weight]["momentum_buffer"]
    assert found.stride() == weight.stride()
    assert torch.equal(found, kept["0.momentum_buffer"])


def test_numbers_in_the_state_of_an_own_optimizer_keep_their_values_and_types() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    kept: dict[str, Any] = {"step": 2**40 + 1, "scale": 0.1, "ready": True, "average": torch.ones(2)}
    optimizer.state[weight] = {**kept, "note": "lost"}
    state = optimizer_state(optimizer)
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    load_optimizer_state(optimizer, state)
    loaded = optimizer.state[weight]
    assert torch.equal(loaded.pop("average"), kept.pop("average"))
    assert loaded == kept
    assert [type(value) for value in loaded.values()] == [int, float, bool]
