"""The meaning of each torch function in the graph, by torch's own chapters. Importing this package fills the registry."""

from fusegen.trace.functions import (
    arrangements,
    attention,
    creation,
    elementary,
    indexing,
    losses,
    normalization,
    orders,
    pointwise,
    products,
    random,
    reductions,
    views,
    writes,
)

__all__ = [
    "arrangements",
    "attention",
    "creation",
    "elementary",
    "indexing",
    "losses",
    "normalization",
    "orders",
    "pointwise",
    "products",
    "random",
    "reductions",
    "views",
    "writes",
]
