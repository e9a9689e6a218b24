"""The command `dflash-train`: trains by default; its other tools are in SUBCOMMANDS.

Whatever ends a training, the last line of the log says in one sentence what it was and what to do, and the
exit code tells the unit: 0 complete or stopped, 75 worth another attempt, 78 cannot start as configured,
anything else a fault of ours.
"""

import argparse
import faulthandler
import importlib
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from dflash_agent import runfile

from dflash_trainer import __version__, notify
from dflash_trainer.errors import (
    EXIT_CANNOT_START,
    EXIT_TRY_AGAIN,
    CannotStart,
    TryAgain,
    is_of_the_gpu,
    is_out_of_memory,
)
from dflash_trainer.journal import configure, log

SUBCOMMANDS = ("train", "prepare", "inspect", "eval", "export", "check", "import-gguf")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
        words = ["train", *words]
    args = parse(words)
    faulthandler.enable()
    return guarded(args.run, args)


def parse(words: list[str]) -> argparse.Namespace:
    """The parsed command line; args.run is the function to call with it."""
    parser = argparse.ArgumentParser(
        "dflash-train",
        description="Trains a DFlash drafter against a frozen target. Without a subcommand: train.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="{" + ",".join(SUBCOMMANDS) + "}", required=True)

    train = commands.add_parser("train", help="train (the default)")
    add_run_arguments(train)
    train.add_argument(
        "--fresh", action="store_true", help="put what is in the output directory aside and begin anew"
    )
    train.set_defaults(run=run_train)

    check = commands.add_parser("check", help="check data, target and settings of a run; starts nothing")
    add_run_arguments(check)
    check.add_argument("--json", action="store_true", help="one JSON object a line")
    check.set_defaults(run=run_check)

    for name, module, text in (
        ("prepare", "prepare", "let the target write completions for prompts, and make a dataset of them"),
        ("inspect", "inspection", "show what a dataset holds: lengths, problems, and rows as text"),
        ("eval", "evaluate", "measure a drafter's acceptance length by speculative decoding"),
        ("export", "export", "write a drafter to publish or to serve, with a card, or convert it"),
        ("import-gguf", "gguf_import", "turn a GGUF model into a Hugging Face directory"),
    ):
        tool = commands.add_parser(name, help=text, description=text)
        if words[:1] == [name]:  # each brings imports that the others do not need
            tools = importlib.import_module(f"dflash_trainer.{module}")
            tools.add_arguments(tool)
            tool.set_defaults(run=tools.run)
    return parser.parse_args(words)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The run file, and the reference flags, each of which overrides a key of it."""
    parser.add_argument("--run-file", type=Path, metavar="FILE", help="run file; the flags below override it")
    runfile.add_flags(parser, without=runfile.OF_THE_AGENT)


def load_run(args: argparse.Namespace) -> runfile.RunFile:
    """The run that a command line describes. Raises ConfigError."""
    values = {key: value for key, value in vars(args).items() if "." in key}
    if args.run_file is not None:
        return runfile.load(args.run_file, values)
    return runfile.from_flags("by-hand", values)


def run_train(args: argparse.Namespace) -> int:
    """`dflash-train [train]`."""
    run = load_run(args)
    configure(run.name)
    from dflash_trainer.train import train

    train(run, args.fresh)
    return 0


def run_check(args: argparse.Namespace) -> int:
    """`dflash-train check`."""
    from dflash_trainer.inputs import check

    refused = False
    for finding in check(load_run(args)):
        refused |= finding.severity == "refuse"
        row = {"code": finding.code, "severity": finding.severity, "text": finding.text, "hint": finding.hint}
        print(json.dumps(row) if args.json else finding.line(), flush=True)
    return EXIT_CANNOT_START if refused else 0


def guarded(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """run(args), with every way to fail turned into one last line and an exit code."""
    training = run is run_train
    try:
        return run(args)
    except (runfile.ConfigError, CannotStart) as error:
        return failed(str(error), EXIT_CANNOT_START)
    except TryAgain as error:
        return failed(str(error), EXIT_TRY_AGAIN)
    except KeyboardInterrupt:
        return failed("interrupted", 130)
    except OSError as error:
        traceback.print_exc()
        return failed(
            f"input or output failed: {error}{'; the next attempt goes on from the newest checkpoint' * training}",
            EXIT_TRY_AGAIN,
        )
    except Exception as error:  # noqa: BLE001 - the last line of the log has to say what it was
        traceback.print_exc()
        if is_out_of_memory(error):
            return failed(
                f"GPU out of memory: {first_line(error)}"
                f"{'; one sequence does not fit: lower --max-length or --max-anchors' * training}",
                EXIT_TRY_AGAIN,
            )
        if is_of_the_gpu(error):
            return failed(
                f"the GPU failed: {first_line(error)}; see `dflashctl check` and `journalctl -k -g Xid`"
                f"{'; the next attempt waits for a clean one' * training}",
                EXIT_TRY_AGAIN,
            )
        return failed(f"unexpected {type(error).__name__}: {first_line(error)}; the stack is above", 1)


def first_line(error: Exception) -> str:
    """The first line of an exception's message."""
    return str(error).strip().partition("\n")[0]


def failed(reason: str, code: int) -> int:
    """Says why in the log and in `systemctl status`; returns the code."""
    notify.status(reason)
    log(reason, event="failed", priority=3, exit_code=code)
    return code
