"""Faults of what users bring: models compiled, read from files or answered in objects, samples split, checkpoints by plugins."""

from __future__ import annotations

from tests.faults.fault import fault

COMPILED = "tests/trainer/compile/test_user_compile.py"
PEFT = "tests/trainer/pretrained/test_peft.py"
OPTIONS = "tests/trainer/test_lightning_options.py"

USERS = (
    fault(
        "virtual tokens at each rank's first tokens",
        "rewrite/hugging_face/virtual_tokens.py",
        "    positions = sequence.position_ids\n",
        "    positions = torch.arange(embeddings.shape[1], device=embeddings.device).expand(len(embeddings), -1)\n",
        f"{PEFT}::test_virtual_tokens_train_and_are_saved_as_on_one_device[prompt]",
    ),
    fault(
        "a prompt that is saved as a zero",
        "parallelize/live_saves.py",
        "nn.Parameter(state[n]) if n in state else",
        "nn.Parameter(0 * state[n]) if n in state else",
        f"{PEFT}::test_virtual_tokens_train_and_are_saved_as_on_one_device[prompt by a network]",
    ),
    fault(
        "weights of a compiled model that stay each rank's own",
        "parallelize/initial_weights.py",
        "        for name, tensor in _sent_tensors(module):\n            _receive(",
        '        for name, tensor in _sent_tensors(module):\n            if "_orig_mod" in name and not tensor.is_meta:\n'
        "                continue\n            _receive(",
        f"{COMPILED}::test_a_compiled_model_trains_as_the_eager_one_of_one_device",
    ),
    fault(
        "attention calls looked for in compiled code, which counts none",
        "step/runner.py",
        'eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")',
        "eager: AbstractContextManager[Any] = nullcontext()",
        f"{COMPILED}::test_a_compiled_model_trains_as_the_eager_one_of_one_device",
    ),
    fault(
        "names of wrappers in a checkpoint",
        "parameter_names.py",
        '    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)',
        "    return name",
        f"{COMPILED}::test_checkpoints_have_the_models_own_names",
    ),
    fault(
        "a pretrained model read on the meta device",
        "parallelize/meta_device.py",
        ' is None and not _reads_pretrained():',
        " is None:",
        "tests/trainer/pretrained/test_pretrained.py::test_weights_are_rank_0s_wherever_the_model_is_built",
    ),
    fault(
        "hooks of a trial that stay, beside those that training registers",
        "step/isolation.py",
        "            undo.append(partial(_remove_new, vars(module)[name], set(vars(module)[name])))\n",
        "            pass\n",
        "tests/flows/test_flows.py::test_the_page_is_true_of_a_flow[hidden_states]",
    ),
    fault(
        "tokens of images placed from the first on, on each rank",
        "rewrite/hugging_face/media/placement.py",
        "    return shard(numbers, sequence.layout, context.mesh.sequence_rank, dim=1)[mask]\n",
        "    return numbers.flatten()[: int(mask.sum())]\n",
        "tests/rewrite/hugging_face/media/test_placement.py::test_a_model_with_images_trains_as_on_one_device[one each-strategy0]",
    ),
    fault(
        "positions of images counted on a shard",
        "rewrite/hugging_face/positions/rope_index.py",
        "    if step is None or context.mesh.layout.size == 1:\n",
        "    if True:\n",
        "tests/flows/test_flows.py::test_the_page_is_true_of_a_flow[qwen3_vl_images]",
    ),
    fault(
        "inner features of a tower added from the first token on",
        "rewrite/hugging_face/media/deepstack.py",
        "    own = own_tokens(context, sequence, tokens.flatten(2)[..., 0] if tokens.dim() == 3 else tokens)\n",
        "    own = own_tokens(context, sequence, tokens.flatten(2)[..., 0] if tokens.dim() == 3 else tokens) * 0\n",
        "tests/flows/test_flows.py::test_the_page_is_true_of_a_flow[qwen3_vl_images]",
    ),
    fault(
        "a user's split split again",
        "data/loaders/same_samples.py",
        "    if can_replace_sampler(loader) and not own_samplers:\n",
        "    if can_replace_sampler(loader):\n",
        f"{OPTIONS}::test_a_users_split_is_not_split_again[dataset]",
    ),
    fault(
        "a checkpoint plugin passed by",
        "trainer/sharded_model.py",
        "write = None if io is None else partial(io.save_checkpoint, storage_options=storage_options)",
        "write = None",
        f"{OPTIONS}::test_a_checkpoint_plugin_writes_and_reads_whole_checkpoints[io]",
    ),
    fault(
        "dropout of a row drawn by each rank for itself",
        "rewrite/row_dropout.py",
        "repeats := self._repeats(input, step)",
        "repeats := 0",
        "tests/rewrite/test_row_dropout.py::test_every_layout_drops_the_same_of_a_row[{}]",
    ),
    fault(
        "a head's mask of this rank's tokens alone",
        "rewrite/hugging_face/heads/whole_states.py",
        "_replaced({name: _whole(context, tensor) for name, tensor in running.shards.items()}, args, kwargs)",
        "_replaced(running.shards, args, kwargs)",
        "tests/flows/test_flows.py::test_the_page_is_true_of_a_flow[modernbert_mean]",
    ),
    fault(
        "an encoder-decoder's head given a shard's end",
        "rewrite/hugging_face/heads/give.py",
        "    if is_encoder_decoder(model):  # pools",
        "    if False:  # pools",
        "tests/flows/test_flows.py::test_the_page_is_true_of_a_flow[bart_classes]",
    ),
    fault(
        "weights swapped after an evaluation, and the gathered ones used",
        "step/runner.py",
        "        reshard(self.module)\n",
        "",
        "tests/flows/test_flows.py::test_the_page_is_true_of_a_flow[ema_in_validation]",
    ),
    fault(
        "a whole sequence's number counted by each of its ranks",
        "preflight/numbers.py",
        "for _, each in having if each.sequence_rank == 0]",
        "for _, each in having]",
        "tests/preflight/test_evaluation.py::test_numbers_of_a_shard_are_named_in_a_warning[validate]",
    ),
    fault(
        "a monitored number of a shard in a warning alone",
        "preflight/numbers.py",
        "{name for name in monitored if any",
        "{name for name in () if any",
        "tests/preflight/test_evaluation.py::test_a_monitored_number_of_a_shard_is_refused_on_all_ranks",
    ),
    fault(
        "a trial that stays in the user's own objects",
        "step/isolation.py",
        "        is_object = _is_object(value)\n",
        "        is_object = False\n",
        "tests/step/test_isolation.py::test_the_users_own_objects_are_put_back",
    ),
    fault(
        "an output in an object that FSDP does not see",
        "parallelize/fsdp/shard_model.py",
        "    find_outputs_in_objects(fsdp_modules(root))\n",
        "",
        "tests/trainer/test_users.py::test_a_users_module_trains_as_on_one_device[{'ring_size': 2}]",
    ),
    fault(
        "replicas that come apart without a word",
        "step/replicas.py",
        "    if all(len(set(digests[first::shard_size])) == 1 for first in range(shard_size)):",
        "    if digests:",
        "tests/step/test_replicas.py::test_replicas_that_come_apart_are_named[while training]",
        "tests/step/test_replicas.py::test_replicas_that_come_apart_are_named[before a checkpoint]",
    ),
    fault(
        "a hash of bits that does not know their places",
        "step/replicas.py",
        "(mixed * (2 * places + 1)).sum()",
        "mixed.sum()",
        "tests/step/test_replicas.py::test_a_change_of_bits_or_places_changes_the_hash[dtype1]",
    ),
    fault(
        "quantized weights that are not compared between ranks",
        "parallelize/initial_weights.py",
        "    check_same_quantized(module)\n",
        "",
        "tests/trainer/pretrained/test_peft.py::test_quantized_weights_that_differ_between_ranks_are_refused",
    ),
    fault(
        "a nan that is said after the update",
        "strategy.py",
        "            self._steps.end_backward(self._again)\n",
        "            self._steps.end()\n",
        "tests/step/test_non_finite.py::test_the_layer_is_named_once_until_the_loss_is_finite_again[weight-{'ulysses_size': 2}]",
    ),
    fault(
        "a batch that is run once more without what its step took out",
        "strategy.py",
        "partial(self._training_step_again, *map(copy, args), **kwargs)",
        "partial(self._training_step_again, *args, **kwargs)",
        "tests/step/test_non_finite.py::test_the_layer_is_named_once_until_the_loss_is_finite_again[step-{'ring_size': 2}]",
    ),
)  # fmt: skip
