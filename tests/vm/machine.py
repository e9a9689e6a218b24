"""A Debian 12 node with a kernel of its own: an image made once, booted by qemu without hardware help.

Commands reach it through QEMU's guest agent on a virtio-serial port: it needs no network.
"""

import base64
import contextlib
import hashlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import make_dataset, make_target
from container import BOOTED_WITH_SYSTEMD, INCLUDED, REPOSITORY, SUITE, base_tree
from packages import BuildFailed, apt_install, cache_dir, locked, run, say

EMULATOR = "qemu-system-x86_64"
HOST_NEEDS = ("e2fsprogs", "mmdebstrap", "qemu-system-x86", "qemu-utils", "systemd-container", "util-linux")
GUEST_NEEDS = (*INCLUDED, "e2fsprogs", "initramfs-tools", "linux-image-cloud-amd64", "qemu-guest-agent")
RUNS = "/var/lib/dflash/runs"  # a disk of its own
TARGET, DATA = "/srv/tiny/target", "/srv/tiny/data"
ROOT_SIZE, RUNS_SIZE = "6G", "512M"  # sparse
MEMORY = "3G"
BOOT_SECONDS = 300
STOP_SECONDS = 120
ANSWER_SECONDS = 120  # for the guest agent, which does nothing that takes long
PORT = "org.qemu.guest_agent.0"
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A new directory entry is durable after a second, not five: a cut finds more of an unfinished save.
FSTAB = f"/dev/vdb {RUNS} ext4 commit=1 0 2\n"
EXT4 = ("mke2fs", "-q", "-t", "ext4", "-E", "lazy_itable_init=0,lazy_journal_init=0")


@dataclass(frozen=True, slots=True)
class Image:
    """What a machine boots from; nobody writes to it."""

    root: Path
    kernel: Path
    initrd: Path


@dataclass(frozen=True, slots=True)
class Disks:
    """What outlives a power cut: an overlay on the image, and the file system of the runs."""

    root: Path
    runs: Path


@dataclass(frozen=True, slots=True)
class Vm:
    """A booted machine."""

    process: "subprocess.Popen[bytes]"
    agent: Path  # a socket that leads to the guest agent
    console: Path

    def run(
        self, *command: str, check: bool = True, timeout: float = 600, text_input: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command as root in the machine. Raises CalledProcessError unless check is off, TimeoutExpired."""
        end = time.monotonic() + timeout
        request: dict[str, Any] = {
            "path": "/usr/bin/env",
            "arg": ["-i", "HOME=/root", "LANG=C.UTF-8", PATH, *command],
            "capture-output": True,
        }
        if text_input is not None:
            request["input-data"] = base64.b64encode(text_input.encode()).decode()
        with _conversation(self.agent, min(timeout, ANSWER_SECONDS)) as ask:
            pid = ask("guest-exec", request)["pid"]
            while not (state := ask("guest-exec-status", {"pid": pid}))["exited"]:
                if time.monotonic() > end:
                    raise subprocess.TimeoutExpired(command, timeout)
                time.sleep(0.1)
        output, errors = (base64.b64decode(state.get(f"{name}-data", "")).decode() for name in ("out", "err"))
        code = state.get("exitcode", -state.get("signal", 0))
        done = subprocess.CompletedProcess(command, code, output, errors)
        if check:
            done.check_returncode()
        return done

    def cut(self) -> None:
        """Takes the power away: what the machine had not written to its disks is lost."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Powers the machine off in order, or cuts its power if that hangs."""
        if self.process.poll() is None:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                self.run("systemctl", "poweroff", "--no-block", timeout=ANSWER_SECONDS)
                self.process.wait(STOP_SECONDS)
        self.cut()


def missing() -> str:
    """Why no machine can be booted here; empty if one can. Installs what it needs."""
    try:
        apt_install(*HOST_NEEDS)
    except BuildFailed as error:
        return str(error)
    return "" if shutil.which(EMULATOR) else f"{EMULATOR} cannot be run here"


def image(repository: Path) -> Image:
    """The packages of a repository, the runtime and a tiny target, installed; made once. Raises BuildFailed."""
    tree = base_tree(f"{SUITE}-kernel", GUEST_NEEDS, ['mkdir -p "$1/var/log/journal"'])
    recipe = (tree.name, repository.name, FSTAB, ROOT_SIZE, *EXT4)
    folder = cache_dir() / "images" / hashlib.sha256("\n".join(recipe).encode()).hexdigest()[:12]
    with locked("images"):
        if not folder.exists():
            say("making a disk image of a node")
            shutil.rmtree(folder.parent, ignore_errors=True)  # the newest is enough
            unfinished = folder.with_name(f".{folder.name}")
            unfinished.mkdir(parents=True)
            _fill(unfinished, tree, repository)
            unfinished.rename(folder)
    return Image(folder / "root.img", folder / "vmlinuz", folder / "initrd.img")


def new_disks(base: Image, folder: Path) -> Disks:
    """Disks of one machine's own."""
    disks = Disks(folder / "root.qcow2", folder / "runs.img")
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(base.root), "-F", "raw", str(disks.root)])
    run([*EXT4, str(disks.runs), RUNS_SIZE])
    return disks


@contextlib.contextmanager
def booted(base: Image, disks: Disks, folder: Path, runs_rate: int = 0) -> Iterator[Vm]:
    """A machine with these disks, up; without power afterwards. It ends with this process, however that ends.

    `runs_rate`: bytes a second that the disk of the runs takes; 0 is no limit.
    """
    agent, console = folder / "agent", folder / "console.log"
    agent.unlink(missing_ok=True)
    slow = f",throttling.bps-write={runs_rate}" if runs_rate else ""
    process = subprocess.Popen(
        [
            *("setpriv", "--pdeathsig", "KILL", EMULATOR, "-accel", "tcg,thread=multi", "-machine", "q35"),
            *("-cpu", "max", "-smp", "2", "-m", MEMORY, "-nodefaults", "-no-user-config", "-no-reboot"),
            *("-display", "none", "-nic", "none", "-device", "virtio-rng-pci", "-serial", f"file:{console}"),
            *("-kernel", str(base.kernel), "-initrd", str(base.initrd)),
            *("-append", "root=/dev/vda rw console=ttyS0 panic=-1 mitigations=off"),
            *("-drive", f"file={disks.root},if=virtio,format=qcow2"),
            *("-drive", f"file={disks.runs},if=virtio,format=raw{slow}"),
            *("-chardev", f"socket,path={agent},server=on,wait=off,id=agent", "-device", "virtio-serial"),
            *("-device", f"virtserialport,chardev=agent,name={PORT}"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    machine = Vm(process, agent, console)
    try:
        _wait_until_answering(machine)
        yield machine
    finally:
        machine.cut()
        if process.stderr:
            process.stderr.close()


def after_the_cut(disks: Disks, folder: Path, directory: str) -> list[str]:
    """The names in a directory of the runs' disk as the next boot finds them: a copy, its journal replayed."""
    copy = folder / "copy.img"
    run(["cp", "--sparse=always", str(disks.runs), str(copy)])
    replayed = subprocess.run(["e2fsck", "-E", "journal_only", "-p", str(copy)], capture_output=True, check=False)
    if replayed.returncode > 2:  # e2fsck(8): 1 and 2 are errors corrected
        raise BuildFailed(f"e2fsck: exit code {replayed.returncode}: {replayed.stderr.decode().strip()}")
    listed = subprocess.run(
        ["debugfs", "-R", f'ls -p "{directory}"', str(copy)], capture_output=True, text=True, check=True
    )
    copy.unlink()
    # /inode/mode/uid/gid/name/size/
    names = [line.split("/")[5] for line in listed.stdout.splitlines() if line.count("/") >= 6]
    return [name for name in names if name not in (".", "..")]


def _fill(folder: Path, tree: Path, repository: Path) -> None:
    """Makes root.img, vmlinuz and initrd.img: installed in a container, which is many times faster."""
    root = folder / "root"
    root.mkdir()
    run(["tar", "-C", str(root), "--numeric-owner", "-xf", str(tree)])
    inside = [
        *("systemd-nspawn", "--quiet", "-D", str(root), "--register=no", "--private-network", "--pipe"),
        *(() if BOOTED_WITH_SYSTEMD else ("--keep-unit",)),
        *("--resolv-conf=off", "--setenv=DEBIAN_FRONTEND=noninteractive", f"--bind-ro={repository}:{REPOSITORY}"),
    ]
    run([*inside, "apt-get", "-qq", "update"])
    run([*inside, "apt-get", "-qq", "--yes", "install", "dflash", "dflash-wheelhouse-cpu"])
    run([*inside, "dflashctl", "runtime", "install"])
    make_target(root / TARGET.lstrip("/"))
    make_dataset(root / DATA.lstrip("/"))
    run(["chmod", "--recursive", "a+rX", str(root / TARGET.lstrip("/"))])
    (root / "etc/fstab").write_text(FSTAB)
    for name in ("vmlinuz", "initrd.img"):
        (found,) = (root / "boot").glob(f"{name}-*")
        shutil.copyfile(found, folder / name)
    run([*EXT4, "-d", str(root), str(folder / "root.img"), ROOT_SIZE])
    shutil.rmtree(root)


def _wait_until_answering(machine: Vm) -> None:
    """Waits for the guest agent, which comes late in the boot. Raises BuildFailed with what the console says."""
    end = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < end:
        if machine.process.poll() is not None:
            said = machine.process.stderr.read().decode().strip() if machine.process.stderr else ""
            raise BuildFailed(f"{EMULATOR} ended: {said or _last_words(machine)}")
        with (
            contextlib.suppress(OSError),  # no socket yet, or no answer yet
            _conversation(machine.agent, max(1.0, end - time.monotonic())),
        ):
            return
        time.sleep(0.1)
    raise BuildFailed(f"the machine does not answer after {BOOT_SECONDS} s: {_last_words(machine)}")


def _last_words(machine: Vm) -> str:
    text = machine.console.read_text(errors="replace") if machine.console.exists() else ""
    return " ".join(text.split())[-500:]


@contextlib.contextmanager
def _conversation(path: Path, timeout: float) -> "Iterator[Any]":
    """ask(command, arguments) of the guest agent, with what earlier conversations have left unread out of the way.

    Raises OSError if there is no answer, RuntimeError if the agent says no.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(str(path))
        with connection.makefile("rb") as answers:

            def answer() -> Any:
                line = answers.readline()
                if not line:
                    raise ConnectionError("the guest agent's port was closed")
                return json.loads(line.lstrip(b"\xff"))

            def ask(command: str, arguments: dict[str, Any]) -> Any:
                request = {"execute": command, "arguments": arguments}
                connection.sendall(json.dumps(request).encode() + b"\n")
                reply = answer()
                if "return" not in reply:
                    raise RuntimeError(f"{command}: {reply}")
                return reply["return"]

            mark = time.monotonic_ns() & 0x7FFFFFFF
            request = {"execute": "guest-sync", "arguments": {"id": mark}}
            connection.sendall(json.dumps(request).encode() + b"\n")
            while answer().get("return") != mark:
                pass
            yield ask
