"""Features: transformations from a kernel's raw numbers to the inputs of each model."""
