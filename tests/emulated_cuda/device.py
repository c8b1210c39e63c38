"""Tensors on an emulated device, and the mode that makes them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda", 0)
WAITING = {
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select", "nonzero",
    "unique_consecutive", "unique_dim", "unique_dim_consecutive",
}  # fmt: skip
"""Operations whose result the host needs at once."""

INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
UNDECLARED_VIEWS = {"aten::unsafe_split", "aten::unsafe_split_with_sizes"}
NO_SCALARS = {"stack", "cat", "index_select", "gather", "scatter", "mm"}
"""Operations that take no tensor of the CPU, not even one without dimensions."""

UNSUPPORTED = {"set_", "resize_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"}
"""They would change the shape of the value and not that of the tensor."""

_downloads: list[tuple[Tensor, Tensor]] = []
_graphs: list[Graph] = []
"""The graph that is being recorded."""

_sync_mode = "default"


class DeviceError(RuntimeError):
    """A rule of CUDA was broken."""


def wait(*_: Any) -> None:
    """The host waits for all that was launched: asynchronous downloads arrive.

    Raises:
        DeviceError: While a graph is recorded.
    """
    if _graphs:
        raise DeviceError("operation not permitted when stream is capturing")
    if _sync_mode == "warn":
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
    for target, value in _downloads:
        target.copy_(value)
    _downloads.clear()


class EmulatedTensor(Tensor):
    """A tensor on the device; the values are those of a CPU tensor."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> EmulatedTensor:
        made = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype,
            layout=value.layout, device=DEVICE, requires_grad=False,
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
        return f"EmulatedTensor({self.value!r})"

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


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation: on the CPU's values if it is the device's, after a check of the rules."""
    tensors = list(_tensors((*args, *kwargs.values())))
    own = [t for t in tensors if type(t) is EmulatedTensor]
    asked = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if not own and (asked is None or asked.type != "cuda"):
        return func(*args, **kwargs)
    name = func._schema.name.partition("::")[2]
    if name == "_to_copy" and not (own and (asked is None or asked.type == "cuda")):
        return _to_copy(func, args, kwargs, asked or args[0].device)
    if name == "copy_" and (type(args[0]), type(args[1])) != (EmulatedTensor, EmulatedTensor):
        return _copy(args[0], args[1], bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking")))
    if name == "_foreach_copy_" and len(own) < len(tensors):
        for target, source in zip(args[0], args[1], strict=True):
            target.copy_(source, *args[2:], **kwargs)
        return None
    if asked is not None and asked.type == "cpu":  # zeros_like(t, device="cpu") and the like read no value
        return func(*map(_value, args), **kwargs)
    if own and len(own) < len(tensors):
        _check_devices(func, name, args, [t for t in tensors if type(t) is not EmulatedTensor])
    if name in WAITING or (name in INDEXING and any(map(_is_unknown, args[1]))):
        wait()
    if name in UNSUPPORTED:
        raise NotImplementedError(f"the emulated CUDA device does not know {func}")
    if asked is not None:
        kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"} | {"device": torch.device("cpu")}
    given = [_value(argument) for argument in args], {key: _value(value) for key, value in kwargs.items()}
    if _graphs:
        return _wrap(_graphs[0].add(func, *given), {id(t.value): t for t in own})
    return _wrap(func(*given[0], **given[1]), {id(t.value): t for t in own})


def _is_unknown(index: Tensor | None) -> bool:
    """Whether the host must wait before it indexes: for a mask, or for an index that it has itself."""
    return index is not None and (index.dtype == torch.bool or type(index) is not EmulatedTensor)


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors of an operation's arguments; lists are one level deep."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))


def _value(argument: Any) -> Any:
    """The argument with CPU tensors instead of the device's."""
    if type(argument) is EmulatedTensor:
        return argument.value
    return [_value(item) for item in argument] if isinstance(argument, (list, tuple)) else argument


def _wrap(result: Any, known: dict[int, Tensor]) -> Any:
    """The result as tensors of the device; what was changed in place is the argument itself."""
    if isinstance(result, Tensor):
        return known[id(result)] if id(result) in known else EmulatedTensor(result)
    return type(result)(_wrap(item, known) for item in result) if isinstance(result, (list, tuple)) else result


class Graph:
    """A CUDA graph: operations that are recorded, not run, and run when it is replayed, in the same memory."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def capture_begin(self) -> None:
        self.random_state = torch.get_rng_state()
        _graphs.append(self)

    def capture_end(self) -> None:
        """What the recording has changed is undone."""
        _graphs.clear()
        for memory, value in self.before.values():
            memory.copy_(value)
        self.before.clear()
        torch.set_rng_state(self.random_state)

    def add(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an operation; its result is needed for the shapes of those that follow."""
        for memory in (t.untyped_storage() for t in _tensors((*args, *kwargs.values()))):
            if memory.data_ptr() not in self.before:
                self.before[memory.data_ptr()] = memory, memory.clone()
        result = func(*args, **kwargs)
        is_view = any(r.alias_info is not None for r in func._schema.returns)
        self.operations.append((func, args, kwargs, [] if is_view else list(_tensors([result]))))
        return result

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.operations:
            for output, new in zip(outputs, _tensors([func(*args, **kwargs)]), strict=False):
                output.copy_(new)


def _to_copy(func: Any, args: Sequence[Any], kwargs: dict[str, Any], to: torch.device) -> Tensor:
    """A copy to a device, or to another type or layout on the same."""
    source = args[0]
    rest = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking", "pin_memory")}
    _copies_between()
    if type(source) is EmulatedTensor and to.type == "cpu":
        target: Tensor = func(source.value, **rest).clone()
        return _copy(target, EmulatedTensor(target.clone()), bool(kwargs.get("non_blocking")))
    return EmulatedTensor(func(_value(source), **rest).clone())


def _copy(target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    """A copy into memory that is there, at least one side of it on the CPU."""
    _copies_between()
    if isinstance(target, EmulatedTensor):
        target.value.copy_(source)
    elif non_blocking:
        _downloads.append((target, _value(source).clone()))
        torch.empty(0, dtype=torch.uint8).set_(target.untyped_storage()).fill_(255)
    else:
        wait()
        target.copy_(_value(source))
    return target


def _copies_between() -> None:
    """A graph does not copy between host and device: the host's memory is another at its next run."""
    if _graphs:
        raise DeviceError("operation not permitted when stream is capturing: a copy between host and device")


def _check_devices(func: Any, name: str, args: Sequence[Any], foreign: list[Tensor]) -> None:
    """Refuse tensors of the CPU in addition to the device's, except for an index."""
    large = [t for t in foreign if t.dim()]
    if name in INDEXING and all(any(t is index for index in args[1]) for t in large):
        return
    if large or name in NO_SCALARS or "foreach" in name or "fused" in name:
        shapes = [tuple(t.shape) for t in foreign]
        raise DeviceError(f"Expected all tensors to be on the same device: {func} got cpu {shapes} and cuda")


class DeviceMode(TorchDispatchMode):
    """Directs operations that make tensors to the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class _Stream:
    """All work is done at once, so streams need no order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.stream_id, self.cuda_stream = DEVICE, 0, 0

    def wait_stream(self, other: Any) -> None:
        return

    wait_event = record_event = record = wait_stream
    synchronize = wait


def _set_sync_mode(mode: str) -> None:
    global _sync_mode
    _sync_mode = mode


def _functions() -> dict[str, Any]:
    """Those of ``torch.cuda`` that the driver would answer."""
    generator, memory = torch.Generator(), 2**36
    return {
        "is_available": lambda: True, "is_initialized": lambda: True, "init": lambda: None, "_lazy_init": lambda: None,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (9, 0), "get_device_name": lambda device=None: "emulated",
        "get_device_properties": lambda device=None: SimpleNamespace(name="emulated", total_memory=memory),
        "is_bf16_supported": lambda *_, **__: True, "synchronize": wait, "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0, "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None, "mem_get_info": lambda device=None: (memory, memory),
        "set_sync_debug_mode": _set_sync_mode, "CUDAGraph": Graph,
        "current_stream": _Stream, "default_stream": _Stream, "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False, "Stream": _Stream, "Event": _Stream,
        "get_rng_state": lambda d=None: generator.get_state(), "manual_seed": generator.manual_seed,
        "set_rng_state": lambda state, d=None: generator.set_state(state), "manual_seed_all": generator.manual_seed,
        "default_generators": (generator,),
    }  # fmt: skip


@contextlib.contextmanager
def emulated_cuda() -> Iterator[None]:
    """Inside, PyTorch has a CUDA device."""
    future = torch.__future__
    replaces = future.get_overwrite_module_params_on_conversion()
    with contextlib.ExitStack() as stack:
        for name, answer in _functions().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        known: list[list[Any]] = [torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types]
        for types in known:
            if EmulatedTensor not in types:
                types.append(EmulatedTensor)
                stack.callback(types.remove, EmulatedTensor)
        future.set_overwrite_module_params_on_conversion(True)
        stack.callback(future.set_overwrite_module_params_on_conversion, replaces)
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(DeviceMode())  # type: ignore[no-untyped-call]
        yield
