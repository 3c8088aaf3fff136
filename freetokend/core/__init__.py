"""Types, units, errors and configuration that every other package may import."""
