"""Many machines: the service in front of a store, campaigns and sweeps on Ray, and a one-machine fleet to try them."""
