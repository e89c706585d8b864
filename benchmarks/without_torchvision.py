"""timm without torchvision, which has no build for every build of torch: its models use none of it, but import it.

`install()` answers imports of torchvision with empty modules where the library itself is missing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from enum import Enum
from typing import Any

_MODES = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")
_Interpolation = Enum("_Interpolation", {mode.upper().replace("-", "_"): mode for mode in _MODES})


class _Empty(types.ModuleType):
    """A module in which every name is a class without methods."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Interpolation if name == "InterpolationMode" else type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        is_its = name.split(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_its else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Stand in for torchvision from now on, where there is none."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Finder())
