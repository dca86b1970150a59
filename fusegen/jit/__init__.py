"""Compilation of source text to binaries, with a disk cache."""
