"""Integrations: models of users and of transformers, FX graphs, torch.compile, the Hugging Face hub."""
