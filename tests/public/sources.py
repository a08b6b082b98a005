"""The source files of the project and their syntax: what the tests about layers and style read."""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import io
import tokenize
from pathlib import Path

import attrs

CHECKOUT = Path(__file__).parents[2]


@attrs.frozen(eq=False, slots=False)
class Source:
    """One Python file."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """The dotted name that it is imported by."""
        parts = list(self.path.relative_to(CHECKOUT).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        return ".".join(parts)

    @functools.cache  # noqa: B019 - sources live as long as the run
    def _parsed(self) -> ast.Module:
        # A tree is thousands of objects, which all stay: a collection would free none of them,
        # nor does any later one look at them.
        enabled = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(self.text)
        finally:
            gc.freeze()
            if enabled:
                gc.enable()

    @property
    def tree(self) -> ast.Module:
        """The syntax, parsed when it is first asked for: many tests read the text alone."""
        return self._parsed()

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the syntax, in the order of `ast.walk`, which a dozen tests look through."""
        return tuple(ast.walk(self.tree))

    @property
    def docstring(self) -> str:
        """What the module says of itself, or nothing; without parsing the rest of it."""
        between = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE)
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in between:
                said = token.type == tokenize.STRING and ast.literal_eval(token.string)
                return inspect.cleandoc(said) if isinstance(said, str) else ""
        return ""

    @property
    def place(self) -> str:
        """The path within the checkout, for messages."""
        return str(self.path.relative_to(CHECKOUT))

    @functools.cache  # noqa: B019 - sources live as long as the run
    def imports(self) -> tuple[Import, ...]:
        """Every import statement, also those inside of functions and of TYPE_CHECKING."""
        found: list[Import] = []
        typing_only = {
            id(node)
            for block in self.nodes
            if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
            for statement in block.body
            for node in ast.walk(statement)
        }
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        for node in self.nodes:
            if isinstance(node, ast.Import):
                modules = [(alias.name, ()) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*above, *([base] if base else [])])
                modules = [(base, tuple(alias.name for alias in node.names))]
            else:
                continue
            found += [
                Import(module, names, node.lineno, id(node) in typing_only)
                for module, names in modules
            ]
        return tuple(found)


@attrs.frozen
class Import:
    module: str
    names: tuple[str, ...]
    line: int
    typing_only: bool
    """Below `if TYPE_CHECKING`: there for checkers, not at run time."""

    @property
    def top(self) -> str:
        return self.module.split(".")[0]


@functools.cache
def _read(path: Path) -> Source:
    return Source(path, path.read_text())


@functools.cache
def sources(*folders: str) -> tuple[Source, ...]:
    """The parsed files below these folders of the checkout."""
    found = []
    for folder in folders:
        for path in sorted((CHECKOUT / folder).rglob("*.py")):
            # The bundled extensions are reached by their own folder, not through the symlink.
            if "__pycache__" in path.parts or path.is_relative_to(
                CHECKOUT / "pidurable" / "extensions"
            ):
                continue
            found.append(_read(path))
    assert found, folders
    return tuple(found)
