"""Folders for Hugging Face's package ``kernels``: torch operators for CUDA builds and for CPU builds of torch, and layers."""

from __future__ import annotations

import inspect
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusegen.bundle import cpp
from fusegen.bundle.build import BuildRequest
from fusegen.bundle.programs import new_folder, require_new, write
from fusegen.bundle.wheel import IMPORTS, loading_lines, operator_lines, require_names
from fusegen.errors import ArgumentError
from fusegen.jit import nvrtc
from fusegen.target import Backend, Target


@dataclass(frozen=True)
class HubPackage:
    """The package in a folder.

    Attributes:
        name: an identifier.
        version: the version of its interface; the hub has a branch for each.
        docs: the kernels' docstrings, by operator.
    """

    name: str
    version: str
    license: str
    docs: Mapping[str, str]

    def check(self) -> None:
        """Raises `ArgumentError` if `kernels` does not accept the name or the version, or a kernel's name is invalid."""
        if not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", self.name, re.ASCII):
            what = f"the name {self.name!r} is not two or more of a-z, 0-9 and _, with a letter first and no _ last"
            raise ArgumentError(what, hint="give a name such as my_kernels by --library")
        if not re.fullmatch(r"0|[1-9]\d{0,8}", self.version, re.ASCII):
            raise ArgumentError(
                f"the version {self.version!r} of a hub folder is no number", hint="give one such as 2 by --version"
            )
        require_names(self.name, self.docs)
        if "layers" in self.docs:
            raise ArgumentError("'layers' is the module of layers in a hub folder", hint="rename the kernel")


@dataclass(frozen=True)
class BuiltHub:
    """A built folder: the variants, the operators' schemas, and the layers."""

    variants: tuple[str, ...]
    schemas: tuple[str, ...]
    layers: tuple[str, ...]


def build_hub(
    folder: Path, requests: Sequence[BuildRequest], package: HubPackage, version: str, *, level: str = "", command: str = ""
) -> BuiltHub:
    """Compiles kernels into a new folder that `kernels.get_local_kernel` loads, atomically.

    Args:
        requests: one per kind of call and target. Those of the CPU are in each variant.
        version, level, command: as in `build_extension`.

    Raises:
        ArgumentError, BundleError, CompileError, ToolNotFoundError: as in `build_extension`.
    """
    require_new(folder)
    package.check()
    hub = BuiltHub((), (), ())
    with new_folder(folder) as unfinished:
        (unfinished / "build").mkdir()
        for variant, chosen in _variants(requests):
            path = unfinished / "build" / variant
            built = cpp.build_extension(path, chosen, package.name, version, level=level, is_unique=True)
            layers = _layers(path, chosen)
            _write_package(path, built, package, layers, chosen)
            hub = BuiltHub((*hub.variants, variant), built.schemas, tuple(layer.name for layer, _ in layers))
        if command:
            write(unfinished / cpp.COMMAND, f"{command}\n".encode())
    return hub


def _variants(requests: Sequence[BuildRequest]) -> Iterator[tuple[str, Sequence[BuildRequest]]]:
    """Yields the names of variants as `kernels` parses them, with their calls; the one with all calls last."""
    on_cpu = [request for request in requests if request.target.backend is Backend.CPU]
    major, minor, *_ = torch.__version__.split(".")
    system = platform.system().lower()
    abi = "-cxx11" if system == "linux" else ""  # compilers of other systems have one ABI
    names = "torch{}{}{}-{}-{}-{}".format(major, minor, abi, "{}", platform.machine(), system)
    if on_cpu:
        yield names.format("cpu"), on_cpu
    if len(on_cpu) < len(requests):
        yield names.format("cu" + nvrtc.nvrtc_version().replace(".", "")), requests


def _write_package(
    path: Path,
    built: cpp.BuiltExtension,
    package: HubPackage,
    layers: Sequence[tuple[_Layer, bool]],
    requests: Sequence[BuildRequest],
) -> None:
    namespace = built.library.removesuffix(".so")
    schemas = {schema.partition("(")[0]: schema for schema in built.schemas}
    lines = [
        '"""Operators of torch built by fusegen."""\n',
        *IMPORTS,
        f'if not hasattr(_torch.ops.{namespace}, "{next(iter(schemas))}"):  # a copy of this folder may be loaded',
        *(f"    {line}" for line in loading_lines(built.library, package.name, is_checked=bool(built.cpu))),
        "",
        *operator_lines(namespace, schemas, package.docs),
    ]
    exported = [*schemas]
    if layers:
        lines += ["", "from . import layers  # noqa: E402"]
        exported.append("layers")
        texts = [layer.text(namespace, is_differentiable) for layer, is_differentiable in layers]
        write(path / "layers.py", ("\n\n\n".join([_LAYERS_HEAD, *texts]) + "\n").encode())
    lines += ["", f"__all__ = {json.dumps(exported)}", ""]
    write(path / "__init__.py", "\n".join(lines).encode())
    write(path / "metadata.json", (json.dumps(_metadata(namespace, package, requests), indent=1) + "\n").encode())


def _metadata(namespace: str, package: HubPackage, requests: Sequence[BuildRequest]) -> dict[str, Any]:
    targets = dict.fromkeys(request.target for request in requests if request.target.backend is not Backend.CPU)
    backend = {"type": "cuda", "archs": [*map(_capability, targets)]} if targets else {"type": "cpu"}
    return {
        "id": namespace,  # the module's name in a process
        "name": package.name.replace("_", "-"),
        "version": int(package.version),
        "license": package.license,
        "python-depends": [],
        "backend": backend,
    }


def _capability(target: Target) -> str:
    """The capability of a target as in ``9.0a``."""
    digits, suffix = re.fullmatch(r"sm_(\d+)([a-z]?)", target.name).groups()  # type: ignore[union-attr]
    return f"{digits[:-1]}.{digits[-1]}{suffix}"


# Layers. `kernels` copies their ``forward`` into modules of a model, so a class has no state.


@dataclass(frozen=True)
class _Layer:
    """A layer that a prebuilt fusion computes.

    Attributes:
        schema: the begin of the operator's schema.
        forward: parameters of its ``forward``.
        tensors: arguments of the operator.
        fixed: further arguments. A call with their values must be built.
    """

    name: str
    schema: str
    forward: str
    tensors: str
    fixed: Mapping[str, bool | str]

    @property
    def kernel(self) -> str:
        return self.schema.partition("(")[0]

    def text(self, namespace: str, is_differentiable: bool) -> str:
        arguments = ", ".join([self.tensors, *(f"{name}={value!r}" for name, value in self.fixed.items())])
        lines = [
            f"class {self.name}(nn.Module):",
            "    can_torch_compile = True",
            f"    has_backward = {is_differentiable}",
            "",
            f"    def forward(self, {self.forward}: torch.Tensor) -> torch.Tensor:",
            f"        return torch.ops.{namespace}.{self.kernel}({arguments})",
        ]
        return "\n".join(lines)

    def is_computed(self, request: BuildRequest) -> bool:
        if request.described.kernel != self.kernel:  # a function of a user's file has the file's name before its own
            return False
        defaults = {name: each.default for name, each in inspect.signature(request.function).parameters.items()}
        values = {**defaults, **request.arguments}
        return all(values[name] == value for name, value in self.fixed.items())


_LAYERS_HEAD = '"""Layers for ``kernels.kernelize``."""\n\nimport torch\nfrom torch import nn'
_HIDDEN = "hidden_states"
_NORMED = f"{_HIDDEN}, self.weight, self.variance_epsilon"
_NORM: dict[str, bool | str] = {"zero_centered_gamma": False, "casting_mode": "llama", "return_statistics": False}
_TANH = {"approximate": "tanh"}
_LAYERS = (
    _Layer("RMSNorm", "rms_norm(Tensor input, Tensor weight, float eps, ", _HIDDEN, _NORMED, _NORM),
    _Layer("SiLU", "silu(", "input", "input", {}),
    _Layer("GeLU", "gelu(", "input", "input", {"approximate": "none"}),
    _Layer("GeluTanh", "gelu(", "input", "input", _TANH),
    _Layer("NewGELU", "gelu(", "input", "input", _TANH),
    _Layer("FastGELU", "gelu(", "input", "input", _TANH),
    _Layer("QuickGELU", "gelu(", "input", "input", {"approximate": "quick"}),
    _Layer("SiluAndMul", "swiglu(Tensor gate, bool ", "x", "x", {"interleaved": False}),
)


def _layers(path: Path, requests: Sequence[BuildRequest]) -> list[tuple[_Layer, bool]]:
    """Returns the layers that a built extension computes, and whether they have gradients."""
    operators = json.loads((path / cpp.MANIFEST).read_text(encoding="utf-8"))["operators"]
    return [
        (layer, operator["differentiable"])
        for layer in _LAYERS
        for operator in operators
        if operator["schema"].startswith(layer.schema) and any(map(layer.is_computed, requests))
    ]
