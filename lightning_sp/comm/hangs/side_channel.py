"""The store that the ranks met in, through a connection and a thread of its own.

The main thread uses the store too, and one connection serves one thread. Where the store's host is out of reach or stopped, an answer is
waited for without any limit: whoever asks here waits for a limited time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as _c10d

T = TypeVar("T")

_PREFIX = "lightning_sp/hangs"
_numbers = itertools.count()
# Of a request for a key that is not there.
_STORE_LIMIT_S = 5.0
# After an error: torch writes each one to the log.
_RETRY_S = 30.0


def has_groups_of_others(port: int | None) -> bool:
    """Return whether some process group was made through another store than that of a port: its ranks may be processes outside of this world."""
    return any(_port(store) != port for _, store in list(_c10d._world.pg_map.values()))  # type: ignore[attr-defined,unused-ignore]


def _port(store: Any) -> int | None:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port: int | None = getattr(store, "port", None)
    return port


class SideChannel:
    """Requests to the store, one after the other. A class because it holds a connection for as long as the world lives.

    Each channel of a process has keys of its own: a world that is made after another may meet in the same store, where the words of the other
    still are. All ranks have been in as many worlds.

    Args:
        store: that of the world if it is None, which is looked up when it is asked.
    """

    def __init__(self, store: Any = None) -> None:
        self._store = store
        self._prefix = f"{_PREFIX}/{next(_numbers)}"
        self._requests: SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._silent_since: float | None = None
        self._failed_at: float | None = None
        self.port: int | None = None

    @property
    def silent_s(self) -> float:
        """Return for how long the store has not answered, 0 where it has answered last."""
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    @property
    def is_here(self) -> bool:
        """Return whether the calling thread is the channel's own, which cannot wait for itself."""
        return current_thread() is self._thread

    def post(self, request: Callable[[Store], T]) -> Future[T]:
        """Begin a request and do not wait for it."""
        if self._thread is None:
            self._thread = Thread(target=self._serve, name="lightning_sp side channel", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._requests.put((request, future))
        return future

    def ask(self, request: Callable[[Store], T], within_s: float = 3.0) -> T | None:
        """Return what a request brings; None where the store does not answer in time, or has ended."""
        began = time.monotonic()
        if self._failed_at is not None and began - self._failed_at < _RETRY_S:
            return None
        future = self.post(request)
        wait([future], within_s)
        if not future.done() or future.exception() is not None:
            future.cancel()  # what has not begun is not to be done later
            self._silent_since = self._silent_since or began
            return None
        self._silent_since = self._failed_at = None
        return future.result()

    def close(self) -> None:
        """End the thread when it has done what was asked, which ends the connection; the next request begins another."""
        if self._thread is not None:
            self._requests.put(None)
            if not self.is_here:
                # Where the store is silent, as where its process is stopped, a request ends at its limit, and nobody hears it.
                self._thread.join(0.0 if self.silent_s else _STORE_LIMIT_S)
            self._thread = None

    def _serve(self) -> None:
        store: Store | None = None
        while (next_request := self._requests.get()) is not None:
            request, future = next_request
            if not future.set_running_or_notify_cancel():
                continue
            try:
                store = store or self._connect()
                future.set_result(request(store))
            except Exception as error:
                # An answer that came late would be taken for that of the next request.
                store, self._failed_at = None, time.monotonic()
                future.set_exception(error)

    def _connect(self) -> Store:
        # No reference to the default store is kept: the world's end is that store's.
        shared: Any = self._store or _c10d._get_default_store()
        own: Store = shared.clone()
        own.set_timeout(timedelta(seconds=_STORE_LIMIT_S))
        self.port = _port(shared)
        return PrefixStore(self._prefix, own)
