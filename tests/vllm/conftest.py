"""The tests of the vLLM plugin run against the real vLLM, on a machine without a GPU.

vLLM decides by its platform object what it may use. `platform` makes that object answer like a
Hopper card; everything else is vLLM's own code. Kernels are the reference's, on CPU tensors.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

try:
    import vllm.platforms
    from vllm.platforms.interface import DeviceCapability, PlatformEnum
    from vllm.v1.worker.workspace import init_workspace_manager
except ImportError as error:
    raise pytest.UsageError(
        f"tests/vllm need vLLM 0.33.0 ({error}); `.ci/vllm` installs it in a venv of its own and "
        f"runs them there"
    ) from error

# vLLM's modules ask at import whether this is CUDA and then call compiled operators that a machine
# without a GPU has not: so everything is imported before the platform says that it is.
for name in (
    "fused_moe.oracle.int_wna16",
    "fused_moe.all2all_utils",
    "fused_moe.experts.cpu_moe",
    "fused_moe.experts.int4_emulation_moe",
    "fused_moe.experts.rdna3_moe",
    "fused_moe.experts.xpu_moe",
    "fused_moe.experts.zentorch_moe",
    "quantization.compressed_tensors.compressed_tensors",
    "quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16",
    "quantization.humming",
    "quantization.online.fp8",
    "quantization.online.moe_base",
):
    importlib.import_module(f"vllm.model_executor.layers.{name}")
importlib.import_module("vllm.model_executor.model_loader.reload")

os.environ["HF_HUB_OFFLINE"] = "1"

PLATFORM = vllm.platforms.current_platform


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM keep its workspaces on the CPU."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    init_workspace_manager(torch.device("cpu"))


@pytest.fixture
def platform() -> Iterator[Callable[[int, int], None]]:
    """Let vLLM see a CUDA card of compute capability 9.0, or of the one that is passed."""
    plain = type(PLATFORM)

    def become(major: int, minor: int) -> None:
        members: dict[str, Any] = {
            "_enum": PlatformEnum.CUDA,
            "device_name": "cuda",
            "device_type": "cuda",
            "supported_quantization": [],
            "get_device_capability": classmethod(
                lambda cls, device_id=0: DeviceCapability(major, minor)
            ),
            "get_device_name": classmethod(lambda cls, device_id=0: "NVIDIA H200"),
            "fp8_dtype": classmethod(lambda cls: torch.float8_e4m3fn),
            "num_compute_units": classmethod(lambda cls, device_id=0: 132),
        }
        PLATFORM.__class__ = type("CardThatIsNotThere", (plain,), members)

    become(9, 0)
    yield become
    PLATFORM.__class__ = plain
