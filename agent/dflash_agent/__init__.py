"""The node agent: run files, checks before a start, the trainer's runtime, and dflashctl."""

__version__ = "0.1.0"
