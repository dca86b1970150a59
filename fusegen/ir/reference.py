"""The oracle: a float64 interpreter of the traced graph, built on torch's functions.

It shares no code with the compiler: compositions are evaluated directly (torch's gelu, softmax, layer_norm in float64) instead of
through the compiler's expansions. Tests and verification compare against it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fusegen.dtypes import DType
from fusegen.ir import formula
from fusegen.ir.blocks import Blocks
from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import view_chain
from fusegen.ir.infer import Operand, operand_dtype
from fusegen.ir.ops import DtypeRule, Family, Op
from fusegen.ir.random import random_bits
from fusegen.ir.symbolic import literal

OracleRule: TypeAlias = Callable[..., Any]


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    scalars: Mapping[str, float] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    key: int | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, ...]:
    """Evaluates a graph in float64 (int64, bool): its results, then the final contents of each mutated input.

    Args:
        graph: as traced, before any pass.
        inputs: tensors of any float dtype by name; their values are only widened.
        sizes: values of sizes that no input has.
        device: the device of the evaluation; a CPU by default, so that different hardware checks a GPU's results.
    """
    return Interpreter(graph, inputs, scalars or {}, torch.device(device), sizes, key).run()


def differentiate(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    scalars: Mapping[str, float],
    wrt: Sequence[str],
    given: Sequence[Tensor | None],
    *,
    sizes: Mapping[str, int] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, ...]:
    """Computes gradients in float64, by torch's autograd through `evaluate`.

    Args:
        wrt: names of the inputs to differentiate with respect to.
        given: the gradient of each result; None for none.
    """
    interpreter = Interpreter(graph, inputs, scalars, torch.device(device), sizes)
    leaves = [interpreter.inputs[name].requires_grad_() for name in wrt]
    with torch.enable_grad():
        results = interpreter.run()
    pairs = [(r, widen(g)) for r, g in zip(results, given, strict=False) if g is not None and r.requires_grad]
    outputs, seeds = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True))


class Interpreter:
    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[str, Tensor],
        scalars: Mapping[str, float],
        device: torch.device,
        sizes: Mapping[str, int] | None = None,
        key: int | None = None,
    ) -> None:
        self.graph = graph
        self.key = key
        self.inputs = {name: widen(tensor.detach().to(device)) for name, tensor in inputs.items()}
        self.device = device
        self.sizes = {**_bind_sizes(graph, self.inputs), **(sizes or {})}
        derived = graph.derived
        self.scalars = {
            **scalars,
            **{n: formula.evaluate(derived.nodes, p, scalars, self.sizes) for n, p in derived.results},
        }

    def run(self) -> tuple[Tensor, ...]:
        values: dict[int, Tensor] = {}
        requested = (*self.graph.outputs, *self.graph.writes)
        last_use = {a: position for position, _ in self.graph for a in self._needs(position)}
        with torch.device(self.device):  # overrides torch's default device
            for position, node in enumerate(self.graph.nodes):
                if node.op is Op.PUT:
                    values[position] = self._put(position, values)
                else:
                    values[position] = self._evaluate(node, [values[a] for a in node.args])
                for dead in {a for a in self._needs(position) if last_use[a] == position} - set(requested):
                    del values[dead]  # attention scores take gigabytes
        return tuple(values[w] for w in requested)

    def _needs(self, position: int) -> tuple[int, ...]:
        """The values that evaluating a node reads; for a write, all operands on the way to its target."""
        node = self.graph.nodes[position]
        if node.op is not Op.PUT:
            return node.args
        targets = view_chain(self.graph, node.args[0])
        return (*node.args, *(a for target in targets for a in self.graph.nodes[target].args))

    def _put(self, position: int, values: Mapping[int, Tensor]) -> Tensor:
        """The input's version after a write: the target's views are applied to element numbers, which are then written to."""
        target, value = self.graph.nodes[position].args
        *views, version = view_chain(self.graph, target)
        numbers = torch.arange(values[version].numel()).view(values[version].shape)
        for view in reversed(views):
            node = self.graph.nodes[view]
            attrs = {key: self._concrete(attr) for key, attr in node.attrs}
            numbers = RULES[node.op](numbers, *(values[a] for a in node.args[1:]), **attrs)
        return values[version].flatten().index_put((numbers.flatten(),), values[value].flatten()).view(values[version].shape)

    def _evaluate(self, node: Node, args: Sequence[Tensor]) -> Tensor:
        if node.op is Op.RANDOM:
            return self._random(node, args)
        if node.family is Family.LEAF:
            return self._leaf(node)
        if node.op is Op.BLOCKS:
            return self._blocks(node, args)
        if node.weak and node.op in NUMBERS:
            return torch.tensor(NUMBERS[node.op](*(a.item() for a in args)), dtype=_wide(node.dtype))
        count = len(node.tensors)
        attrs = {key: self._concrete(value) for key, value in node.attrs if key != "numbers"}
        attrs |= {name: value.item() for name, value in zip(node.numbers, args[count:], strict=True)}
        args = args[:count]
        if node.op.row.result is DtypeRule.BOOL:
            args = self._compared(node, args)
        if node.family is Family.POINTWISE:
            args = self.wrapped(node, args)
        value: Tensor = RULES[node.op](*args, **attrs)
        if node.op is Op.CAST:
            return value
        if node.family is Family.POINTWISE and not node.dtype.is_float:
            value = value.to(node.dtype.torch)  # integers wrap
        return value.to(_wide(node.dtype))

    def _blocks(self, node: Node, args: Sequence[Tensor]) -> Tensor:
        """A result of a loop, evaluated with blocks of one row."""
        blocks = cast(Blocks, node.attr("blocks"))
        values = {spec.name: operand for spec, operand in zip(blocks.operands, args, strict=True)}
        for spec in blocks.results:
            values[spec.name] = torch.zeros(self._concrete(spec.shape), dtype=_wide(spec.dtype))
        for start in range(self._concrete(blocks.extent)):
            sizes = {**self.sizes, **blocks.first(1), blocks.start.name: start}
            results = evaluate(blocks.body, values, self.scalars, sizes=sizes, key=self.key, device=self.device)
            values |= dict(zip((spec.name for spec in blocks.results), results, strict=True))
        return values[blocks.results[int(str(node.attr("result")))].name]

    def _compared(self, node: Node, args: Sequence[Tensor]) -> Sequence[Tensor]:
        """Operands of a comparison: a number takes the precision of the tensor that it is compared with."""
        operands = [self.graph.nodes[a] for a in node.args]
        strong = [o.dtype for o in operands if not o.weak and o.dtype.is_float]
        if not strong:
            return args
        common = strong[0].torch
        return [a.to(common).double() if o.weak else a for a, o in zip(args, operands, strict=True)]

    def wrapped(self, node: Node, args: Sequence[Tensor]) -> Sequence[Tensor]:
        """Wraps integer numbers and zero-dimensional tensors to the narrow integer type of the tensors that they meet."""
        operands = [self.graph.nodes[a] for a in node.tensors]
        common = operand_dtype(node.op, [Operand(o.shape, o.dtype, o.weak) for o in operands])
        if common.is_float or common is DType.BOOL:
            return args
        joins = [o.weak or (not o.shape and o.dtype is not common) for o in operands]
        return [_wrapped(a, common) if joined else a for a, joined in zip(args, joins, strict=True)]

    def _leaf(self, node: Node) -> Tensor:
        dtype = _wide(node.dtype)
        if node.op is Op.INPUT:
            return self.inputs[str(node.attr("name"))]
        if node.op is Op.SCALAR:
            return torch.tensor(self.scalars[str(node.attr("name"))], dtype=dtype)
        if node.op is Op.CONSTANT:
            return torch.tensor(node.number, dtype=dtype if node.weak else node.dtype.torch).to(dtype)
        if node.op is Op.SIZE:
            return torch.tensor(self._concrete(node.attr("size")), dtype=dtype)
        return torch.arange(int(self._concrete(node.shape[0])), dtype=dtype)

    def _random(self, node: Node, args: Sequence[Tensor]) -> Tensor:
        key = int(args[0].item()) if args else self.key
        if key is None:
            raise ValueError("the graph draws random bits, and no key is given")
        return widen(random_bits(key, int(str(node.attr("stream"))), self._concrete(node.shape), self.device))

    def _concrete(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._concrete(v) for v in value)
        if hasattr(value, "free_symbols"):
            return int(value.subs({s: self.sizes[s.name] for s in value.free_symbols}))
        return value


def widen(tensor: Tensor) -> Tensor:
    """Converts a tensor to the oracle's type: float64, int64 or bool."""
    if tensor.dtype is torch.bool:
        return tensor
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def _wrapped(value: Tensor, dtype: DType) -> Tensor:
    return value if value.dtype is torch.bool else value.to(dtype.torch).long()


def _wide(dtype: DType) -> torch.dtype:
    if dtype is DType.BOOL:
        return torch.bool
    return torch.float64 if dtype.is_float else torch.int64


def _bind_sizes(graph: Graph, inputs: Mapping[str, Tensor]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for spec in graph.inputs:
        for dim, extent in zip(spec.shape, inputs[spec.name].shape, strict=True):
            if literal(dim) is None:
                sizes[str(dim)] = extent
    return sizes


def _cast(x: Tensor, dtype: DType) -> Tensor:
    return widen(x.to(dtype.torch))


def _binary_cross_entropy(x: Tensor, y: Tensor) -> Tensor:
    """Uses the formula, because torch's function rejects inputs outside of [0, 1]."""
    return (y - 1) * torch.log1p(-x).clamp(min=-100) - y * torch.log(x).clamp(min=-100)


def _slice(x: Tensor, dim: int, start: int, step: int, length: int) -> Tensor:
    result: Tensor = x.index_select(dim, start + step * torch.arange(length, device=x.device))
    return result


def _concat(*tensors: Tensor, dim: int) -> Tensor:
    return torch.cat(tensors, dim)


def _topk(x: Tensor, length: int, descending: bool, result: int, **_: DType) -> Tensor:
    return torch.sort(x, stable=True, dim=-1, descending=descending)[result][..., :length]


def _sort_key(x: Tensor, index: Tensor, **_: DType) -> Tensor:
    """The float32 bits as an order-preserving integer, then the index and a bit that marks -0."""
    bits = x.float().view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = torch.where(x == 0, 0, torch.where(x.isnan(), 0x7F800001, ordered))
    return (ordered << 32) | (index << 1) | ((x == 0) & x.signbit())


def _sorted_value(key: Tensor, **_: DType) -> Tensor:
    ordered = key >> 32
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    bits = torch.where((ordered == 0) & (key & 1 == 1), -(1 << 31), bits)
    return bits.int().view(torch.float32)


_HIGH = -(1 << 32)
"""The value bits of a key. Inverting them reverses the order of values, but not of indices."""


def _gather(x: Tensor, index: Tensor, dim: int, wraps: bool) -> Tensor:
    return x.gather(dim, torch.where(index < 0, index + x.shape[dim], index) if wraps else index)


def _var(x: Tensor, dims: tuple[int, ...], correction: float) -> Tensor:
    return x.var(dims, correction=correction, keepdim=True)


def _std(x: Tensor, dims: tuple[int, ...], correction: float) -> Tensor:
    return x.std(dims, correction=correction, keepdim=True)


def _vector_norm(x: Tensor, dims: tuple[int, ...], ord: float) -> Tensor:
    result: Tensor = torch.linalg.vector_norm(x, ord, dims, keepdim=True)
    return result


def _layer_norm(x: Tensor, *affine: Tensor, count: int, eps: float, has_weight: bool, has_bias: bool) -> Tensor:
    weight = affine[0] if has_weight else None
    bias = affine[-1] if has_bias else None
    return F.layer_norm(x, x.shape[x.dim() - count :], weight, bias, eps)


def _rms_norm(x: Tensor, *affine: Tensor, count: int, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[x.dim() - count :], affine[0] if affine else None, eps)


def _attention(
    operands: Sequence[Tensor], scale: float, causal: bool, dropout: float, result: int, order: tuple[int, ...], **_attrs: object
) -> Tensor:
    if dropout:
        raise ValueError("the graph has dropout with torch's random bits, which the oracle cannot reproduce")
    scores = _scores(operands, scale, causal)
    if result == 1:
        return scores.logsumexp(-1).permute(order)
    weights = scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, True), 0.0)
    return (weights @ _repeat_heads(operands[2], operands[0])).permute(order)


def _attention_backward(
    operands: Sequence[Tensor], scale: float, causal: bool, dropout: float, result: int, order: tuple[int, ...], **_attrs: object
) -> Tensor:
    gradient, _, _, *inputs = operands
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in inputs]
        values = _attention(inputs, scale, causal, dropout, 0, (0, 1, 2, 3))
    return torch.autograd.grad(values, inputs[result], gradient)[0].permute(order)


def _scores(operands: Sequence[Tensor], scale: float, causal: bool) -> Tensor:
    q, k, *others = operands
    scores = q @ _repeat_heads(k, q).mT * scale
    if len(others) > 1:
        scores = scores + others[1]
    masked = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(masked, -torch.inf) if causal else scores


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _prod(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    for dim in dims:
        x = x.prod(dim, keepdim=True)
    return x


def _moments(x: Tensor, dims: tuple[int, ...], part: str) -> Tensor:
    count = torch.ones_like(x).sum(dims, keepdim=True)
    parts = {
        "count": count,
        "mean": x.mean(dims, keepdim=True),
        "rest": 0 * count,
        "m2": x.var(dims, correction=0, keepdim=True) * count,
    }
    return parts[part]


def _normalizer(x: Tensor, dims: tuple[int, ...], part: str) -> Tensor:
    peak = x.amax(dims, keepdim=True)
    return peak if part == "peak" else torch.where(x == peak, 1.0, torch.exp(x - peak)).sum(dims, keepdim=True)


def _extreme(function: Callable[..., tuple[Tensor, Tensor]]) -> OracleRule:
    """The values or the indices along a dim; the first index of equal values, which torch does not guarantee."""

    def rule(x: Tensor, dims: tuple[int, ...], part: str) -> Tensor:
        values = function(x, dims[0], keepdim=True)[0]
        if part == "values":
            return values
        return ((x == values) | x.isnan()).to(torch.uint8).argmax(dims[0], keepdim=True)

    return rule


def _keepdim(function: Callable[..., Tensor]) -> OracleRule:
    return lambda x, dims: function(x, dims, keepdim=True)


NUMBERS: dict[Op, OracleRule] = {
    Op.NEG: operator.neg,
    Op.ABS: operator.abs,
    Op.ADD: operator.add,
    Op.SUB: operator.sub,
    Op.MUL: operator.mul,
    Op.DIV: operator.truediv,
    Op.FLOOR_DIVIDE: operator.floordiv,
    Op.REMAINDER: operator.mod,
    Op.POW: operator.pow,
}
"""Python's operators, for operations on numbers alone."""

RULES: dict[Op, OracleRule] = {
    Op.CAST: _cast,
    Op.NEG: operator.neg,
    Op.ABS: torch.abs,
    Op.SIGN: torch.sign,
    Op.LOGICAL_NOT: torch.logical_not,
    Op.FLOOR: torch.floor,
    Op.CEIL: torch.ceil,
    Op.TRUNC: torch.trunc,
    Op.ROUND: torch.round,
    Op.EXP: torch.exp,
    Op.EXP2: torch.exp2,
    Op.EXPM1: torch.expm1,
    Op.LOG: torch.log,
    Op.LOG1P: torch.log1p,
    Op.LOG2: torch.log2,
    Op.SQRT: torch.sqrt,
    Op.RSQRT: torch.rsqrt,
    Op.SIN: torch.sin,
    Op.COS: torch.cos,
    Op.TANH: torch.tanh,
    Op.ERF: torch.erf,
    Op.ERFC: torch.erfc,
    Op.LGAMMA: torch.lgamma,
    Op.ONE_PLUS_ERF: lambda x: torch.special.erfc(-x),
    Op.SIGMOID: torch.sigmoid,
    Op.ADD: torch.add,
    Op.SUB: torch.sub,
    Op.MUL: torch.mul,
    Op.DIV: torch.div,
    Op.EXP_BELOW: lambda x, peak: torch.where(x == peak, 1.0, torch.exp(x - peak)),
    Op.FLOOR_DIVIDE: torch.floor_divide,
    Op.REMAINDER: torch.remainder,
    Op.POW: torch.pow,
    Op.ATAN2: torch.atan2,
    Op.MAXIMUM: torch.maximum,
    Op.MINIMUM: torch.minimum,
    Op.EQ: torch.eq,
    Op.NE: torch.ne,
    Op.LT: torch.lt,
    Op.LE: torch.le,
    Op.GT: torch.gt,
    Op.GE: torch.ge,
    Op.LOGICAL_AND: torch.logical_and,
    Op.LOGICAL_OR: torch.logical_or,
    Op.LOGICAL_XOR: torch.logical_xor,
    Op.BITWISE_AND: torch.bitwise_and,
    Op.BITWISE_OR: torch.bitwise_or,
    Op.BITWISE_XOR: torch.bitwise_xor,
    Op.LEFT_SHIFT: torch.bitwise_left_shift,
    Op.RIGHT_SHIFT: torch.bitwise_right_shift,
    Op.WHERE: torch.where,
    Op.SORT_KEY: _sort_key,
    Op.DESCENDING_KEY: lambda x, index, **_: _sort_key(x, index) ^ _HIGH,
    Op.SORTED_VALUE: _sorted_value,
    Op.DESCENDING_VALUE: lambda key, **_: _sorted_value(key ^ _HIGH),
    Op.KEY_INDEX: lambda key, **_: (key & ~_HIGH) >> 1,
    Op.COPY: lambda x, **role: x.clone(),
    Op.RECIPROCAL: torch.reciprocal,
    Op.SQUARE: torch.square,
    Op.RELU: F.relu,
    Op.SILU: F.silu,
    Op.GELU: F.gelu,
    Op.SOFTPLUS: F.softplus,
    Op.LEAKY_RELU: F.leaky_relu,
    Op.ELU: F.elu,
    Op.MISH: F.mish,
    Op.HARDSIGMOID: F.hardsigmoid,
    Op.HARDSWISH: F.hardswish,
    Op.LOGSIGMOID: F.logsigmoid,
    Op.CELU: F.celu,
    Op.SINH: torch.sinh,
    Op.COSH: torch.cosh,
    Op.ERFINV: torch.erfinv,
    Op.DIGAMMA: torch.digamma,
    Op.CLAMP_MIN: torch.maximum,
    Op.CLAMP_MAX: torch.minimum,
    Op.HARDTANH: lambda x, low, high: torch.minimum(torch.maximum(x, low), high),
    Op.PRELU: lambda x, slope: torch.where(x > 0, x, slope * x),
    Op.FMOD: torch.fmod,
    Op.XLOGY: torch.xlogy,
    Op.XLOG1PY: torch.special.xlog1py,
    Op.HYPOT: torch.hypot,
    Op.LOGIT: torch.logit,
    Op.ENTR: torch.special.entr,
    Op.HUBER: lambda x, delta: F.huber_loss(x, torch.zeros_like(x), "none", delta),
    Op.ASIN: torch.asin,
    Op.ACOS: torch.acos,
    Op.ASINH: torch.asinh,
    Op.ACOSH: torch.acosh,
    Op.SINC: torch.sinc,
    Op.BINARY_CROSS_ENTROPY: _binary_cross_entropy,
    Op.EXPAND: lambda x, shape: x.expand(shape),
    Op.PERMUTE: lambda x, dims: x.permute(dims),
    Op.RESHAPE: lambda x, shape: x.reshape(shape),
    Op.SLICE: _slice,
    Op.CONCAT: _concat,
    Op.GATHER: _gather,
    Op.DETACH: torch.detach,
    Op.SUM: lambda x, dims: x.sum(dims, keepdim=True) if dims else x,
    Op.PROD: _prod,
    Op.AMAX: _keepdim(torch.amax),
    Op.AMIN: _keepdim(torch.amin),
    Op.MAX: _extreme(torch.max),
    Op.MIN: _extreme(torch.min),
    Op.MOMENTS: _moments,
    Op.NORMALIZER: _normalizer,
    Op.MEAN: _keepdim(torch.mean),
    Op.VAR: _var,
    Op.STD: _std,
    Op.VECTOR_NORM: _vector_norm,
    Op.LOGSUMEXP: _keepdim(torch.logsumexp),
    Op.CUMSUM: lambda x: x.cumsum(-1),
    Op.CUMPROD: lambda x: x.cumprod(-1),
    Op.CUMMAX: lambda x: x.cummax(-1).values,
    Op.CUMMIN: lambda x: x.cummin(-1).values,
    Op.LAST_MAX: lambda x, part: getattr(x.cummax(-1), part),
    Op.LAST_MIN: lambda x, part: getattr(x.cummin(-1), part),
    Op.LOGCUMSUMEXP: lambda x: x.logcumsumexp(-1),
    Op.MATMUL: torch.matmul,
    Op.SORTED: lambda keys: keys.sort(-1).values,
    Op.TOPK: _topk,
    Op.LAST: lambda index, length: index.new_full((length,), -1).index_reduce_(0, index, torch.arange(len(index)), "amax"),
    Op.SCATTER_ADD: lambda x, index, length: x.new_zeros(length, x.shape[1]).index_add_(0, index, x),
    Op.RUN_SUM: lambda x, keys, order, length: x.new_zeros(length, x.shape[1]).index_add_(0, keys.long(), x[order]),
    Op.ATTENTION: lambda *operands, **attrs: _attention(operands, **attrs),
    Op.ATTENTION_BACKWARD: lambda *operands, **attrs: _attention_backward(operands, **attrs),
    Op.SOFTMAX: lambda x, dim: torch.softmax(x, dim),
    Op.SAFE_SOFTMAX: lambda x, dim: torch.softmax(x, dim).masked_fill((x == -torch.inf).all(dim, True), 0.0),
    Op.LOG_SOFTMAX: lambda x, dim: torch.log_softmax(x, dim),
    Op.LAYER_NORM: _layer_norm,
    Op.RMS_NORM: _rms_norm,
}
"""One rule per operation, except leaves and writes."""
