"""Training of cost models: loop, settings, losses, optimizer and sampling."""
