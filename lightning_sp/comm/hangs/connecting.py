"""Ranks that have met in a store, and connect to one another: the first that fails tells the others, which would wait to be reached.

Each connects in native code, for as long as a start may take. Of two ranks one reaches for the other, and fails at once where the address that
it was given leads nowhere: that of a network interface by which hosts do not reach each other, say.
"""

from __future__ import annotations

from typing import Any

from lightning_sp.comm.hangs.side_channel import SideChannel

_KEY = "not_connected"


class Connecting:
    """What ranks that connect tell each other. A class because it holds a connection to the store meanwhile. Every rank must make one.

    Args:
        store: that all have met in.
    """

    def __init__(self, store: Any) -> None:
        self._channel = SideChannel(store)

    @property
    def silent_s(self) -> float:
        """Return for how long the store has not answered, 0 where it has answered last."""
        return self._channel.silent_s

    def tell(self, why: str) -> None:
        """Tell the others why this rank has not connected; the first word stays."""
        self._channel.ask(lambda store: store.compare_set(_KEY, "", why))

    def told(self) -> str:
        """Return what a rank has told; empty for nothing."""
        return self._channel.ask(lambda store: store.get(_KEY).decode() if store.check([_KEY]) else "") or ""

    def close(self) -> None:
        """End the connection: all have connected, or this rank gives up."""
        self._channel.close()
