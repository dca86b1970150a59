"""Compilers and the disk: sources to binaries, cached."""
