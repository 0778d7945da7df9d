"""Tensors that say they are on CUDA, for tests of what a launch would get."""

from __future__ import annotations

import torch


class OnCard(torch.Tensor):
    """A CPU tensor that says it is on CUDA."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device(self) -> int:
        return 0
