"""Calls as C++ operators of torch: their text, and the shared libraries that torch's own compiler of extensions makes of it."""
