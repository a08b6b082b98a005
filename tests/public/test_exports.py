"""The public surface: what it is, that it is documented, and that it changes only on purpose."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import types
import typing
from collections.abc import Callable

import attrs
import pytest
from sources import CHECKOUT, sources

import pidurable
import pidurable.errors
import pidurable.patch
import pidurable.storage
import pidurable.testing
import pidurable.testing.storage_conformance

MODULES = (
    pidurable,
    pidurable.errors,
    pidurable.patch,
    pidurable.storage,
    pidurable.testing,
    pidurable.testing.storage_conformance,
)


def public_names(module: types.ModuleType) -> list[str]:
    """What a user finds in a module: no underscore, no module, nothing imported for its own use."""
    if module is pidurable:
        return sorted(pidurable._ORIGINS)
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and name not in ("annotations",)
    )


EXPORTS = [(module, name) for module in MODULES for name in public_names(module)]


def signature(value: object) -> str:
    """Parameters and annotations as written."""
    try:
        return str(inspect.signature(value)).replace("'", "")  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""


def own_members(cls: type) -> dict[str, object]:
    """Public methods and properties that a class or its bases of ours define."""
    found: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.split(".")[0] == "pidurable":
            found.update(
                (name, value) for name, value in vars(base).items() if not name.startswith("_")
            )
    return found


def _written(cls: type, field: attrs.Attribute[object]) -> object:
    """The type of a field as the class statement has it.

    What decodes a class replaces the texts in its fields by the types that they name.
    """
    for each in cls.__mro__:
        written = vars(each).get("__annotations__", {})
        if field.name in written:
            return written[field.name]
    return field.type


def describe(name: str, value: object) -> list[str]:
    """One line for a name, and one for each public member of a class."""
    if not isinstance(value, type):
        # A type alias can be called too, and what that looks like depends on the interpreter.
        if inspect.isfunction(value):
            return [f"def {name}{signature(value)}"]
        return [f"value {name}"]
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    lines = [f"class {name}({bases})"]
    if attrs.has(value):
        lines += [f"    {each.name}: {_written(value, each)}" for each in attrs.fields(value)]
    elif issubclass(value, enum.Enum):
        lines += [f"    {each.name}" for each in value]
    fields = {each.name for each in attrs.fields(value)} if attrs.has(value) else set()
    for member, thing in sorted(own_members(value).items()):
        thing = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
        if isinstance(thing, property):
            lines.append(f"    property {member}")
        elif inspect.isfunction(thing):
            lines.append(f"    def {member}{signature(thing)}")
        elif member not in fields and not isinstance(thing, types.MemberDescriptorType):
            lines.append(f"    {member}")
    return lines


def test_the_public_surface_is_as_it_was(check_public_snapshot: Callable[[str, str], None]) -> None:
    """Every public name with its signature stands in a file that a change has to touch."""
    lines: list[str] = []
    for module in MODULES:
        lines.append(f"## {module.__name__}")
        for name in public_names(module):
            value = getattr(module, name)
            if module is not pidurable and getattr(pidurable, name, None) is value:
                continue  # described once
            lines += describe(name, value)
        lines.append("")

    check_public_snapshot("exports.txt", "\n".join(lines).replace("typing.", "") + "\n")


def re_exports(body: list[ast.stmt]) -> list[tuple[str, str]]:
    """(module, name) of statements that do nothing but `from x import Name as Name`."""
    found: list[tuple[str, str]] = []
    for statement in body:
        assert isinstance(statement, ast.ImportFrom), ast.unparse(statement)
        for alias in statement.names:
            assert alias.asname == alias.name, f"write: {alias.name} as {alias.name}"
            found.append((statement.module or "", alias.name))
    return found


def front_module(module: types.ModuleType) -> list[ast.stmt]:
    """The statements of a front module, without docstrings, assignments and `__future__`."""
    assert module.__file__ is not None
    source = next(each for each in sources("pidurable") if str(each.path) == module.__file__)
    rest: list[ast.stmt] = []
    for statement in source.tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            continue
        if isinstance(statement, ast.Expr):
            continue
        if isinstance(statement, ast.Assign):
            name = ast.unparse(statement.targets[0])
            assert name in ("__version__", "__all__", "_HOMES", "_ORIGINS"), name
            continue
        rest.append(statement)
    return rest


# The conformance suite is run as a command too, so that it has a `main` of its own.
@pytest.mark.parametrize(
    "module", [pidurable.storage, pidurable.testing], ids=lambda each: each.__name__
)
def test_the_front_modules_only_re_export(module: types.ModuleType) -> None:
    """`from x import Name as Name` is what type checkers take for public; nothing is defined."""
    assert re_exports(front_module(module))


def test_what_type_checkers_see_is_what_is_loaded() -> None:
    """The imports for type checkers and the places where names are loaded from are the same."""
    (guarded,) = [each for each in front_module(pidurable) if isinstance(each, ast.If)]
    assert ast.unparse(guarded.test) == "TYPE_CHECKING"

    seen = re_exports(guarded.body)
    loaded = [(module, name) for module, names in pidurable._HOMES.items() for name in names]

    assert sorted(seen) == sorted(loaded)
    assert len({name for _, name in seen}) == len(seen)
    for _, name in seen:
        assert getattr(pidurable, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        pidurable.nothing  # noqa: B018


def test_a_star_import_brings_every_public_name() -> None:
    """`from pidurable import *` loads what is public, and nothing else."""
    names: dict[str, object] = {}
    exec("from pidurable import *", names)
    del names["__builtins__"]

    assert sorted(names) == public_names(pidurable)
    assert names["open_harness"] is pidurable.open_harness


def test_names_do_not_collide() -> None:
    """A name means one thing, wherever it is imported from."""
    for module, name in EXPORTS:
        if module is not pidurable and hasattr(pidurable, name):
            assert getattr(pidurable, name) is getattr(module, name), name


@pytest.mark.parametrize("module", MODULES, ids=lambda each: each.__name__)
def test_a_public_name_is_documented(module: types.ModuleType) -> None:
    """Each public function and class says what it is; so does each public method it has."""
    missing = []
    for name in public_names(module):
        value = getattr(module, name)
        if not (inspect.isfunction(value) or isinstance(value, type)):
            continue
        if not _has_own_doc(value):
            missing.append(name)
        if isinstance(value, type):
            missing += [
                f"{name}.{member}"
                for member, thing in own_members(value).items()
                if inspect.isfunction(thing) and not _is_documented(value, member, thing)
            ]
    assert missing == []


def _has_own_doc(value: object) -> bool:
    text = value.__dict__.get("__doc__") if isinstance(value, type) else value.__doc__
    # attrs writes "Method generated by attrs for class X." where nothing is written.
    return bool(text) and "generated by attrs" not in str(text)


def _is_documented(cls: type, name: str, method: types.FunctionType) -> bool:
    if inspect.getdoc(method):
        return True
    # Storages are rows and the reads named after them; what a class fills in of a protocol is
    # documented there; what a session calls of its participants is no call of a host's.
    return (
        name in vars(pidurable.storage.Storage)
        or name in ("hit", "apply")
        or (cls is pidurable.Harness and name in PARTICIPANT)
    )


PARTICIPANT = {"check_staged", "joined", "reverted", "committed", "poisoned", "refusing", "release"}


@pytest.mark.parametrize("module", MODULES, ids=lambda each: each.__name__)
def test_a_public_class_is_not_for_deriving(module: types.ModuleType) -> None:
    """Classes are final, records, errors or protocols; `Task` alone is a base."""
    open_to_all = []
    for name in public_names(module):
        value = getattr(module, name)
        if not isinstance(value, type):
            continue
        derivable = (
            value is pidurable.Task
            or getattr(value, "_is_protocol", False)
            or issubclass(value, BaseException | enum.Enum | tuple)
            or attrs.has(value)
        )
        if not (derivable or getattr(value, "__final__", False) or name in DERIVED):
            open_to_all.append(name)

    assert open_to_all == []


DERIVED = {"TreeTransaction", "Failpoints"}
"""`TaskTransaction` is one of the first kind, which a host gets; tests derive from the second."""


def test_hints_of_public_functions_resolve() -> None:
    """Every annotation of a public function is a type that exists at run time."""
    for module, name in EXPORTS:
        value = getattr(module, name)
        if inspect.isfunction(value):
            typing.get_type_hints(value)


def test_the_version_is_the_projects() -> None:
    """`pidurable.__version__` and pyproject.toml agree."""
    text = (CHECKOUT / "pyproject.toml").read_text()

    assert f'version = "{pidurable.__version__}"' in text


def test_the_bundled_extension_is_importable_under_its_public_name() -> None:
    """`pidurable.extensions.coding` is the extension, in a checkout as in a wheel."""
    coding = importlib.import_module("pidurable.extensions.coding")

    assert coding.extension.name == "coding"
    assert [each.name for each in coding.extension.tools] == ["read", "write", "edit", "bash"]
