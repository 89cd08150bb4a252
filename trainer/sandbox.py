"""A restricted interpreter that judges small Python functions written by a model.

It walks the syntax tree itself: nothing is ever compiled or handed to the host interpreter, so a program can reach no
attribute, module, file or builtin that is not named here, and a budget bounds its time and memory.
"""

import ast
import copy
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

_MAX_SOURCE = 4000  # characters
_MAX_CONSTANT = 10**6
_MAX_INT = 10**12
_MAX_SIZE = 10_000  # elements of a list, characters of a str
_MAX_NESTING = 50  # lists within lists

_GRAMMAR = (
    (ast.Assign, ast.AugAssign, ast.For, ast.If, ast.Return, ast.Expr, ast.Pass, ast.Break, ast.Continue)
    + (ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.BoolOp, ast.And, ast.Or)
    + (ast.UnaryOp, ast.USub, ast.UAdd, ast.Not, ast.IfExp, ast.Compare, ast.cmpop)
    + (ast.List, ast.ListComp, ast.GeneratorExp, ast.comprehension, ast.Subscript, ast.Call)
    + (ast.Name, ast.Load, ast.Store, ast.Constant)
)
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_}
_BUILTINS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (sum, len, max, min, abs, sorted, list, int, bool)
}
_TAKES_GENERATOR = {"sum", "max", "min", "sorted", "list"}

_Flow = Literal["break", "continue", "return"]


class SandboxError(Exception):
    """The program is not allowed, or failed; the message names the reason."""


def call_function(source: str, argument: Any, *, budget: int = 20_000) -> Any:
    """Calls the one function that ``source`` defines.

    The function takes one plain argument. Its body may hold assignments to a name (also augmented), ``for`` over a list
    without ``else``, ``if``, ``return``, ``pass``, ``break`` and ``continue``. Expressions are ``+ - * // %``, ``not and
    or``, comparisons except ``is``, ``a if b else c``, lists, list comprehensions, ``x[i]`` and calls of ``sum len max
    min abs sorted list int bool`` with positional arguments; a generator expression may be the only argument of a call.
    Values are ints, bools, strs, None and lists of these. What is accepted computes what Python computes.

    Args:
        source: Text of at most 4000 characters.
        argument: A value of the types above. The function works on a copy.
        budget: How many steps the call may take: evaluated nodes, plus elements of the values that it builds or reads.

    Raises:
        SandboxError: if the text is refused, or the call fails or exceeds a limit.
    """
    try:
        return _Call(_parse(source), budget).run(argument)
    except (TypeError, ValueError, IndexError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise SandboxError(f"{type(error).__name__}: {error}") from error


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise SandboxError(otherwise)


def _parse(source: str) -> ast.FunctionDef:
    """The function that a text defines, after refusing everything that is known to be wrong before it runs."""
    _require(len(source) <= _MAX_SOURCE, f"source of {len(source)} characters, at most {_MAX_SOURCE} are allowed")
    try:
        with warnings.catch_warnings(action="ignore"):
            body = ast.parse(source).body
    except SyntaxError as error:
        raise SandboxError(f"SyntaxError: {error.msg}") from error
    _require(len(body) == 1 and isinstance(body[0], ast.FunctionDef), "the text must be one function and nothing else")
    function = body[0]
    assert isinstance(function, ast.FunctionDef)
    plain = ast.arguments(posonlyargs=[], args=[ast.arg("x")], kwonlyargs=[], kw_defaults=[], defaults=[])
    signature = copy.copy(function.args)
    signature.args = [ast.arg("x", a.annotation) for a in signature.args]
    _require(ast.dump(signature) == ast.dump(plain), "the function must take one plain argument")
    decorated = function.decorator_list or function.returns or getattr(function, "type_params", None)
    _require(not decorated, "decorators, annotations and type parameters are refused")
    _check_statements(function.body, in_loop=False)
    for node in (node for statement in function.body for node in ast.walk(statement)):
        _check_node(node)
    return function


def _check_statements(body: list[ast.stmt], in_loop: bool) -> None:
    """Refuses jumps without a loop: a rule of the compiler that the parser does not know."""
    for statement in body:
        _require(in_loop or not isinstance(statement, ast.Break | ast.Continue), "break or continue outside of a loop")
        if isinstance(statement, ast.If | ast.For):
            _check_statements(statement.body, in_loop or isinstance(statement, ast.For))
            _check_statements(statement.orelse, in_loop)


def _check_node(node: ast.AST) -> None:
    name = type(node).__name__
    _require(isinstance(node, _GRAMMAR) and not isinstance(node, ast.Is | ast.IsNot), f"{name} is refused")
    match node:
        case ast.Assign(targets=targets):
            _require(len(targets) == 1 and isinstance(targets[0], ast.Name), "only one name can be assigned to")
        case ast.AugAssign(target=target) | ast.For(target=target) | ast.comprehension(target=target):
            _require(isinstance(target, ast.Name), f"{name} needs a name as its target")
            _require(not getattr(node, "orelse", None), "else of a loop is refused")
            _require(not getattr(node, "is_async", 0), "async is refused")
        case ast.Expr(value=value):
            _require(isinstance(value, ast.Constant), "a statement that only evaluates an expression is refused")
        case ast.Call(func=called, keywords=keywords):
            _require(isinstance(called, ast.Name) and not keywords, "only builtins with positional arguments can be called")
        case ast.Name(id=identifier):
            _require(not identifier.startswith("__"), f"name {identifier!r} is refused")
        case ast.Constant(value=value):
            _require(value is None or type(value) in (int, bool, str), f"a constant of type {type(value).__name__} is refused")
            _require(type(value) is not int or value <= _MAX_CONSTANT, "the constant is too large")


class _Scope:
    """The variables of the function or of one comprehension, which sees those around it."""

    def __init__(self, names: set[str], outer: "_Scope | None" = None) -> None:
        self.names, self.outer, self.values = names, outer, dict[str, Any]()

    def owner(self, name: str) -> "_Scope | None":
        """The innermost scope to which the name belongs, bound or not."""
        return self if name in self.names else self.outer and self.outer.owner(name)

    def read(self, name: str) -> Any:
        owner = self.owner(name)
        if owner is None or name not in owner.values:
            raise SandboxError(f"name {name!r} is not defined")
        return owner.values[name]


class _Call:
    """One call of a parsed function."""

    def __init__(self, function: ast.FunctionDef, budget: int) -> None:
        self.function, self.budget, self.left, self.result = function, budget, budget, None
        stored = (n for s in function.body for n in _own_nodes(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        self.parameter = function.args.args[0].arg
        self.scope = _Scope({self.parameter, *(name.id for name in stored)})

    def run(self, argument: Any) -> Any:
        self._weigh(argument)
        self.scope.values[self.parameter] = copy.deepcopy(argument)
        self._body(self.function.body)
        self._weigh(self.result)
        return self.result

    def _spend(self, steps: int) -> None:
        self.left -= steps
        _require(self.left >= 0, f"the budget of {self.budget} steps is exceeded")

    def _reserve(self, size: int) -> None:
        """Pays for a list or str before it is built."""
        _require(size <= _MAX_SIZE, f"a list or str of {size} elements, at most {_MAX_SIZE} are allowed")
        self._spend(max(0, size))

    def _weigh(self, value: Any, nesting: int = 0) -> None:
        """Pays for every element of a value, however often it is shared, and refuses what the limits exclude."""
        self._spend(1)
        kind = type(value)
        if kind is list:
            _require(nesting < _MAX_NESTING, f"lists nested more than {_MAX_NESTING} deep")
            _require(len(value) <= _MAX_SIZE, f"a list of {len(value)} elements, at most {_MAX_SIZE} are allowed")
            for element in value:
                self._weigh(element, nesting + 1)
        elif kind is str:
            self._reserve(len(value))
        elif kind is int:
            _require(abs(value) < _MAX_INT, f"an int of magnitude {_MAX_INT} or more")
        else:
            _require(value is None or kind is bool, f"a value of type {kind.__name__} is refused")

    def _body(self, body: list[ast.stmt]) -> _Flow | None:
        for statement in body:
            if flow := self._statement(statement):
                return flow
        return None

    def _statement(self, node: ast.stmt) -> _Flow | None:
        self._spend(1)
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.scope.values[name] = self._evaluate(value, self.scope)
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                self.scope.values[name] = self._update(op, self.scope.read(name), self._evaluate(value, self.scope))
            case ast.If(test=test, body=body, orelse=orelse):
                return self._body(body if self._evaluate(test, self.scope) else orelse)
            case ast.For():
                return self._loop(node)
            case ast.Return(value=value):
                self.result = None if value is None else self._evaluate(value, self.scope)
                return "return"
            case ast.Break():
                return "break"
            case ast.Continue():
                return "continue"
        return None

    def _loop(self, node: ast.For) -> _Flow | None:
        assert isinstance(node.target, ast.Name)
        for element in self._elements(node.iter, self.scope):
            self.scope.values[node.target.id] = element
            flow = self._body(node.body)
            if flow == "return":
                return flow
            if flow == "break":
                break
        return None

    def _elements(self, node: ast.expr, scope: _Scope) -> Iterator[Any]:
        """The elements of a list as it is when each is reached, as Python's loops see it."""
        values = self._evaluate(node, scope)
        _require(type(values) is list, f"only a list can be looped over, not a {type(values).__name__}")
        for value in values:
            self._spend(1)
            yield value

    def _update(self, op: ast.operator, old: Any, value: Any) -> Any:
        """``old op= value``, which changes a list in place."""
        if type(old) is list and type(value) is list and isinstance(op, ast.Add):
            _require(len(old) + len(value) <= _MAX_SIZE, f"a list of more than {_MAX_SIZE} elements")
            self._spend(len(value))
            old += value
            return old
        result = self._arithmetic(op, old, value)
        if type(old) is list:
            old[:] = result
            return old
        return result

    def _arithmetic(self, op: ast.operator, left: Any, right: Any) -> Any:
        kinds = [("int" if isinstance(v, int) else type(v).__name__) for v in (left, right)]
        match op, *kinds:
            case _, "int", "int":
                pass
            case (ast.Add(), "list", "list") | (ast.Add(), "str", "str"):
                self._reserve(len(left) + len(right))
            case (ast.Mult(), "list" | "str", "int"):
                self._reserve(len(left) * right)
            case (ast.Mult(), "int", "list" | "str"):
                self._reserve(len(right) * left)
            case _:
                raise SandboxError(f"{type(op).__name__} of {kinds[0]} and {kinds[1]}")
        result = _ARITHMETIC[type(op)](left, right)
        _require(not isinstance(result, int) or abs(result) < _MAX_INT, f"an int of magnitude {_MAX_INT} or more")
        return result

    def _evaluate(self, node: ast.expr, scope: _Scope) -> Any:
        self._spend(1)
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return scope.read(name)
            case ast.BinOp(left=left, op=op, right=right):
                return self._arithmetic(op, self._evaluate(left, scope), self._evaluate(right, scope))
            case ast.UnaryOp(op=unary, operand=operand):
                return _UNARY[type(unary)](self._evaluate(operand, scope))
            case ast.BoolOp(op=junction, values=operands):
                return self._junction(isinstance(junction, ast.Or), operands, scope)
            case ast.Compare():
                return self._compare(node, scope)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._evaluate(body if self._evaluate(test, scope) else orelse, scope)
            case ast.List(elts=elements):
                return [self._evaluate(element, scope) for element in elements]
            case ast.ListComp(elt=element, generators=generators):
                return self._comprehend(element, generators, scope)
            case ast.Subscript(value=value, slice=index):
                return self._subscript(self._evaluate(value, scope), self._evaluate(index, scope))
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return self._builtin(name, arguments, scope)
        raise SandboxError(f"{type(node).__name__} is refused here")

    def _junction(self, stop: bool, operands: list[ast.expr], scope: _Scope) -> Any:
        for operand in operands:
            value = self._evaluate(operand, scope)
            if bool(value) == stop:
                break
        return value

    def _compare(self, node: ast.Compare, scope: _Scope) -> bool:
        left = self._evaluate(node.left, scope)
        for op, operand in zip(node.ops, node.comparators, strict=True):
            right = self._evaluate(operand, scope)
            self._weigh(left)
            self._weigh(right)
            if not _COMPARISONS[type(op)](left, right):
                return False
            left = right
        return True

    def _subscript(self, value: Any, index: Any) -> Any:
        _require(type(value) in (list, str) and isinstance(index, int), "only a list or str can be indexed, by an int")
        return value[index]

    def _comprehend(self, element: ast.expr, generators: list[ast.comprehension], outer: _Scope) -> list[Any]:
        scope = _Scope({g.target.id for g in generators if isinstance(g.target, ast.Name)}, outer)
        results: list[Any] = []

        def descend(depth: int) -> None:
            if depth == len(generators):
                _require(len(results) < _MAX_SIZE, f"a list of more than {_MAX_SIZE} elements")
                results.append(self._evaluate(element, scope))
                return
            generator = generators[depth]
            assert isinstance(generator.target, ast.Name)
            for value in self._elements(generator.iter, scope if depth else outer):
                scope.values[generator.target.id] = value
                if all(self._evaluate(test, scope) for test in generator.ifs):
                    descend(depth + 1)

        descend(0)
        return results

    def _builtin(self, name: str, arguments: list[ast.expr], scope: _Scope) -> Any:
        known = name in _BUILTINS and scope.owner(name) is None and name != self.function.name
        _require(known, f"{name!r} cannot be called")
        match arguments:
            case [ast.GeneratorExp(elt=element, generators=generators)] if name in _TAKES_GENERATOR:
                values = [self._comprehend(element, generators, scope)]
            case _:
                values = [self._evaluate(argument, scope) for argument in arguments]
        for value in values:
            self._weigh(value)
        result = self._sum(*values) if name == "sum" else _BUILTINS[name](*values)
        self._weigh(result)
        return result

    def _sum(self, values: Any, start: Any = 0) -> Any:
        """The builtin, but every partial sum is subject to the limits."""
        _require(type(values) is list and type(start) is not str, "sum needs a list, and no str to start with")
        for value in values:
            start = self._arithmetic(ast.Add(), start, value)
        return start


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The node and those below it, except inside comprehensions, whose variables are their own."""
    yield node
    if not isinstance(node, ast.ListComp | ast.GeneratorExp):
        for child in ast.iter_child_nodes(node):
            yield from _own_nodes(child)
