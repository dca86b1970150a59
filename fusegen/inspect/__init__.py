"""Shows the stages of a kernel: a summary for a terminal, a page for a notebook."""

from fusegen.inspect.page import page
from fusegen.inspect.stages import Stages
from fusegen.inspect.summary import summary

__all__ = ["Stages", "page", "summary"]
