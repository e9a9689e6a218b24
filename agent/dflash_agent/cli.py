"""The command dflashctl: makes and checks runs, shows them, and keeps the trainer's runtime."""

import argparse
import io
import itertools
import os
import pwd
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from dflash_agent import (
    __version__,
    checkpoints,
    manager,
    outputs,
    plot,
    preflight,
    report,
    runfile,
    runtime,
    status,
    story,
    top,
)
from dflash_agent.checks import USER, check_run, findings_of
from dflash_agent.config import load_config
from dflash_agent.curves import read_curves
from dflash_agent.findings import Finding
from dflash_agent.runfile import ConfigError
from dflash_agent.verdict import take_snapshot

EXIT_FAILED = 1
EXIT_REFUSED = 78
WIDEST, PANEL_HEIGHT = 120, 10  # of a plot in the terminal, characters


class Refused(Exception):
    """A command that cannot be done; str() is one line."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    args = build_parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no such character shows another one
    try:
        code: int = args.run(args)
        return code
    except (ConfigError, Refused) as error:
        print(f"dflashctl: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except (runtime.RuntimeFailed, story.JournalUnread) as error:
        print(f"dflashctl: {error}", file=sys.stderr)
        return EXIT_FAILED
    except PermissionError as error:
        words = " ".join(sys.argv[1:])
        print(
            f"dflashctl: {error.filename}: {error.strerror}; this needs root: sudo dflashctl {words}",
            file=sys.stderr,
        )
        return EXIT_REFUSED
    except BrokenPipeError:
        return EXIT_FAILED
    except OSError as error:
        print(f"dflashctl: {error}", file=sys.stderr)
        return EXIT_FAILED


def build_parser() -> argparse.ArgumentParser:
    """The command line; args.run is the function of the subcommand."""
    parser = argparse.ArgumentParser("dflashctl", description="Makes, checks and shows DFlash training runs.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    new = commands.add_parser("new", help="make a run file from flags")
    new.add_argument("name", metavar="NAME")
    new.add_argument("--force", action="store_true", help="replace a run file; the old one becomes NAME.toml~")
    runfile.add_flags(new)
    new.set_defaults(run=run_new)

    verify = commands.add_parser("verify", help="check a run, a line a check; starts nothing")
    verify.add_argument("name", metavar="NAME")
    verify.set_defaults(run=run_verify)

    check = commands.add_parser("check", help="show the GPUs and who holds them; exit 0 if they are clean, else 1")
    check.add_argument("name", metavar="NAME", nargs="?", help="judge them for this run")
    check.add_argument("--json", action="store_true", help="for programs")
    check.set_defaults(run=run_check)

    show = commands.add_parser("status", help="show runs: state, step, loss, rate, checkpoint, attempts")
    show.add_argument("name", metavar="NAME", nargs="?")
    show.add_argument("--json", action="store_true", help="for programs")
    show.set_defaults(run=run_status)

    explain = commands.add_parser("explain", help="tell a run's attempts from the journal: steps, ends, restarts")
    explain.add_argument("name", metavar="NAME")
    explain.add_argument("--json", action="store_true", help="for programs")
    explain.set_defaults(run=run_explain)

    drawn = commands.add_parser("plot", help="draw the curves of one run or several, here or as a picture")
    drawn.add_argument("names", metavar="NAME", nargs="+")
    drawn.add_argument("--output", type=Path, metavar="FILE", help="a picture (PNG), by matplotlib")
    drawn.set_defaults(run=run_plot)

    live = commands.add_parser("top", help="show runs, stages and GPUs, anew every second; q ends it")
    live.add_argument("--once", action="store_true", help="one frame, as plain text")
    live.set_defaults(run=run_top)

    saved = commands.add_parser("checkpoints", help="read a run's checkpoints; exit 1 if all are damaged")
    saved.add_argument("name", metavar="NAME")
    saved.add_argument("--json", action="store_true", help="for programs")
    saved.set_defaults(run=run_checkpoints)

    fresh = commands.add_parser("fresh", help="put a run's output aside, so that its next start begins anew")
    fresh.add_argument("name", metavar="NAME")
    fresh.set_defaults(run=run_fresh)

    kept = commands.add_parser("runtime", help="the trainer's Python and libraries")
    actions = kept.add_subparsers(required=True, metavar="ACTION")
    actions.add_parser("install", help="install what the packages hold, if it is not yet").set_defaults(
        run=run_runtime_install
    )
    actions.add_parser("list", help="show the installed ones").set_defaults(run=run_runtime_list)
    back = actions.add_parser("rollback", help="use the one before, or the one named, for new starts")
    back.add_argument("id", nargs="?")
    back.set_defaults(run=run_runtime_rollback)
    return parser


def need_root() -> None:
    """Raises Refused for anybody else."""
    if os.geteuid() != 0:
        raise Refused(f"this needs root: sudo dflashctl {' '.join(sys.argv[1:])}")


def run_new(args: argparse.Namespace) -> int:
    """`dflashctl new NAME …`."""
    values = {key: value for key, value in vars(args).items() if "." in key}
    path = runfile.path_of(args.name)
    run = runfile.from_flags(args.name, values)
    need_root()
    if path.exists():
        if not args.force:
            raise Refused(f"{path} exists; edit it, or replace it with --force")
        shutil.copy2(path, path.with_name(path.name + "~"))
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(runfile.render(run))
    fresh.chmod(0o644)
    fresh.replace(path)
    print(f"{path} written. Next:")
    print(f"  dflashctl verify {args.name}")
    print(f"  systemctl start dflash-train@{args.name}")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """`dflashctl verify NAME`."""
    path = runfile.path_of(args.name)
    run = runfile.load(path)
    print(Finding("config", "ok", f"{path} is well-formed").line())
    refused = show_findings(itertools.chain(quick_checks(run, path), deep_checks(path)))
    step = outputs.completed(run)
    if step is not None and not refused:
        print(
            f"complete: step {step} was the last, a start does nothing; to train anew: dflashctl fresh {args.name}"
        )
        return 0
    refused |= show_findings(checkpoint_checks(run, path))
    choice = preflight.judge_run(run, take_snapshot(load_config()))
    show_findings(choice.findings)
    if refused or choice.hopeless or (choice.refusals and run.preflight.on_dirty == "fail"):
        print("the run would be refused")
        return EXIT_REFUSED
    if choice.refusals:
        print(f"a start would wait up to {run.preflight.wait} for clean GPUs, and try again later")
        return EXIT_FAILED
    print(f"ready: systemctl start dflash-train@{args.name}")
    return 0


def show_findings(findings: Iterable[Finding]) -> bool:
    """Prints each finding as soon as it is known; whether one of them refuses."""
    refused = False
    for finding in findings:
        refused |= finding.severity == "refuse"
        print(finding.line(), flush=True)
    return refused


def quick_checks(run: runfile.RunFile, path: Path) -> Iterator[Finding]:
    """The launcher's checks, with the rights of the user that trains: root could read what it cannot."""
    if os.geteuid() != 0:
        if pwd.getpwuid(os.geteuid()).pw_name != USER:
            yield Finding("config", "warn", f"not root: the files are checked with your rights, not {USER}'s")
        yield from check_run(run)
        return
    yield from findings_of([runtime.PYTHON, "-m", "dflash_agent.checks", str(path)])


def deep_checks(path: Path) -> Iterator[Finding]:
    """The trainer's own checks of the data and the settings, if there is a runtime to run them."""
    current = runtime.current()
    if current is None:
        return
    yield from findings_of(
        [str(current / "bin" / "python"), "-m", "dflash_trainer", "check", "--json", "--run-file", str(path)]
    )


def checkpoint_checks(run: runfile.RunFile, path: Path) -> Iterator[Finding]:
    """The newest checkpoint, its checksums included, with the rights of the user that trains."""
    if os.geteuid() != 0:
        yield checkpoints.check_newest(run)
        return
    yield from findings_of([runtime.PYTHON, "-m", "dflash_agent.checkpoints", str(path)])


def need_run(name: str) -> None:
    """Raises Refused if there is no run file of that name."""
    path = runfile.path_of(name)
    if not path.exists():
        raise Refused(f"{path} does not exist; runs are: {', '.join(status.all_runs()) or 'none'}")


def run_status(args: argparse.Namespace) -> int:
    """`dflashctl status [NAME]`."""
    if args.name is not None:
        need_run(args.name)
    names = [args.name] if args.name else status.all_runs()
    rows = [status.run_status(name, runfile.path_of(name)) for name in names]
    if args.json:
        print(status.as_json(rows))
    elif rows:
        print(status.table(rows))
    else:
        print(f"no runs in {runfile.RUNS_DIR}; make one: dflashctl new NAME --target-model … --data-dir …")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """`dflashctl check [NAME]`."""
    run = runfile.load(runfile.path_of(args.name)) if args.name else None
    snapshot = take_snapshot(load_config())
    findings = report.node_findings(snapshot) if run is None else list(preflight.judge_run(run, snapshot).findings)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(report.as_json(snapshot, findings) if args.json else report.table(snapshot, findings, colour))
    return EXIT_FAILED if any(finding.severity == "refuse" for finding in findings) else 0


def run_explain(args: argparse.Namespace) -> int:
    """`dflashctl explain NAME`."""
    need_run(args.name)
    unit = manager.unit_of(args.name)
    try:
        now = manager.unit_state(unit)
    except manager.ManagerAway:
        now = None
    told = story.attempts(story.read(unit), now)
    print(story.as_json(args.name, told) if args.json else story.table(args.name, told))
    return 0


def run_plot(args: argparse.Namespace) -> int:
    """`dflashctl plot NAME …`."""
    runs = []
    for name in args.names:
        need_run(name)
        output = Path(runfile.load(runfile.path_of(name)).output.dir)
        try:
            curves = read_curves(name, output)
        except FileNotFoundError:
            curves = None
        if curves is None or not curves.by_key:
            raise Refused(f"{name} has no metrics yet in {output}; they come with its first lines of the log")
        runs.append(curves)
    if args.output is not None:
        try:
            plot.picture(runs, args.output)
        except (plot.NoMatplotlib, ValueError) as error:
            raise Refused(" ".join(str(error).split())) from error
        print(f"{args.output} written")
        return 0
    columns, _ = shutil.get_terminal_size()
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(plot.text(runs, min(columns, WIDEST), PANEL_HEIGHT, colour))
    return 0


def run_top(args: argparse.Namespace) -> int:
    """`dflashctl top`."""
    if args.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        top.once()
        return 0
    return top.run()


def run_checkpoints(args: argparse.Namespace) -> int:
    """`dflashctl checkpoints NAME`."""
    output = Path(runfile.load(runfile.path_of(args.name)).output.dir)
    found: list[checkpoints.Checkpoint] = []
    used = None
    for one in checkpoints.survey(output):
        used = used or (None if one.reason else one)
        if not args.json:
            print(*([] if found else [checkpoints.HEAD]), checkpoints.row(one, one is used), sep="\n", flush=True)
        found.append(one)
    if args.json:
        print(checkpoints.as_json(found, used))
    elif not found:
        print(f"no checkpoints in {output}: a start begins at step 0")
    return EXIT_FAILED if found and used is None else 0


def run_fresh(args: argparse.Namespace) -> int:
    """`dflashctl fresh NAME`."""
    run = runfile.load(runfile.path_of(args.name))
    need_root()
    try:
        state = manager.unit_state(manager.unit_of(args.name)).active
    except manager.ManagerAway as error:
        raise Refused(f"systemd cannot be asked whether {args.name} is running ({error})") from error
    if state not in ("inactive", "failed"):
        raise Refused(f"{args.name} is {state}; first: systemctl stop {manager.unit_of(args.name)}")
    aside = outputs.set_aside(Path(run.output.dir))
    print(f"nothing to put aside in {run.output.dir}" if aside is None else f"the earlier output is in {aside}")
    return 0


def run_runtime_install(_args: argparse.Namespace) -> int:
    """`dflashctl runtime install`."""
    need_root()
    runtime.install(runtime.source(), say=lambda text: print(text, flush=True))
    return 0


def run_runtime_list(_args: argparse.Namespace) -> int:
    """`dflashctl runtime list`."""
    now, used = runtime.current(), runtime.in_use(runtime.RUNTIME_DIR)
    there = runtime.complete_ones()
    for path in there:
        marks = [text for holds, text in ((path == now, "current"), (path.resolve() in used, "in use")) if holds]
        print(f"{path.name}  {', '.join(marks)}".rstrip())
    if not there:
        print("no runtime is installed: sudo dflashctl runtime install")
    return 0


def run_runtime_rollback(args: argparse.Namespace) -> int:
    """`dflashctl runtime rollback [ID]`."""
    need_root()
    print(f"runtime {runtime.rollback(args.id).name} is in use for new starts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
