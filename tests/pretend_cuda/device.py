"""Tensors that say ``cuda:0`` and compute on the CPU, and a mode that enforces CUDA's rules on them."""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
BLOCK = 512
"""Bytes that CUDA's allocator rounds up to."""

OWN_CODE = ("lightning_fedssl", "/callbacks/", "/benchmarks/", "/tests/")


class PretendCudaError(RuntimeError):
    """A rule of CUDA was broken."""


class Device:
    """What the pretend device has done so far, and its memory.

    Args:
        memory: Bytes; an allocation beyond raises :class:`torch.OutOfMemoryError`.
        index: The device's number.

    Attributes:
        kernels: Launches by operation; views and uninitialised memory launch none.
        waits: Where the host waited for the device, by line of our own code.
        blocking_uploads: Copies from the CPU that block, by line.
        allocated: Bytes in use, without the memory that graphs keep for their replays.
        pool: Bytes that graphs keep for their replays; they share them.
        peak: Most bytes in use since the last reset.
        reserved: Most bytes in use since the cache was emptied, without the graphs' memory.
        peak_reserved: Most bytes that were reserved since the last reset, with the graphs' memory.
        graphs: Number of kernels of each graph.
        replays: Number of replays.
        capture: The graph that is being captured.
        sync_mode: As ``torch.cuda.set_sync_debug_mode`` sets it.
        failing_allocation: Raise an out-of-memory error at this allocation, counted from 1; 0 for never.
    """

    def __init__(self, memory: int = 64 * 2**30, index: int = 0) -> None:
        self.memory = memory
        self.device = torch.device("cuda", index)
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.blocking_uploads: Counter[str] = Counter()
        self.allocated = self.peak = self.reserved = self.peak_reserved = self.pool = 0
        self.before_capture = 0
        self._pools: dict[int, int] = {}
        self.graphs: list[int] = []
        self.replays = 0
        self.capture: Any = None
        self.sync_mode: int | str = 0
        self.failing_allocation = 0
        self._allocations = itertools.count(1)
        self._serials = itertools.count()
        self._downloads: list[tuple[Tensor, Tensor]] = []

    def wait(self, what: str) -> None:
        """The host waits for all that was launched."""
        if self.capture is not None:
            raise PretendCudaError(f"{what}: operation not permitted when stream is capturing")
        if self.sync_mode in (2, "error"):
            raise PretendCudaError(f"called a synchronizing CUDA operation: {what}")
        self.waits[f"{what} @ {line_of_own_code()}"] += 1
        for target, value in self._downloads:
            target.copy_(value)
        self._downloads.clear()

    def uploaded(self, non_blocking: bool) -> None:
        """A copy from the CPU begins."""
        if self.capture is not None:
            raise PretendCudaError("cannot copy from unpinned CPU memory during CUDA graph capture")
        if not non_blocking:
            if self.sync_mode in (2, "error"):
                raise PretendCudaError("called a synchronizing CUDA operation: a blocking upload")
            self.blocking_uploads[line_of_own_code()] += 1

    def downloaded(self, value: Tensor, target: Tensor, non_blocking: bool) -> None:
        """A copy to the CPU; an asynchronous one has arrived after the next wait only."""
        if non_blocking:
            if self.capture is not None:
                raise PretendCudaError("a download: operation not permitted when stream is capturing")
            self._downloads.append((target, value.clone()))
            fill_with_garbage(target)
        else:
            self.wait("download")
            target.copy_(value)

    def wrap(self, value: Tensor) -> Tensor:
        """A tensor of the device over a value; a storage that is seen for the first time is an allocation."""
        storage: Any = value.untyped_storage()
        if not hasattr(storage, "serial"):
            self._allocate(storage)
        return PretendTensor(value)

    def _allocate(self, storage: Any) -> None:
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        if next(self._allocations) == self.failing_allocation or self._in_use(size) > self.memory:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes (pretend device)")
        storage.serial = next(self._serials)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)
        self._note_reserved()
        weakref.finalize(storage, self._free, size)

    def _in_use(self, more: int) -> int:
        """Bytes in use after an allocation, in which a capture uses the memory that other graphs keep."""
        captured = self.allocated + more - self.before_capture if self.capture is not None else 0
        return self.allocated + more + max(0, self.pool - captured)

    def _note_reserved(self) -> None:
        self.peak_reserved = max(self.peak_reserved, self.reserved + self.pool)

    def captured(self, graph: Any) -> None:
        """A capture is over: the most that it had in use is the graph's for its replays."""
        self._pools[id(graph)] = self.peak - self.before_capture
        weakref.finalize(graph, self._drop_pool, id(graph))
        self._set_pool()

    def _drop_pool(self, graph: int) -> None:
        del self._pools[graph]
        self._set_pool()

    def _set_pool(self) -> None:
        self.pool = max(self._pools.values(), default=0)
        self._note_reserved()

    def _free(self, size: int) -> None:
        self.allocated -= size

    def fail_after(self, allocations: int) -> None:
        """Raise an out-of-memory error at an allocation from now, counted from 1."""
        self.failing_allocation = next(self._allocations) + allocations

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes."""
        return self.memory - self.reserved - self.pool, self.memory

    def total_reserved(self, device: Any = None) -> int:
        """Bytes that nobody else can have."""
        return self.reserved + self.pool

    def empty_cache(self) -> None:
        """Give back memory that is reserved and not in use."""
        self.reserved = self.allocated

    def reset_peak(self, device: Any = None) -> None:
        """Measure the peaks from now on."""
        self.peak, self.peak_reserved = self.allocated, self.total_reserved()


current = Device()
"""The device of this process."""


def line_of_own_code() -> str:
    """The innermost line of this project that is running, outside this tool; empty in a backward pass."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "pretend_cuda/" not in name.replace("pretend_cuda/device_", "") and any(part in name for part in OWN_CODE):
            return f"{name.rpartition('/')[2]}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return ""


def fill_with_garbage(tensor: Tensor) -> None:
    """What memory may hold that nobody has written: NaN, or -1."""
    storage = tensor.untyped_storage()
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)


class PretendTensor(Tensor):
    """A tensor on the pretend device; the values are those of a CPU tensor."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> PretendTensor:
        made = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype,
            layout=value.layout, device=current.device, requires_grad=False,
        )  # fmt: skip
        made.value = value
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendTensor({self.value!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                copy: Tensor = self.clone()
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, self.requires_grad)
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().cpu().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")


WAITING = {
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select", "nonzero",
    "unique_consecutive", "unique_dim", "unique_dim_consecutive",
}  # fmt: skip
"""Operations whose result the host needs at once, or whose size depends on values."""

INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
NO_KERNEL = {
    "detach", "alias", "lift_fresh", "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided",
    "is_same_size", "is_pinned", "_unsafe_view",
}  # fmt: skip
UNDECLARED_VIEWS = {"aten::unsafe_split", "aten::unsafe_split_with_sizes"}
"""Operations whose results share the memory of their argument, although their schema does not say so."""

NO_SCALARS = {"stack", "cat", "index_select", "gather", "scatter", "mm"}
"""Operations that take no tensor of the CPU, not even one without dimensions."""

UNSUPPORTED = {"set_", "resize_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"}
"""They would change the shape of the value and not that of the tensor."""


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation: on the CPU's values if it is the device's, after a check of the rules.

    Long because the order of the checks is CUDA's: what copies between devices is no mixture of devices.
    """
    tensors = list(_tensors((*args, *kwargs.values())))
    own = [t for t in tensors if type(t) is PretendTensor]
    asked = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if not own and (asked is None or asked.type != "cuda"):
        return func(*args, **kwargs)
    namespace, _, name = func._schema.name.partition("::")
    if name == "_to_copy":
        return _to_copy(func, args, kwargs, asked or args[0].device)
    if name == "copy_" and (type(args[0]), type(args[1])) != (PretendTensor, PretendTensor):
        return _copy(args[0], args[1], bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking")))
    if name == "_foreach_copy_" and len(own) < len(tensors):
        for target, source in zip(args[0], args[1], strict=True):
            target.copy_(source, *args[2:], **kwargs)
        return None
    if asked is not None and asked.type == "cpu":  # zeros_like(t, device="cpu") and the like read no value
        return func(*map(_value, args), **kwargs)
    if own and len(own) < len(tensors):
        _check_devices(func, name, args, [t for t in tensors if type(t) is not PretendTensor])
    if _host_waits(func, name, args, kwargs):
        current.wait(name)
    if name in UNSUPPORTED:
        raise NotImplementedError(f"the pretend CUDA device does not know {func}")
    if asked is not None:
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"} | {"device": CPU}
    is_view = _is_view(func)
    if not is_view and name not in NO_KERNEL and namespace != "profiler":
        current.kernels[name] += 1
    call = args, kwargs, [_value(a) for a in args], {key: _value(value) for key, value in kwargs.items()}
    if current.capture is not None:
        current.capture.read(tensors)
    result = func(*call[2], **call[3])
    wrapped = _wrap(result, {id(t.value): t for t in own}, is_view)
    if current.capture is not None:
        current.capture.note(func, call[2], call[3], result, is_view or name in NO_KERNEL, is_view)
    return wrapped


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors of an operation's arguments; lists are one level deep."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))


def _value(argument: Any) -> Any:
    """The argument with CPU tensors instead of the device's."""
    if type(argument) is PretendTensor:
        return argument.value
    if isinstance(argument, (list, tuple)):
        return [_value(item) for item in argument]
    return argument


def _wrap(result: Any, known: dict[int, Tensor], is_view: bool) -> Any:
    """The result as tensors of the device; what was changed in place is the argument itself."""
    if isinstance(result, Tensor):
        if id(result) in known:
            return known[id(result)]
        return PretendTensor(result) if is_view else current.wrap(result)
    if isinstance(result, (list, tuple)):
        return type(result)(_wrap(item, known, is_view) for item in result)
    return result


_views: dict[Any, bool] = {}


def _is_view(func: Any) -> bool:
    if func not in _views:
        returns = [result.alias_info for result in func._schema.returns]
        declared = any(info is not None and not info.is_write for info in returns)
        _views[func] = declared or func._schema.name in UNDECLARED_VIEWS
    return _views[func]


def _to_copy(func: Any, args: Sequence[Any], kwargs: dict[str, Any], to: torch.device) -> Tensor:
    """A copy to a device, or to another type or layout on the same."""
    source, non_blocking = args[0], bool(kwargs.get("non_blocking"))
    rest = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking", "pin_memory")}
    if type(source) is not PretendTensor:
        current.uploaded(non_blocking)
        return current.wrap(func(source, **rest).clone())
    if to.type == "cpu":
        copy = func(source.value, **rest)
        target = copy.clone()
        current.downloaded(copy, target, non_blocking)
        return cast(Tensor, target)
    result = func(source.value, **rest)
    current.kernels["_to_copy"] += 1
    if current.capture is not None:
        current.capture.read([source])
    wrapped = current.wrap(result)
    if current.capture is not None:
        current.capture.note(func, [source.value], rest, result, False, False)
    return wrapped


def _copy(target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    """A copy into memory that is there, at least one side of it on the CPU."""
    if isinstance(target, PretendTensor):
        current.uploaded(non_blocking)
        target.value.copy_(source)
    else:
        assert isinstance(source, PretendTensor)
        current.downloaded(source.value, target, non_blocking)
    return target


def _check_devices(func: Any, name: str, args: Sequence[Any], foreign: list[Tensor]) -> None:
    """Refuse tensors of the CPU beside the device's; an index is copied, and the host waits for that."""
    large = [t for t in foreign if t.dim()]
    if name in INDEXING and all(any(t is index for index in args[1]) for t in large):
        if large:
            current.wait("an index on the CPU")
    elif large or name in NO_SCALARS or "foreach" in name or "fused" in name:
        shapes = [tuple(t.shape) for t in foreign]
        raise PretendCudaError(
            f"Expected all tensors to be on the same device: {func} got cpu {shapes} and cuda @ {line_of_own_code()}"
        )


def _host_waits(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if name in WAITING:
        return True
    if name == "repeat_interleave":
        return func._overloadname == "Tensor" and kwargs.get("output_size") is None
    if name not in INDEXING or not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
        return False
    fills = len(args) > 2 and args[2].numel() == 1 and not any(args[3:4])  # CUDA then fills by the mask
    return not fills


class PretendMode(TorchDispatchMode):
    """Directs operations that make tensors to the device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and the wrapper that keeps the compiler out takes 15 % of the time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class _Stream:
    """All work is done at once, so streams need no order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.stream_id, self.cuda_stream = current.device, 0, 0

    def wait_stream(self, other: Any) -> None:
        return

    wait_event = record_event = wait_stream

    def synchronize(self) -> None:
        current.wait("Stream.synchronize")


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def record(self, stream: Any = None) -> None:
        return

    wait = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        current.wait("Event.synchronize")


def _functions(device: Device) -> dict[str, Any]:
    """Those of ``torch.cuda`` that the driver would answer."""
    from tests.pretend_cuda.graphs import CudaGraph, capturing

    generator = torch.Generator()
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True, "is_initialized": lambda: True, "init": lambda: None, "_lazy_init": lambda: None,
        "device_count": lambda: 1, "current_device": lambda: device.device.index, "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (9, 0), "get_device_name": lambda device=None: "pretend",
        "get_device_properties": lambda device=None: SimpleNamespace(name="pretend", total_memory=current.memory),
        "is_bf16_supported": lambda *_, **__: True, "synchronize": lambda d=None: device.wait("cuda.synchronize"),
        "memory_allocated": lambda d=None: device.allocated, "max_memory_allocated": lambda d=None: device.peak,
        "memory_reserved": device.total_reserved, "max_memory_reserved": lambda d=None: device.peak_reserved,
        "reset_peak_memory_stats": device.reset_peak, "mem_get_info": device.mem_get_info,
        "empty_cache": device.empty_cache, "current_stream": _Stream, "default_stream": _Stream,
        "stream": lambda stream: contextlib.nullcontext(), "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: device.capture is not None,
        "get_sync_debug_mode": lambda: device.sync_mode,
        "set_sync_debug_mode": lambda mode: setattr(device, "sync_mode", mode),
        "get_rng_state": lambda d=None: generator.get_state(), "manual_seed": generator.manual_seed,
        "set_rng_state": lambda state, d=None: generator.set_state(state), "manual_seed_all": generator.manual_seed,
    }  # fmt: skip
    return {
        **answers, "Stream": _Stream, "Event": _Event, "CUDAGraph": CudaGraph, "graph": capturing,
        "default_generators": (generator,),
    }  # fmt: skip


def _leave_imports_alone() -> None:
    """A collection of all that is imported takes half a second, and every capture of a graph makes one.

    Runs import more, so this is repeated before each.
    """
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # libraries report objects that outlive the interpreter


@contextlib.contextmanager
def pretend_cuda(memory: int = 64 * 2**30, index: int = 0) -> Iterator[Device]:
    """Inside, PyTorch has a CUDA device.

    Args:
        memory: Its bytes.
        index: Its number.
    """
    global current
    current = device = Device(memory, index)
    _leave_imports_alone()
    future = torch.__future__
    replaces = future.get_overwrite_module_params_on_conversion()
    with contextlib.ExitStack() as stack:
        for name, answer in _functions(device).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        known: list[list[Any]] = [torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types]
        for types in known:
            if PretendTensor not in types:
                types.append(PretendTensor)
                stack.callback(types.remove, PretendTensor)
        future.set_overwrite_module_params_on_conversion(True)
        stack.callback(future.set_overwrite_module_params_on_conversion, replaces)
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(PretendMode())  # type: ignore[no-untyped-call]
        yield device
