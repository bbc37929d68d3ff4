"""The numbers of a run, the table that shows them, and the lines below it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from lightning_sp.callbacks.memory import GIB
from lightning_sp.callbacks.resume_command import shorten_paths


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The numbers of a run; None where nothing measured it."""

    mesh: str
    steps: int
    tokens_seen: int | None
    tokens_per_s: float | None
    peak_memory_bytes: list[int]
    memory_kind: str
    perplexity_before: float | None
    perplexity_after: float | None
    perplexity_step: int
    unigram_perplexity: float | None
    folder: str
    checkpoint: str | None
    resume: str | None

    @property
    def ratio_to_unigram(self) -> float | None:
        """The last validation perplexity as a share of the unigram's."""
        if self.perplexity_after is None or self.unigram_perplexity is None:
            return None
        return self.perplexity_after / self.unigram_perplexity

    def table(self) -> Table:
        """Lay the numbers out. Nothing here needs to be copied: at 80 columns rich may break a cell between words."""
        table = Table(title="What this run did", show_header=False, title_style="bold", min_width=60)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        table.add_row("mesh", self.mesh)
        if self.tokens_seen is not None:
            table.add_row("tokens", f"{self.tokens_seen:,} in {self.steps:,} optimizer steps")
        table.add_row("tokens/s", "too few steps to measure" if not self.tokens_per_s else f"{self.tokens_per_s:,.0f}")
        if self.peak_memory_bytes:
            peaks = ", ".join(f"{rank}: {peak / GIB:.2f}" for rank, peak in enumerate(self.peak_memory_bytes))
            table.add_row("peak memory", f"GiB of rank {peaks} ({self.memory_kind})")
        table.add_row("val perplexity", self._perplexities())
        return table

    def lines(self, start_folder: str) -> list[str]:
        """Return what is to be copied: paths and the command that continues the run, each in a line of its own.

        Args:
            start_folder: paths below it are relative to it.
        """
        lines = ["files:", self.folder, "checkpoint:", self.checkpoint or "none written"]
        if self.resume:
            lines += ["resume with:", self.resume]
        return [shorten_paths(line, start_folder) for line in lines]

    def _perplexities(self) -> str:
        before = "not measured" if self.perplexity_before is None else f"{self.perplexity_before:.2f}"
        after = "no validation since"
        if self.perplexity_after is not None:
            after = f"{self.perplexity_after:.2f} after {self.perplexity_step:,} steps"
        text = f"{before} before, {after}"
        if self.unigram_perplexity is not None:
            text += f"; the unigram's is {self.unigram_perplexity:.2f}"
        if self.ratio_to_unigram is not None:
            text += f" (ratio {self.ratio_to_unigram:.2f})"
        return text
