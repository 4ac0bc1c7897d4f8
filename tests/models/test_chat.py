"""Chat templates: the real one of SmolLM2, and what templates in general may and may not do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from numba_meta.errors import ModelFileError, UsageError
from numba_meta.models.chat import ChatTemplate
from numba_meta.models.gguf import read_gguf
from numba_meta.models.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
KEY = "tokenizer.chat_template"
TINY = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *"abc"],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1],
    "tokenizer.ggml.scores": [0.0] * 6,
    "tokenizer.ggml.add_space_prefix": False,
}
HELLO = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> tuple[Tokenizer, ChatTemplate]:
    with read_gguf(smollm2_path) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
        template = ChatTemplate.from_metadata(file.metadata, tokenizer)
    assert template is not None
    return tokenizer, template


def made(source: Any) -> ChatTemplate:
    template = ChatTemplate.from_metadata({**TINY, KEY: source}, Tokenizer.from_metadata(TINY))
    assert template is not None
    return template


def test_smollm2_writes_chatml_with_its_own_system_message(smollm2: tuple[Tokenizer, ChatTemplate]) -> None:
    text = smollm2[1].render([{"role": "user", "content": "Hi"}])
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert text == system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_smollm2_keeps_the_order_of_a_conversation(smollm2: tuple[Tokenizer, ChatTemplate]) -> None:
    messages = [("system", "Be brief."), ("user", "  2+2? "), ("assistant", "4"), ("user", "{{ 7*7 }}")]
    text = smollm2[1].render([{"role": role, "content": content} for role, content in messages], add_generation_prompt=False)
    assert text == "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)


def test_smollm2_chat_ids_are_those_of_llama_cpp(smollm2: tuple[Tokenizer, ChatTemplate]) -> None:
    prompt = next(p for p in json.loads((DATA / "smollm2.json").read_text(encoding="utf-8"))["prompts"] if p["name"] == "chat")
    question = re.search(r"user\n(.*?)<\|im_end\|>", prompt["text"])
    assert question is not None
    assert smollm2[1].encode([{"role": "user", "content": question[1]}]) == prompt["ids"]


def test_a_base_model_has_no_template(gemma3_path: Path) -> None:
    with read_gguf(gemma3_path) as file:
        assert ChatTemplate.from_metadata(file.metadata, Tokenizer.from_metadata(TINY)) is None
    assert ChatTemplate.from_metadata({KEY: " \n"}, Tokenizer.from_metadata(TINY)) is None


def test_block_lines_leave_no_white_space() -> None:
    source = "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend"
    assert made(source).render(HELLO) == "a\nend"


def test_templates_see_special_tokens_variables_and_helpers() -> None:
    assert made("{{ bos_token }}{{ eos_token }}{{ unk_token }}").render(HELLO) == "<s></s><unk>"
    assert made("{{ tools | tojson }}").render(HELLO, tools=[{"name": "<é>"}]) == '[{"name": "<é>"}]'
    assert re.fullmatch(r"\d{4}-\d\d", made("{{ strftime_now('%Y-%m') }}").render(HELLO))
    assert made("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}").render(HELLO) == "012"
    assert made("{% generation %}{{ messages[0].content }}{% endgeneration %}!").render(HELLO) == "a!"


def test_content_may_come_in_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert made("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "ab"
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert made("[{{ messages[1].content }}]{{ messages[1].tool_calls[0].id }}").render([*HELLO, calls]) == "[]1"


def test_begin_token_is_not_doubled() -> None:
    assert made("{{ bos_token }}{{ messages[0].content }}").encode(HELLO) == [1, 3]
    assert made("{{ messages[0].content }}").encode(HELLO) == [1, 3]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        ("hi", "expected a list"),
        ({"role": "user", "content": "a"}, "expected a list"),
        (["hi"], "message 0 is of type str"),
        ([*HELLO, {"role": "wizard", "content": "a"}], "message 1 has the role 'wizard', expected one of system, "),
        ([{"content": "a"}], "role None"),
        ([{"role": ["user"], "content": "a"}], "role"),
        ([{"role": "user"}], "content of type NoneType, expected text"),
        ([{"role": "user", "content": 5}], "content of type int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "content part that is not text"),
    ],
)
def test_faulty_messages_are_one_clear_line(messages: Any, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        made("{{ messages }}").render(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_a_refusing_or_forbidden_template_is_one_clear_line(source: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        made(source).render(HELLO)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_faulty_template_disturbs_only_who_chats() -> None:
    template = made("{% for %}\nnot Jinja")
    with pytest.raises(ModelFileError, match="not a valid Jinja template") as caught:
        template.render(HELLO)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelFileError, match="expected a string"):
        made(["a list"])
