"""A seeded fault for every rule of the pretend CUDA device. Runs in its process: see ``tests/test_pretend_cuda.py``."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.pretend_cuda.device import Device, PretendCudaError, PretendTensor, pretend_cuda


@pytest.fixture
def device() -> Iterator[Device]:
    with pretend_cuda(memory=2**24) as now:
        yield now


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, device="cuda")


def test_numbers_are_the_cpu_s_and_tensors_say_cuda(device: Device) -> None:
    """Convolution, batch norm, bfloat16, backward, a fused optimizer and vmap."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    images, labels = torch.rand(5, 1, 8, 8), torch.tensor([0, 1, 2, 1, 0])
    results = []
    for place in ("cpu", "cuda"):
        copied = copy.deepcopy(network).to(place)
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1, momentum=0.9, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(copied(images.to(place)), labels.to(place)).backward()
            torch.nn.utils.clip_grad_norm_(copied.parameters(), 1.0, foreach=True)
            optimizer.step()
        each = torch.func.vmap(lambda x: x.square().sum())(copied[0].weight)
        with torch.autocast(place, dtype=torch.bfloat16):
            low = copied(images.to(place))
        assert low.dtype == torch.bfloat16
        assert low.device.type == place
        results.append([t.detach().cpu() for t in (*copied.state_dict().values(), each, low)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert isinstance(ones(2), PretendTensor)


def test_a_tensor_is_made_where_it_is_asked_for(device: Device) -> None:
    assert type(torch.zeros_like(ones(3), device="cpu")) is Tensor
    assert type(ones(3).new_ones(2, device="cpu")) is Tensor
    assert torch.zeros_like(torch.ones(3), device="cuda").device == device.device
    assert not device.waits


def test_devices_do_not_mix(device: Device) -> None:
    with pytest.raises(PretendCudaError, match="same device"):
        ones(3) + torch.ones(3)
    with pytest.raises(PretendCudaError, match="same device"):
        torch.stack([ones(3), torch.ones(3)])
    with pytest.raises(PretendCudaError, match="same device"):
        torch._foreach_add_([ones(3)], [torch.tensor(1.0)])
    assert (ones(3) + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]  # a number may come from the host


def waits(device: Device, what: Callable[[], object]) -> int:
    before = device.waits.total()
    what()
    return device.waits.total() - before


def test_waits_are_counted_and_refused(device: Device) -> None:
    t, mask = ones(4), ones(4) > 0
    index, room = torch.tensor([1, 2]), torch.empty(4)
    waiting: list[Callable[[], object]] = [
        t.sum().item, lambda: bool(t[0]), t.cpu, mask.nonzero, lambda: t[mask], lambda: t[index], lambda: room.copy_(t),
        torch.cuda.synchronize, lambda: torch.unique(t), lambda: torch.equal(t, t), t.tolist,
        lambda: t.repeat_interleave(ones(4).long()),
    ]  # fmt: skip
    for what in waiting:
        assert waits(device, what) == 1
    free: list[Callable[[], object]] = [
        lambda: t.to("cpu", non_blocking=True), lambda: torch.where(mask, t, 0), lambda: t[:2], lambda: t[index.cuda()],
        lambda: t.masked_fill_(mask, 2.0), lambda: t.repeat_interleave(2), lambda: torch.zeros(3, device="cuda"),
    ]  # fmt: skip
    for what in free:
        assert waits(device, what) == 0
    assert all("device_rules.py" in place for place in device.waits)
    torch.cuda.set_sync_debug_mode("error")
    for what in waiting:
        with pytest.raises(PretendCudaError, match="synchronizing"):
            what()


def test_uploads_that_block_are_counted(device: Device) -> None:
    torch.ones(3).to("cuda", non_blocking=True)
    ones(3).copy_(torch.ones(3), non_blocking=True)
    assert not device.blocking_uploads
    torch.ones(3).to("cuda")
    ones(3).copy_(torch.ones(3))
    torch.tensor([1.0], device="cuda")
    ones(3).new_tensor([1.0])
    assert device.blocking_uploads.total() == 4


def test_an_asynchronous_download_has_arrived_after_a_wait(device: Device) -> None:
    early = ones(3).to("cpu", non_blocking=True)
    assert early.isnan().all()
    torch.cuda.synchronize()
    assert early.tolist() == [1.0, 1.0, 1.0]


def test_memory_is_counted_and_runs_out(device: Device) -> None:
    gc.collect()
    before = device.allocated
    t = ones(1000)
    view = t[10:]
    assert device.allocated - before == 4096
    del t
    assert device.allocated - before == 4096
    del view
    assert device.allocated == before
    assert device.peak - before == 4096
    with pytest.raises(torch.OutOfMemoryError):
        ones(2**24)
    device.fail_after(2)
    ones(1)
    with pytest.raises(torch.OutOfMemoryError):
        ones(1)


# Graphs


def graph_of(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_a_capture_writes_nothing_and_a_replay_does(device: Device) -> None:
    total, x = ones(3), ones(3)
    graph = graph_of(lambda: total.add_((x * 2).relu()[:3]))
    assert total.tolist() == [1.0, 1.0, 1.0]
    x.fill_(2.0)
    for _ in range(2):
        graph.replay()
    assert total.tolist() == [9.0, 9.0, 9.0]
    assert device.graphs == [3]
    assert device.replays == 2


def test_numbers_of_the_host_stay_as_they_were(device: Device) -> None:
    number, tensor, total = [1.0], torch.tensor(10.0), ones(1)
    graph = graph_of(lambda: total.add_(number[0]).add_(tensor))
    number[0] = 5.0
    tensor.fill_(50.0)
    graph.replay()
    assert total.tolist() == [12.0]


def test_what_a_graph_allocated_is_garbage_after_capture_and_replay(device: Device) -> None:
    x, outputs = ones(3), []
    graph = graph_of(lambda: outputs.append(x * 2))
    assert outputs[0].isnan().all().item()
    graph.replay()
    assert outputs[0].isnan().all().item()


def test_a_graph_whose_input_was_freed_fails(device: Device) -> None:
    inputs, total = [ones(3)], ones(3)
    graph = graph_of(lambda: total.add_(inputs[0]))
    graph.replay()
    inputs.clear()
    with pytest.raises(PretendCudaError, match=r"freed after its capture @ device_rules.py"):
        graph.replay()


@pytest.mark.parametrize(
    "what",
    [lambda x: x.sum().item(), lambda x: x + torch.ones(3).cuda(), lambda x: x[torch.tensor([0])], lambda x: x.cpu(),
     lambda x: x.copy_(torch.ones(3))],
    ids=["host read", "upload", "cpu index", "download", "copy"],
)  # fmt: skip
def test_a_capture_refuses_the_host(device: Device, what: Callable[[Tensor], object]) -> None:
    x = ones(3)
    with pytest.raises(PretendCudaError, match="captur"):
        graph_of(lambda: what(x))
    assert device.capture is None


def test_graphs_keep_memory_for_their_replays(device: Device) -> None:
    x = ones(1000)
    graph = graph_of(lambda: (x * 2 + 1) * 3)
    assert device.pool >= 4096
    free, total = torch.cuda.mem_get_info()
    assert total - free == device.reserved + device.pool
    del graph
    assert device.pool == 0


def test_outside_the_context_nothing_is_left() -> None:
    with pretend_cuda():
        pass
    assert type(torch.ones(2)) is Tensor
    assert torch.cuda.CUDAGraph.__module__ == "torch.cuda.graphs"
