"""The run file: what is taken, what is refused and how it says so."""

import argparse
from pathlib import Path

import pytest
from dflash_agent import runfile
from dflash_agent.runfile import ConfigError, add_flags, check_name, from_flags, load, render, schema, settings
from hypothesis import given
from hypothesis import strategies as st

MINIMAL = '[target]\nmodel = "/m"\n[data]\ndir = "/d"\n'


def written(directory: Path, text: str, name: str = "run1") -> Path:
    path = directory / f"{name}.toml"
    path.write_text(text)
    return path


def refusal(directory: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(written(directory, text))
    message = str(caught.value)
    assert "\n" not in message
    assert "run1.toml" in message
    return message


@pytest.mark.parametrize("name", ["run1", "0", "a-b", "a" * 48])
def test_names_that_are_taken(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "A", "a_b", "a/b", "..", "a" * 49, "a\n", "run 1", "ä"])
def test_names_that_are_refused_with_the_rule(name: str) -> None:
    with pytest.raises(ConfigError, match="a-z, 0-9"):
        check_name(name)


def test_defaults_are_the_reference_recipe(tmp_path: Path) -> None:
    run = load(written(tmp_path, MINIMAL))
    assert (run.train.epochs, run.train.lr, run.train.token_budget, run.train.max_anchors) == (6, 6e-4, 8192, 512)
    assert (run.drafter.block_size, run.drafter.layers) == (16, 5)
    assert (run.output.save_interval, run.output.log_interval) == (5000, 10)
    assert run.output.dir == "/var/lib/dflash/runs/run1"


def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL + "[train]\nepoch = 3\n")
    assert "unknown key epoch in [train]; did you mean epochs?" in message
    assert "did you mean train?" in refusal(tmp_path, MINIMAL + "[trian]\nepochs = 3\n")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("epochs = true", "must be a whole number"),
        ("epochs = 1.5", "must be a whole number"),
        ("epochs = 0", "at least 1"),
        ('lr = "fast"', "must be a number"),
        ("lr = 0", "above 0"),
        ("lr = -1.0", "above 0"),
        ("lr = nan", "above 0"),
        ("lr = inf", "above 0"),
        ("warmup = 1.0", "share"),
        ("weight_decay = nan", "at least 0"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place_and_what_is_allowed(
    line: str, reason: str, tmp_path: Path
) -> None:
    message = refusal(tmp_path, MINIMAL + f"[train]\n{line}\n")
    assert reason in message
    assert line.split(" = ")[0] in message
    assert "[train]" in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[target]\nmodel = 3\n", "text in quotes"),
        ('[target]\nmodel = "relative/x"\n[data]\ndir = "/d"\n', "absolute path"),
        ('[target]\nmodel = "/a/../b"\n[data]\ndir = "/d"\n', "absolute path"),
        ('[data]\ndir = "/d"\n', "--target-model"),
        ("target = 3\n", "must be a table"),
        ("[target\n", "not TOML"),
        (MINIMAL + "[drafter]\ntarget_layer_ids = [3, 1]\n", "ascending"),
        (MINIMAL + '[drafter]\ntarget_layer_ids = ["a"]\n', "list of whole numbers"),
    ],
)
def test_other_faults_are_one_line_too(text: str, reason: str, tmp_path: Path) -> None:
    assert reason in refusal(tmp_path, text)


def test_a_file_that_is_missing_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dflashctl new gone"):
        load(tmp_path / "gone.toml")


def test_whole_numbers_do_where_a_number_is_asked(tmp_path: Path) -> None:
    run = load(written(tmp_path, MINIMAL + "[train]\nclip = 2\n"))
    assert type(run.train.clip) is float


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL + "[train]\nlr = 1e-3\nepochs = 2\n")
    parser = argparse.ArgumentParser()
    add_flags(parser)
    run = load(path, vars(parser.parse_args(["--lr", "2e-3", "--target-layer-ids", "1,4", "--data-dir", "/e"])))
    assert (run.train.lr, run.train.epochs, run.drafter.target_layer_ids) == (2e-3, 2, (1, 4))
    assert run.data.dir == "/e"


def test_the_reference_command_line_is_understood() -> None:
    words = (
        "--target-model /dev/shm/Qwen3.6-27B --data-dir /workspace/tokenized_completions "
        "--output-dir /workspace/checkpoints --epochs 6 --lr 6e-4 --max-anchors 512 --token-budget 8192 "
        "--block-size 16 --dp-pairs 2 --log-interval 10 --save-interval 5000"
    )
    parser = argparse.ArgumentParser()
    add_flags(parser)
    run = from_flags("seed", vars(parser.parse_args(words.split())))
    assert run.train.dp_pairs == 2
    assert run.output.dir == "/workspace/checkpoints"


PATHS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20).map(lambda text: f"/x{text}")


@given(
    PATHS.filter(lambda p: ".." not in p.split("/")), st.floats(1e-9, 10), st.lists(st.integers(0, 99), unique=True)
)
def test_what_is_rendered_loads_again_as_the_same_run(model: str, lr: float, ids: list[int]) -> None:
    run = from_flags(
        "round-trip",
        {"target.model": model, "data.dir": "/d", "train.lr": lr, "drafter.target_layer_ids": tuple(sorted(ids))},
    )
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "round-trip.toml"
        path.write_text(render(run))
        assert load(path) == run


def test_a_rendered_file_explains_every_key() -> None:
    text = render(from_flags("r", {"target.model": "/m", "data.dir": "/d"}))
    for key, spec in schema():
        assert f"\n{key.partition('.')[2]} = " in text
        assert spec.metadata["help"] in text


def test_settings_hold_what_shapes_the_result_and_nothing_else() -> None:
    run = from_flags("r", {"target.model": "/m", "data.dir": "/d"})
    keys = settings(run).keys()
    assert {"train.lr", "train.seed", "drafter.block_size", "data.max_length"} <= keys
    assert not {"target.model", "data.dir", "output.dir", "output.save_interval", "output.keep_last"} & keys
    assert runfile.value_of(run, "train.lr") == 6e-4
