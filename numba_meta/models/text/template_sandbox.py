"""Chat templates as programs that end: Jinja's immutable sandbox, in which every step and every character is counted.

A template comes with a model file from anywhere. Jinja's sandbox keeps it from reaching Python; what is here keeps it from taking all
memory or all time. Loops, macros and outputs call counting filters that are put into the parsed template (`_instrument`); filters,
operators and calls whose result can be larger than what they are given say how large it would be before they compute it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import pass_context

from numba_meta.models.text.template_growth import MOST_BITS, extent, filter_growth, format_growth, method_growth, printf_growth

MOST_SOURCE_CHARACTERS = 1 << 19  # of a template; those of models have some thousands
MOST_STEPS = 200_000  # of one rendering, beside what the messages add
MOST_CHARACTERS = 16 << 20  # that one rendering may produce, whether they are shown or not, beside what the messages add
_MOST_INPUT = 1 << 27  # characters of messages that count; what holds itself would have no end
_PER_CHARACTER = 64  # steps, and characters produced, for each character of the messages
_CHARACTERS_A_STEP = 64  # that text operations read
_BUDGET = "\0budget"  # the name of the counters among a template's variables, which no template can write


class EndlessTemplateError(Exception):
    """A template that computes or writes more than any chat needs."""


class Budget:
    """What is left to one rendering."""

    def __init__(self, n_input: int) -> None:
        self.steps = self.most_steps = MOST_STEPS + _PER_CHARACTER * n_input
        self.characters = self.most_characters = MOST_CHARACTERS + _PER_CHARACTER * n_input

    def spend(self, n_read: int = 0) -> None:
        """One step, and more for text that it reads."""
        self.steps -= 1 + n_read // _CHARACTERS_A_STEP
        if self.steps < 0:
            raise EndlessTemplateError(f"it takes more than {self.most_steps:,} steps")

    def produce(self, n_characters: int) -> None:
        """Text or entries of lists that come into being; said before they do."""
        self.characters -= n_characters
        if self.characters < 0:
            raise EndlessTemplateError(f"it makes more than {self.most_characters:,} characters")

    def read(self, *values: Any) -> None:
        """One step that looks at all of `values`, whatever lies in them."""
        self.spend(sum(extent(value, self.steps * _CHARACTERS_A_STEP) for value in values))


def with_budget(variables: Mapping[str, Any]) -> dict[str, Any]:
    """`variables` of a rendering and the counters of it."""
    n_input = min(extent(list(variables.values()), _MOST_INPUT), _MOST_INPUT)
    return {**variables, _BUDGET: Budget(n_input)}


def compile_template(source: str, functions: Mapping[str, Callable[..., Any]], filters: Mapping[str, Callable[..., Any]]) -> Template:
    """`source` as `transformers` compiles it, with these functions and filters beside Jinja's own.

    Raises TemplateError, or what Python's own compiler raises for code that is too deep.
    """
    check_source(source)
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock], optimized=False)
    del environment.globals["lipsum"]
    environment.globals.update(functions)
    environment.filters = {name: _counted_filter(name, function) for name, function in {**environment.filters, **filters}.items()}
    environment.filters.update({_STEP: _step, _TEXT: _text, _READ: _read, _CUT: _cut})
    tests: dict[str, Any] = dict(environment.tests)
    environment.tests = {name: _counted_test(function) for name, function in tests.items()}
    environment.finalize = _text
    code = environment.compile(_instrument(environment.parse(source), environment))
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


def check_source(source: str) -> None:
    """Raises TemplateError for a template that is too long to be one."""
    if len(source) > MOST_SOURCE_CHARACTERS:
        raise TemplateError(f"it has {len(source):,} characters, expected at most {MOST_SOURCE_CHARACTERS:,}")


class SandboxedTemplates(ImmutableSandboxedEnvironment):
    """Jinja's sandbox that raises errors as they are.

    Jinja gives their tracebacks lines of the template. The frames for that lie in circles, which would hold every caller and what it holds
    (a model) until garbage is collected, also behind an error that was caught.
    """

    def handle_exception(self, source: str | None = None) -> NoReturn:
        raise  # Jinja calls this where it handles an error


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant says for training; here it is its contents."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# ---- what is put into a parsed template --------------------------------------------------------------------------------------------------

_STEP, _TEXT, _READ, _CUT = "\0step", "\0text", "\0read", "\0cut"  # filters that no template can name


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _step_at(node: nodes.Node, n_made: int = 0) -> nodes.Filter:
    return _filter(nodes.Const(n_made, lineno=node.lineno), _STEP)


def _instrument(tree: nodes.Template, environment: Environment) -> nodes.Template:
    """Loops, macros and outputs are counted where they run, and so is what comparisons and `~` look at and what slices make."""
    for output in list(tree.find_all(nodes.Output)):
        n_literal = sum(len(child.data) for child in output.nodes if isinstance(child, nodes.TemplateData))
        if n_literal:
            output.nodes.insert(0, _filter(nodes.Const(n_literal, lineno=output.lineno), _STEP))
    repeated: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)))
    for node in repeated:
        n_entries = sum(len(literal.items) for kind in (nodes.List, nodes.Tuple, nodes.Dict) for literal in node.find_all(kind))
        node.body.insert(0, nodes.Output([_step_at(node, n_entries)], lineno=node.lineno))
    for loop in list(tree.find_all(nodes.For)):
        if loop.test is not None:
            loop.test = nodes.And(nodes.Not(_step_at(loop), lineno=loop.lineno), loop.test, lineno=loop.lineno)
    for entry in list(tree.find_all(nodes.Getitem)):
        if isinstance(entry.arg, nodes.Slice):
            entry.node = _filter(entry.node, _CUT)
    for joined in list(tree.find_all(nodes.Concat)):
        joined.nodes = [_filter(node, _TEXT) for node in joined.nodes]
    for compared in list(tree.find_all(nodes.Compare)):
        compared.expr = _filter(compared.expr, _READ)
        for operand in compared.ops:
            operand.expr = _filter(operand.expr, _READ)
    tree.set_environment(environment)
    return tree


@pass_context
def _step(context: Context, n_made: int) -> str:
    """Counts a round of a loop or a call of a macro and what it makes: literal text, entries of literal lists. Writes nothing."""
    budget: Budget = context.parent[_BUDGET]
    budget.spend()
    budget.produce(n_made)
    return ""


@pass_context
def _text(context: Context, value: Any) -> Any:
    """Counts a value that is about to become text."""
    budget: Budget = context.parent[_BUDGET]
    n_characters = extent(value, budget.characters)
    budget.spend(n_characters)
    budget.produce(n_characters)
    return value


@pass_context
def _cut(context: Context, value: Any) -> Any:
    """Counts a value of which a slice is about to be made."""
    budget: Budget = context.parent[_BUDGET]
    n_entries = len(value) if hasattr(value, "__len__") else 0
    budget.spend(n_entries)
    budget.produce(n_entries)
    return value


@pass_context
def _read(context: Context, value: Any) -> Any:
    """Counts a value that is compared."""
    context.parent[_BUDGET].read(value)
    return value


# ---- filters, tests, operators, calls ----------------------------------------------------------------------------------------------------

# These look at a value itself, or hand its entries on, and never at what lies within them.
_SHALLOW = {"length", "count", "first", "last", "list", "reverse", "default", "d", "select", "reject", "selectattr", "rejectattr", "map",
            "items", "batch", "slice", "random", "attr"}  # fmt: skip


def _counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its reading and its result counted, the latter before it is computed where it may be larger than what is read."""
    leading = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def counted(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        budget: Budget = context.parent[_BUDGET]
        if name in _SHALLOW:
            budget.spend(len(value) if hasattr(value, "__len__") else 0)
        else:
            budget.read(value, *args, *kwargs.values())
        budget.produce(filter_growth(name, value, args, kwargs, budget.characters))
        if leading is None:
            result = function(value, *args, **kwargs)
        else:
            first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}[leading.name]
            result = function(first, value, *args, **kwargs)
        budget.produce(len(result) if hasattr(result, "__len__") else 1)
        return result

    return counted


def _counted_test(function: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, "jinja_pass_arg"):
        return function  # asks whether a filter or a test of a name is there

    @pass_context
    def counted(context: Context, value: Any, *args: Any) -> Any:
        if args:
            context.parent[_BUDGET].read(value, *args)
        return function(value, *args)

    return counted


class _Formatter(SandboxedFormatter):
    """`'{:>9}'.format(x)` that counts what its fields write."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._budget = Budget(0)

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._budget.read(value, format_spec)
        self._budget.produce(format_growth(format_spec, MOST_CHARACTERS) + extent(value, MOST_CHARACTERS))
        return super().format_field(value, format_spec)


class _Environment(SandboxedTemplates):
    """The sandbox whose operators and calls are counted."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget: Budget = context.parent[_BUDGET]
        budget.spend()
        if operator in "+*" and (hasattr(left, "__len__") or hasattr(right, "__len__")):
            n_left, n_right = (len(side) if hasattr(side, "__len__") else 0 for side in (left, right))
            times = next((max(0, side) for side in (left, right) if operator == "*" and isinstance(side, int)), 1)
            budget.produce((n_left + n_right) * times)
        elif operator == "%" and isinstance(left, (str, bytes)):
            budget.read(left, right)
            text = left if isinstance(left, str) else left.decode("latin-1")
            budget.produce(printf_growth(text, right, budget.characters))
        elif isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            n_bits = left.bit_length() * max(0, right) if operator == "**" else left.bit_length() + right.bit_length()
            if n_bits > MOST_BITS:
                raise EndlessTemplateError(f"it computes a number of more than {MOST_BITS:,} bits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805  as in the base class
        budget: Budget = __context.parent[_BUDGET]
        budget.spend()
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, types.BuiltinMethodType) and isinstance(owner, (str, bytes, int, float)):
            budget.read(owner, *args, *kwargs.values())
            budget.produce(method_growth(__obj.__name__, owner, args, kwargs, budget.characters))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, (str, bytes, list, tuple, dict)):
            budget.produce(len(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            positional, named = ((), args[0]) if is_map and args else (args, kwargs)
            return _Formatter(self).vformat(str(text), positional, named)

        return formatted

