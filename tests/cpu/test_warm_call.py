"""What a repeated chord.indexed does on a GPU: little Python, and every check of a first call.

Tensors that say they are on CUDA, and a driver that notes launches, stand in for the card.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import chord
from chord import device as devices
from chord.errors import CaptureError, InputError
from chord.jit import cache, driver, launch
from chord.ops import grouped_gemm

E, N, K, M, TOP_K, BLOCK_M = 4, 64, 128, 6, 2, 16
BF16 = torch.bfloat16
MOST_CALLS = 5  # indexed, run, launcher, scratch_values, launch
PACKAGE = str(Path(chord.__file__).parent)


class OnCard(torch.Tensor):
    """A CPU tensor that says it is on CUDA."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    number = 0
    is_cuda = True

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.number)

    def get_device(self) -> int:
        return self.number


class OnOtherCard(OnCard):
    number = 1


def on_card(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnCard)


class NotingDriver:
    """A driver that launches nothing and notes the parameters."""

    def __init__(self) -> None:
        self.parameters: list[tuple[int, ...]] = []
        self.streams: list[int | None] = []

    def cuLaunchKernelEx(self, config, function, arguments, extra) -> int:
        data = (ctypes.c_char * 96).from_address(arguments[0])
        self.parameters.append(struct.unpack("@5P4i3P4i", bytes(data)))
        self.streams.append(config._obj.stream)
        return 0

    def cuCtxGetCurrent(self, context) -> int:
        context._obj.value = 1
        return 0


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> NotingDriver:
    """Replace the card, with nothing loaded and no call known."""
    noting = NotingDriver()
    facts = SimpleNamespace(**vars(devices.known("h200")))
    monkeypatch.setattr(devices, "facts_of", lambda index: facts)
    monkeypatch.setattr(driver, "library", lambda: noting)
    monkeypatch.setattr(driver, "load_function", lambda *_: 77)
    monkeypatch.setattr(cache, "cubin_for", lambda *_: SimpleNamespace(code=b""))
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "current_stream", lambda index: 5)
    monkeypatch.setattr(launch, "is_capturing", lambda: False)
    values = ((1000, 2000, 3000),) * 8
    room = launch.Scratch(torch.empty(0), torch.empty(0), None, values, 1 << 20, 8)
    monkeypatch.setattr(launch, "_allocate", lambda *_: room)
    for owner, name in (
        (launch, "_loaded"),
        (launch, "_scratch"),
        (launch._thread, "launchers"),
        (grouped_gemm, "_calls"),
    ):
        monkeypatch.setattr(owner, name, {})
    return noting


@pytest.fixture
def call(card: NotingDriver) -> dict[str, Any]:
    """Arguments of a call that has been made once."""
    codes = torch.randint(0, 16, (E, N, K), dtype=torch.uint8)
    packed = chord.pack_experts(codes, torch.ones(E, N, K // 32, dtype=BF16))
    where = chord.routing.align(torch.randint(0, E, (M, TOP_K)), num_experts=E, block_m=BLOCK_M)
    arguments = {
        "x": on_card(torch.randn(M, K).to(BF16)),
        "experts": replace(packed, data=on_card(packed.data)),
        "sorted_token_ids": on_card(where.sorted_token_ids),
        "expert_ids": on_card(where.expert_ids),
        "num_tokens_post_padded": on_card(where.num_tokens_post_padded),
        "top_k": TOP_K,
        "block_m": BLOCK_M,
        "out": on_card(torch.zeros(M * TOP_K, N, dtype=BF16)),
        "validate": False,
    }
    chord.indexed(**arguments)
    assert len(card.parameters) == 1
    return arguments


def test_a_warm_call_makes_few_python_calls(call: dict[str, Any], card: NotingDriver) -> None:
    made: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            made.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        chord.indexed(**call)
    finally:
        sys.setprofile(None)
    assert 1 <= len(made) <= MOST_CALLS, made
    assert len(card.parameters) == 2


def test_a_warm_call_follows_the_addresses(call: dict[str, Any], card: NotingDriver) -> None:
    tensors = ("x", "sorted_token_ids", "expert_ids", "num_tokens_post_padded", "out")
    moved = call | {name: on_card(call[name].clone()) for name in tensors}
    moved["experts"] = replace(call["experts"], data=on_card(call["experts"].data.clone()))
    chord.indexed(**moved)
    assert len(grouped_gemm._calls) == 1
    for given, parameters in zip((call, moved), card.parameters, strict=True):
        x, ids, blocks, used, out = (given[name].data_ptr() for name in tensors)
        assert parameters == (
            *(x, given["experts"].data.data_ptr(), out, 1000, 2000, 3000),
            *(E, N, K),
            *(ids, blocks, used),
            *(M * TOP_K, TOP_K, BLOCK_M, given["expert_ids"].numel()),
        )
    assert card.streams == [5, 5]


BIG = torch.zeros(4096, dtype=BF16)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("x", lambda t: on_card(t.half()), "it must be bf16"),
        ("x", lambda t: on_card(BIG[1 : M * K + 1].view(M, K)), "x begins at address"),
        ("x", lambda t: on_card(t.T.contiguous().T), "has strides"),
        ("x", lambda t: on_card(t[:, :64].contiguous()), "have K=128"),
        ("x", lambda t: t.as_subclass(OnOtherCard), "experts are on cuda:0, x is on cuda:1"),
        ("out", lambda t: on_card(t.float()), "out is torch.float32"),
        ("out", lambda t: on_card(BIG[1 : M * TOP_K * N + 1].view(-1, N)), "out begins at"),
        ("out", lambda t: on_card(t.T.contiguous().T), "has strides"),
        ("out", lambda t: on_card(t[1:]), r"must be bf16 \[12, 64\]"),
        ("out", lambda t: t.as_subclass(OnOtherCard), "out is on cuda:1"),
        ("out", lambda t: torch.zeros(M * TOP_K, N, dtype=BF16), "out is on cpu"),
        ("sorted_token_ids", lambda t: on_card(t.long()), "it must be int32"),
        ("sorted_token_ids", lambda t: on_card(t.repeat_interleave(2)[::2]), "contiguous"),
        ("sorted_token_ids", lambda t: on_card(t[None]), "of one dimension"),
        ("sorted_token_ids", lambda t: t.as_subclass(OnOtherCard), "token_ids is on cuda:1"),
        ("expert_ids", lambda t: t.as_subclass(OnOtherCard), "expert_ids is on cuda:1"),
        ("expert_ids", lambda t: on_card(t.long()), "it must be int32"),
        ("expert_ids", lambda t: on_card(t.repeat_interleave(2)[::2]), "contiguous"),
        ("expert_ids", lambda t: on_card(t[None]), "of one dimension"),
        ("num_tokens_post_padded", lambda t: on_card(t.repeat(2)), "has 2 elements"),
        ("num_tokens_post_padded", lambda t: t.as_subclass(torch.Tensor), "is on cpu"),
        ("num_tokens_post_padded", lambda t: on_card(t.long()), "it must be int32"),
        (
            "experts",
            lambda e: replace(e, data=e.data.as_subclass(OnOtherCard)),
            "experts are on cuda:1, x is on cuda:0",
        ),
        ("x", lambda t: on_card(t.clone().requires_grad_()), "requires grad"),
        ("x", lambda t: None, "x is None, not a torch.Tensor"),
        ("out", lambda t: on_card(t.clone().requires_grad_()), r"out \[12, 64\] requires grad"),
        ("out", lambda t: [0.0], r"out is the list \[0\.0\], not a torch.Tensor"),
        ("validate", lambda flag: torch.ones(2), "validate is a torch.Tensor .* True or False"),
        ("top_k", lambda n: 0, "top_k=0"),
        ("top_k", lambda n: 3, r"must be bf16 \[18, 64\]"),
        ("block_m", lambda n: 2048, "block_m=2048"),
    ],
)
def test_a_warm_call_still_refuses(
    call: dict[str, Any], card: NotingDriver, name: str, change: Any, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        chord.indexed(**(call | {name: change(call[name])}))
    assert len(card.parameters) == 1 and len(grouped_gemm._calls) == 1
    chord.indexed(**call)


@pytest.mark.parametrize("offset", [0, 16, M * K - 8])
def test_a_warm_call_sees_an_overlap(call: dict[str, Any], card: NotingDriver, offset: int) -> None:
    buffer = torch.zeros(M * K + M * TOP_K * N, dtype=BF16)
    x, rest = buffer[: M * K].view(M, K), buffer[offset:][: M * TOP_K * N].view(-1, N)
    with pytest.raises(InputError, match="overlaps x"):
        chord.indexed(**(call | {"x": on_card(x), "out": on_card(rest)}))
    beside = buffer[M * K :].view(-1, N)
    chord.indexed(**(call | {"x": on_card(x), "out": on_card(beside)}))
    assert len(card.parameters) == 2


@pytest.mark.parametrize(
    "name", ["experts", "sorted_token_ids", "expert_ids", "num_tokens_post_padded"]
)
def test_a_warm_call_sees_an_out_over_what_is_read(
    call: dict[str, Any], card: NotingDriver, name: str
) -> None:
    read = call[name].data if name == "experts" else call[name]
    read = read.as_subclass(torch.Tensor)
    out_bytes = call["out"].nbytes
    buffer = torch.zeros(2 * out_bytes + read.nbytes, dtype=torch.uint8)
    inside = buffer[out_bytes - 16 :][: read.nbytes].view(read.dtype).view(read.shape).copy_(read)
    moved = replace(call[name], data=on_card(inside)) if name == "experts" else on_card(inside)
    out = on_card(buffer[:out_bytes].view(BF16).view(-1, N))
    with pytest.raises(InputError, match=rf"overlaps {name} .* in memory, which is read while"):
        chord.indexed(**(call | {name: moved, "out": out}))
    chord.indexed(**(call | {name: moved}))
    assert len(card.parameters) == 2


def test_experts_in_another_order_are_another_call(call: dict[str, Any]) -> None:
    other = replace(call["experts"], gate_up_interleaved=True)
    with pytest.raises(chord.UnsupportedError, match="interleave_gate_up=True"):
        chord.indexed(**(call | {"experts": other}))


def test_a_number_that_can_change_in_place_is_not_remembered(call: dict[str, Any]) -> None:
    chord.indexed(**(call | {"top_k": torch.tensor(TOP_K)}))
    assert len(grouped_gemm._calls) == 1


def test_remembered_calls_do_not_pile_up(
    call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_gemm, "_MAX_REMEMBERED", 4)
    for rows in range(1, 20):
        out = on_card(torch.zeros(rows * TOP_K, N, dtype=BF16))
        chord.indexed(**(call | {"x": on_card(torch.zeros(rows, K, dtype=BF16)), "out": out}))
        assert len(grouped_gemm._calls) <= 4


def test_a_known_call_whose_kernel_is_gone_asks_to_warm_up(
    call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch._loaded.clear()
    launch._thread.launchers.clear()
    monkeypatch.setattr(launch, "is_capturing", lambda: True)
    with pytest.raises(CaptureError, match="warm up first"):
        chord.indexed(**call)


def test_a_check_that_would_wait_inside_capture_says_so(
    call: dict[str, Any], card: NotingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match=r"sorted_token_ids \[\d+\] .* pass validate=False"):
        chord.indexed(**(call | {"validate": True}))
    with pytest.raises(CaptureError, match=r"topk_ids \[6, 2\] .* pass validate=False"):
        ids = on_card(torch.zeros(M, TOP_K, dtype=torch.int32))
        chord.routing.align(ids, num_experts=E, block_m=BLOCK_M, validate=True)
    assert len(card.parameters) == 1
    chord.indexed(**call)
