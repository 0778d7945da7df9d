"""Chord inside serving engines, one folder each. Only they import the engine."""
