"""Experts in tiles of tokens: those of transformers and of users, exact, and whole where experts look at more than one token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_sp.parallelize.tiles import MlpTiles, TiledMLP, tile_mlps
from lightning_sp.parallelize.transformer_blocks import transformer_blocks
from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.instruments.live_storages import LiveStorages
from tests.parallelize.mixtures import CHOSEN, EXPERTS, Experts, Mixture

FEATURES, INNER = 8, 48
SIZES = dict(
    vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=24,
    moe_intermediate_size=24, shared_expert_intermediate_size=24, max_position_embeddings=64, pad_token_id=0, use_cache=False,
    num_local_experts=EXPERTS, num_experts=EXPERTS, n_routed_experts=EXPERTS, num_experts_per_tok=CHOSEN, head_dim=8,
)  # fmt: skip
LATENT = dict(
    q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=2
)
OF_KIND: dict[str, dict[str, Any]] = {
    "deepseek_v3": dict(**LATENT, n_group=1, topk_group=1, first_k_dense_replace=1),
    "gpt_oss": dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "mixtral": dict(output_router_logits=True),
}


def language_model(kind: str, implementation: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**SIZES, **OF_KIND.get(kind, {})})
    config._experts_implementation = implementation
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config).double()
    for each in model.parameters():
        nn.init.normal_(each, std=0.2)
    return model


def of_step(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Return the loss of a step, that of the router included, and all gradients."""
    model.zero_grad()
    out: Any = model(input_ids=ids, labels=ids)
    out.loss.backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": out.loss.detach(), **found}


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        ("mixtral", "eager"),
        ("gpt_oss", "grouped_mm"),
        ("deepseek_v3", "batched_mm"),
        *(
            pytest.param(kind, each, marks=pytest.mark.slow)
            for kind in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "granitemoe")
            for each in ("eager", "grouped_mm", "batched_mm")
        ),
    ],
)
def test_experts_of_transformers_give_in_tiles_what_the_whole_gives(kind, implementation, monkeypatch):
    # torch's own has no float64 on a CPU; what stands for it then is the same products.
    monkeypatch.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *args, **kwargs: False)
    model, ids = language_model(kind, implementation), torch.randint(1, 31, (2, 20))
    expected = of_step(model, ids)
    blocks = transformer_blocks(model)
    assert tile_mlps(blocks, 7, model) == 2
    tiled = [each.forward for each in model.modules() if isinstance(vars(each).get("forward"), TiledMLP)]
    of_experts = [each for each in tiled if len(each.found.inputs) == 3]
    assert len(of_experts) == (1 if kind == "deepseek_v3" else 2)  # its first layer has none
    for _ in range(2):  # the first one tries
        actual = of_step(model, ids)
    assert_sharded_equals_unsharded([*actual.values()], [*expected.values()], [*expected])
    assert not any(each.runs_whole for each in tiled)
    assert all(each._tried for each in of_experts)


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(FEATURES), mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def gradients(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    block.zero_grad()
    x = x.clone().requires_grad_()
    out = block(x)
    out.square().sum().backward()
    found = {name: each.grad.clone() for name, each in block.named_parameters() if each.grad is not None}
    return {"out": out.detach(), "x": x.grad, **found}


def same_in_tiles(block: Block, tokens: int = 60, tile_tokens: int = 7) -> list[TiledMLP]:
    """Compare a block in tiles with itself; return what runs in tiles."""
    x = torch.randn(2, tokens // 2, FEATURES, dtype=torch.float64)
    expected = gradients(block.double(), x)
    tile_mlps([block], tile_tokens)
    for _ in range(2):
        actual = gradients(block, x)
    assert [*actual] == [*expected]
    assert_sharded_equals_unsharded([*actual.values()], [*expected.values()], [*expected])
    return [each.forward for each in block.modules() if isinstance(vars(each).get("forward"), TiledMLP)]


def test_experts_of_a_user_run_in_tiles_and_what_routes_to_them_is_whole():
    torch.manual_seed(0)
    block = Block(Mixture(Experts(FEATURES, INNER)))
    (tiled,) = same_in_tiles(block)
    assert tiled.module is block.mlp.experts
    assert not tiled.runs_whole
    # One load for each forward, of all tokens.
    assert len(block.mlp.loads) == 3


def test_what_a_token_leaves_in_experts_is_known_by_shapes():
    assert MlpTiles([Block(Mixture(Experts(FEATURES, INNER)))]).widths() == [(2 * INNER, FEATURES)]


@pytest.mark.parametrize("most", [0.8, 25], ids=["a share", "a number"])
def test_experts_that_take_so_many_tokens_run_whole(most):
    """Routers that know nothing yet let none be full: only a crowd shows that tokens would be dropped."""
    torch.manual_seed(0)
    block = Block(Mixture(Experts(FEATURES, INNER, most)))
    with pytest.warns(UserWarning, match="mlp_tile_tokens: Experts does not take each token by itself"):
        (tiled,) = same_in_tiles(block)
    assert tiled.runs_whole


def test_experts_are_tried_again_in_a_longer_step():
    torch.manual_seed(0)
    block = Block(Mixture(Experts(FEATURES, INNER, 500)))
    (tiled,) = same_in_tiles(block)
    assert not tiled.runs_whole
    x = torch.randn(1, 1200, FEATURES, dtype=torch.float64)
    with pytest.warns(UserWarning, match="mlp_tile_tokens: Experts does not take each token by itself"):
        actual = gradients(block, x)
    block.mlp.experts.forward = tiled.forward
    expected = gradients(block, x)
    assert all(torch.equal(actual[name], each) for name, each in expected.items())


class Capacity(Experts):
    def __init__(self) -> None:
        super().__init__(FEATURES, INNER)
        self.expert_capacity = 10**6


class OfLinearLayers(nn.Module):
    """A mixture that looks like an MLP. Each token chooses an expert, which takes so many; or each expert chooses so many tokens."""

    def __init__(self, experts_choose: bool) -> None:
        super().__init__()
        self.router, self.up, self.down = (
            nn.Linear(FEATURES, EXPERTS),
            nn.Linear(FEATURES, INNER),
            nn.Linear(INNER, FEATURES),
        )
        self.experts_choose = experts_choose

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        if self.experts_choose:
            best = shares.topk(max(1, x.shape[-2] * 3 // 4), -2).indices
            kept = torch.zeros_like(shares).scatter(-2, best, 1.0)
        else:
            first = F.one_hot(shares.argmax(-1), EXPERTS)
            kept = (first.cumsum(-2) <= max(16, x.shape[-2] // 2)) * first
        inner = self.up(x).tanh().unflatten(-1, (EXPERTS, -1)) * (kept * shares)[..., None]
        return self.down(inner.flatten(-2))


@pytest.mark.parametrize("experts_choose", [False, True])
def test_a_mixture_of_linear_layers_that_drops_tokens_runs_whole(experts_choose):
    torch.manual_seed(0)
    mixture = OfLinearLayers(experts_choose)
    with torch.no_grad():
        mixture.router.weight.mul_(4)
    with pytest.warns(UserWarning, match="mlp_tile_tokens: OfLinearLayers does not take each token by itself"):
        (tiled,) = same_in_tiles(Block(mixture), 128, 16)
    assert tiled.runs_whole


def test_what_names_a_capacity_is_never_tiled():
    assert tile_mlps([Block(Mixture(Capacity()))], 4) == 0


class Listed(nn.Module):
    """Experts in a list, a shared one beside them, and logits of the router given back, too."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, INNER), nn.Tanh(), nn.Linear(INNER, FEATURES)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.gate(tokens).softmax(-1).topk(CHOSEN)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out = out.index_add(0, token, expert(tokens[token]) * weights[token, place, None])
        return out.view_as(x)


def test_of_experts_in_a_list_one_tile_of_one_is_alive():
    torch.manual_seed(0)
    block = Block(Listed())
    tiled = same_in_tiles(block)
    assert [each.module for each in tiled] == [*block.mlp.experts]
    block.float()
    x, alive = torch.randn(2, 256, FEATURES), []
    for number in range(2):
        if number == 0:  # whole
            for each in tiled:
                each.module.forward = each.forward
        else:
            for each in tiled:
                each.module.forward = each
        gradients(block, x)
        known = [*block.parameters(), *(each.grad for each in block.parameters())]
        with LiveStorages(known) as live:
            out = block(x.clone().requires_grad_())
            out.sum().backward()
        alive.append(live.peak_bytes)
    whole, parts = alive
    # 512 tokens, each of two experts: of each the inner features, and what tanh made of them.
    assert whole - parts > 512 * 2 * INNER * 4


class Drawing(nn.Module):
    """Dropout by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, INNER), nn.Linear(INNER, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self.up(x), 0.3, self.training))


def test_one_that_draws_once_it_trains_runs_whole_from_then_on_and_draws_what_it_would():
    found = []
    for is_tiled in (False, True):
        torch.manual_seed(0)
        block, x = Block(Drawing()).double(), torch.randn(1, 40, FEATURES, dtype=torch.float64)
        if is_tiled:
            tile_mlps([block], 4)
        steps = [gradients(block.eval(), x)]
        block.train()
        if is_tiled:
            with pytest.warns(UserWarning, match="Drawing does not take each token by itself"):
                steps.append(gradients(block, x))
        else:
            steps.append(gradients(block, x))
        found.append([*steps, gradients(block, x)])
    for whole, tiled in zip(*found, strict=True):
        assert_sharded_equals_unsharded([*tiled.values()], [*whole.values()], [*whole])


class Writing(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        return self.down(self.up(x.add_(1)))


class WritingItsInput(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x.add_(1)).tanh())


def test_one_that_writes_to_its_input_runs_whole():
    torch.manual_seed(0)
    assert not same_in_tiles(Block(Writing()))[0].runs_whole
    with pytest.warns(UserWarning, match="WritingItsInput writes in its forward to what it is given"):
        (tiled,) = same_in_tiles(Block(WritingItsInput()))
    assert tiled.runs_whole


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_on_the_parameters_of_experts_is_in_each_tile():
    from peft import LoraConfig, get_peft_model

    model = language_model("mixtral", "eager")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False)
    model, ids = get_peft_model(model, config).double(), torch.randint(1, 31, (2, 20))
    expected = of_step(model, ids)
    assert any("experts" in name for name in expected)
    tile_mlps(transformer_blocks(model), 7, model)
    for _ in range(2):
        actual = of_step(model, ids)
    assert_sharded_equals_unsharded([*actual.values()], [*expected.values()], [*expected])
    tiled = [each.forward for each in model.modules() if isinstance(vars(each).get("forward"), TiledMLP)]
    of_experts = [each for each in tiled if len(each.found.inputs) == 3]
    assert len(of_experts) == 2
    assert all(each._tried and not each.runs_whole for each in of_experts)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class ForOneCall(nn.Module):
    """An MLP one of whose weights is another one in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FEATURES, INNER), nn.Tanh(), nn.Linear(INNER, FEATURES))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        parametrize.register_parametrization(self.mlp[0], "weight", Doubled())
        try:
            return scale * self.mlp(x)
        finally:
            parametrize.remove_parametrizations(self.mlp[0], "weight", leave_parametrized=False)


def test_one_with_a_weight_for_this_call_alone_runs_whole():
    """The backward, which computes a tile again, would see the weight itself."""
    torch.manual_seed(0)
    assert not same_in_tiles(Block(ForOneCall()))[0]._tried
