"""The models: PyTorch networks, their NumPy scorers, boosted trees, a ridge model, and model files."""
