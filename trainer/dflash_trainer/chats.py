"""Chats as people keep them, rendered by a target's template, with a mask over what the assistant said.

The mask comes from the template itself: from its generation marks if it has them, else from what it renders before
and after each of the assistant's turns. No text is searched for.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trainer.errors import CannotStart

SPEAKERS = {  # ShareGPT's names of roles
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bard": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
GENERATION_MARK = "{%generation"
FORMS = (
    'a line is {"prompt": "…"}, {"messages": [{"role": "user", "content": "…"}, …]} or '
    '{"conversations": [{"from": "human", "value": "…"}, …]}'
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A line of a file: turns as chat templates take them, with what else each has (tool_calls, …)."""

    number: int  # of the line, from 1
    kind: str
    turns: tuple[Mapping[str, Any], ...]
    tools: Any  # what the template is told of them; None

    @property
    def asked(self) -> tuple[Mapping[str, Any], ...]:
        """The turns before the assistant's last, if that is the end."""
        return self.turns[:-1] if self.turns[-1]["role"] == "assistant" else self.turns

    @property
    def key(self) -> str:
        """The same for chats that ask the same, whatever the case and the spaces: sha256."""
        return _key(self.asked)

    @property
    def keys(self) -> set[str]:
        """Of everything that it asks: before each of the assistant's turns, and at its end."""
        answers = [i for i, turn in enumerate(self.turns) if i and turn["role"] == "assistant"]
        return {self.key, *(_key(self.turns[:i]) for i in answers)}


def _key(turns: Sequence[Mapping[str, Any]]) -> str:
    said = [[turn["role"], " ".join(str(turn.get("content") or "").lower().split())] for turn in turns]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a dataset; `mask` is 1 where the assistant speaks."""

    kind: str
    ids: tuple[int, ...]
    mask: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat that ends with the user's turn, as it stands in its file and as the target reads it."""

    index: int  # among the prompts of the file
    kind: str
    ids: tuple[int, ...]


def read_tokenizer(directory: Path) -> Any:
    """The target's tokenizer. Raises CannotStart if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        detail = " ".join(str(error).split())[:300]
        raise CannotStart(f"target {directory}: its tokenizer cannot be loaded: {detail}") from error


def load_tokenizer(directory: Path) -> Any:
    """The same, with a chat template. Raises CannotStart also if it has none."""
    tokenizer = read_tokenizer(directory)
    if not tokenizer.chat_template:
        raise CannotStart(f"target {directory}: its tokenizer has no chat template; use one tuned to instructions")
    return tokenizer


def tokenizer_hashes(directory: Path, tokenizer: Any) -> dict[str, str]:
    """What a dataset has in common with the target that it is made for: sha256. Raises OSError."""
    return {
        "tokenizer": hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest(),
        "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
    }


def template_arguments(text: str) -> dict[str, Any]:
    """For argparse: an object in JSON. Raises ValueError, TypeError."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError(text)
    return found


def read_chats(path: Path, limit: int | None = None) -> list[Chat]:
    """The first `limit` chats of a file of JSON lines. Raises CannotStart naming the line that is none."""
    try:
        lines = path.read_text().split("\n")  # not at what else ends a line: a text may hold it
    except (OSError, UnicodeDecodeError) as error:
        raise CannotStart(f"prompts {path} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()][:limit]
    if not numbered:
        raise CannotStart(f"prompts {path} holds no prompt")
    chats = []
    for number, line in numbered:
        try:
            chats.append(_chat(number, line))
        except ValueError as error:
            raise CannotStart(f"{path}:{number}: {' '.join(str(error).split())}; {FORMS}") from error
    return chats


def _chat(number: int, line: str) -> Chat:
    """Raises ValueError."""
    row = json.loads(line)
    kinds = [kind for kind in ("prompt", "messages", "conversations") if isinstance(row, dict) and kind in row]
    if len(kinds) != 1:
        raise ValueError("neither or both of prompt and messages")
    said = row[kinds[0]]
    if kinds[0] == "prompt":
        said = [{"role": "user", "content": said}]
    if not isinstance(said, list) or not said:
        raise ValueError(f"{kinds[0]} is not a list of turns")
    turns = [_turn(turn, kinds[0]) for turn in said]
    asked = turns[:-1] if turns[-1]["role"] == "assistant" else turns
    if not asked or asked[-1]["role"] not in ("user", "tool") or not str(asked[-1]["content"]).strip():
        raise ValueError("the last turn that asks is not the user's, or empty")
    return Chat(number, str(row.get("kind", "")), tuple(turns), row.get("tools"))


def _turn(turn: Any, form: str) -> dict[str, Any]:
    """Raises ValueError."""
    if form == "conversations" and isinstance(turn, dict) and "from" in turn:
        if turn["from"] not in SPEAKERS:
            raise ValueError(f"a turn from {turn['from']!r}, who is none of {', '.join(SPEAKERS)}")
        turn = {"role": SPEAKERS[turn["from"]], "content": turn.get("value")}
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise ValueError("a turn whose role or content is not text")
    if not isinstance(turn.get("content"), str) and not (turn["role"] == "assistant" and turn.get("tool_calls")):
        raise ValueError("a turn whose role or content is not text")
    if turn.get("tool_calls"):
        turn = turn | {"tool_calls": [_call(call) for call in turn["tool_calls"]]}
    whole: dict[str, Any] = {"content": None} | turn
    return whole


def _call(call: Any) -> Any:
    """A call of a tool with its arguments as an object, as templates read them; OpenAI has them as text."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        return call | {"function": function | {"arguments": json.loads(function["arguments"])}}
    return call


def render(
    tokenizer: Any, chat: Chat, turns: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], ask: bool
) -> str:
    """Some of a chat's turns as the template shows them; with `ask`, what makes the assistant speak next."""
    text: str = tokenizer.apply_chat_template(
        list(turns), tools=chat.tools, add_generation_prompt=ask, tokenize=False, **arguments
    )
    return text


def read_prompts(
    path: Path, tokenizer: Any, limit: int | None = None, arguments: Mapping[str, Any] | None = None
) -> list[Prompt]:
    """The first `limit` prompts of a file, tokenized. Raises CannotStart naming the line that is none."""
    return as_prompts(read_chats(path, limit), tokenizer, arguments or {}, path)


def as_prompts(chats: Sequence[Chat], tokenizer: Any, arguments: Mapping[str, Any], path: Path) -> list[Prompt]:
    """Chats as the target reads them before it answers. Raises CannotStart."""
    return [
        Prompt(index, chat.kind, prompt_ids(tokenizer, chat, arguments, path)) for index, chat in enumerate(chats)
    ]


def prompt_ids(tokenizer: Any, chat: Chat, arguments: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """What the target reads before it answers. Raises CannotStart if the template does not take the chat."""
    try:
        return _ids(tokenizer, render(tokenizer, chat, chat.asked, arguments, ask=True))
    except Exception as error:  # a chat template raises what it likes
        raise _refused(path, chat, error) from error


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _refused(path: Path, chat: Chat, error: Exception) -> CannotStart:
    reason = " ".join(str(error).split())
    return CannotStart(f"{path}:{chat.number}: the chat template does not take it: {reason}; mend the chat")


def answered_rows(
    tokenizer: Any, chat: Chat, arguments: Mapping[str, Any], stops: AbstractSet[int], path: Path
) -> list[Row]:
    """The rows of a chat whose assistant's turns are taken as they are; none if the template cannot show them.

    One row with all its turns; a turn that the template shows otherwise once others follow (as Qwen3 leaves earlier
    thinking out) is the end of a row of its own, as it was when it was said. Supervised is what the assistant wrote
    and the token that ended it. Raises CannotStart.
    """
    try:
        if GENERATION_MARK in str(tokenizer.chat_template).replace(" ", "").replace("{%-", "{%"):
            return [_marked_row(tokenizer, chat, arguments, stops)]
        return _incremental_rows(tokenizer, chat, arguments, stops)
    except Exception as error:
        raise _refused(path, chat, error) from error


def _marked_row(tokenizer: Any, chat: Chat, arguments: Mapping[str, Any], stops: AbstractSet[int]) -> Row:
    """By the template's generation marks, and the token that ends the turn, if it stands right behind them.

    Not by transformers' own mask: it leaves out the last tokens of a turn whose last character takes several.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        conversations=[[dict(turn) for turn in chat.turns]],
        tools=chat.tools,
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
        **arguments,
    )
    (text,), (spans,) = rendered
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, places = out["input_ids"], out["offset_mapping"]
    mask = [0] * len(ids)
    for begin, end in spans:
        own = [i for i, (first, behind) in enumerate(places) if first < end and behind > begin]
        if own and own[-1] + 1 < len(ids) and ids[own[-1] + 1] in stops:
            own.append(own[-1] + 1)
        for i in own[: _written([ids[i] for i in own], stops)]:
            mask[i] = 1
    return Row(chat.kind, tuple(ids), tuple(mask))


def _incremental_rows(
    tokenizer: Any, chat: Chat, arguments: Mapping[str, Any], stops: AbstractSet[int]
) -> list[Row]:
    """By what the template renders before and after each of the assistant's turns."""
    end = render(tokenizer, chat, chat.turns, arguments, ask=False)
    together: list[tuple[int, int]] = []  # where in `end` the assistant speaks
    rows = []
    for i, turn in enumerate(chat.turns):
        if turn["role"] != "assistant":
            continue
        before = render(tokenizer, chat, chat.turns[:i], arguments, ask=True)
        after = render(tokenizer, chat, chat.turns[: i + 1], arguments, ask=False)
        if not after.startswith(before):
            continue  # it asks for an answer in another way than it shows one
        if end.startswith(after):
            together.append((len(before), len(after)))
        else:
            rows.append(_row(tokenizer, chat.kind, after, [(len(before), len(after))], stops))
    if together:
        rows.append(_row(tokenizer, chat.kind, end[: together[-1][1]], together, stops))
    return rows


def _row(tokenizer: Any, kind: str, text: str, spoken: Sequence[tuple[int, int]], stops: AbstractSet[int]) -> Row:
    """Tokens piece by piece, as they are when the assistant's begin where it was asked."""
    ids: list[int] = []
    mask: list[int] = []
    at = 0
    for begin, end in spoken:
        for first, behind, own in ((at, begin, False), (begin, end, True)):
            tokens = _continuation(tokenizer, text[:first], text[:behind])
            written = _written(tokens, stops) if own else 0
            ids += tokens
            mask += [1] * written + [0] * (len(tokens) - written)
        at = end
    return Row(kind, tuple(ids), tuple(mask))


def _continuation(tokenizer: Any, before: str, after: str) -> tuple[int, ...]:
    """The tokens of a text behind those of its beginning; alone, a piece may get a space before it."""
    head, whole = _ids(tokenizer, before), _ids(tokenizer, after)
    return whole[len(head) :] if whole[: len(head)] == head else _ids(tokenizer, after[len(before) :])


def _written(tokens: Sequence[int], stops: AbstractSet[int]) -> int:
    """How many of a turn's tokens the assistant wrote: a line feed after the end is the template's."""
    return max((i + 1 for i, token in enumerate(tokens) if token in stops), default=len(tokens))
