"""Teachers: one model for each part of the private data, trained in blocks, each block kept on disk as it is finished.

Networks train many at a time (`stacked`); scikit-learn estimators train one at a time in a process pool, or on
an existing cluster by `backend="ray"` or `backend="dask"` (joblib's back ends). A run that is started again takes
what is on disk and does the rest. A teacher that fails is named by its number, after all others are done.

Teachers are private: they stay with the data owner.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from terrine import check, files
from terrine.errors import InvalidArgument, MissingExtra, TerrineError
from terrine.pate.partitions import Membership, Partition
from terrine.pate.votes import Votes, count

if TYPE_CHECKING:
    from torch import Tensor

    from terrine.pate.stacked import Build, Recipe, Stack

Deal = Partition | Membership
Progress = Callable[[int, int], None]


class TeachersFailed(TerrineError):
    """Some teachers could not be trained; `numbers` says which. The others are on disk."""

    def __init__(self, failures: dict[int, str], folder: Path | None) -> None:
        self.numbers = sorted(failures)
        first = self.numbers[0]
        kept = f"; the others are kept in {folder}, run again to retry" if folder else ""
        super().__init__(f"teachers {self.numbers[:20]} failed (teacher {first}: {failures[first]}){kept}")


class Estimators:
    """Fitted scikit-learn-style teachers."""

    def __init__(self, models: Sequence[Any], deal: Deal) -> None:
        self.models, self.deal = list(models), deal

    def votes(self, inputs: ArrayLike, *, classes: int) -> Votes:
        """The teachers' votes on public inputs."""
        table = np.asarray(inputs)
        return count(np.stack([np.asarray(one.predict(table)) for one in self.models]), classes=classes, deal=self.deal)


class Modules:
    """Trained networks of one shape."""

    def __init__(self, stack: Stack, deal: Deal) -> None:
        self.stack, self.deal = stack, deal

    def votes(self, inputs: Tensor, *, classes: int) -> Votes:
        """The teachers' votes on public inputs."""
        return count(self.stack.predictions(inputs).numpy(), classes=classes, deal=self.deal)


def train_estimators(
    estimator: Any,
    inputs: ArrayLike,
    targets: ArrayLike,
    deal: Deal,
    *,
    classes: int,
    folder: Path | None = None,
    jobs: int = 1,
    backend: str | None = None,
    progress: Progress | None = None,
) -> Estimators:
    """Fit a copy of `estimator` on each part of the deal.

    Raises:
        TeachersFailed: some teachers could not be fitted; the others are in `folder`.
        InvalidArgument: labels outside 0 .. classes-1, or a class that no teacher has seen.
    """
    joblib = _joblib()
    x, y = np.asarray(inputs), _labels(targets, classes)
    parts = deal.parts
    key = _prepare(folder, {"estimator": repr(estimator), "deal": deal.record()["digest"]})
    paths = [key / f"teacher-{number:05d}.joblib" if key else None for number in range(len(parts))]
    todo = [number for number, path in enumerate(paths) if path is None or not path.exists()]
    models: dict[int, Any] = {}
    failures: dict[int, str] = {}
    with _pool(backend):
        work = [joblib.delayed(_fit)(estimator, x[parts[number]], y[parts[number]], number) for number in todo]
        for done, (number, model, failure) in enumerate(_finished(joblib, work, jobs, backend), 1):
            if failure:
                failures[number] = failure
            else:
                models[number] = model
                _keep(joblib, model, paths[number])
            if progress is not None:
                progress(len(parts) - len(todo) + done, len(parts))
    if failures:
        raise TeachersFailed(failures, folder)
    return Estimators([models.get(n) or joblib.load(paths[n]) for n in range(len(parts))], deal)


def train_modules(
    build: Build,
    inputs: Tensor,
    targets: Tensor,
    deal: Deal,
    recipe: Recipe,
    *,
    classes: int,
    folder: Path | None = None,
    block: int = 25,
    jobs: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> Modules:
    """Train one network on each part of the deal, `block` of them at a time, in `jobs` processes of one thread each.

    Raises:
        TeachersFailed: a block failed; the others are in `folder`.
    """
    from terrine.pate.stacked import Stack

    joblib = _joblib()
    _labels(targets.numpy(), classes)
    parts = deal.parts
    shape = {name: list(value.shape) for name, value in build().named_parameters()}
    recorded = {"recipe": repr(recipe), "shape": shape, "deal": deal.record()["digest"], "block": block, "seed": seed}
    key = _prepare(folder, recorded)
    starts = list(range(0, len(parts), check.whole("block", block)))
    paths = {start: key / f"block-{start:05d}.safetensors" if key else None for start in starts}
    todo = [start for start in starts if paths[start] is None or not _exists(paths[start])]
    stacks: dict[int, Stack] = {}
    failures: dict[int, str] = {}
    work = (
        joblib.delayed(_train_block)(
            build, *_chosen(inputs, targets, parts[start : start + block]), recipe, start, seed
        )
        for start in todo
    )
    for done, (start, parameters, failure) in enumerate(joblib.Parallel(n_jobs=jobs, return_as="generator")(work), 1):
        if failure:
            failures |= dict.fromkeys(range(start, min(start + block, len(parts))), failure)
        else:
            stacks[start] = Stack(build(), parameters)
            _keep_stack(stacks[start], paths[start])
        if progress is not None:
            progress(len(starts) - len(todo) + done, len(starts))
    if failures:
        raise TeachersFailed(failures, folder)
    for start, path in paths.items():
        if start not in stacks and path is not None:
            stacks[start] = Stack.load(build, path)
    return Modules(Stack.joined([stacks[start] for start in starts]), deal)


def _joblib() -> Any:
    try:
        import joblib
    except ImportError:
        raise MissingExtra("joblib", extra="pate") from None
    return joblib


def _labels(targets: ArrayLike, classes: int) -> NDArray[np.int64]:
    check.whole("classes", classes, at_least=2)
    y = np.asarray(targets)
    if y.dtype.kind not in "iub" or (y.size and (y.min() < 0 or y.max() >= classes)):
        raise InvalidArgument(f"labels are not all in 0 .. {classes - 1}: want class numbers; encode them first")
    if missing := np.setdiff1d(np.arange(classes), y).tolist():
        raise InvalidArgument(f"no teacher has seen classes {missing}: want examples of every class, or fewer classes")
    return y.astype(np.int64)


def _prepare(folder: Path | None, recorded: dict[str, Any]) -> Path | None:
    """The sub-folder for exactly this training, so that what is resumed is what was begun."""
    if folder is None:
        return None
    digest = hashlib.sha256(json.dumps(recorded, sort_keys=True).encode()).hexdigest()[:16]
    target = files.private_folder(files.private_folder(Path(folder)) / digest)
    files.write(target / "training.json", json.dumps(recorded, indent=2) + "\n", private=True)
    return target


@contextlib.contextmanager
def _pool(backend: str | None) -> Iterator[None]:
    if backend is None:
        yield
        return
    joblib = _joblib()
    if backend == "ray":
        try:
            from ray.util.joblib import register_ray
        except ImportError:
            raise MissingExtra("ray", extra="cluster") from None
        register_ray()
    elif backend == "dask":
        try:
            from distributed import get_client
        except ImportError:
            raise MissingExtra("distributed", extra="cluster") from None
        try:
            get_client()
        except ValueError:
            raise InvalidArgument("backend='dask' without a cluster: want distributed.Client(address) first") from None
    else:
        raise check.refuse("backend", backend, "'ray', 'dask' or None")
    with joblib.parallel_backend(backend):
        yield


def _finished(joblib: Any, work: list[Any], jobs: int, backend: str | None) -> Iterator[tuple[int, Any, str]]:
    """Results as they come; a cluster's back end gives lists only, so there in portions that are kept one by one."""
    if backend is None:
        yield from joblib.Parallel(n_jobs=jobs, return_as="generator")(work)
        return
    portion = 4 * max(1, jobs)
    for start in range(0, len(work), portion):
        yield from joblib.Parallel(n_jobs=jobs)(work[start : start + portion])


def _fit(estimator: Any, x: NDArray[Any], y: NDArray[np.int64], number: int) -> tuple[int, Any, str]:
    from sklearn.base import clone
    from sklearn.dummy import DummyClassifier

    try:
        # A part with one class only: that class is all its teacher can know.
        model = clone(estimator) if len(np.unique(y)) > 1 else DummyClassifier(strategy="most_frequent")
        return number, model.fit(x, y), ""
    except Exception as error:
        return number, None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _chosen(
    inputs: Tensor, targets: Tensor, parts: Sequence[NDArray[np.int64]]
) -> tuple[Tensor, Tensor, list[NDArray[np.int64]]]:
    """Only what a block needs travels to its process."""
    import torch

    chosen = torch.from_numpy(np.concatenate(parts))
    edges = np.cumsum([len(part) for part in parts])[:-1]
    return inputs[chosen], targets[chosen], list(np.split(np.arange(len(chosen)), edges))


def _train_block(
    build: Build,
    x: Tensor,
    y: Tensor,
    parts: list[NDArray[np.int64]],
    recipe: Recipe,
    start: int,
    seed: int,
) -> tuple[int, dict[str, Any], str]:
    import torch

    from terrine.pate.stacked import train

    try:
        if os.environ.get("LOKY_WORKER") or torch.get_num_threads() > 1:
            torch.set_num_threads(1)  # blocks are the unit of parallel work
        seeds = [seed * 1_000_003 + start + offset for offset in range(len(parts))]
        return start, train(build, x, y, parts, recipe, seeds=seeds).parameters, ""
    except Exception as error:
        return start, {}, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _keep(joblib: Any, model: Any, path: Path | None) -> None:
    if path is not None:
        with files.written(path, private=True) as file:
            joblib.dump(model, file)


def _keep_stack(stack: Stack, path: Path | None) -> None:
    if path is not None:
        stack.save(path)


def _exists(path: Path | None) -> bool:
    return path is not None and path.exists()
