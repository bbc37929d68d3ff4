"""Every configuration composes and instantiates; the two commands read their command lines as they say."""

import dataclasses
import shlex
import sys
from pathlib import Path

import hydra
import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import open_dict

import lightning_sp
from lightning_sp import SequenceParallelStrategy, cli
from lightning_sp.cli.external_launcher import external_rank, external_rank_overrides
from lightning_sp.cli.hydra_command import hydra_resume_command
from lightning_sp.cli.suggest_names import suggest_names
from lightning_sp.cli.sweep import SUMMARY, quoted, run_sweep_job, sweep_job_command
from lightning_sp.config import StrategyConfig
from lightning_sp.data import SequenceShardingDataModule
from lightning_sp.errors import SequenceParallelError
from lightning_sp.text import TokenFile

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
    assert sorted(path.name for path in CONF.iterdir() if path.is_dir()) == [
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
    assert len(callbacks) == 6
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


# The Hydra command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def job(compose, tmp_path, monkeypatch):
    """A sweep's job with these overrides, as Hydra would describe it to the task."""

    def described(*overrides, argv=()):
        with hydra.initialize_config_module("lightning_sp.conf", version_base="1.3"):
            config = hydra.compose("train", overrides=list(overrides), return_hydra_config=True)
        with open_dict(config):
            config.hydra.runtime.output_dir = str(tmp_path / "it's 3")
            config.hydra.overrides.task = [item for item in overrides if not item.startswith("hydra")]
            config.hydra.overrides.hydra = ["hydra.mode=MULTIRUN", *(o for o in overrides if o.startswith("hydra"))]
        monkeypatch.setattr(HydraConfig.instance(), "cfg", config)
        monkeypatch.setattr(sys, "argv", ["/somewhere/lightning-sp-train", *argv])
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)

    return described


def test_a_sweeps_job_is_run_alone(job, tmp_path):
    """Its command has the job's overrides and folder, the flags given, and nothing that would sweep again."""
    job(
        "seed=2",
        "trainer.max_steps=3",
        "hydra.sweep.dir=x",
        "hydra.verbose=true",
        argv=[
            "-m",
            "--config-dir",
            "mine",
            "seed=1,2",
            "trainer.max_steps=3",
            "hydra.sweep.dir=x",
            "hydra.verbose=true",
        ],
    )
    command = sweep_job_command()
    at = command.index("--config-dir")
    assert command[at + 1] == "mine"
    assert command[at + 2 : -1] == ["seed=2", "trainer.max_steps=3", "hydra.verbose=true"]
    (parsed,) = OverridesParser.create().parse_overrides(command[-1:])
    assert (parsed.key_or_group, parsed.value()) == ("hydra.run.dir", str(tmp_path / "it's 3"))
    assert not any("MULTIRUN" in word or word in ("-m", "--multirun") for word in command)


@pytest.mark.parametrize("value", ["a b", "it's", "a=b,c", "\\", "x{y}"])
def test_quoted_values_are_read_back(value):
    (parsed,) = OverridesParser.create().parse_overrides([f"key={quoted(value)}"])
    assert parsed.value() == value


def test_a_failed_job_of_a_sweep_is_named(tmp_path, monkeypatch):
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", "import sys; sys.exit(3)"]
    with pytest.raises(SequenceParallelError, match=f"job {tmp_path.name} .* exit code 3: .*sys.exit"):
        run_sweep_job(command, tmp_path)
    assert run_sweep_job([sys.executable, "-c", ""], tmp_path) is None
    (tmp_path / SUMMARY).write_text('{"perplexity_after": 12.5}')
    assert run_sweep_job([sys.executable, "-c", ""], tmp_path) == 12.5


def test_a_sweep_under_torchrun_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SequenceParallelError, match="--multirun starts every job itself"):
        run_sweep_job([sys.executable, "-c", ""], tmp_path)


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, None),  # a child of Lightning's launcher: it was told its folder
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, 3),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
    ],
)
def test_ranks_that_others_started_make_no_folder_of_their_own(environment, rank):
    assert external_rank(environment) == rank
    overrides = external_rank_overrides(environment)
    assert overrides == (["hydra.run.dir=.", "hydra.output_subdir=null"] if rank else [])


def test_resume_command_keeps_the_overrides_and_replaces_the_end(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/lightning-sp-train"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    overrides = ["data.source=[a b]", "trainer.max_steps=5", "ckpt_path=old", "+trainer.max_time=1", "model=gpt_tiny"]
    command = hydra_resume_command(overrides)
    assert shlex.split(command)[-5:] == [
        "data.source=[a b]",
        "+trainer.max_time=1",
        "model=gpt_tiny",
        "ckpt_path={checkpoint}",
        "trainer.max_steps={max_steps}",
    ]


def test_unknown_names_get_the_nearest():
    lines = list(
        suggest_names(["strategy.ulyses_size=2", "model=gpt_tiny", "model.model.dropot=1", "data.sequence_length=8"])
    )
    assert lines == [
        "'strategy.ulyses_size' is no option here; did you mean 'strategy.ulysses_size'?",
        "'model.model.dropot' is no option here; did you mean 'model.model.dropout'?",
    ]
    assert list(suggest_names(["model=lama", "+new.key=1", "seed=1"])) == []
    assert list(suggest_names(["data=[broken"])) == []


# The Lightning CLI ---------------------------------------------------------------------------------------------------


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["lightning-sp", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_cli_prints_its_configuration(monkeypatch, capsys):
    strategy = "--trainer.strategy=lightning_sp.SequenceParallelStrategy"
    arguments = ["fit", strategy, "--trainer.strategy.ring_size=2", "--data.sequence_length=64", "--print_config"]
    assert run_main(monkeypatch, *arguments) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["class_path"] == "lightning_sp.models.CausalLM"
    assert printed["data"]["init_args"]["sequence_length"] == 64
    options = printed["trainer"]["strategy"]["init_args"]
    assert options.pop("process_group_backend", None) is None
    assert options == dataclasses.asdict(StrategyConfig(ring_size=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "--trainer.strategi", "x"], "--trainer.strategi; did you mean '--trainer.strategy'?"),
        (["fit", "--trainer.max_stepz=3"], "--trainer.max_stepz; did you mean '--trainer.max_steps'?"),
    ],
)
def test_cli_names_what_it_does_not_know(monkeypatch, capsys, arguments, message):
    assert run_main(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err


def test_cli_prepares_token_files(monkeypatch, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello")
    monkeypatch.setattr(
        sys, "argv", ["lightning-sp", "prepare", str(tmp_path / "a.txt"), "--output", str(tmp_path / "t")]
    )
    cli.main()
    assert "1 documents, 6 tokens from 5 bytes" in capsys.readouterr().out
    assert TokenFile(tmp_path / "t.idx").read(0, 0, 6).tolist() == [*b"hello", 256]


def test_cli_prepare_refuses_in_one_line(monkeypatch, tmp_path, capsys):
    assert run_main(monkeypatch, "prepare", str(tmp_path / "none.txt"), "--output", str(tmp_path / "t")) == 1
    error = capsys.readouterr().err
    assert error.startswith("lightning-sp prepare: ")
    assert "none.txt" in error
