"""The providers of a case: fusegen, torch eager and compiled, other libraries, and a memory copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusegen.bench.case import BenchCase, Implementation
from fusegen.errors import ArgumentError, one_line
from fusegen.specs.spec import Arguments
from fusegen.timing import TimedCall

_PAGE = 4096
_MANY = 1 << 20  # bytes from which rounding to a page does not matter


@dataclass(frozen=True)
class Provider:
    """A library, or a mode of torch, that implements cases.

    Attributes:
        name: the name on the command line and in records.
        missing: returns the reason why it cannot run on a device, or None.
        implementation: returns its implementation of a case; None if it has none.
        computes: False if it does not compute the case's results, as a memory copy.
    """

    name: str
    missing: Callable[[torch.device], str | None]
    implementation: Callable[[BenchCase], Implementation | None]
    computes: bool = True


@dataclass(frozen=True)
class ChosenProviders:
    providers: tuple[Provider, ...]
    missing: dict[str, str]


def choose(names: Sequence[str] | None, device: torch.device) -> ChosenProviders:
    """The named providers; by default all that can run on the device.

    Raises:
        ArgumentError: a name is unknown, or a named provider cannot run on the device.
    """
    for name in names or ():
        if name not in {provider.name for provider in PROVIDERS}:
            raise ArgumentError(
                f"there is no provider {name!r}", hint=f"give one of {', '.join(provider.name for provider in PROVIDERS)}"
            )
    requested = [provider for provider in PROVIDERS if names is None or provider.name in names]
    reasons = {provider.name: provider.missing(device) for provider in requested}
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    if names is not None and missing:
        name, reason = next(iter(missing.items()))
        raise ArgumentError(f"{name} cannot be timed here: {reason}", hint="leave it out of --providers")
    return ChosenProviders(tuple(provider for provider in requested if provider.name not in missing), missing)


# Reasons why a provider is missing.


def _never(device: torch.device) -> str | None:  # noqa: ARG001
    return None


def _not_importable(module: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:  # a broken installation can raise anything
        return one_line(error)
    return None


def _on_gpu(*modules: str) -> Callable[[torch.device], str | None]:
    """Returns a check of a GPU library: it fails on other devices, and if a module cannot be imported."""

    def missing(device: torch.device) -> str | None:
        if device.type != "cuda":
            return "it runs only on a GPU"
        return next(filter(None, map(_not_importable, modules)), None)

    return missing


def _compile_missing(device: torch.device) -> str | None:
    return _not_importable("triton") if device.type == "cuda" else None


# Fusegen, torch.compile and the copy.


def _fusegen(case: BenchCase) -> Implementation:
    return Implementation("the emitted kernels", lambda arguments: case.call(case.kernel, arguments))


def _compile(case: BenchCase) -> Implementation:
    """torch.compile with constant sizes, because fusegen's kernels have them too."""

    def prepare(arguments: Arguments) -> TimedCall:
        torch.compiler.reset()  # otherwise the recompilation limit would fall back to eager
        if case.baseline is not None:
            return torch.compile(case.baseline.prepare(arguments), dynamic=False)
        return case.call(torch.compile(case.kernel.function, dynamic=False), arguments)

    return Implementation(f"torch.compile of {case.eager.what}", prepare)


def _forward(
    implementation: Callable[[BenchCase], Implementation | None],
) -> Callable[[BenchCase], Implementation | None]:
    """Restricts an implementation to forward passes: training steps get None."""
    return lambda case: None if case.is_step else implementation(case)


def _copy(case: BenchCase) -> Implementation | None:
    if case.flops is not None:
        return None

    def prepare(arguments: Arguments) -> TimedCall:
        device = next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))
        return copying(case.bytes, device)

    return Implementation("Tensor.copy_ of as many bytes", prepare)


def copying(moved: int, device: torch.device) -> TimedCall:
    """``Tensor.copy_`` that moves ``moved`` bytes, reads and writes together, rounded up to whole pages if they are many.

    An H200 takes up to 1.6 times as long to copy a tensor that ends within a page (264 MB: 107 µs instead of 69).
    """
    copied = moved // 2 if moved < _MANY else -(-moved // (2 * _PAGE)) * _PAGE
    source = torch.arange(max(1, copied // 4), dtype=torch.int32, device=device)  # zeros might not be backed by memory
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


# Functions of torch that are faster than running the declaration.


def _native_backward(arguments: Arguments) -> TimedCall:
    """torch's layer norm backward, given the statistics that its forward saves."""
    x, dy, weight = (arguments[name] for name in ("x", "dy", "weight"))
    features = [x.shape[-1]]
    _, mean, rstd = torch.native_layer_norm(x, features, weight, None, 1e-5)
    backward = torch.ops.aten.native_layer_norm_backward
    bias = torch.zeros_like(weight)
    return lambda: backward(dy, x, features, mean, rstd, weight, bias, [True, True, True])


def _attention(**options: Any) -> Callable[[Arguments], TimedCall]:
    def prepare(arguments: Arguments) -> TimedCall:
        q, k, v = (arguments[name] for name in "qkv")
        return lambda: F.scaled_dot_product_attention(q, k, v, **options)

    return prepare


def _biased_attention(arguments: Arguments) -> TimedCall:
    """Attention with the bias as a materialized mask: torch's function takes a bias in no other form."""
    mask = _alibi(arguments["q"], arguments["slopes"])
    return _attention(attn_mask=mask)(arguments)


def _alibi(q: Tensor, slopes: Tensor) -> Tensor:
    indices = torch.arange(q.shape[-2], device=q.device)
    distance = indices - indices.unsqueeze(-1)
    bias = slopes.view(-1, 1, 1).to(q.dtype) * distance.to(q.dtype)
    return bias.masked_fill_(distance > 0, -math.inf).unsqueeze(0)


SDPA = Implementation("F.scaled_dot_product_attention", _attention())
SDPA_CAUSAL = Implementation("F.scaled_dot_product_attention(is_causal)", _attention(is_causal=True))
SDPA_MASK = Implementation("F.scaled_dot_product_attention(attn_mask)", _biased_attention)
NATIVE_BACKWARD = Implementation("native_layer_norm_backward, given mean and rstd", _native_backward)


# Kernels of other libraries, which are imported when a case needs them.

_LIGER_LONGEST, _QUACK_LONGEST = 65536, 262144  # elements of a row
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def liger(case: BenchCase) -> Implementation | None:
    """Liger-Kernel's functions; they hold a row in one block."""
    return _LIGER.get(case.name) if case.sizes[-1] <= _LIGER_LONGEST else None


def quack(case: BenchCase) -> Implementation | None:
    return _QUACK.get(case.name) if case.sizes[-1] <= _QUACK_LONGEST else None


def flashinfer(case: BenchCase) -> Implementation | None:
    """FlashInfer's functions, for 16-bit dtypes and rows of whole 16-byte vectors."""
    fits = case.dtype in _SIXTEEN_BITS and case.sizes[-1] % 8 == 0
    return _FLASHINFER.get(case.name) if fits else None


# Liger.


def _liger_layer_norm(arguments: Arguments) -> TimedCall:
    function = _liger("layer_norm", "LigerLayerNormFunction")
    return lambda: function.apply(arguments["input"], arguments["weight"], arguments["bias"], 1e-5)


def _liger_layer_norm_backward(arguments: Arguments) -> TimedCall:
    forward, backward = _liger("layer_norm", "layer_norm_forward"), _liger("layer_norm", "layer_norm_backward")
    x, dy, weight = (arguments[name] for name in ("x", "dy", "weight"))
    bias = torch.zeros_like(weight)
    _, _, mean, rstd, *_ = forward(x, weight, bias, 1e-5)
    return lambda: backward(dy, x, weight, bias, mean, rstd)


def _liger_rms_norm(arguments: Arguments) -> TimedCall:
    function = _liger("rms_norm", "LigerRMSNormFunction")
    return lambda: function.apply(arguments["input"], arguments["weight"], 1e-6, 0.0, "llama", False)


def _liger_softmax(arguments: Arguments) -> TimedCall:
    function = _liger("softmax", "LigerSoftmaxFunction")
    return lambda: function.apply(arguments["input"])


def _liger_swiglu(arguments: Arguments) -> TimedCall:
    function = _liger("swiglu", "LigerSiLUMulFunction")
    return lambda: function.apply(arguments["gate"], arguments["up"])


def _liger(module: str, name: str) -> Any:
    return getattr(import_module(f"liger_kernel.ops.{module}"), name)


_LIGER: Mapping[str, Implementation] = {
    "layer_norm": Implementation("LigerLayerNormFunction", _liger_layer_norm),
    "layer_norm_backward": Implementation("Liger's layer_norm_backward, given mean and rstd", _liger_layer_norm_backward),
    "rms_norm": Implementation("LigerRMSNormFunction", _liger_rms_norm),
    "softmax": Implementation("LigerSoftmaxFunction", _liger_softmax),
    "swiglu": Implementation("LigerSiLUMulFunction", _liger_swiglu),
}


# quack.


def _quack_layer_norm(arguments: Arguments) -> TimedCall:
    function = import_module("quack.rmsnorm").layernorm_fwd
    x, weight, bias = arguments["input"], arguments["weight"].float(), arguments["bias"].float()
    return lambda: function(x, weight, bias, eps=1e-5)


def _quack_rms_norm(arguments: Arguments) -> TimedCall:
    function = import_module("quack.rmsnorm").rmsnorm
    return lambda: function(arguments["input"], arguments["weight"], eps=1e-6)


def _quack_add_rms_norm(arguments: Arguments) -> TimedCall:
    function = import_module("quack.rmsnorm").rmsnorm
    return lambda: function(arguments["x"], arguments["weight"], residual=arguments["residual"], eps=1e-6, prenorm=True)


def _quack_softmax(arguments: Arguments) -> TimedCall:
    function = import_module("quack.softmax").softmax
    return lambda: function(arguments["input"])


_QUACK: Mapping[str, Implementation] = {
    "layer_norm": Implementation("quack's layernorm_fwd, with float32 weights", _quack_layer_norm),
    "rms_norm": Implementation("quack's rmsnorm", _quack_rms_norm),
    "add_rms_norm": Implementation("quack's rmsnorm with a residual", _quack_add_rms_norm),
    "softmax": Implementation("quack's softmax", _quack_softmax),
}


# FlashInfer.


def _flashinfer_rms_norm(arguments: Arguments) -> TimedCall:
    function = import_module("flashinfer.norm").rmsnorm
    return lambda: function(arguments["input"], arguments["weight"], 1e-6)


def _flashinfer_add_rms_norm(arguments: Arguments) -> TimedCall:
    """Runs in place: each call reads the results of the previous one."""
    function = import_module("flashinfer.norm").fused_add_rmsnorm
    x, residual = arguments["x"].clone(), arguments["residual"].clone()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        function(x, residual, arguments["weight"], 1e-6)
        return x, residual

    return call


def _flashinfer_swiglu(arguments: Arguments) -> TimedCall:
    function = import_module("flashinfer.activation").silu_and_mul
    packed = torch.cat((arguments["gate"], arguments["up"]), -1)
    return lambda: function(packed)


_FLASHINFER: Mapping[str, Implementation] = {
    "rms_norm": Implementation("FlashInfer's rmsnorm", _flashinfer_rms_norm),
    "add_rms_norm": Implementation("FlashInfer's fused_add_rmsnorm, in place", _flashinfer_add_rms_norm),
    "swiglu": Implementation("FlashInfer's silu_and_mul, of gate and up in one tensor", _flashinfer_swiglu),
}


# The table of providers.

PROVIDERS = (
    Provider("fusegen", _never, _fusegen),
    Provider("eager", _never, lambda case: case.eager),
    Provider("compile", _compile_missing, _compile),
    Provider("liger", _on_gpu("liger_kernel.ops.layer_norm"), _forward(liger)),
    Provider("quack", _on_gpu("quack.rmsnorm", "quack.softmax"), _forward(quack)),
    Provider("flashinfer", _on_gpu("flashinfer.norm", "flashinfer.activation"), _forward(flashinfer)),
    Provider("copy", _never, _copy, computes=False),
)
"""All providers, in the order of a record's columns."""
