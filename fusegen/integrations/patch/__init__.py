"""`patch`: replaces the forward passes of a model's modules with kernels. The modules keep their classes and parameters."""

from fusegen.integrations.patch.replacement import patch, unpatch
from fusegen.integrations.patch.report import Report, ReportRow

__all__ = ["Report", "ReportRow", "patch", "unpatch"]
