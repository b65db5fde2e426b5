"""The models: in PyTorch, in NumPy alone, boosted trees, a ridge; and the files that hold them trained."""
