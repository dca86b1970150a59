"""Models that run as kernels without a change of their source: their modules keep their classes and all that they hold, and their
forward passes are replaced (`patch`)."""

from fusegen.integrations.patch.replacement import patch, unpatch
from fusegen.integrations.patch.report import Report, ReportRow

__all__ = ["Report", "ReportRow", "patch", "unpatch"]
