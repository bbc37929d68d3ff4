"""What trains in `benchmarks.longest_sequence`, a module each, every one as its makers publish it.

A contestant is a module with

    build(variant, problem, rank, world) -> step      step(tokens (1, S + 1)) -> loss: an optimizer step on a sequence of all ranks
                                                      (plain FSDP2: on a sequence of this rank's own)

or with `train(variant, problem, world, batches, meter)`, which begins and ends the meter around each step itself.
"""
