"""`humming.tune`."""

from chord.compat.forward import get_heuristics_config

__all__ = ["get_heuristics_config"]
