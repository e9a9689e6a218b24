"""The trainer's runtime: real venvs from real wheels, made on the spot."""

import base64
import hashlib
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest
from dflash_agent import runtime
from dflash_agent.runtime import RuntimeFailed, Source


def make_wheel(directory: Path, name: str, version: str, body: str) -> Path:
    """A wheel with one module, as pip takes it."""
    directory.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": body,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    wheel = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in (files | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}).items():
            archive.writestr(path, text)
    return wheel


def make_source(share: Path, version: str = "1.0", main: str = "print('ok')") -> Source:
    """What the packages put on a node: a lock of one wheel, the wheelhouse, and a trainer that answers."""
    needed = make_wheel(share / "wheelhouse" / "cpu", "needed", "2.0", "x = 1\n")
    for old in (share / "trainer").glob("*.whl"):
        old.unlink()
    make_wheel(share / "trainer", "dflash_trainer", version, f"import needed\n{main}\n")
    lock = share / "trainer" / "lock" / "cpu.txt"
    lock.parent.mkdir(exist_ok=True)
    lock.write_text(f"needed==2.0 --hash=sha256:{hashlib.sha256(needed.read_bytes()).hexdigest()}\n")
    return runtime.source(share)


@pytest.fixture(autouse=True)
def little_room_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "FREE_BYTES", {"cpu": 1 << 20, "cuda": 1 << 20})


def install(origin: Source, root: Path) -> Path:
    return runtime.install(origin, root, say=lambda _text: None)


def test_an_installation_becomes_current_and_is_not_repeated(tmp_path: Path) -> None:
    origin, root = make_source(tmp_path / "share"), tmp_path / "runtime"
    directory = install(origin, root)
    assert runtime.current(root) == directory
    done = subprocess.run([directory / "bin/python", "-c", "import needed, dflash_trainer"], check=False)
    assert done.returncode == 0
    made = (directory / "complete").stat().st_mtime_ns
    assert install(origin, root) == directory
    assert (directory / "complete").stat().st_mtime_ns == made


def test_a_new_lock_or_a_new_trainer_is_another_runtime(tmp_path: Path) -> None:
    first = make_source(tmp_path / "share").id
    assert make_source(tmp_path / "share").id == first
    assert make_source(tmp_path / "share", main="print('changed')").id != first
    lock = tmp_path / "share" / "trainer" / "lock" / "cpu.txt"
    lock.write_text(lock.read_text() + "# changed\n")
    assert runtime.source(tmp_path / "share").id != first


@pytest.mark.parametrize("fault", ["a wheel with another hash", "a wheel is missing", "the trainer does not start"])
def test_a_failed_installation_leaves_the_old_one_in_use(fault: str, tmp_path: Path) -> None:
    root = tmp_path / "runtime"
    old = install(make_source(tmp_path / "share"), root)
    broken = make_source(
        tmp_path / "share", "1.1", main="raise SystemExit('no luck')" if "start" in fault else "pass"
    )
    (wheel,) = (tmp_path / "share" / "wheelhouse" / "cpu").glob("*.whl")
    if "hash" in fault:
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr("extra", "x")
    elif "missing" in fault:
        wheel.unlink()
    with pytest.raises(RuntimeFailed) as caught:
        install(broken, root)
    assert "\n" not in str(caught.value)
    assert runtime.current(root) == old
    assert [path.name for path in runtime.complete_ones(root)] == [old.name]
    assert not (root / broken.id).exists()


def test_what_an_interrupted_installation_left_is_replaced(tmp_path: Path) -> None:
    origin, root = make_source(tmp_path / "share"), tmp_path / "runtime"
    (root / origin.id / "lib").mkdir(parents=True)
    (root / origin.id / "lib" / "half").write_text("")
    assert runtime.current(root) is None
    directory = install(origin, root)
    assert not (directory / "lib" / "half").exists()
    assert runtime.current(root) == directory


def test_two_installations_at_once_make_one_runtime(tmp_path: Path) -> None:
    origin, root = make_source(tmp_path / "share"), tmp_path / "runtime"
    said: list[str] = []
    threads = [threading.Thread(target=runtime.install, args=(origin, root, said.append)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sum(text.startswith("making") for text in said) == 1
    assert runtime.current(root) is not None


def test_rollback_goes_to_the_one_before_and_to_a_named_one(tmp_path: Path) -> None:
    root = tmp_path / "runtime"
    first = install(make_source(tmp_path / "share", "1.0"), root)
    with pytest.raises(RuntimeFailed, match="no earlier runtime"):
        runtime.rollback(root=root)
    second = install(make_source(tmp_path / "share", "1.1"), root)
    assert runtime.current(root) == second
    assert runtime.rollback(root=root) == first
    assert runtime.current(root) == first
    assert runtime.rollback(second.name, root) == second
    with pytest.raises(RuntimeFailed, match="no runtime 9"):
        runtime.rollback("9", root)


def test_old_ones_go_unless_a_process_uses_them(tmp_path: Path) -> None:
    root = tmp_path / "runtime"
    used, second = (install(make_source(tmp_path / "share", v), root) for v in ("1.0", "1.1"))
    library = used / "lib" / "library.so"
    library.write_bytes(b"x" * 4096)
    code = (
        f"import mmap, sys; f = open({str(library)!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)"
    )
    holder = subprocess.Popen(
        ["/usr/bin/python3", "-c", f"{code}; print('mapped', flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"mapped\n"
    third = install(make_source(tmp_path / "share", "1.2"), root)
    assert {p.name for p in runtime.complete_ones(root)} == {used.name, second.name, third.name}
    holder.communicate()
    fourth = install(make_source(tmp_path / "share", "1.3"), root)
    assert {p.name for p in runtime.complete_ones(root)} == {third.name, fourth.name}


def test_a_full_disk_is_told_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "FREE_BYTES", {"cpu": 1 << 60, "cuda": 1 << 60})
    with pytest.raises(RuntimeFailed, match="MiB free"):
        install(make_source(tmp_path / "share"), tmp_path / "runtime")
    assert runtime.complete_ones(tmp_path / "runtime") == []


def test_a_node_without_the_package_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailed, match="apt install dflash-trainer"):
        runtime.source(tmp_path)
