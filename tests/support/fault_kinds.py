"""Faults of a Python file, by kind, from its syntax tree: each replaces one expression or statement
with another text."""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Change = tuple[ast.AST, str]  # a node, and the text in its place
TURNED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
}
# Keyword arguments that no test can see: `strict` asserts what holds, a locale decides `encoding`;
# `**fields` has no name.
UNSEEN = {"strict", "encoding", "stacklevel", "init", "repr", None}
# Whose arguments' order, presence or text decides nothing that is promised.
UNPROMISED = {"print", "info", "warning", "debug", "getLogger", "TypeVar"}


@dataclass(frozen=True)
class Fault:
    """A change of one place of a file.

    Attributes:
        file: Relative to the root of the project.
        kind: One of `KINDS`.
        start, end: The bytes that `text` replaces.
        first, last: Lines by which tests are found that run the change: those of the body where a
            check is left out.
        function: Lines of the innermost function around it; empty if there is none.
        before, after: The changed lines, stripped and joined.
    """

    file: str
    kind: str
    start: int
    end: int
    text: str
    line: int
    first: int
    last: int
    function: range
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.before, self.after

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def valid(self, source: bytes) -> bool:
        try:
            compile(self.applied(source), self.file, "exec", dont_inherit=True)
        except SyntaxError:
            return False
        return True


def with_fields(node: ast.AST, **fields: object) -> str:
    """Return the text of a copy of an expression with other fields, in parentheses where it may
    need them."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    text = ast.unparse(changed)
    return text if isinstance(node, ast.Call | ast.Constant | ast.Name) else f"({text})"


def swapped(items: list[ast.expr]) -> Iterator[list[ast.expr]]:
    """Exchange neighbours of a list that are not the same."""
    for index in range(len(items) - 1):
        if ast.dump(items[index]) != ast.dump(items[index + 1]):
            yield [*items[:index], items[index + 1], items[index], *items[index + 2 :]]


def comparison(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for turned in TURNED[type(operator)]:
                yield (
                    node,
                    with_fields(node, ops=[*node.ops[:index], turned(), *node.ops[index + 1 :]]),
                )


def index(node: ast.AST) -> Iterator[Change]:
    """Shift an index, an end of a slice or of a range by one."""
    match node:
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper)):
            ends = [end for end in (lower, upper) if end is not None]
        case ast.Subscript(
            slice=(ast.Constant(value=int()) | ast.BinOp() | ast.UnaryOp()) as place
        ):
            ends = [place]
        case ast.Call(func=ast.Name(id="range"), args=ends):
            ends = [end for end in ends if not isinstance(end, ast.Starred)]
        case _:
            return
    for end in ends:
        yield (
            end,
            f"{ast.unparse(end)} + 1"
            if isinstance(end, ast.Constant | ast.Name)
            else f"({ast.unparse(end)}) + 1",
        )
        if not (isinstance(end, ast.Constant) and end.value == 0):
            yield end, f"({ast.unparse(end)}) - 1"


def boolean(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not isinstance(
            test, ast.Compare | ast.BoolOp
        ):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"({ast.unparse(operand)})"


def conjunction(node: ast.AST) -> Iterator[Change]:
    """Exchange `and` and `or`, or leave one side out."""
    if isinstance(node, ast.BoolOp):
        yield node, with_fields(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        for index in range(len(node.values)):
            rest = [*node.values[:index], *node.values[index + 1 :]]
            if not any(isinstance(part, ast.NamedExpr) for part in ast.walk(node.values[index])):
                yield (
                    node,
                    with_fields(node, values=rest)
                    if len(rest) > 1
                    else f"({ast.unparse(rest[0])})",
                )


def check(node: ast.AST) -> Iterator[Change]:
    """Leave out a check that raises, or a call whose result nobody takes."""
    match node:
        case ast.If(test=test, body=[*_, ast.Raise()]):
            if not any(isinstance(part, ast.NamedExpr) for part in ast.walk(test)):
                yield test, "False"
            else:
                yield test, f"(({ast.unparse(test)}) and False)"
        case ast.Expr(value=ast.Call(func=func)) if (
            ast.unparse(func).split(".")[-1] not in UNPROMISED
        ):
            yield node, "pass"


def keyword(node: ast.AST) -> Iterator[Change]:
    """Drop a keyword argument of a call."""
    if isinstance(node, ast.Call):
        for index, argument in enumerate(node.keywords):
            if argument.arg not in UNSEEN:
                yield (
                    node,
                    with_fields(
                        node, keywords=[*node.keywords[:index], *node.keywords[index + 1 :]]
                    ),
                )


def unclosed(node: ast.AST) -> Iterator[Change]:
    """Enter a context and never leave it, or leave out one that gives nothing; and drop what
    `finally` does."""
    if isinstance(node, ast.With):
        for item in node.items:
            if isinstance(item.optional_vars, ast.Name):
                # so that it is not closed because nobody holds it
                held = f"_held_{item.optional_vars.id}"
                entered = f"({held} := {ast.unparse(item.context_expr)}).__enter__()"
                text = f"__import__('contextlib').nullcontext({entered})"
            elif item.optional_vars is None:
                text = "__import__('contextlib').nullcontext()"
            else:
                continue
            yield item.context_expr, text
    elif isinstance(node, ast.Try) and node.finalbody:
        yield node.finalbody[0], "pass"


def constant(value: ast.expr | None) -> Iterator[Change]:
    match value:
        case ast.Constant(value=bool(old)):
            yield value, str(not old)
        case ast.Constant(value=int(old)):
            yield value, str(old + 1)
        case ast.Constant(value=float(old)):
            yield value, repr(old * 2 if old else 0.5)
        case ast.Constant(value=None):
            yield value, "1"
        case ast.Constant(value=str(old)) if old:
            yield value, repr(old + "x")


def default(node: ast.AST) -> Iterator[Change]:
    """Change a default of an argument, a field, a table or a constant of the module."""
    match node:
        case ast.arguments(defaults=defaults, kw_defaults=more):
            for value in (*defaults, *more):
                yield from constant(value)
        case ast.ClassDef(body=body) | ast.Module(body=body):
            for statement in body:
                if isinstance(statement, ast.Assign | ast.AnnAssign):
                    yield from constant(statement.value)
                    for part in ast.walk(statement.value) if statement.value else ():
                        if isinstance(part, ast.Dict):
                            for value in part.values:
                                yield from constant(value)
        case ast.Call(func=ast.Attribute(attr="get" | "pop"), args=[_, value]):
            yield from constant(value)
        case ast.Call(func=ast.Name(id="getattr"), args=[_, _, value]):
            yield from constant(value)


def branch(node: ast.AST) -> Iterator[Change]:
    """Take the other branch of an expression, or return nothing."""
    match node:
        case ast.IfExp():
            yield node, with_fields(node, body=node.orelse, orelse=node.body)
        case ast.Return(value=ast.expr() as value) if not (
            isinstance(value, ast.Constant) and value.value is None
        ):
            yield node, "return None"


def sign(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.BinOp(op=operator) if type(operator) in OPERATORS:
            if not any(isinstance(side, ast.JoinedStr) for side in (node.left, node.right)):
                yield node, with_fields(node, op=OPERATORS[type(operator)]())
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield node, ast.unparse(operand)


def early(node: ast.AST) -> Iterator[Change]:
    """End a function, a loop or a turn of it before it is done."""
    match node:
        case ast.FunctionDef(body=[_, *rest]):
            for statement in rest:
                if isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr | ast.For):
                    yield statement, "return"
        case ast.For(body=[*_, (ast.Assign() | ast.AugAssign() | ast.Expr()) as last]):
            yield last, f"{ast.unparse(last)}; break"
        case ast.Continue():
            yield node, "break"
        case ast.Break():
            yield node, "continue"


def pair(node: ast.AST) -> Iterator[Change]:
    """Exchange two neighbours in a tuple or among the arguments of a call."""
    match node:
        case ast.Tuple(elts=elements, ctx=ast.Load()):
            for order in swapped(elements):
                yield node, with_fields(node, elts=order)
        case ast.Call(args=arguments) if not isinstance(
            node.func, ast.Name
        ) or node.func.id not in {
            "max",
            "min",
            "isinstance",
        }:
            for order in swapped(arguments):
                yield node, with_fields(node, args=order)


KINDS: dict[str, Callable[[ast.AST], Iterator[Change]]] = {
    "comparison turned": comparison,
    "index or bound shifted": index,
    "boolean negated": boolean,
    "and, or": conjunction,
    "check left out": check,
    "keyword dropped": keyword,
    "not closed": unclosed,
    "default changed": default,
    "wrong branch": branch,
    "sign turned": sign,
    "ended early": early,
    "elements swapped": pair,
}


def parts(node: ast.AST, function: range = range(0)) -> Iterator[tuple[ast.AST, range]]:
    """Walk over nodes whose changes may be faults, with the lines of the function around each.

    Left out are annotations, texts with fields (whose parts have no positions in Python 3.11),
    messages of errors and of logs, docstrings, and sets of which the order decides nothing: bases,
    `isinstance`, `except` and `in (...)`.
    """
    body = function
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        body = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    yield node, body
    for name, child in ast.iter_fields(node):
        match node, name:
            case (
                _,
                "annotation"
                | "returns"
                | "bases"
                | "decorator_list"
                | "type_params"
                | "exc"
                | "cause",
            ):
                continue
            case ast.ExceptHandler(), "type":
                continue
            case ast.JoinedStr(), _:
                continue
            case ast.Call(
                func=ast.Name(id="isinstance" | "print" | "TypeVar")
                | ast.Attribute(attr="warning" | "info")
            ), _:
                continue
            case ast.Compare(ops=[ast.In() | ast.NotIn()]), "comparators" if isinstance(
                node.comparators[0], ast.Tuple | ast.List
            ):
                continue
            case ast.keyword(arg=("strict" | "init" | "repr")), _:
                continue
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))), _:
                continue
        for item in child if isinstance(child, list) else [child]:
            if isinstance(item, ast.AST):
                yield from parts(item, body)


def faults_of(root: Path, file: str) -> list[Fault]:
    """List all faults of a file; some may leave no valid Python, which `valid` says."""
    source = (root / file).read_bytes()
    starts = [0]  # bytes before each line
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    faults: dict[tuple[int, int, str], Fault] = {}
    for node, function in parts(ast.parse(source)):
        for kind, changes in KINDS.items():
            for place, text in changes(node):
                first, last = place.lineno, place.end_lineno or place.lineno  # type: ignore[attr-defined]
                start = starts[first - 1] + place.col_offset  # type: ignore[attr-defined]
                end = starts[last - 1] + place.end_col_offset  # type: ignore[attr-defined]
                ran = first, last
                if kind == "check left out" and isinstance(node, ast.If):
                    ran = node.body[0].lineno, node.body[-1].end_lineno or 0
                elif isinstance(node, ast.arguments):
                    ran = function.start, function.stop - 1
                whole = source[starts[first - 1] : starts[last]].decode()
                changed = (
                    source[starts[first - 1] : start].decode()
                    + text
                    + source[end : starts[last]].decode()
                )
                before, after = (" ".join(shown.split()) for shown in (whole, changed))
                fault = Fault(file, kind, start, end, text, first, *ran, function, before, after)
                if before != after:
                    faults.setdefault((start, end, text), fault)
    return list(faults.values())
