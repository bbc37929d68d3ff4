"""An unknown option is named with the nearest one."""

from lightning_sp.cli.suggest_names import suggest_names


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
