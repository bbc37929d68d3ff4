"""What a user runs: two ranks, of which one does something else than the other in its second step.

python -m tests.faults_run.script sleeps
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, default_collate

from lightning_sp import SequenceParallelStrategy
from tests.trainer.tiny import Plain, TokenDataset, tiny_llama

FAULT = sys.argv[1] if __name__ == "__main__" else ""
OPTIONS = {"timeout_s": 15.0, "preflight": False}
AT_BATCH = 1
# Started by torchrun, which starts all ranks again when one has died: they go on from their last checkpoint.
RESTARTED = "SIGKILL, under torchrun --max-restarts=1"
SKIPS = "on_train_batch_start skips a batch on one rank"
DROPS = "another nn.Dropout on one rank"
ORDERS = "parameters in another order on one rank"
TIMES = "max_time on one rank"
IN_SETUP, IN_TEARDOWN = "sleeps in setup", "sleeps in teardown"
BEHIND, BETWEEN = "sleeps behind the fit", "sleeps between two runs"
ALONE, ALONE_0 = "a second run of one rank alone", "a second run of rank 0 alone"
EXPORTS, LEAVES = "an error behind the fit, others in an export", "sys.exit(0) before the fit"
WORKER = "an error in a loader's worker"
LOCAL, LOCK = "an error that cannot be pickled in a loader's worker", "a batch with a lock in a loader's worker"
SLOW = "slow in every step"
IN_LOADER, IN_WORKER = ("an error in the loader", WORKER, LOCAL, LOCK), (WORKER, LOCAL, LOCK)


def is_due(batch_idx: int, rank: int = 1) -> bool:
    """Return whether this rank and batch have the fault, and say so once."""
    due = batch_idx == AT_BATCH and int(os.environ.get("LOCAL_RANK", "0")) == rank
    due = due and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if due:
        print(f"fault at {time.time():.2f}", file=sys.stderr, flush=True)
    return due


def is_due_at_start(*faults: str) -> bool:
    """Return whether this rank is given another model or Trainer, and say so."""
    due = FAULT in faults and os.environ.get("LOCAL_RANK") == "1"
    if due:
        print(f"fault at {time.time():.2f}", file=sys.stderr, flush=True)
    return due


def sleep_if_due(*faults: str) -> None:
    if is_due_at_start(*faults):
        time.sleep(600)


def is_due_of_rank_0() -> bool:
    due = os.environ.get("LOCAL_RANK", "0") == "0"
    if due:
        print(f"fault at {time.time():.2f}", file=sys.stderr, flush=True)
    return due


class User(Plain):
    def __init__(self) -> None:
        super().__init__(tiny_llama)

    def configure_model(self) -> None:
        super().configure_model()
        self.model.dropout = torch.nn.Dropout(0.1)
        if is_due_at_start(DROPS, ORDERS):
            self.model.dropout.p = 0.5 if FAULT == DROPS else 0.1
            if FAULT == ORDERS:
                self.model._modules["embedding"] = self.model._modules.pop("embedding")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fault = FAULTS.get(FAULT)
        loss = super().training_step(batch, batch_idx)
        if fault is not None and is_due(batch_idx, 0 if FAULT.endswith(" of rank 0") else 1):
            loss = fault(self, loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if FAULT in AFTER_A_BATCH and is_due(batch_idx, 0 if FAULT.endswith(" of rank 0") else 1):
            AFTER_A_BATCH[FAULT](self)
        if FAULT == SLOW and (is_due(batch_idx) or os.environ.get("LOCAL_RANK") == "1"):
            time.sleep(0.6)

    def setup(self, stage: str) -> None:
        sleep_if_due(IN_SETUP)

    def teardown(self, stage: str) -> None:
        sleep_if_due(IN_TEARDOWN)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if FAULT == SKIPS and is_due(batch_idx) else None


class SlowToEnd(pl.Callback):
    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if FAULT == "an error, and a callback that takes long to end" and os.environ.get("LOCAL_RANK") == "1":
            time.sleep(60)


class Samples(TokenDataset):
    def __getitem__(self, index: int) -> Any:
        if FAULT in IN_LOADER and index >= 4 and os.environ.get("LOCAL_RANK") == "1":
            print(f"fault at {time.time():.2f}", file=sys.stderr, flush=True)
            if FAULT == LOCK:
                return {**super().__getitem__(index), "lock": threading.Lock()}
            raise own_error()("cannot read sample") if FAULT == LOCAL else OSError("cannot read sample")
        return super().__getitem__(index)


def own_error() -> type[Exception]:
    class OwnError(OSError):
        pass

    return OwnError


def collated(rows: list[Any]) -> Any:
    """Return a batch as torch makes one, and what it does not know as it is."""
    locks = [row.pop("lock") for row in rows if "lock" in row]
    return default_collate(rows) | ({"lock": locks} if locks else {})


def stop(module: Any, loss: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)
    return loss


def interrupt(module: Any, loss: Any) -> Any:
    # A shell has what it starts in the background not hear of it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    return loss


def kill(module: Any, loss: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    return loss


def leave_at_once(module: Any, loss: Any) -> Any:
    os._exit(0)


def leave(module: Any, loss: Any) -> Any:
    sys.exit(0)


def fail(module: Any, loss: Any) -> Any:
    raise ValueError("my own error")


class TextlessError(Exception):
    def __str__(self) -> str:
        raise LookupError("no text")


def fail_without_text(module: Any, loss: Any) -> Any:
    raise TextlessError


def sleep(module: Any, loss: Any) -> Any:
    time.sleep(600)
    return loss


def be_late(module: Any, loss: Any) -> Any:
    time.sleep(11)  # longer than hang_s, and not as long as timeout_s
    return loss


def spin(module: Any, loss: Any) -> Any:
    while True:
        pass


def barrier(module: Any, loss: Any) -> Any:
    dist.barrier()
    return loss


def reduce_log(module: Any, loss: Any) -> Any:
    module.log("only_here", loss.detach(), sync_dist=True)
    return loss


def gather(module: Any, loss: Any) -> Any:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, "a")
    return loss


def reduce_own(module: Any, loss: Any) -> Any:
    dist.all_reduce(torch.ones(1000))
    return loss


def no_loss(module: Any, loss: Any) -> Any:
    return None


def raise_in_backward(module: Any, loss: Any) -> Any:
    def fail_in_backward(grad: Any) -> Any:
        raise ArithmeticError("in my backward hook")

    loss.register_hook(fail_in_backward)
    return loss


FAULTS: dict[str, Any] = {
    "SIGSTOP": stop,
    "SIGSTOP of rank 0": stop,
    "SIGKILL": kill,
    RESTARTED: kill,
    "os._exit(0)": leave_at_once,
    "sys.exit(0)": leave,
    "KeyboardInterrupt": interrupt,
    "an error in training_step": fail,
    "an error in training_step of rank 0": fail,
    "an error without a text": fail_without_text,
    "an error, and a callback that takes long to end": fail,
    "an error in the backward": raise_in_backward,
    "sleeps": sleep,
    "sleeps of rank 0": sleep,
    "late for a while": be_late,
    "an endless loop": spin,
    "a barrier on one rank": barrier,
    "an all_gather_object on one rank": gather,
    "an all_reduce of another size on one rank": reduce_own,
    "training_step returns None on one rank": no_loss,
    "self.log(sync_dist=True) on one rank": reduce_log,
}


def should_stop(module: Any) -> None:
    module.trainer.should_stop = True


def save(module: Any) -> None:
    module.trainer.save_checkpoint(os.environ["FAULTS_FOLDER"] + "/one_rank.ckpt")


def fail_in_hook(module: Any) -> None:
    raise KeyError("my callback's error")


def weights(module: Any) -> None:
    module.trainer.strategy.whole_state_dict()


def destroy(module: Any) -> None:
    dist.destroy_process_group()


def evaluate(module: Any) -> None:
    module.eval()


def accumulate(module: Any) -> None:
    module.trainer.accumulate_grad_batches = 2


def freeze(module: Any) -> None:
    module.model.head.weight.requires_grad_(False)


def replace(module: Any) -> None:
    module.model.head.weight = torch.nn.Parameter(torch.zeros(61, 32))


def zero_grad(module: Any) -> None:
    module.optimizers().zero_grad()


def write(module: Any) -> None:
    module.model.head.weight.data.mul_(0.5)


def forget(module: Any) -> None:
    module.optimizers().state.clear()


AFTER_A_BATCH: dict[str, Any] = {
    "trainer.should_stop on one rank": should_stop,
    "save_checkpoint on one rank": save,
    "save_checkpoint of rank 0": save,
    "an error in on_train_batch_end": fail_in_hook,
    "whole_state_dict on one rank": weights,
    "destroy_process_group on one rank": destroy,
    "eval() on one rank": evaluate,
    "another accumulate_grad_batches on one rank": accumulate,
    "a weight frozen on one rank": freeze,
    "a weight replaced on one rank": replace,
    "zero_grad() on one rank": zero_grad,
    "weight.data.mul_() on one rank": write,
    "optimizer.state.clear() on one rank": forget,
}
AT_START = [DROPS, ORDERS, TIMES]
BEFORE_AND_BEHIND = [LEAVES, IN_SETUP, IN_TEARDOWN, BEHIND, BETWEEN, ALONE, ALONE_0, EXPORTS]
NAMES = [
    *(each for each in FAULTS if each != "late for a while"),
    *AFTER_A_BATCH,
    *IN_LOADER,
    SLOW,
    SKIPS,
    *AT_START,
    *BEFORE_AND_BEHIND,
]


def main() -> None:
    torch.manual_seed(0)
    if is_due_at_start(LEAVES):
        sys.exit(0)
    goes_on = FAULT == RESTARTED
    saves = [ModelCheckpoint(os.environ["FAULTS_FOLDER"], every_n_train_steps=1, save_last=True)] if goes_on else []
    # Windows of 10 s, of which a run is to have six: other work on a host makes steps longer, and the wait a smaller part of them.
    timing = {"hang_s": 2.0} if FAULT == SLOW else {}
    options = {
        **OPTIONS,
        **timing,
        "asynchronous_checkpoints": not goes_on and "auto",
    }  # that of the first step is complete then
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(**options), accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=goes_on,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[SlowToEnd(), *saves],
        max_time="00:01:00:00" if is_due_at_start(TIMES) else None,
    )  # fmt: skip
    collate = collated if FAULT == LOCK else None
    module = User()
    loader = DataLoader(
        Samples(200 if FAULT == SLOW else 12), batch_size=2, num_workers=int(FAULT in IN_WORKER), collate_fn=collate
    )
    trainer.fit(module, loader, ckpt_path="last" if goes_on else None)
    sleep_if_due(BEHIND, BETWEEN)
    if is_due_at_start(EXPORTS):
        raise ValueError("behind the fit")
    if FAULT == EXPORTS:
        trainer.strategy.whole_state_dict()  # type: ignore[attr-defined]
    if FAULT == BETWEEN or is_due_at_start(ALONE) or (FAULT == ALONE_0 and is_due_of_rank_0()):
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(module, loader)


if __name__ == "__main__":
    main()
