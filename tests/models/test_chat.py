"""Chat templates: the real one of SmolLM2, and what templates in general may and may not do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numba_meta.errors import ModelFileError, UsageError
from numba_meta.models.files.gguf import read_gguf
from numba_meta.models.text.chat import ChatTemplate
from numba_meta.models.text.template_check import template_problem
from numba_meta.models.text.tokenizer import Tokenizer

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


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ("", {}),
        ("indent=4", {"indent": 4}),
        ("indent='\t'", {"indent": "\t"}),
        ("separators=(',', ':')", {"separators": (",", ":")}),
        ("sort_keys=true", {"sort_keys": True}),
        ("ensure_ascii=true", {"ensure_ascii": True}),
        ("ensure_ascii=true, indent=none, separators=(', ', ':'), sort_keys=true",
         {"ensure_ascii": True, "separators": (", ", ":"), "sort_keys": True}),
        ("true, 2, none, true", {"ensure_ascii": True, "indent": 2, "sort_keys": True}),  # by position, as transformers has them
    ],
)  # fmt: skip
def test_tojson_takes_what_json_takes(options: str, arguments: dict[str, Any]) -> None:
    value = [{"z": "<é>'&", "a": [1, None, 2.5, True], "m": {}}]
    source = f"{{{{ tools | tojson({options}) }}}}"
    assert made(source).render(HELLO, tools=value) == json.dumps(value, **{"ensure_ascii": False, **arguments})


def test_any_role_reaches_the_template_which_decides() -> None:
    roles = made("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    messages = [{"role": role, "content": "a"} for role in ("ipython", "wizard", "model", "critic of sorts", "developer")]
    assert roles.render(messages) == "ipython:a;wizard:a;model:a;critic of sorts:a;system:a;", "developer is system to who does not know it"
    knows = made("{% for m in messages %}{{ '<dev>' if m.role == 'developer' else m.role }}{% endfor %}")
    assert knows.render([*messages[-1:], *HELLO]) == "<dev>user"
    speaks = made("{# for developers: developer #}developer {{ messages[0].role }} {{ 'a developer' }}")
    assert speaks.render(messages[-1:]) == "developer system a developer", "neither comments nor texts are what it knows"
    strict = made("{% if messages[0].role != 'user' %}{{ raise_exception('Only user, not ' + messages[0].role) }}{% endif %}")
    with pytest.raises(UsageError, match="refuses these messages: Only user, not wizard"):
        strict.render(messages[1:2])


def test_no_content_beside_calls_or_thoughts() -> None:
    calls = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    for silent in ({**calls, "content": None}, calls, {"role": "assistant", "content": None, "reasoning_content": "hm"}):
        conversation = [*HELLO, silent]
        assert made("[{{ messages[1].content }}]").render(conversation) == "[]"
        assert made("{{ '<' + messages[1].content + '>' }}").render(conversation) == "<>"
        assert made("{% if messages[1].content %}yes{% endif %}no").render(conversation) == "no"
        for none in ("is none", "== none", "== None"):
            assert made(f"{{% if messages[1]['content'] {none} %}}none{{% endif %}}").render(conversation) == "none", "as they ask for it"
    thinks = {"role": "assistant", "content": None, "reasoning_content": "b"}
    assert made("{{ messages[1].reasoning_content }}").render([*HELLO, thinks]) == "b"


@pytest.mark.parametrize("none", [[], (), None])
def test_no_tool_calls_are_as_no_key(none: Any) -> None:
    asked = made("{% for m in messages %}{{ 'tool_calls' in m }}{{ m.tool_calls is defined }}{{ m.content }};{% endfor %}")
    assert asked.render([*HELLO, {"role": "assistant", "content": "b", "tool_calls": none}]) == "FalseFalsea;FalseFalseb;"


@pytest.mark.parametrize(
    "wrong", [{"add_generation_prompt": "no"}, {"parse_special": 1}, {"tools": np.zeros(2)}, {"documents": np.zeros(2)}, {"tools": 5}]
)
def test_wrong_options_are_one_clear_line(wrong: dict[str, Any]) -> None:
    template = made("{{ messages[0].content }}")
    for way in (template.encode, *([] if "parse_special" in wrong else [template.render])):
        with pytest.raises(UsageError, match=next(iter(wrong))) as caught:
            way(HELLO, **wrong)
        assert "\n" not in str(caught.value)


ARGUMENTS = '{"city": "Köln",  "n": 2}'  # two spaces: not as json.dumps writes it


@pytest.mark.parametrize("nested", [True, False])
def test_arguments_of_tool_calls_are_mappings_and_text(nested: bool) -> None:
    def render(expression: str, arguments: Any = ARGUMENTS) -> str:
        call = {"name": "f", "arguments": arguments}
        message = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call} if nested else call]}
        where = "messages[1].tool_calls[0]" + (".function" if nested else "")
        return made("{% set a = " + where + ".arguments %}" + expression).render([*HELLO, message])

    assert render("{{ a | tojson }}") == '{"city": "Köln", "n": 2}'
    assert render("{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}{{ a is mapping }}") == "city=Köln;n=2;True"
    assert render("{{ a.city }}{{ a['n'] + 1 }}{{ a | length }}") == "Köln32"
    for printed in ("{{ a }}", "{{ '' + a + '' }}", "{{ '' ~ a }}", "{{ a | string }}", "{{ '%s' % a }}"):
        assert render(printed) == ARGUMENTS, "a template that prints them gets what came"
    assert render("{{ a | tojson }}", {"n": 1}) == '{"n": 1}'
    assert render("{{ a }}", "not JSON") == "not JSON" and render("{{ a }}", "[1]") == "[1]"


def test_tools_and_documents_are_none_where_there_are_none() -> None:
    asked = made("{{ tools is none }}{{ documents is none }}{{ tools is defined }}{{ enable_thinking is defined }}")
    assert asked.render(HELLO) == "TrueTrueTrueFalse"
    assert asked.render(HELLO, tools=[], documents=[{}], enable_thinking=False) == "FalseFalseTrueTrue"


def test_special_tokens_have_the_names_of_transformers() -> None:
    tokens = {f"tokenizer.ggml.{name}_token_id": i for name, i in (("padding", 4), ("seperator", 3), ("mask", 99), ("cls", 0xFFFFFFFF))}
    metadata = {**TINY, **tokens, KEY: "{{ pad_token }}{{ sep_token }}{{ mask_token is defined }}{{ cls_token is defined }}"}
    template = ChatTemplate.from_metadata(metadata, Tokenizer.from_metadata(metadata))
    assert template is not None and template.render(HELLO) == "baFalseFalse"
    none = {**TINY, "tokenizer.ggml.bos_token_id": -1, KEY: "[{{ bos_token }}{{ '' + bos_token }}]"}
    template = ChatTemplate.from_metadata(none, Tokenizer.from_metadata(none))
    assert template is not None and template.render(HELLO) == "[]" and template.encode([{"role": "user", "content": "a"}])[:1] != [1]


def test_a_file_may_have_a_template_for_tools_beside_the_usual_one() -> None:
    def render(metadata: dict[str, Any], **variables: Any) -> str:
        template = ChatTemplate.from_metadata({**TINY, **metadata}, Tokenizer.from_metadata(TINY))
        assert template is not None
        return template.render(HELLO, **variables)

    both = {KEY: "plain", f"{KEY}.tool_use": "tools", f"{KEY}.rag": "rag", "tokenizer.chat_templates": ["tool_use", "rag"]}
    assert [render(both), render(both, tools=[]), render(both, tools=[{}])] == ["plain", "plain", "tools"]
    assert render({f"{KEY}.default": "default", f"{KEY}.tool_use": "tools"}) == "default"
    assert render({f"{KEY}.tool_use": "tools"}) == "tools"
    with pytest.raises(ModelFileError, match="tool_use is of type list"):
        render({KEY: "plain", f"{KEY}.tool_use": ["a"]})


def test_contents_are_text_or_parts_as_the_template_expects() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    only_parts = made("{% for m in messages %}{% for p in m.content if p.type == 'text' %}{{ p.text }};{% endfor %}{% endfor %}")
    assert only_parts.render([{"role": "user", "content": "ab"}]) == "ab;", "no text is lost"
    assert only_parts.render([{"role": "user", "content": parts}]) == "a;b;"
    either = made(
        "{% set c = messages[0].content %}{% if c is string %}{{ c }}{% else %}{% for p in c %}({{ p.text }}){% endfor %}{% endif %}"
    )
    assert either.render([{"role": "user", "content": parts}]) == "(a)(b)"
    assert either.render([{"role": "user", "content": "ab"}]) == "ab"
    assert made("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "ab", "no Python lists in a prompt"
    answer = {"role": "tool", "content": {"sum": 3}}
    assert made("{{ messages[1].content | tojson }}").render([*HELLO, answer]) == '{"sum": 3}'


def test_content_may_come_in_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert made("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "ab"
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert made("[{{ messages[1].content }}]{{ messages[1].tool_calls[0].id }}").render([*HELLO, calls]) == "[]1"


def test_begin_token_is_not_doubled() -> None:
    assert made("{{ bos_token }}{{ messages[0].content }}").encode(HELLO) == [1, 3]
    assert made("{{ messages[0].content }}").encode(HELLO) == [1, 3]
    assert made("{{ bos_token }}{{ bos_token }}{{ messages[0].content }}").encode(HELLO) == [1, 1, 3], "two of its own stay"
    ends = {**TINY, "tokenizer.ggml.add_eos_token": True}
    template = ChatTemplate.from_metadata({**ends, KEY: "{{ messages[0].content }}"}, Tokenizer.from_metadata(ends))
    assert template is not None and template.encode(HELLO) == [1, 3]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        ("hi", "expected a list"),
        ({"role": "user", "content": "a"}, "expected a list"),
        (["hi"], "message 0 is of type str"),
        ([*HELLO, {"role": "", "content": "a"}], "message 1 has the role '', expected a name such as user"),
        ([{"role": "assistant", "content": "a", "tool_calls": "f"}], "tool calls of type str, expected a list"),
        ([{"role": "assistant", "content": "a", "tool_calls": np.zeros(2)}], "tool calls of type ndarray, expected a list"),
        ([{"role": "assistant", "content": None}], "content of type NoneType, expected text"),
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
    reason = "is not a valid Jinja template: Expected an expression, got 'end of statement block'"
    assert f"{reason};" in str(caught.value) and (template_problem({KEY: template.source}, "a file") or "").endswith(reason)
    with pytest.raises(ModelFileError, match="expected a string"):
        made(["a list"])
