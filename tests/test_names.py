"""What one may import by name: every public class has one name, and no package hides a module of its own."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "terrine"
RECORDS = {"DiscreteGaussian", "Gaussian", "Laplace", "RandomizedResponse", "Skellam"}
"""Events, each the record of what a mechanism, or a way of summing, of the same name did."""
PLANS = {"Plan"}
"""`sgd.Plan` and `federated.Plan` are one idea: sampler, noise and event from the same frozen fields."""


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def test_a_public_class_has_one_name():
    files = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].add(path)
    assert {name for name, paths in files.items() if len(paths) > 1} == RECORDS | PLANS


def test_no_package_hides_a_module_behind_a_function():
    for init in SOURCE.rglob("__init__.py"):
        modules = {path.stem for path in init.parent.glob("*.py")} | {
            path.parent.name for path in init.parent.glob("*/__init__.py")
        }
        here = "terrine." + ".".join(init.parent.relative_to(SOURCE).parts)
        taken = [node for node in ast.walk(parsed(init)) if isinstance(node, ast.ImportFrom) and node.module != here]
        assert {name.asname or name.name for node in taken for name in node.names} & modules == set(), init
