"""`terrine epsilon`, `noise`, `steps` and `compare`: accounting without a line of code."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from terrine import check
from terrine.errors import InvalidArgument, MalformedEvents
from terrine.events import (
    Budget,
    Event,
    Gaussian,
    PoissonSampled,
    Repeated,
    from_json,
    is_reproducible,
    settled_neighbours,
    settled_unit,
)
from terrine.rounding import down, up

Noise = Annotated[float | None, typer.Option(help="Noise multiplier: standard deviation over the clipping bound.")]
Rate = Annotated[float, typer.Option(help="Sampling rate: the probability that a unit is in a lot.")]
Steps = Annotated[str, typer.Option(help="Number of steps.")]
Delta = Annotated[float, typer.Option(help="The delta of (epsilon, delta)-DP; below 1 / number of people.")]
Epsilon = Annotated[float, typer.Option(help="The epsilon to stay within, for one unit (example, person or client).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


_WIDE = 0.01
"""How far apart two bounds may lie before a reader is told so."""


class AccountingMethod(enum.StrEnum):
    TIGHT = "tight"
    RENYI = "renyi"
    MOMENTS = "moments"
    ADVANCED = "advanced"
    BASIC = "basic"


def _by(method: AccountingMethod, event: Event, delta: float) -> float:
    """The epsilon that one accountant finds."""
    from terrine import accounting
    from terrine.accounting import composition, moments, renyi

    match method:
        case AccountingMethod.TIGHT:
            return accounting.epsilon(event, delta=delta)
        case AccountingMethod.RENYI:
            return renyi.epsilon(event, delta=delta)
        case AccountingMethod.MOMENTS:
            return moments.epsilon(event, delta=delta)
        case AccountingMethod.ADVANCED:
            return composition.advanced(event, delta=delta)
        case AccountingMethod.BASIC:
            return composition.basic(event, delta=delta)


def epsilon(
    delta: Delta,
    noise: Noise = None,
    rate: Rate = 1.0,
    steps: Steps = "1",
    events: Annotated[
        Path | None, typer.Option(help="A JSON file of events, instead of noise, rate and steps.")
    ] = None,
    method: Annotated[AccountingMethod, typer.Option(help="Which accountant.")] = AccountingMethod.TIGHT,
    as_json: AsJson = False,
) -> None:
    """The epsilon of a DP-SGD run, or of any recorded events."""
    from terrine import accounting as certified

    event = _event(noise, rate, steps, events)
    delta = check.open_unit("delta", delta)
    if method is AccountingMethod.TIGHT:
        found = certified.bounds(event, delta=delta)
        lower, upper = found.lower, found.upper
    else:
        lower, upper = certified.bounds(event, delta=delta).lower, _by(method, event, delta)
    record = {
        "epsilon": upper,
        "lower": lower,
        "upper": upper,
        "delta": delta,
        "method": method.value,
        "neighbours": settled_neighbours(event).value,
        "unit": settled_unit(event).value,
        "seeded": is_reproducible(event),
    }
    if as_json:
        _print_json(record)
        return
    _say(
        f"[bold]epsilon = {up(upper)}[/bold] at delta = {delta:g}   "
        f"({method.value}; the truth is at least {down(lower)})"
    )
    if upper > lower * (1 + _WIDE):
        _say(f"[yellow]What is proven is a range, {down(lower)} to {up(upper)}: rely on the upper end.[/yellow]")
    curve = certified.claimed_profile(event, delta=delta)
    _say(curve.in_words(unit=settled_unit(event).value, epsilon=upper, delta=delta))
    if record["seeded"]:
        _say("[red]The noise came from a seed: this holds only against those who do not know it.[/red]")


def noise(epsilon: Epsilon, delta: Delta, rate: Rate = 1.0, steps: Steps = "1", as_json: AsJson = False) -> None:
    """The smallest noise that keeps a budget."""
    from terrine import accounting as certified

    count, rate = _whole_steps(steps), check.rate("rate", rate)
    budget = _budget(epsilon, delta)
    found = certified.calibrate(lambda value: _dpsgd(value, rate, count), budget, over=certified.NOISE)
    spent = certified.epsilon(_dpsgd(found, rate, count), delta=budget.delta)
    record = {"noise": found, "epsilon": spent, "delta": budget.delta, "rate": rate, "steps": count}
    _print(
        record,
        as_json,
        f"[bold]noise = {up(found, 7)}[/bold] spends epsilon = {up(spent)} of {budget.epsilon:g} at delta = {delta:g}",
    )


def steps(
    epsilon: Epsilon,
    delta: Delta,
    noise: Annotated[float, typer.Option(help="Noise multiplier: standard deviation over the clipping bound.")],
    rate: Rate = 1.0,
    as_json: AsJson = False,
) -> None:
    """The most steps that a budget allows."""
    from terrine import accounting as certified

    rate, noise = check.rate("rate", rate), check.positive("noise", noise)
    budget = _budget(epsilon, delta)
    found = int(certified.calibrate(lambda value: _dpsgd(noise, rate, int(value)), budget, over=certified.STEPS))
    spent = certified.epsilon(_dpsgd(noise, rate, found), delta=budget.delta)
    record = {"steps": found, "epsilon": spent, "delta": budget.delta, "rate": rate, "noise": noise}
    _print(
        record,
        as_json,
        f"[bold]steps = {found:,}[/bold] spend epsilon = {up(spent)} of {budget.epsilon:g} at delta = {delta:g}",
    )


def compare(
    delta: Delta,
    noise: Annotated[float, typer.Option(help="Noise multiplier: standard deviation over the clipping bound.")],
    rate: Rate,
    epochs: Annotated[float, typer.Option(help="How long to train: one epoch is 1/rate steps.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw the curves into this picture.")] = None,
    as_json: AsJson = False,
) -> None:
    """Every accountant's epsilon as training goes on: Figure 2 of Abadi et al., with the certified curve in it."""
    from terrine.accounting import composition
    from terrine.cli.progress import track

    rate, noise = check.rate("rate", rate), check.positive("noise", noise)
    epochs, delta = check.positive("epochs", epochs), check.open_unit("delta", delta)
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise check.refuse("plot", str(plot), "a .png, .svg or .pdf")
    points = sorted({max(1, round(epochs * share / 40 / rate)) for share in range(1, 41)})
    curves: dict[str, list[float]] = {name: [] for name in (*AccountingMethod, "textbook (not proven)")}
    for count in track(points, "comparing accountants", quiet=as_json):
        event = _dpsgd(noise, rate, count)
        for method in AccountingMethod:
            curves[method].append(_by(method, event, delta))
        textbook = composition.unproven_textbook_strong_dpsgd(noise=noise, rate=rate, steps=count, delta=delta)
        curves["textbook (not proven)"].append(textbook)
    at = [count * rate for count in points]
    if plot is not None:
        from terrine.report.curves import draw_accountants

        draw_accountants(at, curves, title=f"noise {noise:g}, rate {rate:g}, delta {delta:g}", to=plot)
    if as_json:
        _print_json({"epochs": at, "steps": points, "delta": delta, "epsilon": {str(k): v for k, v in curves.items()}})
        return
    _print_table(at, curves)
    if plot is not None:
        typer.echo(f"drawn in {plot}")


def _event(noise: float | None, rate: float, steps: str, events: Path | None) -> Event:
    if (noise is None) == (events is None):
        raise InvalidArgument("want either --noise (with --rate and --steps) or --events, one of the two")
    if events is not None:
        try:
            return from_json(events.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise MalformedEvents(f"{events}: cannot be read: {error}") from None
        except MalformedEvents as error:
            raise MalformedEvents(f"{events}: {error}") from None
    return _dpsgd(check.positive("noise", noise), check.rate("rate", rate), _whole_steps(steps))


def _dpsgd(noise: float, rate: float, steps: int) -> Event:
    return Repeated(PoissonSampled(Gaussian(noise=noise), rate=rate), times=steps)


def _whole_steps(text: str) -> int:
    try:
        return check.whole("steps", int(text))
    except ValueError:
        try:
            return check.whole("steps", float(text))
        except ValueError:
            raise check.refuse("steps", text, "a whole number >= 1") from None


def _budget(epsilon: float, delta: float) -> Budget:
    return Budget(check.positive("epsilon", epsilon), check.open_unit("delta", delta))


def _print(record: dict[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        _print_json(record)
    else:
        _say(text)


def _print_table(at: list[float], curves: dict[str, list[float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("epochs", *(str(name) for name in curves), title="epsilon by accountant")
    for i in range(len(at) - 1, -1, -max(1, len(at) // 10)):
        table.add_row(f"{at[i]:g}", *(up(values[i]) for values in curves.values()))
    Console().print(table)


def _print_json(record: dict[str, Any]) -> None:
    typer.echo(json.dumps(record, allow_nan=False))


def _say(text: str) -> None:
    from rich.console import Console

    Console(soft_wrap=True, highlight=False).print(text)
