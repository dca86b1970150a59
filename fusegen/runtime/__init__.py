"""Programs on torch tensors: guards, memory, launches."""
