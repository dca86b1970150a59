"""How the kernels of other libraries are called for the cases that they know. They are imported when they are called for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from fusegen.bench.case import Case, Way
from fusegen.specs.spec import Arguments
from fusegen.timing import Call

_LIGER_LONGEST, _QUACK_LONGEST = 65536, 262144  # elements of a row
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def liger(case: Case) -> Way | None:
    """Liger-Kernel's functions, which take a row as one block."""
    return _LIGER.get(case.name) if case.sizes[-1] <= _LIGER_LONGEST else None


def quack(case: Case) -> Way | None:
    """quack's functions."""
    return _QUACK.get(case.name) if case.sizes[-1] <= _QUACK_LONGEST else None


def flashinfer(case: Case) -> Way | None:
    """FlashInfer's functions, for 16-bit numbers in groups of 16 bytes."""
    fits = case.dtype in _SIXTEEN_BITS and case.sizes[-1] % 8 == 0
    return _FLASHINFER.get(case.name) if fits else None


# Liger.


def _liger_layer_norm(arguments: Arguments) -> Call:
    function = _liger("layer_norm", "LigerLayerNormFunction")
    return lambda: function.apply(arguments["input"], arguments["weight"], arguments["bias"], 1e-5)


def _liger_layer_norm_backward(arguments: Arguments) -> Call:
    forward, backward = _liger("layer_norm", "layer_norm_forward"), _liger("layer_norm", "layer_norm_backward")
    x, dy, weight = (arguments[name] for name in ("x", "dy", "weight"))
    bias = torch.zeros_like(weight)
    _, _, mean, rstd, *_ = forward(x, weight, bias, 1e-5)
    return lambda: backward(dy, x, weight, bias, mean, rstd)


def _liger_rms_norm(arguments: Arguments) -> Call:
    function = _liger("rms_norm", "LigerRMSNormFunction")
    return lambda: function.apply(arguments["input"], arguments["weight"], 1e-6, 0.0, "llama", False)


def _liger_softmax(arguments: Arguments) -> Call:
    function = _liger("softmax", "LigerSoftmaxFunction")
    return lambda: function.apply(arguments["input"])


def _liger_swiglu(arguments: Arguments) -> Call:
    function = _liger("swiglu", "LigerSiLUMulFunction")
    return lambda: function.apply(arguments["gate"], arguments["up"])


def _liger(module: str, name: str) -> Any:
    return getattr(import_module(f"liger_kernel.ops.{module}"), name)


_LIGER: Mapping[str, Way] = {
    "layer_norm": Way("LigerLayerNormFunction", _liger_layer_norm),
    "layer_norm_backward": Way("Liger's layer_norm_backward, given mean and rstd", _liger_layer_norm_backward),
    "rms_norm": Way("LigerRMSNormFunction", _liger_rms_norm),
    "softmax": Way("LigerSoftmaxFunction", _liger_softmax),
    "swiglu": Way("LigerSiLUMulFunction", _liger_swiglu),
}


# quack.


def _quack_layer_norm(arguments: Arguments) -> Call:
    function = import_module("quack.rmsnorm").layernorm_fwd
    x, weight, bias = arguments["input"], arguments["weight"].float(), arguments["bias"].float()
    return lambda: function(x, weight, bias, eps=1e-5)


def _quack_rms_norm(arguments: Arguments) -> Call:
    function = import_module("quack.rmsnorm").rmsnorm
    return lambda: function(arguments["input"], arguments["weight"], eps=1e-6)


def _quack_add_rms_norm(arguments: Arguments) -> Call:
    function = import_module("quack.rmsnorm").rmsnorm
    return lambda: function(arguments["x"], arguments["weight"], residual=arguments["residual"], eps=1e-6, prenorm=True)


def _quack_softmax(arguments: Arguments) -> Call:
    function = import_module("quack.softmax").softmax
    return lambda: function(arguments["input"])


_QUACK: Mapping[str, Way] = {
    "layer_norm": Way("quack's layernorm_fwd, with float32 weights", _quack_layer_norm),
    "rms_norm": Way("quack's rmsnorm", _quack_rms_norm),
    "add_rms_norm": Way("quack's rmsnorm with a residual", _quack_add_rms_norm),
    "softmax": Way("quack's softmax", _quack_softmax),
}


# FlashInfer.


def _flashinfer_rms_norm(arguments: Arguments) -> Call:
    function = import_module("flashinfer.norm").rmsnorm
    return lambda: function(arguments["input"], arguments["weight"], 1e-6)


def _flashinfer_add_rms_norm(arguments: Arguments) -> Call:
    """Both results overwrite the operands: each call goes on from what the last one left."""
    function = import_module("flashinfer.norm").fused_add_rmsnorm
    x, residual = arguments["x"].clone(), arguments["residual"].clone()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        function(x, residual, arguments["weight"], 1e-6)
        return x, residual

    return call


def _flashinfer_swiglu(arguments: Arguments) -> Call:
    function = import_module("flashinfer.activation").silu_and_mul
    packed = torch.cat((arguments["gate"], arguments["up"]), -1)
    return lambda: function(packed)


_FLASHINFER: Mapping[str, Way] = {
    "rms_norm": Way("FlashInfer's rmsnorm", _flashinfer_rms_norm),
    "add_rms_norm": Way("FlashInfer's fused_add_rmsnorm, in place", _flashinfer_add_rms_norm),
    "swiglu": Way("FlashInfer's silu_and_mul, of gate and up in one tensor", _flashinfer_swiglu),
}
