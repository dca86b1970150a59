"""Names in emitted text: the user's names where there are any, made valid in C++."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fusegen.ir.reductions import REDUCTIONS, TRUTH
from fusegen.program.names import ascii_name

_KEYWORDS = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class compl concept const
    consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default delete do double dynamic_cast
    else enum explicit export extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
    nullptr operator or or_eq private protected public register reinterpret_cast requires return short signed sizeof static
    static_assert static_cast struct switch template this thread_local throw true try typedef typeid typename union unsigned
    using virtual void volatile wchar_t while xor xor_eq restrict typeof typeof_unqual
"""
"""Keywords of C and C++."""

_PRAGMAS = "main half omp parallel pragma schedule simd unroll"
_BUILTINS = "threadIdx blockIdx blockDim gridDim warpSize dim3 size_t"
"""Names that CUDA declares for every kernel; its functions may be declared again with other types."""

_MACROS = (
    r"NULL|INFINITY|NAN|EOF|HUGE_VAL|M_\w+|linux|unix|i386|assert|errno|std\w+|I|complex|\w+_(MAX|MIN|BIT|OFFSET)"
    r"|OFFSET_OF_\w+|BUFSIZ|E[A-Z]{3,}"
)
"""Macros of the C library and of compilers, and the pipelines' offsets in shared memory."""

_SHARED = """
    thread row col column index lane lanes load store chunk v u i j warp widen narrow scratch i8 u8 i16 u16 i32 u32 i64 u64 bf16
    f16 f8e4m3 f8e5m2 Index Operands operands exp log sin cos tanh part erf sqrt abs floor ceil trunc rint pow fabs fmod acc out
    position first row_count column_count element_count
"""
"""Names that all pipelines share."""

_PIPELINES = """
    AHEAD BLOCK at CHUNKS CLUSTER COLUMNS COMBINING_LANES FG_INLINE FG_INLINE_BODY FORESEEN KEPT LANES PARTS REPEATS ROWS SHARE
    SLOT PARTIALS SLOTS SPAN start THREADS TILE UNROLL WARPS WORTH_THREADS arguments arrived base begin behind block ahead
    column_outer copied count counter counters end exists failed fetch first_column first_left first_row group groups inside
    is_first is_half last_row leading memcpy middle outer_count own parity blocks is_held key_of_two LAST level LEVELS part_count
    pivot place put_in_order rank ready row_end slot_of span spans sum task tasks there tile tile_column tile_row tiles turn
    warp_of_row whole PEERS CHUNK TILES VECTORS WIDTH SharedArray Element add_vector first_at_least first_key goes_on head_end
    is_continued last_key part_end last_start own_row row_of_block run_begin run_end run_length run_starts search_blocks
    tail_begin BLOCKS_PER_SM min
"""
"""Names that pipelines use."""

_PRIMITIVES = """
    above_all_keys and_or argument bit_cast block_count block_id block_sync byte_to_float bytes_to_bf16x2 ceil_f32 ceil_f64
    checked_index checked_index_by_trap choose cluster_arrive cluster_load cluster_push cluster_rank cluster_size cluster_sync
    cluster_wait copy_async copy_async_commit copy_async_some copy_async_wait cos_f32 cos_f64 cos_reduced counter_advance
    counter_leave counter_wait cvt_bf16x2 cvt_f16x2 cvt_f16x4_f8e4m3 cvt_f16x4_f8e5m2 cvt_f16x4_i8 descending_key
    descending_value double_bits double_from_bits each_chunk erf_f32 erf_f64 exp2_double exp2_f32 exp2_f64 exp_below exp_f32
    exp_f64 exp_reduce expm1_f32 expm1_f64 expm1_reduced f8e4m3_to_float f8e5m2_to_float fast_cos fast_divide fast_exp
    fast_exp2 fast_expm1 fast_log fast_log1p fast_log2 fast_one_plus_erf fast_reciprocal fast_rsqrt fast_sin fast_sqrt
    fast_tanh fence_proxy_async float_bits float_from_bits float_to_bfloat float_to_f8e4m3 float_to_f8e5m2 float_to_half
    floor_divide floor_f32 floor_f64 half_to_float infinity integer_power key_index lane_id launch_dependents ldmatrix
    ldmatrix_transposed load load_lanes load_part load_stream load_vec load_wide load_wide_if load_window log1p_f32 log1p_f64
    log1p_tail log2_f32 log2_f64 log2_magnitude log_f32 log_f64 log_reduce lower_registers maximum mbarrier_arrive
    mbarrier_expect mbarrier_init mbarrier_init_fence mbarrier_wait mbarrier_wait_cluster minimum mma_m16n8k16_bf16
    mma_m16n8k16_f16 mul_bf16x2 mul_f16x2 multiply_add named_barrier_sync nan_unless_finite narrow narrow_checked narrow_vec
    nearest_integer none_failed opaque pack_bytes pack_pair permute_bytes philox pow_f32 pow_f64 power_of power_of_two
    prefetch_l2 quad_transpose quarter_turns quiet_nan raise_registers random_bits random_pairs random_wide reduced_angle
    refuse_index remainder_floor rint_f32 rint_f64 round_bf16 round_f16 round_f8e4m3 round_f8e5m2 rsqrt_f32 rsqrt_f64
    safe_divisor scale_by_power shared_address shared_array shared_load shared_load_vec shared_store shared_store_vec
    shift_left shift_right shuffle shuffle_up shuffle_xor shuffle_xor_among sign_of sin_f32 sin_f64 sin_reduced small_to_float
    sort_key sorted_value sqrt_f32 sqrt_f64 store store_lanes store_narrowed store_part store_shared_words store_vec sub_bf16x2
    sub_f16x2 tanh_by_exp tanh_f32 tanh_f64 thread_id tma_load_2d tma_load_4d tma_prefetch_map tma_store_2d tma_store_commit
    tma_store_wait trap_index trunc_f32 trunc_f64 types vector_width wait_for_previous warp_id warp_sync wgmma wgmma_commit
    wgmma_descriptor wgmma_fence wgmma_wait widen widen_e4m3x2 widen_vec wrap_abs wrap_add wrap_mul wrap_neg wrap_sub
    wrapped_index wrapped_index_by_trap
"""
"""Names of the primitives of all languages; a test compares them with the templates."""

_MATH = """
    result product second s total mass key channel query head batch pair coordinate condition row_value value
"""
"""Names that math functions and their wrappers give to their variables."""

_FIXED = frozenset(_MATH.split())
_TAKEN = frozenset((_KEYWORDS + f"{_PRAGMAS} {_BUILTINS} " + _SHARED + _PIPELINES + _PRIMITIVES).split())
_RESERVED = frozenset([*_KEYWORDS.split(), "int64_t"])


_SUFFIXES = (
    "raw|ptr|kept|outer|shared|part|lanes?|carry|before|staged|sum|pair|offset|scratch|extent|pitch|narrow|heads|batch|of|next"
    "|pivot|levels|chunks?|each|val|blocks|product"
)
"""Suffixes that templates and emitters append to names."""

_REDUCED = "|".join([*(op.row.name for op in REDUCTIONS), *TRUTH.values()])

_DERIVED = re.compile(
    rf"(i|row_|column_)\d+|\w+_({_SUFFIXES}|at\d*|(dim|stride)\d+)"  # names that the compiler derives from others
    rf"|((row|lanes|scan|warp_scan|quad|segment)_)?({_REDUCED})_[fiub]\w*"  # of reductions
    r"|\w+_size_\d+"  # arguments of the parts of a launch
    r"|(out|result)(_\d+)+|(\w+_)?product_(left|right)_\d+"  # parameters and results of math on lanes
    r"|[ckuvij]|turn_of|slot|narrowed"  # loops of pipelines
    r"|(fabs|floor|ceil|trunc|rint|exp|expm1|log|log1p|sqrt|rsqrt|sin|cos|tanh|erfc?|pow|fmod|copysign)f?"  # the C library's
    r"|lgammaf?|llabs|sincosf?|fmaf?"
    rf"|{_MACROS}"
)


def identifier(name: str) -> str:
    """Returns a user's name as a C++ identifier: ASCII, without double underscores, and different from all reserved names.

    Names stay distinct: a reserved name gets the suffix ``_val``, and names that end in it are reserved too.
    """
    safe = ascii_name(name)
    return _renamed(safe) if safe in _TAKEN or _DERIVED.fullmatch(safe) else safe


def _renamed(name: str) -> str:
    return f"{name}_val"


def field_identifier(name: str) -> str:
    """Returns a user's name as the name of a field in C and C++: in ASCII, and neither a keyword nor a macro."""
    safe = ascii_name(name)
    return f"{safe}_" if safe in _RESERVED or re.fullmatch(_MACROS, safe) else safe


def scalar_identifier(name: str) -> str:
    """Returns a run-time scalar's name in emitted text: an `identifier` that also differs from the fixed names of the math."""
    safe = identifier(name)
    return _renamed(safe) if safe in _FIXED else safe


def kernel_functions(kernel: str) -> re.Pattern[str]:
    """Returns the pattern of the names of functions that the text of a kernel declares, given the kernel's `identifier`."""
    return re.compile(
        rf"{re.escape(kernel)}(_\d+|_rows_\d+|_of|_once|_row|_copy|_combine|_epilogue|_element|_score|_weights|_finish|_carry)*"
    )


class Namer:
    """Makes names unique. They differ from the text's function names and, if `reserved`, from keywords and reserved names."""

    def __init__(self, *, reserved: bool = True, taken: Iterable[str] = (), functions: re.Pattern[str] | None = None) -> None:
        self._reserved = reserved
        self._used: set[str] = set(taken)
        self._functions = functions

    def take(self, requested: str) -> str:
        """Returns the requested name, with a number if it is taken."""
        base = identifier(requested) if self._reserved else ascii_name(requested)
        if self._is_function(base):
            base = f"{base}_value"  # with a number, it would be the name of another function
        name, number = base, 2
        while name in self._used or self._is_function(name):
            name, number = f"{base}_{number}", number + 1
        self._used.add(name)
        return name

    def _is_function(self, name: str) -> bool:
        return self._functions is not None and self._functions.fullmatch(name) is not None


def parameter_names(kernel: str, requested: Sequence[str]) -> tuple[str, ...]:
    """Returns a unique `ascii_name` for each requested parameter name, in order.

    `identifier` keeps these names distinct.
    """
    names = Namer(reserved=False, functions=kernel_functions(identifier(kernel)))
    order = sorted(
        requested, key=lambda name: ascii_name(name) != name
    )  # names that are plain already come first, so that they stay
    assigned = {name: names.take(name) for name in order}
    return tuple(assigned[name] for name in requested)
