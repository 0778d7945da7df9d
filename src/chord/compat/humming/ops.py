"""`humming.ops`."""

from chord.compat.refusals import refusing_function

process_input = refusing_function("ops.process_input")

__all__ = ["process_input"]
