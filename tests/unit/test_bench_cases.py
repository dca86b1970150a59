"""The benchmark's groups: sweeps are drawn alike everywhere, and every case can be built."""

from __future__ import annotations

import hashlib

import torch

from fusegen.bench.bar_cases import TALL
from fusegen.bench.cases import GROUPS
from fusegen.bench.chains import CHAINS, moved_bytes
from fusegen.bench.sweeps import SWEEPS, is_prime
from tests.naming import case as named

ALL = [case for cases in GROUPS.values() for case in cases]


def test_every_name_of_rows_meets_most_lengths() -> None:
    for name in ("layer_norm", "rms_norm", "softmax", "add_rms_norm", "layer_norm_gelu_add"):
        with named(name):
            found = {
                case.sizes[1] for group in ("public", "peers", "limits", "bars") for case in GROUPS[group] if case.name == name
            }
            lengths = {1024, 2048, 3072, 4096, 5120, 6144, 8192, 11008, 12288, 16384, 18432, 20480}
            assert len(found & lengths) >= 9
            assert {3001, 50257, 65536, 100003, 262144, 1048576} <= found


def test_bars_are_of_what_can_be_lowered() -> None:
    for case in GROUPS["bars"]:
        assert case.kernel.lower(**case.meta_arguments(), target="sm_90a").sources


def test_a_sum_is_read_and_a_transposed_copy_is_written_too() -> None:
    for name, moved in (("column_sum", 1), ("transposed_copy", 2)):
        with named((name, moved)):
            for sizes in TALL:
                case = next(case for case in GROUPS["bars"] if case.name == name and case.sizes == sizes)
                whole = case.dtype.itemsize * sizes[0] * sizes[1]
                written = whole if name == "transposed_copy" else case.dtype.itemsize * sizes[1]
                assert moved_bytes(name, sizes, case.dtype) == moved * whole and case.bytes == whole + written


def test_sweeps_stay_within_their_bounds() -> None:
    for group in SWEEPS:
        with named(group):
            cases = SWEEPS[group]
            assert len(cases) == 40
            for case in cases:
                rows, length = case.sizes
                assert 1 <= rows <= 32768 and 61 <= length <= 1048576  # 61 is the prime below 64
                assert 64 << 10 <= moved_bytes(case.name, case.sizes, case.dtype) <= 4 << 30
            lengths = [case.sizes[1] for case in cases]
            assert sum(n % 64 == 0 for n in lengths) >= 10 and sum(n % 2 for n in lengths) >= 10 and any(map(is_prime, lengths))
            dtypes = [case.dtype for case in cases]
            assert set(dtypes) == {torch.bfloat16, torch.float16, torch.float32}
            assert max(set(dtypes), key=dtypes.count) is torch.bfloat16
            assert len({case.name for case in cases}) > 1


def test_sweeps_are_the_same_on_every_machine() -> None:
    text = "\n".join(" ".join(case.key) for cases in SWEEPS.values() for case in cases)
    assert SWEEPS["rows"][0].key == ("rows", "layer_norm_gelu_add", "512x12416", "bfloat16")
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "cfa45cbfde7c9703"


def test_a_cpu_is_not_asked_for_too_much() -> None:
    for case in ALL:
        with named(case):
            sized = case.on("cpu")
            assert sized.bytes <= 1 << 28
            assert sized.dtype is (case.dtype if case.group in SWEEPS else torch.float32)
            assert sized.sizes[1:] == case.sizes[1:] or case.group == "public"


def test_chains_know_what_they_move() -> None:
    for case in [case for case in ALL if case.name in CHAINS]:
        with named(case):
            rough = moved_bytes(case.name, case.sizes, case.dtype)
            length = case.sizes[-1] * case.dtype.itemsize
            assert rough <= case.bytes <= rough + 4 * length, "but for operands of one row"
