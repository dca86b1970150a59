"""HTML pages: of a lowered kernel, with its graph, traffic, plan and text beside the user's lines, and of a patched model."""

from fusegen.page.model import LayerView, model_page
from fusegen.page.render import framed, page

__all__ = ["LayerView", "framed", "model_page", "page"]
