"""Profile reports: costs by layer and operation, the bottleneck, and output as text, HTML page and Chrome trace."""
