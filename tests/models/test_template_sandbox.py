"""Templates that would take all memory or all time end in one line, soon, with little memory; templates as models have them do not."""

from __future__ import annotations

import resource
import time

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from models.test_chat import HELLO, made

from numba_meta.errors import ModelFileError, NumbaMetaError
from numba_meta.models.text.template_growth import extent
from numba_meta.models.text.template_sandbox import MOST_CHARACTERS, MOST_SOURCE_CHARACTERS, MOST_STEPS, GenerationBlock

DOUBLED = "{% set n = namespace(v='xxxxxxxx') %}{% for i in range(99) %}{% set n.v = BODY %}{% endfor %}"
NESTED = "{% set n = namespace(v=['x']) %}{% for i in range(99) %}{% set n.v = [n.v, n.v] %}{% endfor %}"

# What each would make or run through is in the name; all of it is far more than there is memory or time.
ENDLESS = {
    "text times a number": "{{ 'x' * 10**9 }}",
    "list times a number": "{{ ([0] * 10**9) | length }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "power of a product": "{% set n = namespace(v=7) %}{% for i in range(99) %}{% set n.v = n.v * n.v %}{% endfor %}{{ n.v > 1 }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "percent with brackets in a name": "{{ '%((a))999999999d' % {'(a)': 1} }}",
    "percent behind a percent": "{{ '%%%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent names": "{% set v = {'a': 'x' * 9000} %}{{ ('%(a)s' * 9000) % v }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format filter star": "{{ '%*d' | format(1000000000, 1) }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "format method by value": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format fields": "{{ ('{0}' * 9000).format('x' * 90000) }}",
    "center": "{{ 'x' | center(10**9) }}",
    "center of constants": "{{ 'x' | center(1000000000) }}",
    "indent": "{{ ('x\n' * 9000) | indent(10**6) }}",
    "indent text": "{{ ('x\n' * 9000) | indent('x' * 90000) }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list | length }}",
    "slice": "{{ [1] | slice(10**9) | list | length }}",
    "wordwrap": "{{ ('x' * 90000) | wordwrap(1, true, 'x' * 9000) | length }}",
    "replace filter": "{{ ('x' * 90000) | replace('', 'x' * 90000) | length }}",
    "join filter": "{{ range(99999) | list | join('x' * 90000) | length }}",
    "round": "{{ 2.5 | round(10**9, 'floor') }}",
    "tojson indent": "{{ ([1] * 90000) | tojson(indent=90000) | length }}",
    "sum of lists": "{{ ([[1] * 99] * 9999) | sum(start=[]) | length }}",
    "striptags": "{{ ('<!-- -->' * 900000) | striptags }}",
    "methods": "{{ 'x'.ljust(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "expandtabs": "{{ '\t\t'.expandtabs(10**9) }}",
    "replace": "{{ ('x' * 90000).replace('', 'x' * 90000) | length }}",
    "join": "{{ ('x' * 90000).join(['a'] * 90000) | length }}",
    "translate": "{{ ('x' * 90000).translate({120: 'y' * 90000}) | length }}",
    "to_bytes": "{{ (1).to_bytes(10**9, 'big') | length }}",
    "bytes": "{{ ('x'.encode() * 10**9) | length }}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops over text": "{% set t = 'x' * 99999 %}{% for a in t %}{% for b in t %}{% endfor %}{% endfor %}",
    "loops over literal text": "{% for a in range(99999) %}" + "literal " * 999 + "{% endfor %}",
    "literal text in a block": "{% set t %}{% for a in range(99999) %}" + "literal " * 999 + "{% endfor %}{% endset %}",
    "loops within filters": "{% for a in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "recursive loop": "{% for a in range(99) recursive %}{{ loop(range(99)) if loop.depth < 9 }}{% endfor %}",
    "branching macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "text that doubles": DOUBLED.replace("BODY", "n.v + n.v"),
    "text that doubles by ~": DOUBLED.replace("BODY", "n.v ~ n.v"),
    "text that doubles by join": DOUBLED.replace("BODY", "[n.v, n.v] | join"),
    "text that doubles in a macro": "{% macro f(v) %}{{ v }}{{ v }}{% endmacro %}" + DOUBLED.replace("BODY", "f(n.v)"),
    "lists in lists, printed": NESTED + "{{ n.v }}",
    "lists in lists, as JSON": NESTED + "{{ n.v | tojson }}",
    "lists in lists, as text": NESTED + "{{ n.v | string }}",
    "lists in lists, joined": NESTED + "{{ n.v ~ '' }}",
    "lists in lists, joined by a filter": NESTED + "{{ n.v | join }}",
    "lists in lists, formatted": NESTED + "{{ '{}'.format(n.v) }}",
    "lists in lists, by percent": NESTED + "{{ '%s' % [n.v] }}",
    "lists in lists, compared": NESTED + "{% set a = n.v %}" + NESTED + "{{ a == n.v }}",
    "lists in lists, compared by a test": NESTED + "{% set a = n.v %}" + NESTED + "{{ [a] | select('eq', n.v) | list | length }}",
    "lists in lists, sorted": NESTED + "{{ [n.v, n.v] | sort | length }}",
    "slices": "{% set t = 'x' * 999999 %}{% for i in range(9999) %}{% set y = t[1:] %}{% endfor %}",
    "slices that are kept": "{% set t = 'x' * 999999 %}{% set n = namespace(l=[]) %}{% for i in range(9999) %}{% set n.l = [n.l, t[i:]] %}"
                            "{% endfor %}",
    "slices of lists": "{% set t = [0] * 999999 %}{% for i in range(9999) %}{% set y = t[1:] %}{% endfor %}",
    "literal lists that are kept": "{% set n = namespace(l=[]) %}{% for i in range(99999) %}{% set n.l = [n.l" + ", 0" * 9999 + "] %}"
                                   "{% endfor %}",
    "variables that are kept": "{% macro f(n) %}{% set x = 'x' * 999999 %}{{ f(n + 1) }}{{ x }}{% endmacro %}{{ f(0) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_template_is_one_line_and_takes_little_memory(name: str) -> None:
    template = made(ENDLESS[name])
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(NumbaMetaError) as caught:
        template.render(HELLO)
    line = str(caught.value)
    assert len(line.splitlines()) == 1 and len(line) < 300
    if "RecursionError" not in line and "recursion" not in line:
        assert isinstance(caught.value, ModelFileError) and "tokenizer.chat_template does not come to an end: it " in line
        assert line.endswith("give the prompt as plain text instead")
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 16 * MOST_CHARACTERS, "ru_maxrss is in KiB"
    assert time.process_time() - start < 60, "of this process alone; a second or two where nothing else runs"


def test_what_templates_do_is_far_from_the_limits() -> None:
    source = (
        "{% macro turn(role, text) %}<|{{ role }}|>{{ text | trim }}{% endmacro %}{% set ns = namespace(n=0, all='') %}"
        "{% for m in messages[::-1] %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{{ turn(m.role, m.content) }}{% set ns.all = ns.all ~ m.content[:1] %}{% endfor %}"
        "{{ '%d of %s' % (ns.n, messages | length) }}{{ '{:>4}'.format(7) }}{{ 'x' | center(5) }}{{ '-' * 9 }}{{ 2 ** 20 }}"
    )
    messages = [{"role": "user", "content": f" {'word ' * 400}{i} "} for i in range(2000)]
    text = made(source).render(messages)
    assert text.count("<|user|>") == 2000 and text.endswith("2000 of 2000   7  x  ---------1048576")
    long_text = "x" * (2 * MOST_CHARACTERS)
    one = made("{% for m in messages %}{{ m.content | trim }}{{ m.content + '!' }}{% endfor %}")
    assert len(one.render([{"role": "user", "content": long_text}])) == 2 * len(long_text) + 1, "what the messages hold has room"


def test_a_template_that_is_too_long_or_too_deep_is_no_template() -> None:
    for source in (
        "x" * (MOST_SOURCE_CHARACTERS + 1),
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{{ " + "1 + " * 20000 + "1 }}",
        "{{ " + "9" * 10000 + " }}",
    ):
        with pytest.raises(NumbaMetaError) as caught:
            made(source).render(HELLO)
        assert isinstance(caught.value, ModelFileError) and "not a valid Jinja template" in str(caught.value), source[:20]
        assert len(str(caught.value).splitlines()) == 1


def test_counters_are_those_of_one_rendering_and_out_of_reach() -> None:
    template = made("{% for i in range(90000) %}{% endfor %}{{ messages[0].content }}")
    assert MOST_STEPS < 3 * 90000
    assert [template.render(HELLO) for _ in range(3)] == ["a"] * 3
    with pytest.raises(NumbaMetaError):
        made("{{ '' | lipsum }}").render(HELLO)
    for source in ("{{ lipsum() }}", "{{ self._TemplateReference__context.parent }}"):
        with pytest.raises(NumbaMetaError):
            made(source).render(HELLO)


def test_an_extent_stops_at_its_limit() -> None:
    value: list[object] = ["x"]
    for _ in range(200):
        value = [value, value]
    assert 1000 < extent(value, 1000) < 2000
    assert extent({"a": ["bc", 1]}, 1000) == extent({"a": ["bc", 1]}, 1 << 60)


SNIPPETS = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ (loop.previtem or m).role }};{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ m.content }}{{ loop.revindex }}{% else %}none{% endfor %}",
    "{% for m in messages if m.role == 'none' %}{{ m.content }}{% else %}none{% endfor %}",
    "{% for k, v in {'a': 1, 'b': [2, 3]}.items() %}{{ k }}={{ v }}{% if not loop.last %}, {% endif %}{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{{ loop.depth }}{% endfor %}",
    "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{% endfor %}",
    "{% macro f(a, b='x') %}[{{ a }}{{ b }}{{ varargs }}{{ kwargs }}]{% endmacro %}{{ f(1) }}{{ f(1, 2, 3, c=4) }}",
    "{% macro f() %}<{{ caller(2) }}>{% endmacro %}{% call(n) f() %}n{{ n }}{% endcall %}",
    "{% set x %}a {{ messages[0].content }} b{% endset %}{{ x | upper }}{{ x | length }}",
    "{% filter upper %}a{{ messages[0].content }}{% endfilter %}",
    "{% set ns = namespace(n=0, l=[]) %}{% for m in messages %}{% set ns.n = ns.n + 2 %}{% set ns.l = ns.l + [m.role] %}"
    "{% endfor %}{{ ns.n }}{{ ns.l }}",
    "{{ messages[::-1] | map(attribute='role') | list }}{{ messages[1:][0].role }}{{ 'abcdef'[1:4] }}{{ 'abc'[-1] }}"
    "{{ messages[-1]['role'] }}",
    "{{ 1 + 2 * 3 - 4 / 2 // 1 % 3 ** 2 }}{{ -1 }}{{ not true }}{{ 'a' ~ 1 ~ none }}{{ 'ab' * 2 }}{{ [1] * 2 + [3] }}",
    "{{ 1 < 2 <= 2 != 3 }}{{ 'a' in 'abc' }}{{ 'x' not in messages[0] }}{{ [1, 2] == [1, 2] }}{{ (1, 2) < (1, 3) }}{{ none is none }}",
    "{{ nothing is defined }}{{ nothing }}{{ nothing | default('d') }}{{ messages is sequence }}"
    "{{ messages[0] is mapping }}{{ 3 is divisibleby 3 }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ [1, none, 2] | select | list }}"
    "{{ [3, 1, 2] | sort | join('-') }}",
    "{{ '%s is %05.2f and %d%%' % ('x', 1.5, 3) }}{{ '{:>5}|{a}|{!r}'.format('x', 'y', a=2) }}{{ '%s' | format('y') }}"
    "{{ 'x' | center(5) }}",
    "{{ ' a b ' | trim }}{{ 'a\nb' | indent(2) }}{{ 'a-b'.split('-') }}{{ 'abc'.replace('b', 'x') }}"
    "{{ 'x'.join(['a', 'b']) }}{{ 'ab' | title }}",
    "{{ {'b': 1, 'a': [true, none, 'é<&>']} }}{{ {'b': 1} | string }}{{ [1, 2] | first }}{{ 'abc' | list }}{{ 3.7 | int }}"
    "{{ '5' | int + 1 }}",
    "{% if messages %}\n  yes\n{% elif false %}\n  no\n{% endif %}\n{%- raw %} {{ raw }} {% endraw -%}\n end {# comment #}!",
    "{% block a %}b{{ messages[0].role }}{% endblock %}{{ self.a() }}{% set a, b = 1, 2 %}{{ a }}"
    "{{ b }}{% with c = 3 %}{{ c }}{% endwith %}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}{% set j = joiner(', ') %}{% for i in range(3) %}{{ j() }}"
    "{{ i }}{% endfor %}",
    "{{ dict(a=1, **{'b': 2}) }}{{ range(1, 9, 3) | list }}{{ [1, 2, 3] | batch(2, 0) | list }}"
    "{{ [1, 2, 3] | slice(2) | map('list') | list }}",
    "{{ messages | groupby('role') | map('first') | list }}{{ [[1, 2], [3]] | sum(start=0, attribute='0') }}"
    "{{ 2.5 | round }}{{ 'a b c' | wordcount }}",
]  # fmt: skip


@pytest.mark.parametrize("source", SNIPPETS)
def test_counting_changes_nothing_that_a_template_writes(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock])
    messages = [{"role": role, "content": f"{role} é"} for role in ("user", "assistant", "user", "tool")]
    wanted = plain.from_string(source).render(messages=messages, tools=None, documents=None, add_generation_prompt=True)
    assert made(source).render(messages) == wanted != ""
