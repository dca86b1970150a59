"""The one table of operations.

Each row says what an operation *is* (its family, operands, result dtype) and which torch functions mean it. How it is
computed stands elsewhere, one table an interpreter: `ir.reference` (the float64 oracle, every row), `passes.expand`
(rows that are compositions), `ir.reductions` (the primitive reductions), `emit.cuda` and `emit.cpu` (the
primitive pointwise rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Family(Enum):
    """The treatment of indices by an operation; shapes, fusion and lowering go by it."""

    LEAF = "leaf"
    POINTWISE = "pointwise"
    VIEW = "view"
    INDEXING = "indexing"
    REDUCTION = "reduction"
    SCAN = "scan"
    ORDER = "order"  # each row in another order
    CONTRACTION = "contraction"
    LIBRARY = "library"  # torch computes it in a step of its own: its operands and what it gives lie in memory
    NORMALIZATION = "normalization"
    WRITE = "write"


class Result(Enum):
    """The rule for a result's dtype."""

    PROMOTE = "promote"  # the operands' common type
    FLOAT = "float"  # the common type, integers becoming float32
    FLOATING = "floating"  # the common type, which is a float: torch has no such operation of integers
    BOOL = "bool"
    SAME = "same"  # the first operand's type
    SUM = "sum"  # as SAME, integers and bool widening to int64
    PART = "part"  # of the component of a state that the attribute names (`ir.reductions`)
    EXPLICIT = "explicit"  # stands in the attributes


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: the field's standard name.
        family: how it treats indices.
        arity: number of tensor operands; None is any.
        result: rule for the dtype of the result.
        primitive: whether the compiler emits it as it stands; otherwise `passes.expand` says what it is made of.
        twins: torch functions and methods of the same meaning: names in torch, torch.special, nn.functional, Tensor.
        parameters: further arguments in torch's order, with their defaults.
        numbers: names of further arguments that are numbers. A literal one is an attribute of a node; one that is known at each
            call only is an operand behind the tensors (`Node.numbers`).
    """

    name: str
    family: Family
    arity: int | None
    result: Result
    primitive: bool = True
    twins: tuple[str, ...] = ()
    parameters: tuple[tuple[str, object], ...] = ()
    numbers: tuple[str, ...] = ()


def _leaf(name: str) -> Row:
    return Row(name, Family.LEAF, 0, Result.EXPLICIT)


def _unary(name: str, *twins: str, result: Result = Result.FLOAT) -> Row:
    return Row(name, Family.POINTWISE, 1, result, twins=(name, *twins))


def _binary(name: str, *twins: str, result: Result = Result.PROMOTE) -> Row:
    return Row(name, Family.POINTWISE, 2, result, twins=(name, *twins))


def _composite(name: str, *twins: str, arity: int = 1, result: Result = Result.FLOATING, **parameters: object) -> Row:
    numbers = tuple(key for key, default in parameters.items() if isinstance(default, float))
    return Row(name, Family.POINTWISE, arity, result, False, (name, *twins), tuple(parameters.items()), numbers)


def _composed(name: str, arity: int, result: Result = Result.PROMOTE, numbers: tuple[str, ...] = ()) -> Row:
    """A composition with a handler of its own, as torch spells it in its own way."""
    return Row(name, Family.POINTWISE, arity, result, primitive=False, numbers=numbers)


def _view(name: str, arity: int | None = 1) -> Row:
    return Row(name, Family.VIEW, arity, Result.SAME)


def _reduction(name: str, result: Result, primitive: bool = True, numbers: tuple[str, ...] = ()) -> Row:
    return Row(name, Family.REDUCTION, 1, result, primitive, numbers=numbers)


def _scan(name: str, result: Result) -> Row:
    return Row(name, Family.SCAN, 1, result)


def _normalization(name: str, result: Result = Result.FLOATING, numbers: tuple[str, ...] = ()) -> Row:
    return Row(name, Family.NORMALIZATION, None, result, primitive=False, numbers=numbers)


class Op(Enum):
    """Every operation of the graph."""

    # Leaves.
    INPUT = _leaf("input")
    SCALAR = _leaf("scalar")
    CONSTANT = _leaf("constant")
    IOTA = _leaf("iota")
    SIZE = _leaf("size")

    # 16 bits for each element, of the key that it is called with (a number), or of one that a call draws; see `ir.random`.
    RANDOM = Row("random", Family.LEAF, None, Result.EXPLICIT)

    # Pointwise primitives.
    CAST = Row("cast", Family.POINTWISE, 1, Result.EXPLICIT)
    NEG = _unary("neg", "negative", result=Result.SAME)
    ABS = _unary("abs", "absolute", result=Result.SAME)
    SIGN = _unary("sign", result=Result.SAME)
    LOGICAL_NOT = _unary("logical_not", result=Result.BOOL)
    FLOOR = _unary("floor", result=Result.SAME)
    CEIL = _unary("ceil", result=Result.SAME)
    TRUNC = _unary("trunc", "fix", result=Result.SAME)
    ROUND = _unary("round", result=Result.SAME)
    EXP = _unary("exp")
    EXP2 = _unary("exp2")
    EXPM1 = _unary("expm1")
    LOG = _unary("log")
    LOG1P = _unary("log1p")
    LOG2 = _unary("log2")
    SQRT = _unary("sqrt")
    RSQRT = _unary("rsqrt")
    SIN = _unary("sin")
    COS = _unary("cos")
    TANH = _unary("tanh")
    ERF = _unary("erf")
    ONE_PLUS_ERF = Row("one_plus_erf", Family.POINTWISE, 1, Result.FLOAT)  # made of a sum, which would cancel
    ERFC = _unary("erfc")
    LGAMMA = _unary("lgamma", "gammaln")
    SIGMOID = _unary("sigmoid", "expit")
    ADD = Row("add", Family.POINTWISE, 2, Result.PROMOTE)
    SUB = Row("sub", Family.POINTWISE, 2, Result.PROMOTE)
    MUL = _binary("mul", "multiply")
    DIV = Row("div", Family.POINTWISE, 2, Result.FLOAT)
    EXP_BELOW = Row("exp_below", Family.POINTWISE, 2, Result.FLOAT)  # e^(x - peak) of x up to the peak; 1 at it, infinite or not
    FLOOR_DIVIDE = _binary("floor_divide")
    REMAINDER = _binary("remainder")
    POW = _binary("pow")
    ATAN2 = _binary("atan2", "arctan2", result=Result.FLOAT)
    MAXIMUM = _binary("maximum")
    MINIMUM = _binary("minimum")
    EQ = _binary("eq", result=Result.BOOL)
    NE = _binary("ne", "not_equal", result=Result.BOOL)
    LT = _binary("lt", "less", result=Result.BOOL)
    LE = _binary("le", "less_equal", result=Result.BOOL)
    GT = _binary("gt", "greater", result=Result.BOOL)
    GE = _binary("ge", "greater_equal", result=Result.BOOL)
    LOGICAL_AND = _binary("logical_and", result=Result.BOOL)
    LOGICAL_OR = _binary("logical_or", result=Result.BOOL)
    LOGICAL_XOR = _binary("logical_xor", result=Result.BOOL)
    BITWISE_AND = Row("bitwise_and", Family.POINTWISE, 2, Result.PROMOTE)
    BITWISE_OR = Row("bitwise_or", Family.POINTWISE, 2, Result.PROMOTE)
    BITWISE_XOR = Row("bitwise_xor", Family.POINTWISE, 2, Result.PROMOTE)
    LEFT_SHIFT = Row("bitwise_left_shift", Family.POINTWISE, 2, Result.PROMOTE)
    RIGHT_SHIFT = Row("bitwise_right_shift", Family.POINTWISE, 2, Result.PROMOTE)
    WHERE = Row("where", Family.POINTWISE, 3, Result.PROMOTE)
    # (x, index): a number in the order of the float32 numbers x (NaN the greatest, -0 as 0), equal ones by their index below 2^31;
    # and the x of such a number.
    SORT_KEY = Row("sort_key", Family.POINTWISE, 2, Result.EXPLICIT)
    SORTED_VALUE = Row("sorted_value", Family.POINTWISE, 1, Result.EXPLICIT)
    COPY = Row("copy", Family.POINTWISE, 1, Result.SAME)  # its operand, in memory of its own: before a write changes it

    # Pointwise compositions.
    RECIPROCAL = _composite("reciprocal", result=Result.FLOAT)
    SQUARE = _composite("square", result=Result.SAME)
    RELU = _composite("relu", result=Result.SAME)
    SILU = _composite("silu")
    GELU = _composite("gelu", approximate="none")
    SOFTPLUS = _composite("softplus", beta=1.0, threshold=20.0)
    LEAKY_RELU = _composite("leaky_relu", negative_slope=0.01)
    ELU = _composite("elu", alpha=1.0)
    MISH = _composite("mish")
    HARDSIGMOID = _composite("hardsigmoid")
    HARDSWISH = _composite("hardswish")
    LOGSIGMOID = _composite("logsigmoid")
    CELU = _composite("celu", alpha=1.0)
    SINH = _composite("sinh", result=Result.FLOAT)
    COSH = _composite("cosh", result=Result.FLOAT)
    ERFINV = _composite("erfinv", result=Result.FLOAT)
    ERFCX = _composite("erfcx", result=Result.FLOAT)
    LOG_NDTR = _composite("log_ndtr", result=Result.FLOAT)
    DIGAMMA = _composite("digamma", "psi", result=Result.FLOAT)
    TRIGAMMA = _composed("trigamma", 1, Result.FLOAT)
    I0 = _composite("i0", result=Result.FLOAT)
    I0E = _composite("i0e", result=Result.FLOAT)
    I1 = _composite("i1", result=Result.FLOAT)
    I1E = _composite("i1e", result=Result.FLOAT)
    CLAMP_MIN = _composed("clamp_min", 2)
    CLAMP_MAX = _composed("clamp_max", 2)
    HARDTANH = _composed("hardtanh", 3)
    PRELU = _composed("prelu", 2)
    FMOD = _composed("fmod", 2)
    XLOGY = _composed("xlogy", 2, Result.FLOAT)
    XLOG1PY = _composed("xlog1py", 2, Result.FLOAT)
    HYPOT = _composed("hypot", 2, Result.FLOATING)
    LOGIT = _composed("logit", 1, Result.FLOAT)
    ENTR = _composed("entr", 1, Result.FLOATING)
    HUBER = _composed("huber", 1, Result.FLOATING, ("delta",))
    ASIN = _composed("asin", 1, Result.FLOATING)
    ACOS = _composed("acos", 1, Result.FLOATING)
    ASINH = _composed("asinh", 1, Result.FLOATING)
    ACOSH = _composed("acosh", 1, Result.FLOATING)
    SINC = _composed("sinc", 1, Result.FLOATING)
    BINARY_CROSS_ENTROPY = _composed("binary_cross_entropy", 2, Result.FLOATING)

    # Views: index maps, never copies.
    EXPAND = _view("expand")
    PERMUTE = _view("permute")
    RESHAPE = _view("reshape")
    SLICE = _view("slice")
    CONCAT = _view("concat", None)
    DETACH = Row("detach", Family.VIEW, 1, Result.SAME, primitive=False)  # its operand, of which it has no derivative

    # (x, index): x at the index's values along a dim, and at the same places along all others.
    GATHER = Row("gather", Family.INDEXING, 2, Result.SAME)

    # (place, value): the tensor that the place is a view of, or gathered from, once the value was written there. It lies in the
    # memory of an input, of which it is the next version; what the place is made of is that input or an earlier version.
    PUT = Row("put", Family.WRITE, 2, Result.SAME)

    # Reductions over the dims in the attributes; a reduced dim is kept with extent 1. `ir.reductions` has a row for each primitive.
    SUM = _reduction("sum", Result.SUM)
    PROD = _reduction("prod", Result.SUM)
    AMAX = _reduction("amax", Result.SAME)
    AMIN = _reduction("amin", Result.SAME)
    MAX = _reduction("max", Result.PART)
    MIN = _reduction("min", Result.PART)
    MOMENTS = _reduction("moments", Result.PART)
    NORMALIZER = _reduction("normalizer", Result.PART)
    MEAN = _reduction("mean", Result.FLOATING, primitive=False)
    VAR = _reduction("var", Result.FLOATING, primitive=False, numbers=("correction",))
    STD = _reduction("std", Result.FLOATING, primitive=False, numbers=("correction",))
    VECTOR_NORM = _reduction("vector_norm", Result.FLOATING, primitive=False, numbers=("ord",))
    LOGSUMEXP = _reduction("logsumexp", Result.FLOATING, primitive=False)

    # Scans along the last dim: what a reduction (`ir.reductions.SCANS`) gives of each element and those before it.
    CUMSUM = _scan("cumsum", Result.SUM)
    CUMPROD = _scan("cumprod", Result.SUM)
    CUMMAX = _scan("cummax", Result.SAME)
    CUMMIN = _scan("cummin", Result.SAME)
    LAST_MAX = _scan("last_max", Result.PART)  # where the running extremum stands: the last of equal ones
    LAST_MIN = _scan("last_min", Result.PART)
    LOGCUMSUMEXP = _scan("logcumsumexp", Result.FLOATING)

    # (keys): each row (the last dim) of different integers in rising order.
    SORTED = Row("sorted", Family.ORDER, 1, Result.SAME)

    # (…, m, k) @ (…, k, n), batch dims equal or 1.
    MATMUL = Row("matmul", Family.CONTRACTION, 2, Result.PROMOTE)

    # (rows, index): (length, width) sums, of rows (n, width) those of which the index (n,) names the sum.
    SCATTER_ADD = Row("scatter_add", Family.LIBRARY, 2, Result.SAME)

    # (index): of each number below the length, where the index (n,) has it last; -1 where it has not.
    LAST = Row("last", Family.LIBRARY, 1, Result.SAME)

    # (x): the first `length` of each row (the last dim), the greatest first where `descending`, with NaN above all numbers; 0 as
    # `result` is the values, 1 their indices. Equal values of whole rows keep their order.
    TOPK = Row("topk", Family.LIBRARY, 1, Result.EXPLICIT)

    # (q, k, v[, bias]): softmax(scale q kᵀ + bias) v of (batch, head, position, channel); heads of q may share one of k and v, and
    # `causal` leaves the keys up to the query's own position. `result` 0 is the values, 1 the logsumexp of each query's scores,
    # which is any number where no score counts; `order` that of its dims. A share `dropout` of the weights is dropped, by bits that
    # torch draws; 2 is the state of its generator.
    ATTENTION = Row("attention", Family.LIBRARY, None, Result.EXPLICIT)

    # (gradient by the values, values, logsumexp, q, k, v[, bias or state]): that by q, k, v or bias, by the same attributes.
    ATTENTION_BACKWARD = Row("attention_backward", Family.LIBRARY, None, Result.EXPLICIT)

    # (operands): a result of a loop over blocks of rows (`ir.blocks`), which the attribute `blocks` describes.
    BLOCKS = Row("blocks", Family.LIBRARY, None, Result.EXPLICIT)

    # Compositions over the last dims.
    SOFTMAX = _normalization("softmax")
    SAFE_SOFTMAX = _normalization("safe_softmax")  # 0, and not NaN, where all of a row are minus infinity
    LOG_SOFTMAX = _normalization("log_softmax")
    LAYER_NORM = _normalization("layer_norm", Result.SAME, ("eps",))
    RMS_NORM = _normalization("rms_norm", Result.SAME, ("eps",))

    @property
    def row(self) -> Row:
        """The operation's row of the table."""
        row: Row = self.value
        return row

    @property
    def family(self) -> Family:
        """The operation's treatment of indices."""
        return self.row.family

    @property
    def is_primitive(self) -> bool:
        """Tells if the compiler emits the operation as it stands."""
        return self.row.primitive

    def __repr__(self) -> str:
        return self.row.name
