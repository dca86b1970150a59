"""What each torch function means in the graph, by family. Importing this package fills the registry."""

from fusegen.lang.functions import creation, normalization, pointwise, products, reductions, views

__all__ = ["creation", "normalization", "pointwise", "products", "reductions", "views"]
