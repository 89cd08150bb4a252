"""A restricted interpreter that judges small Python functions written by a model.

It walks the syntax tree itself: no code object is ever made, so a program can reach no attribute, module, file or
builtin that is not named here, and a budget bounds its time and memory.
"""

import ast
import copy
import operator
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any, Literal

_MAX_SOURCE = 4000  # characters
_MAX_CONSTANT = 10**6
_MAX_INT = 10**12
_MAX_SIZE = 10_000  # elements of a list, characters of a str
_MAX_NESTING = 50  # lists within lists

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
    **{ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b},
}
_GRAMMAR = (
    *(ast.Assign, ast.AugAssign, ast.For, ast.If, ast.Return, ast.Expr, ast.Pass, ast.Break, ast.Continue),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.And, ast.Or, ast.Compare, ast.IfExp, ast.Subscript, ast.Call),
    *(ast.List, ast.ListComp, ast.GeneratorExp, ast.comprehension, ast.Name, ast.Load, ast.Store, ast.Constant),
    *_OPERATORS,
)
_BUILTINS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (sum, len, max, min, abs, sorted, list, int, bool)}
_TAKES_GENERATOR = {"sum", "max", "min", "sorted", "list"}
_UNBOUND = object()

_Flow = Literal["break", "continue", "return"]
_Scope = ChainMap[str, Any]  # the variables of the innermost comprehension first, _UNBOUND where not assigned yet


class SandboxError(Exception):
    """The program is not allowed, or failed; the message names the reason."""


def call_function(source: str, argument: Any, *, budget: int = 20_000) -> Any:
    """Calls the one function that ``source`` defines.

    The function takes one plain argument. Its body may hold assignments to a name (also augmented), ``for`` over a list
    without ``else``, ``if``, ``return``, ``pass``, ``break`` and ``continue``. Expressions are ``+ - * // %``, ``not and
    or``, comparisons except ``is``, ``a if b else c``, lists, list comprehensions, ``x[i]`` and calls of ``sum len max
    min abs sorted list int bool`` with positional arguments; a generator expression may be the only argument of a call.
    Values are ints, bools, strs, None and lists of these; a str can be read and compared, but not computed with.
    What is accepted computes what Python computes.

    Args:
        source: Text of at most 4000 characters.
        argument: A value of the types above. The function works on a copy.
        budget: How many steps the call may take: evaluated nodes, plus elements of the values that it reads or builds.

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
    """The function that a text defines, after refusing all that can be refused before it runs."""
    _require(len(source) <= _MAX_SOURCE, f"source of {len(source)} characters, at most {_MAX_SOURCE} are allowed")
    try:
        with warnings.catch_warnings(action="ignore"):
            module = ast.parse(source)
    except SyntaxError as error:
        raise SandboxError(f"SyntaxError: {error.msg}") from error
    match module.body:
        case [ast.FunctionDef(args=parameters, decorator_list=[], returns=None) as function]:
            plain = [parameter.arg for parameter in parameters.args] == [ast.unparse(parameters)]
            _require(plain and not getattr(function, "type_params", None), "the function must take one plain argument")
        case _:
            raise SandboxError("the text must be one undecorated function without annotations, and nothing else")
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    looped = {id(node) for loop in nodes if isinstance(loop, ast.For) for node in ast.walk(loop)}
    for node in nodes:
        _require(id(node) in looped or not isinstance(node, ast.Break | ast.Continue), "break or continue outside of a loop")
        _check(node)
    return function


def _check(node: ast.AST) -> None:
    name = type(node).__name__
    _require(isinstance(node, _GRAMMAR), f"{name} is refused")
    match node:
        case ast.Assign(targets=targets):
            _require(len(targets) == 1 and isinstance(targets[0], ast.Name), "an assignment needs one name as its target")
        case ast.AugAssign(target=target) | ast.For(target=target) | ast.comprehension(target=target):
            _require(isinstance(target, ast.Name), f"{name} needs a name as its target")
            _require(not getattr(node, "orelse", None) and not getattr(node, "is_async", 0), f"else or async in a {name}")
        case ast.Expr(value=value):
            _require(isinstance(value, ast.Constant), "a statement that is only an expression is refused")
        case ast.Call(func=called, keywords=keywords):
            _require(isinstance(called, ast.Name) and not keywords, "only builtins with positional arguments can be called")
        case ast.Name(id=identifier):
            _require(not identifier.startswith("__"), f"name {identifier!r} is refused")
        case ast.Constant(value=value):
            _require(value is None or type(value) in (int, bool, str), f"a constant of type {type(value).__name__} is refused")
            _require(type(value) is not int or value <= _MAX_CONSTANT, f"a constant above {_MAX_CONSTANT}")


def _assigned(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name
            case ast.AugAssign(target=ast.Name(id=name)) | ast.For(target=ast.Name(id=name)):
                yield name


class _Call:
    """One call of a parsed function."""

    def __init__(self, function: ast.FunctionDef, budget: int) -> None:
        self.function, self.budget, self.left, self.result = function, budget, budget, None
        self.scope = _Scope(dict.fromkeys(_assigned(function), _UNBOUND))

    def run(self, argument: Any) -> Any:
        self._weigh(argument)
        self.scope[self.function.args.args[0].arg] = copy.deepcopy(argument)
        self._body(self.function.body)
        self._weigh(self.result)
        return self.result

    def _spend(self, steps: int) -> None:
        self.left -= steps
        _require(self.left >= 0, f"the budget of {self.budget} steps is exceeded")

    def _weigh(self, value: Any, nesting: int = 0) -> None:
        """Spends a step for every element of a value, however often it is shared, and refuses one beyond the limits."""
        self._spend(1)
        if isinstance(value, list | str):
            _require(len(value) <= _MAX_SIZE and nesting < _MAX_NESTING, "a list or str that is too long or nested too deep")
        match value:
            case list():
                for element in value:
                    self._weigh(element, nesting + 1)
            case str():
                self._spend(len(value))
            case int():
                _require(abs(value) < _MAX_INT, f"an int of magnitude {_MAX_INT} or more")
            case _:
                _require(value is None, f"a value of type {type(value).__name__} is refused")

    def _body(self, body: list[ast.stmt]) -> _Flow | None:
        for statement in body:
            if flow := self._statement(statement):
                return flow
        return None

    def _statement(self, node: ast.stmt) -> _Flow | None:
        """Executes a statement and says how it leaves the body around it, if it does."""
        self._spend(1)
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.scope[name] = self._evaluate(value, self.scope)
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                old = self._read(name, self.scope)
                self.scope[name] = self._arithmetic(op, old, self._evaluate(value, self.scope), in_place=True)
            case ast.If(test=test, body=body, orelse=orelse):
                return self._body(body if self._evaluate(test, self.scope) else orelse)
            case ast.For(target=ast.Name(id=name), iter=values, body=body):
                for value in self._elements(values, self.scope):
                    self.scope[name] = value
                    if (flow := self._body(body)) in ("break", "return"):
                        return None if flow == "break" else flow
            case ast.Return(value=value):
                self.result = None if value is None else self._evaluate(value, self.scope)
                return "return"
            case ast.Break():
                return "break"
            case ast.Continue():
                return "continue"
        return None

    def _elements(self, node: ast.expr, scope: _Scope) -> Iterator[Any]:
        """The elements of a list as it is when each is reached: the loop's body may extend it."""
        values = self._evaluate(node, scope)
        _require(isinstance(values, list), f"only a list can be looped over, not {type(values).__name__}")
        for value in values:
            self._spend(1)
            yield value

    def _evaluate(self, node: ast.expr, scope: _Scope) -> Any:
        self._spend(1)
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._read(name, scope)
            case ast.BinOp(left=left, op=op, right=right):
                return self._arithmetic(op, self._evaluate(left, scope), self._evaluate(right, scope))
            case ast.UnaryOp(op=sign, operand=operand):
                return _OPERATORS[type(sign)](self._evaluate(operand, scope))
            case ast.BoolOp(op=junction, values=[*operands, last]):
                for operand in operands:
                    value = self._evaluate(operand, scope)
                    if bool(value) == isinstance(junction, ast.Or):
                        return value
                return self._evaluate(last, scope)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                return self._compare(self._evaluate(left, scope), ops, comparators, scope)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._evaluate(body if self._evaluate(test, scope) else orelse, scope)
            case ast.List(elts=elements):
                return [self._evaluate(element, scope) for element in elements]
            case ast.ListComp(elt=element, generators=generators):
                return self._comprehend(element, generators, scope)
            case ast.Subscript(value=sequence, slice=index):
                values, position = self._evaluate(sequence, scope), self._evaluate(index, scope)
                _require(isinstance(position, int), "an index must be an int")
                return values[position]
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return self._builtin(name, arguments, scope)
        raise SandboxError(f"{type(node).__name__} is refused here")

    def _read(self, name: str, scope: _Scope) -> Any:
        value = scope.get(name, _UNBOUND)
        _require(value is not _UNBOUND, f"name {name!r} is not defined")
        return value

    def _arithmetic(self, op: ast.operator, left: Any, right: Any, in_place: bool = False) -> Any:
        """``left op right``, which changes a list in place where Python does; sizes are checked before it is built."""
        match op, left, right:
            case (_, int(), int()):
                size = 1
            case (ast.Add(), list(), list()):
                size = len(right) if in_place else len(left) + len(right)
                _require(len(left) + len(right) <= _MAX_SIZE, f"a list of more than {_MAX_SIZE} elements")
            case (ast.Mult(), list(), int()) | (ast.Mult(), int(), list()) if not in_place:
                size = len(left) * right if isinstance(left, list) else left * len(right)
                _require(size <= _MAX_SIZE, f"a list of {size} elements, at most {_MAX_SIZE} are allowed")
            case _:
                raise SandboxError(f"{type(op).__name__} of {type(left).__name__} and {type(right).__name__} is refused")
        self._spend(max(size, 0))
        if in_place and isinstance(left, list):
            left += right
            return left
        result = _OPERATORS[type(op)](left, right)
        _require(isinstance(result, list) or abs(result) < _MAX_INT, f"an int of magnitude {_MAX_INT} or more")
        return result

    def _compare(self, left: Any, ops: list[ast.cmpop], comparators: list[ast.expr], scope: _Scope) -> bool:
        for op, operand in zip(ops, comparators, strict=True):
            right = self._evaluate(operand, scope)
            self._weigh([left, right])
            if not _OPERATORS[type(op)](left, right):
                return False
            left = right
        return True

    def _comprehend(self, element: ast.expr, generators: list[ast.comprehension], outer: _Scope) -> list[Any]:
        names = [g.target.id for g in generators if isinstance(g.target, ast.Name)]
        inner = outer.new_child(dict.fromkeys(names, _UNBOUND))

        def produce(depth: int) -> Iterator[Any]:
            if depth == len(generators):
                yield self._evaluate(element, inner)
                return
            # As in Python, only the first list is evaluated outside of the comprehension's own scope.
            for value in self._elements(generators[depth].iter, inner if depth else outer):
                inner[names[depth]] = value
                if all(self._evaluate(test, inner) for test in generators[depth].ifs):
                    yield from produce(depth + 1)

        return list(produce(0))

    def _builtin(self, name: str, arguments: list[ast.expr], scope: _Scope) -> Any:
        known = name in _BUILTINS and name not in scope and name != self.function.name
        _require(known, f"{name!r} is not a builtin that can be called here")
        match arguments:
            case [ast.GeneratorExp(elt=element, generators=generators)] if name in _TAKES_GENERATOR:
                values = [self._comprehend(element, generators, scope)]
            case _:
                values = [self._evaluate(argument, scope) for argument in arguments]
        self._weigh(values)
        result = self._sum(*values) if name == "sum" else _BUILTINS[name](*values)
        self._weigh(result)
        return result

    def _sum(self, values: Any, start: Any = 0) -> Any:
        """The builtin, with every partial sum subject to the limits."""
        _require(isinstance(values, list) and not isinstance(start, str), "sum needs a list, and no str to start from")
        for value in values:
            start = self._arithmetic(ast.Add(), start, value)
        return start
