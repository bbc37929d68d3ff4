"""The summary as lines and table."""

import dataclasses

from lightning_sp.callbacks.summary import RunSummary


def summary_of(**values):
    """A summary in which nothing was measured, but for the values given."""
    nothing = dict.fromkeys(field.name for field in dataclasses.fields(RunSummary))
    return RunSummary(**nothing | {"mesh": "mesh", "steps": 1, "peak_memory_bytes": [], "perplexity_step": 0} | values)


def test_summary_of_a_run_that_nothing_measured():
    nothing = summary_of(folder="/home/ada/runs/1")
    assert nothing.ratio_to_unigram is None
    assert nothing.table().row_count == 3
    assert nothing.lines("/home/ada") == ["files:", "runs/1", "checkpoint:", "none written"]


def test_what_is_to_be_copied_stands_whole_in_lines_of_its_own():
    command = (
        f"lightning-sp-train {'trainer.max_steps=80 ' * 6}ckpt_path='/home/ada/with space/{'long' * 30}/step-8.ckpt'"
    )
    summary = summary_of(folder="/home/ada/with space", checkpoint="/elsewhere/step-8.ckpt", resume=command)
    assert summary.lines("/home/ada") == [
        "files:",
        "with space",
        "checkpoint:",
        "/elsewhere/step-8.ckpt",
        "resume with:",
        command.replace("/home/ada/", ""),
    ]
