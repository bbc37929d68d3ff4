"""Models that are tuned, averaged, saved and asked while they are sharded: what each rank runs in test_peft.py and test_live.py."""

from __future__ import annotations

import copy
import logging
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from lightning_sp.weights.quantized import is_quantized
from tests.instruments.record import Record
from tests.trainer.lightning_ranks import trainer_of
from tests.trainer.pretrained.pretrained_ranks import Told, hugging_face_config
from tests.trainer.tiny import BothWays, Plain, TokenDataset, _full


def adapter(kind: str) -> Any:
    """Return PEFT's configuration of a kind of adapter."""
    from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig

    if kind == "prompt by a network":
        return PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=8)
    if kind.startswith("prompt"):
        return PromptTuningConfig(task_type="SEQ_CLS" if "classes" in kind else "CAUSAL_LM", num_virtual_tokens=4)
    if kind == "prefix":
        return PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    if kind == "ia3":
        return IA3Config(
            task_type="CAUSAL_LM", target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]
        )
    saved = ["lm_head"] if kind == "lora, head" else None
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        use_dora=kind == "dora",
        target_modules=["q_proj", "v_proj"],
        modules_to_save=saved,
        # Zeros at first, B would hide what A gets.
        init_lora_weights=False,
    )


class Unknown(Tensor):
    """A parameter of a class of its own that says nothing of what it is made of."""


def quantization(kind: str) -> dict[str, Any]:
    """Return what `from_pretrained` is told of a base of 4 bits (bitsandbytes) or 8 (torchao)."""
    if "4-bit" in kind:
        from transformers import BitsAndBytesConfig

        config: Any = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    elif "8-bit" in kind:
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        config = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        return {}
    return {"quantization_config": config, "device_map": {"": "cpu"}, "dtype": torch.float32}


class Tuned(pl.LightningModule):
    """A pretrained Llama with what a user puts around it."""

    def __init__(self, kind: str, place: str, folder: str, **model: Any) -> None:
        super().__init__()
        self.kind, self.folder, self.options = kind, folder, model
        self.model: Any = None
        self.average: Any = None
        self.losses = Record()
        self.first: dict[str, Tensor] = {}
        self.asked: Any = None
        if place == "__init__":
            self.configure_model()

    def configure_model(self) -> None:
        from peft import get_peft_model
        from transformers import LlamaForCausalLM

        if self.model is not None:
            return
        told = {**quantization(self.kind), **self.options}
        if "another rank's" in self.kind and dist.get_rank() == 1:
            told["quantization_config"].bnb_4bit_quant_type = "fp4"
        model = LlamaForCausalLM.from_pretrained(self.folder, use_cache=False, **told)
        model.train("in evaluation" not in self.kind)
        if self.kind.startswith("checkpointing"):
            model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in self.kind})
        elif self.kind == "unknown":
            head = model.lm_head.weight.detach().as_subclass(Unknown)
            model.lm_head.weight = nn.Parameter(head, requires_grad=False)
        elif self.kind == "fails on a rank":
            if dist.is_initialized() and dist.get_rank() == 1:
                raise ValueError("no such folder on this machine")
        elif not self.kind.startswith(("full", "average", "ema")):
            model = get_peft_model(model, adapter(self.kind))
        self.model = model
        if self.kind.startswith("average"):
            self.average = AveragedModel(model)
        if self.kind.startswith("ema"):
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_train_start(self) -> None:
        self.first = plain_weights(self)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        # PEFT's logits have the virtual tokens before the others; on shards the batch has room for them too.
        logits = logits[:, -batch["shift_labels"].shape[1] :]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.average is not None:
            self.average.update_parameters(self.model)

    def on_train_end(self) -> None:
        if self.kind == "full, asked":
            prompt = torch.arange(1, 9)[None]
            self.asked = self.model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.02)


def plain_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the whole weights, but for quantized ones."""
    return {n: _full(p.detach()).clone() for n, p in module.named_parameters() if not is_quantized(p)}


def runs(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run several in one call."""
    return [run(**case) for case in cases]


def run(
    kind: str,
    folder: str,
    strategy: dict[str, Any] | None,
    world: int,
    place: str = "configure_model",
    saved: str = "",
    checkpoint: str = "",
    resume: str = "",
    model: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fit two steps, each rank from a seed of its own, and save as asked; what was begun with and what came of it.

    Args:
        kind: of `Tuned`.
        folder: of the pretrained model.
        strategy: None for plain Lightning.
        world: ranks.
        place: where the model is built.
        saved: folder of `save_pretrained`, by the two lines.
        checkpoint: path of a checkpoint.
        resume: path of one to go on from.
        model: for `from_pretrained`.
        options: of the Trainer.
    """
    torch.manual_seed(3 + (dist.get_rank() if strategy is not None else 0))
    told = Told()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    try:
        module = Tuned(kind, place, folder, **(model or {}))
        trainer = trainer_of(strategy, world, **options)
        logger.setLevel(logging.INFO)
        logger.addHandler(told)
        trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2), ckpt_path=resume or None)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        logger.removeHandler(told)
        logger.setLevel(logging.NOTSET)
    answer: dict[str, Any] = {
        "error": "",
        "told": [each for each in told.messages if "gradient checkpointing" in each],
        "first": module.first,
        "losses": module.losses,
        "asked": module.asked,
        "trained": sorted(n for n, p in module.named_parameters() if p.requires_grad),
        "optimized": len(trainer.optimizers[0].state),
        "weights": plain_weights(module),
    }
    if saved:
        answer["live"] = live_save(module.model, saved)
        if strategy is None:
            module.model.save_pretrained(saved)
            return answer
        state = trainer.strategy.whole_state_dict(module.model)
        if trainer.is_global_zero:
            module.model.save_pretrained(saved, state_dict=state)
    if checkpoint:
        trainer.save_checkpoint(checkpoint)
    return answer


def live_save(model: Any, folder: str) -> str:
    """Save without gathering first; return the refusal."""
    try:
        model.save_pretrained(folder + "_live")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def plain(folder: str, adapters: str = "") -> dict[str, Tensor]:
    """Load what was saved by plain Hugging Face, with plain PEFT's adapters, and return its weights."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM(copy.deepcopy(hugging_face_config())) if not folder else None
    model = model if model is not None else LlamaForCausalLM.from_pretrained(folder)
    if adapters:
        model = PeftModel.from_pretrained(model, adapters)
    return {name: value.detach() for name, value in model.state_dict().items()}


class Unnamed(Plain):
    """A model whose heads no attribute names, so that a forward without data finds them."""

    def __init__(self) -> None:
        super().__init__(BothWays)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())
        self.log("val_loss", loss)


def several_trainers(strategies: list[dict[str, Any] | None], world: int) -> dict[str, Any]:
    """Fit, validate and fit again, with a Trainer for each; the losses, the validation and the last mesh, or the refusal."""
    torch.manual_seed(3)
    module, validated = Unnamed(), {}
    data = DataLoader(TokenDataset(4), batch_size=2)
    try:
        for number, strategy in enumerate(strategies):
            trainer = trainer_of(strategy, world)
            if number == 1:
                validated = trainer.validate(module, data, verbose=False)[0]
            else:
                trainer.fit(module, data)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    mesh = getattr(trainer.strategy, "sequence_mesh", None)
    return {
        "error": "",
        "losses": module.losses,
        "validated": {name: float(value) for name, value in validated.items()},
        "mesh": mesh.describe() if mesh is not None else "",
        "weights": {n: _full(p.detach()).clone() for n, p in module.named_parameters()},
    }
