"""What a kernel asks the driver for when it is loaded; no device is needed to see that."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fusegen.errors import LaunchError
from fusegen.program.call import KernelLaunch
from fusegen.program.formula import formula_of
from fusegen.runtime import cuda, devices
from fusegen.runtime.cuda import LoadedKernel
from fusegen.target import target
from tests.unit.stub_driver import StubDriver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> StubDriver:
    made = StubDriver()
    monkeypatch.setattr(cuda, "driver", lambda: made)
    return made


def launch(shared_bytes: int, cluster: int) -> KernelLaunch:
    return KernelLaunch((), formula_of(16), 128, shared_bytes, (), cluster=cluster)


def test_what_must_be_asked_for(driver: StubDriver) -> None:
    cuda.request(LoadedKernel("fg_some", 7), launch(100_000, 16), 3)
    shared_memory, clusters = 8, 14  # of CUfunction_attribute
    assert driver.map_arguments[:8] == [shared_memory, 100_000, 7, 3, clusters, 1, 7, 3]


def test_a_device_that_refuses(driver: StubDriver) -> None:
    driver.refuse(701, 1)
    with pytest.raises(LaunchError, match="the device refuses clusters of 16 blocks: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        cuda.request(LoadedKernel("fg_some", 7), launch(0, 16), 3)


def test_a_kernel_is_loaded_once_and_outlives_what_refers_to_it(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_LOADED", {})
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(driver, "make_current", lambda _: None)
    before = driver.libraries
    handle = cuda.load(b"binary", "fg_some", launch(0, 1), 3).handle
    gc.collect()
    assert cuda.load(b"binary", "fg_some", launch(0, 1), 3).handle == handle and driver.libraries == before + 1
    cuda.load(b"binary", "fg_some", launch(100_000, 1), 3)  # its attributes are those of another kernel
    assert driver.libraries == before + 2


def test_a_binary_that_cannot_be_loaded(driver: StubDriver) -> None:
    before = driver.libraries
    with pytest.raises(LaunchError, match="the driver cannot load fg_missing: error 500"):
        driver.load(b"binary", "fg_missing")
    assert driver.libraries == before
    driver.refuse(209, 1)
    with pytest.raises(LaunchError, match="the driver cannot load fg_some: error 209"):
        driver.load(b"binary", "fg_some")


@pytest.mark.parametrize(("sms", "cluster"), [(132, 16), (144, 16), (114, 8), (16, 8)])
def test_a_part_of_a_machine_has_clusters_of_eight(monkeypatch: pytest.MonkeyPatch, sms: int, cluster: int) -> None:
    devices._gpu_target.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=sms))
    found = devices.target_of(torch.device("cuda", 0))
    devices._gpu_target.cache_clear()
    assert found == replace(target("sm_90a"), cluster=cluster, card="NVIDIA H100 80GB HBM3")
