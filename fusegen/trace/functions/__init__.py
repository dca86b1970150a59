"""Handlers that trace torch functions, grouped as in torch's documentation. Importing this package registers them."""

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
