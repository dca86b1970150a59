"""The benchmark's groups: sweeps are drawn alike everywhere, and every case can be built."""

from __future__ import annotations

import hashlib

import torch

from fusegen.bench.cases import CHAINS, GROUPS, SWEEPS, moved_bytes
from tests.naming import case as named

ALL = [case for group, cases in GROUPS.items() if group != "catalogue" for case in cases]


def test_bars_are_of_what_can_be_lowered() -> None:
    for case in GROUPS["bars"]:
        assert case.lowered("sm_90a")


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
            assert sized.sizes[1:] == case.sizes[1:] or case.group in ("public", "training")


def test_chains_know_what_they_move() -> None:
    for case in [case for case in ALL if case.name in CHAINS and case.group != "training"]:
        with named(case):
            rough = moved_bytes(case.name, case.sizes, case.dtype)
            length = case.sizes[-1] * case.dtype.itemsize
            assert rough <= case.bytes <= rough + 4 * length, "but for operands of one row"


def test_the_catalogue_counts_what_must_be_moved() -> None:
    cases = {case.name: case for case in GROUPS["catalogue"]}
    ids, row = 4 * 4096, 2 * 4096
    q_and_k, angles = 4 * (32 + 8) * 4096 * 128 * 2, 2 * 4096 * 128 * 2
    assert cases["embedding"].bytes == ids * 8 + 2 * ids * row
    assert cases["rotary_"].bytes == cases["rotary"].bytes == 2 * q_and_k + angles
    assert "linear_cross_entropy" not in cases and "split_rotary_cache" not in cases
