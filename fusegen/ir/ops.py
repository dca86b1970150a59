"""The table of operations.

Each row defines an operation (its family, operands, result dtype) and lists the equivalent torch functions. Each interpreter has
a table of implementations: `ir.reference` (the float64 oracle, every row), `passes.expand` (composite rows), `ir.reductions` (the
primitive reductions), `emit.cuda` and `emit.cpu` (the primitive pointwise rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Family(Enum):
    """Groups operations by their treatment of indices, which decides shapes, fusion and lowering."""

    LEAF = "leaf"
    POINTWISE = "pointwise"
    VIEW = "view"
    INDEXING = "indexing"
    REDUCTION = "reduction"
    SCAN = "scan"
    ORDER = "order"  # permutes each row
    CONTRACTION = "contraction"
    LIBRARY = "library"  # computed by torch in its own step: operands and results are materialized
    NORMALIZATION = "normalization"
    WRITE = "write"


class DtypeRule(Enum):
    PROMOTE = "promote"  # the operands' common type
    FLOAT = "float"  # the common type, integers becoming float32
    FLOATING = "floating"  # the common type, which must be a float: torch does not define the operation for integers
    BOOL = "bool"
    SAME = "same"  # the first operand's type
    SUM = "sum"  # as SAME, integers and bool widening to int64
    PART = "part"  # the type of the state component named by the attribute (`ir.reductions`)
    EXPLICIT = "explicit"  # given by the attributes


@dataclass(frozen=True)
class OpRow:
    """One row of the table.

    Attributes:
        name: the field's standard name.
        arity: number of tensor operands; None for any number.
        primitive: True if the compiler emits the operation itself; else `passes.expand` decomposes it.
        torch_names: equivalent functions and methods in torch, torch.special, nn.functional, Tensor.
        parameters: further arguments in torch's order, with their defaults.
        numbers: names of further number arguments. A literal number is an attribute of the node; a run-time number is an
            operand after the tensors (`Node.numbers`).
    """

    name: str
    family: Family
    arity: int | None
    result: DtypeRule
    primitive: bool = True
    torch_names: tuple[str, ...] = ()
    parameters: tuple[tuple[str, object], ...] = ()
    numbers: tuple[str, ...] = ()


def _leaf(name: str) -> OpRow:
    return OpRow(name, Family.LEAF, 0, DtypeRule.EXPLICIT)


def _unary(name: str, *torch_names: str, result: DtypeRule = DtypeRule.FLOAT) -> OpRow:
    return OpRow(name, Family.POINTWISE, 1, result, torch_names=(name, *torch_names))


def _binary(name: str, *torch_names: str, result: DtypeRule = DtypeRule.PROMOTE) -> OpRow:
    return OpRow(name, Family.POINTWISE, 2, result, torch_names=(name, *torch_names))


def _composite(name: str, *torch_names: str, arity: int = 1, result: DtypeRule = DtypeRule.FLOATING, **parameters: object) -> OpRow:
    numbers = tuple(key for key, default in parameters.items() if isinstance(default, float))
    return OpRow(name, Family.POINTWISE, arity, result, False, (name, *torch_names), tuple(parameters.items()), numbers)


def _composed(name: str, arity: int, result: DtypeRule = DtypeRule.PROMOTE, numbers: tuple[str, ...] = ()) -> OpRow:
    """A composite operation whose torch function has other parameters, so that the tracer handles it explicitly."""
    return OpRow(name, Family.POINTWISE, arity, result, primitive=False, numbers=numbers)


def _view(name: str, arity: int | None = 1) -> OpRow:
    return OpRow(name, Family.VIEW, arity, DtypeRule.SAME)


def _reduction(name: str, result: DtypeRule, primitive: bool = True, numbers: tuple[str, ...] = ()) -> OpRow:
    return OpRow(name, Family.REDUCTION, 1, result, primitive, numbers=numbers)


def _scan(name: str, result: DtypeRule) -> OpRow:
    return OpRow(name, Family.SCAN, 1, result)


def _normalization(name: str, result: DtypeRule = DtypeRule.FLOATING, numbers: tuple[str, ...] = ()) -> OpRow:
    return OpRow(name, Family.NORMALIZATION, None, result, primitive=False, numbers=numbers)


class Op(Enum):
    # Leaves.
    INPUT = _leaf("input")
    SCALAR = _leaf("scalar")
    CONSTANT = _leaf("constant")
    IOTA = _leaf("iota")
    SIZE = _leaf("size")

    # 16 random bits per element, from the key operand (a number) or from a key drawn at each call; see `ir.random`.
    RANDOM = OpRow("random", Family.LEAF, None, DtypeRule.EXPLICIT)

    # Pointwise primitives.
    CAST = OpRow("cast", Family.POINTWISE, 1, DtypeRule.EXPLICIT)
    NEG = _unary("neg", "negative", result=DtypeRule.SAME)
    ABS = _unary("abs", "absolute", result=DtypeRule.SAME)
    SIGN = _unary("sign", result=DtypeRule.SAME)
    LOGICAL_NOT = _unary("logical_not", result=DtypeRule.BOOL)
    FLOOR = _unary("floor", result=DtypeRule.SAME)
    CEIL = _unary("ceil", result=DtypeRule.SAME)
    TRUNC = _unary("trunc", "fix", result=DtypeRule.SAME)
    ROUND = _unary("round", result=DtypeRule.SAME)
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
    ONE_PLUS_ERF = OpRow("one_plus_erf", Family.POINTWISE, 1, DtypeRule.FLOAT)  # a sum would cancel
    ERFC = _unary("erfc")
    LGAMMA = _unary("lgamma", "gammaln")
    SIGMOID = _unary("sigmoid", "expit")
    ADD = OpRow("add", Family.POINTWISE, 2, DtypeRule.PROMOTE)
    SUB = OpRow("sub", Family.POINTWISE, 2, DtypeRule.PROMOTE)
    MUL = _binary("mul", "multiply")
    DIV = OpRow("div", Family.POINTWISE, 2, DtypeRule.FLOAT)
    EXP_BELOW = OpRow("exp_below", Family.POINTWISE, 2, DtypeRule.FLOAT)  # e^(x - max) for x <= max; 1 at x = max, also if infinite
    FLOOR_DIVIDE = _binary("floor_divide")
    REMAINDER = _binary("remainder")
    POW = _binary("pow")
    ATAN2 = _binary("atan2", "arctan2", result=DtypeRule.FLOAT)
    MAXIMUM = _binary("maximum")
    MINIMUM = _binary("minimum")
    EQ = _binary("eq", result=DtypeRule.BOOL)
    NE = _binary("ne", "not_equal", result=DtypeRule.BOOL)
    LT = _binary("lt", "less", result=DtypeRule.BOOL)
    LE = _binary("le", "less_equal", result=DtypeRule.BOOL)
    GT = _binary("gt", "greater", result=DtypeRule.BOOL)
    GE = _binary("ge", "greater_equal", result=DtypeRule.BOOL)
    LOGICAL_AND = _binary("logical_and", result=DtypeRule.BOOL)
    LOGICAL_OR = _binary("logical_or", result=DtypeRule.BOOL)
    LOGICAL_XOR = _binary("logical_xor", result=DtypeRule.BOOL)
    BITWISE_AND = OpRow("bitwise_and", Family.POINTWISE, 2, DtypeRule.PROMOTE)
    BITWISE_OR = OpRow("bitwise_or", Family.POINTWISE, 2, DtypeRule.PROMOTE)
    BITWISE_XOR = OpRow("bitwise_xor", Family.POINTWISE, 2, DtypeRule.PROMOTE)
    LEFT_SHIFT = OpRow("bitwise_left_shift", Family.POINTWISE, 2, DtypeRule.PROMOTE)
    RIGHT_SHIFT = OpRow("bitwise_right_shift", Family.POINTWISE, 2, DtypeRule.PROMOTE)
    WHERE = OpRow("where", Family.POINTWISE, 3, DtypeRule.PROMOTE)
    # (x, index): an integer key that orders float32 numbers (NaN greatest, -0 as 0), ties by an index below 2^31. DESCENDING_KEY
    # reverses the order of values, but not of indices. The values and the index are recovered from keys.
    SORT_KEY = OpRow("sort_key", Family.POINTWISE, 2, DtypeRule.EXPLICIT)
    DESCENDING_KEY = OpRow("descending_key", Family.POINTWISE, 2, DtypeRule.EXPLICIT)
    SORTED_VALUE = OpRow("sorted_value", Family.POINTWISE, 1, DtypeRule.EXPLICIT)
    DESCENDING_VALUE = OpRow("descending_value", Family.POINTWISE, 1, DtypeRule.EXPLICIT)
    KEY_INDEX = OpRow("key_index", Family.POINTWISE, 1, DtypeRule.EXPLICIT)
    COPY = OpRow("copy", Family.POINTWISE, 1, DtypeRule.SAME)  # a copy of its operand, before a write changes it

    # Pointwise compositions.
    RECIPROCAL = _composite("reciprocal", result=DtypeRule.FLOAT)
    SQUARE = _composite("square", result=DtypeRule.SAME)
    RELU = _composite("relu", result=DtypeRule.SAME)
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
    SINH = _composite("sinh", result=DtypeRule.FLOAT)
    COSH = _composite("cosh", result=DtypeRule.FLOAT)
    ERFINV = _composite("erfinv", result=DtypeRule.FLOAT)
    DIGAMMA = _composite("digamma", "psi", result=DtypeRule.FLOAT)
    CLAMP_MIN = _composed("clamp_min", 2)
    CLAMP_MAX = _composed("clamp_max", 2)
    HARDTANH = _composed("hardtanh", 3)
    PRELU = _composed("prelu", 2)
    FMOD = _composed("fmod", 2)
    XLOGY = _composed("xlogy", 2, DtypeRule.FLOAT)
    XLOG1PY = _composed("xlog1py", 2, DtypeRule.FLOAT)
    HYPOT = _composed("hypot", 2, DtypeRule.FLOATING)
    LOGIT = _composed("logit", 1, DtypeRule.FLOAT)
    ENTR = _composed("entr", 1, DtypeRule.FLOATING)
    HUBER = _composed("huber", 1, DtypeRule.FLOATING, ("delta",))
    ASIN = _composed("asin", 1, DtypeRule.FLOATING)
    ACOS = _composed("acos", 1, DtypeRule.FLOATING)
    ASINH = _composed("asinh", 1, DtypeRule.FLOATING)
    ACOSH = _composed("acosh", 1, DtypeRule.FLOATING)
    SINC = _composed("sinc", 1, DtypeRule.FLOATING)
    BINARY_CROSS_ENTROPY = _composed("binary_cross_entropy", 2, DtypeRule.FLOATING)

    # Views: index maps, never copies.
    EXPAND = _view("expand")
    PERMUTE = _view("permute")
    RESHAPE = _view("reshape")
    SLICE = _view("slice")
    CONCAT = _view("concat", None)
    DETACH = OpRow("detach", Family.VIEW, 1, DtypeRule.SAME, primitive=False)  # its operand, with a zero derivative

    # (x, index): x at the index's values along a dim, like torch.gather.
    GATHER = OpRow("gather", Family.INDEXING, 2, DtypeRule.SAME)

    # (target, value): a functionalized write. The target is a view of, or a gather from, an input or its previous version;
    # the result is that tensor after the write, stored in the input's memory.
    PUT = OpRow("put", Family.WRITE, 2, DtypeRule.SAME)

    # Reductions over the dims in the attributes; a reduced dim stays with extent 1. `ir.reductions` defines each primitive.
    SUM = _reduction("sum", DtypeRule.SUM)
    PROD = _reduction("prod", DtypeRule.SUM)
    AMAX = _reduction("amax", DtypeRule.SAME)
    AMIN = _reduction("amin", DtypeRule.SAME)
    MAX = _reduction("max", DtypeRule.PART)
    MIN = _reduction("min", DtypeRule.PART)
    MOMENTS = _reduction("moments", DtypeRule.PART)
    NORMALIZER = _reduction("normalizer", DtypeRule.PART)
    MEAN = _reduction("mean", DtypeRule.FLOATING, primitive=False)
    VAR = _reduction("var", DtypeRule.FLOATING, primitive=False, numbers=("correction",))
    STD = _reduction("std", DtypeRule.FLOATING, primitive=False, numbers=("correction",))
    VECTOR_NORM = _reduction("vector_norm", DtypeRule.FLOATING, primitive=False, numbers=("ord",))
    LOGSUMEXP = _reduction("logsumexp", DtypeRule.FLOATING, primitive=False)

    # Scans along the last dim: the reduction (`ir.reductions.SCANS`) of each prefix.
    CUMSUM = _scan("cumsum", DtypeRule.SUM)
    CUMPROD = _scan("cumprod", DtypeRule.SUM)
    CUMMAX = _scan("cummax", DtypeRule.SAME)
    CUMMIN = _scan("cummin", DtypeRule.SAME)
    LAST_MAX = _scan("last_max", DtypeRule.PART)  # the index of the running maximum: the last of equal ones
    LAST_MIN = _scan("last_min", DtypeRule.PART)
    LOGCUMSUMEXP = _scan("logcumsumexp", DtypeRule.FLOATING)

    # (keys): sorts each row (the last dim) of distinct integers in ascending order.
    SORTED = OpRow("sorted", Family.ORDER, 1, DtypeRule.SAME)

    # (…, m, k) @ (…, k, n), batch dims equal or 1.
    MATMUL = OpRow("matmul", Family.CONTRACTION, 2, DtypeRule.PROMOTE)

    # (rows, index): adds each row of (n, width) to the row index[n] of a (length, width) result.
    SCATTER_ADD = OpRow("scatter_add", Family.LIBRARY, 2, DtypeRule.SAME)

    # (rows, keys, order): SCATTER_ADD of sorted indices: adds the row order[n] of (n, width) to the row keys[n] of the result.
    RUN_SUM = OpRow("run_sum", Family.LIBRARY, 3, DtypeRule.SAME)

    # (index): for each number below the length, its last position in the index (n,), or -1.
    LAST = OpRow("last", Family.LIBRARY, 1, DtypeRule.SAME)

    # (x): the first `length` of each sorted row (the last dim), NaN above all numbers. `result` 0 is the values, 1 their indices.
    # Sorting whole rows is stable.
    TOPK = OpRow("topk", Family.LIBRARY, 1, DtypeRule.EXPLICIT)

    # (q, k, v[, bias]): softmax(scale q kᵀ + bias) v over (batch, head, position, channel), with GQA groups and causal masking.
    # `result` 0 is the values, 1 the logsumexp of each query's scores (undefined if all scores are masked), 2 the state of torch's
    # generator, which draws the dropout mask of probability `dropout`; `order` permutes the result's dims.
    ATTENTION = OpRow("attention", Family.LIBRARY, None, DtypeRule.EXPLICIT)

    # (gradient of the values, values, logsumexp, q, k, v[, bias or state]): the gradient of q, k, v or bias; same attributes.
    ATTENTION_BACKWARD = OpRow("attention_backward", Family.LIBRARY, None, DtypeRule.EXPLICIT)

    # (operands): a result of the loop over blocks of rows in the attribute `blocks` (`ir.blocks`).
    BLOCKS = OpRow("blocks", Family.LIBRARY, None, DtypeRule.EXPLICIT)

    # Compositions over the last dims.
    SOFTMAX = _normalization("softmax")
    SAFE_SOFTMAX = _normalization("safe_softmax")  # 0, not NaN, for rows of -inf
    LOG_SOFTMAX = _normalization("log_softmax")
    LAYER_NORM = _normalization("layer_norm", DtypeRule.SAME, ("eps",))
    RMS_NORM = _normalization("rms_norm", DtypeRule.SAME, ("eps",))

    @property
    def row(self) -> OpRow:
        row: OpRow = self.value
        return row

    @property
    def family(self) -> Family:
        return self.row.family

    @property
    def is_primitive(self) -> bool:
        return self.row.primitive

    def __repr__(self) -> str:
        return self.row.name


NOUNS = {
    Op.ADD: "sum",
    Op.SUB: "difference",
    Op.MUL: "product",
    Op.DIV: "quotient",
    Op.FLOOR_DIVIDE: "quotient",
    Op.NEG: "negative",
    Op.ABS: "magnitude",
    Op.POW: "power",
    Op.SQRT: "root",
    Op.RSQRT: "reciprocal_root",
    Op.EXP: "exponential",
    Op.EXP2: "exponential",
    Op.EXP_BELOW: "exponential",
    Op.LOG: "logarithm",
    Op.LOG1P: "logarithm",
    Op.LOG2: "logarithm",
    Op.SIN: "sine",
    Op.COS: "cosine",
    Op.SIGMOID: "sigmoid",
    Op.MAXIMUM: "larger",
    Op.MINIMUM: "smaller",
    Op.WHERE: "chosen",
    Op.CAST: "rounded",
    Op.EQ: "is_equal",
    Op.NE: "differs",
    Op.LT: "is_less",
    Op.LE: "is_at_most",
    Op.GT: "is_greater",
    Op.GE: "is_at_least",
    Op.LOGICAL_AND: "are_both",
    Op.LOGICAL_OR: "is_either",
    Op.LOGICAL_NOT: "is_not",
    Op.BITWISE_XOR: "bits",
    Op.RIGHT_SHIFT: "shifted",
    Op.SORT_KEY: "key_of_element",
    Op.DESCENDING_KEY: "key_of_element",
    Op.SORTED_VALUE: "element",
    Op.DESCENDING_VALUE: "element",
    Op.KEY_INDEX: "element_index",
    Op.FLOOR: "floored",
    Op.ROUND: "rounded",
    Op.SUM: "total",
    Op.AMAX: "largest",
    Op.AMIN: "smallest",
    Op.MAX: "greatest",
    Op.MIN: "least",
    Op.GATHER: "gathered",
}
"""Names of values that no variable of the user holds; others are named after their operation."""
