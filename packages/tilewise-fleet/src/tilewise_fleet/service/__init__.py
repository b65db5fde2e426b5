"""`tilewise serve`: choices and measurements over HTTP."""
