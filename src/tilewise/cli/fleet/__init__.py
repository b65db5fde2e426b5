"""The commands of many machines."""
