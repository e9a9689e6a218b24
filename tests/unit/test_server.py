"""Completions by a server: a real one on this machine, which fails now and then."""

import argparse
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from dflash_trainer import prepare, server
from dflash_trainer.errors import CannotStart, TryAgain
from drafting import END_TOKEN, add_tokenizer, wandering_target


class Completions(ThreadingHTTPServer):
    """Answers each prompt with its own tokens, backwards; `faults` come first: a status, or "drop"."""

    def __init__(self, with_ids: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.with_ids = with_ids
        self.faults: list[int | str] = []
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.temperatures: set[float] = set()
        self.lock = threading.Lock()
        self.dead = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Completions

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "the-target"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            fault = "drop" if self.server.dead else (self.server.faults or [0]).pop()
            if not fault:
                self.server.asked[tuple(asked["prompt"])] += 1
                self.server.temperatures.add(asked["temperature"])
        if fault == "drop":
            self.close_connection = True
            return
        if fault:
            self.answer(int(fault), {"error": "the reason is here"})
            return
        assert asked["model"] == "the-target"
        assert (asked["top_p"], asked["top_k"], asked["repetition_penalty"]) == (1, -1, 1)
        ids = [token for token in reversed(asked["prompt"]) if 2 < token < 60][: asked["max_tokens"]]
        choice: dict[str, Any] = {"text": " ".join(f"w{token}" for token in ids), "finish_reason": "stop"}
        if 7 in ids and not self.server.with_ids:
            choice["text"] = "w7  something else"  # not the text of any tokens
        counted = len(ids) + 1
        if self.server.with_ids:
            choice["token_ids"] = [*ids, END_TOKEN]
        elif 9 in ids:
            counted += 3  # its tokens were others
        self.answer(200, {"choices": [choice], "usage": {"completion_tokens": counted}})


@pytest.fixture(params=[True, False], ids=["with token ids", "text alone"])
def completions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Completions]:
    monkeypatch.setattr(server, "PAUSES", (0.01,) * 3)
    with Completions(request.param) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(wandering_target(tmp_path_factory.mktemp("server") / "target", "llama"))


def run(target: Path, tmp_path: Path, url: str, *more: str) -> int:
    prompts = tmp_path / "prompts.jsonl"
    if not prompts.exists():
        prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1} w{i + 2}"}) + "\n" for i in range(5, 35)))
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    words = ["--target-model", str(target), "--prompts", str(prompts), "--output-dir", str(tmp_path / "out")]
    return prepare.run(parser.parse_args([*words, "--server", url, "--concurrency", "4", *more]))


def rows(tmp_path: Path) -> list[tuple[list[int], list[int]]]:
    from datasets import load_from_disk

    data = load_from_disk(tmp_path / "out/dataset")
    return list(zip(data["input_ids"], data["loss_mask"], strict=True))


def test_a_server_writes_the_completions_whatever_fails_meanwhile(
    completions: Completions, target_dir: Path, tmp_path: Path
) -> None:
    completions.faults = [503, "drop", 429, 500, "drop"]
    assert run(target_dir, tmp_path, completions.url + "/v1/", "--temperature", "0.7") == 0
    assert set(completions.asked.values()) == {1}
    assert completions.temperatures == {0.7}
    card = json.loads((tmp_path / "out/dataset/card.json").read_text())
    if completions.with_ids:
        assert (card["rows"], card["left_out"]) == (30, {})
    else:
        assert card["left_out"] == {"the server's text is not that of its tokens": 5}
    for ids, mask in rows(tmp_path):
        prompt = ids[: mask.index(1)]
        assert ids[mask.index(1) :] == [*(t for t in reversed(prompt) if 2 < t < 60), END_TOKEN]


def test_a_server_that_dies_is_told_and_the_same_command_goes_on_where_it_was(
    completions: Completions, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = server.tokens_of

    def dying(*words: Any) -> list[int] | None:
        completions.dead = sum(completions.asked.values()) >= 10
        return real(*words)

    monkeypatch.setattr(server, "tokens_of", dying)
    with pytest.raises(TryAgain, match=r"/v1/completions does not answer: .*the same command goes on from here"):
        run(target_dir, tmp_path, completions.url)
    there = (tmp_path / "out/completions.jsonl").read_text().count("\n")
    assert 5 <= there < 30
    assert not (tmp_path / "out/dataset").exists()
    monkeypatch.setattr(server, "tokens_of", real)
    completions.dead = False
    before = sum(completions.asked.values())
    assert run(target_dir, tmp_path, completions.url) == 0
    assert sum(completions.asked.values()) - before == 30 - there
    assert len(rows(tmp_path)) >= 25


def test_what_a_server_refuses_is_told_at_once(completions: Completions, target_dir: Path, tmp_path: Path) -> None:
    completions.faults = [400] * 50
    with pytest.raises(CannotStart, match=r"refuses: 400 .*the reason is here.*; look at its settings"):
        run(target_dir, tmp_path, completions.url)


def test_what_is_no_server_is_told(completions: Completions, target_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"give a URL such as http://HOST:8000"):
        run(target_dir, tmp_path, "nonsense://x")
    completions.faults = []


def test_nobody_at_the_address_is_told(target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PAUSES", (0.01,))
    with Completions(True) as closed:
        url = closed.url
    with pytest.raises(TryAgain, match=r"/v1/models does not answer: ConnectError"):
        run(target_dir, tmp_path, url)
