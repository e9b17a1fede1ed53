"""A mypy plugin that checks names in keywords and strings, which the libraries declare as `Any`.

`msgspec.structs.replace(value, field=…)` accepts the fields of `value` only, with their types, and
`setattr(target, "name", …)` only an attribute that `target` has; so do pytest's monkeypatch and
pytest-mock. pyproject.toml names this file for src, tests/checked.py for tests and bench.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mypy.checker import TypeChecker
from mypy.errorcodes import ATTR_DEFINED
from mypy.expandtype import expand_type_by_instance
from mypy.maptype import map_instance_to_supertype
from mypy.nodes import (
    ARG_NAMED_OPT,
    ARG_POS,
    ARG_STAR2,
    CallExpr,
    Expression,
    MypyFile,
    RefExpr,
    StrExpr,
    TypeInfo,
    Var,
)
from mypy.plugin import FunctionContext, FunctionSigContext, MethodContext, Plugin
from mypy.types import (
    AnyType,
    CallableType,
    Instance,
    Overloaded,
    ProperType,
    Type,
    TypeOfAny,
    TypeType,
    TypeVarType,
    UnionType,
    get_proper_type,
)

SETTERS = {
    "builtins.setattr",
    "builtins.delattr",
    "_pytest.monkeypatch.MonkeyPatch.setattr",
    "_pytest.monkeypatch.MonkeyPatch.delattr",
    "pytest_mock.plugin.MockerFixture._Patcher.object",
}
"""Functions whose first argument is an object, or a dotted path, and whose second is a name."""


class NamesPlugin(Plugin):
    def get_function_signature_hook(
        self, fullname: str
    ) -> Callable[[FunctionSigContext], CallableType] | None:
        return _replace_signature if fullname == "msgspec.structs.replace" else None

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        return _check_setter if fullname in SETTERS else None

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        return _check_setter if fullname in SETTERS else None


def plugin(version: str) -> type[Plugin]:
    return NamesPlugin


def _replace_signature(context: FunctionSigContext) -> CallableType:
    """Return replace()'s signature with each field of its first argument as a keyword."""
    if not context.args or len(context.args[0]) != 1:
        return context.default_signature
    replaced = get_proper_type(context.api.get_expression_type(context.args[0][0]))
    classes = [*_instances(replaced)]
    if not classes or not _fields(classes[0]):
        return context.default_signature
    fields = _fields(classes[0])
    for other in classes[1:]:
        theirs = _fields(other)
        fields = {name: type for name, type in fields.items() if theirs.get(name) == type}
    if isinstance(context.context, CallExpr) and ARG_STAR2 in context.context.arg_kinds:
        # The values of one mapping have one type, which no two fields of different types accept.
        fields = dict.fromkeys(fields, AnyType(TypeOfAny.special_form))
    return context.default_signature.copy_modified(
        arg_names=[None, *fields],
        arg_kinds=[ARG_POS, *(ARG_NAMED_OPT for _ in fields)],
        arg_types=[replaced, *fields.values()],
        ret_type=replaced,
        name=f"replace of {', '.join(one.type.name for one in classes)}",
    )


def _fields(instance: Instance) -> dict[str, Type]:
    """Return the fields of an instance of a Struct, in the order of their classes."""
    fields: dict[str, Type] = {}
    for info in reversed(instance.type.mro):
        for name, symbol in info.names.items():
            node = symbol.node
            if not isinstance(node, Var) or node.is_classvar or not node.type:
                continue
            if not name.startswith("__"):
                base = map_instance_to_supertype(instance, info)
                fields[name] = expand_type_by_instance(node.type, base)
    return fields


def _instances(found: ProperType) -> Iterator[Instance]:
    """Yield the classes that an object of this type may have; nothing if any is unknown."""
    if isinstance(found, TypeVarType):
        found = get_proper_type(found.upper_bound)
    if isinstance(found, Instance):
        yield found
    elif isinstance(found, UnionType):
        for item in found.items:
            yield from _instances(get_proper_type(item))


def _check_setter(context: FunctionContext | MethodContext) -> Type:
    """Report a constant name that the object it is set on does not have."""
    arguments = [argument for formal in context.args[:2] for argument in formal]
    call = context.context
    if isinstance(call, CallExpr) and "raising" in call.arg_names:
        return context.default_return_type
    if isinstance(arguments[0], StrExpr):
        owner, _, name = arguments[0].value.rpartition(".")
        known = _in_dotted_path(context, owner)
    elif len(arguments) == 2 and isinstance(arguments[1], StrExpr):
        owner, name = "", arguments[1].value
        known = _attributes(arguments[0], get_proper_type(context.arg_types[0][0]))
    else:
        return context.default_return_type
    if known is not None and not known(name):
        of = owner or str(get_proper_type(context.arg_types[0][0]))
        context.api.fail(
            f'{of} has no attribute "{name}" to set', context.context, code=ATTR_DEFINED
        )
    return context.default_return_type


def _attributes(argument: Expression, found: ProperType) -> Callable[[str], bool] | None:
    """Return a test for the names of this object; None if its type is not known."""
    if isinstance(argument, RefExpr) and isinstance(argument.node, MypyFile):
        return argument.node.names.__contains__
    if isinstance(found, Instance):
        is_module = found.type.fullname == "types.ModuleType"  # any of several
        return None if is_module else found.type.has_readable_member
    if isinstance(found, TypeType):
        found = get_proper_type(found.item)
        return found.type.has_readable_member if isinstance(found, Instance) else None
    if isinstance(found, CallableType) and found.is_type_obj():
        return found.type_object().has_readable_member
    if isinstance(found, Overloaded) and found.is_type_obj():
        return found.type_object().has_readable_member
    return None


def _in_dotted_path(
    context: FunctionContext | MethodContext, path: str
) -> Callable[[str], bool] | None:
    assert isinstance(context.api, TypeChecker)
    if path in context.api.modules:
        return context.api.modules[path].names.__contains__
    module, _, name = path.rpartition(".")
    if module not in context.api.modules:
        return lambda _: not path.startswith("forestage.")
    symbol = context.api.modules[module].names.get(name)
    if symbol is None:
        return lambda _: False
    return symbol.node.has_readable_member if isinstance(symbol.node, TypeInfo) else None
