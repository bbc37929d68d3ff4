"""The DataModule under a real Trainer (one process): what each step sees, and that a resume neither skips nor repeats.

Every document is one window whose first id is the document's number, so that ids tell which samples were read.
"""

import re

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_sp.data import SequenceShardingDataModule
from lightning_sp.errors import SequenceParallelError
from lightning_sp.text import TokenFileWriter
from lightning_sp.text.prepare import prepare

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
]
NUM_TRAIN, GLOBAL_BATCH, NUM_EPOCHS = 24, 4, 3
NUM_STEPS = NUM_EPOCHS * NUM_TRAIN // GLOBAL_BATCH


class Recorder(LightningModule):
    """Note the samples of every training batch and the loggers' step after it."""

    def __init__(self, *, estimates_steps: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.estimates_steps = estimates_steps
        self.seen: list[int] = []
        self.evaluated: list[int] = []
        self.logged_steps: list[int] = []

    def training_step(self, batch, batch_idx):
        self.seen += batch["input_ids"][:, 0].tolist()
        return self.weight * batch["input_ids"].float().mean()

    def on_train_batch_end(self, *_):
        self.logged_steps.append(self.trainer.fit_loop.epoch_loop._batches_that_stepped)

    def validation_step(self, batch, batch_idx):
        real = (batch["shift_labels"] != -100).any(dim=1)
        self.evaluated += batch["input_ids"][real, 0].tolist()

    def predict_step(self, batch, batch_idx):
        return batch["input_ids"][:, 0].tolist()

    def configure_optimizers(self):
        if self.estimates_steps:
            # Makes Lightning build loader and iterator before it restores the checkpoint.
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class StopError(Exception):
    pass


class SaveAndStop(Callback):
    """Save at the n-th call of a hook and end the run as a crash would."""

    def __init__(self, hook: str, count: int, path: str) -> None:
        self.count, self.path = count, path
        setattr(self, hook, self.called)

    def called(self, trainer, *_):
        self.count -= 1
        if self.count == 0:
            trainer.save_checkpoint(self.path)
            raise StopError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(NUM_TRAIN + 3):
        (folder / f"{i:02d}.txt").write_bytes(bytes([i]) * 8)
    return f"{folder}/*.txt"


def data_of(corpus: str, micro_batch_size: int = 2, **options) -> SequenceShardingDataModule:
    given = {"sequence_length": 8, "held_out": 3, "seed": 3, "global_batch_size": GLOBAL_BATCH} | options
    return SequenceShardingDataModule(corpus, micro_batch_size=micro_batch_size, **given)


def trainer_of(accumulation: int = 2, **options) -> Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "accelerator": "cpu",
    }
    return Trainer(accumulate_grad_batches=accumulation, **(quiet | options))


@pytest.fixture(scope="module")
def uninterrupted(corpus):
    model = Recorder()
    trainer_of(max_epochs=NUM_EPOCHS, limit_val_batches=0).fit(model, datamodule=data_of(corpus))
    epochs = [model.seen[i : i + NUM_TRAIN] for i in range(0, len(model.seen), NUM_TRAIN)]
    assert len({tuple(epoch) for epoch in epochs}) == NUM_EPOCHS
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1
    assert len(set(epochs[0])) == NUM_TRAIN
    return model.seen


# (hook, its call, the position that must be stored), with validation at the middle and the end of each epoch.
SAVED_AT = [
    ("on_train_batch_end", 1, 0),  # within the first accumulation
    ("on_train_batch_end", 4, 8),
    ("on_train_batch_end", 7, 12),  # within an accumulation
    ("on_train_batch_end", 12, 24),  # the epoch's last batch
    ("on_before_optimizer_step", 4, 12),
    ("on_before_optimizer_step", 6, 20),  # within the epoch's last batch
    ("on_validation_end", 1, 12),
    ("on_validation_end", 2, 24),
    ("on_train_epoch_end", 1, 24),
    ("on_train_epoch_start", 2, 24),
    ("max_steps", 4, 16),
    ("max_steps", 12, 48),
    ("max_epochs", 2, 48),
]


# How a run ends is asked of few: it has nothing to do with where it was saved.
@pytest.mark.parametrize(
    ("hook", "count", "position", "limit"),
    [
        *(
            pytest.param(*saved, {"max_epochs": NUM_EPOCHS}, id="-".join(map(str, (*saved, "epochs"))))
            for saved in SAVED_AT
        ),
        *(
            pytest.param(
                *saved,
                {"max_steps": NUM_STEPS},
                id="-".join(map(str, (*saved, "steps"))),
                marks=[pytest.mark.slow] * (i % 5 != 2),
            )
            for i, saved in enumerate(SAVED_AT)
        ),
    ],
)
def test_a_resume_reads_each_remaining_sample_once_in_order(
    corpus, uninterrupted, tmp_path, hook, count, position, limit
):
    path = str(tmp_path / "x.ckpt")
    halves = {"val_check_interval": 0.5}
    first = Recorder()
    if hook.startswith("max"):
        trainer = trainer_of(**{hook: count}, **halves)
        trainer.fit(first, datamodule=data_of(corpus))
        trainer.save_checkpoint(path)
    else:
        trainer = trainer_of(max_epochs=NUM_EPOCHS, callbacks=[SaveAndStop(hook, count, path)], **halves)
        with pytest.raises(StopError):
            trainer.fit(first, datamodule=data_of(corpus))
    assert first.seen[:position] == uninterrupted[:position]
    stored = torch.load(path, weights_only=True)["SequenceShardingDataModule"]
    assert stored["epoch"] * NUM_TRAIN + stored["global_samples_consumed"] == position
    resumes = [(2, 2, False, halves), (1, 4, True, halves), (4, 1, False, {"limit_val_batches": 0})]
    for micro_batch_size, accumulation, estimates_steps, validation in resumes:
        model = Recorder(estimates_steps=estimates_steps)
        trainer = trainer_of(accumulation, **limit, **validation)
        trainer.fit(model, datamodule=data_of(corpus, micro_batch_size), ckpt_path=path, weights_only=True)
        assert model.seen == uninterrupted[position:]
        assert trainer.global_step == NUM_STEPS
        assert model.logged_steps[-1] == NUM_STEPS - 1


def test_an_epoch_that_a_hook_ends_early_is_over(corpus, uninterrupted, tmp_path):
    class Skipping(Recorder):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 4 else None

    path, first = str(tmp_path / "x.ckpt"), Skipping()
    with pytest.raises(StopError):
        trainer_of(max_epochs=2, callbacks=[SaveAndStop("on_train_epoch_end", 1, path)]).fit(
            first, datamodule=data_of(corpus)
        )
    assert first.seen == uninterrupted[:8]
    model = Recorder()
    trainer_of(max_epochs=NUM_EPOCHS).fit(model, datamodule=data_of(corpus), ckpt_path=path, weights_only=True)
    assert model.seen == uninterrupted[NUM_TRAIN:]


class LateRestore(SingleDeviceStrategy):
    """Restore the checkpoint after the optimizers are configured, as strategies that shard the model do."""

    restore_checkpoint_after_setup = True


# (m, a, hook, its call): the ends of epochs 0 and 1, then two places within epoch 2; or the middles of all.
CHAINS = [
    [(1, 4, "on_train_batch_end", 24), (4, 1, "on_train_batch_end", 6), (2, 2, "on_train_batch_end", 4)],
    [(4, 1, "on_train_batch_end", 3), (1, 4, "on_train_epoch_end", 1), (2, 2, "on_train_batch_end", 16)],
]


@pytest.mark.parametrize("chain", CHAINS, ids=["ends", "middles"])
def test_a_chain_of_resumes_with_workers_is_exact(corpus, uninterrupted, tmp_path, chain):
    path, position = None, 0
    for link, (m, a, hook, count) in enumerate(chain):
        saved, model = str(tmp_path / f"{link}.ckpt"), Recorder(estimates_steps=True)
        callbacks = [SaveAndStop(hook, count, saved)]
        trainer = trainer_of(
            a, max_epochs=NUM_EPOCHS, callbacks=callbacks, strategy=LateRestore("cpu"), accelerator="auto"
        )
        with pytest.raises(StopError):
            trainer.fit(model, datamodule=data_of(corpus, m, num_workers=1), ckpt_path=path, weights_only=True)
        assert model.seen == uninterrupted[position : position + len(model.seen)]
        path, position = saved, position + len(model.seen)
    assert 48 < position < NUM_EPOCHS * NUM_TRAIN
    model = Recorder()
    trainer_of(1, max_epochs=NUM_EPOCHS).fit(model, datamodule=data_of(corpus, 4), ckpt_path=path, weights_only=True)
    assert model.seen == uninterrupted[position:]


@pytest.mark.parametrize("dp_size", [2, 4])
def test_data_parallel_ranks_share_the_steps_of_one_process(corpus, uninterrupted, tmp_path, dp_size):
    def run(rank: int, ckpt_path: str | None, **limit) -> list[list[int]]:
        strategy = SingleDeviceStrategy("cpu")  # one rank of many: the coordinate is all that the data read of it
        strategy.data_parallel_rank, strategy.data_parallel_size = rank, dp_size
        model, data = Recorder(), data_of(corpus, 1)
        trainer = trainer_of(4 // dp_size, strategy=strategy, accelerator="auto", limit_val_batches=0, **limit)
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        if ckpt_path is None:
            trainer.save_checkpoint(tmp_path / f"rank{rank}.ckpt")
        return model.seen

    stop = {"max_steps": 8}
    first = [run(rank, None, **stop) for rank in range(dp_size)]
    assert [sample for step in zip(*first, strict=True) for sample in step] == uninterrupted[:32]
    states = [torch.load(tmp_path / f"rank{rank}.ckpt")["SequenceShardingDataModule"] for rank in range(dp_size)]
    assert all(state == states[0] for state in states)  # any rank's file is the checkpoint
    path = str(tmp_path / "rank0.ckpt")
    rest = [run(rank, path, max_epochs=NUM_EPOCHS) for rank in range(dp_size)]
    assert [sample for step in zip(*rest, strict=True) for sample in step] == uninterrupted[32:]
    model = Recorder()
    trainer_of(max_epochs=NUM_EPOCHS).fit(model, datamodule=data_of(corpus), ckpt_path=path, weights_only=True)
    assert model.seen == uninterrupted[32:]


def test_positions_of_other_data_or_batches_are_refused(corpus, tmp_path):
    path = str(tmp_path / "x.ckpt")
    trainer = trainer_of(max_steps=2, limit_val_batches=0)
    trainer.fit(Recorder(), datamodule=data_of(corpus))
    trainer.save_checkpoint(path)
    for accumulation, options, match in (
        (2, {"sequence_length": 4}, "sequence_length was 8, is 4"),
        (2, {"held_out": 4}, "held_out was 3, is 4"),
        (2, {"packing": "packed"}, "packing was 'document', is 'packed'"),
        (2, {"seed": 4}, "seed 3, this run has 4"),
        (2, {"shuffle": False}, "shuffle True, this run has False"),
        (
            3,
            {"global_batch_size": None},
            r"2 x accumulation 3 x dp 1 = 6 .* stored cursor is 4: .*\[\(1, 4\), \(2, 2\), \(4, 1\)\]",
        ),
    ):
        with pytest.raises(SequenceParallelError, match=match):
            trainer_of(accumulation, max_steps=4).fit(
                Recorder(), datamodule=data_of(corpus, **options), ckpt_path=path, weights_only=True
            )
    # Evaluation takes no position: another global batch is no obstacle.
    model = Recorder()
    data = data_of(corpus, 3, global_batch_size=None)
    trainer_of(7).validate(model, datamodule=data, ckpt_path=path, weights_only=True, verbose=False)
    assert len(model.evaluated) == len(set(model.evaluated)) == 3


def test_a_changed_corpus_is_refused(tmp_path):
    for i in range(9):
        (tmp_path / f"{i}.txt").write_bytes(bytes([i]) * 8)
    trainer = trainer_of(max_steps=1, limit_val_batches=0)
    trainer.fit(Recorder(), datamodule=data_of(f"{tmp_path}/*.txt"))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    (tmp_path / "3.txt").write_bytes(b"changed!")
    with pytest.raises(SequenceParallelError, match=r"other data: corpus was '[0-9a-f]{32}', is '[0-9a-f]{32}'"):
        trainer_of(max_steps=4).fit(
            Recorder(), datamodule=data_of(f"{tmp_path}/*.txt"), ckpt_path=tmp_path / "x.ckpt", weights_only=True
        )


def test_the_global_batch_is_what_the_trainer_makes_of_it(corpus):
    with pytest.raises(
        SequenceParallelError, match=r"2 x accumulation 3 x dp 1 = 6 samples a step, but global_batch_size is 4"
    ):
        trainer_of(3, max_steps=1).fit(Recorder(), datamodule=data_of(corpus))
    schedule = GradientAccumulationScheduler({0: 1, 2: 2})
    with pytest.raises(SequenceParallelError, match="changes the global batch during the run"):
        trainer_of(1, max_steps=1, callbacks=[schedule]).fit(Recorder(), datamodule=data_of(corpus, 4))
    data = data_of(corpus, global_batch_size=None)
    data.setup("fit")
    assert data.split.global_batch_size == 2


def test_the_last_global_batch_is_padded_only_where_that_is_exact(corpus):
    def batches(last_batch: str, strategy) -> list[dict[str, torch.Tensor]]:
        data = data_of(corpus, 5, global_batch_size=5, last_batch=last_batch)
        data.trainer = trainer_of(1, strategy=strategy, accelerator="auto")
        data.setup("fit")
        return list(data.train_dataloader())

    ours = SingleDeviceStrategy("cpu")
    ours.data_parallel_rank, ours.data_parallel_size = 0, 1
    for last_batch, strategy, num_batches in (
        ("auto", ours, 5), ("auto", SingleDeviceStrategy("cpu"), 4), ("pad", SingleDeviceStrategy("cpu"), 5), ("drop", ours, 4),
    ):  # fmt: skip
        made = batches(last_batch, strategy)
        assert len(made) == num_batches
        targets = torch.cat([(b["shift_labels"] != -100).all(dim=1) for b in made])
        assert targets.sum() == (24 if num_batches == 5 else 20)


def test_evaluation_reads_the_held_out_windows_once(corpus):
    data = data_of(corpus)
    model = Recorder()
    trainer_of().validate(model, datamodule=data, verbose=False)
    assert len(model.evaluated) == 3
    predicted = trainer_of().predict(Recorder(), datamodule=data)
    assert [sample for batch in predicted for sample in batch] == model.evaluated
    assert not set(model.evaluated) & {int(data.train_windows[i]["input_ids"][0]) for i in range(NUM_TRAIN)}
    none = data_of(corpus, held_out=0)
    none.setup()
    assert none.val_dataloader() == []


def test_uneven_evaluation_under_another_strategy_is_warned_of(corpus):
    data = data_of(corpus)
    data.setup()
    data._coordinate = lambda: (1, 3)
    with pytest.warns(UserWarning, match="2 evaluation batches on 3 data-parallel ranks leave 1 ranks a batch without"):
        data.val_dataloader()


def test_overfit_batches_reads_the_same_samples_in_every_epoch(corpus):
    model = Recorder()
    trainer_of(max_epochs=3, overfit_batches=4).fit(model, datamodule=data_of(corpus))
    assert model.seen[:8] == model.seen[8:16] == model.seen[16:]


def test_it_works_without_a_trainer_and_from_a_token_file(corpus, tmp_path):
    in_memory = data_of(corpus, 1)
    with pytest.raises(SequenceParallelError, match=r"call prepare_data\(\) and setup\(\) first"):
        in_memory.train_dataloader()
    prepare(corpus, tmp_path / "tokens", progress=False)
    variants = [
        in_memory,
        data_of(str(tmp_path / "tokens.idx"), 1),
        data_of(corpus, 1, cache_dir=str(tmp_path / "cache")),
    ]
    batches = []
    for data in variants:
        data.global_batch_size = None
        data.prepare_data()
        data.setup()
        batches.append([batch["input_ids"].tolist() for batch in data.train_dataloader()])
    assert batches[0] == batches[1] == batches[2]
    assert len(batches[0]) == NUM_TRAIN
    assert in_memory.vocab_size == 257
    assert {data.unigram_perplexity() for data in variants} == {in_memory.unigram_perplexity()}


def test_what_is_found_and_left_out_is_said(corpus, caplog):
    data = data_of(corpus, sequence_length=5, global_batch_size=None)
    # A test before this one may have made Lightning's logger quiet.
    with caplog.at_level("INFO"), caplog.at_level("INFO", logger="lightning.pytorch"):
        data.setup()
        data.setup()
        data.last_batch = "pad"
        data.micro_batch_size = 7
        data.train_dataloader()
    said = caplog.text
    assert said.count("27 documents in 27 files") == 1
    assert "train 24 windows of 5 tokens from 24 documents (packing='document'), 72 of 192 targets dropped" in said
    assert "held out 3 windows" in said
    assert "the last 3 of 24 windows make no global batch of 7: trained as a shorter step" in said


def test_too_little_text_and_foreign_tokens_are_refused(corpus, tmp_path):
    with pytest.raises(
        SequenceParallelError, match=r"no training window of 9 tokens: .* has 9 tokens and a window needs 10"
    ):
        data_of(corpus, sequence_length=9).setup()
    with TokenFileWriter(tmp_path / "x", dtype="int32") as writer:
        writer.add(torch.arange(300).numpy())
        writer.add(torch.arange(300).numpy())
    data = data_of(str(tmp_path / "x.idx"), 1, held_out=1, sequence_length=299, global_batch_size=None)
    data.setup()
    with pytest.raises(SequenceParallelError, match=r"token id 299, outside the vocabulary \[0, 257\)"):
        next(iter(data.train_dataloader()))


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("sequence_length", "abc", "a whole number of at least 1"),
        ("micro_batch_size", 0, "a whole number of at least 1"),
        ("global_batch_size", 2.0, "a whole number of at least 1"),
        ("seed", -1, "a whole number of at least 0"),
        ("num_workers", "2", "a whole number of at least 0"),
        ("minimum_bytes", None, "a whole number of at least 0"),
        ("held_out", "some", "a fraction, or a number of documents"),
    ],
)
def test_an_option_of_another_kind_is_refused_by_name(option, value, rule):
    with pytest.raises(SequenceParallelError, match=re.escape(f"{option}={value!r}: must be {rule}")):
        SequenceShardingDataModule("stdlib", **{option: value})


def test_every_option_can_be_given_on_a_command_line(corpus):
    parser = ArgumentParser()
    parser.add_class_arguments(SequenceShardingDataModule, "data")
    given = [
        f"--data.source={corpus}",
        "--data.held_out=0.25",
        "--data.packing=packed",
        "--data.global_batch_size=null",
    ]
    options = parser.parse_args([*given, "--data.remainder=pad", "--data.sequence_length=4"])
    data = SequenceShardingDataModule(**options.data.as_dict())
    assert (data.held_out, data.packing, data.remainder, data.sequence_length) == (0.25, "packed", "pad", 4)
    assert parser.parse_args(["--data.held_out=2"]).data.held_out == 2
    assert parser.parse_args(['--data.source=["a.txt", "b.txt"]']).data.source == ["a.txt", "b.txt"]
