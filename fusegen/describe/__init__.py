"""Shows the stages of a kernel: a summary for a terminal, a page for a notebook."""

from fusegen.describe.page import page
from fusegen.describe.stages import Stages
from fusegen.describe.summary import summary

__all__ = ["Stages", "page", "summary"]
