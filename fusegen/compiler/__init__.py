"""The driver: from a call of a declared function to a program that `runtime` runs."""
