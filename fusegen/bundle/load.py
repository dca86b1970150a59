"""Built kernels, called as they were declared. Nothing here traces, compiles or needs computer algebra."""

from __future__ import annotations

import ctypes
import inspect
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusegen.bundle.binaries import binary, mark_of
from fusegen.bundle.manifest import BuiltKernel, BuiltVariant, Code, Parameter, read_manifest
from fusegen.bundle.match import Mismatch, OtherForm, described, match
from fusegen.calls.call import KernelLaunch
from fusegen.calls.signature import Constant, ExtentArgument
from fusegen.calls.structure import builder
from fusegen.errors import ArgumentError, BundleError, LaunchError, TraceError
from fusegen.lang.running import is_tracing
from fusegen.runtime import cuda, devices
from fusegen.runtime.arguments import check, check_recorded
from fusegen.runtime.bound import NOTHING, Bound, Facts
from fusegen.runtime.executable import Executable, Found, Plan
from fusegen.runtime.execute import Backend, CudaBackend, HostBackend, bound_call
from fusegen.runtime.host_kernel import host_kernel, instruction_set
from fusegen.runtime.keys import Values
from fusegen.runtime.scalars import Condition
from fusegen.runtime.written import check_writable, refuse_gradients

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def load(folder: str | os.PathLike[str]) -> Bundle:
    """The kernels of a folder that ``fusegen build`` wrote.

    A folder holds machine code: load only what you would run. What is checked is that its files are as they were built.

    Raises:
        ArgumentError: the folder is no path.
        BundleError: something in the folder is missing, was changed, or is of another version.
    """
    place = _place(folder)
    manifest = read_manifest(place)
    bundle = Bundle({kernel.name: BuiltFunction(place, kernel) for kernel in manifest.kernels})
    for kernel in manifest.kernels:
        for variant in kernel.variants:
            mark = mark_of(kernel.parameters, variant)
            for code in variant.code:
                binary(place, code, mark)
    return bundle


def _place(folder: object) -> Path:
    if not isinstance(folder, (str, os.PathLike)):
        raise ArgumentError(f"fg.load is given {folder!r}", mend="give the path of the folder that fusegen build --out wrote")
    try:
        return Path(folder).resolve()
    except (TypeError, ValueError, OSError, RuntimeError) as error:  # a path of bytes or with a null, links in a circle
        raise ArgumentError(
            f"{folder!r} is no path of a folder: {error}", mend="give the one that fusegen build --out wrote"
        ) from None


class Bundle:
    """Built kernels by name: ``bundle.NAME`` or ``bundle["NAME"]``; iteration gives the names.

    No `Mapping`, whose methods would stand in the way of kernels of their names.
    """

    def __init__(self, kernels: Mapping[str, BuiltFunction]) -> None:
        self._kernels = dict(kernels)

    def __getitem__(self, name: str) -> BuiltFunction:
        return self._kernels[name]

    def __getattr__(self, name: str) -> BuiltFunction:
        if name in self.__dict__.get("_kernels", ()):
            return self._kernels[name]
        raise AttributeError(f"no kernel {name!r} was built; there is {', '.join(self.__dict__.get('_kernels', ()))}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._kernels]

    def __repr__(self) -> str:
        return f"<fusegen bundle of {', '.join(self._kernels)}>"


class BuiltFunction(Plan):
    """A built kernel: what was declared, for the calls and the targets for which it was built.

    Args:
        folder: where its binaries lie.
        kernel: what the manifest says of it.
    """

    def __init__(self, folder: Path, kernel: BuiltKernel) -> None:
        self.__name__ = kernel.name
        self.__signature__ = _signature(kernel.parameters)
        self._folder = folder
        self._kernel = kernel
        self._given = tuple(parameter.name for parameter in kernel.parameters)
        self._plain = tuple(parameter.plain for parameter in kernel.parameters)
        self._written = frozenset(parameter.name for parameter in kernel.parameters if parameter.written)
        self._positional = None if any(p.keyword_only for p in kernel.parameters) else len(self._given)
        self._distinct = any(variant.signature.distinct for variant in kernel.variants)
        self._loaded: dict[tuple[int, int | None], tuple[Backend, list[Any]]] = {}
        self._lock = threading.RLock()
        self._executable = Executable(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the kernel.

        Raises:
            ArgumentError: an argument has the wrong type, device or dtype, or nothing was built for such a call.
            GradientError: an input requires a gradient.
            TraceError: it is called in another kernel.
            BundleError: a binary is not as it was built.
        """
        return self._executable(args if len(args) == self._positional and not kwargs else self._bind(args, kwargs))

    # Copies: binaries are loaded once, and found again by their folder.

    def __deepcopy__(self, memo: dict[int, Any]) -> BuiltFunction:
        """The kernel itself, as a function's copy is the function."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """By folder and name."""
        return _found_again, (str(self._folder.resolve()), self.__name__)

    def __repr__(self) -> str:
        return f"<fusegen kernel {self.__name__}, built for {', '.join(self.targets)}>"

    @property
    def targets(self) -> tuple[str, ...]:
        """What it was built for."""
        return tuple(dict.fromkeys(variant.target for variant in self._kernel.variants))

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            what = f"{self.__name__}: {error}"
            raise ArgumentError(what, mend=f"call it as {self.__name__}{self.__signature__}") from None
        bound.apply_defaults()
        return [bound.arguments[name] for name in self._given]

    # As a plan of programs.

    def statics(self) -> list[bool]:
        """Tells for each parameter whether a program is bound to its value."""
        return [_is_static(self._kernel, place) for place in range(len(self._given))]

    def check(self, values: Values) -> None:
        """Refuses what no kernel can work on."""
        if is_tracing():
            raise TraceError(f"{self.__name__} is built, and cannot be inlined in another kernel", mend="call what it was built of")
        check(self.__name__, self._given, values)
        for name, value in zip(self._given, values, strict=True):
            if isinstance(value, Tensor):
                self._check_tensor(name, value)

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        if name in self._written:
            check_writable(self.__name__, name, tensor)
        if not self._written:  # else the program says that it writes
            check_recorded(self.__name__, name, tensor)

    def bind(self, values: Values) -> Found:
        """The program of a call.

        Raises:
            ArgumentError: nothing was built for it.
            BundleError: a binary is not as it was built.
        """
        device = next(value.device for value in values if isinstance(value, Tensor))
        number, variant, sizes = self._variant(values, device)
        if variant.call.written:
            refuse_gradients(self.__name__, self._recorded(values))
        with self._lock:
            backend, kernels = self._kernels(number, variant, device)
        program = bound_call(variant.call, builder(variant.structure), sizes, device, backend, kernels)
        facts = Facts(variant.call, variant.signature.conditions, {}, sizes, self._plain)
        return Bound(program, facts, self._uncomputable, also=_alike(values) if self._distinct else None), NOTHING

    def _recorded(self, values: Values) -> list[str]:
        """Names of the inputs by which autograd wants gradients."""
        named = zip(self._given, values, strict=True) if torch.is_grad_enabled() else ()
        return [name for name, value in named if isinstance(value, Tensor) and value.requires_grad]

    def _uncomputable(self, values: Values) -> Any:
        given = ", ".join(f"{n}={v!r}" for n, v in zip(self._given, values, strict=True) if isinstance(v, (int, float)))
        raise ArgumentError(f"{self.__name__}: Python cannot compute what the kernel needs of {given}", mend="pass other numbers")

    # Which program.

    def _variant(self, values: Values, device: torch.device) -> tuple[int, BuiltVariant, dict[str, int]]:
        """The program for some arguments, with its number and its sizes.

        Raises:
            ArgumentError: none was built that is good for them.
        """
        target = devices.target_of(device)
        reasons = []
        for number, variant in enumerate(self._kernel.variants):
            if variant.target != target.name:
                continue
            if (cluster := max((each.cluster for each in variant.call.launches), default=1)) > target.cluster:
                reasons.append((variant, f"{device} has no room for {cluster} blocks that share a row"))
                continue
            try:
                return number, variant, match(variant.signature, variant.call, self._plain, values)
            except OtherForm:
                continue
            except Mismatch as reason:
                reasons.append((variant, str(reason)))
        if not reasons:
            what = f"{self.__name__} was not built for {target.name} ({device}); it was built for {', '.join(self.targets)}"
            raise ArgumentError(what, mend=f"build it again with --arch {','.join((*self.targets, target.name))}")
        raise self._unfit(reasons)

    def _unfit(self, reasons: Sequence[tuple[BuiltVariant, str]]) -> ArgumentError:
        """The error of a call for which nothing was built; of several programs, each with its reason."""
        what = "; ".join(dict.fromkeys(reason for _, reason in reasons))
        built = "; ".join(dict.fromkeys(described(variant.signature, self._given) for variant, _ in reasons))
        return ArgumentError(f"{self.__name__}: {what}", mend=f"build it for such a call too; it was built for {built}")

    # Binaries.

    def _kernels(self, number: int, variant: BuiltVariant, device: torch.device) -> tuple[Backend, list[Any]]:
        """What launches a program's kernels on a device, and the kernels, which are loaded once."""
        index = devices.index_of(device) if device.type == "cuda" else None
        if (number, index) not in self._loaded:
            self._loaded[number, index] = self._load(variant, index)
        return self._loaded[number, index]

    def _load(self, variant: BuiltVariant, index: int | None) -> tuple[Backend, list[Any]]:
        mark = mark_of(self._kernel.parameters, variant)
        if index is None:
            return HostBackend(), [self._host_kernel(code, mark, variant.machine) for code in variant.code]
        kernels = zip(variant.code, variant.call.launches, strict=True)
        return CudaBackend(index), [self._cuda_kernel(code, mark, launch, index) for code, launch in kernels]

    def _cuda_kernel(self, code: Code, mark: bytes, launch: KernelLaunch, index: int) -> Any:
        try:
            return cuda.load(binary(self._folder, code, mark), code.entry, code.entry, launch, index)
        except LaunchError as error:
            raise BundleError(f"{self._folder / code.file}: {error.what}", mend="build it again") from error

    def _host_kernel(self, code: Code, mark: bytes, machine: str) -> Any:
        path = self._folder / code.file
        if machine != instruction_set():
            what = f"{path} was built for another kind of processor"
            raise BundleError(what, mend="build it on a machine like this one: fusegen build … --arch cpu")
        binary(self._folder, code, mark)
        try:
            return host_kernel(getattr(ctypes.CDLL(str(path.resolve())), code.entry))
        except OSError as error:
            raise BundleError(f"{path} cannot be loaded: {error}", mend="build it again") from error


def _found_again(folder: str, name: str) -> BuiltFunction:
    return load(folder)[name]


def _signature(parameters: Sequence[Parameter]) -> inspect.Signature:
    """A function's, from what the manifest says of its parameters.

    Raises:
        BundleError: no function can have such parameters.
    """
    kinds = {True: inspect.Parameter.KEYWORD_ONLY, False: _POSITIONAL}
    defaults = [inspect.Parameter.empty if p.default is None else p.default.value for p in parameters]
    try:
        return inspect.Signature(
            [inspect.Parameter(p.name, kinds[p.keyword_only], default=d) for p, d in zip(parameters, defaults, strict=True)]
        )
    except ValueError as error:
        raise BundleError(f"the manifest names parameters that no function has: {error}", mend="build it again") from None


def _pattern(values: Values) -> tuple[int, ...]:
    """Which tensors of a call are one and the same."""
    places: dict[int, int] = {}
    return tuple(places.setdefault(id(value), place) for place, value in enumerate(values) if isinstance(value, Tensor))


def _alike(values: Values) -> Condition:
    """Tells of calls whether the same of their tensors are one."""
    pattern = _pattern(values)
    return lambda others: _pattern(others) == pattern


def _is_static(kernel: BuiltKernel, place: int) -> bool:
    """Whether a program is bound to the value of a parameter."""
    return any(isinstance(variant.signature.arguments[place], (Constant, ExtentArgument)) for variant in kernel.variants)
