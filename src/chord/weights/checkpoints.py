"""Read the experts of one MoE layer from a compressed-tensors safetensors checkpoint.

Only the tensors of that layer, and of them only this rank's experts or slices, are read. Accepted
names, with any prefix before `layers` (`model.`, `language_model.model.`):

    layers.{L}.mlp.experts.{e}.{gate_proj,up_proj,down_proj}.{weight_packed,weight_scale,...}
    layers.{L}.block_sparse_moe.experts.{e}.{w1,w3,w2}.{weight_packed,weight_scale,...}

The layout of the packed result is `layout.py`; this module knows names, configs and slices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from chord.arguments import check_tensor, describe, usable_device, whole_number
from chord.errors import InputError, UnsupportedError
from chord.weights.pack import PER_CHANNEL, SUPPORTED_FORMAT, SUPPORTED_GROUPS
from chord.weights.quantization import check_quantization_config, section

# gate, up, down in either family of names.
_PROJECTIONS = {
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "block_sparse_moe": ("w1", "w3", "w2"),
}
_NAME = re.compile(
    r"(?P<prefix>(?:.*\.)?)layers\.(?P<layer>\d+)\.(?P<block>mlp|block_sparse_moe)\.experts\."
    r"(?P<expert>\d+)\.(?P<projection>gate_proj|up_proj|down_proj|w1|w2|w3)\.(?P<tensor>\w+)"
)
_EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, eq=False)
class MoELayer:
    """The expert weights of one layer on one rank, in checkpoint form, ready for `pack_experts`.

    Attributes:
        w13_packed: int32, [E, 2I, H/8], gate rows, then up rows.
        w13_scale: as stored (bf16), [E, 2I, H/group_size].
        w2_packed: int32, [E, H, I/8].
        w2_scale: as stored (bf16), [E, H, I/group_size].
        group_size: 32, 64, 128, or -1 for one scale a row; pass it on to `pack_experts`.
        experts: global ids of the E experts.
    """

    w13_packed: torch.Tensor
    w13_scale: torch.Tensor
    w2_packed: torch.Tensor
    w2_scale: torch.Tensor
    group_size: int
    experts: range


def load_moe_layer(
    path: str | Path,
    layer: int,
    *,
    experts: range | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    device: torch.device | str = "cpu",
    prefix: str | None = None,
    quantization_config: Mapping[str, Any] | None = None,
) -> MoELayer:
    """Load the experts of one MoE layer, and nothing else of the checkpoint.

    Args:
        path: folder with config.json and `model.safetensors.index.json` or one .safetensors file,
            or a .safetensors file beside its config.json.
        layer: number of the layer, as in its tensors' names.
        experts: global ids that this rank owns (EP), a range of step 1; by default all that
            config.json counts. Where it counts none they must be given: the names alone do not
            show that the last ones are missing.
        tp_rank: which slice of every expert this rank owns (TP).
        tp_size: slices per expert. gate and up are cut along N, down along K.
        device: where the result lies. Tensors are read one at a time.
        prefix: what stands before `layers.` in the names; needed only if there are several.
        quantization_config: used instead of the one in config.json.

    Returns:
        MoELayer with E = len(experts) and I = intermediate size / tp_size.

    Raises:
        InputError: an argument, a file or a tensor is missing or does not fit; the message names
            it.
        UnsupportedError: not a symmetric 4-bit weight with group scales in plain order, or a
            slice that does not end on a group boundary.

    Example:
        >>> layer = load_moe_layer("kimi-k2", 1, experts=range(0, 48))  # doctest: +SKIP
        >>> w2 = chord.pack_experts(layer.w2_packed, layer.w2_scale)    # doctest: +SKIP
    """
    _check_ranks(tp_rank, tp_size)
    layer = whole_number("layer", layer)
    target = usable_device("device", device)
    if prefix is not None and not isinstance(prefix, str):
        raise InputError(f"prefix is {describe(prefix)}; it must be a str, as in 'model.'")
    if not isinstance(path, str | Path):
        raise InputError(f"path is {describe(path)}; it must be a str or a Path")
    checkpoint = _Checkpoint(Path(path))
    names = _LayerNames.find(checkpoint, layer, prefix)
    if quantization_config is None:
        quantization_config = _find_quantization_config(checkpoint)
    experts = _choose_experts(experts, names, checkpoint)
    group_size = _group_size(quantization_config, names, experts.start)
    reader = _LayerReader(checkpoint, names, group_size, target)
    w13_packed, w13_scale = reader.read_w13(experts, tp_rank, tp_size)
    w2_packed, w2_scale = reader.read_w2(experts, tp_rank, tp_size)
    if (w2_packed.shape[1], w2_packed.shape[2] * 16) != (
        w13_packed.shape[2] * 8,
        w13_packed.shape[1],
    ):
        raise InputError(
            f"{names.stem}: w13 [2I, H/8] is {list(w13_packed.shape[1:])} and w2 [H, I/8] is "
            f"{list(w2_packed.shape[1:])}; they do not agree in H and I"
        )
    return MoELayer(w13_packed, w13_scale, w2_packed, w2_scale, group_size, experts)


def slice_features(
    packed: torch.Tensor, scale: torch.Tensor, tp_rank: int, tp_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut a gate or up weight along N for one tensor-parallel rank.

    Args:
        packed: int32, [..., N, K/8].
        scale: any float type, [..., N, groups].
        tp_rank: rank, 0..tp_size-1.
        tp_size: number of ranks.

    Returns:
        Views of both tensors, [..., N/tp_size, K/8] and [..., N/tp_size, groups]. A fused w13 must
        be cut in its halves first: gate and up rows are sliced apart.

    Raises:
        UnsupportedError: N is not a multiple of tp_size.
        InputError: there is no such rank, or the tensors differ in N.
    """
    _check_ranks(tp_rank, tp_size)
    _check_pair(packed, scale)
    rows = _feature_slice(packed.shape[-2], tp_rank, tp_size)
    return packed[..., rows, :], scale[..., rows, :]


def slice_reduction(
    packed: torch.Tensor,
    scale: torch.Tensor,
    tp_rank: int,
    tp_size: int,
    *,
    group_size: int = 32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut a down weight along K for one tensor-parallel rank, codes and scales at one boundary.

    Args:
        packed: int32, [..., N, K/8].
        scale: any float type, [..., N, K/group_size], or [..., N, 1] with group_size=-1.
        tp_rank: rank, 0..tp_size-1.
        tp_size: number of ranks.
        group_size: values along K that share a scale.

    Returns:
        Views of both tensors, [..., N, K/tp_size/8] and [..., N, K/tp_size/group_size].

    Raises:
        UnsupportedError: a rank's part is not a whole number of groups.
        InputError: scale does not have K/group_size columns, or there is no such rank.
    """
    _check_ranks(tp_rank, tp_size)
    _check_pair(packed, scale)
    if group_size not in (PER_CHANNEL, *SUPPORTED_GROUPS):
        raise UnsupportedError(f"group_size={group_size!r} is not supported; {SUPPORTED_FORMAT}")
    k = packed.shape[-1] * 8
    groups = 1 if group_size == PER_CHANNEL else k // group_size
    if scale.shape[-1] != groups:
        raise InputError(
            f"scale has {scale.shape[-1]} columns; K={k} with group_size={group_size} has {groups}"
        )
    words, columns = _reduction_slices(k, tp_rank, tp_size, group_size)
    return packed[..., words], scale[..., columns]


def _check_ranks(tp_rank: int, tp_size: int) -> None:
    rank, size = whole_number("tp_rank", tp_rank), whole_number("tp_size", tp_size)
    if size < 1 or not 0 <= rank < size:
        raise InputError(f"tp_rank={rank} with tp_size={size}; ranks are 0..tp_size-1")


def _check_pair(packed: torch.Tensor, scale: torch.Tensor) -> None:
    """Refuse weight and scale that are not of the same features."""
    check_tensor("packed", packed)
    check_tensor("scale", scale)
    if packed.dtype is not torch.int32 or packed.dim() < 2:
        raise InputError(
            f"packed is {packed.dtype} {list(packed.shape)}; it must be int32 [..., N, K/8]"
        )
    if scale.shape[:-1] != packed.shape[:-1]:
        raise InputError(
            f"scale is {list(scale.shape)}, packed {list(packed.shape)}; they must agree in all "
            f"but the last dimension"
        )


def _feature_slice(n: int, tp_rank: int, tp_size: int) -> slice:
    if n % tp_size:
        raise UnsupportedError(f"N={n} does not divide into TP={tp_size} equal slices")
    return slice(n // tp_size * tp_rank, n // tp_size * (tp_rank + 1))


def _reduction_slices(k: int, tp_rank: int, tp_size: int, group_size: int) -> tuple[slice, slice]:
    """Return the slices of a rank in words and in scale columns."""
    step = 32 if group_size == PER_CHANNEL else group_size
    if k % (tp_size * step):
        raise UnsupportedError(
            f"K={k} over TP={tp_size} is {k / tp_size:g} columns per rank, "
            f"{k / tp_size / step:g} groups of group_size={step}; a rank's slice must be a whole "
            f"number of groups: choose another TP size, or EP"
        )
    width = k // tp_size
    first, last = width * tp_rank, width * (tp_rank + 1)
    words = slice(first // 8, last // 8)
    if group_size == PER_CHANNEL:
        return words, slice(0, 1)
    return words, slice(first // group_size, last // group_size)


class _Checkpoint:
    """Where each tensor of a checkpoint lies, and its config.json."""

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            self.folder = path
            self.files = self._read_index(path)
        elif path.is_file():
            self.folder = path.parent
            self.files = dict.fromkeys(_names_in(path), path)
        else:
            raise InputError(f"path={path} does not exist; pass a checkpoint folder or file")
        self.config_path = self.folder / "config.json"
        self.config = _read_object(self.config_path) if self.config_path.is_file() else {}
        self._open: dict[Path, Any] = {}

    @staticmethod
    def _read_index(folder: Path) -> dict[str, Path]:
        index = folder / _INDEX
        if index.is_file():
            weight_map = _read_object(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(
                isinstance(file, str) for file in weight_map.values()
            ):
                raise InputError(
                    f"{index} has no weight_map from tensors to files; is the download complete?"
                )
            return {name: folder / file for name, file in weight_map.items()}
        single = sorted(folder.glob("*.safetensors"))
        if len(single) != 1:
            raise InputError(
                f"{folder} has {len(single)} .safetensors files and no {_INDEX}; a checkpoint is "
                f"one file, or several with that index"
            )
        return dict.fromkeys(_names_in(single[0]), single[0])

    def slice_of(self, name: str) -> Any:
        """Return the lazily read tensor of a name; reading happens when it is indexed."""
        file = self.files.get(name)
        if file is None:
            raise InputError(
                f"tensor {name} is missing in {self.folder}; is the download complete?"
            )
        if file not in self._open:
            self._open[file] = _open_file(file)
        try:
            return self._open[file].get_slice(name)
        except SafetensorError as error:
            raise InputError(
                f"tensor {name} is missing in {file}, where the index places it ({error})"
            ) from None


def _read_object(file: Path) -> dict[str, Any]:
    """Return what a JSON file holds, which must be an object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not UTF-8
        raise InputError(
            f"{file} cannot be read as JSON ({error}); is the download complete?"
        ) from None
    if not isinstance(content, dict):
        raise InputError(f"{file} holds {describe(content)}; it must hold an object")
    return content


def _open_file(file: Path) -> Any:
    if not file.is_file():
        raise InputError(f"{file} does not exist; is the download complete?")
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is not a readable safetensors file: {error}") from None


def _names_in(file: Path) -> list[str]:
    return list(_open_file(file).keys())


@dataclass(frozen=True)
class _LayerNames:
    """How the tensors of one layer's experts are called."""

    stem: str
    gate: str
    up: str
    down: str
    expert_ids: frozenset[int]

    def module(self, expert: int, projection: str) -> str:
        return f"{self.stem}.{expert}.{projection}"

    @staticmethod
    def find(checkpoint: _Checkpoint, layer: int, prefix: str | None) -> _LayerNames:
        found: dict[tuple[str, str], set[int]] = {}
        for name in checkpoint.files:
            match = _NAME.fullmatch(name)
            if match is None or int(match["layer"]) != layer:
                continue
            if prefix is None or match["prefix"] == prefix:
                key = match["prefix"], match["block"]
                found.setdefault(key, set()).add(int(match["expert"]))
        if not found:
            where = "" if prefix is None else f" with prefix={prefix!r}"
            raise InputError(
                f"layer={layer} has no expert tensors{where} in {checkpoint.folder}; looked for "
                f"...layers.{layer}.mlp.experts.0.gate_proj.weight_packed and "
                f"...layers.{layer}.block_sparse_moe.experts.0.w1.weight_packed"
            )
        if len(found) > 1:
            prefixes = ", ".join(repr(p) for p, _ in sorted(found))
            raise InputError(
                f"layer={layer} has experts under {len(found)} names, prefixes {prefixes}; choose "
                f"one with prefix="
            )
        (stem_prefix, block), ids = next(iter(found.items()))
        stem = f"{stem_prefix}layers.{layer}.{block}.experts"
        return _LayerNames(stem, *_PROJECTIONS[block], frozenset(ids))


def _choose_experts(experts: range | None, names: _LayerNames, checkpoint: _Checkpoint) -> range:
    """Return the experts to read: those asked for, else all that the config counts.

    The names count too few where the last experts are missing, so they never decide.
    """
    counted = _count_experts(checkpoint.config)
    named = max(names.expert_ids) + 1
    if counted is not None and named > counted:
        raise InputError(
            f"{names.stem} has an expert {named - 1}, but {checkpoint.config_path} counts "
            f"{counted} experts; do config and tensors belong together?"
        )
    if experts is None and counted is None:
        raise InputError(
            f"{checkpoint.config_path} states none of {', '.join(_EXPERT_COUNTS)}, so nothing "
            f"shows whether the last of the {named} experts found is the layer's last; pass "
            f"experts=range({named}) if it is"
        )
    if experts is None:
        return range(counted or 0)
    limit = named if counted is None else counted
    if not isinstance(experts, range):
        raise InputError(f"experts is {describe(experts)}; it must be a range, as range({limit})")
    if experts.step != 1 or not 0 <= experts.start < experts.stop <= limit:
        raise InputError(
            f"experts={experts} is not a non-empty range of step 1 within 0..{limit}, the "
            f"experts of {names.stem}"
        )
    return experts


def _group_size(config: Mapping[str, Any], names: _LayerNames, expert: int) -> int:
    """Return the group size that a config states for all three projections of an expert."""
    modules = [names.module(expert, name) for name in (names.gate, names.up, names.down)]
    sizes = [check_quantization_config(config, module) for module in modules]
    if len(set(sizes)) > 1:
        raise UnsupportedError(
            f"quantization_config: group sizes {sizes} of {', '.join(modules)}; the projections of "
            f"a layer need one"
        )
    return sizes[0]


def _count_experts(config: Mapping[str, Any]) -> int | None:
    """Return the number of experts that the config states, or None."""
    for part in (section(config, "text_config"), config):
        for key in _EXPERT_COUNTS:
            if type(part.get(key)) is int:
                return int(part[key])
    return None


def _find_quantization_config(checkpoint: _Checkpoint) -> Mapping[str, Any]:
    config = checkpoint.config
    for part in (config, section(config, "text_config")):
        for key in ("quantization_config", "compression_config"):
            found = section(part, key)
            if found:
                return found
    raise InputError(
        f"{checkpoint.config_path} has no quantization_config"
        if checkpoint.config
        else f"{checkpoint.config_path} does not exist; it states how the weights are quantized "
        f"(or pass quantization_config=)"
    )


class _LayerReader:
    """Reads expert after expert into preallocated stacks."""

    def __init__(
        self,
        checkpoint: _Checkpoint,
        names: _LayerNames,
        group_size: int,
        device: torch.device,
    ) -> None:
        self.checkpoint = checkpoint
        self.names = names
        self.group_size = group_size
        self.device = device

    def read_w13(
        self, experts: range, tp_rank: int, tp_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read gate and up rows of this rank: [E, 2I, H/8] and [E, 2I, groups]."""
        n, k, scale_dtype = self._shape(self.names.module(experts.start, self.names.gate))
        rows = _feature_slice(n, tp_rank, tp_size)
        part = rows.stop - rows.start
        packed, scale = self._allocate(len(experts), 2 * part, k, scale_dtype)
        for place, expert in enumerate(experts):
            for half, projection in enumerate((self.names.gate, self.names.up)):
                module = self.names.module(expert, projection)
                self._check_module(module, n, k, scale_dtype)
                target = slice(half * part, (half + 1) * part)
                packed[place, target] = self._slice(module, "weight_packed")[rows, :]
                scale[place, target] = self._slice(module, "weight_scale")[rows, :]
        return packed, scale

    def read_w2(
        self, experts: range, tp_rank: int, tp_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read down columns of this rank: [E, H, I/8] and [E, H, groups]."""
        n, k, scale_dtype = self._shape(self.names.module(experts.start, self.names.down))
        words, columns = _reduction_slices(k, tp_rank, tp_size, self.group_size)
        packed, scale = self._allocate(len(experts), n, k // tp_size, scale_dtype)
        for place, expert in enumerate(experts):
            module = self.names.module(expert, self.names.down)
            self._check_module(module, n, k, scale_dtype)
            packed[place] = self._slice(module, "weight_packed")[:, words]
            scale[place] = self._slice(module, "weight_scale")[:, columns]
        return packed, scale

    def _slice(self, module: str, tensor: str) -> Any:
        return self.checkpoint.slice_of(f"{module}.{tensor}")

    def _shape(self, module: str) -> tuple[int, int, str]:
        """Return N, K and the name of the scales' dtype of the first expert's module."""
        shape = self._slice(module, "weight_packed").get_shape()
        if len(shape) != 2:
            raise InputError(f"{module}.weight_packed has shape {shape}; it must be [N, K/8]")
        n, words = shape
        return n, words * 8, self._slice(module, "weight_scale").get_dtype()

    def _allocate(
        self, num_experts: int, n: int, k: int, scale_dtype: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
        if scale_dtype not in dtypes:
            raise UnsupportedError(
                f"{self.names.stem}: weight_scale is {scale_dtype}; scales must be BF16, F16 or F32"
            )
        packed = torch.empty(num_experts, n, k // 8, dtype=torch.int32, device=self.device)
        shape = (num_experts, n, self._groups(k))
        return packed, torch.empty(shape, dtype=dtypes[scale_dtype], device=self.device)

    def _groups(self, k: int) -> int:
        return 1 if self.group_size == PER_CHANNEL else k // self.group_size

    def _check_module(self, module: str, n: int, k: int, scale_dtype: str) -> None:
        """Refuse a module that differs from the first expert's, or from the config."""
        checkpoint = self.checkpoint
        if f"{module}.weight_zero_point" in checkpoint.files:
            raise UnsupportedError(f"tensor {module}.weight_zero_point exists; {SUPPORTED_FORMAT}")
        packed, scale = self._slice(module, "weight_packed"), self._slice(module, "weight_scale")
        seen = packed.get_dtype(), packed.get_shape(), scale.get_dtype(), scale.get_shape()
        wanted = "I32", [n, k // 8], scale_dtype, [n, self._groups(k)]
        if seen != wanted:
            raise InputError(
                f"{module}: weight_packed {seen[0]} {seen[1]}, weight_scale {seen[2]} {seen[3]}; "
                f"group_size={self.group_size} and the layer's first expert need {wanted[0]} "
                f"{wanted[1]}, {wanted[2]} {wanted[3]}"
            )
        if f"{module}.weight_shape" in checkpoint.files:
            stated = self._slice(module, "weight_shape")[:].tolist()
            if stated != [n, k]:
                raise InputError(
                    f"{module}.weight_shape is {stated}, weight_packed holds [{n}, {k}]; padded or "
                    f"truncated rows are not supported"
                )
        if f"{module}.weight_g_idx" in checkpoint.files:
            self._check_plain_order(module, k)

    def _check_plain_order(self, module: str, k: int) -> None:
        stated = self._slice(module, "weight_g_idx")[:]
        plain = torch.arange(k) // (k if self.group_size == PER_CHANNEL else self.group_size)
        if stated.shape != plain.shape or not torch.equal(stated.long(), plain):
            raise UnsupportedError(
                f"{module}.weight_g_idx is not column // group_size: act-order groups; "
                f"{SUPPORTED_FORMAT}"
            )
