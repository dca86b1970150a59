"""The backend ``fusegen`` of torch.compile."""
