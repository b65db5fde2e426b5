"""The Triton kernels that are measured. Importing a module in here imports triton; nothing above does so at import."""
