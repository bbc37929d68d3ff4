"""Faults of what blocks keep from one call to the next, where they are recomputed or compiled."""

from __future__ import annotations

from tests.faults.fault import fault

FILE, NOTED = "parallelize/recomputation/state_of_blocks.py", "parallelize/recomputation/noted_state.py"
TESTS = "tests/parallelize/recomputation/test_state_of_blocks.py"
ALIKE = f"{TESTS}::test_recomputed_blocks_are_as_they_would_be"
COMPILED = "tests/parallelize/recomputation/test_compiled_state.py::test_compiled_blocks_are_as_they_would_be"

RECOMPUTED_STATE = (
    fault(
        "a block that counts once more in its backward",
        FILE,
        "            take_back()\n\n    return run",
        "            pass\n\n    return run",
        f"{ALIKE}[CountsUnread-selective]",
    ),
    fault(
        "a recomputation that sees what later forwards have left",
        NOTED,
        "        shown = _put([(place, _mapped(stand_in, contents)) for place, contents in self._places])\n",
        "        shown = _put([])\n",
        f"{TESTS}::test_each_of_several_forwards_is_seen_again_as_it_was[Lists]",
    ),
    fault(
        "a buffer that a recomputation writes to itself",
        "parallelize/recomputation/copies.py",
        "            memory[view.memory] = self._memory[view.memory][1].clone().untyped_storage()\n",
        "            memory[view.memory] = self._memory[view.memory][0]\n",
        f"{ALIKE}[Counts-selective]",
    ),
    fault(
        "a larger buffer that is not known as one that is written to",
        FILE,
        "                state.written |= self._own.names_written() | self._outside.names_written()\n",
        "",
        f"{ALIKE}[WritesMuch-selective]",
    ),
    fault(
        "a list of a file that a recomputation makes longer",
        FILE,
        "            state.outside = self._outside.roots()\n",
        "",
        f"{ALIKE}[KeepsInFile-selective]",
    ),
    fault(
        "a generator that draws further numbers in a recomputation",
        NOTED,
        "        for each in self._generators:\n            each()\n\n        def",
        "        def",
        f"{ALIKE}[Draws-selective]",
    ),
    fault(
        "a write that no copy undoes",
        FILE,
        "        if (found := self._own.written_without_copy()) is not None:\n",
        "        if (found := self._own.written_without_copy()) is not None and False:\n",
        f"{TESTS}::test_a_write_that_is_not_undone_is_refused[late]",
    ),
    fault(
        "a compiled backward that reads a buffer behind its write",
        "global_view/compiled/saved.py",
        "found(writing_to_copies(graph), inputs)",
        "found(graph, inputs)",
        f"{COMPILED}[Read-none]",
    ),
    fault(
        "a copy of a buffer that a small budget computes again from what was written",
        "global_view/compiled/written_inputs.py",
        '        copy.meta = {**node.meta, "recompute": CheckpointPolicy.MUST_SAVE}\n',
        "        copy.meta = {**node.meta}\n",
        "tests/parallelize/recomputation/test_compiled_state.py::test_compiled_blocks_are_as_they_would_be[ReadByData-budget_50]",
    ),
    fault(
        "a graph of the global view that reads a buffer behind its write",
        "global_view/compiled/local_graph.py",
        "        self._written = [i for i, node in enumerate(self._placeholders) if node in written]\n",
        "        self._written: list[int] = []\n",
        "tests/trainer/memory/test_kept_by_blocks.py::test_a_fit_is_that_of_one_device[compiled in the global view, selective-counter]",
    ),
    fault(
        "an MLP that counts each of its tiles",
        "parallelize/tiles/trial.py",
        "        if not is_left:\n",
        "        if False:\n",
        "tests/parallelize/test_tiled_mlp.py::test_one_that_writes_to_what_it_keeps_runs_whole[True]",
    ),
    fault(
        "a checkpoint that holds those of all earlier steps, by what they have left with a graph",
        NOTED,
        "            self._let_graphs_go()\n",
        "            pass\n",
        f"{TESTS}::test_what_is_kept_with_its_graph_is_seen_and_holds_no_earlier_step[object-selective]",
    ),
    fault(
        "views of one memory that a recomputation sees apart",
        "parallelize/recomputation/copies.py",
        "        if view.memory not in memory:\n",
        "        if True:\n",
        f"{ALIKE}[Aliases-selective]",
    ),
    fault(
        "a layer that a recomputation builds anew and leaves in its block",
        "users_code/contents.py",
        "                each.update(stash)\n",
        "                pass\n",
        f"{ALIKE}[Builds-selective]",
    ),
    fault(
        "a frozen object that is written to by its own methods",
        "users_code/contents.py",
        "            object.__setattr__(value, name, before[name])\n",
        "            setattr(value, name, before[name])\n",
        f"{ALIKE}[Objects2-selective]",
    ),
    fault(
        "a list that is replaced where it has been read, of which the first one is put back",
        NOTED,
        "        return [place for place, _ in self._places if id(place.holder) not in held] + [\n",
        "        return [place for place, _ in self._places if isinstance(place.holder, list)] + [\n",
        f"{TESTS}::test_lists_of_a_caller_are_as_they_would_be[Collects-selective]",
    ),
    fault(
        "a compiled graph that writes to one copy for each of two buffers in one memory",
        "global_view/compiled/saved.py",
        "    if shares_what_it_writes(graph):\n",
        "    if False:\n",
        "tests/parallelize/recomputation/test_compiled_state.py::test_memory_that_several_have_is_written_to_once_for_all[none-whole]",
    ),
)
