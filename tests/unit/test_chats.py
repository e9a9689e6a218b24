"""Chats rendered by templates of every style, with the mask over what the assistant said."""

import json
import string
from pathlib import Path
from typing import Any

import pytest
from dflash_trainer.chats import Row, answered_rows, prompt_ids, read_chats
from dflash_trainer.errors import CannotStart
from hypothesis import given, settings
from hypothesis import strategies as st

MARKS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<bos>")
NOWHERE = Path("chats.jsonl")

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.content %}{{ m.content }}{% endif %}"
    "{%- for call in m.tool_calls or [] %}{{ '[call ' + call.function.name + ']' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{%- else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (  # as Llama 3
    "{{ '<bos>' }}{%- for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MODEL = (  # as Gemma: another name for the assistant, no system turn, an end that is no special word of others
    "{{ '<bos>' }}{%- for m in messages %}{%- if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
THINKING = (  # as Qwen3: only what follows the last question keeps its thoughts
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}{%- set text = m.content %}"
    "{%- if m.role == 'assistant' %}{%- set parts = text.split('</think>') %}"
    "{%- if loop.index0 < ns.last %}{% set text = parts[-1].lstrip('\n') %}"
    "{%- elif parts | length == 1 %}{% set text = '<think>\n\n</think>\n\n' + text %}{% endif %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
ENDS = {CHATML: "<|im_end|>", MARKED: "<|im_end|>", HEADERS: "<|eot_id|>", MODEL: "<|im_end|>"}


def tokenizer_of(template: str, prefix: bool = False) -> Any:
    """A token for each character, and one for each mark; with `prefix` a text begins with a space."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {c: i for i, c in enumerate(sorted({*string.printable, "ä", "·"}))}
    plain = Tokenizer(models.WordLevel(letters, unk_token="·"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if prefix:
        plain.normalizer = normalizers.Prepend(" ")
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, additional_special_tokens=list(MARKS))
    tokenizer.chat_template = template
    return tokenizer


def chats_of(tmp_path: Path, *rows: dict[str, Any]) -> Any:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_chats(path)


def spoken(tokenizer: Any, row: Row) -> list[str]:
    """The supervised parts as text."""
    parts: list[list[int]] = [[]]
    for token, own in zip(row.ids, row.mask, strict=True):
        if own:
            parts[-1].append(token)
        elif parts[-1]:
            parts.append([])
    return [tokenizer.decode(part) for part in parts if part]


def stops_of(tokenizer: Any) -> set[int]:
    return set(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|eot_id|>"]))


TEXT = st.text(string.ascii_letters + string.punctuation + " \n", min_size=1, max_size=30).filter(
    lambda text: text.strip() == text and "think" not in text
)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), template=st.sampled_from([*ENDS]))
def test_supervised_is_what_the_assistant_wrote_and_its_end_whatever_the_template(
    turns: list[tuple[str, str]], template: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = tokenizer_of(template)
    messages = [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    (chat,) = chats_of(tmp_path_factory.mktemp("chat"), {"messages": messages})
    (row,) = answered_rows(tokenizer, chat, {}, stops_of(tokenizer), NOWHERE)
    assert spoken(tokenizer, row) == [answer + ENDS[template] for _, answer in turns]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole.startswith(tokenizer.decode(row.ids))
    # What it is asked with is what stood before its last answer.
    asked = prompt_ids(tokenizer, chat, {}, NOWHERE)
    assert row.ids[: len(asked)] == asked
    assert not any(row.mask[len(asked) - 1 : len(asked)])
    assert row.mask[len(asked)] == 1  # its first token is learned too


def test_marks_that_leave_the_end_out_and_characters_of_several_tokens_lose_nothing(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level, additional_special_tokens=list(MARKS))
    tokenizer.chat_template = MARKED.replace(
        "m.content + '<|im_end|>' }}{% endgen", "m.content }}{% endgen"
    ).replace("{{ '\n' }}{%- else", "{{ '<|im_end|>\n' }}{%- else")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes 🎉"}]
    (chat,) = chats_of(tmp_path, {"messages": messages})
    (row,) = answered_rows(tokenizer, chat, {}, stops_of(tokenizer), NOWHERE)
    assert spoken(tokenizer, row) == ["yes 🎉<|im_end|>"]


def test_what_the_template_puts_behind_the_end_is_not_the_assistants_inside_marks_either(tmp_path: Path) -> None:
    inside = MARKED.replace("'<|im_end|>' }}{% endgeneration %}{{ '\n' }}", "'<|im_end|>\n' }}{% endgeneration %}")
    assert inside != MARKED
    tokenizer = tokenizer_of(inside)
    (chat,) = chats_of(
        tmp_path, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    )
    (row,) = answered_rows(tokenizer, chat, {}, stops_of(tokenizer), NOWHERE)
    assert spoken(tokenizer, row) == ["b<|im_end|>"]


def test_a_tokenizer_that_begins_a_text_with_a_space_puts_none_before_an_answer(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.content }};{% endfor %}", prefix=True)
    (chat,) = chats_of(
        tmp_path, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    )
    (row,) = answered_rows(tokenizer, chat, {}, stops_of(tokenizer), NOWHERE)
    assert tokenizer.decode(row.ids) == " a;b;"
    assert spoken(tokenizer, row) == ["b;"]


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"prompt": "one\u2028two"}\n{"prompt": "three"}\r\n')
    assert [chat.turns[0]["content"] for chat in read_chats(path)] == ["one\u2028two", "three"]


def test_arguments_of_a_tool_reach_the_template_as_an_object(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"place": "Ulm"}'}}
    messages = [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "wet"},
    ]
    (chat,) = chats_of(tmp_path, {"messages": messages})
    assert chat.turns[1]["tool_calls"][0]["function"]["arguments"] == {"place": "Ulm"}


def test_an_answer_whose_thoughts_are_left_out_later_has_a_row_of_its_own(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(THINKING)
    first, second = "<think>\nhm\n</think>\n\none", "<think>\nso\n</think>\n\ntwo"
    messages = [
        {"role": role, "content": text}
        for role, text in (("user", "a"), ("assistant", first), ("user", "b"), ("assistant", second))
    ]
    (chat,) = chats_of(tmp_path, {"messages": messages})
    rows = answered_rows(tokenizer, chat, {}, stops_of(tokenizer), NOWHERE)
    assert [spoken(tokenizer, row) for row in rows] == [[first + "<|im_end|>"], [second + "<|im_end|>"]]
    later = tokenizer.decode(rows[1].ids)
    assert "hm" not in later
    assert "one<|im_end|>" in later


def test_the_mode_of_the_template_is_the_one_asked_for(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(THINKING)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "one"}]
    (chat,) = chats_of(tmp_path, {"messages": messages})
    thinking, quiet = (
        answered_rows(tokenizer, chat, arguments, stops_of(tokenizer), NOWHERE)[0]
        for arguments in ({}, {"enable_thinking": False})
    )
    assert thinking.ids == quiet.ids
    assert spoken(tokenizer, thinking) == ["<think>\n\n</think>\n\none<|im_end|>"]  # the target writes these itself
    assert spoken(tokenizer, quiet) == ["one<|im_end|>"]  # they are asked with
    asked = prompt_ids(tokenizer, chat, {"enable_thinking": False}, NOWHERE)
    assert tokenizer.decode(asked).endswith("assistant\n<think>\n\n</think>\n\n")


def test_calls_of_tools_are_the_assistants_and_their_results_are_not(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CHATML)
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    messages = [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "wet"},
        {"role": "assistant", "content": "yes"},
    ]
    (chat,) = chats_of(tmp_path, {"messages": messages})
    (row,) = answered_rows(tokenizer, chat, {}, stops_of(tokenizer), NOWHERE)
    assert spoken(tokenizer, row) == ["[call weather]<|im_end|>", "yes<|im_end|>"]
    assert tokenizer.decode(prompt_ids(tokenizer, chat, {}, NOWHERE)).endswith(
        "wet<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_chat_that_the_template_does_not_take_is_named(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(MODEL)
    fine = {"prompt": "a"}
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    *_, chat = chats_of(tmp_path, fine, {"messages": messages})
    with pytest.raises(CannotStart, match=r"chats\.jsonl:2: the chat template does not take it: System role not"):
        prompt_ids(tokenizer, chat, {}, NOWHERE)


def test_an_answer_that_is_asked_for_in_another_way_than_it_is_shown_is_left_out(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(
        CHATML.replace("'<|im_start|>assistant\n' }}{% endif %}", "'<|im_start|>ai\n' }}{% endif %}")
    )
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    (chat,) = chats_of(tmp_path, {"messages": messages})
    assert answered_rows(tokenizer, chat, {}, stops_of(tokenizer), NOWHERE) == []


def test_questions_are_the_same_whatever_their_case_spaces_and_answers(tmp_path: Path) -> None:
    forms = (
        {"prompt": "What  is\nrain?"},
        {"messages": [{"role": "user", "content": "what is RAIN?"}, {"role": "assistant", "content": "wet"}]},
        {"conversations": [{"from": "human", "value": "What is rain?"}, {"from": "gpt", "value": "water"}]},
    )
    keys = {chat.key for chat in chats_of(tmp_path, *forms)}
    assert len(keys) == 1
    assert {chat.key for chat in chats_of(tmp_path, {"prompt": "What is snow?"})} != keys
    turns = [("user", "What is rain?"), ("assistant", "wet"), ("user", "And snow?"), ("assistant", "cold")]
    (longer,) = chats_of(tmp_path, {"messages": [{"role": role, "content": text} for role, text in turns]})
    assert keys < longer.keys  # it asks that too, and more
