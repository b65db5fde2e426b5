"""Each optimization beside its peers: one run, a table, and JSON in results/."""
