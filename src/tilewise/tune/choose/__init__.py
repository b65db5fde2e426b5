"""Which configuration to use: what was kept on this machine, and what a calibrated model says of other shapes."""
