"""What each torch function means in the graph, by family. Importing this package fills the registry."""

from fusegen.lang.functions import (
    activations,
    arrangements,
    attention,
    bits,
    casts,
    creation,
    einsum,
    indexing,
    losses,
    normalization,
    pointwise,
    products,
    random,
    reductions,
    scans,
    views,
)

__all__ = [
    "activations",
    "arrangements",
    "attention",
    "bits",
    "casts",
    "creation",
    "einsum",
    "indexing",
    "losses",
    "normalization",
    "pointwise",
    "products",
    "random",
    "reductions",
    "scans",
    "views",
]
