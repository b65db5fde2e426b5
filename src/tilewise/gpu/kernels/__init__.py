"""The Triton kernels of the families. Importing a module of this package imports Triton; no other module does."""
