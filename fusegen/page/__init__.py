"""The HTML page of a lowered kernel: its graph, plan, memory traffic, and the emitted text beside the user's lines."""

from fusegen.page.render import notebook, page

__all__ = ["notebook", "page"]
