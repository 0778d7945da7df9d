"""`humming.forward`."""

from chord.compat.forward import humming_forward, may_process_input
from chord.compat.refusals import refusing_function

may_quant_input = refusing_function("may_quant_input")

__all__ = ["humming_forward", "may_process_input", "may_quant_input"]
