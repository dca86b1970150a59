"""A kernel folder in the format of ``kernels``, which imports it by path, under the id in `metadata.json`."""

from fusegen.integrations import hf as layers

__all__ = ["layers"]
