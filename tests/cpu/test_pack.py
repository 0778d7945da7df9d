"""Packing: every code and scale lands where `layout.py` says, and comes back; the rest is refused.

Field cases 6 (slices against groups) and 10 (memory) stand here as far as they need no GPU.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
from chord.errors import InputError, UnsupportedError
from chord.weights import PackedExperts, layout, pack, pack_experts, unpack
from chord.weights.checkpoints import slice_features, slice_reduction

shapes = st.tuples(st.integers(1, 4), st.integers(1, 20).map(lambda v: 8 * v), st.integers(1, 7))


def ones(num_experts: int, n: int, groups: int) -> torch.Tensor:
    return torch.ones(num_experts, n, groups, dtype=torch.bfloat16)


def words(num_experts: int = 2, n: int = 16, k: int = 64) -> torch.Tensor:
    return torch.zeros(num_experts, n, k // 8, dtype=torch.int32)


# --- what is packed -----------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(shape=shapes, interleave=st.booleans(), seed=st.integers(0, 1 << 30))
def test_unpack_is_the_inverse_for_any_shape(
    shape: tuple[int, int, int], interleave: bool, seed: int
) -> None:
    num_experts, n, groups = shape
    interleave = interleave and n % 16 == 0
    weights = cases.random_weights(num_experts, n, 32 * groups, kind="real", seed=seed)
    packed = weights.pack(interleave_gate_up=interleave)
    codes, scales = unpack(packed)
    assert torch.equal(codes, weights.codes)
    assert torch.equal(scales, weights.scales)
    from_codes = pack_experts(weights.codes, weights.scales, interleave_gate_up=interleave)
    assert torch.equal(packed.data, from_codes.data)


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("shape", [(2, 64, 64), (1, 80, 96), (2, 144, 160)])
def test_every_code_and_scale_is_where_the_layout_says(
    shape: tuple[int, int, int], interleave: bool
) -> None:
    weights = cases.random_weights(*shape, kind="real")
    num_experts, n, k = shape
    data = weights.pack(interleave_gate_up=interleave).data.flatten().numpy().tobytes()
    seen = bytearray(len(data))
    codes = weights.codes.tolist()
    # What stands for a scale in packed rows 0 to 7 and 8 to 15 of a row tile.
    stored_scales = [
        (weights.scales * factor).view(torch.int16).tolist()
        for factor in layout.STORED_SCALE_FACTORS
    ]
    for e in range(num_experts):
        for feature in range(n):
            row = layout.packed_row(feature, n, interleave)
            for column in range(k):
                unit = layout.unit_offset(e, row, column, n, k)
                word, bit = layout.code_position(row, column)
                byte = unit + word + bit // 8
                assert data[byte] >> bit % 8 & 15 == codes[e][feature][column]
                seen[byte] += 1
                if column % 32 == 0:
                    place = unit + layout.scale_position(row, column)
                    stored = int.from_bytes(data[place : place + 2], "little", signed=True)
                    assert stored == stored_scales[row // 8 % 2][e][feature][column // 32]
                    seen[place] += 2
                    seen[place + 1] += 2
    # Two codes a byte, every scale once; what no element claimed is padding: code 8, scale 0.
    assert set(seen) <= {0, 2}
    padding = {value for value, uses in zip(data, seen, strict=True) if not uses}
    assert padding <= {0x88, 0x00}
    assert data.count(0x88) >= sum(
        1 for at, uses in enumerate(seen) if not uses and at % layout.UNIT_BYTES < 2048
    )


def test_known_bytes_of_the_first_unit() -> None:
    """The picture in layout.py, spelled out for lane 5 (g=1, t=1) of row tile 2 at k16 step 3."""
    codes = torch.zeros(1, 64, 64, dtype=torch.uint8)
    row, column = 2 * 16 + 1, 3 * 16 + 2
    codes[0, row, column], codes[0, row + 8, column] = 1, 2
    codes[0, row, column + 8], codes[0, row + 8, column + 8] = 3, 4
    codes[0, row, column + 1], codes[0, row + 8, column + 1] = 5, 6
    codes[0, row, column + 9], codes[0, row + 8, column + 9] = 7, 8
    data = pack_experts(codes, ones(1, 64, 2)).data.view(torch.int32).flatten()
    assert data[(2 * 512 + 5 * 16 + 3 * 4) // 4].item() == 0x87654321 - (1 << 32)
    # 2^119 of row g and 2^115 of row g + 8, in both groups.
    assert data[2048 // 4 :].tolist() == [0x79007B00] * 64


def test_every_scale_comes_back_with_its_bits() -> None:
    bits = torch.arange(0x4380, dtype=torch.int32)  # 0, subnormal and normal numbers below 256
    bits = torch.cat((bits, bits + 0x8000)).to(torch.int16)
    scales = bits.view(torch.bfloat16).view(1, -1, 2)
    padding = -scales.shape[1] % 64
    scales = torch.nn.functional.pad(scales, (0, 0, 0, padding))
    for interleave in (False, True):
        codes = torch.full((1, scales.shape[1], 64), 8, dtype=torch.uint8)
        packed = pack_experts(codes, scales, interleave_gate_up=interleave)
        again = unpack(packed)[1]
        assert torch.equal(again.view(torch.int16), scales.view(torch.int16))


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any cut into experts and stripes gives the bytes of one expert packed alone."""
    for n, interleave in ((136, False), (208, True)):
        weights = cases.random_weights(5, n, 160, kind="real")
        whole = weights.pack(interleave_gate_up=interleave)
        for budget in (1, 64 * 160 // 2 * 2, 64 * 160 // 2 * 8):
            monkeypatch.setitem(pack._CHUNK_BYTES, "cpu", budget)
            packed = weights.pack(interleave_gate_up=interleave)
            assert torch.equal(packed.data, whole.data)
            assert torch.equal(unpack(packed)[0], weights.codes)
        for e in range(5):
            part = cases.Weights(weights.codes[e : e + 1], weights.scales[e : e + 1])
            alone = part.pack(interleave_gate_up=interleave)
            assert torch.equal(alone.data[0], whole.data[e])


@pytest.mark.parametrize("group_size", [64, 128, -1, 384])
def test_larger_groups_repeat_their_scales(group_size: int) -> None:
    k = 384
    weights = cases.random_weights(2, 24, k, kind="real")
    columns = 1 if group_size == -1 else k // group_size
    scales = weights.scales[..., :columns].contiguous()
    packed = pack_experts(weights.words, scales, group_size=group_size)
    expected = scales.repeat_interleave(k // 32 // columns, dim=-1)
    assert torch.equal(unpack(packed)[1], expected)
    assert packed.group_size == 32


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_wider_scales_are_rounded_and_that_is_said_once(dtype: torch.dtype) -> None:
    scales = (torch.rand(2, 16, 2) * 0.1).to(dtype)
    with pytest.warns(UserWarning, match=f"weight_scale is {dtype}.*rounds.*bfloat16") as record:
        packed = pack_experts(words(), scales)
    assert len(record) == 1
    assert torch.equal(unpack(packed)[1], scales.bfloat16())


def test_out_keeps_its_address_and_is_overwritten_entirely() -> None:
    first, second = (cases.random_weights(3, 72, 96, seed=seed) for seed in (1, 2))
    out = first.pack()
    address = out.data.data_ptr()
    out.data.fill_(0xFF)
    assert pack_experts(second.words, second.scales, out=out) is out
    assert out.data.data_ptr() == address
    assert torch.equal(out.data, second.pack().data)


def test_strided_inputs_pack_like_copies() -> None:
    weights = cases.random_weights(2, 32, 256, kind="real")
    packed_words = weights.words
    a = pack_experts(packed_words[:, 8:24, 8:24], weights.scales[:, 8:24, 2:6])
    b = pack_experts(
        packed_words[:, 8:24, 8:24].contiguous(), weights.scales[:, 8:24, 2:6].contiguous()
    )
    c = pack_experts(weights.codes[:, 8:24, 64:192], weights.scales[:, 8:24, 2:6])
    assert torch.equal(a.data, b.data)
    assert torch.equal(a.data, c.data)


# --- what is refused ----------------------------------------------------------------------------


def test_a_single_expert_is_not_taken_silently() -> None:
    with pytest.raises(InputError, match=r"\[16, 8\].*\[E, N, K/8\].*unsqueeze\(0\)"):
        pack_experts(words()[0], ones(2, 16, 2)[0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bfloat16])
def test_other_weight_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=f"weight is {dtype}.*int32.*uint8"):
        pack_experts(words().to(dtype), ones(2, 16, 2))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 12, 64), "N=12 is not a positive multiple of 8"),
        ((2, 0, 64), "N=0"),
        ((2, 16, 48), "K=48 is not a positive multiple of 32"),
        ((2, 16, 0), "K=0"),
        ((0, 16, 64), "0 experts"),
        ((1025, 8, 32), "1025 experts: a packed weight holds 1 to 1024"),
    ],
)
def test_shapes_outside_the_layout(shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        pack_experts(words(*shape), ones(shape[0], shape[1], max(1, shape[2] // 32)))


@pytest.mark.parametrize(
    ("columns", "group_size"), [(1, None), (4, None), (2, 64), (2, -1), (1, 32)]
)
def test_a_scale_of_other_columns_is_never_explained_by_another_group(
    columns: int, group_size: int | None
) -> None:
    with pytest.raises(InputError, match=r"weight_scale has shape.*K=64.*never guessed"):
        pack_experts(words(), ones(2, 16, columns), group_size=group_size)


@pytest.mark.parametrize("group_size", [0, 8, 16, 48, 256, -2])
def test_other_group_sizes(group_size: int) -> None:
    with pytest.raises(UnsupportedError, match=f"group_size={group_size} is not supported"):
        pack_experts(words(k=512), ones(2, 16, 16), group_size=group_size)


def test_half_a_group() -> None:
    with pytest.raises(UnsupportedError, match=r"K=96 is 1.5 groups of group_size=64"):
        pack_experts(words(k=96), ones(2, 16, 1), group_size=64)


def test_scales_that_the_kernels_cannot_multiply() -> None:
    out = pack_experts(words(), ones(2, 16, 2))
    before = out.data.clone()
    for value in (float("nan"), float("inf"), -float("inf"), 256.0, -300.0):
        scales = ones(2, 16, 2)
        scales[1, 7, 1] = value
        with pytest.raises(UnsupportedError, match=r"weight_scale\[1, 7, 1\].*below 256"):
            pack_experts(words(), scales, out=out)
    # 255.75 is fine as it stands, but bf16 rounds it to 256.
    scales = torch.full((2, 16, 2), 255.75)
    with pytest.raises(UnsupportedError, match=r"255\.75.*in bf16 256\.0"):
        pack_experts(words(), scales, out=out)
    assert torch.equal(out.data, before)
    pack_experts(words(), ones(2, 16, 2) * -255, out=out)


def test_codes_above_15() -> None:
    codes = torch.zeros(1, 8, 32, dtype=torch.uint8)
    codes[0, 3, 4] = 16
    with pytest.raises(InputError, match=r"code 16.*0 to 15"):
        pack_experts(codes, ones(1, 8, 1))


def test_other_formats() -> None:
    with pytest.raises(UnsupportedError, match="num_bits=8: only 4"):
        pack_experts(words(), ones(2, 16, 2), num_bits=8)
    with pytest.raises(UnsupportedError, match=r"weight_zero_point.*asymmetric"):
        pack_experts(words(), ones(2, 16, 2), weight_zero_point=torch.zeros(2, 2, 2))
    with pytest.raises(UnsupportedError, match=r"weight_scale is torch.float8_e4m3fn"):
        pack_experts(words(), ones(2, 16, 2).to(torch.float8_e4m3fn))


@pytest.mark.field_case(6)
def test_act_order() -> None:
    """Field case 6 (f): a flag that means plain order is taken, real act-order is refused."""
    plain = torch.arange(64) // 32
    expected = pack_experts(words(), ones(2, 16, 2)).data
    for flag in (None, False, "static", "weight"):
        packed = pack_experts(
            words(), ones(2, 16, 2), actorder=flag, weight_g_idx=plain.expand(2, 64)
        )
        assert torch.equal(packed.data, expected)
    for flag in (True, "group", "dynamic"):
        with pytest.raises(UnsupportedError, match=f"actorder={flag!r}"):
            pack_experts(words(), ones(2, 16, 2), actorder=flag)
    with pytest.raises(UnsupportedError, match=r"weight_g_idx.*act-order"):
        pack_experts(words(), ones(2, 16, 2), weight_g_idx=plain.flip(0))
    with pytest.raises(InputError, match=r"weight_g_idx has shape.*K=64"):
        pack_experts(words(), ones(2, 16, 2), weight_g_idx=plain[:32])


def test_interleaving_needs_whole_eights_of_gate_and_up() -> None:
    with pytest.raises(UnsupportedError, match="interleave_gate_up with N=24"):
        pack_experts(words(n=24), ones(2, 24, 2), interleave_gate_up=True)


def test_out_of_another_kind() -> None:
    out = pack_experts(words(), ones(2, 16, 2))
    with pytest.raises(InputError, match=r"out holds.*\(2, 16, 64, False\).*\(1, 16, 64, False\)"):
        pack_experts(words(1), ones(1, 16, 2), out=out)
    with pytest.raises(InputError, match="out holds"):
        pack_experts(words(), ones(2, 16, 2), out=out, interleave_gate_up=True)


def test_tensors_on_two_devices() -> None:
    with pytest.raises(InputError, match="out is on meta, weight on cpu"):
        out = pack_experts(words(), ones(2, 16, 2))
        pack_experts(words(), ones(2, 16, 2), out=replace(out, data=out.data.to("meta")))


@pytest.mark.parametrize("name", ["weight", "weight_scale", "weight_g_idx"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "is None, not a torch.Tensor"),
        ([1], r"is the list \[1\], not a torch.Tensor; pass torch.tensor"),
        (np.zeros((2, 16, 8), np.int32), r"is a numpy.ndarray of int32 \[2, 16, 8\].*from_numpy"),
        (words().to_sparse(), r"is a sparse_coo tensor \[2, 16, 8\]; it must be dense"),
        (words().to("meta"), r"\[2, 16, 8\] is on the meta device and has no values"),
    ],
)
def test_what_is_no_tensor_with_values_is_named(name: str, value: Any, said: str) -> None:
    if name == "weight_g_idx" and value is None:
        return
    out = pack_experts(words(), ones(2, 16, 2))
    before = out.data.clone()
    arguments = {"weight": words(), "weight_scale": ones(2, 16, 2), name: value}
    with pytest.raises(InputError, match=f"^{name} {said}"):
        pack_experts(**arguments, out=out)
    assert torch.equal(out.data, before)


@pytest.mark.parametrize(
    ("change", "words_of_error"),
    [
        ({"group_size": "32"}, "group_size is the str '32'; it must be a whole number"),
        ({"group_size": 32.0}, r"group_size is the float 32\.0"),
        ({"interleave_gate_up": "no"}, "interleave_gate_up is the str 'no'; it must be True or"),
        ({"num_bits": "4"}, "num_bits is the str '4'; it must be a whole number"),
        ({"actorder": ["group"]}, r"actorder=\['group'\]"),
        ({"actorder": torch.ones(2)}, "actorder=tensor"),
        ({"weight_zero_point": [8]}, r"weight_zero_point is the list \[8\]: .*asymmetric"),
        ({"weight_g_idx": torch.tensor(0)}, r"weight_g_idx has shape \[\]"),
        (
            {"out": torch.zeros(2)},
            r"out is a torch.Tensor of .* \[2\], not PackedExperts",
        ),
    ],
)
def test_arguments_of_another_kind_are_named(change: dict[str, Any], words_of_error: str) -> None:
    with pytest.raises((InputError, UnsupportedError), match=words_of_error):
        pack_experts(words(), ones(2, 16, 2), **change)


def test_unpack_takes_packed_experts_with_values() -> None:
    for value, said in ((words(), r"a torch.Tensor of torch.int32 \[2, 16, 8\]"), (None, "None")):
        with pytest.raises(InputError, match=f"experts is {said}, not PackedExperts"):
            unpack(value)
    packed = pack_experts(words(), ones(2, 16, 2))
    with pytest.raises(InputError, match=r"experts\.data .* meta device and has no values"):
        unpack(replace(packed, data=packed.data.to("meta")))
    for device, said in (("gpu", "no device of PyTorch"), ("meta", "holds no values")):
        with pytest.raises(InputError, match=f"^device.*{said}"):
            packed.to(device)
    with pytest.raises(InputError, match=r"device=cuda:99 is not here: PyTorch sees \d+ CUDA GPUs"):
        packed.to("cuda:99")
    with pytest.raises(InputError, match=r"start is the float 0\.0; it must be a whole number"):
        packed.expert_range(0.0, 1)


# --- the container ------------------------------------------------------------------------------


def test_container_checks_its_buffer() -> None:
    packed = pack_experts(words(3, 72, 96), ones(3, 72, 3))
    assert (packed.num_experts, packed.n, packed.k) == (3, 72, 96)
    assert packed.nbytes == 3 * 2 * 2 * 2304
    assert "E=3, n=72, k=96" in repr(packed)
    data = packed.data
    with pytest.raises(InputError, match=r"data is None, not a torch\.Tensor"):
        PackedExperts(None, 72, 96)
    with pytest.raises(InputError, match=r"n is the float 72\.0; it must be a whole number"):
        PackedExperts(data, 72.0, 96)
    with pytest.raises(InputError, match=r"data is torch.int8"):
        PackedExperts(data.view(torch.int8), 72, 96)
    with pytest.raises(InputError, match=r"need \[3, 2, 3, 2304\]"):
        PackedExperts(data, 72, 160)
    with pytest.raises(UnsupportedError, match="N=70"):
        PackedExperts(data, 70, 96)
    with pytest.raises(UnsupportedError, match="group_size=64"):
        PackedExperts(data, 72, 96, group_size=64)
    with pytest.raises(UnsupportedError, match="layout=1: this Chord reads layout 2; pack the"):
        PackedExperts(data, 72, 96, layout=1)
    with pytest.raises(UnsupportedError, match="n=72 with gate_up_interleaved"):
        PackedExperts(data, 72, 96, gate_up_interleaved=True)
    with pytest.raises(InputError, match="contiguous and 16-byte aligned"):
        PackedExperts(data.transpose(1, 2), 72, 96)
    shifted = torch.empty(data.numel() + 16, dtype=torch.uint8)[8:][: data.numel()]
    with pytest.raises(InputError, match="16-byte aligned"):
        PackedExperts(shifted.view(data.shape), 72, 96)
    with pytest.raises(AttributeError):
        packed.n = 64  # type: ignore[misc]


def test_container_takes_no_text_for_its_order_and_keeps_plain_numbers() -> None:
    """The metadata of a safetensors file is text, and "False" is true."""
    data = pack_experts(words(2, 64, 64), ones(2, 64, 2)).data
    for text in ("False", "True", 0, None):
        with pytest.raises(
            InputError, match=r"gate_up_interleaved is .*; it must be True or False"
        ):
            PackedExperts(data, 64, 64, gate_up_interleaved=text)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="group_size is the str '32'; it must be a whole number"):
        PackedExperts(data, 64, 64, group_size="32")  # type: ignore[arg-type]
    number = torch.tensor(64)
    packed = PackedExperts(data, number, number)  # type: ignore[arg-type]
    number += 64
    assert packed.facts == (2, 64, 64, False)


def test_expert_range_shares_memory() -> None:
    weights = cases.random_weights(4, 48, 96, kind="real")
    packed = weights.pack(interleave_gate_up=True)
    part = packed.expert_range(1, 3)
    assert part.data.data_ptr() == packed.data[1].data_ptr()
    assert torch.equal(unpack(part)[0], weights.codes[1:3])
    assert packed.to("cpu") is packed
    for start, stop in ((2, 2), (-1, 2), (0, 5)):
        with pytest.raises(InputError, match="expert range"):
            packed.expert_range(start, stop)


# --- field case 6: slices against groups --------------------------------------------------------


@pytest.mark.field_case(6)
def test_tensor_parallel_slices() -> None:
    """(a), (d): every rank's slice dequantises to the slice of the whole."""
    for intermediate, size in ((768, 2), (2048, 64)):
        weights = cases.random_weights(1, 64, intermediate, scale_powers=5)
        whole = weights.dequantize()
        part = intermediate // size
        for rank in (0, size - 1):
            packed = pack_experts(*slice_reduction(weights.words, weights.scales, rank, size))
            assert packed.k == part
            codes, scales = unpack(packed)
            mine = cases.Weights(codes, scales).dequantize()
            assert torch.equal(mine, whole[..., rank * part : (rank + 1) * part])


@pytest.mark.field_case(6)
def test_all_scale_columns_with_a_slice_are_refused() -> None:
    """(b): 24 columns for K=384 look like groups of 16; they are a loader's mistake."""
    weights = cases.random_weights(1, 64, 768)
    sliced, _ = slice_reduction(weights.words, weights.scales, 0, 2)
    with pytest.raises(InputError, match=r"\[1, 64, 24\].*K=384.*\[1, 64, 12\]"):
        pack_experts(sliced, weights.scales)


@pytest.mark.field_case(6)
@pytest.mark.parametrize(("k", "groups"), [(1408, "5.5"), (1856, "7.25")])
def test_slices_inside_a_group_are_refused(k: int, groups: str) -> None:
    """(c): the message names group size, K and TP."""
    weights = cases.random_weights(1, 8, k)
    with pytest.raises(
        UnsupportedError, match=rf"K={k} over TP=8 is .* {groups} groups of group_size=32"
    ):
        slice_reduction(weights.words, weights.scales, 3, 8)


@pytest.mark.field_case(6)
def test_gate_up_slice_keeps_k() -> None:
    """(e): rank-local I = 32 of w13 with hidden 4096 keeps K = 4096 and 128 groups."""
    weights = cases.random_weights(1, 256, 4096, scale_powers=5)
    packed = pack_experts(*slice_features(weights.words, weights.scales, 1, 8))
    assert (packed.n, packed.k) == (32, 4096)
    codes, scales = unpack(packed)
    assert torch.equal(codes, weights.codes[:, 32:64])
    assert torch.equal(scales, weights.scales[:, 32:64])
    with pytest.raises(UnsupportedError, match="N=256 does not divide into TP=3"):
        slice_features(weights.words, weights.scales, 1, 3)


def test_slicing_checks_the_scale_columns() -> None:
    weights = cases.random_weights(1, 8, 256)
    with pytest.raises(InputError, match="scale has 8 columns; K=256 with group_size=64 has 4"):
        slice_reduction(weights.words, weights.scales, 0, 2, group_size=64)
    channel = weights.scales[..., :1]
    sliced, scale = slice_reduction(weights.words, channel, 1, 2, group_size=-1)
    assert torch.equal(
        unpack(pack_experts(sliced, scale, group_size=-1))[0][0, 0, :128], weights.codes[0, 0, 128:]
    )


# --- field case 10: memory ----------------------------------------------------------------------

MEMORY_SCRIPT = """
import resource, torch
from chord.weights import pack_experts
scale = torch.full((128, 1024, 64), 0.5, dtype=torch.bfloat16)
for shape, dtype in (((32, 1024, 2048), torch.uint8), ((128, 1024, 256), torch.int32)):
    weight = torch.full(shape, 7, dtype=dtype)
    with open("/proc/self/statm") as statm:
        before = int(statm.read().split()[1]) * resource.getpagesize()
    packed = pack_experts(weight, scale[: shape[0]])
    with open("/proc/self/status") as status:  # ru_maxrss would include the parent's at the fork
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    print(peak - before, packed.nbytes)
    del weight, packed
"""


@pytest.mark.field_case(10)
def test_host_memory_stays_at_input_plus_output() -> None:
    """32 MiB, then 128 MiB of codes: unpacking the latter to int32 would take 1 GiB."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(pack.__file__).parents[2]), "PATH": "/usr/bin"},
    )
    for line in result.stdout.splitlines():
        grown, output = map(int, line.split())
        assert grown <= output + (64 << 20)
