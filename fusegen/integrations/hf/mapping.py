"""Layers for the package ``kernels`` of Hugging Face, which ``transformers`` puts into models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusegen.integrations.hf import layers
from fusegen.integrations.hf.installed import installed

HUB = Path(__file__).with_name("hub")
"""A folder that `kernels.LocalLayerRepository` takes for a kernel's."""


def kernel_mapping() -> dict[str, dict[str, Any]]:
    """Layers for ``kernels.register_kernel_mapping``, from files of this package: nothing is downloaded.

    ``transformers`` puts them into models with ``use_kernels=True``, or by ``model.kernelize()``.

    Raises:
        ToolNotFoundError: kernels is not installed.
    """
    repository = installed("kernels").LocalLayerRepository
    return {
        layer.__name__: {kind: repository(HUB, layer_name=layer.__name__) for kind in ("cpu", "cuda")} for layer in layers.LAYERS
    }
