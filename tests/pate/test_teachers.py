"""Teachers: together as alone, resumed after a crash, failures by number; students; the whole on digits."""

import functools
import json

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from torch import nn

from terrine import datasets, pate
from terrine.errors import InvalidArgument
from terrine.pate import networks, student, teachers
from terrine.pate.moves import cut, upright, warped
from terrine.pate.stacked import Recipe, Stack, train
from terrine.rng import Seeded


@pytest.fixture(scope="module")
def digits():
    return datasets.digits()


@pytest.fixture(scope="module")
def tensors(digits):
    return tuple(torch.from_numpy(one.copy()).float() / 255 for one in (digits.train, digits.test))


class Odd(nn.Module):
    """Not a Sequential: runs under vmap."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x.flatten(1))))


BUILDS = {
    "convolution": functools.partial(networks.teacher, 1, 8, 10),
    "pooled": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10, bias=False)
    ),
    "vector": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10)),
    "odd": Odd,
}


@pytest.mark.parametrize("name", BUILDS)
def test_a_stack_is_its_models_one_by_one(name, tensors):
    stack = Stack.fresh(BUILDS[name], seeds=[3, 4, 5])
    together = stack.logits(tensors[0][:20], chunk=7)
    for number in range(3):
        torch.testing.assert_close(together[number], stack.model(number)(tensors[0][:20]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BUILDS)
def test_models_trained_together_are_those_trained_alone(name, tensors, digits):
    y = torch.from_numpy(digits.train_labels)
    parts = [np.arange(0, 40), np.arange(40, 73), np.arange(100, 139)]
    recipe = Recipe(epochs=2, batch=8)
    together = train(BUILDS[name], tensors[0], y, parts, recipe, seeds=[7, 8, 9])
    alone = train(BUILDS[name], tensors[0], y, [parts[0]], recipe, seeds=[7])
    for key, value in alone.parameters.items():
        torch.testing.assert_close(together.parameters[key][0], value[0], rtol=1e-3, atol=1e-4)


def test_an_ordinary_loop_learns_the_same(tensors, digits):
    """The oracle: torch's own modules and optimiser, one example order."""
    y = torch.from_numpy(digits.train_labels)
    part, recipe = np.arange(48), Recipe(epochs=2, batch=16, learning_rate=1e-2)
    fast = train(BUILDS["convolution"], tensors[0], y, [part], recipe, seeds=[5])
    torch.manual_seed(5)
    model = BUILDS["convolution"]()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    order, step = np.random.default_rng([5, 1]), 0
    for _ in range(2):
        for chosen in np.split(order.permutation(part), 3):
            optimiser.param_groups[0]["lr"] = 1e-2 * 0.5 * (1 + np.cos(np.pi * step / 6))
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(tensors[0][chosen]), y[chosen]).backward()
            optimiser.step()
            step += 1
    for key, value in model.named_parameters():
        torch.testing.assert_close(fast.parameters[key][0], value.detach(), rtol=1e-3, atol=1e-5)


def test_a_module_with_batch_norm_is_refused():
    with pytest.raises(InvalidArgument, match="batch norm"):
        Stack.fresh(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), seeds=[0])


def test_a_broken_network_does_not_vote(tensors):
    stack = Stack.fresh(BUILDS["vector"], seeds=[0, 1])
    stack.parameters["1.weight"][1] = float("nan")
    with pytest.raises(InvalidArgument, match=r"models \[1\] give outputs that are not finite"):
        stack.predictions(tensors[1][:3])


def test_warping_is_the_identity_at_strength_zero_and_small_when_small(tensors):
    generator = np.random.default_rng(0)
    assert warped(tensors[0][:5], 0.0, generator) is tensors[0][:5] or torch.equal(
        warped(tensors[0][:5], 0.0, generator), tensors[0][:5]
    )
    close = warped(tensors[0][:50], 0.01, generator)
    assert (close - tensors[0][:50]).abs().mean() < 0.02


def test_an_affine_map_and_a_shift_move_pixels_where_they_say():
    """The oracle: a single bright pixel, its centre of mass before and after."""
    image = torch.zeros(2000, 1, 21, 21)
    image[:, :, 10, 10] = 1.0
    place = torch.arange(21.0) - 10
    moved = warped(image, 1e-6, np.random.default_rng(0), shift=3.0)
    mass = moved.sum((1, 2, 3))
    down, right = (moved.sum((1, 2)) * place).sum(1) / mass, (moved.sum((1, 3)) * place).sum(1) / mass
    for offset in (down, right):
        assert offset.abs().max() < 3.6
        assert 1.5 < offset.std() < 2.0, "uniform on -3 .. 3 has deviation 1.73"
    bent = warped(image, 1e-6, np.random.default_rng(0), bend=1.0)
    assert 0.3 < ((bent.sum((1, 2)) * place).sum(1) / bent.sum((1, 2, 3)).clamp_min(1e-3)).std() < 1.7


def test_upright_images_are_centred_and_no_longer_slant():
    generator = np.random.default_rng(0)
    bar = torch.zeros(200, 1, 28, 28)
    bar[:, :, 7:21, 13:15] = 1.0
    slanted = warped(bar, 1.0, generator, shift=2.0)
    place = torch.arange(28.0) - 13.5

    def moments(x):
        ink, mass = x[:, 0], x.sum((1, 2, 3))
        down, right = (ink.sum(2) * place).sum(1) / mass, (ink.sum(1) * place).sum(1) / mass
        rows, columns = place[None, :, None] - down[:, None, None], place[None, None, :] - right[:, None, None]
        return down, right, (ink * rows * columns).sum((1, 2)) / mass

    before, after = moments(slanted), moments(upright(slanted))
    for one, other in zip(before, after, strict=True):
        assert other.abs().mean() < 0.1 * one.abs().mean()


def test_a_cut_blanks_one_square_of_each_image():
    whole = torch.ones(500, 2, 20, 20)
    holes = 1 - cut(whole, 0.3, np.random.default_rng(0))
    assert torch.equal(holes[:, 0], holes[:, 1])
    height, width = holes[:, 0].amax(2).sum(1), holes[:, 0].amax(1).sum(1)
    assert torch.equal(height * width, holes[:, 0].sum((1, 2))), "a rectangle"
    assert height.max() == width.max() == 6
    assert height.min() >= 3
    assert cut(whole, 0.0, np.random.default_rng(0)) is whole


def test_training_goes_on_where_it_stopped(tmp_path, tensors, digits):
    deal = pate.split(len(tensors[0]), 6, seed=0)
    y, recipe = torch.from_numpy(digits.train_labels), Recipe(epochs=1)
    options = {"classes": 10, "folder": tmp_path, "block": 2}
    first = teachers.train_modules(BUILDS["vector"], tensors[0], y, deal, recipe, **options)
    blocks = sorted(tmp_path.rglob("block-*.safetensors"))
    assert len(blocks) == 3
    kept = blocks[0].stat().st_mtime_ns
    blocks[1].unlink()
    seen = []
    again = teachers.train_modules(
        BUILDS["vector"], tensors[0], y, deal, recipe, progress=lambda *at: seen.append(at), **options
    )
    assert seen == [(3, 3)]
    assert blocks[0].stat().st_mtime_ns == kept
    for key, value in first.stack.parameters.items():
        torch.testing.assert_close(again.stack.parameters[key], value)


class Picky(LogisticRegression):
    """Fails on the parts of which the first example is odd."""

    def fit(self, x, y):
        if (tired := getattr(Picky, "tired", None)) and len(x) in tired:
            raise ValueError("cannot learn this part")
        return super().fit(x, y)


def test_a_teacher_that_fails_is_named_and_the_others_are_kept(tmp_path, digits):
    flat = digits.train.reshape(len(digits.train), -1) / 255
    deal = pate.split(len(flat), 5, seed=0)
    sizes = [len(part) for part in deal.parts]
    assert sizes == [288, 288, 287, 287, 287]
    Picky.tired = {288}
    with pytest.raises(teachers.TeachersFailed, match="cannot learn this part") as failed:
        teachers.train_estimators(Picky(), flat, digits.train_labels, deal, classes=10, folder=tmp_path)
    assert failed.value.numbers == [0, 1]
    assert len(list(tmp_path.rglob("teacher-*.joblib"))) == 3
    Picky.tired = None
    trained = teachers.train_estimators(Picky(), flat, digits.train_labels, deal, classes=10, folder=tmp_path)
    assert len(trained.models) == 5


@pytest.mark.parametrize(
    ("labels", "classes", "why"),
    [
        ([0, 1, 0, 1], 3, r"no teacher has seen classes \[2\]"),
        ([0, 1, 5, 1], 3, r"0 \.\. 2"),
        ([0, 0, 0, 0], 1, "classes"),
    ],
)
def test_labels_that_cannot_be_taught_are_refused(labels, classes, why):
    with pytest.raises(InvalidArgument, match=why):
        teachers.train_estimators(LogisticRegression(), np.eye(4), labels, pate.split(4, 2, seed=0), classes=classes)


def test_a_cluster_back_end_is_one_argument():
    with pytest.raises(InvalidArgument, match="'ray', 'dask'"):
        teachers.train_estimators(
            LogisticRegression(), np.eye(4), [0, 1, 0, 1], pate.split(4, 2, seed=0), classes=2, backend="slurm"
        )


@pytest.fixture
def local_ray(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    yield "ray"
    ray.shutdown()


@pytest.fixture
def local_dask():
    from distributed import Client, LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster):
        yield "dask"


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["local_ray", "local_dask"])
def test_teachers_train_on_a_real_local_cluster(cluster, digits, tmp_path, request):
    backend = request.getfixturevalue(cluster)
    flat, test = (one.reshape(len(one), -1) / 255 for one in (digits.train, digits.test))
    deal = pate.split(len(flat), 6, seed=0)
    options = {"estimator": LogisticRegression(max_iter=50), "classes": 10, "jobs": 2}
    away = teachers.train_estimators(
        inputs=flat, targets=digits.train_labels, deal=deal, backend=backend, folder=tmp_path, **options
    )
    assert len(list(tmp_path.rglob("teacher-*.joblib"))) == 6
    here = teachers.train_estimators(inputs=flat, targets=digits.train_labels, deal=deal, **options)
    assert np.array_equal(away.votes(test, classes=10).counts, here.votes(test, classes=10).counts)


def test_dask_without_a_cluster_is_refused():
    pytest.importorskip("distributed")
    with pytest.raises(InvalidArgument, match=r"want distributed\.Client"):
        teachers.train_estimators(
            LogisticRegression(), np.eye(4), [0, 1, 0, 1], pate.split(4, 2, seed=0), classes=2, backend="dask"
        )


# ---- the student ----


@pytest.mark.parametrize(
    "method",
    [student.Supervised(), student.Consistency(), student.VirtualAdversarial(push=0.5), student.FeatureMatching()],
    ids=lambda one: type(one).__name__,
)
def test_students_learn_from_few_labels(method, tensors, digits):
    labels = np.full(len(tensors[0]), -1)
    labels[:150] = digits.train_labels[:150]
    course = student.Course(steps=150, labelled=32, unlabelled=32, average=0.97)
    model = student.train(functools.partial(networks.student, 1, 8, 10), tensors[0], labels, method, course)
    assert student.accuracy(model, tensors[1], digits.test_labels) > 0.7


def test_consistency_learns_more_from_the_unlabelled_rest(tensors, digits):
    """40 labels, the rest unlabelled: the same network, steps and moves with and without the rest."""
    labels = np.full(len(tensors[0]), -1)
    labels[:40] = digits.train_labels[:40]
    course = student.Course(steps=200, labelled=32, unlabelled=64, average=0.97)
    build = functools.partial(networks.student, 1, 8, 10)
    scores = [
        student.accuracy(student.train(build, tensors[0], labels, method, course), tensors[1], digits.test_labels)
        for method in (student.Consistency(weight=0.0), student.Consistency())
    ]
    assert scores[1] > scores[0] + 0.02


def test_settings_are_compared_without_other_labels(tensors, digits):
    """Answers of which many are wrong make worse students; their agreement says so, with no true label read."""
    course = student.Course(steps=60, labelled=32, unlabelled=8, average=0.9)
    build, labels = functools.partial(networks.student, 1, 8, 10), np.full(len(tensors[0]), -1)
    labels[:300] = digits.train_labels[:300]
    clean = student.compared(build, tensors[0], labels, student.Supervised(), course)
    labels[:300:2] = np.random.default_rng(0).integers(0, 10, 150)
    wrong = student.compared(build, tensors[0], labels, student.Supervised(), course)
    assert 1 >= clean.with_each_other > wrong.with_each_other
    assert 1 >= clean.with_answers > wrong.with_answers


def test_students_agree_where_their_mean_is_sure():
    class Told(nn.Module):
        def __init__(self, chances):
            super().__init__()
            self.logits = torch.log(torch.tensor(chances))

        def forward(self, x):
            return self.logits[: len(x)]

    one = Told([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9]])
    two = Told([[0.8, 0.2], [0.2, 0.8], [0.1, 0.9]])
    assert student.agreed([one, two], torch.zeros(3, 1)).tolist() == [0, -1, 1]
    assert student.agreed([one, two], torch.zeros(3, 1), sure=0.5).tolist() == [0, 0, 1]
    with pytest.raises(InvalidArgument, match="sure"):
        student.agreed([one], torch.zeros(3, 1), sure=1.5)


def test_a_student_without_labels_is_refused(tensors):
    with pytest.raises(InvalidArgument, match="0 of 30 inputs have a label"):
        student.train(BUILDS["vector"], tensors[0][:30], np.full(30, -1), student.Supervised())


def test_the_next_questions_are_the_doubtful_ones():
    predicted = np.array([[0.9, 0.1], [0.5, 0.5], [0.6, 0.4], [0.52, 0.48]])
    assert student.doubtful(predicted, 2).tolist() == [1, 3]
    assert student.doubtful(predicted, 2, asked=[1]).tolist() == [3, 2]
    assert student.doubtful(predicted, 9, asked=[1]).tolist() == [3, 2, 0]


def test_representatives_are_distinct_and_cover_the_pool(tensors):
    chosen = student.spread(tensors[0], 40)
    assert len(set(chosen.tolist())) == 40


def test_a_student_is_saved_with_its_bill(tmp_path, tensors):
    model = BUILDS["vector"]()
    student.save(model, tmp_path / "s.safetensors", bill={"epsilon_data_independent": 1.5})
    back = student.load(BUILDS["vector"], tmp_path / "s.safetensors")
    torch.testing.assert_close(back(tensors[1][:4]), model(tensors[1][:4]))
    assert json.loads((tmp_path / "s.bill.json").read_text())["epsilon_data_independent"] == 1.5


@pytest.mark.parametrize("kind", [LogisticRegression, RandomForestClassifier, HistGradientBoostingClassifier])
def test_an_estimator_is_saved_without_a_pickle(kind, tmp_path, digits):
    flat = digits.train[:200].reshape(200, -1) / 255
    model = kind().fit(flat, digits.train_labels[:200])
    student.save(model, tmp_path / "s.skops", bill={})
    back = student.load_estimator(tmp_path / "s.skops")
    assert np.array_equal(back.predict_proba(flat), model.predict_proba(flat))
    assert not (tmp_path / "s.skops").read_bytes().startswith(b"\x80"), "a pickle starts so"


def test_a_file_that_names_other_types_is_not_loaded(tmp_path, digits):
    flat = digits.train[:100].reshape(100, -1) / 255
    student.save(Picky().fit(flat, digits.train_labels[:100]), tmp_path / "s.skops", bill={})
    with pytest.raises(InvalidArgument, match="Picky: want scikit-learn's types"):
        student.load_estimator(tmp_path / "s.skops")


def test_an_estimator_that_missed_a_class_gives_it_no_chance():
    model = LogisticRegression().fit([[0.0], [1.0], [2.0]], [0, 2, 2])
    assert student.estimated(model, [[0.0], [2.0]], 4)[:, [1, 3]].max() == 0
    assert student.estimated(model, [[0.0]], 4).sum() == pytest.approx(1)


# ---- the whole ----


def test_digits_end_to_end(digits):
    flat, test = (one.reshape(len(one), -1) / 255 for one in (digits.train, digits.test))
    deal = pate.split(1200, 60, seed=0)
    trained = teachers.train_estimators(
        LogisticRegression(C=10), flat[:1200], digits.train_labels[:1200], deal, classes=10
    )
    votes = trained.votes(flat[1200:], classes=10)
    rule = pate.GaussianMax(8.0)
    answers = rule.answer(votes, rng=Seeded(0))
    right = (answers.labels == digits.train_labels[1200:]).mean()
    assert right > 0.75
    priced = pate.bill(votes, answers, rule, delta=1e-5, rng=Seeded(0))
    assert priced.sealed.unsafe_open() < priced.data_independent
    pupil = LogisticRegression(C=10, max_iter=500).fit(flat[1200:], answers.labels)
    assert pupil.score(test, digits.test_labels) > 0.75
