"""Slow, obvious evaluations of delta in 40-digit arithmetic, which the fast accountant must enclose.

The Poisson-subsampled Gaussian, add/remove, the unit being in P: P = (1-q) N(0, s^2) + q N(1, s^2), Q = N(0, s^2).
"""

import mpmath as mp


def one_step(epsilon, rate, noise):
    """delta of one step at any real epsilon, in closed form."""
    epsilon, rate, noise = mp.mpf(epsilon), mp.mpf(rate), mp.mpf(noise)
    ratio = (mp.exp(epsilon) - 1 + rate) / rate
    if ratio <= 0:
        return 1 - mp.exp(epsilon)
    x = noise**2 * mp.log(ratio) + mp.mpf(1) / 2
    above_q, above_1 = _tail(x / noise), _tail((x - 1) / noise)
    return (1 - rate) * above_q + rate * above_1 - mp.exp(epsilon) * above_q


def two_steps(epsilon, rate, noise):
    """delta of two steps: the second step's delta at what the first step's loss left over, averaged."""
    with mp.workdps(40):
        rate, noise = mp.mpf(rate), mp.mpf(noise)

        def integrand(x):
            density = (1 - rate) * mp.npdf(x, 0, noise) + rate * mp.npdf(x, 1, noise)
            loss = mp.log(1 - rate + rate * mp.exp((2 * x - 1) / (2 * noise**2)))
            return density * one_step(mp.mpf(epsilon) - loss, rate, noise)

        points = [noise * k for k in range(-14, 15, 2)] + [1 + noise * k for k in range(-14, 15, 2)]
        return mp.quad(integrand, sorted(points))


def many_steps(epsilon, rate, noise, steps, tilt, backward=False):
    """delta of many steps by the Bromwich integral on Re z = tilt, both integrals by the trapezoid rule at 40 digits.

    Right where terms die out within a few hundred frequencies and `tilt` is near the saddle point, so that neither
    neighbour of the periodic sum matters.
    """
    with mp.workdps(40):
        rate, noise, epsilon, tilt = (mp.mpf(value) for value in (rate, noise, epsilon, tilt))
        width = min(noise, noise**2) / 5
        reach = 16 * noise + tilt + 2
        count = int(reach / width) + 1
        nodes = []
        for k in range(-int(16 * noise / width), count):
            x = k * width
            weight = mp.npdf(x, 0, noise) * width
            nodes.append((weight, mp.log(1 - rate + rate * mp.exp((2 * x - 1) / (2 * noise**2)))))

        def log_moment(z):
            power = -z if backward else z + 1
            return mp.log(mp.fsum(weight * mp.exp(power * loss) for weight, loss in nodes))

        step = 2 * mp.pi * tilt / mp.mpf(90)
        total, k = mp.mpf(0), 0
        while True:
            z = mp.mpc(tilt, k * step)
            term = mp.exp(steps * log_moment(z) - epsilon * z) / (z * (z + 1))
            total += term.real / (2 if k == 0 else 1)
            if k > 3 and abs(term) < mp.mpf(10) ** -12 * abs(total):
                return total * step / mp.pi
            k += 1


def _tail(x):
    return mp.erfc(x / mp.sqrt(2)) / 2
