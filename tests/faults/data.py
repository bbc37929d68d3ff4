"""Faults of what each rank reads, and of what is counted and measured of it."""

from __future__ import annotations

from tests.faults.fault import EVALUATED, FITS, REFUSED, fault

DATA_MODULE = "tests/data/test_datamodule.py"

DATA = (
    fault(
        "a batch sharded twice",
        "data/batch/collective_shard.py",
        "if by_hand or is_sharded(batch):",
        "if by_hand:",
        "tests/trainer/test_fit.py::test_a_batch_that_the_loader_sharded_is_not_sharded_again[4-False-marked]",
    ),
    fault(
        "an epoch as short as if each rank had its own samples",
        "trainer/sharded_model.py",
        "            dp_rank=self.data_parallel_rank,\n            dp_size=self.data_parallel_size,\n",
        "            dp_rank=self.data_parallel_rank,\n            dp_size=self.world_size,\n",
        f"{FITS}[2]",
    ),
    fault(
        "an epoch dealt out over the world by DistributedSampler",
        "trainer/sharded_model.py",
        "            dp_rank=self.data_parallel_rank,\n            dp_size=self.data_parallel_size,\n",
        "            dp_rank=self.global_rank,\n            dp_size=self.world_size,\n",
        f"{FITS}[2]",
    ),
    fault(
        "peers that read different samples",
        "comm/agreement.py",
        "        if len(digests) > 1:\n",
        "        if False:\n",
        f"{REFUSED}[different samples-]",
    ),
    fault(
        "a stream read by every rank",
        "data/loaders/same_samples.py",
        "    )\n    return found\n",
        "    )\n    return loader\n",
        "tests/trainer/test_fit.py::test_streams_are_read_by_one_rank_and_end_together",
    ),
    fault(
        "groups that shuffle by a seed of their own",
        "data/loaders/same_samples.py",
        "    return int(seeds[0])\n",
        "    return seed\n",
        "tests/data/loaders/test_same_samples.py::test_a_seed_of_each_rank_splits_one_order",
    ),
    fault(
        "data-parallel groups of datasets of other lengths",
        "data/loaders/same_samples.py",
        "    if len(holders) > 1:\n",
        "    if False:\n",
        "tests/data/loaders/test_same_samples.py::test_loaders_that_differ_are_refused_on_all_ranks[lengths]",
    ),
    fault(
        "every group trains the same batches of a user's own sampler",
        "data/loaders/deal.py",
        "            yield whole[self.coordinates.dp_rank]\n",
        "            yield whole[0]\n",
        "tests/data/loaders/test_deal.py::test_groups_read_the_rounds_of_one_device",
    ),
    fault(
        "every group trains the whole of a stream",
        "data/loaders/broadcast_loader.py",
        "        self.deals = len({number for number, _ in states if number is not None}) == 1\n",
        "        self.deals = False\n",
        "tests/data/loaders/test_deal.py::test_every_batch_is_read_by_one_group[stream]",
    ),
    fault(
        "shuffled whatever the user said",
        "data/loaders/replace_sampler.py",
        "shuffle = _shuffles(batches)",
        "shuffle = True",
        "tests/trainer/test_lightning.py::test_loggers_and_checkpoints_of_one_device",
    ),
    fault(
        "every epoch in the order of the first",
        "data/samplers/training_sampler.py",
        "        if epoch != self.epoch:\n",
        "        if False:\n",
        f"{DATA_MODULE}::test_a_chain_of_resumes_with_workers_is_exact[ends]",
    ),
    fault(
        "every epoch of a user's loader in the order of the first",
        "data/samplers/training_sampler.py",
        "    def sampler(self) -> GlobalBatchSampler:\n",
        "    def not_found(self) -> GlobalBatchSampler:\n",
        "tests/checkpoint/test_resume.py::test_epochs_are_shuffled_differently",
    ),
    fault(
        "a loader that estimated_stepping_batches starts too early",
        "data/loaders/lazy_loader.py",
        "yield from super().__iter__()",
        "return super().__iter__()",
        f"{DATA_MODULE}::test_a_chain_of_resumes_with_workers_is_exact[ends]",
    ),
    fault(
        "a position lost to estimated_stepping_batches",
        "step/data_cursor.py",
        "            resume_loader(loader, cursor)\n\n    def resume_loader",
        "            pass\n\n    def resume_loader",
        "tests/checkpoint/test_resume.py::test_a_resume_is_exact_for[momentum]",
    ),
    fault(
        "tokens counted once per rank",
        "callbacks/throughput.py",
        "return rows, length",
        "return num_rows * trainer.world_size, length",
        "tests/trainer/test_lightning.py::test_tokens_are_counted_once_whoever_holds_them",
    ),
    fault(
        "eval_loss over the world's samples",
        "step/runner.py",
        "step = self._begin(batch, self.context.mesh.sequence_group)",
        "step = self._begin(batch, None)",
        EVALUATED,
    ),
    fault(
        "eval_loss by sync_dist from the ranks' own means",
        "loss/interception.py",
        "if self.context.loss_step is None or isinstance(input, FakeTensor):",
        "if self.context.loss_step is None or isinstance(input, FakeTensor) or not torch.is_grad_enabled():",
        EVALUATED,
    ),
    fault(
        "eval_loss with samples that fill the last batches",
        "step/evaluation.py",
        "return loaders is not None and is_filler_batch(loaders.flattened[self._loader], self._batch)",
        "return False",
        EVALUATED,
    ),
    fault(
        "an integer mean rounded down by sync_dist",
        "trainer/processes/process_strategy.py",
        "            tensor = tensor.float()\n",
        "            pass\n",
        "tests/trainer/test_lightning.py::test_a_mean_of_integers_is_not_rounded_down",
    ),
    fault(
        "metrics of samples synchronised over the world",
        "trainer/sharded_model.py",
        'return self.device_mesh.get_group("data_parallel")',
        "return comm.world()  # type: ignore[return-value]",
        "tests/trainer/test_lightning.py::test_metrics_of_samples_count_each_sample_once_with_the_data_parallel_group",
    ),
    fault(
        "a stream that splits by rank, of which one part is read without a word",
        "data/loaders/same_samples.py",
        " and found.peers_read_others():\n",
        " and False:\n",
        "tests/data/loaders/test_deal.py::test_a_stream_that_splits_by_the_process_rank_is_said_to_lose_its_other_parts",
    ),
    fault(
        "the state of a loader as far as it was fetched, not trained",
        "data/loaders/own_state.py",
        "        return self._noted.get(count)\n",
        "        return self._last\n",
        "tests/data/loaders/test_own_state.py::test_a_resume_goes_on_and_reads_nothing_again[own-ring]",
    ),
)
