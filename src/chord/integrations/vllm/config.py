"""The quantization configs that stand in vLLM's registry in the place of its own.

Each is vLLM's class with one question answered first: who serves an expert layer? Whatever Chord
does not take goes to the class it derives from. They are module-level classes, because vLLM
pickles its config into the processes that it spawns.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.humming import HummingConfig

from chord.integrations.vllm import selection

CHECKPOINT_METHOD = "compressed-tensors"


class ChordCompressedTensorsConfig(CompressedTensorsConfig):
    """compressed-tensors as vLLM has it, with Chord for the expert layers that it takes.

    In the registry as "compressed-tensors": `vllm serve MODEL` needs no flag.
    """

    asked_by_name: ClassVar[bool] = False

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that serves a layer: Chord's, or vLLM's own."""
        if isinstance(layer, RoutedExperts):
            method = selection.chord_method(self, layer, prefix, asked_by_name=self.asked_by_name)
            if method is not None:
                return method
        return super().get_quant_method(layer, prefix)


class ChordConfig(ChordCompressedTensorsConfig):
    """The same, asked for by name: `--quantization chord`.

    An expert layer that Chord cannot serve is then an error, not a fall-back.
    """

    asked_by_name: ClassVar[bool] = True

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Return "chord" where the user asked for it and the checkpoint is compressed-tensors.

        Raises:
            ValueError: The user asked for it and the checkpoint is of another kind.
        """
        if user_quant != "chord":
            return None
        method = hf_quant_cfg.get("quant_method")
        if method != CHECKPOINT_METHOD:
            raise ValueError(
                f"--quantization chord: the checkpoint's quant_method is {method!r}; Chord serves "
                f"{CHECKPOINT_METHOD} checkpoints. Leave the flag out"
            )
        return "chord"


class ChordHummingConfig(HummingConfig):
    """`--quantization humming`, with Chord for the expert layers that it takes."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that serves a layer: Chord's, or that of vLLM's Humming config."""
        if isinstance(layer, RoutedExperts) and self.full_config:
            method = selection.chord_method(self._checkpoint_config(), layer, prefix)
            if method is not None:
                return method
        return super().get_quant_method(layer, prefix)

    def _checkpoint_config(self) -> CompressedTensorsConfig | None:
        """Return the checkpoint's own config, if it is a compressed-tensors one."""
        if self.full_config.get("quant_method") != CHECKPOINT_METHOD:
            return None
        config = CompressedTensorsConfig.from_config(copy.deepcopy(self.full_config))
        config.packed_modules_mapping = self.packed_modules_mapping
        config.online_quantization_config = self.online_quantization_config
        mapper = getattr(self, "hf_to_vllm_mapper", None)
        if mapper is not None:
            config.apply_vllm_mapper(mapper)
        return config


CONFIGS: dict[str, type[QuantizationConfig]] = {
    "chord": ChordConfig,
    "compressed-tensors": ChordCompressedTensorsConfig,
    "humming": ChordHummingConfig,
}
"""What stands in vLLM's registry under which name."""
