"""The emulator runs sound kernels and names what is wrong with planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusegen.compiler.emulator import EmulatedSource, load_emulated
from fusegen.errors import EmulationError, ToolNotFoundError
from fusegen.jit.host import compile_shared, find_compiler
from tests.naming import case

Launch = Callable[..., None]

ADD = """
extern "C" __global__ __launch_bounds__(32) void fg_add(const float* __restrict__ x, const float* __restrict__ y,
                                                        float* __restrict__ out, i64 n) {
  i64 i = (static_cast<i64>(block_id()) * 32 + thread_id()) * 4;
  if (i + 4 <= n) {
    float a[4], b[4];
    load_vec(a, x, i);
    load_vec(b, y, i);
    for (i32 k = 0; k < 4; ++k) a[k] += b[k];
    store_vec(out, i, a);
  } else {
    for (; i < n; ++i) store(out, i, load(x, i) + load(y, i));
  }
}
"""

# Sum of a block's elements: in each warp by shuffles, then through shared memory. Repeated, so that the second round
# overwrites what the first one still reads unless the barrier after the reads is there.
BLOCK_SUM = """
extern "C" __global__ void fg_block_sum(const float* x, float* out, i64 rounds) {
  auto partial = shared_array<float>(0);
  for (i64 r = 0; r < rounds; ++r) {
    float sum = load(x, r * 128 + thread_id());
    for (i32 mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    if (lane_id() == 0) shared_store(partial, warp_id(), sum);
    block_sync();  // after the writes
    sum = 0.0f;
    for (i32 w = 0; w < 4; ++w) sum += shared_load(partial, w);
    block_sync();  // after the reads
    if (thread_id() == 0) store(out, r, sum);
  }
}
"""

CLUSTER_SUM = """
extern "C" __global__ void __cluster_dims__(4) fg_cluster_sum(const double* x, double* out) {
  auto partial = shared_array<double>(64);
  double sum = load(x, block_id() * 32 + thread_id());
  for (i32 mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  if (thread_id() == 0) shared_store(partial, 0, sum);
  cluster_sync();  // after the writes
  sum = 0.0;
  for (i32 rank = 0; rank < cluster_size(); ++rank) sum += cluster_load(partial, 0, rank);
  cluster_sync();  // before the exit
  if (thread_id() == 0) store(out, block_id(), sum);
}
"""


def kernel(body: str) -> str:
    return f'extern "C" __global__ void fg_k(const float* x, float* out) {{ auto p = shared_array<float>(0); {body} }}'


def expect(launch: Launch, message: str, body: str, *, x: Tensor | None = None, out: Tensor | None = None, **shape: Any) -> None:
    """The kernel with this body fails with this message, which also names kernel, block and thread."""
    x, out = torch.zeros(64) if x is None else x, torch.zeros(64) if out is None else out
    with pytest.raises(EmulationError, match=rf"fg_k: block \d+, thread \d+: .*{message}"):
        launch(kernel(body), {"x": x, "out": out}, **shape)


COPIED = "copy_async<4>(p, thread_id() * 4, x, thread_id() * 4); copy_async_commit();"
EARLY_ACCESS = r"4 bytes of global memory with no wait_for_previous before"
BIG = "char big[300 * 1024]; for (i32 k = 0; k < 300 * 1024; k += 64) *(volatile char*)&big[k] = 1; block_sync();"
SHARED, CLUSTER = {"shared_bytes": 64}, {"grid": 2, "cluster": 2}

OVERLAPS = {"overlaps": True, "pending": "x"}
FAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a load of what the previous launch writes": ("load(x, 0); wait_for_previous();", f"reads {EARLY_ACCESS}", OVERLAPS),
    "a trigger before the wait": (
        "launch_dependents(); wait_for_previous();", "launch_dependents with no wait_for_previous before", OVERLAPS,
    ),
    "a store before the wait": (
        "store(out, thread_id(), 1.0f); wait_for_previous();", f"writes {EARLY_ACCESS}", OVERLAPS,
    ),
    "a wait of one thread": (
        "if (thread_id() == 0) wait_for_previous(); block_sync(); store(out, thread_id(), 1.0f);", f"writes {EARLY_ACCESS}",
        OVERLAPS,
    ),
    "a block's barrier orders no remote reads": (
        "shared_store(p, thread_id(), 1.0f); cluster_sync(); cluster_load(p, 0, 1); block_sync();"
        "shared_store(p, thread_id(), 2.0f); cluster_sync();",
        "race: writes byte 0 .* read with no cluster_sync between", {**CLUSTER, "shared_bytes": 128},
    ),
    "outside of all buffers": ("load(x + 1000, 0);", "lies in no buffer", {}),
    "a misaligned load": (
        "float v[4]; load_vec(v, x, thread_id() + 1);", r"misaligned: reads 16 bytes at byte 4 of x .* alignment of 16", {},
    ),
    "an input": (
        "store(const_cast<float*>(x), thread_id(), 1.0f);", "writes 4 bytes at byte 0 of x, which is read-only", {},
    ),
    "uninitialised": ("shared_load(p, 2);", "uninitialised: reads byte 8 of the shared memory of block 0", SHARED),
    "behind shared memory": ("shared_store(p, thread_id(), 1.0f);", "out of bounds: .* of shared memory, which has 64", SHARED),
    "two threads, one place": ("shared_store(p, 0, 1.0f);", "race: writes byte 0 of shared memory, .* wrote", SHARED),
    "two blocks, one place": ("store(out, thread_id(), 1.0f);", "wrote and the blocks of a launch have no order", {"grid": 2}),
    "a block reads what another wrote": (
        "if (block_id() == 0) store(out, thread_id(), 1.0f); else load(out, thread_id());",
        "race: reads byte 0 of out, which thread 0 of block 0 wrote", {"grid": 2},
    ),
    "a block writes what another read": (
        "if (block_id() == 1) store(out, thread_id(), 1.0f); else load(out, thread_id());",
        "race: writes byte 0 of out, which thread 0 of block 0 read", {"grid": 2},
    ),
    "a shuffle orders nothing": (
        "shared_store(p, thread_id(), 1.0f); shuffle_xor(0.0f, 1); shared_load(p, thread_id() ^ 1);",
        "no warp_sync or block_sync between", {"shared_bytes": 128},
    ),
    "half a block at a barrier": (
        "if (thread_id() < 16) block_sync();", "at block_sync: 16 of 32 threads came; thread 16 of block 0 has ended", CLUSTER,
    ),
    "a thread of a cluster": (
        "if (block_id() + thread_id() == 0) block_sync(); else cluster_sync();", "at block_sync: 1 of 32 threads came", CLUSTER,
    ),
    "a lane that is not there": ("shuffle_xor(1.0f, 16);", "shuffle_xor reads lane 16 of a warp of 16", {"block": 16}),
    "a stack": (BIG, "of stack", {}),
    "a copy of a misaligned place": ("copy_async<4>(p, 0, x, 1);", "misaligned: reads 16 bytes", SHARED),
    "a copy that nobody waited for": (
        COPIED + "shared_load(p, thread_id() * 4);",
        "reads byte 0 of shared memory, which an asynchronous copy is still bringing", {"shared_bytes": 1024},
    ),
    "over a copy": (
        COPIED + "shared_store(p, thread_id() * 4, 1.0f);", "writes byte 0 .* still bringing", {"shared_bytes": 1024},
    ),
}  # fmt: skip
"""What a kernel does, what is said of it, and how it is launched."""


def test_faults_are_named(launch: Launch) -> None:
    load_emulated([EmulatedSource(kernel(body), "fg_k") for body, _, _ in FAULTS.values()])
    for name, (body, message, shape) in FAULTS.items():
        with case(name):
            expect(launch, message, body, x=torch.zeros(256), **shape)
            if shape is OVERLAPS:
                launch(kernel(body), {"x": torch.zeros(64), "out": torch.zeros(64)})


def test_vector_add_with_tail(launch: Launch) -> None:
    for n in (1, 4, 127, 128, 129, 1003):
        x, y, out = torch.randn(n), torch.randn(n), torch.full((n,), torch.nan)
        launch(ADD, {"x": x, "y": y, "out": out, "n": n}, grid=(n + 127) // 128)
        assert torch.equal(out, x + y)


def test_a_launch_that_overlaps_waits_first(launch: Launch) -> None:
    add = {"x": torch.randn(128), "y": torch.randn(128), "out": torch.full((128,), torch.nan), "n": 128}
    text = ADD.replace("{", "{ wait_for_previous();", 1)
    launch(text, add, overlaps=True)
    assert torch.equal(add["out"], add["x"] + add["y"])
    launch(text, add)  # it returns at once where there is nothing to wait for


def test_a_launch_reads_what_the_previous_one_does_not_write_before_it_waits(launch: Launch) -> None:
    body = "float early = load(x, thread_id()); wait_for_previous(); launch_dependents(); store(out, thread_id(), early);"
    tensors = {"x": torch.randn(32), "out": torch.zeros(32)}
    launch(kernel(body), tensors, overlaps=True, pending="out")
    assert torch.equal(tensors["out"], tensors["x"])


def test_missing_barrier_after_the_writes(launch: Launch) -> None:
    text = BLOCK_SUM.replace("block_sync();  // after the writes", "")
    with pytest.raises(EmulationError, match=r"(thread \d+ of block 0 wrote with no block_sync|uninitialised)"):
        launch(text, {"x": torch.ones(128), "out": torch.empty(1), "rounds": 1}, block=128, shared_bytes=16)


def test_missing_barrier_after_the_reads(launch: Launch) -> None:
    text = BLOCK_SUM.replace("block_sync();  // after the reads", "")
    with pytest.raises(EmulationError, match=r"race: writes .* which thread \d+ of block 0 read with no block_sync between"):
        launch(text, {"x": torch.ones(256), "out": torch.empty(2), "rounds": 2}, block=128, shared_bytes=16)


def test_missing_cluster_barrier_after_the_writes(launch: Launch) -> None:
    text = CLUSTER_SUM.replace("cluster_sync();  // after the writes", "block_sync();")
    with pytest.raises(EmulationError, match=r"(wrote with no cluster_sync between|uninitialised)"):
        launch(text, {"x": torch.ones(128).double(), "out": torch.empty(4).double()}, grid=4, cluster=4, shared_bytes=72)


def test_missing_cluster_barrier_before_the_exit(launch: Launch) -> None:
    text = CLUSTER_SUM.replace("cluster_sync();  // before the exit", "")
    with pytest.raises(EmulationError, match=r"a cluster_sync is missing after the last cluster_load|which has ended"):
        launch(text, {"x": torch.ones(128).double(), "out": torch.empty(4).double()}, grid=4, cluster=4, shared_bytes=72)


def test_out_of_bounds_tail(launch: Launch) -> None:
    message = r"fg_add: block 0, thread 31: out of bounds: reads 16 bytes at byte 496 of x, which has 508 bytes"
    with pytest.raises(EmulationError, match=message):
        launch(ADD, {"x": torch.ones(127), "y": torch.ones(127), "out": torch.empty(127), "n": 128})


def test_running_from_one_buffer_into_the_next(launch: Launch) -> None:
    both = torch.zeros(64)
    expect(launch, "out of bounds: reads 4 bytes at byte 128 of x", "load(x, thread_id() + 1);", x=both[:32], out=both[32:])


def test_a_block_barrier_orders_global_memory_within_the_block(launch: Launch) -> None:
    out = torch.zeros(32)
    launch(
        kernel("store(out, thread_id(), load(x, thread_id())); block_sync(); float v = load(out, 31 - thread_id());"
               "block_sync(); store(out, thread_id(), v);"),
        {"x": torch.arange(32.0), "out": out},
    )  # fmt: skip
    assert torch.equal(out, torch.arange(32.0).flip(0))


def test_a_warp_barrier_orders_the_warp_alone(launch: Launch) -> None:
    exchange = "shared_store(p, thread_id(), 1.0f); warp_sync(); shared_load(p, thread_id() ^ {});"
    launch(kernel(exchange.format(1)), {"x": torch.ones(1), "out": torch.ones(1)}, block=64, shared_bytes=256)
    expect(launch, "(no block_sync between|uninitialised)", exchange.format(32), block=64, shared_bytes=256)


def test_scalars_arrive(launch: Launch) -> None:
    text = """extern "C" __global__ void fg_scalars(double* out, float single, double real, i64 wide, i32 small, bool flag) {
      if (thread_id() == 0) store(out, 0, single + real + static_cast<double>(wide) + small + (flag ? 0.5 : 0.0)); }"""
    out = torch.zeros(1, dtype=torch.float64)
    launch(text, {"out": out, "single": 0.25, "real": 1e-9, "wide": 2**40, "small": -3, "flag": True})
    assert out.item() == 0.25 + 1e-9 + 2**40 - 3 + 0.5


def test_libraries_are_kept_by_content(tmp_path: Path) -> None:
    one = compile_shared("int one() { return 1; }", ("-O1",), tmp_path)
    assert compile_shared("int one() { return 1; }", ("-O1",), tmp_path) == one
    assert compile_shared("int one() { return 1; }", ("-O2",), tmp_path) != one
    assert {path.suffix for path in tmp_path.iterdir()} == {".so", ".cpp"}


def test_missing_compiler_says_what_to_do() -> None:
    with pytest.raises(ToolNotFoundError, match="set CXX"):
        find_compiler("no-such-compiler -O1")


def test_others_see_a_copy_after_a_barrier_that_follows_the_wait(launch: Launch) -> None:
    """A barrier between the start of a copy and its end orders nothing."""
    x = torch.arange(256.0)
    read = "if (thread_id() == 0) store(out, 0, shared_load(p, 31 * 4));"
    early = COPIED + "warp_sync(); copy_async_wait<0>();" + read
    expect(launch, "race: reads byte .* with no warp_sync or block_sync between", early, x=x, shared_bytes=1024)
    out = torch.zeros(1)
    later = early.replace("copy_async_wait<0>();", "copy_async_wait<0>(); warp_sync();")
    launch(kernel(later), {"x": x, "out": out}, shared_bytes=1024)
    assert out.item() == x[31 * 4]


def test_an_index_outside_of_a_thread_s_own_array(launch: Launch) -> None:
    body = "float held[4]; for (i32 k = 0; k {} 4; ++k) held[k] = load(x, k); store(out, thread_id(), held[thread_id() % 4]);"
    launch(kernel(body.format("<")), {"x": torch.ones(8), "out": torch.empty(32)})
    expect(launch, "out of bounds: index 4 of an array of the thread's own", body.format("<="))
