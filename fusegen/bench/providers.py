"""Who computes a case, as rows of a table: fusegen, torch in two ways, other libraries, and a copy for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch

from fusegen.bench import peers
from fusegen.bench.case import Case, Way
from fusegen.errors import ArgumentError
from fusegen.specs.spec import Arguments
from fusegen.timing import Call

_PAGE = 4096
_MANY = 1 << 20  # bytes, beside which a page is nothing


@dataclass(frozen=True)
class Provider:
    """A row of the table.

    Attributes:
        name: on the command line and in records.
        missing: why it cannot run on a device; None where it can.
        way: how it computes a case; None where it does not know it.
        computes: whether what it gives are the case's results.
    """

    name: str
    missing: Callable[[torch.device], str | None]
    way: Callable[[Case], Way | None]
    computes: bool = True


@dataclass(frozen=True)
class Chosen:
    """Who takes part.

    Attributes:
        providers: in the order of the table.
        missing: why others don't, by name.
    """

    providers: tuple[Provider, ...]
    missing: dict[str, str]


def choose(names: Sequence[str] | None, device: torch.device) -> Chosen:
    """The providers of these names, or all that a device has.

    Raises:
        ArgumentError: a name is unknown, or one that was asked for cannot run here.
    """
    for name in names or ():
        if name not in {each.name for each in PROVIDERS}:
            raise ArgumentError(f"no provider is called {name!r}", mend=", ".join(each.name for each in PROVIDERS))
    wanted = [each for each in PROVIDERS if names is None or each.name in names]
    reasons = {each.name: each.missing(device) for each in wanted}
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    if names is not None and missing:
        name, reason = next(iter(missing.items()))
        raise ArgumentError(f"{name} cannot be timed here: {reason}", mend="leave it out of --providers")
    return Chosen(tuple(each for each in wanted if each.name not in missing), missing)


# Why there is none.


def _never(device: torch.device) -> str | None:  # noqa: ARG001
    return None


def _not_importable(module: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:  # a broken installation fails in any way
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None


def _on_gpu(*modules: str) -> Callable[[torch.device], str | None]:
    """That of a library of GPU kernels: the first of its modules that cannot be imported."""

    def missing(device: torch.device) -> str | None:
        if device.type != "cuda":
            return "it runs on a GPU alone"
        return next(filter(None, map(_not_importable, modules)), None)

    return missing


def _compile_missing(device: torch.device) -> str | None:
    return _not_importable("triton") if device.type == "cuda" else None


# How it is called.


def _fusegen(case: Case) -> Way:
    return Way("the emitted kernels", lambda arguments: case.call(case.kernel, arguments))


def _eager(case: Case) -> Way:
    return case.eager


def _compile(case: Case) -> Way:
    """Sizes are constants of what is compiled, as they are in our variants."""

    def prepare(arguments: Arguments) -> Call:
        torch.compiler.reset()  # otherwise the limit of recompilations would end in eager
        if case.rival is not None:
            return torch.compile(case.rival.prepare(arguments), dynamic=False)
        return case.call(torch.compile(case.kernel.function, dynamic=False), arguments)

    return Way(f"torch.compile of {case.eager.what}", prepare)


def _forward(way: Callable[[Case], Way | None]) -> Callable[[Case], Way | None]:
    """The way of a library that is called for forward passes alone: it takes no part in training steps."""
    return lambda case: None if case.is_step else way(case)


def _copy(case: Case) -> Way | None:
    if case.flops is not None:
        return None

    def prepare(arguments: Arguments) -> Call:
        device = next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))
        return copying(case.bytes, device)

    return Way("Tensor.copy_ of as many bytes", prepare)


def copying(moved: int, device: torch.device) -> Call:
    """``Tensor.copy_`` that reads and writes ``moved`` bytes together. Many are rounded up to whole pages: an H200 takes
    up to 1.6 times as long to copy what ends within one (264 MB: 107 µs instead of 69)."""
    copied = moved // 2 if moved < _MANY else -(-moved // (2 * _PAGE)) * _PAGE
    source = torch.arange(max(1, copied // 4), dtype=torch.int32, device=device)  # zeros might be no memory at all
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


PROVIDERS = (
    Provider("fusegen", _never, _fusegen),
    Provider("eager", _never, _eager),
    Provider("compile", _compile_missing, _compile),
    Provider("liger", _on_gpu("liger_kernel.ops.layer_norm"), _forward(peers.liger)),
    Provider("quack", _on_gpu("quack.rmsnorm", "quack.softmax"), _forward(peers.quack)),
    Provider("flashinfer", _on_gpu("flashinfer.norm", "flashinfer.activation"), _forward(peers.flashinfer)),
    Provider("copy", _never, _copy, computes=False),
)
"""Everybody; a table of a record has its columns in this order."""
