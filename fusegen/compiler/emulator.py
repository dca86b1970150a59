"""Runs emitted CUDA text on the CPU, with every memory access checked.

Math and pipelines are compiled unchanged; only the bodies of primitives are replaced by host versions
(``templates/emulator/primitives/<name>.hpp``). A primitive whose CUDA file holds no ``asm`` and no intrinsic needs no host version.
The emulator's runtime (``templates/emulator/interface.hpp``) is a separate library that is compiled once, since it is much longer
than a kernel. The threads of a block are fibers. ``templates/emulator/runtime`` documents the checks.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from fusegen.emit.environment import body, closure, names, templates
from fusegen.errors import EmulationError, IndexRangeError
from fusegen.jit.host import ARITHMETIC, load_compiled
from fusegen.program import call
from fusegen.program.call import TensorMapSpec
from fusegen.runtime.execute import Binder, LaunchBackend, out_of_range
from fusegen.runtime.instructions import CallFunction, Scalars, integer
from fusegen.settings import cache_folder
from fusegen.source import Source

_FLAGS = (
    "-std=c++17", "-g0", "-w", *ARITHMETIC, "-fno-strict-aliasing", "-fno-exceptions", "-fvisibility=hidden",
)  # fmt: skip
# The compiler checks indices into a thread's own arrays; kernel.hpp holds the function that a failed check calls.
_KERNEL_FLAGS = (*_FLAGS, "-O1", "-fsanitize=bounds")
_RUNTIME_FLAGS = (*_FLAGS, "-O2", "-fno-semantic-interposition", "-ftls-model=initial-exec")
_BOTH = ("builtins", "interface")
_RUNTIME = ("fiber", "shadow", "machine", "threads", "memory", "tensor", "matrices", "launch")
_DEVICE_ONLY = re.compile(r"\basm\b|\b__(syncthreads|syncwarp|shfl|cvta|nv|match|ballot|activemask|reduce)\w*\(")
_PRODUCT = re.compile(
    r"(void wgmma_m64n(?P<n>\d+)k16_(?P<type>b?f16)(?P<registers>_rs)?\([^{]*\{)\n"
    r"    asm volatile\(.*?wgmma\.mma_async\.sync\.aligned\.m64n(?P=n)k16\.f32\.(?P=type)\.(?P=type) "
    r".*?p, 1, 1, (?P<transposed>[01](?:, [01])?);.*?\);\n\}",
    re.DOTALL,
)
"""A tensor-core instruction. The emitted text holds it as a function, since there is one for each shape."""
_MESSAGE_BYTES = 1024
_BAD_INDEX = 2  # status of a launch that read an index out of range
_MOST_THREADS, _LARGEST_CLUSTER = 1024, 16
_RESIDENT = 3  # blocks that run at a time in launches whose blocks wait for each other


class EmulatedTiming(Flag):
    """An order of events that hardware does not define; a kernel must be correct under each order."""

    LATE = 1  # asynchronous operations take effect when they are waited for, not at once
    BACKWARDS = 2  # threads run from the last to the first


EARLY = EmulatedTiming(0)
"""Asynchronous operations take effect at once; threads run from the first to the last."""


@dataclass(frozen=True)
class EmulatedBuffer:
    """Memory that a launch may access: ``bytes`` from ``address``; stores only if ``writable``. Buffers may overlap, e.g. an
    input that is also an output. The previous launch writes it if ``is_pending``."""

    name: str
    address: int
    bytes: int
    writable: bool
    is_pending: bool = False

    @classmethod
    def of(cls, name: str, tensor: Tensor, *, writable: bool, is_pending: bool = False) -> EmulatedBuffer:
        """The memory from a CPU tensor's first to its last element."""
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        return cls(name, tensor.data_ptr(), span * tensor.element_size() if tensor.numel() else 0, writable, is_pending)


@dataclass(frozen=True)
class EmulatedSource:
    """A kernel of an emitted file.

    Attributes:
        text: math and pipeline, without the primitives.
        entry: name of the ``extern "C" __global__`` function.
    """

    text: str
    entry: str


def emulate(
    source: EmulatedSource,
    *,
    grid: int,
    block: int,
    cluster: int = 1,
    shared_bytes: int = 0,
    overlaps: bool = False,
    resident: int = 0,
    arguments: Sequence[int | float],
    buffers: Sequence[EmulatedBuffer],
    timing: EmulatedTiming = EARLY,
) -> None:
    """Runs a kernel on memory of this process, as a launch of ``grid`` blocks of ``block`` threads would.

    Args:
        source: the kernel; compiled on first use, then read from the cache.
        grid: number of blocks, a multiple of ``cluster``.
        block: threads in a block.
        cluster: blocks in a cluster; these run concurrently, clusters one after the other.
        shared_bytes: dynamic shared memory of a block.
        overlaps: whether the previous launch may still run; then every thread must wait for it, before it writes or reads what
            that launch writes.
        resident: blocks that run at a time, started in order, if blocks wait for earlier ones; 0 if none waits.
        arguments: one for each parameter: ``int`` for pointers and integers, ``float`` for floating-point numbers.
        buffers: all global memory that the kernel may access.
        timing: the order of events that hardware does not define.

    Raises:
        IndexRangeError: an index that the kernel read is out of range.
        EmulationError: the kernel did something illegal, or one of its primitives has no host version.
        CompileError, ToolNotFoundError: from :mod:`fusegen.jit.host`.
    """
    _check_shape(source.entry, grid, block, cluster, shared_bytes)
    (run,) = load_emulated([source])
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    launch = _Launch(
        source.entry.encode(), grid, block, cluster, shared_bytes,
        _argument_array(arguments), len(arguments),
        _buffer_array(buffers), len(buffers),
        ctypes.cast(message, ctypes.c_void_p), _MESSAGE_BYTES, timing.value, overlaps, resident,
    )  # fmt: skip
    status = run.function(ctypes.byref(launch))
    if status == _BAD_INDEX:
        raise IndexRangeError(message.value.decode())
    if status != 0:
        raise EmulationError(message.value.decode(errors="replace"), where=run.where)


@dataclass(frozen=True)
class _Loaded:
    """A compiled kernel.

    Attributes:
        function: runs a launch; returns 0 on success.
        where: the file that it was compiled from.
    """

    function: Callable[[Any], int]
    where: str


_LOADED: dict[EmulatedSource, _Loaded] = {}


def load_emulated(sources: Sequence[EmulatedSource]) -> list[_Loaded]:
    """The kernels of some sources. Those that this process has not loaded are compiled as one unit, or read from the cache.

    Raises:
        EmulationError: a primitive has no host version.
        CompileError, ToolNotFoundError: from :mod:`fusegen.jit.host`.
    """
    new = [source for source in dict.fromkeys(sources) if source not in _LOADED]
    if new:
        _load_runtime()
        library, path = load_compiled(host_text(new), _KERNEL_FLAGS, cache_folder("emulator"))
        where = str(path.with_suffix(".cpp"))
        _LOADED.update((source, _Loaded(getattr(library, _runner(n)), where)) for n, source in enumerate(new))
    return [_LOADED[source] for source in sources]


@lru_cache(maxsize=1)
def _load_runtime() -> None:
    """Loads the emulator's runtime, with its symbols visible to libraries that are loaded later."""
    text = "\n".join([_host_body("types"), *map(_written, _BOTH), *(_written(f"runtime/{name}") for name in _RUNTIME)])
    load_compiled(text, _RUNTIME_FLAGS, cache_folder("emulator"), for_others=True)


def host_text(sources: Sequence[EmulatedSource]) -> str:
    """The C++ text of some kernels: host primitives, then each kernel in a namespace with its entry point."""
    types, *primitives = closure("\n".join(s.text for s in sources), _primitive_names(), _host_body).values()
    kernels = [_kernel_text(n, source) for n, source in enumerate(sources)]
    return "\n".join([types, *map(_written, (*_BOTH, "kernel")), *primitives, *kernels])


def _written(name: str) -> str:
    return (templates() / "emulator" / f"{name}.hpp").read_text(encoding="utf-8")


def _kernel_text(number: int, source: EmulatedSource) -> str:
    """A kernel in its own namespace, with C++ linkage, so that kernels with equal names can share a translation unit."""
    text = _PRODUCT.sub(_product, source.text).replace('extern "C" __global__', "__global__")
    return (
        f"namespace kernel_{number} {{\n{text}\n"
        f'extern "C" __attribute__((visibility("default"))) i32 {_runner(number)}(const emulator::Launch* launch) {{\n'
        f"  return emulator::run(*launch, [](const emulator::Launch& each) {{ emulator::call({source.entry}, each); }});\n"
        "}\n}\n"
    )


def _product(match: re.Match[str]) -> str:
    """The host version of a tensor-core instruction."""
    function, accumulate = ("wgmma_rs", "1") if match["registers"] else ("wgmma", "accumulate")
    return f"{match[1]}\n    emulator::{function}<{match['transposed']}, {match['type']}>(d, a, b, {accumulate});\n}}"


def _runner(number: int) -> str:
    return f"emulate_{number}"


class _Argument(ctypes.Structure):
    _fields_ = (("integer", ctypes.c_int64), ("real", ctypes.c_double), ("is_real", ctypes.c_int32))


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("writable", ctypes.c_int32),
        ("is_pending", ctypes.c_int32),
    )


class _Launch(ctypes.Structure):
    """Mirrors ``emulator::Launch`` in ``templates/emulator/interface.hpp``."""

    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("cluster", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("arguments", ctypes.POINTER(_Argument)),
        ("argument_count", ctypes.c_int32),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_int32),
        ("message", ctypes.c_void_p),
        ("message_bytes", ctypes.c_int32),
        ("timing", ctypes.c_int32),
        ("overlaps", ctypes.c_int32),
        ("resident", ctypes.c_int32),
    )


def _argument_array(arguments: Sequence[int | float]) -> ctypes.Array[_Argument]:
    return (_Argument * len(arguments))(*map(_argument, arguments))


def _argument(value: float) -> _Argument:
    return _Argument(0, value, 1) if isinstance(value, float) else _Argument(value, 0.0, 0)


def _buffer_array(buffers: Sequence[EmulatedBuffer]) -> ctypes.Array[_Buffer]:
    rows = [_Buffer(each.name.encode(), each.address, each.bytes, each.writable, each.is_pending) for each in buffers]
    return (_Buffer * len(rows))(*rows)


def _check_shape(entry: str, grid: int, block: int, cluster: int, shared_bytes: int) -> None:
    if grid < 1 or not 1 <= block <= _MOST_THREADS or not 1 <= cluster <= _LARGEST_CLUSTER or shared_bytes < 0:
        shape = f"grid {grid}, block {block}, cluster {cluster}, shared memory {shared_bytes}"
        raise EmulationError(f"{entry}: invalid launch: {shape}")
    if grid % cluster:
        raise EmulationError(f"{entry}: a grid of {grid} blocks does not divide into clusters of {cluster}")


def _host_body(name: str) -> str:
    host = templates() / "emulator" / "primitives" / f"{name}.hpp"
    if host.exists():
        return host.read_text()
    if name not in names("cuda") or _DEVICE_ONLY.search(device := body("cuda", name)):
        raise EmulationError(f"the primitive {name} has no host version", hint=f"write {host}")
    return device


@lru_cache(maxsize=1)
def _primitive_names() -> frozenset[str]:
    folders = (templates() / "cuda" / "primitives", templates() / "emulator" / "primitives")
    return frozenset(path.name.partition(".")[0] for folder in folders for path in folder.iterdir())


# CUDA text as steps of a call on the CPU, through the emulator.


def emulated_kernels(sources: Sequence[Source]) -> list[EmulatedSource]:
    """The kernels of some sources, compiled as one unit."""
    kernels = [EmulatedSource(source.kernel_text, source.entry) for source in sources]
    load_emulated(kernels)
    return kernels


class EmulatorBackend(LaunchBackend):
    """Runs CUDA text on the CPU, with every access checked.

    Args:
        timing: the order of events that hardware does not define.
    """

    def __init__(self, timing: EmulatedTiming = EARLY) -> None:
        self.timing = timing

    def add_launch(self, binder: Binder, launch: call.KernelLaunch, kernel: Any) -> None:
        """Adds a call of the emulator with all memory that the kernel may access."""
        grid = launch.grid(binder.sizes)
        if not grid:
            return
        resident = _RESIDENT if launch.waits else 0
        shape = partial(emulate, grid=grid, block=launch.block, cluster=launch.cluster, shared_bytes=launch.shared_bytes)
        run = partial(shape, kernel, overlaps=launch.overlaps, resident=resident, timing=self.timing)
        names = {spec.key: spec.name for spec in binder.call.buffers}
        pending = _written_before(launch, binder.call.steps)

        def step(tensors: Sequence[Tensor], scalars: Scalars) -> None:
            by_key = dict(zip(launch.accesses, tensors, strict=True))
            maps = [encode(spec, by_key[spec.buffer], sizes=binder.sizes) for spec in launch.tensor_maps]
            arguments = [_value(argument, by_key, maps, binder.sizes, scalars) for argument in launch.arguments]
            buffers = [
                EmulatedBuffer.of(names[key], by_key[key], writable=written, is_pending=key in pending)
                for key, written in launch.accesses.items()
            ]
            try:
                run(arguments=arguments, buffers=buffers)
            except IndexRangeError as error:
                raise out_of_range(error.what, binder.sizes) from None

        binder.add(CallFunction(step, tuple(map(binder.tensor, launch.accesses))))


def _written_before(launch: call.KernelLaunch, steps: Sequence[call.CallStep]) -> set[int]:
    """The buffers that the launch or matmul directly before an overlapping launch writes."""
    before = next((b for b, step in pairwise(steps) if step is launch and launch.overlaps), None)
    if not isinstance(before, call.KernelLaunch | call.MatmulCall):
        return set()
    return {key for key, written in before.accesses.items() if written}


def _value(
    argument: call.LaunchArgument,
    tensors: Mapping[int, Tensor],
    maps: Sequence[ctypes.Structure],
    sizes: Mapping[str, int],
    scalars: Scalars,
) -> float:
    if isinstance(argument, call.PointerArgument):
        return tensors[argument.buffer].data_ptr()
    if isinstance(argument, call.MapArgument):
        return ctypes.addressof(maps[argument.number])
    if isinstance(argument, call.SizeArgument):
        return argument.formula(sizes)
    if isinstance(argument, call.CounterArgument):
        return 0
    assert isinstance(argument, call.ScalarArgument)
    return float(scalars[argument.name]) if argument.is_float else integer(scalars[argument.name])


# Tensor maps: encoded as the driver would, and refused where it would refuse them.


_RANKS = 4
_ALIGNMENT, _FARTHEST = 16, 1 << 40  # bytes: of addresses and strides; the limit of a stride
_LONGEST_SIDE, _LINE_BYTES = 256, 128  # elements along a side of a box; bytes of its lines


class EmulatedMap(ctypes.Structure):
    """Mirrors ``emulator::Map`` in ``templates/emulator/runtime/tensor.hpp``: sizes from the contiguous dimension outwards."""

    _fields_ = (
        ("base", ctypes.c_int64),
        ("itemsize", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("shape", ctypes.c_int64 * _RANKS),
        ("strides", ctypes.c_int64 * _RANKS),
        ("box", ctypes.c_int64 * _RANKS),
        ("padding", ctypes.c_int64),
    )


def encode(spec: TensorMapSpec, tensor: Tensor, sizes: Mapping[str, int]) -> EmulatedMap:
    """The tensor map of a view of a tensor.

    Raises:
        EmulationError: the driver would refuse it.
    """
    itemsize = tensor.element_size()
    shape = [f(sizes) for f in spec.shape][::-1]
    strides = [f(sizes) * itemsize for f in spec.strides][::-1]
    box = spec.box[::-1]
    base = tensor.data_ptr() + spec.offset(sizes) * itemsize
    legal = (
        base % _ALIGNMENT == 0
        and strides[0] == itemsize
        and all(stride % _ALIGNMENT == 0 and 0 <= stride < _FARTHEST for stride in strides[1:])
        and all(0 < side <= _LONGEST_SIDE for side in box)
        and box[0] * itemsize <= _LINE_BYTES
        and all(size > 0 for size in shape)
    )
    if not legal:
        raise EmulationError(f"invalid tensor map: shape {shape}, strides of {strides} bytes, box {list(box)}, address {base:#x}")
    padding = [0] * (_RANKS - len(shape))
    arrays = ((ctypes.c_int64 * _RANKS)(*values, *padding) for values in (shape, strides, box))
    return EmulatedMap(base, itemsize, len(shape), *arrays, 0)
