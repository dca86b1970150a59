"""A folder as ``kernels`` reads it: `layers` has the classes whose forward passes take the place of others'. ``kernels`` imports it
from its path, under the id in `metadata.json`."""

from fusegen.integrations import hf as layers

__all__ = ["layers"]
