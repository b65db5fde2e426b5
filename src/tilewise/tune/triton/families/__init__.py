"""The families that come with tilewise, one module per kind of kernel."""
