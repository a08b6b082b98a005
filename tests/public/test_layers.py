"""Imports point downwards, foreign names stay where they belong, the kernel uses its seams."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from sources import Import, Source, sources

LAYERS = (
    ("errors", "patch"),
    ("records",),
    ("storage",),
    ("session",),
    ("tasks",),
    ("registry",),
    ("agent",),
    ("harness",),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# `patch` is a public name for a part of records; it stands above them and below everything else.
LEVEL["patch"] = LEVEL["records"]

# What is public: an extension or example may import this and nothing else of the package.
PUBLIC = ("pidurable", "pidurable.errors", "pidurable.patch", "pidurable.storage")
PUBLIC_BELOW = ("pidurable.testing", "pidurable.extensions")

# Third-party names and the only modules that may say them.
FOREIGN: dict[str, tuple[str, ...]] = {
    "attrs": ("",),
    "trio": ("",),
    "outcome": ("",),
    "typing_extensions": ("",),
    "apsw": ("pidurable.storage._sqlite",),
    "cattrs": ("pidurable.records._codec",),
    "pydantic": ("pidurable.registry._arguments",),
    "pydantic_core": ("pidurable.registry._arguments",),
    "annotationlib": ("pidurable.tasks._phase",),  # of the standard library from 3.14 on
    "jsonschema_rs": ("pidurable.registry._arguments",),
    "griffe": ("pidurable.registry._arguments",),
    "pydantic_ai": ("pidurable.agent._provider_ai",),
    "genai_prices": ("pidurable.agent._catalogue", "pidurable.agent._provider_ai"),
    "openai": ("pidurable.agent._provider_ai",),
    "anthropic": ("pidurable.agent._provider_ai",),
    "google": ("pidurable.agent._provider_ai",),
    "httpx": ("pidurable.agent._provider_ai",),
    "httpx2": ("pidurable.agent._provider_ai",),
    "yaml": ("pidurable.agent._script",),
    "cyclopts": ("pidurable.cli._app",),
    "rich": ("pidurable.cli",),
}

KERNEL = ("pidurable.records", "pidurable.storage", "pidurable.session", "pidurable.tasks")
AMBIENT = {"time", "random", "uuid", "secrets", "threading"}
# Where the kernel may touch what it otherwise takes from its seams, and why.
EXEMPT = {
    "pidurable.session._seams": AMBIENT,  # the seams themselves
    "pidurable.records._forms": {"uuid"},  # the type UUID, which values may be of
    "pidurable.records._value_rules": {"uuid"},
    # A lock for callers in threads; uuid and birthday of a new store that is not told its own.
    "pidurable.storage": {"threading", "uuid", "time"},
    "pidurable.agent._models": {"time"},  # the default of `Models(now_us=)`, a seam of its own
}


def layer(source: Source) -> str | None:
    """The layer of a module: the name below `pidurable`."""
    parts = source.name.split(".")
    return parts[1] if len(parts) > 1 else None


def package_imports() -> list[tuple[Source, Import]]:
    return [(each, line) for each in sources("pidurable") for line in each.imports()]


def test_imports_point_downwards() -> None:
    """No module imports from a layer above its own, but for types alone."""
    wrong = []
    for source, line in package_imports():
        own = layer(source)
        if own not in LEVEL or line.top != "pidurable" or line.typing_only:
            continue
        if line.module == "pidurable":
            # It reaches everything, so only the top layer may.
            if own == LAYERS[-1][0]:
                continue
            wrong.append(f"{source.place}:{line.line} imports the package itself")
            continue
        other = line.module.split(".")[1]
        if other == "testing" or LEVEL.get(other, 99) > LEVEL[own]:
            wrong.append(f"{source.place}:{line.line} imports {line.module}")

    assert wrong == []


def test_every_folder_of_the_package_is_a_layer() -> None:
    """A new folder must be given its place here."""
    folders = {layer(source) for source in sources("pidurable")} - {None}

    assert folders == set(LEVEL) | {"testing"}


def test_the_command_line_and_tests_may_reach_testing_and_nobody_else_does() -> None:
    """`testing` is imported by none of the package."""
    users = {
        source.name
        for source, line in package_imports()
        if line.module.startswith("pidurable.testing") and layer(source) != "testing"
    }

    assert users == set()


@pytest.mark.parametrize("folder", ["extensions", "examples"])
def test_extensions_and_examples_use_public_names_alone(folder: str) -> None:
    """What people copy from must not need what they cannot rely on."""
    own = {source.path.stem for source in sources("examples")}
    wrong = []
    for source in sources(folder):
        for line in source.imports():
            if line.top in ("pidurable",):
                public = line.module in PUBLIC or line.module.split(".", 2)[:2] in [
                    each.split(".") for each in PUBLIC_BELOW
                ]
                private = any(part.startswith("_") for part in line.module.split("."))
                if not public or private or any(name.startswith("_") for name in line.names):
                    wrong.append(f"{source.place}:{line.line} imports {line.module}")
            elif line.module.startswith("extensions"):
                continue  # its own package, by a relative import
            elif line.top not in sys.stdlib_module_names | {"attrs", "trio"} | own:
                wrong.append(f"{source.place}:{line.line} imports {line.module}")

    assert wrong == []


def test_foreign_names_stay_in_their_modules() -> None:
    """Each third-party package is named in one place, so that it can be replaced there."""
    wrong = []
    seen = set()
    for source, line in package_imports():
        if line.top in sys.stdlib_module_names or line.top == "pidurable":
            continue
        seen.add(line.top)
        allowed = FOREIGN.get(line.top, ())
        if not any(source.name.startswith(prefix) for prefix in allowed):
            wrong.append(f"{source.place}:{line.line} imports {line.module}")

    assert wrong == []
    assert {"apsw", "cattrs", "trio"} <= seen


def test_the_kernel_takes_time_chance_and_threads_from_its_seams() -> None:
    """So that a test can run years in seconds and replay a schedule from its seed."""
    wrong = []
    for source in sources("pidurable"):
        harness = ("pidurable.harness._open", "pidurable.harness._task_calls")
        if not source.name.startswith((*KERNEL, "pidurable.agent", *harness)):
            continue
        allowed = next(
            (names for prefix, names in EXEMPT.items() if source.name.startswith(prefix)), set()
        )
        wrong += [
            f"{source.place}:{line.line} imports {line.module}"
            for line in source.imports()
            if line.top in AMBIENT - allowed
        ]
        wrong += [
            f"{source.place}:{node.lineno} reads {ast.unparse(node)}"
            for node in source.nodes
            if isinstance(node, ast.Attribute)
            and ast.unparse(node) in ("os.urandom", "datetime.now", "datetime.utcnow", "date.today")
        ]

    assert wrong == []


def test_nothing_stored_can_run() -> None:
    """No pickle, marshal, shelve, eval, exec or unsafe YAML, but for the loader of extensions."""
    wrong = []
    for source in sources("pidurable", "extensions"):
        wrong += [
            f"{source.place}:{line.line} imports {line.module}"
            for line in source.imports()
            if line.top in ("pickle", "marshal", "shelve", "dill", "cloudpickle")
        ]
        for node in source.nodes:
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
                wrong.append(f"{source.place}:{node.lineno} calls {called}")
            # The loader runs the source of an extension; the checks of a definition evaluate the
            # annotation of `at`, which is source too.
            trusted = ("pidurable.registry._loader", "pidurable.tasks._p", "pidurable.registry._a")
            if called in ("eval", "exec") and not source.name.startswith(trusted):
                wrong.append(f"{source.place}:{node.lineno} calls {called}")

    assert wrong == []


def test_importing_the_package_loads_nothing_heavy() -> None:
    """Tool schemas, provider clients, YAML and the command line are loaded when they are used."""
    heavy = (
        "pydantic",
        "pydantic_ai",
        "pydantic_core",
        "jsonschema_rs",
        "griffe",
        "genai_prices",
        "openai",
        "anthropic",
        "httpx",
        "yaml",
        "cyclopts",
        "rich",
        "asyncio",
        "hypothesis",
    )
    program = (
        "import pidurable, sys; [getattr(pidurable, name) for name in dir(pidurable)]; "
        f"print([n for n in {heavy!r} if n in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"
