"""Families of kernels: what each computes, its configurations, how they are run and how a cost model sees them."""
