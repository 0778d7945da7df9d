"""`humming.utils`."""
