"""Other packages that `chord bench` can measure beside Chord, on the same tensors.

A peer is imported only when it is asked for. Each takes the checkpoint tensors, packs them with its
own public functions, and uses its own tile choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from chord.bench.operands import Checkpoint
from chord.bench.scenarios import Case
from chord.bench.work import Work
from chord.errors import InputError

PEERS = ("humming", "torch")


class Peer(Protocol):
    """One implementation over one packed weight.

    Attributes:
        name: How the command line and the records call it.
        version: Of its package.
        choice: What it chose to run for the work that was prepared last.
    """

    name: str
    version: str
    choice: str

    def handles(self, case: Case) -> bool:
        """Return whether it can run a case at all; cases that it cannot are left out."""

    def prepare_call(self, work: Work) -> Callable[[], object]:
        """Return a function without arguments that fills work.out once."""


def check_peer(name: str) -> None:
    """Refuse a name that is none of `PEERS`."""
    if name not in PEERS:
        raise InputError(f"there is no peer {name!r}; there are {', '.join(PEERS)}")


def load_peer(name: str, checkpoint: Checkpoint, todo: Sequence[Case]) -> Peer:
    """Pack a checkpoint for a peer.

    Args:
        name: One of `PEERS`.
        checkpoint: The weight in checkpoint form, on the card.
        todo: The cases that it will be asked for, so that it can compile their kernels at once.

    Returns:
        The peer, ready to prepare calls.

    Raises:
        InputError: There is no such peer.
        UnsupportedError: Its package is not installed.
    """
    check_peer(name)
    if name == "humming":
        from chord.bench.peers.humming import Humming

        return Humming(checkpoint, todo)
    from chord.bench.peers.unquantised import Unquantised

    return Unquantised(checkpoint)
