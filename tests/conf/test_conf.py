"""Every configuration composes and instantiates."""

import dataclasses
from pathlib import Path

import hydra
import pytest
import yaml
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningModule, Trainer

import lightning_sp
from lightning_sp import SequenceParallelStrategy
from lightning_sp.config import StrategyConfig
from lightning_sp.data import SequenceShardingDataModule

CONF = Path(lightning_sp.__file__).parent / "conf"


GROUPS = {
    group: sorted(file.stem for file in (CONF / group).glob("*.yaml")) for group in ("model", "data", "callbacks")
}


# Lightning 2.6's own call of torch's pytree.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


@pytest.fixture
def compose(tmp_path):
    def composed(*overrides):
        with hydra.initialize_config_module("lightning_sp.conf", version_base="1.3"):
            config = hydra.compose("train", overrides=[f"run_dir={tmp_path}", "vocab_size=257", *overrides])
        return config

    return composed


def test_groups_are_those_of_the_readme():
    # Bytecode lies there once the package of configurations was imported, by another test say.
    assert sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "__pycache__") == [
        "callbacks",
        "data",
        "experiment",
        "model",
        "strategy",
        "trainer",
    ]


def test_strategy_yaml_holds_every_option_with_its_default():
    written = yaml.safe_load((CONF / "strategy" / "sequence_parallel.yaml").read_text())
    assert written.pop("_target_") == "lightning_sp.SequenceParallelStrategy"
    assert written == dataclasses.asdict(StrategyConfig())
    strategy = instantiate({"_target_": "lightning_sp.SequenceParallelStrategy", **written})
    assert isinstance(strategy, SequenceParallelStrategy)
    assert strategy.config == StrategyConfig()


@pytest.mark.parametrize("name", GROUPS["model"])
def test_models_instantiate_and_build(compose, name):
    config = compose(f"model={name}", "data.sequence_length=64")
    module = instantiate(config.model, _convert_="all")
    module.configure_model()
    assert isinstance(module, LightningModule)
    assert module.max_steps == config.trainer.max_steps
    sizes = {parameter.shape for parameter in module.parameters()}
    assert (257, 128) in sizes


@pytest.mark.parametrize("name", GROUPS["data"])
def test_data_instantiate(compose, name, tmp_path):
    source = [] if name == "stdlib" else [f"data.source={tmp_path}"]
    data = instantiate(compose(f"data={name}", *source).data, _convert_="all")
    assert isinstance(data, SequenceShardingDataModule)
    assert data.sequence_length == 8192


@pytest.mark.parametrize("name", ["text", "tokens"])
def test_data_without_a_source_says_so(compose, name):
    with pytest.raises(Exception, match=r"data\.source"):
        instantiate(compose(f"data={name}").data)


@pytest.mark.parametrize("name", GROUPS["callbacks"])
def test_callbacks_instantiate(compose, name):
    callbacks = [instantiate(item) for item in compose(f"callbacks={name}").callbacks.values()]
    assert len(callbacks) == (6 if name == "default" else len(compose(f"callbacks={name}").callbacks)) > 0
    assert all(isinstance(callback, Callback) for callback in callbacks)


@pytest.mark.parametrize("strategy", ["sequence_parallel", "single_device"])
def test_trainer_on_a_cpu_instantiates(compose, strategy):
    config = compose(f"strategy={strategy}")
    trainer = instantiate(config.trainer, strategy=instantiate(config.strategy))
    assert isinstance(trainer, Trainer)
    assert trainer.num_devices == {"sequence_parallel": 2, "single_device": 1}[strategy]
    assert isinstance(trainer.strategy, SequenceParallelStrategy) == (strategy == "sequence_parallel")


def test_trainer_on_gpus_composes(compose):
    config = compose("trainer=gpu")
    assert (config.trainer.accelerator, config.trainer.devices, config.trainer.precision) == (
        "gpu",
        "auto",
        "bf16-mixed",
    )


@pytest.mark.parametrize("name", sorted(file.stem for file in (CONF / "experiment").glob("*.yaml")))
@pytest.mark.parametrize("model", GROUPS["model"])
def test_experiments_compose_with_every_model(compose, name, model):
    config = compose(f"experiment={name}", f"model={model}")
    instantiate(config.model, _convert_="all").configure_model()
    assert isinstance(instantiate(config.strategy), SequenceParallelStrategy)
    assert config.trainer.max_steps % config.trainer.val_check_interval == 0


def test_default_ends_with_a_validation(compose):
    trainer = compose().trainer
    assert trainer.max_steps % trainer.val_check_interval == 0
