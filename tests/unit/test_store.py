"""The token store against a row-by-row reading of the same data, and against data that is not as it should be."""

import dataclasses
import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import load_store, save_dataset, small_disk
from dflash_trainer import dataset
from dflash_trainer import store as stores
from dflash_trainer.errors import CannotStart
from dflash_trainer.store import SHORT, UNSUPERVISED, TokenStore
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

VOCABULARY = 100
Rows = list[tuple[list[int], list[int]]]


def write(directory: Path, batches: Sequence[Any], name: str = "data-00000-of-00001.arrow") -> Path:
    """A dataset directory of one Arrow file, without the help of datasets."""
    directory.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(directory / name), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    return directory


def batch(ids: Any, mask: Any) -> Any:
    return pa.record_batch({"input_ids": ids, "loss_mask": mask})


def sequences(store: TokenStore) -> Rows:
    return [
        (store.tokens[a:b].tolist(), store.loss_mask[a:b].tolist())
        for a, b in itertools.pairwise(store.survey.offsets)
    ]


def by_hand(rows: Rows, max_length: int) -> tuple[Rows, dict[str, int], int]:
    """What load_store promises, one row after another."""
    kept: Rows = []
    skipped: dict[str, int] = {}
    cut = 0
    for ids, mask in rows:
        short_mask = mask[:max_length]
        if len(ids) < 2:
            skipped[SHORT] = skipped.get(SHORT, 0) + 1
        elif not any(a and b for a, b in itertools.pairwise(short_mask)):
            skipped[UNSUPERVISED] = skipped.get(UNSUPERVISED, 0) + 1
        else:
            kept.append((ids[:max_length], [int(m != 0) for m in short_mask]))
            cut += len(ids) > max_length
    return kept, skipped, cut


a_row = st.lists(st.tuples(st.integers(0, VOCABULARY - 1), st.integers(0, 1)), max_size=8).map(
    lambda pairs: ([i for i, _ in pairs], [m for _, m in pairs])
)


@given(st.lists(st.lists(a_row, max_size=5), min_size=1, max_size=4), st.integers(1, 9), st.booleans())
def test_any_rows_give_what_reading_them_one_by_one_gives(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[Rows], max_length: int, large: bool
) -> None:
    kind = (pa.large_list if large else pa.list_)(pa.int64())
    batches = [batch(pa.array([i for i, _ in rows], kind), pa.array([m for _, m in rows], kind)) for rows in chunks]
    directory = write(tmp_path_factory.mktemp("d"), batches)
    kept, skipped, cut = by_hand([row for rows in chunks for row in rows], max_length)
    if not kept:
        with pytest.raises(CannotStart, match="no supervised text"):
            load_store(directory, max_length, VOCABULARY)
        return
    store = load_store(directory, max_length, VOCABULARY)
    assert (sequences(store), store.survey.skipped, store.survey.cut) == (kept, skipped, cut)
    assert [a.dtype.name for a in (store.tokens, store.loss_mask, store.survey.offsets)] == [
        "int32",
        "uint8",
        "int64",
    ]


@pytest.mark.parametrize(
    "ids_type", [pa.int8(), pa.uint8(), pa.int16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]
)
@pytest.mark.parametrize("mask_type", [pa.bool_(), pa.int8(), pa.uint8(), pa.int64()])
@pytest.mark.parametrize("make", [pa.list_, pa.large_list, lambda inner: pa.list_(inner, 3)])
def test_every_width_and_kind_of_list_is_read(ids_type: Any, mask_type: Any, make: Any, tmp_path: Path) -> None:
    ids = [[9, 9, 9], [1, 2, 3], [4, 5, 6], [9, 9, 9]]
    as_type = bool if mask_type == pa.bool_() else int
    mask = [[*map(as_type, row)] for row in ([0, 0, 0], [1, 1, 0], [0, 1, 1], [1, 1, 1])]
    whole = batch(pa.array(ids, make(ids_type)), pa.array(mask, make(mask_type)))
    store = load_store(write(tmp_path / "d", [whole.slice(1, 2)]), 10, VOCABULARY)
    assert sequences(store) == [([1, 2, 3], [1, 1, 0]), ([4, 5, 6], [0, 1, 1])]


def test_what_datasets_saves_is_read_over_all_its_shards_in_order(tmp_path: Path) -> None:
    from datasets import Dataset

    ids = [[i % VOCABULARY, (i + 1) % VOCABULARY] for i in range(2500)]
    data = Dataset.from_dict({"text": ["x"] * 2500, "loss_mask": [[1, 1]] * 2500, "input_ids": ids})
    data.save_to_disk(tmp_path / "all", num_shards=3)
    assert [i for i, _ in sequences(load_store(tmp_path / "all", 10, VOCABULARY))] == ids
    data.select(range(2400, 2410)).save_to_disk(tmp_path / "some")
    assert [i for i, _ in sequences(load_store(tmp_path / "some", 10, VOCABULARY))] == ids[2400:2410]


def test_the_fingerprint_is_of_the_rows_and_not_of_how_they_are_stored(tmp_path: Path) -> None:
    ids, mask = [[1, 2, 3], [4, 5]], [[1, 1, 1], [1, 1]]
    kind = pa.list_(pa.int16())
    one = load_store(save_dataset(tmp_path / "a", {"input_ids": ids, "loss_mask": mask}), 10, VOCABULARY)
    two = write(
        tmp_path / "b", [batch(pa.array([i], kind), pa.array([m], kind)) for i, m in zip(ids, mask, strict=True)]
    )
    assert one.survey.fingerprint == load_store(two, 10, VOCABULARY).survey.fingerprint
    arrays = (np.array([0, 3, 5], np.int64), np.array([1, 2, 3, 4, 5], np.int32), np.ones(5, np.uint8))
    parts = b"".join(hashlib.sha256(array.tobytes()).digest() for array in arrays)
    assert one.survey.fingerprint == hashlib.sha256(parts).hexdigest()
    for other in ([[1, 2], [3, 4, 5]], [[1, 2, 3], [4, 6]]):
        shape = [[1] * len(row) for row in other]
        different = save_dataset(tmp_path / str(other), {"input_ids": other, "loss_mask": shape})
        assert load_store(different, 10, VOCABULARY).survey.fingerprint != one.survey.fingerprint


def test_the_summary_counts_what_was_skipped_and_cut(tmp_path: Path) -> None:
    columns = {
        "input_ids": [[1, 2, 3, 4], [1], [], [1, 2], [5, 6]],
        "loss_mask": [[0, 1, 1, 1], [1], [], [1, 0], [1, 1]],
    }
    store = load_store(save_dataset(tmp_path / "d", columns), 3, VOCABULARY)
    assert store.survey.skipped == {SHORT: 2, UNSUPERVISED: 1}
    assert store.survey.cut == 1
    assert store.survey.summary() == (
        "2 rows, 5 tokens, 4 of them supervised (80 %); 1 rows cut to the longest length allowed; "
        f"2 rows skipped: {SHORT}; 1 rows skipped: {UNSUPERVISED}"
    )


def refusal(directory: Path) -> str:
    """The one line that load_store refuses a directory with."""
    with pytest.raises(CannotStart) as caught:
        load_store(directory, 10, VOCABULARY)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)
    return str(caught.value)


MASK_NAMES = "loss_mask or assistant_masks or labels"
OUTSIDE = ["row 1", "token 100", "position 2", "100 (0 to 99)"]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"input_ids": [[1, 2]], "text": [[1, 1]]}, [f"no column {MASK_NAMES}", "only input_ids, text", "prepare"]),
        ({"tokens": [[1, 2]]}, [f"no column input_ids and {MASK_NAMES}", "only tokens"]),
        ({"input_ids": [[1, 2], [3, 4, 100]], "loss_mask": [[1, 1], [1, 1, 1]]}, OUTSIDE),
        ({"input_ids": [[1, 2], [], [-1, 4]], "loss_mask": [[1, 1], [], [0, 1]]}, ["row 2", "token -1"]),
        ({"input_ids": [[1, 2], [1, 2]], "loss_mask": [[1, 1], [1]]}, ["row 1", "2 input_ids but 1 loss_mask"]),
        ({"input_ids": [[1, 2], [3]], "loss_mask": [[1, 0], [1]]}, [f"1 rows {SHORT}", f"1 rows {UNSUPERVISED}"]),
        ({"input_ids": [1, 2], "loss_mask": [1, 1]}, ["input_ids holds int", "lists of integers"]),
        ({"input_ids": [[1.5, 2.0]], "loss_mask": [[1, 1]]}, ["input_ids holds", "double"]),
        ({"input_ids": [[1, None]], "loss_mask": [[1, 1]]}, ["input_ids has a null", "rows 0 to 0"]),
        ({"input_ids": [[1, 2], None], "loss_mask": [[1, 1], [1]]}, ["input_ids has a null", "rows 0 to 1"]),
        ({"input_ids": [[1, 2]], "loss_mask": [["a", "b"]]}, ["loss_mask holds", "string"]),
    ],
)  # fmt: skip
def test_bad_columns_are_refused_with_what_and_where(
    columns: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    message = refusal(save_dataset(tmp_path / "d", columns))
    assert [word for word in words if word not in message] == [], message


def test_rows_are_numbered_over_all_batches(tmp_path: Path) -> None:
    kind = pa.list_(pa.int32())
    good = batch(pa.array([[1, 2], [3, 4]], kind), pa.array([[1, 1], [1, 1]], kind))
    bad = batch(pa.array([[1, 2], [3, 400]], kind), pa.array([[1, 1], [1, 1]], kind))
    assert "row 5 has token 400 at position 1" in refusal(write(tmp_path / "d", [good, good, bad]))


def test_a_token_that_fits_no_int32_is_seen_before_it_is_cut_to_one(tmp_path: Path) -> None:
    kind = pa.list_(pa.int64())
    big = batch(pa.array([[1, 2**32 + 5]], kind), pa.array([[1, 1]], kind))
    assert f"token {2**32 + 5}" in refusal(write(tmp_path / "d", [big]))


def test_a_file_cut_at_any_byte_is_refused_in_one_line(tmp_path: Path) -> None:
    kind = pa.list_(pa.int32())
    some = batch(pa.array([[1, 2], [3, 4]], kind), pa.array([[1, 1], [1, 1]], kind))
    directory = write(tmp_path / "d", [some, some])
    (file,) = directory.glob("*.arrow")
    whole = file.read_bytes()
    assert len(load_store(directory, 10, VOCABULARY).survey.offsets) == 5
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        assert file.name in refusal(directory)


def test_damage_in_the_middle_is_refused(tmp_path: Path) -> None:
    kind = pa.list_(pa.int32())
    directory = write(tmp_path / "d", [batch(pa.array([[1, 2]], kind), pa.array([[1, 1]], kind))])
    (file,) = directory.glob("*.arrow")
    whole = file.read_bytes()
    file.write_bytes(b"\0" * 64 + whole[64:])
    assert "cannot be read" in refusal(directory) or "no column" in refusal(directory)


def test_a_directory_that_is_no_dataset_is_refused_with_what_to_give(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "nowhere")
    (tmp_path / "state.json").write_text("{}")
    assert "_data_files" in refusal(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    assert "gone.arrow" in refusal(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": []}')
    assert "it has no rows" in refusal(tmp_path)


def test_a_directory_of_splits_is_refused_with_their_names(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    data = Dataset.from_dict({"input_ids": [[1, 2]], "loss_mask": [[1, 1]]})
    DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "d")
    assert "test, train" in refusal(tmp_path / "d")
    assert len(load_store(tmp_path / "d" / "train", 10, VOCABULARY).survey.offsets) == 2


def test_it_needs_neither_torch_nor_datasets() -> None:
    code = "import sys, dflash_trainer.store; print({'torch', 'datasets'} & {*sys.modules})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_rows_are_known_by_their_place_in_the_data_set(tmp_path: Path) -> None:
    ids = [[4], [5, 6, 7], [], [7, 8]]
    directory = save_dataset(tmp_path / "d", {"input_ids": ids, "loss_mask": [[1] * len(i) for i in ids]})
    assert load_store(directory, 256, 96).survey.origin.tolist() == [1, 3]


FORMATS = ("arrow", "parquet", "jsonl")


def save(directory: Path, kind: str, columns: dict[str, Any], files: int = 1) -> Path:
    """The same rows in any format."""
    if kind == "arrow":
        return save_dataset(directory, columns)
    directory.mkdir(parents=True)
    table = pa.table(columns)
    per_file = -(-len(table) // files)
    for number in range(files):
        part = table.slice(number * per_file, per_file)
        path = directory / f"part-{number}.{kind}"
        if kind == "parquet":
            parquet.write_table(part, path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in part.to_pylist()))
    return directory


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("mask", ["loss_mask", "assistant_masks", "labels"])
def test_every_format_and_every_way_to_say_what_is_supervised_gives_the_same_store(
    kind: str, mask: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, VOCABULARY, rng.integers(2, 40)).tolist() for _ in range(300)]
    masks = [[int(i > len(row) // 3) for i in range(len(row))] for row in ids]
    plain = load_store(save(tmp_path / "plain", "arrow", {"input_ids": ids, "loss_mask": masks}), 30, VOCABULARY)
    labels = [[i if m else -100 for i, m in zip(*row, strict=True)] for row in zip(ids, masks, strict=True)]
    columns = {"text": ["…"] * len(ids), "input_ids": ids, mask: labels if mask == "labels" else masks}
    other = load_store(save(tmp_path / "other", kind, columns, files=3), 30, VOCABULARY)
    assert other.survey.fingerprint == plain.survey.fingerprint
    assert sequences(other) == sequences(plain)
    assert other.survey.origin.tolist() == plain.survey.origin.tolist()
    assert other.survey.supervised == plain.loss_mask.sum()
    assert set(np.flatnonzero(other.survey.used)) == set(plain.tokens.tolist())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_bad_row_is_named_in_every_format(kind: str, tmp_path: Path) -> None:
    ids = [[1, 2, 3]] * 2500 + [[1, 2, VOCABULARY]] + [[1, 2, 3]] * 2500
    message = refusal(save(tmp_path / "d", kind, {"input_ids": ids, "loss_mask": [[1, 1, 1]] * len(ids)}, files=2))
    assert f"row 2500 has token {VOCABULARY} at position 2" in message


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_file_of_any_format_that_is_cut_is_refused(kind: str, tmp_path: Path) -> None:
    directory = save(tmp_path / "d", kind, {"input_ids": [[1, 2, 3]] * 4, "loss_mask": [[1, 1, 1]] * 4})
    (path,) = directory.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    assert path.name in refusal(directory)


def test_labels_that_are_shifted_are_refused_with_the_place(tmp_path: Path) -> None:
    columns = {"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[-100, 2, 3], [5, 6, -100]]}
    message = refusal(save_dataset(tmp_path / "d", columns))
    assert "row 1 has token 4 at position 0, and its label is 5" in message


def test_files_of_two_kinds_are_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    (tmp_path / "b.jsonl").touch()
    assert ".parquet and .jsonl files; leave one kind" in refusal(tmp_path)


def opened(directory: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TokenStore, int]:
    """The store, and how many times the data was read for it."""
    read = []
    monkeypatch.setattr(stores, "pieces", lambda files: read.append(files) or dataset.pieces(files))
    return stores.load_store(directory, 30, VOCABULARY, cache), len(read)


def test_the_next_start_reads_no_data_and_other_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"input_ids": [[1, 2, 3], [4, 5, 6]], "loss_mask": [[1, 1, 1], [0, 1, 1]]}
    directory = save(tmp_path / "d", "jsonl", columns)
    first, read = opened(directory, tmp_path / "cache", monkeypatch)
    again, read_again = opened(directory, tmp_path / "cache", monkeypatch)
    assert (read, read_again) == (1, 0)
    assert sequences(again) == sequences(first)
    assert dataclasses.asdict(again.survey).keys() == dataclasses.asdict(first.survey).keys()
    assert (again.survey.fingerprint, again.survey.summary()) == (first.survey.fingerprint, first.survey.summary())
    save(tmp_path / "other", "jsonl", columns | {"loss_mask": [[1, 1, 1], [1, 1, 1]]})
    (tmp_path / "other/part-0.jsonl").replace(directory / "part-0.jsonl")
    changed, read = opened(directory, tmp_path / "cache", monkeypatch)
    assert (read, changed.survey.supervised) == (1, 6)


@pytest.mark.parametrize("file", [stores.TOKENS_FILE, stores.MASK_FILE, stores.ARRAYS_FILE, stores.META_FILE])
@pytest.mark.parametrize("size", [None, 0, 5])
def test_a_damaged_cache_is_made_anew(
    file: str, size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"input_ids": [[1, 2, 3], [4, 5, 6]], "loss_mask": [[1, 1, 1], [0, 1, 1]]}
    directory = save(tmp_path / "d", "parquet", columns)
    first, _ = opened(directory, tmp_path / "cache", monkeypatch)
    (path,) = (tmp_path / "cache").rglob(file)
    rows = sequences(first)
    if size is None:
        path.unlink()
    else:
        path.with_suffix(".cut").write_bytes(path.read_bytes()[:size])
        path.with_suffix(".cut").replace(path)
    again, read = opened(directory, tmp_path / "cache", monkeypatch)
    assert (read, sequences(again)) == (1, rows)


def test_only_the_stores_used_last_stay_in_the_cache(tmp_path: Path) -> None:
    for number in range(4):
        columns = {"input_ids": [[1, 2, number]], "loss_mask": [[1, 1, 1]]}
        stores.load_store(save(tmp_path / str(number), "parquet", columns), 30, VOCABULARY, tmp_path / "cache")
    (tmp_path / "cache/store/.torn.writing").mkdir()
    stores.load_store(tmp_path / "3", 30, VOCABULARY, tmp_path / "cache")
    left = [path for path in (tmp_path / "cache/store").iterdir() if path.is_dir()]
    data = {json.loads((path / stores.META_FILE).read_text())["data"] for path in left}
    assert data == {str(tmp_path / "2"), str(tmp_path / "3")}


def test_data_that_cannot_be_used_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    directory = save(tmp_path / "d", "jsonl", {"input_ids": [[1, 2], [1, 200]], "loss_mask": [[1, 1], [1, 1]]})
    with pytest.raises(CannotStart):
        stores.load_store(directory, 30, VOCABULARY, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache/store").iterdir() if path.is_dir()] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_cache_is_said_and_the_store_is_held_in_memory(
    dataset_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "cache", 4096) as cache:
        store = stores.load_store(dataset_dir, 256, 96, cache)
        assert [path for path in (cache / "store").iterdir() if path.is_dir()] == []
        assert "cannot be kept in" in capsys.readouterr().err
        assert sequences(store) == sequences(load_store(dataset_dir, 256, 96))
        monkeypatch.setattr(stores, "free_memory", lambda: (4096, "memory.max of dflash-train@run1.service"))
        numbers = (
            r"needs more than .* of host memory to load, and 4.0 KiB are free .memory.max of dflash-train@run1"
        )
        with pytest.raises(CannotStart, match=numbers):
            stores.load_store(dataset_dir, 256, 96, cache)
