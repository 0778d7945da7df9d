"""What launches share, between launches."""

from __future__ import annotations

from chord.jit import launch
from chord.plan.config import NO_SUM


def assert_clean() -> None:
    """Check that no counter and no partial sum is left; the device has to be idle."""
    for scratch in launch._scratch.values():
        assert not scratch.counters.any()
        assert scratch.partial.eq(NO_SUM).all()
