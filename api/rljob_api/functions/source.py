"""What a source text defines: descriptions of its functions, classes and lists, from its syntax tree.

Invariant: user code is never executed, and what parsing cannot determine (an imported name) is Unknown.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping

from rljob_api.functions.descriptions import Class, Description, Function, Other, Several, Unknown

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_BOM = "\ufeff"


def parse(source: str, filename: str = "<source>") -> ast.Module:
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(source.removeprefix(_BOM), filename)


def describe_in_source(source: str, name: str) -> Description:
    """Return what the source text defines as `name`; Unknown if it does not, or cannot be parsed."""
    try:
        return SourceNames(parse(source)).describe(name)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Unknown(name)


class SourceNames:
    """What a module, or the body of a function, defines: the last statement that binds each name; "*" for a star
    import."""

    def __init__(self, scope: ast.AST, outer: SourceNames | None = None) -> None:
        self.statements = {name: statement for statement in _statements(scope) for name in _bound_names(statement)}
        self._outer = outer

    def describe(self, name: str, num_steps: int = 8) -> Description:
        statement = self.statements.get(name)
        if statement is None:
            return self._outer.describe(name, num_steps) if self._outer else Unknown(name)
        if isinstance(statement, FunctionNode):
            return _describe_function(name, statement.args)
        if isinstance(statement, ast.ClassDef):
            return self._describe_class(statement)
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if all(isinstance(target, ast.Name) for target in targets):
                return self._describe_value(name, statement.value, num_steps)
        return Unknown(name)

    def describe_result(self, name: str) -> Description:
        """Return what a factory returns, where it says so in one statement."""
        node = self.statements[name]
        if not isinstance(node, FunctionNode):
            return Unknown(name)
        inner = SourceNames(node, self)
        returned = [s.value for s in inner._returns(node) if s.value is not None]
        return inner._describe_value(name, returned[0], num_steps=8) if len(returned) == 1 else Unknown(name)

    def _returns(self, node: FunctionNode) -> Iterator[ast.Return]:
        return (statement for statement in _statements(node) if isinstance(statement, ast.Return))

    def _describe_value(self, name: str, value: ast.expr, num_steps: int) -> Description:
        if num_steps == 0:  # a = b; b = a
            return Unknown(name)
        if isinstance(value, ast.Name):
            found = self.describe(value.id, num_steps - 1)
            return found._replace(name=name) if isinstance(found, Function | Other | Unknown) else found
        if isinstance(value, ast.Lambda):
            return _describe_function(name, value.args)
        if isinstance(value, (ast.List, ast.Tuple)):
            return Several(name, tuple(self._describe_value(_show(e), e, num_steps - 1) for e in value.elts))
        if isinstance(value, ast.Constant):
            return Other(name, type(value.value).__name__)
        if isinstance(value, (ast.Dict, ast.Set)):
            return Other(name, type(value).__name__.lower())
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            made = self.describe(value.func.id, num_steps - 1)
            if isinstance(made, Class) and not made.is_instance:
                return made._replace(name=name, is_instance=True, constructor=None)
        return Unknown(name)

    def _describe_class(self, node: ast.ClassDef) -> Class:
        methods, bases, rewards, is_open = dict[str, Function](), set[str](), set[str](), bool(node.keywords)
        for base in node.bases:
            inner = base.value if isinstance(base, ast.Subscript) else base
            bases.add(inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", ""))
            parent = self.describe(inner.id) if isinstance(inner, ast.Name) and inner.id != node.name else None
            if isinstance(parent, Class):
                methods |= parent.methods
                bases |= parent.bases
                rewards |= parent.rewards
                is_open |= parent.is_open
            elif not (isinstance(inner, ast.Name) and inner.id == "object"):
                is_open = True
        own = SourceNames(node)
        methods |= own.methods()
        rewards |= {name for name, statement in own.statements.items() if _is_marked(statement)}
        constructor = methods.get("__init__", None if is_open or node.decorator_list else Function("__init__"))
        is_open |= bool(node.decorator_list)
        return Class(node.name, frozenset(bases), methods, is_open, False, frozenset(rewards), constructor)

    def methods(self) -> Mapping[str, Function]:
        """Return the methods of a class body, without their first parameter."""
        methods = dict[str, Function]()
        for name, statement in self.statements.items():
            if isinstance(statement, FunctionNode):
                is_static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in statement.decorator_list)
                function = _describe_function(name, statement.args)
                methods[name] = function if is_static else _without_self(function)
            elif name != "*":
                methods[name] = Function(name, var_keyword="kwargs")  # assigned: unknown parameters
        return methods


def _is_marked(statement: ast.stmt) -> bool:
    """Return whether a method has the decorator @reward, @vf.reward or @vf.reward(...)."""
    decorators = statement.decorator_list if isinstance(statement, FunctionNode) else []
    made = (decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in decorators)
    return any(getattr(each, "attr", getattr(each, "id", "")) == "reward" for each in made)


def _without_self(function: Function) -> Function:
    first = (*function.positional_only, *function.named)[:1]
    return function._replace(
        positional_only=tuple(name for name in function.positional_only if name not in first),
        named=tuple(name for name in function.named if name not in first),
        required=tuple(name for name in function.required if name not in first),
    )


def _describe_function(name: str, arguments: ast.arguments) -> Function:
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    annotated = ((p.arg, p.annotation) for p in parameters)
    return Function(
        name,
        named=tuple(parameter.arg for parameter in (*arguments.args, *arguments.kwonlyargs)),
        required=tuple(_required(arguments)),
        positional_only=tuple(parameter.arg for parameter in arguments.posonlyargs),
        var_positional=arguments.vararg.arg if arguments.vararg else "",
        var_keyword=arguments.kwarg.arg if arguments.kwarg else "",
        annotations={name: _annotation(node) for name, node in annotated if node is not None},
    )


def _annotation(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


def _required(arguments: ast.arguments) -> list[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    positional = positional[: len(positional) - len(arguments.defaults)]
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required = positional + [parameter for parameter, default in keyword_only if default is None]
    return [parameter.arg for parameter in required]


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module, class or function, including those inside if, try and with."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, FunctionNode | ast.ClassDef | ast.expr):
            yield from _statements(node)


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, FunctionNode | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
        yield from (node.id for node in names if isinstance(node.ctx, ast.Store))


def _show(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ast.unparse(node)
