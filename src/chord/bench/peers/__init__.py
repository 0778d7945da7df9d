"""Other packages that `chord bench` can measure beside Chord, on the same tensors.

A peer is imported only when it is asked for. Each takes the checkpoint tensors, packs them with its
own public functions, and uses its own tile choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from chord.bench.operands import Checkpoint
from chord.errors import InputError

PEERS = ("humming",)


class Peer(Protocol):
    """One peer's kernel over one packed weight."""

    name: str
    version: str

    def prepare_call(
        self, x: torch.Tensor, topk_ids: torch.Tensor, top_k: int, out: torch.Tensor
    ) -> Callable[[], object]:
        """Prepare one expert GEMM over one routing.

        Args:
            x: bfloat16, [R / top_k, K].
            topk_ids: int32, [T, k], R expert ids in route order.
            top_k: Routes that read one row of x.
            out: bfloat16, [R, N], overwritten by the call.

        Returns:
            A function without arguments that runs the kernel once.
        """


def load_peer(name: str, checkpoint: Checkpoint) -> Peer:
    """Pack a checkpoint for a peer.

    Args:
        name: One of `PEERS`.
        checkpoint: The weight in checkpoint form, on the card.

    Returns:
        The peer, ready to prepare calls.

    Raises:
        InputError: There is no such peer.
        UnsupportedError: Its package is not installed.
    """
    if name == "humming":
        from chord.bench.peers.humming import Humming

        return Humming(checkpoint)
    raise InputError(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
