"""The Lightning CLI reads its command line."""

import dataclasses
import sys

import pytest
import yaml

from lightning_sp import cli
from lightning_sp.config import StrategyConfig

# Lightning 2.6's own call of torch's pytree.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


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
        (["fit", "--data.sequence_lenght=64"], "sequence_lenght; did you mean 'sequence_length'?"),
        (
            ["fit", "--trainer.strategy=lightning_sp.SequenceParallelStrategy", "--trainer.strategy.ulyses_size=2"],
            "ulyses_size; did you mean 'ulysses_size'?",
        ),
        (["fit", "--model=lightning_sp.models.CausalLLM"], "CausalLLM; did you mean 'CausalLM'?"),
    ],
)
def test_cli_names_what_it_does_not_know(monkeypatch, capsys, arguments, message):
    assert run_main(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err
