"""The official doors of ``transformers``: an attention function by name, and layers through the package ``kernels``.

`fusegen.patch` needs neither.
"""

from fusegen.integrations.hf.attention import attention, register_attention
from fusegen.integrations.hf.layers import kernel_mapping

__all__ = ["attention", "kernel_mapping", "register_attention"]
