"""What a chat template's syntax tree says of the messages that it expects. Pure."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import loopcontrols

from numba_meta.models.text.template_sandbox import GenerationBlock, SandboxedTemplates, check_source

_CUTS = ("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index", "rindex", "count", "replace",
         "removeprefix", "removesuffix", "strip", "lstrip", "rstrip")  # fmt: skip


def parse(source: str) -> nodes.Template:
    """The syntax tree of a template. Raises as `template_sandbox.compile_template`."""
    check_source(source)
    environment = SandboxedTemplates(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock])
    return environment.parse(source)


def looked_for(tree: nodes.Template) -> frozenset[str]:
    """Literal texts that the template looks for in other texts: `'</think>' in content`, `content.split('</think>')`."""
    found: set[str] = set()
    for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter)):
        if isinstance(node, nodes.Compare):
            within = [node.expr, *(operand.expr for operand in node.ops)]
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr in _CUTS:
            within = list(node.args)
        elif isinstance(node, nodes.Filter) and node.name == "replace":
            within = list(node.args)
        else:
            continue
        for part in within:
            constants = [part] if isinstance(part, nodes.Const) else part.find_all(nodes.Const)
            found.update(constant.value for constant in constants if isinstance(constant.value, str))
    return frozenset(found)


def knows_role(tree: nodes.Template, role: str) -> bool:
    """Whether a literal of the template's code is the name of `role`; comments and what it writes as it is are none."""
    return any(constant.value == role for constant in tree.find_all(nodes.Const))


def asks_for_none(tree: nodes.Template) -> bool:
    """Whether the template asks if a content is none, and so has an answer for that."""
    for test in tree.find_all(nodes.Test):
        if test.name == "none" and _is_content(test.node):
            return True
    for compared in tree.find_all(nodes.Compare):
        sides = [compared.expr, *(operand.expr for operand in compared.ops)]
        if any(isinstance(side, nodes.Const) and side.value is None for side in sides) and any(map(_is_content, sides)):
            return True
    return False


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"
