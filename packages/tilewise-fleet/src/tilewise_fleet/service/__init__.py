"""`tilewise fleet serve`: choices and measurements over HTTP."""
