"""The end of a rank's script, or an error that ends it outside of a run: the others may wait for it in an export behind the run, and are told.

Their own error is gloo's. What this package's functions raise names the rank; behind one of torch's (`full_tensor`, a call of the model) a
line does.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys

import torch.distributed as dist

from lightning_sp import comm


def tell_end_at_exit() -> None:
    """Tell the ranks of the end of this process' script, and of an error that ends it, when that comes."""
    atexit.unregister(_tell)
    atexit.register(_tell)


def _tell() -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        comm.tell_end_of_script()
    elif not comm.is_of_other_ranks(error):
        comm.tell_error_of_script(error)
    elif told := comm.why_scripts_ended():
        sys.stderr.write(
            f"sequence_parallel: rank {dist.get_rank()} of {dist.get_world_size()} on host {socket.gethostname()} (process {os.getpid()}) has "
            f"lost another rank: {told}\n"
        )
