"""Made-up records of the benchmark, small and large."""

from __future__ import annotations

from dataclasses import replace

from fusegen.bench.record import BenchRecord, Environment, Latency, ProviderTiming, TimedCase

MIB = 1 << 20

ENVIRONMENT = Environment(
    device="NVIDIA H200",
    kind="cuda",
    driver="580.159.04",
    cuda="13.0",
    torch="2.13.0",
    fusegen="0.1.0",
    python="3.12.3",
    threads=16,
    timer="CUDA graphs",
    date="2026-11-23T06:41:06+00:00",
    commit="0123456789abcdef0123456789abcdef01234567-dirty",
)


def timing(
    provider: str, microseconds: float | None, *, difference: float | None = 1e-3, error: str | None = None
) -> ProviderTiming:
    """A provider's time."""
    low, high = (None, None) if microseconds is None else (0.99 * microseconds, 1.02 * microseconds)
    return ProviderTiming(provider, f"as {provider} does", microseconds, low, high, difference, error)


def row(
    case: str = "gelu", shape: str = "1024x4096", *, flops: int | None = None, group: str = "public", **times: float
) -> TimedCase:
    """A case in which each provider took so many microseconds."""
    timings = tuple(timing(name, time) for name, time in times.items())
    return TimedCase(group, case, shape, "bfloat16", 64 * MIB, flops, "1", timings)


def record(*rows: TimedCase) -> BenchRecord:
    """A record of some rows."""
    return BenchRecord(ENVIRONMENT, rows, (Latency("pointwise, fresh text", 42.0, 4.0, 11.0),))


def failed(message: str = "CompileError: no <compiler> & no hope") -> TimedCase:
    """A case that fusegen does not compile."""
    rest = row("broken", eager=20.0)
    return replace(rest, launches="", timings=(timing("fusegen", None, difference=None, error=message), *rest.timings))


def wrong() -> TimedCase:
    """A case that fusegen computes as something else."""
    mine = timing("fusegen", None, difference=0.7, error="wrong: off by 7.0e-01 of the result")
    return replace(row("crooked", eager=20.0), timings=(mine, timing("eager", 20.0)))


def sweep(case: str, lengths: range = range(8, 17), **shares: float) -> list[TimedCase]:
    """A case over lengths of rows; each provider takes so many times as long as the copy."""
    copied = {power: 32.0 * (1 + 20 / 2 ** (power / 2)) for power in lengths}
    times = {power: {name: share * time for name, share in shares.items()} for power, time in copied.items()}
    return [
        row(case, f"{2 ** (24 - power)}x{2**power}", group="sweeps", **times[power], copy=time) for power, time in copied.items()
    ]


def everything() -> BenchRecord:
    """All that a report knows to show: sweeps, products, losses, ties, failures, a bar, names that look like elements."""
    return record(
        *sweep("layer_norm", fusegen=1.05, eager=1.9, compile=1.1),
        *sweep("soft<b>max", fusegen=1.2, eager=1.1, compile=1.02),
        row("gelu", fusegen=20.0, eager=21.0, copy=19.0),
        row("gelu_dropout_add_with_a_long_name", "8x1024x3072", fusegen=20.0, eager=120.0, copy=19.0),
        row("linear_bias_gelu", "4096x4096x4096", flops=2 * 4096**3, fusegen=210.0, eager=200.0),
        row("linear_bias_gelu", "16x4096x4096", flops=2 * 16 * 4096**2, fusegen=20.0, eager=30.0),
        row("flash_attention", "4x16x4096x128", flops=1 << 39, fusegen=900.0, eager=901.0),
        failed(),
        wrong(),
        row("alone", fusegen=30.0, copy=20.0),
        row("swiglu", "16384x8192", group="bars", fusegen=208.0, eager=320.0, compile=210.0, copy=189.0),
    )
