"""Built kernels: compiled into a folder, and called from it without compiler, templates and sympy."""
