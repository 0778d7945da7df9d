"""The public operations: validate, plan, launch."""
