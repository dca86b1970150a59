"""What a kernel asks the driver for when it is loaded; no device is needed to see that."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusegen.errors import LaunchError
from fusegen.program.call import KernelLaunch
from fusegen.program.formula import formula_of
from fusegen.runtime import cuda, devices
from fusegen.target import target

driver = pytest.importorskip("cuda.bindings.driver")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the driver was asked for; it grants everything."""
    calls: list[tuple[Any, ...]] = []

    def grants(*call: Any) -> tuple[Any]:
        calls.append(call)
        return (driver.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(driver, "cuKernelSetAttribute", grants)
    return calls


def launch(shared_bytes: int, cluster: int) -> KernelLaunch:
    return KernelLaunch((), formula_of(16), 128, shared_bytes, (), cluster=cluster)


def test_what_must_be_asked_for(asked: list[tuple[Any, ...]]) -> None:
    cuda.request(SimpleNamespace(handle=7), launch(100_000, 16), 3)
    attributes = driver.CUfunction_attribute
    assert asked == [
        (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 100_000, 7, 3),
        (attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, 7, 3),
    ]


def test_a_device_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuKernelSetAttribute", lambda *_: (driver.CUresult.CUDA_ERROR_INVALID_VALUE,))
    with pytest.raises(LaunchError, match="the device refuses clusters of 16 blocks: CUDA_ERROR_INVALID_VALUE"):
        cuda.request(SimpleNamespace(handle=7), launch(0, 16), 3)


@pytest.mark.parametrize(("sms", "cluster"), [(132, 16), (144, 16), (114, 8), (16, 8)])
def test_a_part_of_a_machine_has_clusters_of_eight(monkeypatch: pytest.MonkeyPatch, sms: int, cluster: int) -> None:
    devices._gpu_target.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=sms))
    found = devices.target_of(torch.device("cuda", 0))
    devices._gpu_target.cache_clear()
    assert found == replace(target("sm_90a"), cluster=cluster, card="NVIDIA H100 80GB HBM3")
