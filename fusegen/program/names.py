"""Names of strides, and plain names."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache


@lru_cache(maxsize=4096)
def ascii_name(name: str) -> str:
    """Returns a name in ASCII letters, digits and single underscores that does not start with a digit."""
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    safe = re.sub(r"\W+", "_", ascii_name).strip("_")
    safe = re.sub(r"__+", "_", safe) or "value"
    return f"n{safe}" if safe[0].isdigit() else safe


def stride_name(tensor: str, dim: int) -> str:
    return f"{ascii_name(tensor)}_stride{dim}"
