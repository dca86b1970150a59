"""Guards on the Python state that a function reads: recorded while it is traced, checked before each later call.

`StateRecorder` watches one run of a function and records each read of a variable, an attribute or a container as a `StateRead`.
`StateGuard` compiles the reads to one function that tells whether a later call would read the same values.
"""
