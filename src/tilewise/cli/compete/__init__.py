"""`tilewise compete`: running, handing in and the board."""
