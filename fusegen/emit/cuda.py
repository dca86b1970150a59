"""CUDA text: complete files, the spelling of operations, and kernels of several parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from fusegen.dtypes import DType
from fusegen.emit.environment import PrimitiveUses, banner, banner_of_parts, code_of, needed_definitions, primitives_of, render
from fusegen.emit.math import Language, Precedence, Spelling, function, function_text, with_quotes
from fusegen.emit.views import entry, kernel_parameters
from fusegen.fusion import Group
from fusegen.fusion.groups import computed
from fusegen.ir.blocks import is_start
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.ir.reductions import REDUCTIONS
from fusegen.program.call import COUNTERS
from fusegen.schedule.math import Approximations, MathFunction
from fusegen.schedule.program import Launch, fused_launch, has_one_block
from fusegen.source import Source, fitted, section
from fusegen.target import Target

_BUILTINS = {
    Op.ABS: "fabs",
    Op.FLOOR: "floor",
    Op.CEIL: "ceil",
    Op.TRUNC: "trunc",
    Op.ROUND: "rint",
    Op.EXP: "exp",
    Op.EXP2: "exp2",
    Op.EXPM1: "expm1",
    Op.LOG: "log",
    Op.LOG1P: "log1p",
    Op.LOG2: "log2",
    Op.SQRT: "sqrt",
    Op.RSQRT: "rsqrt",
    Op.SIN: "sin",
    Op.COS: "cos",
    Op.TANH: "tanh",
    Op.ERF: "erf",
    Op.ERFC: "erfc",
    Op.LGAMMA: "lgamma",
}

_DOUBLE = {
    **{op: function(name) for op, name in _BUILTINS.items()},
    Op.POW: function("pow", 2),
    Op.ATAN2: function("atan2", 2),
    Op.SIGMOID: Spelling("1.0 / (1.0 + exp(-{0}))", Precedence.PRODUCT, (Precedence.ATOM,)),
    Op.ONE_PLUS_ERF: Spelling("1.0 + erf({0})", Precedence.SUM, (Precedence.CONDITIONAL,)),
    Op.EXP_BELOW: Spelling("{0} == {1} ? 1.0 : exp({0} - {1})", Precedence.CONDITIONAL, (Precedence.PRODUCT,)),
}
_FLOAT = {
    **{op: function(f"{name}f") for op, name in _BUILTINS.items()},
    Op.POW: function("powf", 2),
    Op.ATAN2: function("atan2f", 2),
    Op.SIGMOID: Spelling("1.0f / (1.0f + expf(-{0}))", Precedence.PRODUCT, (Precedence.ATOM,)),
    Op.ONE_PLUS_ERF: Spelling("1.0f + erff({0})", Precedence.SUM, (Precedence.CONDITIONAL,)),
    Op.EXP_BELOW: function("exp_below", 2),
}
_INTEGER = {  # torch's integers wrap; signed overflow is undefined in C++, and NVRTC has no option for it
    Op.ADD: function("wrap_add", 2),
    Op.SUB: function("wrap_sub", 2),
    Op.MUL: function("wrap_mul", 2),
    Op.NEG: function("wrap_neg"),
    Op.ABS: function("wrap_abs"),
    Op.FLOOR: function(""),
    Op.CEIL: function(""),
    Op.TRUNC: function(""),
    Op.ROUND: function(""),
    Op.POW: function("integer_power", 2),
}
_BOOL = {
    Op.MUL: Spelling("{0} && {1}", Precedence.AND, (Precedence.AND, Precedence.EQUALITY)),
    Op.ADD: Spelling("{0} || {1}", Precedence.OR, (Precedence.OR, Precedence.AND)),
    Op.MAXIMUM: Spelling("{0} || {1}", Precedence.OR, (Precedence.OR, Precedence.AND)),
    Op.MINIMUM: Spelling("{0} && {1}", Precedence.AND, (Precedence.AND, Precedence.EQUALITY)),
}

# Approximate float32 functions of the hardware, for kernels with ``fast_math=True``. Errors are documented maxima: those of
# instructions from NVIDIA, PTX ISA, "Floating Point Instructions"; those of accurate functions from CUDA C++ Programming Guide,
# "Mathematical Functions", "Single-Precision Mathematical Standard Library Functions with Maximum ULP Error". nvcc's
# ``--use_fast_math`` takes the same instructions, but does not reduce angles first, gives NaN for powers of negative bases, and
# returns 0 for divisors beyond 2^126.


@dataclass(frozen=True)
class Approximation:
    """An approximate function for an operation.

    Attributes:
        form: its call.
        error: the maximum error; "ulp" are units in the last place of float32.
        accurate: the maximum error of the accurate function.
    """

    form: Spelling
    error: str
    accurate: str


FAST_MATH = {
    Op.EXP: Approximation(function("fast_exp"), "2 + |1.2 x| ulp", "1 ulp"),
    Op.EXP2: Approximation(function("fast_exp2"), "2 ulp", "2 ulp"),
    Op.EXPM1: Approximation(function("fast_expm1"), "2^-18 + 2^-22.7 |x| relative", "1 ulp"),
    Op.LOG: Approximation(function("fast_log"), "2^-22 absolute for 0.5 < x < 2, 3 ulp elsewhere", "1 ulp"),
    Op.LOG1P: Approximation(function("fast_log1p"), "2^-18 relative", "1 ulp"),
    Op.LOG2: Approximation(function("fast_log2"), "2^-22 absolute for 0.5 < x < 2, 2^-22 relative elsewhere", "1 ulp"),
    Op.SIN: Approximation(function("fast_sin"), "2^-20 absolute for |x| < 2^17", "2 ulp"),
    Op.COS: Approximation(function("fast_cos"), "2^-20 absolute for |x| < 2^17", "2 ulp"),
    Op.TANH: Approximation(function("fast_tanh"), "2^-11 relative", "2 ulp"),
    Op.SQRT: Approximation(function("fast_sqrt"), "2^-23 relative", "0.5 ulp"),
    Op.RSQRT: Approximation(function("fast_rsqrt"), "2^-22.9 relative", "2 ulp"),
    Op.DIV: Approximation(function("fast_divide", 2), "2 ulp", "0.5 ulp"),
    Op.SIGMOID: Approximation(
        Spelling("fast_reciprocal(1.0f + fast_exp(-{0}))", Precedence.ATOM, (Precedence.ATOM,)), "4 + |1.2 x| ulp", "3 ulp"
    ),
    Op.ONE_PLUS_ERF: Approximation(function("fast_one_plus_erf"), "2^-19 + 2^-22 x^2 relative", "2^-23 absolute"),
}
"""The operations with an approximate function."""


# Approximate functions for results rounded to 16 bits. Their relative errors are a few 2^-22 (2^-18 for functions that must not
# cancel), far below half a unit of such a result; values below 2^-126 may become zero. Two functions are excluded: the logarithm,
# whose absolute error shows near 1, and the hardware's tanh, whose error is a quarter of half a unit of bfloat16, and more after
# cancellation.
_SMALL = (Op.EXP, Op.EXPM1, Op.LOG1P, Op.RSQRT, Op.DIV, Op.SIGMOID, Op.ONE_PLUS_ERF)
_ROUNDED = {**{op: FAST_MATH[op].form for op in _SMALL}, Op.TANH: function("tanh_by_exp")}

CUDA = Language(
    forms={DType.FLOAT32: _FLOAT, DType.FLOAT64: _DOUBLE, DType.INT64: _INTEGER, DType.BOOL: _BOOL},
    fast={Approximations.ROUNDED: _ROUNDED, Approximations.FAST_MATH: {op: each.form for op, each in FAST_MATH.items()}},
    infinity={dtype: f"infinity<{dtype.spelling}>()" for dtype in (DType.FLOAT32, DType.FLOAT64)},
    nan={dtype: f"quiet_nan<{dtype.spelling}>()" for dtype in (DType.FLOAT32, DType.FLOAT64)},
    own_difference="nan_unless_finite",
    sine_and_cosine="sincosf",
    power="power_of",
)
"""The language of every CUDA kernel."""


def approximated(graph: Graph, group: Group) -> tuple[Op, ...]:
    """Returns the operations of a group that are approximated because its kernel was declared with `fast_math`."""
    if not graph.fast_math:
        return ()
    nodes = [graph.nodes[position] for position in sorted(computed(graph, group))]
    single = [node.op for node in nodes if node.args and graph.nodes[node.args[-1]].dtype.compute is DType.FLOAT32]
    if any(node.op in REDUCTIONS and REDUCTIONS[node.op].approximable for node in nodes):
        single.append(Op.EXP)  # combines normalizers
    return tuple(op for op in FAST_MATH if op in single)


_INLINE = "__device__ __forceinline__"
_APART = "__device__ __noinline__"
"""Qualifiers of parts that need most registers: if parts were inlined, ptxas would keep values of one in the others."""


def assemble(launch: Launch, target: Target, math: str, pipeline: str) -> Source:
    """Returns the source of a launch's kernel, with the primitives that its math and pipeline use."""
    kernel = launch.kernel
    if _is_mentioned_once("blocks", pipeline):
        pipeline = pipeline.replace(f"{_BLOCKS}, ", "", 1)  # a part that does not read the number of its blocks
    if launch.part and _is_mentioned_once("block", pipeline):
        pipeline = pipeline.replace(_BLOCK, "i32 /*block*/", 1)  # a part of one block
    if "using Index = i32;" in pipeline:
        pipeline = _with_narrow_sizes(kernel.sizes, pipeline, PART if launch.part else entry(kernel))
    return Source(
        name=kernel.name,
        entry=entry(kernel),
        language="cuda",
        banner=banner(launch, target),
        primitives=primitives_of(math + pipeline, "cuda", uses_of(launch, target, math, pipeline)),
        math=section("Math", fitted(with_quotes(math))) if math else "",
        pipeline=section("Pipeline", fitted(pipeline)),
    )


def _with_narrow_sizes(sizes: Sequence[str], pipeline: str, function: str) -> str:
    """Converts the sizes, of which a launch passes 64 bits, to the type of indices once, at the start of a kernel's function."""
    before, name, after = pipeline.rpartition(f"{function}(")
    parameters, start, text = after.partition(") {\n")
    declared = [size for size in sizes if f"i64 {size}" in re.split(r",\s*", parameters)]
    passed = {size: f"{size}_{'offset' if is_start(size) else 'extent'}" for size in declared}
    lines = []
    for size, parameter in passed.items():
        value = f"static_cast<Index>({parameter})"
        if f" = {size};" in text and _is_mentioned_once(size, text):  # the text gives it another name
            text = text.replace(f" = {size};", f" = {value};")
        else:
            lines.append(f"const Index {size} = {value};")
    needed = "".join(f"    {line}\n" for line in needed_definitions(lines, text))
    if declared:
        parameters = re.sub(rf"\bi64 ({'|'.join(declared)})\b", lambda match: f"i64 {passed[match[1]]}", parameters)
    return "".join([before, name, parameters, start, needed, text])


def _is_mentioned_once(name: str, pipeline: str) -> bool:
    return len(re.findall(rf"\b{name}\b", code_of(pipeline))) == 1


def math_text(functions: Sequence[MathFunction]) -> str:
    return "\n".join(function_text(f, CUDA, _INLINE) for f in functions)


# The head of a kernel's function: a launched entry, or a part of one, which takes its block number as an argument.


PART = "run"
"""The name of a part's function, inside the part's namespace."""

_BLOCK, _BLOCKS = "i32 block", "i32 blocks"
"""The parameters of a part that take the number of its block and of all its blocks."""


def head(launch: Launch) -> dict[str, Any]:
    """Returns the variables of a template's head. ``begins`` prints the function's head up to its parameters for some launch
    bounds, without the blocks per SM of a launch of one block; ``bound`` prints their constant. ``leading`` are a
    part's first parameters, of which `assemble` removes the number of blocks if nothing reads it; ``block`` and ``blocks`` are the
    block's number and the number of blocks."""
    is_part = launch.part > 0
    parameters = kernel_parameters(launch.kernel)
    leading = [_BLOCK, _BLOCKS] if is_part else []
    leading += ["u32* counter", "u32 ready", "u32 end"] if launch.waits else []
    return {
        "entry": entry(launch.kernel),
        "overlaps": launch.overlaps and not is_part,
        "triggers": launch.triggers,
        "parameters": [*leading, *parameters],
        "leading": leading,
        "bound": lambda count: "" if is_part or has_one_block(launch) else _blocks_per_sm(count),
        "begins": _part(_APART if launch.extra else _INLINE) if is_part else _entry(launch),
        "block": "block" if is_part else "block_id()",
        "blocks": "blocks" if is_part else "block_count()",
    }


def _blocks_per_sm(count: int) -> str:
    effect = "which limits the registers of a thread" if count > 1 else "so that a thread may take most registers"
    return f"constexpr i32 BLOCKS_PER_SM = {count};  // at least, {effect}"


def _entry(launch: Launch) -> Callable[..., str]:
    def begins(threads: str, blocks_per_sm: int | str | None = None, more: str = "") -> str:
        is_alone = blocks_per_sm is None or has_one_block(launch)
        bounds = threads if is_alone else f"{threads}, BLOCKS_PER_SM"
        return f'extern "C" __global__ void {more}__launch_bounds__({bounds})\n{entry(launch.kernel)}'

    return begins


def _part(qualifiers: str) -> Callable[..., str]:
    return lambda *_: f"{qualifiers} void {PART}"


# The types and widths of primitives that a CUDA text uses.


_WIDE_LOAD = re.compile(r"\bload_(?:lanes|vec|part|window)<(\w+)>\(\s*[^,()]+,\s*([\w.]+)")
_WIDE_STORE = re.compile(r"\bstore_(?:lanes|vec|part)<(\w+)>\(\s*([\w.]+)")
"""Vector accesses: the number of elements, and the pointer."""
_LOAD, _OTHER_LOAD = re.compile(r"(?<![.\w])load\(\s*([\w.]+)"), re.compile(r"\bload_(?:part|window|wide|wide_if)\b")
_STORE, _OTHER_STORE = re.compile(r"\bstore(?:_narrowed)?\(\s*([\w.]+)"), re.compile(r"\bstore_part\b")
"""Accesses to single elements: the pointer of those that name it, and other primitives that contain such accesses."""
_UNUSED = frozenset((16,))
"""Widths of a text without vector accesses: ``random_bits`` still mentions a vector primitive."""
_WORD = 4  # bytes of the narrowest access to a vector
_DRAWS = re.compile(r"\brandom_(?:bits|pairs)\(")
_ROUNDING_CALLS = {f"round_{dtype.short}(": dtype for dtype in DType if dtype.is_narrow}


def uses_of(launch: Launch, target: Target, math: str, pipeline: str) -> PrimitiveUses:
    kernel, math = launch.kernel, code_of(math)
    text = math + code_of(pipeline)  # math of a matmul's elements contains loads
    read = {p.name: p.dtype for p in kernel.pointers if not p.writable or _is_read(p.name, text)}
    written = {p.name: p.dtype for p in kernel.pointers if p.writable}
    converted = kernel.body.tile_dtypes | {dtype for call, dtype in _ROUNDING_CALLS.items() if call in math}
    loads, stores = _vectors(_WIDE_LOAD, read, text), _vectors(_WIDE_STORE, written, text)
    keys = {DType.INT64} if _DRAWS.search(text) else set()
    return PrimitiveUses(
        loaded=_singles(_LOAD, _OTHER_LOAD, read, text) | _narrow(loads) | keys,
        stored=_singles(_STORE, _OTHER_STORE, written, text) | _narrow(stores),
        widened=converted | {*read.values()},
        narrowed=converted | {*written.values()},
        computed=frozenset(d for d in DType if re.search(rf"\b{d.spelling}\b", math)),
        load_widths=frozenset(width for _, width in loads) or _UNUSED,
        store_widths=frozenset(width for _, width in stores) or _UNUSED,
        maps=bool(launch.tensor_maps),
        converts_float8=target.converts_float8,
    )


def _is_read(pointer: str, text: str) -> bool:
    """True if the text mentions a pointer other than in its declaration and in stores."""
    return re.search(rf"\b{pointer}\b", re.sub(rf"(?:\*\s*|\bstore\w*(?:<\w+>)?\(\s*){pointer}\b", "", text)) is not None


def _dtypes(pointer: str, dtypes: Mapping[str, DType]) -> Collection[DType]:
    """Returns the dtypes that an access may have; all, if it does not name a parameter."""
    name = pointer.rpartition(".")[2]
    return (dtypes[name],) if name in dtypes else dtypes.values()


def _singles(calls: re.Pattern[str], others: re.Pattern[str], dtypes: Mapping[str, DType], text: str) -> frozenset[DType]:
    if others.search(text):
        return frozenset(dtypes.values())
    return frozenset(dtype for pointer in calls.findall(text) for dtype in _dtypes(pointer, dtypes))


def _vectors(calls: re.Pattern[str], dtypes: Mapping[str, DType], text: str) -> frozenset[tuple[DType, int]]:
    """Returns the dtype and the bytes of the accesses to vectors. Random bits are computed."""
    found = [(_count(word, text), pointer) for word, pointer in calls.findall(text) if pointer != "random_bits"]
    return frozenset((d, _access(count * d.itemsize)) for count, pointer in found for d in _dtypes(pointer, dtypes))


def _narrow(vectors: Collection[tuple[DType, int]]) -> frozenset[DType]:
    """Returns the dtypes of vectors below 4 bytes, of which each element is an access."""
    return frozenset(dtype for dtype, width in vectors if width < _WORD)


def _count(word: str, pipeline: str) -> int:
    if word.isdigit():
        return int(word)
    match = re.search(rf"constexpr i32 {word} = (\d+);", pipeline)
    assert match is not None, word
    return int(match[1])


def _access(count: int) -> int:
    """Returns the bytes of one access to a vector; the same as the primitive ``vector_width``."""
    return 16 if count % 16 == 0 else count & -count


# Kernels of several parts: each part has a namespace, and the entry gives each a range of blocks.


def assemble_parts(parts: Sequence[Launch], sources: Sequence[Source], target: Target) -> Source:
    """Returns the source of a kernel of at least two parts, from the source of each part."""
    whole = fused_launch(parts)
    large = [part for part in parts if not has_one_block(part)]  # registers must leave room for their blocks
    names = [part.kernel.name for part in parts]
    sizes = [[f"{part.kernel.name}_size_{number}" for number in range(len(part.extra))] for part in parts]
    texts: dict[str, str] = {}
    for number, source in enumerate(sources):  # a part with the text of an earlier one takes its namespace
        names[number] = next((name for name, text in texts.items() if _is_alike(text, source.kernel_text)), names[number])
        texts.setdefault(names[number], source.kernel_text)
    others = {name: [p.kernel.name for p, of in zip(parts, names, strict=True) if name == of != p.kernel.name] for name in texts}
    heads = {name: f"// {', '.join(o)}: this text with other arguments.\n" if o else "" for name, o in others.items()}
    own = [f"{heads[name]}namespace {name} {{\n{text}}}  // namespace {name}\n" for name, text in texts.items()]
    pipeline = render(
        "cuda/parts.cu.jinja",
        entry=entry(whole.kernel),
        threads=whole.block,
        blocks_per_sm=_blocks_per_sm(max(part.kernel.body.blocks_per_sm for part in large or parts)),
        overlaps=whole.overlaps and not whole.waits,  # parts that wait for each other wait for the previous launch themselves
        counts=[f"{part.kernel.name}_blocks" for part in parts[:-1]],
        parameters=[
            *(f"i64 {size}" for of_part in sizes for size in of_part),
            *kernel_parameters(whole.kernel),
            *(["i64 counter"] if whole.waits else []),
        ],
        parts=[
            (name, PART, [*extra, *_arguments(part)], _BLOCKS in source.pipeline, part.kernel.name)
            for name, part, extra, source in zip(names, parts, sizes, sources, strict=True)
        ],
        counters=COUNTERS if whole.waits else 0,
    )
    text = "\n".join([*own, pipeline])
    uses = reduce(lambda a, b: a | b, (uses_of(p, target, s.math, s.pipeline) for p, s in zip(parts, sources, strict=True)))
    return Source(
        name=whole.kernel.name,
        entry=entry(whole.kernel),
        language="cuda",
        banner=banner_of_parts(whole, parts, target),
        primitives=primitives_of(text, "cuda", uses),
        math="\n".join(own),
        pipeline=section("Parts", fitted(pipeline)),
    )


_TOKEN = re.compile(r"\w+|\S")
_TYPE = r"\b(?:bool|float|double|auto|Index|[iu](?:8|16|32|64)|b?f16)"
_VARIABLE = re.compile(rf"{_TYPE}(?:\s*\(?[*&]\s*|\s+)([A-Za-z_]\w*)(?=\s*[=\[;,):])")
_FUNCTION = re.compile(r"__forceinline__ \w+ (\w+)\(")
_QUOTE = re.compile(r"// +\d+: .*(?:\n//       .*)*")


def _is_alike(text: str, other: str) -> bool:
    """True if two parts quote the same source lines and differ only in names of variables and functions that they declare."""
    codes = code_of(text), code_of(other)
    tokens, others = map(_TOKEN.findall, codes)
    if len(tokens) != len(others) or _QUOTE.findall(text) != _QUOTE.findall(other):
        return False
    declared, other_declared = ({*_VARIABLE.findall(code), *_FUNCTION.findall(code)} for code in codes)
    pairs = {*zip(tokens, others, strict=True)}
    is_bijective = len(dict(pairs)) == len({new for _, new in pairs}) == len(pairs)
    return is_bijective and all(old == new or (old in declared and new in other_declared) for old, new in pairs)


def _arguments(part: Launch) -> list[str]:
    return [declared.split()[-1] for declared in kernel_parameters(part.kernel)]
