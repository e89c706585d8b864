"""What a run's folder holds for its audit: the one place where these files are named.

    privacy.json              {"epsilon": 2.0, "delta": 1e-05, ...}    the claim; other keys are left alone
    audit/canaries.npy        one score to a canary                     \\ a one-run audit; fair coins
    audit/included.npy        true where the canary was in              /
    audit/gradients.npy       one score to a gradient canary            \\ the same, of a twin of the run
    audit/watched.npy         true where the gradient canary was in     /
    audit/members.npy         an attack's scores of examples that were in      \\ an attack on the released model
    audit/non_members.npy     ... and of examples that were not                /

At least one of the three. The scores are private, as the training data is: they stay with the run.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from terrine import files
from terrine.audit.scores import Flags, Floats, Scores, checked, paired
from terrine.errors import InvalidArgument
from terrine.events import Budget


@dataclass(frozen=True, eq=False)
class ScoreFolder:
    """What was found in a run's folder."""

    claim: Budget
    canaries: tuple[Floats, Flags] | None
    gradients: tuple[Floats, Flags] | None
    scores: Scores | None


def write_canaries(folder: Path, scores: ArrayLike, included: ArrayLike) -> None:
    """Keep a run's canaries for its audit."""
    every, flags = paired(scores, included)
    _save(folder, "canaries", every)
    _save(folder, "included", flags)


def write_gradients(folder: Path, scores: ArrayLike, included: ArrayLike) -> None:
    """Keep the gradient canaries of a run's twin."""
    every, flags = paired(scores, included)
    _save(folder, "gradients", every)
    _save(folder, "watched", flags)


def write_scores(folder: Path, scores: Scores) -> None:
    """Keep an attack's scores for the audit."""
    _save(folder, "members", scores.members)
    _save(folder, "non_members", scores.non_members)


def read(folder: Path) -> ScoreFolder:
    """The claim and the evidence of a run.

    Raises:
        InvalidArgument: there is no claim, nothing to audit, or a file that does not hold what it should.
    """
    canaries = _pair(folder, "canaries", "included")
    gradients, scores = _pair(folder, "gradients", "watched"), _pair(folder, "members", "non_members")
    if canaries is None and gradients is None and scores is None:
        raise InvalidArgument(
            f"{folder}: nothing to audit; want audit/canaries.npy and audit/included.npy, or audit/members.npy and "
            "audit/non_members.npy: train with canaries"
        )
    return ScoreFolder(
        claim=_claim(folder / "privacy.json"),
        canaries=None if canaries is None else paired(*canaries),
        gradients=None if gradients is None else paired(*gradients),
        scores=None if scores is None else Scores(*map(checked, ("members", "non_members"), scores)),
    )


def load(path: Path) -> NDArray[np.generic]:
    """Numbers from a .npy file, or from a text file with one to a line."""
    if not path.is_file():
        raise InvalidArgument(f"{path}: no such file; want scores as .npy, or as text with one number to a line")
    try:
        if path.suffix == ".npy":
            return np.asarray(np.load(path, allow_pickle=False))
        return np.atleast_1d(np.loadtxt(path, delimiter=","))
    except (ValueError, EOFError, OSError, MemoryError, zipfile.BadZipFile) as error:
        raise InvalidArgument(
            f"{path}: not readable as numbers ({error}); want .npy, or one number to a line"
        ) from None


def load_scores(name: str, path: Path) -> Floats:
    """An attack's scores from a file."""
    return checked(f"{name} ({path})", load(path))


def _pair(folder: Path, first: str, second: str) -> tuple[NDArray[np.generic], NDArray[np.generic]] | None:
    paths = [folder / "audit" / f"{name}.npy" for name in (first, second)]
    present = [path.is_file() for path in paths]
    if not any(present):
        return None
    if not all(present):
        raise InvalidArgument(f"{paths[present.index(False)]}: missing beside {paths[present.index(True)].name}")
    return load(paths[0]), load(paths[1])


def _claim(path: Path) -> Budget:
    if not path.is_file():
        raise InvalidArgument(f'{path}: missing; want the run\'s claim, {{"epsilon": ..., "delta": ...}}')
    try:
        held = json.loads(path.read_text())
        return Budget(held["epsilon"], held["delta"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise InvalidArgument(f'{path}: no claim in it ({error}); want {{"epsilon": ..., "delta": ...}}') from None


def _save(folder: Path, name: str, array: NDArray[np.generic]) -> None:
    with files.written(files.private_folder(folder / "audit") / f"{name}.npy", private=True) as file:
        np.save(file, array, allow_pickle=False)
