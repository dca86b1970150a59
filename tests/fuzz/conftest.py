"""How many programs, from which seed, on which device: options of the command line."""

from __future__ import annotations

import pytest

PER_BATCH = 25
EMULATED, PER_EMULATED = 60, 20
"""Programs in the emulator, at least; they are a tenth of all. And those of a batch."""
PER_SCENARIO = 100
"""Programs for which ten scenarios run."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a batch of programs, so that several processes share them."""
    if "batch" in metafunc.fixturenames:
        count = int(metafunc.config.getoption("--programs"))
        sizes = [min(PER_BATCH, count - start) for start in range(0, count, PER_BATCH)]
        metafunc.parametrize("batch", list(enumerate(sizes)), ids=[f"batch{n}" for n in range(len(sizes))])
    if "emulated" in metafunc.fixturenames:
        count = max(EMULATED, int(metafunc.config.getoption("--programs")) // 10)
        metafunc.parametrize("emulated", [(n, PER_EMULATED) for n in range(-(-count // PER_EMULATED))], ids=str)
    if "scenarios" in metafunc.fixturenames:
        count = int(metafunc.config.getoption("--programs")) // PER_SCENARIO
        metafunc.parametrize("scenarios", range(max(count, 1)), ids=str)


@pytest.fixture
def first_seed(request: pytest.FixtureRequest) -> int:
    """The seed of the first batch."""
    return 1_000_000 * int(request.config.getoption("--seed"))


@pytest.fixture
def on_device(request: pytest.FixtureRequest) -> str:
    """Where programs run."""
    return str(request.config.getoption("--device"))
