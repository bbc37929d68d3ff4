"""What counts as a block of a model."""

import pytest
import torch
from torch import nn

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp import accumulating
from lightning_sp.parallelize.supported_parameters import check_hooks, check_optimized, check_parameters
from lightning_sp.parallelize.transformer_blocks import transformer_blocks


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))


def test_stacks_within_a_stack_are_no_blocks_but_what_they_hold_is():
    stacks = nn.ModuleList([nn.ModuleList([block(), block()]), nn.ModuleList([block()])])
    assert transformer_blocks(nn.ModuleDict({"encoder": stacks})) == [*stacks[0], *stacks[1]]
    named = nn.ModuleList([nn.ModuleDict({"a": block()}), nn.ModuleDict({"a": block()})])
    assert transformer_blocks(nn.ModuleDict({"layers": named})) == [named[0]["a"], named[1]["a"]]


def test_members_of_a_list_of_lists_are_blocks_whatever_their_classes():
    class Attention(nn.Sequential):
        pass

    def layer() -> nn.ModuleList:
        attention = Attention(nn.LayerNorm(4), nn.Linear(4, 4))
        # A norm around a norm, a part that is left out, and a layer without parts are none.
        norms = nn.ModuleList([nn.Sequential(nn.LayerNorm(4)), None])
        return nn.ModuleList([norms, attention, block(), nn.Linear(4, 4), None])

    table = nn.ModuleList([layer(), layer()])
    assert transformer_blocks(nn.ModuleDict({"decoder": table})) == [each for row in table for each in (row[1], row[2])]


def test_a_list_may_have_none_among_its_blocks():
    members = nn.ModuleList([block(), None, block()])
    assert transformer_blocks(nn.ModuleDict({"layers": members})) == [members[0], members[2]]


def test_what_holds_the_input_embeddings_is_no_block():
    class Model(nn.Module):
        _no_split_modules = ("Embeddings", "Layer")

        def __init__(self) -> None:
            super().__init__()
            self.embeddings, self.layer = Embeddings(), Layer(4, 4)

        def get_input_embeddings(self) -> nn.Module:
            return self.embeddings.table

    class Embeddings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(4, 4), nn.LayerNorm(4)

    class Layer(nn.Linear):
        pass

    model = nn.ModuleDict({"model": Model()})
    assert transformer_blocks(model) == [model["model"].layer]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_parameter_without_an_element_is_refused():
    with pytest.raises(SequenceParallelError, match=r"1\.weight of shape \(4, 0\) has no element"):
        check_parameters(nn.Sequential(nn.Linear(4, 4), nn.Linear(0, 4, bias=False)))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused_by_name(register):
    model = nn.Sequential(nn.Linear(4, 4))
    handle = getattr(model[0].weight, register)(lambda grad: None)
    with pytest.raises(
        SequenceParallelError, match=r"0\.weight has 1 hook\(s\) that FSDP2 would never call.*from on_fit_start"
    ):
        check_parameters(model)
    handle.remove()
    check_parameters(model)


def test_hooks_of_shards_are_refused_where_they_would_not_be_one_devices():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    check_hooks(model, "_backward_hooks")  # FSDP2 calls it
    with (
        pytest.raises(SequenceParallelError, match=r"0\.weight has a post-accumulate hook.*accumulate_grad_batches=1"),
        accumulating(model, whole=False),
    ):
        raise AssertionError("gradients would be accumulated")
    model[0].weight.register_hook(lambda grad: None)
    with pytest.raises(SequenceParallelError, match=r"0\.weight has 1 hook\(s\)"):
        check_hooks(model, "_backward_hooks")


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_scale_their_own_rows_are_refused(kind):
    with pytest.raises(SequenceParallelError, match=r"^0 has max_norm=1\.0: its forward scales the rows"):
        check_parameters(nn.Sequential(kind(4, 2, max_norm=1.0)))
    with pytest.raises(
        SequenceParallelError, match=r"^0 has sparse=True: FSDP2 splits and adds up dense gradients alone"
    ):
        check_parameters(nn.Sequential(kind(4, 2, sparse=True)))


@pytest.mark.parametrize("named", [True, False])
def test_what_an_optimizer_steps_beside_the_shards_is_refused_by_name(named):
    root = nn.Sequential(nn.Linear(3, 2))
    stepped = root[0].bias if named else torch.ones(2, requires_grad=True)
    what = "0.bias" if named else "a tensor that is no parameter of the LightningModule"
    with pytest.raises(
        SequenceParallelError, match=rf"^an optimizer steps {what}, of shape \(2,\), which was not there"
    ):
        check_optimized(root, [torch.optim.SGD([stepped], lr=0.1)])


def test_trained_complex_weights_are_refused():
    model = nn.Sequential(nn.ParameterList([torch.ones(3, dtype=torch.complex64)]))
    with pytest.raises(SequenceParallelError, match=r"^0\.0 is trained and torch\.complex64: .*view_as_complex"):
        check_parameters(model)
    check_parameters(model.requires_grad_(False))
