"""Generates C++ operators of torch for calls, and builds them as shared libraries."""
