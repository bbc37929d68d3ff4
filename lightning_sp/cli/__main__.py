"""`python -m lightning_sp.cli` is `lightning-sp`."""

from lightning_sp.cli import main

if __name__ == "__main__":
    main()
