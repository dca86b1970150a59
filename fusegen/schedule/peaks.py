"""Peak rates of the GPU that each target stands for, from its vendor's data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.schedule.cost import H200

LAUNCH_SECONDS = H200.start * 1e-6
"""Time of a kernel with next to no work. Measured on an H200 (`docs/costs/h200.json`); the other GPUs are assumed to be alike."""


@dataclass(frozen=True)
class Peaks:
    """Peak rates of a GPU. Arithmetic counts a fused multiply-add as two operations; rates of sparse matrices are not used.

    Attributes:
        gpu: its name.
        bandwidth: bytes a second from memory.
        single, double: FLOP/s in float32 and float64, outside of tensor cores; float32 matmuls too, without TF32.
        half_matmul: FLOP/s of tensor cores on 16-bit floats that accumulate in float32.
        double_matmul: FLOP/s of matmuls in float64: by tensor cores where there are such for float64.
    """

    gpu: str
    bandwidth: float
    single: float
    double: float
    half_matmul: float
    double_matmul: float

    def arithmetic(self, dtype: DType, *, is_matmul: bool) -> float:
        """FLOP/s of matmuls of a dtype, or of other operations that are computed in it."""
        if dtype is DType.FLOAT64:
            return self.double_matmul if is_matmul else self.double
        return self.half_matmul if is_matmul and dtype.is_half else self.single


PEAKS: Mapping[str, Peaks] = {
    # NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM; dense bfloat16.
    "sm_80": Peaks("A100", 2.039e12, 19.5e12, 9.7e12, 312e12, 19.5e12),
    # NVIDIA Ampere GA102 GPU Architecture whitepaper, table 3, RTX A6000; dense bfloat16 with FP32 accumulate (154.8/309.6);
    # float64 runs at 1/64 of the rate of float32.
    "sm_86": Peaks("RTX A6000", 0.768e12, 38.7e12, 0.605e12, 154.8e12, 0.605e12),
    # NVIDIA Ada GPU Architecture whitepaper, appendix A, GeForce RTX 4090; dense bfloat16 with FP32 accumulate (165.2/330.4),
    # half the rate of FP16 accumulate; float64 runs at 1/64 of the rate of float32.
    "sm_89": Peaks("RTX 4090", 1.008e12, 82.6e12, 1.29e12, 165.2e12, 1.29e12),
    # NVIDIA H200 Tensor Core GPU data sheet, H200 SXM; half of its 1,979 TFLOPS of bfloat16, which are of sparse matrices.
    "sm_90a": Peaks("H200", 4.8e12, 67e12, 34e12, 989.5e12, 67e12),
    # NVIDIA Blackwell Architecture Technical Brief, table 3, HGX B200, a GPU; half of its 4.5 PFLOPS of sparse bfloat16. The first
    # edition, of before the product, has 8 TB/s, 80 and 40 TFLOPS.
    "sm_100": Peaks("B200", 7.7e12, 75e12, 37e12, 2250e12, 37e12),
    # NVIDIA RTX Blackwell GPU Architecture whitepaper, table 3, GeForce RTX 5090; dense bfloat16 with FP32 accumulate (209.5/419),
    # half of the rate with FP16 accumulate; float64 runs at 1/64 of the rate of float32.
    "sm_120": Peaks("RTX 5090", 1.792e12, 104.8e12, 1.64e12, 209.5e12, 1.64e12),
}
"""By target. A CPU's peaks depend on the machine and are not known."""
