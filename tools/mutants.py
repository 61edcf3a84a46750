"""Wrong versions of a machine: one table row, guard or deadline removed from its source at a time.

Found in the syntax tree, with names that do not depend on line numbers:

    states.py:NEXT[Phase.TRAINING, On.FAULT]=removed
    controller.py:Controller._freezing:if(world is None)=False
    controller.py:Controller._committing:moment(self.since + self._options.commit_timeout_s)=never

A second place with the same text in the same function has `#2` after it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Final, TypeVar

TABLES: Final = frozenset({"NEXT", "STEP"})
"""Names of the dictionaries whose rows are removed."""

_Tree = TypeVar("_Tree", bound=ast.AST)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    name: str
    path: Path
    tree: ast.Module
    """Of the unchanged file; shared by all mutants of it."""
    edit: Edit

    def compiled(self) -> CodeType:
        """The changed module."""
        return compile(self.edit.apply(self.tree), str(self.path), "exec")

    def text(self) -> str:
        """The changed module's source, without its comments."""
        return ast.unparse(self.edit.apply(self.tree))

    def unchanged(self) -> str:
        """The same of the right module."""
        return ast.unparse(self.tree)


@dataclass(frozen=True, slots=True)
class Edit:
    """A node replaced by another; None: a row of a table left out."""

    old: ast.AST
    new: ast.expr | None

    def apply(self, tree: _Tree) -> _Tree:
        """The changed tree; the one given stays as it is."""
        changed: _Tree = ast.fix_missing_locations(_copy(tree, self))
        return changed


def _copy(node: Any, edit: Edit) -> Any:
    """Copy a tree, but for the edit."""
    if node is edit.old:
        return edit.new
    if isinstance(node, list):
        return [_copy(item, edit) for item in node]
    if not isinstance(node, ast.AST):
        return node
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Dict) and edit.new is None and edit.old in node.keys:
        rows = [row for row in zip(node.keys, node.values, strict=True) if row[0] is not edit.old]
        fields = {"keys": [key for key, _ in rows], "values": [value for _, value in rows]}
    changed = {name: _copy(value, edit) for name, value in fields.items()}
    return ast.copy_location(type(node)(**changed), node)


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a file, in the order of the source; those that change nothing left out."""
    tree = ast.parse(path.read_text())
    found: list[Mutant] = []
    texts: Counter[str] = Counter()
    for place, scope in _scopes(tree):
        seen = {ast.unparse(scope)}
        for what, edits in _places(scope):
            count = texts[f"{place}{what}"] = texts[f"{place}{what}"] + 1
            which = f"{what}#{count}" if count > 1 else what
            for change, edit in edits:
                changed = ast.unparse(edit.apply(scope))
                if changed not in seen:
                    seen.add(changed)
                    found.append(Mutant(f"{path.name}:{place}{which}={change}", path, tree, edit))
    return found


_Place = tuple[str, list[tuple[str, Edit]]]
"""What is changed, in words, and the ways in which it is."""


def _scopes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Tables, and every function with its qualified name. Neither holds another."""
    pending: list[tuple[str, ast.stmt]] = [("", statement) for statement in tree.body]
    for prefix, statement in pending:
        if isinstance(statement, ast.ClassDef):
            pending += [(f"{prefix}{statement.name}.", inner) for inner in statement.body]
        elif isinstance(statement, ast.FunctionDef):
            yield f"{prefix}{statement.name}:", statement
        elif isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) in TABLES:
            yield ast.unparse(statement.target), statement


def _places(scope: ast.AST) -> Iterator[_Place]:
    if isinstance(scope, ast.AnnAssign):
        yield from _rows(scope)
    elif isinstance(scope, ast.FunctionDef):
        yield from _guards(scope)
        yield from _deadlines(scope)


# -- rows -------------------------------------------------------------------------------------------------


def _rows(table: ast.AnnAssign) -> Iterator[_Place]:
    if isinstance(table.value, ast.Dict):
        for key in table.value.keys:
            if key is not None:
                yield f"[{ast.unparse(key).strip('()')}]", [("removed", Edit(key, None))]


# -- guards -----------------------------------------------------------------------------------------------


def _guards(function: ast.FunctionDef) -> Iterator[_Place]:
    """Every condition, forced both ways; and every operand of `and` and `or`, left out."""
    known: set[ast.AST] = set()
    for node in ast.walk(function):
        for kind, condition in _conditions(node):
            known |= {condition, _bare(condition)}
            yield f"{kind}({ast.unparse(condition)})", _forced(condition, (True, False))
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            if node not in known:
                yield f"value({ast.unparse(node)})", _forced(node, (True, False))
            for operand in node.values:
                known |= {operand, _bare(operand)}
                left_out = isinstance(node.op, ast.And)
                kind = "and" if left_out else "or"
                yield f"{kind}({ast.unparse(operand)})", _forced(operand, (left_out,))
    for node in ast.walk(function):
        if isinstance(node, ast.Compare) and node not in known:
            yield f"compare({ast.unparse(node)})", _forced(node, (True, False))


def _conditions(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """What a node makes depend on an expression."""
    match node:
        case ast.If(test=test) | ast.IfExp(test=test):
            yield "if", test
        case ast.While(test=test):
            yield "while", test
        case ast.match_case(guard=ast.expr() as guard):
            yield "case", guard
        case ast.comprehension(ifs=ifs):
            for condition in ifs:
                yield "where", condition
        case ast.Call(func=ast.Name(id="any" | "all" as kind), args=[ast.GeneratorExp(elt=element)]):
            yield kind, element


def _bare(condition: ast.expr) -> ast.expr:
    """Without a `not`: the same condition."""
    while isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        condition = condition.operand
    return condition


def _forced(node: ast.expr, values: Sequence[bool]) -> list[tuple[str, Edit]]:
    return [(str(value), Edit(node, _instead(node, ast.Constant(value)))) for value in values]


def _instead(node: ast.expr, constant: ast.expr) -> ast.expr:
    """A constant in place of an expression, which is still evaluated if that has effects or binds a name."""
    if not any(isinstance(inner, ast.Call | ast.NamedExpr) for inner in ast.walk(node)):
        return constant
    return ast.Subscript(
        value=ast.Tuple(elts=[node, constant], ctx=ast.Load()), slice=ast.Constant(1), ctx=ast.Load()
    )


# -- deadlines --------------------------------------------------------------------------------------------

_NEVER: Final = ast.Call(func=ast.Name("float", ast.Load()), args=[ast.Constant("inf")], keywords=[])


def _deadlines(function: ast.FunctionDef) -> Iterator[_Place]:
    """Every moment that is computed from a timeout, returned by a function of moments, or chosen from."""
    known: set[ast.AST] = {inner for node in ast.walk(function) for inner in _compared(node)}
    returns = ast.unparse(function.returns) if function.returns is not None else ""
    if returns in ("float", "float | None"):
        never = ast.Constant(None) if "None" in returns else _NEVER
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
                known |= _sums(node.value)
                yield f"return({ast.unparse(node.value)})", [_never(node.value, never)]
    for node in ast.walk(function):
        for moment in _moments(node):
            if moment not in known and not _is_none(moment):
                known |= _sums(moment)
                yield f"moment({ast.unparse(moment)})", [_never(moment, _NEVER)]


def _never(node: ast.expr, never: ast.expr) -> tuple[str, Edit]:
    return "never", Edit(node, _instead(node, never))


def _sums(node: ast.expr) -> set[ast.AST]:
    """A node, and the sums that make up one."""
    known: set[ast.AST] = {node}
    while isinstance(node, ast.BinOp):
        node = node.left
        known.add(node)
    return known


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _compared(node: ast.AST) -> Iterator[ast.AST]:
    """A sum that is only compared: it never comes if the comparison is forced."""
    if isinstance(node, ast.Compare):
        yield from (inner for inner in [node.left, *node.comparators] if isinstance(inner, ast.BinOp))


def _moments(node: ast.AST) -> Iterator[ast.expr]:
    """Deadlines that a node computes, or chooses from."""
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub()) if any(map(_is_timeout, ast.walk(node))):
            yield node
        case ast.Call(func=ast.Name(id="min"), args=[_, _, *_] as chosen):
            yield from chosen
        case ast.Call(func=ast.Name(id="min"), args=[chosen]):
            for inner in ast.walk(chosen):
                yield from _listed(inner)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="moments"), attr="append"), args=[moment]):
            yield moment
        case (
            ast.Assign(targets=[ast.Name(id="moments")], value=value)
            | ast.AugAssign(target=ast.Name(id="moments"), value=value)
        ):
            yield from _listed(value)
        case ast.Assign(targets=[ast.Attribute(attr="deadline")], value=value):
            yield value
        case ast.AnnAssign(target=ast.Attribute(attr="deadline"), value=ast.expr() as value):
            yield value


def _listed(node: ast.AST) -> Iterator[ast.expr]:
    """What a list of moments is made of."""
    match node:
        case ast.List(elts=elements):
            yield from (element for element in elements if not isinstance(element, ast.Starred))
        case ast.ListComp(elt=element):
            yield element


def _is_timeout(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.endswith("_s")
    return False
