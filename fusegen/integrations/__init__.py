"""Integrations with models, FX graphs, torch.compile and Hugging Face."""
