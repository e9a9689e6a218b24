"""The log: journald's own protocol on a real socket, and plain lines elsewhere."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
from typing import Any

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a private /run needs root")
DEADLINE = 120

# journald's end of its socket, in a mount namespace of its own: binds it, lets the code in $CODE log to it, and
# prints the entries as `journalctl -o json` would. A big entry comes as a sealed memory file.
JOURNALD = """
import json, os, socket, struct
os.makedirs("/run/systemd/journal")
journald = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
journald.bind("/run/systemd/journal/socket")
stream = os.fstat(2)
os.environ["JOURNAL_STREAM"] = f"{stream.st_dev}:{stream.st_ino}"
exec(os.environ["CODE"])
journald.setblocking(False)
while True:
    try:
        data, descriptors, _, _ = socket.recv_fds(journald, 1 << 20, 1)
    except BlockingIOError:
        break
    if descriptors:
        with open(descriptors[0], "rb") as file:
            file.seek(0)
            data = file.read()
    entry = {"by memory file": bool(descriptors)}
    while data:
        head, _, rest = data.partition(b"\\n")
        name, equals, value = head.partition(b"=")
        if equals:
            data = rest
        else:
            size, = struct.unpack("<Q", rest[:8])
            value, data = rest[8:8 + size], rest[8 + size + 1:]
        entry[name.decode()] = value.decode()
    print(json.dumps(entry))
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own, whose standard error is no terminal."""
    variables = {k: v for k, v in os.environ.items() if k != "JOURNAL_STREAM"}
    variables |= {"PYTHONPATH": os.pathsep.join(sys.path), **environment}
    words = [sys.executable, "-c", code]
    return subprocess.run(
        words, env=variables, capture_output=True, text=True, timeout=DEADLINE, check=True, errors="replace"
    )


def entries(code: str) -> list[dict[str, Any]]:
    """What journald gets from the code."""
    shell = "mount -t tmpfs tmpfs /run && exec " + '"$@"'
    words = ["unshare", "--mount", "sh", "-c", shell, "sh", sys.executable, "-c", JOURNALD]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CODE": code}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_root
def test_an_entry_carries_the_message_and_every_field() -> None:
    (entry,) = entries(
        "from dflash_trainer import journal\n"
        "journal._run_name = 'run1'\n"
        "journal.log('step 240', event='step', step=240, loss=2.8123456789, tokens_per_s=16123.4567, lr=6e-4)"
    )
    assert {name: value for name, value in entry.items() if not name.startswith("CODE_")} == {
        "by memory file": False,
        "MESSAGE": "step 240",
        "PRIORITY": "6",
        "SYSLOG_IDENTIFIER": "dflash-train",
        "DFLASH_EVENT": "step",
        "DFLASH_RUN": "run1",
        "DFLASH_STEP": "240",
        "DFLASH_LOSS": "2.81235",
        "DFLASH_TOKENS_PER_S": "16123.5",
        "DFLASH_LR": "0.0006",
    }


@needs_root
def test_lines_equal_signs_and_other_scripts_survive() -> None:
    message = "first line\nPRIORITY=0\n\nstep · 1 % = ünï\n"
    (entry,) = entries(f"from dflash_trainer.journal import log\nlog({message!r}, event='x', note='a\\nb')")
    assert entry["MESSAGE"] == message
    assert entry["DFLASH_NOTE"] == "a\nb"
    assert entry["PRIORITY"] == "6"


@needs_root
def test_a_path_that_is_no_utf8_is_written_with_an_escape() -> None:
    (entry,) = entries(
        "from dflash_trainer.journal import log\nlog('no ' + os.fsdecode(b'/data/\\xff'), event='x')"
    )
    assert entry["MESSAGE"] == r"no /data/\udcff"


@needs_root
@pytest.mark.parametrize("size", [300_000, 9_000_000])
def test_a_message_of_any_size_arrives(size: int) -> None:
    """The larger one is beyond what a socket takes, and comes as a memory file."""
    (entry,) = entries(f"from dflash_trainer.journal import log\nlog('x' * {size}, event='x')")
    assert entry["MESSAGE"] == "x" * size
    assert entry["by memory file"] == (size > 8 << 20)


@needs_root
def test_without_journald_the_line_goes_to_stderr_with_its_priority() -> None:
    code = (
        "from dflash_trainer.journal import log\n"
        "log('before', event='x')\n"
        "journald.close()\n"
        "read, write = os.pipe()\n"
        "kept = os.dup(2)\n"
        "import sys; sys.stderr = os.fdopen(write, 'w')\n"
        "log('it goes on', event='x', priority=4)\n"
        "sys.stderr.close()\n"
        "print(json.dumps(os.read(read, 100).decode()))\n"
        "raise SystemExit\n"
    )
    assert entries(code) == ["<4>it goes on\n"]


@pytest.mark.parametrize("stream", ["", "1:2", "nonsense"])
def test_elsewhere_it_is_a_plain_line(stream: str) -> None:
    """Also where $JOURNAL_STREAM is inherited but stderr was sent elsewhere."""
    code = "from dflash_trainer.journal import log; log('step 1 · ünï', event='step', step=1, priority=3)"
    assert run(code, JOURNAL_STREAM=stream).stderr == "step 1 · ünï\n"


@pytest.mark.parametrize("stderr", ["os.close(2)", "sys.stderr.close()", "os.dup2(os.open('/dev/full', 1), 2)"])
def test_a_log_that_nobody_can_take_does_not_end_the_run(stderr: str) -> None:
    code = f"import os, sys; from dflash_trainer.journal import log; {stderr}; log('x', event='x'); print('on')"
    assert run(code).stdout == "on\n"


LIBRARIES = """
import logging, warnings, sys
from dflash_trainer.journal import configure
configure("run1")
import datasets, transformers, huggingface_hub
configure("run1")
logging.getLogger("transformers.models.x").warning("slow path\\nis taken")
logging.getLogger("transformers").info("not shown")
logging.getLogger("datasets.y").warning("odd %s", "column")
logging.getLogger("huggingface_hub").error("refused")
logging.getLogger("anything").warning("bad %s %s", 1)
warnings.warn("old way", UserWarning)
list(transformers.utils.logging.tqdm(range(3)))
datasets.Dataset.from_dict({"a": [1, 2]}).map(lambda row: row)
"""


def test_what_libraries_say_comes_once_and_without_bars() -> None:
    lines = run(LIBRARIES, CI="").stderr
    assert lines.count("slow path") == 1
    assert "transformers.models.x: slow path" in lines
    assert lines.count("datasets.y: odd column") == lines.count("odd column") == 1
    assert lines.count("huggingface_hub: refused") == lines.count("refused") == 1
    assert lines.count("UserWarning: old way") == 1
    assert "not shown" not in lines
    assert "%|" not in lines
    assert "it/s" not in lines


@needs_root
def test_what_libraries_say_is_an_entry_with_its_priority() -> None:
    got = entries(
        "import logging\nfrom dflash_trainer.journal import configure\nconfigure('run1')\n"
        "logging.getLogger('transformers').warning('slow')\nlogging.getLogger('datasets').error('bad')\n"
    )
    assert [(e["MESSAGE"], e["PRIORITY"], e["DFLASH_EVENT"], e["DFLASH_RUN"]) for e in got] == [
        ("transformers: slow", "4", "library", "run1"),
        ("datasets: bad", "3", "library", "run1"),
    ]


def test_on_a_terminal_the_line_stands_above_the_bar() -> None:
    code = (
        "from dflash_trainer.metrics import Progress\n"
        "from dflash_trainer.journal import log\n"
        "with Progress(0, 10) as bar:\n"
        "    bar.advance_to(4, 2.5)\n"
        "    log('saved step 4', event='saved')\n"
    )
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, stderr=slave, timeout=DEADLINE, check=True)
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 4096):
            shown += part
    except OSError:  # how a terminal ends
        pass
    os.close(master)
    text = shown.decode()
    assert "4/10" in text
    assert "loss 2.500" in text
    assert re.search(r"\rsaved step 4\r\n", text)
