"""PATE's vote-dependent bill: against a slow transcription, against every neighbour, and where others break."""

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, stats
from scipy.special import erfc, erfcinv

from terrine.accounting import pate
from terrine.accounting.pate import gaussian_max, laplace_max, release, sensitivity
from terrine.errors import InvalidArgument

# ---- the slow, obvious versions ----


def slow_wrong(row, sigma):
    rest = sorted(row, reverse=True)
    total = sum(0.5 * erfc((rest[0] - other) / (2 * sigma)) for other in rest[1:])
    return min(total, 1 - 1 / len(row))


def slow_bound(q, sigma, order):
    mu2 = sigma * math.sqrt(-math.log(q))
    mu1 = mu2 + 1
    e1, e2 = mu1 / sigma**2, mu2 / sigma**2
    a = (1 - q) / (1 - (q * math.exp(e2)) ** (1 - 1 / mu2))
    b = math.exp(e1) / q ** (1 / (mu1 - 1))
    return math.log((1 - q) * a ** (order - 1) + q * b ** (order - 1)) / (order - 1)


def slow_rdp(q, sigma, order):
    worst = order / sigma**2
    mu2 = sigma * math.sqrt(-math.log(q))
    mu1 = mu2 + 1
    if mu2 <= 1 or order >= mu1 or -math.log(q) <= mu2 / sigma**2:
        return worst
    limit = math.exp((mu2 - 1) * mu2 / sigma**2) / (mu1 / (mu1 - 1) * mu2 / (mu2 - 1)) ** mu2
    return min(worst, slow_bound(q, sigma, order)) if q <= limit else worst


def slow_local(row, sigma, order):
    """[PSM18] Algorithms 3 to 5, one vote at a time."""
    m, n = len(row), sum(row)
    q0 = math.exp(sensitivity.profile_of(sigma, order, m).log_q0)

    def bill(q):
        return order / sigma**2 if q >= q0 else slow_bound(q, sigma, order)

    def moved(q, sign):
        return min(1.0, (m - 1) / 2 * erfc(-sign / sigma + erfcinv(2 * q / (m - 1))))

    q1 = moved(q0, -1)

    def local(q):
        if q1 <= q <= q0:
            return order / sigma**2 - bill(q1)
        return max(bill(moved(q, +1)) - bill(q), bill(q) - bill(moved(q, -1)))

    found = [local(q1)] * n
    row = sorted(row, reverse=True)
    q = slow_wrong(row, sigma)
    if q1 <= q <= q0:
        return found
    found[0], left, step = local(q), q > q0, 0
    while (left and q > q0 and row[1] > 0) or (not left and q < q1):
        step += 1
        row[0], row[1] = (row[0] + 1, row[1] - 1) if left else (row[0] - 1, row[1] + 1)
        row[1:] = sorted(row[1:], reverse=True)
        q = slow_wrong(row, sigma)
        found[step] = local(q)
    return found


def draw(teachers, classes, queries, seed, concentration=0.3):
    generator = np.random.default_rng(seed)
    return np.stack(
        [generator.multinomial(teachers, generator.dirichlet([concentration] * classes)) for _ in range(queries)]
    )


@pytest.mark.parametrize(("teachers", "classes", "sigma"), [(250, 10, 40.0), (60, 3, 8.0), (1000, 25, 100.0)])
def test_the_divergence_is_the_slow_one(teachers, classes, sigma):
    votes = draw(teachers, classes, 40, seed=1)
    orders = [1.5, 2.0, 5.0, 20.0, 60.0]
    slow = [[slow_rdp(slow_wrong(list(row), sigma), sigma, order) for order in orders] for row in votes]
    found = pate.gaussian_max_rdp(votes, noise=sigma, orders=orders)
    np.testing.assert_allclose(found, slow, rtol=1e-9, atol=1e-13)
    assert np.any(found < 0.8 * np.array(orders) / sigma**2)
    assert np.any(found == np.array(orders) / sigma**2)


@pytest.mark.parametrize(
    ("teachers", "classes", "sigma", "order"),
    [(250, 10, 40.0, 20.0), (250, 10, 20.0, 8.0), (40, 3, 6.0, 3.0), (400, 30, 30.0, 12.0), (10, 4, 0.5, 1.5)],
)
def test_the_local_sensitivity_is_the_slow_one(teachers, classes, sigma, order):
    votes = draw(teachers, classes, 30, seed=2)
    found = pate.gaussian_max_local_sensitivity(votes, noise=sigma, order=order)
    slow = np.array([slow_local(list(row), sigma, order) for row in votes])
    works = np.isfinite(slow)
    np.testing.assert_allclose(found[works], slow[works], rtol=1e-9, atol=1e-12)
    assert works.mean() > 0.9
    assert found.shape == (30, teachers)


def test_the_published_examples():
    found = pate.gaussian_max_local_sensitivity([[10, 0, 0]], noise=0.5, order=1.5)[0]
    np.testing.assert_allclose(found, [3.13503646e-17, 1.60178280e-08, 5.90681786e-03] + [5.99981308] * 7, rtol=1e-8)
    found = pate.gaussian_max_local_sensitivity([[1000, 500, 300, 200, 0]], noise=250.0, order=10.0)[0]
    np.testing.assert_allclose(found, [0] * 298 + [2.77693450548e-7, 2.10853979548e-6] + [2.73113623988e-6] * 1700)
    up = pate.threshold_local_sensitivity([[20, 10, 0]], threshold=2, noise=2, order=10)[0]
    np.testing.assert_allclose(up[:3], [1.60212079e-01, 2.07021132e-01, 2.07021132e-01], rtol=1e-8)


# ---- against every neighbour ----


def every_vote(teachers, classes):
    for bars in itertools.combinations(range(teachers + classes - 1), classes - 1):
        edges = (-1, *bars, teachers + classes - 1)
        yield [b - a - 1 for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize(
    ("sigma", "order"), [(1.0, 1.5), (1.5, 2.5), (2.5, 2.0), (4.0, 6.0), (0.5, 4.0), (2.0, 12.0), (8.0, 20.0)]
)
def test_no_neighbour_moves_a_bill_further_than_the_sensitivity_says(sigma, order):
    space = np.array(list(every_vote(14, 3)))
    apart = np.abs(space[:, None] - space[None]).sum(axis=2) // 2
    cases = {
        "gaussian": (
            pate.sanitisable_rdp(space, noise=sigma, order=order),
            pate.gaussian_max_local_sensitivity(space, noise=sigma, order=order),
        ),
        "threshold": (
            pate.threshold_rdp(space, threshold=9, noise=sigma, orders=order)[:, 0],
            pate.threshold_local_sensitivity(space, threshold=9, noise=sigma, order=order),
        ),
        "laplace": (
            pate.laplace_max_rdp(space, noise=2 * sigma, orders=order)[:, 0],
            pate.laplace_max_sensitivity(space, noise=2 * sigma, order=order),
        ),
    }
    for name, (bill, claimed) in cases.items():
        moves = np.abs(bill[:, None] - bill[None])
        local = np.where(apart <= 1, moves, 0).max(axis=1)
        for distance in range(14):
            truth = np.where(apart <= distance, local[None], 0).max(axis=1)
            assert np.all(claimed[:, distance] >= truth * (1 - 1e-9) - 1e-15), (name, distance)
        for beta in (0.01, 0.3):
            soft = sensitivity.discounted(claimed, beta)
            ratio = soft[:, None] / np.maximum(soft[None], 1e-300)
            assert np.all((ratio <= math.exp(beta) * (1 + 1e-9)) | (apart > 1)), name


def test_a_sensitivity_that_leaves_the_rows_unsorted_is_caught():
    """The same votes with the leader last must not be cheaper: the historical bug compared columns 0 and 1."""
    votes = draw(100, 6, 20, seed=5)
    shuffled = np.random.default_rng(0).permuted(votes, axis=1)
    for function in (
        lambda v: pate.gaussian_max_rdp(v, noise=15.0, orders=[2.0, 9.0]),
        lambda v: pate.threshold_rdp(v, threshold=60, noise=15.0, orders=[2.0, 9.0]),
        lambda v: pate.laplace_max_rdp(v, noise=10.0, orders=[2.0, 9.0]),
        lambda v: pate.gaussian_max_local_sensitivity(v, noise=15.0, order=9.0),
        lambda v: pate.threshold_local_sensitivity(v, threshold=60, noise=15.0, order=9.0),
        lambda v: pate.laplace_max_sensitivity(v, noise=10.0, order=9.0),
    ):
        np.testing.assert_array_equal(function(votes), function(shuffled))
        assert function(votes).max() > 0


def test_the_conditions_are_checked_where_the_published_check_fails():
    """Order 25 with 10 classes: the walk is proven at noise 30, not at noise 20 (C6)."""
    assert sensitivity.profile_of(30.0, 25.0, 10).steepest.size == 0
    assert sensitivity.profile_of(20.0, 25.0, 10).steepest.size > 0
    assert sensitivity.profile_of(20.0, 25.0, 10).rises


# ---- strong consensus, and nothing is free ----


def test_a_unanimous_vote_of_thousands_is_finite_and_not_free():
    votes = [[5000, 0], [0, 5000]]
    cheap = pate.gaussian_max_rdp(votes, noise=40.0, orders=[2.0, 50.0, 900.0])
    assert np.all(np.isfinite(cheap))
    assert np.all(cheap > 0)
    assert np.all(cheap[:, 0] < 1e-200)
    test = pate.threshold_rdp(votes, threshold=10, noise=40.0, orders=[2.0, 50.0])
    assert np.all((test > 0) & np.isfinite(test))
    assert np.all(np.isfinite(pate.gaussian_max_local_sensitivity(votes, noise=40.0, order=20.0)))
    assert np.all(pate.gaussian_max_smooth_sensitivity(votes, noise=40.0, order=20.0, beta=0.01) > 0)
    assert np.all(pate.laplace_max_rdp(votes, noise=1.0, orders=[2.0]) > 0)


def test_small_bills_keep_their_digits():
    """Around 1e-30, where 1 + x is 1: against 60 digits."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        sigma, order, gap = mpmath.mpf(10), mpmath.mpf(3), 250
        q = mpmath.erfc(mpmath.mpf(gap) / (2 * sigma)) / 2
        mu2 = sigma * mpmath.sqrt(-mpmath.log(q))
        e1, e2 = (mu2 + 1) / sigma**2, mu2 / sigma**2
        a = (1 - q) / (1 - (q * mpmath.exp(e2)) ** (1 - 1 / mu2))
        b = mpmath.exp(e1) / q ** (1 / mu2)
        exact = mpmath.log((1 - q) * a ** (order - 1) + q * b ** (order - 1)) / (order - 1)
    found = pate.gaussian_max_rdp([[250, 0]], noise=10.0, orders=3.0)[0, 0]
    assert float(exact) < 1e-30
    assert found == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize("sigma", [0.7, 4.0, 25.0])
def test_the_bound_covers_the_true_divergence_of_the_answer(sigma):
    """Two classes: the answer is a coin, and its divergence from every neighbour's coin is known exactly."""
    for lead in range(30):
        row, other = [30 + lead, 30 - lead], [29 + lead, 31 - lead]
        here, there = (stats.norm.logsf([-gap, gap], scale=math.sqrt(2) * sigma) for gap in (2 * lead, 2 * lead - 2))
        for order in (1.5, 4.0, 16.0):
            true = max(_coins(here, there, order), _coins(there, here, order))
            claims = pate.gaussian_max_rdp([row, other], noise=sigma, orders=order)[:, 0]
            assert true <= max(claims) * (1 + 1e-9) + 1e-14


def _coins(here, there, order):
    return np.logaddexp(*(order * here + (1 - order) * there)) / (order - 1)


# ---- Laplace ----


def test_the_laplace_bill_uses_the_right_condition():
    """At 2g >= 1 the lecture's `q < 0.5` gives numbers below the truth, even negative."""
    scale, order = 1.0, 3.0
    row = np.array([[11, 10]])
    q = math.exp(laplace_max.log_wrong(gaussian_max.counts(row), scale)[0])
    assert 1 / (1 + math.exp(2 / scale)) < q < 0.5
    assert pate.laplace_max_rdp(row, noise=scale, orders=order)[0, 0] == pytest.approx(min(2 / scale, 2 * order))


def test_the_laplace_bill_is_the_least_of_the_three_published_bounds():
    votes, gamma = draw(50, 4, 30, seed=8), 0.1
    for order in (2.0, 9.0):
        moment = order - 1
        slow = []
        for row in votes:
            rest = sorted(row, reverse=True)
            q = sum((2 + gamma * (rest[0] - o)) / (4 * math.exp(gamma * (rest[0] - o))) for o in rest[1:])
            bounds = [2 * gamma**2 * moment * order, 2 * gamma * moment]
            if q < math.expm1(2 * gamma) / math.expm1(4 * gamma):
                a = (1 - q) / (1 - math.exp(2 * gamma) * q)
                bounds.append(math.log((1 - q) * a**moment + q * math.exp(2 * gamma * moment)))
            slow.append(min(bounds) / moment)
        found = pate.laplace_max_rdp(votes, noise=1 / gamma, orders=order)[:, 0]
        np.testing.assert_allclose(found, slow, rtol=1e-10)
    assert len(set(np.round(found, 12))) > 3


@pytest.mark.parametrize("steps", [1, 4])
def test_the_slack_covers_noise_that_is_rounded_to_a_grid(steps):
    """Rounded noise ties more often than real noise: the odds of a wrong answer, summed out, stay below the claim."""
    for name, cumulative in (("laplace", stats.laplace(scale=3.0).cdf), ("gaussian", stats.norm(scale=3.0).cdf)):
        grid = np.arange(-60 * steps, 60 * steps + 1)
        mass = cumulative((grid + 0.5) / steps) - cumulative((grid - 0.5) / steps)
        difference = np.convolve(mass, mass[::-1])
        for gap in (2, 4, 15):
            brute = difference[np.arange(-120 * steps, 120 * steps + 1) >= gap * steps].sum()
            row = gaussian_max.counts([[30 + gap, 30]])
            log_wrong = laplace_max.log_wrong if name == "laplace" else gaussian_max.log_wrong
            assert brute <= math.exp(log_wrong(row, 3.0, 1 / steps)[0]) * (1 + 1e-9)
            assert brute > math.exp(log_wrong(row, 3.0, 0.0)[0])


# ---- releasing the bill ----


@pytest.mark.parametrize(("order", "share", "noise"), [(3.0, 0.5, 2.0), (20.0, 0.9, 10.0), (20.0, 0.1, 5.0)])
def test_the_release_costs_what_the_two_gaussians_differ_by(order, share, noise):
    beta = share / (2 * order)
    claimed = release.release_curve(order, beta=beta, noise=noise)
    worst = 0.0
    for ratio in np.exp(np.linspace(-beta, beta, 9)):
        gap = min(1.0, ratio)
        for here, there in [((0.0, noise), (gap, noise * ratio)), ((gap, noise * ratio), (0.0, noise))]:
            worst = max(worst, _gaussians(here, there, order))
    assert worst <= claimed * (1 + 1e-6)
    assert worst >= claimed * 0.8


def _gaussians(here, there, order):
    variance = order * there[1] ** 2 + (1 - order) * here[1] ** 2
    spread = here[1] * there[1] / math.sqrt(variance)
    centre = (order * here[0] * there[1] ** 2 + (1 - order) * there[0] * here[1] ** 2) / variance

    def integrand(x):
        return math.exp(order * stats.norm.logpdf(x, *here) + (1 - order) * stats.norm.logpdf(x, *there))

    total, _ = integrate.quad(integrand, centre - 12 * spread, centre + 12 * spread, limit=400, points=[centre])
    return math.log(total) / (order - 1)


def test_the_published_release_cost_is_below_the_truth_near_its_limit():
    order, noise = 20.0, 10.0
    beta = 0.49 / order
    published = order * math.exp(2 * beta) / noise**2
    published += (-0.5 * math.log(1 - 2 * order * beta) + beta * order) / (order - 1)
    true = _gaussians((0.0, noise), (math.exp(-beta), noise * math.exp(-beta)), order)
    assert published < true <= release.release_curve(order, beta=beta, noise=noise) * (1 + 1e-6)


def test_a_shifted_release_is_rarely_too_low():
    beta, noise, failure = 0.01, 4.0, 0.01
    _, moved, spread = release.cost_of_shifted(20.0, beta=beta, noise=noise, failure=failure)
    assert stats.norm.cdf(-moved / spread) == pytest.approx(failure, rel=1e-9)
    assert release.widened(moved, beta=beta) > 1


def test_the_smooth_sensitivity_of_a_sum_adds_before_it_discounts():
    rows = np.array([[0.0, 1.0, 1.0], [0.5, 0.5, 4.0]])
    assert release.smooth(rows, beta=0.5) == pytest.approx(max(0.5, 1.5 * math.exp(-0.5), 5 * math.exp(-1.0)))


# ---- refusals ----


@pytest.mark.parametrize(
    ("votes", "why"),
    [([[5], [5]], "at least 2 classes"), ([[1.5, 2]], "not whole"), ([[-1, 3]], ">= 0"), ([[[1, 2]]], "shape")],
)
def test_votes_that_are_no_votes_are_refused(votes, why):
    with pytest.raises(InvalidArgument, match=why):
        pate.gaussian_max_rdp(votes, noise=1.0, orders=2.0)


def test_rows_must_sum_to_the_teachers():
    with pytest.raises(InvalidArgument, match=r"3 \.\. 4"):
        pate.gaussian_max_local_sensitivity([[2, 1], [3, 1]], noise=1.0, order=2.0)


def test_orders_must_exceed_one():
    with pytest.raises(InvalidArgument, match="> 1"):
        pate.gaussian_max_rdp([[2, 1]], noise=1.0, orders=[1.0])
