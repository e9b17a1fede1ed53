"""The table of features, and their doors: that each says what is there."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import re
from pathlib import Path
from types import ModuleType

from forestage import features
from forestage.features import FEATURES

REPOSITORY = Path(__file__).parent.parent
FOLDER = Path(features.__file__).parent


def script(name: str) -> ModuleType:
    """A program of packaging/, as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(REPOSITORY / "packaging" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_feature_table_imports_only_os() -> None:
    """Each hook reads it, also one that then has nothing to do."""
    nodes = ast.parse((FOLDER / "__init__.py").read_text()).body
    found = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [ast.unparse(node) for node in found] == ["import os"]


def test_feature_table_has_a_row_for_each_folder_and_the_core() -> None:
    folders = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))
    assert sorted(feature.name for feature in FEATURES) == sorted([*folders, "core"])


def test_row_of_each_feature_names_exactly_its_doors() -> None:
    names = script("conformance").read_doors().keys()
    found: dict[str, set[str]] = {one.name: set() for one in FEATURES}
    for path in FOLDER.glob("*/*.py"):
        nodes = ast.parse(path.read_text()).body
        functions = (node.name for node in nodes if isinstance(node, ast.FunctionDef))
        there = {path.stem, *(f"{path.stem}.{function}" for function in functions)}
        found[path.parent.name] |= there & names
    assert found == {one.name: {*one.doors} for one in FEATURES}


def test_order_of_the_hooks_names_features_of_the_table() -> None:
    """The pieces of another feature are left out there, as those of one that was deleted."""
    text = (REPOSITORY / "tests/hooks/test_order.py").read_text()
    named = re.findall(r"forestage\.features\.(\w+)[.:]", text)
    assert {*named} <= {feature.name for feature in FEATURES}


def test_debts_name_what_is_there() -> None:
    """Where a file or word has another name by now, tests/delete_feature cuts nothing."""
    debts = [debt for feature in FEATURES for debt in feature.debts]
    assert debts
    assert not [debt for debt in debts if not is_there(*debt.partition(": ")[::2])]


def is_there(file: str, word: str) -> bool:
    """Return whether a file has a word, in the sense of tests/delete_feature."""
    path = REPOSITORY / file
    if not word or not path.is_file():
        return path.is_file()
    text = path.read_text()
    if path.suffix != ".py":
        return word in text
    return any(word in vars(node).values() for node in ast.walk(ast.parse(text)))


def test_architecture_md_names_every_door() -> None:
    page = (REPOSITORY / "docs/architecture.md").read_text()
    assert not [door for door in script("conformance").read_doors() if f"`{door}`" not in page]


def test_conformance_py_equals_the_text_generated_from_the_feature_table() -> None:
    made = script("conformance").build_module_text()
    assert (REPOSITORY / "tests/features/conformance.py").read_text() == made
