"""Second operands of matmuls of few rows that are computed on load, in the emulator: int8, int4 and other stored weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.families.gemm.choice import MatmulChoice
from fusegen.families.gemm.heuristics import ExpectedSizes, candidates, shape_of
from fusegen.families.gemm.plan import ContractionBody, FewRowsPlan
from fusegen.fusion import Group
from fusegen.ir.graph import Graph
from fusegen.schedule.program import Launch
from fusegen.target import Target
from tests.emulator import tensor_cores
from tests.emulator.tensor_cores import ONCE, UNIT, check, run
from tests.emulator.test_tensor_cores import takes_a_plan_for_few_rows
from tests.naming import case

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
COLUMNS = 24


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def numbers(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """All values of an integer type."""
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, dtype=torch.int64).to(dtype)


def scales(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.rand(*shape) / 64 + 1 / 64).to(dtype)


def computes_weights(function: Callable[..., Any], *arguments: Any) -> bool:
    """True if a program is one launch of few rows that computes all its second operands."""
    (step,) = fg.kernel(function).lower(*arguments, target="sm_90a").program.steps
    assert isinstance(step, Launch)
    body = step.kernel.body
    assert isinstance(body, ContractionBody)
    return isinstance(body.plan, FewRowsPlan) and all(len(part.weights) == len(part.names) for part in body.parts)


def agrees(function: Callable[..., Any], *arguments: Any) -> None:
    """One launch computes the weights, and gives what torch gives with the same rounded weights in float64."""
    assert computes_weights(function, *arguments)
    got, wanted = run(function, *arguments), function(*arguments)
    for a, b in zip(*((v,) if isinstance(v, Tensor) else v for v in (got, wanted)), strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape
        error = (a.double() - b.double()).abs().max().item()
        assert error <= 4 * UNIT[arguments[0].dtype] * b.double().abs().max().item(), error


def channels(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype) * scale[:, None])


def channels_of_result(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * scale


def of_groups(w: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    grouped = w.unflatten(1, (scale.shape[1], -1)).to(scale.dtype)
    return ((grouped if zero is None else grouped - zero[:, :, None]) * scale[:, :, None]).flatten(1)


def nibbles(packed: Tensor) -> Tensor:
    """The low and the high nibble of each byte in turn."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


@pytest.mark.parametrize("rows", [1, 9, 30, 64])
def test_numbers_of_rows(rows: int) -> None:
    x = randn(rows, 256)
    for columns in (8, 40):
        with case((rows, columns)):
            agrees(channels, x, numbers(columns, 256), scales(columns))
            agrees(
                lambda x, p, s: F.linear(x, of_groups(nibbles(p), s)),
                x,
                numbers(columns, 128, dtype=torch.uint8),
                scales(columns, 2),
            )


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("depth", [8, 72, 176, 1184], ids=lambda depth: f"depth-{depth}")
def test_depths(depth: int, dtype: torch.dtype) -> None:
    """Units of 8, 16 and 32 elements, partial chunks and several chunks of a warp."""
    x, w, scale = randn(3, depth, dtype=dtype), numbers(COLUMNS, depth), scales(COLUMNS, dtype=dtype)
    agrees(channels, x, w, scale)
    agrees(channels_of_result, x, w, scale)
    agrees(lambda x, w, s: F.linear(x, w.to(x.dtype) / (s[:, None] * 64)), x, w, scale)  # 0 / 0 behind the depth
    agrees(
        lambda x, p, s: F.linear(x, (nibbles(p).to(x.dtype) - 8) * s[:, None]),
        x,
        numbers(COLUMNS, depth // 2, dtype=torch.uint8),
        scale,
    )


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_weight_has_the_precision_of_its_dtype(dtype: torch.dtype) -> None:
    """A row that is 1 at one depth and 0 elsewhere selects weights: no sum hides their rounding."""
    x, w, packed = torch.eye(16, 64, dtype=dtype), numbers(COLUMNS, 64), numbers(COLUMNS, 32, dtype=torch.uint8)
    scale, of_group = scales(COLUMNS, dtype=dtype), scales(COLUMNS, 2, dtype=dtype)
    four_bits = lambda x, p, s: F.linear(x, of_groups(nibbles(p), s))  # noqa: E731
    for function, *arguments in ((channels, w, scale), (four_bits, packed, of_group)):
        assert computes_weights(function, x, *arguments)
        assert torch.equal(run(function, x, *arguments), function(x, *arguments))


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_groups_with_and_without_zero_points(group: int) -> None:
    x, w, packed = randn(2, 256), numbers(COLUMNS, 256), numbers(COLUMNS, 128, dtype=torch.uint8)
    scale = scales(COLUMNS, 256 // group)
    zeros = {"numbers": numbers(*scale.shape, dtype=torch.uint8), "floats": randn(*scale.shape) * 8}
    agrees(lambda x, w, s: F.linear(x, of_groups(w, s)), x, w, scale)
    agrees(lambda x, p, s: F.linear(x, of_groups(nibbles(p).to(x.dtype) - 8, s)), x, packed, scale)
    for name, zero in zeros.items():
        with case(name):
            agrees(lambda x, w, s, z: F.linear(x, of_groups(w, s, z)), x, w, scale, zero)
            agrees(lambda x, p, s, z: F.linear(x, of_groups(nibbles(p), s, z)), x, packed, scale, zero)


STORED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "float8": (lambda w, s: w.to(BF16) * s, randn(COLUMNS, 64).to(torch.float8_e4m3fn)),
    "float32": (lambda w, s: (w * s).to(BF16), randn(COLUMNS, 64, dtype=F32)),
    "the same type": (lambda w, s: w.tanh() * s, randn(COLUMNS, 64)),
    "unsigned bytes": (lambda w, s: (w.to(BF16) - 128) * s, numbers(COLUMNS, 64, dtype=torch.uint8)),
    "high nibbles first": (
        lambda w, s: (torch.stack(((w & 240) >> 4, w & 15), -1).flatten(1).to(BF16) - 7.5) * s,
        numbers(COLUMNS, 32, dtype=torch.uint8),
    ),
    "integers": (lambda w, s: (nibbles(w).to(torch.int8) - 8).to(BF16) * s, numbers(COLUMNS, 32, dtype=torch.uint8)),
    "integers that wrap": (lambda w, s: (nibbles(w) - 8).to(BF16) * s, numbers(COLUMNS, 32, dtype=torch.uint8)),
    "signed nibbles": (lambda w, s: torch.stack((w << 4 >> 4, w >> 4), -1).flatten(1).to(BF16) * s, numbers(COLUMNS, 32)),
    "nibbles of words": (
        lambda w, s: (w[:, :, None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15).flatten(1).to(BF16) * s,
        numbers(COLUMNS, 8, dtype=torch.int32),
    ),
    "columns of the depth": (lambda w, s: w.to(BF16) * s * torch.arange(64).to(BF16), numbers(COLUMNS, 64)),
}


WHOLE, HALVES = (torch.arange(COLUMNS * n).reshape(COLUMNS, n) % 256 for n in (64, 32))
"""All bytes, and all pairs of nibbles."""
PACKED: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "bytes": (lambda w, s: w.to(s.dtype) * s, WHOLE.to(torch.int8)),
    "bytes that are not scaled": (lambda w, s: w.to(s.dtype), WHOLE.to(torch.int8)),
    "unsigned bytes": (lambda w, s: s * w.to(s.dtype), WHOLE.to(torch.uint8)),
    "signed bytes as unsigned": (lambda w, s: (w.to(torch.int64) & 255).to(s.dtype) * s, WHOLE.to(torch.int8)),
    "unsigned bytes less a number": (lambda w, s: (w.to(s.dtype) - 100) * s, WHOLE.to(torch.uint8)),
    "upper bits": (lambda w, s: (w & 240).to(s.dtype) * s, WHOLE.to(torch.uint8)),
    "shifted bytes": (lambda w, s: (w >> 1).to(s.dtype) * s, WHOLE.to(torch.int8)),
    "bytes of two words": (lambda w, s: w.unflatten(1, (-1, 2, 4)).mT.flatten(1).to(s.dtype) * s, WHOLE.to(torch.int8)),
    "nibbles": (lambda w, s: (nibbles(w).to(s.dtype) - 8) * s, HALVES.to(torch.uint8)),
    "high nibbles first": (
        lambda w, s: nibbles(w).unflatten(1, (-1, 2)).flip(2).flatten(1).to(s.dtype) * s,
        HALVES.to(torch.uint8),
    ),
    "groups": (lambda w, s: of_groups(w, s.expand(-1, 4) * 1), WHOLE.to(torch.int8)),
}


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_words_of_two_elements(name: str, dtype: torch.dtype) -> None:
    """Weights are computed in pairs, and have torch's bits for all integers, and for scales of all sizes."""
    dequantized, w = PACKED[name]
    limits = torch.finfo(dtype)
    scale = torch.cat((torch.tensor([1, limits.smallest_normal / 8, -limits.max / 512]), torch.randn(COLUMNS - 3))).to(dtype)
    arguments = torch.eye(64, dtype=dtype), w, scale[:, None]

    def columns(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, dequantized(w, s))

    assert computes_weights(columns, *arguments) and is_packed(columns, *arguments)
    assert torch.equal(run(columns, *arguments), dequantized(w, scale[:, None]).T)


def is_packed(function: Callable[..., Any], *arguments: Any) -> bool:
    (source,) = fg.kernel(function).lower(*arguments, target="sm_90a").sources
    return "float b[2]" not in source.pipeline


def test_weights_that_words_of_two_elements_would_round() -> None:
    """Scales of float32, zero points that are floats, and divisions; also lanes that read different tensors."""
    x, w, s = randn(3, 64), numbers(COLUMNS, 64), scales(COLUMNS, 1)
    lanes = numbers(COLUMNS, 32), numbers(COLUMNS, 32)
    for function, others in (
        (lambda x, w, s: F.linear(x, (w.float() * s).to(x.dtype)), (w, s.float())),
        (lambda x, w, s: F.linear(x, (w.to(x.dtype) - s) * s), (w, s)),
        (lambda x, w, s: F.linear(x, w.to(x.dtype) / s), (w, s)),
        (lambda x, a, b, s: F.linear(x, torch.stack((a, b), -1).flatten(1).to(x.dtype) * s), (*lanes, s)),
    ):
        assert not is_packed(function, x, *others)
        agrees(function, x, *others)


def test_bits_beyond_a_byte_are_those_of_its_sign() -> None:
    x, w = randn(3, 64), numbers(COLUMNS, 64)
    for function in (
        lambda x, w: F.linear(x, ((w.to(torch.int64) >> 4) & 255).to(x.dtype)),
        lambda x, w: F.linear(x, (w.to(torch.int64) & 511).to(x.dtype)),
        lambda x, w: F.linear(x, ((w.to(torch.int64) & 1023) >> 2).to(x.dtype)),
    ):
        agrees(function, x, w)


def test_elements_in_two_orders() -> None:
    """A thread reads the same neighbours twice, the second time backwards."""

    def mirrored(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w.unflatten(1, (-1, 4)).flip(2).flatten(1).to(x.dtype) + w.to(x.dtype))

    agrees(mirrored, randn(3, 64), numbers(16, 64) >> 1)


@pytest.mark.parametrize("name", STORED)
def test_stored_types(name: str) -> None:
    dequantized, w = STORED[name]
    agrees(lambda x, w, s: F.linear(x, dequantized(w, s[:, None])), randn(3, 64), w, scales(COLUMNS))


@pytest.mark.parametrize(("rows", "number"), [(3, 0), (3, 1), (30, 2), (30, 3)])
def test_candidates(rows: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One and two chunks in flight, and tiles of columns that are twice as wide."""

    def planned(graph: Graph, group: Group, target: Target, expected: ExpectedSizes) -> MatmulChoice:
        return MatmulChoice(candidates(shape_of(graph, group, expected), target)[number])

    monkeypatch.setattr(tensor_cores, "choose", planned)
    agrees(channels, randn(rows, 1184), numbers(COLUMNS, 1184), scales(COLUMNS))
    if rows == 3:
        check(
            lambda x, w, v: (x @ w) * (x @ v), randn(3, 200), randn(200, COLUMNS), randn(200, COLUMNS), timings=ONCE, unit=2.0**-7
        )


def test_chunks_in_flight_fit_the_registers() -> None:
    """Two chunks, if a thread's registers hold these beside the sums."""

    def stages(rows: int, weight: Tensor) -> int:
        graph = fg.kernel(lambda x, w, s: F.linear(x, (w * s[:, None]).to(x.dtype)))
        (step,) = graph.lower(randn(rows, 64), weight, scales(weight.shape[0], dtype=F32), target="sm_90a").program.steps
        assert isinstance(step, Launch) and isinstance(step.plan, FewRowsPlan)
        return step.plan.stages

    columns = 20000  # in more tiles than there are SMs
    assert [stages(rows, torch.zeros(columns, 64, dtype=torch.int8)) for rows in (1, 16, 32, 64)] == [2, 2, 2, 2]
    assert [stages(rows, torch.zeros(columns, 64)) for rows in (1, 16, 64)] == [2, 2, 1]


def test_a_gated_layer() -> None:
    def gated(x: Tensor, gate: Tensor, up: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return F.silu(F.linear(x, of_groups(nibbles(gate).to(x.dtype) - 8, s))) * F.linear(
            x, of_groups(nibbles(up).to(x.dtype) - 8, t)
        )

    weights = (numbers(COLUMNS, 64, dtype=torch.uint8) for _ in range(2))
    agrees(gated, randn(3, 128) / 4, *weights, scales(COLUMNS, 4), scales(COLUMNS, 4))


def test_parts() -> None:
    def heads(x: Tensor, q: Tensor, k: Tensor, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(channels(x, q, s)), channels(x, k, t).float()

    agrees(heads, randn(3, 96), numbers(40, 96), numbers(16, 96), scales(40), scales(16))


def test_ranges_of_a_packed_weight() -> None:
    def ranges(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        first, second = channels(x, w, s).split((16, 24), -1)
        return torch.relu(first), second * 2

    def interleaved(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        both = channels(x, w, s)
        return torch.relu(both[..., ::2]) * both[..., 1::2]

    agrees(ranges, randn(3, 96), numbers(40, 96), scales(40))
    agrees(interleaved, randn(3, 96), numbers(48, 96), scales(48))


def test_rotated_heads() -> None:
    def rotated(x: Tensor, w: Tensor, s: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = channels(x, w, s).unflatten(-1, (-1, 64))
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat((-second, first), -1) * sin

    agrees(rotated, randn(3, 64), numbers(128, 64), scales(128), randn(3, 1, 64), randn(3, 1, 64))


def test_stored_weights_are_requested_before_the_wait() -> None:
    def chain(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return torch.tanh(channels(torch.tanh(channels(x, w, s)), w, s))

    arguments = randn(3, 64), numbers(64, 64), scales(64) / 16
    low = fg.kernel(chain).lower(*arguments, target="sm_90a")
    assert ["load_b(chunks[stage]" in source.pipeline for source in low.sources] == [False, True]
    got, wanted = run(chain, *arguments), chain(*arguments)
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0.02, atol=0.02)


def normalized_heads(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    heads = (F.linear(x, w.to(x.dtype)) * s).unflatten(-1, (-1, 128))
    return F.rms_norm(heads, (128,))


def test_weights_that_are_written() -> None:
    """Those of many rows, of other readers, and of other layouts."""
    w, s = numbers(64, 64), scales(64)

    def steps(function: Callable[..., Any], *arguments: Any) -> int:
        return len(fg.kernel(function).lower(*arguments, target="sm_90a").program.steps)

    assert steps(channels_of_result, randn(64, 64), w, s) == 1
    assert steps(channels_of_result, randn(65, 64), w, s) == 2
    assert steps(lambda x, w, s: (F.linear(x, w.to(x.dtype)) * s, w.to(x.dtype).sum(1)), randn(4, 64), w, s) > 1
    assert steps(lambda x, w, s: x @ w.to(x.dtype) * s, randn(4, 64), w, s) == 2
    assert steps(normalized_heads, randn(4, 64), numbers(256, 64), scales(256)) >= 2


@pytest.mark.parametrize("depth", [8, 72, 1152], ids=lambda depth: f"depth-{depth}")
def test_contiguous_columns(depth: int) -> None:
    """Weights are stored as (in, out); tiles of one slab, and of two per matmul."""

    def bias_tanh(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(x @ w + b)

    def gated_columns(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(x @ gate) * (x @ up)

    for rows, columns, sms in ((1, 72, 132), (9, 8, 132), (16, 40, 1)):
        with case((rows, columns)):
            x, w = randn(rows, depth), randn(depth, columns) / 8
            for function, others in ((bias_tanh, (randn(columns),)), (gated_columns, (w + 1,))):
                assert takes_a_plan_for_few_rows(function, x, w, *others)
                check(function, x, w, *others, timings=ONCE, sms=sms)
