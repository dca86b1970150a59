"""HTML pages: of a lowered kernel, with its graph, traffic, plan and text beside the user's lines, and of a patched model."""

from fusegen.page.model import LayerView, model_page
from fusegen.page.render import Machine, drawing_of, framed, page

__all__ = ["LayerView", "Machine", "drawing_of", "framed", "model_page", "page"]
