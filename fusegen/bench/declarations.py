"""What is measured and is no prebuilt fusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

import fusegen as fg


@fg.kernel
def column_sum(x: Tensor) -> Tensor:
    """Σ x over rows: a bias's gradient."""
    return x.sum(0)


OWN: Mapping[str, fg.Kernel[..., Any]] = {"column_sum": column_sum}
"""By the name of their cases."""
