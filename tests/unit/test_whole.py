"""A directory appears whole or not at all."""

from pathlib import Path

import pytest
from dflash_trainer.whole import whole_directory


def test_it_takes_the_place_of_what_was_there_only_when_it_is_whole(tmp_path: Path) -> None:
    final = tmp_path / "d"
    final.mkdir()
    (final / "old").touch()
    with whole_directory(final) as unfinished:
        (unfinished / "sub").mkdir()
        (unfinished / "sub" / "new").touch(mode=0o600)
        assert (final / "old").exists()
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["d", "d/sub", "d/sub/new"]
    assert (final / "sub" / "new").stat().st_mode & 0o777 == 0o644


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    final = tmp_path / "d"
    final.mkdir()
    (final / "old").touch()

    def fail() -> None:
        with whole_directory(final) as unfinished:
            (unfinished / "new").touch()
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["d", "old"]


def test_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".d.writing").mkdir()
    (tmp_path / ".d.writing" / "half").touch()
    with whole_directory(tmp_path / "d") as unfinished:
        assert not list(unfinished.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_what_stood_there_comes_back_after_a_crash_between_the_renames(tmp_path: Path) -> None:
    (tmp_path / ".d.replaced").mkdir()
    (tmp_path / ".d.replaced" / "old").touch()
    with whole_directory(tmp_path / "d"):
        assert (tmp_path / "d" / "old").exists()
