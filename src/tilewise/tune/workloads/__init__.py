"""The programs whose kernels are measured, as tables, and the splits their shapes fall into."""
