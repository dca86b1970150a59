"""Runs emitted CUDA text on the CPU, with every memory access checked.

The math and the pipeline are compiled as they are; only the bodies of primitives are swapped for host versions
(``templates/emulator/primitives/<name>.hpp``). A primitive whose CUDA file holds no ``asm`` and no intrinsic needs none.
A block's threads are fibers. See ``templates/emulator`` for what is checked.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from fusegen.emit.environment import templates
from fusegen.emit.primitives import closure
from fusegen.errors import EmulationError
from fusegen.jit.host import compile_shared, load_shared
from fusegen.settings import cache_folder

# No contraction: whether the device fuses a multiply with an add is its compiler's choice, not the text's.
_FLAGS = (
    "-std=c++17", "-O1", "-g0", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-exceptions",
    "-fvisibility=hidden",
)  # fmt: skip
_RUNTIME = ("builtins", "fiber", "shadow", "machine", "memory", "launch")
_DEVICE_ONLY = re.compile(r"\basm\b|\b__(syncthreads|syncwarp|shfl|cvta|nv|match|ballot|activemask|reduce)\w*\(")
_MESSAGE_BYTES = 1024
_MOST_THREADS, _LARGEST_CLUSTER = 1024, 16


@dataclass(frozen=True)
class Buffer:
    """Memory that a launch may touch: all of ``bytes`` from ``address``; stores only if ``writable``.

    Buffers may overlap, as an input that is also an output does.
    """

    name: str
    address: int
    bytes: int
    writable: bool

    @classmethod
    def of(cls, name: str, tensor: Tensor, *, writable: bool) -> Buffer:
        """The memory from a CPU tensor's first to its last element."""
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        return cls(name, tensor.data_ptr(), span * tensor.element_size() if tensor.numel() else 0, writable)


@dataclass(frozen=True)
class EmulatedSource:
    """The math and pipeline parts of an emitted file, without its primitives."""

    text: str


def emulate(
    source: EmulatedSource,
    entry: str,
    *,
    grid: int,
    block: int,
    cluster: int = 1,
    shared_bytes: int = 0,
    arguments: Sequence[int | float],
    buffers: Sequence[Buffer],
) -> None:
    """Runs ``entry`` on memory of this process, as a launch of ``grid`` blocks of ``block`` threads would.

    Args:
        source: the emitted text; compiled on first use, then taken from the cache.
        entry: name of the ``extern "C" __global__`` function.
        grid: number of blocks, a multiple of ``cluster``.
        block: threads in a block.
        cluster: blocks in a cluster; these run concurrently, clusters one after the other.
        shared_bytes: dynamic shared memory of a block.
        arguments: one for each parameter: ``int`` for pointers and integers, ``float`` for floating numbers.
        buffers: all that the kernel may touch in global memory.

    Raises:
        EmulationError: the kernel did something illegal, or a primitive that it uses has no host version.
        CompileError, ToolNotFoundError: from :mod:`fusegen.jit.host`.
    """
    _check_shape(entry, grid, block, cluster, shared_bytes)
    library = compile_shared(host_text(source, entry), _FLAGS, cache_folder("emulator"))
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    launch = _Launch(
        entry.encode(), grid, block, cluster, shared_bytes,
        _argument_array(arguments), len(arguments),
        _buffer_array(buffers), len(buffers),
        ctypes.cast(message, ctypes.c_void_p), _MESSAGE_BYTES,
    )  # fmt: skip
    if load_shared(library).fg_emulate(ctypes.byref(launch)) != 0:
        raise EmulationError(message.value.decode(errors="replace"), where=str(library.with_suffix(".cpp")))


@lru_cache(maxsize=64)
def host_text(source: EmulatedSource, entry: str) -> str:
    """The C++ that :func:`emulate` compiles: runtime, host primitives, the emitted text, and the entry."""
    runtime = [(templates() / "emulator" / f"{name}.hpp").read_text() for name in _RUNTIME]
    types, *primitives = closure(source.text, _primitive_names(), _host_body).values()
    main = (
        'extern "C" __attribute__((visibility("default"))) i32 fg_emulate(const emulator::Launch* launch) {\n'
        f"  return emulator::run(*launch, [](const emulator::Launch& each) {{ emulator::call({entry}, each); }});\n"
        "}\n"
    )
    return "\n".join([types, *runtime, *primitives, source.text, main])


class _Argument(ctypes.Structure):
    _fields_ = (("integer", ctypes.c_int64), ("real", ctypes.c_double), ("is_real", ctypes.c_int32))


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("writable", ctypes.c_int32),
    )


class _Launch(ctypes.Structure):
    """Mirrors ``emulator::Launch`` in ``templates/emulator/machine.hpp``."""

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
    )


def _argument_array(arguments: Sequence[int | float]) -> ctypes.Array[_Argument]:
    return (_Argument * len(arguments))(*map(_argument, arguments))


def _argument(value: float) -> _Argument:
    return _Argument(0, value, 1) if isinstance(value, float) else _Argument(value, 0.0, 0)


def _buffer_array(buffers: Sequence[Buffer]) -> ctypes.Array[_Buffer]:
    rows = [_Buffer(each.name.encode(), each.address, each.bytes, each.writable) for each in buffers]
    return (_Buffer * len(rows))(*rows)


def _check_shape(entry: str, grid: int, block: int, cluster: int, shared_bytes: int) -> None:
    if grid < 1 or not 1 <= block <= _MOST_THREADS or not 1 <= cluster <= _LARGEST_CLUSTER or shared_bytes < 0:
        shape = f"grid {grid}, block {block}, cluster {cluster}, shared memory {shared_bytes}"
        raise EmulationError(f"{entry}: no such launch: {shape}")
    if grid % cluster:
        raise EmulationError(f"{entry}: a grid of {grid} blocks does not divide into clusters of {cluster}")


def _host_body(name: str) -> str:
    host = templates() / "emulator" / "primitives" / f"{name}.hpp"
    if host.exists():
        return host.read_text()
    device = templates() / "cuda" / "primitives" / f"{name}.cuh"
    if not device.exists() or _DEVICE_ONLY.search(body := device.read_text()):
        raise EmulationError(f"the primitive {name} has no host version", mend=f"write {host}")
    return body


@lru_cache(maxsize=1)
def _primitive_names() -> frozenset[str]:
    folders = (templates() / "cuda" / "primitives", templates() / "emulator" / "primitives")
    return frozenset(path.name.partition(".")[0] for folder in folders for path in folder.iterdir())
