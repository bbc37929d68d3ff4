"""The Hydra configuration; a package, so that `pkg://lightning_sp.conf` finds it in the wheel (lightning_sp/conf links here)."""
