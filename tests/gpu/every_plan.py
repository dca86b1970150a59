"""Every form of plan, run once: ``python -m tests.gpu.every_plan [SHARE SHARES]`` is what `.ci/sanitize` looks at; of the cases,
every SHARES-th from number SHARE on.

What goes in was made on the host, and what comes out is compared there: a checker of uninitialised memory follows our kernels and
copies, not torch's kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import tuning
from fusegen.schedule.kernel import Plan
from fusegen.timing import RoundTimes, TimedCall
from fusegen.tuning import _check_alike
from tests.gpu.test_mma import by_warps
from tests.gpu.test_slices import layer_norm_gelu_add
from tests.tools.lanes import bias_gelu

BF16, F32 = torch.bfloat16, torch.float32
Case = tuple[Callable[..., Any], tuple[tuple[tuple[int, ...], torch.dtype], ...]]
"""A function, and shapes and dtypes of its arguments."""


def softmax_and_peak(x: Tensor) -> tuple[Tensor, ...]:
    return F.softmax(x, -1), x.argmax(-1)


def norm_gradients(x: Tensor, dy: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    hat, g = x * rstd, dy * w
    return rstd * (g - hat * (g * hat).mean(-1, keepdim=True)), (dy * hat).sum(0), dy.sum(0)


def moments_of_columns(x: Tensor) -> tuple[Tensor, ...]:
    return x.var(0), x.sum(0)


def transposed(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x.mT) + y


def running_sums(x: Tensor) -> Tensor:
    return x.cumsum(-1) * 2


def weights_in_float32(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype))


def weights_by_inputs(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x @ w)


def linear_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def swiglu(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(x @ w.mT) * (x @ v.mT)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def paged_window(q: Tensor, pages: Tensor, table: Tensor) -> Tensor:
    """Keys and values lie side by side in one cache."""
    k, v = (pages[:, part][table].flatten(1, 2).transpose(1, 2) for part in (0, 1))
    scores = q @ k.repeat_interleave(4, 1).mT
    query, key = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
    seen = (key <= query[:, None] + 155) & (key > query[:, None] + 90)
    return torch.softmax(torch.where(seen, scores * 0.125, -torch.inf), -1) @ v.repeat_interleave(4, 1)


def _norm(rows: int, columns: int, dtype: torch.dtype = BF16) -> Case:
    return layer_norm_gelu_add, (((rows, columns), dtype), ((columns,), dtype), ((columns,), dtype), ((rows, columns), dtype))


def _gradients(rows: int, columns: int) -> Case:
    return norm_gradients, (((rows, columns), BF16), ((rows, columns), BF16), ((columns,), BF16))


def _alone(function: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype = BF16) -> Case:
    return function, ((shape, dtype),)


def _linear(rows: int, columns: int, depth: int) -> Case:
    return linear_gelu, (((rows, depth), BF16), ((columns, depth), BF16), ((columns,), BF16))


CASES: tuple[Case, ...] = (
    *(_norm(rows, columns) for rows, columns in ((70, 64), (7, 768), (5, 1001), (300, 5120), (3, 20480), (2, 50257), (2, 1 << 20))),
    _norm(3, 2048, F32),
    *(_alone(softmax_and_peak, (rows, columns)) for rows, columns in ((70, 100), (3, 3001), (300, 20480), (2, 262144))),
    *(_gradients(rows, columns) for rows, columns in ((300, 1000), (300, 4096), (300, 12288))),
    *(_alone(moments_of_columns, shape) for shape in ((700, 72), (3000, 1000), (333, 1001), (20000, 64))),
    *((bias_gelu, (((rows, columns), BF16), ((columns,), BF16))) for rows, columns in ((64, 4096), (70, 1001))),
    (transposed, (((300, 520), BF16), ((520, 300), BF16))),
    *(_alone(running_sums, shape, F32) for shape in ((70, 64), (3, 3001))),
    *(_linear(rows, 520, 264) for rows in (1, 16, 70, 300, 1000)),
    _linear(300, 4096, 512),
    _linear(4400, 1024, 264),
    *((weights_in_float32, (((rows, 264), BF16), ((520, 264), F32))) for rows in (5, 12, 40)),
    *((weights_by_inputs, (((rows, 264), BF16), ((264, 520), BF16))) for rows in (5, 12)),
    *((swiglu, (((rows, 512), BF16), ((1024, 512), BF16), ((1024, 512), BF16))) for rows in (5, 12, 200)),
    (attention, (((2, 4, 300, 64), BF16), ((2, 4, 300, 64), BF16), ((2, 4, 300, 64), BF16))),
    (paged_window, (((3, 8, 5, 64), BF16), ((40, 2, 16, 2, 64), BF16), ((3, 10), torch.int32))),
)  # fmt: skip


_UNIT = 16  # bytes


def arguments(case: Case, device: str) -> tuple[Tensor, ...]:
    """Made on the host. The memory of each is whole units: memcheck takes a copy of a part of a unit (``cp.async`` with fewer bytes
    of source) for one of the whole, and names a last unit that is no whole one."""

    def made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if device == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        whole = -(-prod(shape) * dtype.itemsize // _UNIT) * _UNIT // dtype.itemsize
        return torch.randn(whole).to(dtype).to(device)[: prod(shape)].view(shape)

    return tuple(made(*each) for each in case[1])


BY_WARPS: tuple[Case, ...] = (*(case for case in CASES if case[0] in (linear_gelu, swiglu)), _linear(70, 521, 265))
"""Products that are also run as older machines have them."""


def _untimed(calls: Mapping[str, TimedCall], *_: Any, **__: Any) -> dict[str, RoundTimes]:
    """All plans have been run once by then."""
    return dict.fromkeys(calls, RoundTimes(0.0, 0.0, 0.0))


def _alike_on_the_host(name: str, plan: Plan, results: Sequence[Any], expected: Sequence[Any], share: float) -> None:
    on_host = ([t.cpu() if isinstance(t, Tensor) else t for t in each] for each in (results, expected))
    _check_alike(name, plan, *on_host, share)


def run(share: int = 0, shares: int = 1) -> Iterator[str]:
    """Runs every plan of a share of the cases, and says which they were; where rows' columns are summed, in one kernel and in two.

    Raises:
        VerificationError: two plans give different results.
    """
    alike = patch("fusegen.tuning._check_alike", _alike_on_the_host)
    with patch("fusegen.tuning.interleaved", _untimed), alike:
        for case in CASES[share::shares]:
            yield from _run(case)
            if case[0] is norm_gradients:
                with patch("fusegen.compiler.specialize.is_faster_split", lambda *_: False):
                    yield from _run(case)
    for case in BY_WARPS[share::shares]:
        by_warps(case[0], arguments(case, "cuda"))()
        yield f"{case[0].__name__} by warps\n"


def _run(case: Case) -> Iterator[str]:
    kernel, inputs = fg.kernel(case[0]), arguments(case, "cuda")
    kernel(*inputs)
    yield from map(str, tuning.measured(kernel, *inputs).launches)


def main(share: int = 0, shares: int = 1) -> None:
    """On the current GPU."""
    torch.manual_seed(0)
    count = 0
    for text in run(share, shares):
        count += text.count("\n")
        print(text.partition("\n")[0], flush=True)
    torch.cuda.synchronize()
    print(f"{count} plans of {len(CASES[share::shares]) + len(BY_WARPS[share::shares])} cases ran once each")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
