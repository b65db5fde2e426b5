"""The checks, one module a lesson."""
