"""What a profile says: figures by layer and operation, the bottleneck, and both as text, page and trace."""
