"""Choosing a kernel and its configuration: enumerate, reject with a reason, score, choose."""
