"""A model with a built operator, as a package of AOTInductor: ``python model.py mylib.so model.pt2``. See server.cpp."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg

WIDTH = 16


@fg.kernel
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


class Model(nn.Module):
    """Two layers, with the operator between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 1)
        self.bias = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.ops.mylib.bias_gelu(self.first(x), self.bias))
        return result


def main(library: str, package: str) -> None:
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    rows = torch.export.Dim("rows", min=2, max=4096)
    with torch.no_grad():
        model = Model()
        program = torch.export.export(model, (torch.ones(8, WIDTH),), dynamic_shapes=({0: rows},))
        torch._inductor.aoti_compile_and_package(program, package_path=package)
        print(model(torch.arange(2.0 * WIDTH).view(2, WIDTH)).flatten().tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
