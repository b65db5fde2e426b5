"""The records of operators, by family; `tilewise.graph.ops` joins them to one table."""
