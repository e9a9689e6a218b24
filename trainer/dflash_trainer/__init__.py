"""Trains a DFlash block-diffusion drafter online against a frozen target (arXiv 2602.06036)."""

from dflash_agent import __version__

__all__ = ["__version__"]
