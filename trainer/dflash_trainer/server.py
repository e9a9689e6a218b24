"""Completions by a server with OpenAI's interface, such as vLLM or SGLang: POST /v1/completions of token ids."""

import logging
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import httpx

from dflash_trainer.errors import CannotStart, TryAgain

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before another try
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
ANSWER = 1800.0  # seconds that a completion may take

logging.getLogger("httpx").setLevel(logging.WARNING)  # else it tells of each request


@dataclass(frozen=True, slots=True)
class Question:
    """What a server is asked for."""

    key: int
    ids: Sequence[int]
    max_new_tokens: int


def complete(
    url: str,
    model: str | None,
    questions: Sequence[Question],
    tokenizer: Any,
    stops: AbstractSet[int],
    temperature: float,
    concurrency: int,
) -> Iterator[tuple[int, list[int] | None]]:
    """Key and tokens of each answer, as they come; None for one whose text is not that of its tokens.

    Servers that tell the tokens of an answer are believed; else its text is tokenized, with the target's end token,
    one of `stops`, behind it if the answer ended by itself, and taken if the server counted as many. Raises
    CannotStart if the server refuses, TryAgain if it does not answer after some tries; what came until then has
    been given.
    """
    base, timeout = url.rstrip("/").removesuffix("/v1"), httpx.Timeout(30.0, read=ANSWER)
    with httpx.Client(base_url=base, timeout=timeout, limits=httpx.Limits(max_connections=concurrency)) as client:
        name = model or str(_asked(client, "GET", "/v1/models", None)["data"][0]["id"])

        def answer(question: Question) -> list[int] | None:
            body = {
                "model": name,
                "prompt": list(question.ids),
                "max_tokens": question.max_new_tokens,
                "temperature": temperature,
                # What the target's generation_config asks for is not its plain choice, which verification goes by.
                "top_p": 1,
                "top_k": -1,
                "min_p": 0,
                "repetition_penalty": 1,
                "seed": question.key,
                "skip_special_tokens": False,
                "return_token_ids": True,
            }
            try:
                return tokens_of(_asked(client, "POST", "/v1/completions", body), tokenizer, stops)
            except (KeyError, IndexError, TypeError) as error:
                raise CannotStart(f"server {url}: its answer is no completion ({error!r}); give its URL") from error

        with ThreadPoolExecutor(concurrency, "question") as pool:
            waiting = {pool.submit(answer, question): question.key for question in questions}
            try:
                for done in as_completed(waiting):
                    yield waiting[done], done.result()
            finally:
                for future in waiting:
                    future.cancel()


def tokens_of(answer: dict[str, Any], tokenizer: Any, stops: AbstractSet[int]) -> list[int] | None:
    """The tokens of an answer, the one that ended it included; None if they cannot be known for sure."""
    choice = answer["choices"][0]
    told = choice.get("token_ids")
    if told:
        ids = [int(token) for token in told]
    else:
        text = str(choice["text"])
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) != text:
            return None
    ended = choice.get("finish_reason") == "stop"
    if ended and not (ids and ids[-1] in stops):  # a text comes without it
        stop = choice.get("stop_reason")  # vLLM: the token that ended it, if it is not the tokenizer's own
        ids.append(stop if isinstance(stop, int) else int(tokenizer.eos_token_id))
    counted = (answer.get("usage") or {}).get("completion_tokens")
    return ids if told or counted in (None, len(ids), len(ids) - ended) else None


def _asked(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """The JSON that a server answers. Raises CannotStart or TryAgain."""
    where = f"{str(client.base_url).rstrip('/')}{path}"
    reason = ""
    for pause in (*PAUSES, None):
        try:
            response = client.request(method, path, json=body)
            if response.status_code not in PASSING:
                if response.is_error:
                    said = " ".join(response.text.split())[:300]
                    raise CannotStart(
                        f"server {where} refuses: {response.status_code} {said}; look at its settings"
                    )
                answer: dict[str, Any] = response.json()
                return answer
            reason = f"status {response.status_code}"
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise CannotStart(f"server {where}: {error}; give a URL such as http://HOST:8000") from error
        except (httpx.TransportError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        if pause is not None:
            time.sleep(pause)  # there is nothing to wait for but time
    raise TryAgain(f"server {where} does not answer: {reason}; when it does, the same command goes on from here")
