"""The programs whose kernels are measured, as lists, and the splits their shapes fall into."""
