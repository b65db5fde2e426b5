"""The `tilewise` command."""
