"""Calls as C++ operators of torch: source text, and the build of shared libraries."""
