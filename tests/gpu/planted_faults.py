"""Kernels with one fault each, for compute-sanitizer: ``python -m tests.gpu.planted_faults TOOL`` runs the one that TOOL must see.

`.ci/sanitize` believes that our kernels have no faults when the tools have named these, which are launched as ours are.
"""

from __future__ import annotations

import sys

import torch

from fusegen.compiler.backends import target_of
from fusegen.jit import nvrtc
from fusegen.program.call import KernelLaunch
from fusegen.program.formula import formula_of
from fusegen.runtime import cuda
from fusegen.runtime.cuda import ADDRESS, LaunchSite
from fusegen.source import Source

THREADS = 64  # of the only block, and elements of its tensors

FAULTS = {
    "memcheck": "out[thread] = x[thread + 1];  // beyond the tensor",
    "racecheck": "shared[thread] = x[thread]; out[thread] = shared[(thread + 32) % 64];  // with no barrier between",
    "initcheck": "out[thread] = x[thread];  // which nobody has written",
    "synccheck": "if (thread < 48) __syncthreads(); out[thread] = x[thread];  // a barrier that some threads skip",
}
"""By the tool that must see it: what the kernel does."""


def planted(tool: str) -> Source:
    """The kernel that a tool must name."""
    entry = f"fg_planted_{tool}"
    text = (
        f'extern "C" __global__ void {entry}(const float* x, float* out) {{\n'
        f"    __shared__ float shared[{THREADS}];\n"
        f"    const int thread = threadIdx.x;\n    {FAULTS[tool]}\n}}\n"
    )
    return Source(entry.removeprefix("fg_"), entry, "cuda", banner="", primitives=(), math="", pipeline=text)


def run(tool: str) -> None:
    """Launches it once on the current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.empty(THREADS, device=device) if tool == "initcheck" else torch.ones(THREADS).to(device)
    out = torch.zeros(THREADS).to(device)
    source, launch = planted(tool), KernelLaunch((), formula_of(1), THREADS, 0, ())
    cubin = nvrtc.compile_cubin(source, target_of(device).name).cubin
    site = LaunchSite(cuda.load(cubin, source.entry, launch, device.index), device.index, 1, THREADS, 0, [ADDRESS] * 2)
    memory, config, table = frame = site.frame()
    site.fill(memory, site.start, torch.cuda.current_stream().cuda_stream, x.data_ptr(), out.data_ptr())
    if status := site.launch(config, site.kernel, table, None):
        site.refused(status, frame)
    torch.cuda.synchronize()


if __name__ == "__main__":
    run(sys.argv[1])
