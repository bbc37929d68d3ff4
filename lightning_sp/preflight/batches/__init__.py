"""Which batches of a fit are tried, and what the run was like when a step behind them began."""
