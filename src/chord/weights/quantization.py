"""What a compressed-tensors `quantization_config` states, and whether Chord can run it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from chord.arguments import describe
from chord.errors import InputError, UnsupportedError
from chord.weights.pack import PER_CHANNEL, PLAIN_ORDER, SUPPORTED_FORMAT, SUPPORTED_GROUPS


def check_quantization_config(config: Mapping[str, Any], module: str = "") -> int:
    """Return the group size of a compressed-tensors config that Chord can run; refuse others.

    Args:
        config: the `quantization_config` of a model's config.json.
        module: name of an expert's linear layer, to choose among several groups of the config.

    Returns:
        32, 64 or 128, or -1 for one scale a row.

    Raises:
        UnsupportedError: another method, width, strategy, order, an asymmetric weight, quantized
            activations, or a module that the config leaves unquantized.
    """
    if not isinstance(config, Mapping):
        raise InputError(
            f"quantization_config is {describe(config)}; it must be the object of config.json"
        )
    method = config.get("quant_method", "compressed-tensors")
    if method != "compressed-tensors":
        raise _unsupported(f"quant_method={method!r}")
    for pattern in _names(config, "ignore"):
        if module and _matches(pattern, module):
            raise _unsupported(f"ignore={pattern!r} leaves {module} unquantized")
    refuse_transforms(config, module)
    layout_of_zeros = section(config, "sparsity_config").get("format")
    if layout_of_zeros not in (None, "dense"):
        raise _unsupported(f"sparsity_config.format={layout_of_zeros!r}, not 'dense'")
    group = _choose_group(config, module)
    layout = group.get("format") or config.get("format")
    if layout not in (None, "pack-quantized"):
        raise _unsupported(f"format={layout!r}, not 'pack-quantized'")
    if group.get("input_activations") is not None:
        raise _unsupported("input_activations are quantized, Chord's are bf16")
    weights = section(group, "weights")
    stated = {"type": "int", "symmetric": True, **weights}  # the format's own defaults
    for key, value in {"num_bits": 4, "type": "int", "symmetric": True}.items():
        if stated.get(key) != value:
            raise _unsupported(f"weights.{key}={stated.get(key)!r}, not {value!r}")
    if weights.get("dynamic"):
        raise _unsupported(f"weights.dynamic={weights['dynamic']!r}")
    if weights.get("actorder") not in PLAIN_ORDER:
        raise _unsupported(f"weights.actorder={weights['actorder']!r} (act-order groups)")
    strategy, group_size = weights.get("strategy"), weights.get("group_size")
    if strategy == "channel" and group_size in (None, -1):
        return PER_CHANNEL
    if strategy not in (None, "group") or group_size not in SUPPORTED_GROUPS:
        raise _unsupported(f"weights.strategy={strategy!r} with group_size={group_size!r}")
    return int(group_size)


def refuse_transforms(config: Mapping[str, Any], module: str) -> None:
    """Refuse rotations of a module's activations; those of weights are in the weights already.

    Args:
        config: A `quantization_config`; only its `transform_config` is looked at.
        module: Name of a linear layer.

    Raises:
        UnsupportedError: The model has to rotate what the module takes or gives.
    """
    schemes = section(section(config, "transform_config"), "config_groups")
    for name in schemes:
        for applied in section(schemes, name).get("apply") or []:
            if not isinstance(applied, Mapping):
                raise InputError(
                    f"apply of the transform {name!r} holds {describe(applied)}; it must be a list "
                    f"of objects"
                )
            location, targets = applied.get("location"), _names(applied, "targets")
            is_meant = "Linear" in targets or any(_matches(t, module) for t in targets)
            is_left_out = any(_matches(pattern, module) for pattern in _names(applied, "ignore"))
            if location in ("input", "output") and is_meant and not is_left_out:
                raise _unsupported(
                    f"transform_config rotates the {location} of {module or 'Linear'} ({name!r}) "
                    f"while the model runs, which Chord does not"
                )


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object inside a config, empty if it is missing or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"{key} of the config is {describe(value)}; it must be an object")
    return value


def _names(config: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of names inside a config, empty if it is missing or null."""
    names = config.get(key) or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{key} of the config is {describe(names)}; it must be a list of names")
    return list(names)


def _unsupported(what: str) -> UnsupportedError:
    return UnsupportedError(f"quantization_config: {what}; {SUPPORTED_FORMAT}")


def _matches(pattern: str, module: str) -> bool:
    """Tell whether a target of the config names a module: `re:` regex, full name or its end."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise InputError(
                f"{pattern!r} of the config is no regular expression: {error}"
            ) from None
    return module == pattern or module.endswith("." + pattern)


def _choose_group(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """Return the config group of a module: by its name first, then by its class, Linear."""
    by_key = section(config, "config_groups")
    groups = [section(by_key, key) for key in by_key]
    if len(groups) == 1:
        return groups[0]
    by_name = [g for g in groups if any(_matches(t, module) for t in _names(g, "targets"))]
    by_class = [g for g in groups if "Linear" in _names(g, "targets")]
    if by_name or by_class:
        return (by_name + by_class)[0]
    raise _unsupported(f"none of {len(groups)} config_groups targets {module or 'Linear'}")
