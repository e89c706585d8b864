"""`terrine federated simulate`: many clients in one process, by the same plan, sums and bill as over a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terrine.cli.charging import AccountName, By, LedgerUrl, Purpose, Weak, charging
from terrine.cli.progress import counted
from terrine.cli.train import AsJson, summarise, write_report

app = typer.Typer(help="Federated learning with a certified bill.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Federated learning with a certified bill."""


@app.command()
def simulate(
    data: Annotated[str, typer.Option(help="A named set: digits, mnist, fashion-mnist, cifar-10.")],
    clients: Annotated[int, typer.Option(help="How many clients the rows are dealt to.")],
    rounds: Annotated[int, typer.Option(help="How many rounds.")],
    epsilon: Annotated[float, typer.Option(help="The most that may be learned about one client.")],
    out: Annotated[Path, typer.Option(help="A new folder for the run.")],
    per_round: Annotated[int | None, typer.Option(help="Expected clients in a round; else a fifth of them.")] = None,
    delta: Annotated[float | None, typer.Option(help="Default: a power of ten below 1/clients.")] = None,
    clip: Annotated[float, typer.Option(help="The longest update of a client, in l2.")] = 1.0,
    adaptive_clip: Annotated[bool, typer.Option("--adaptive-clip", help="Let it follow the updates' median.")] = False,
    sums: Annotated[str, typer.Option(help="skellam, discrete-gaussian or central.")] = "skellam",
    bits: Annotated[int, typer.Option(help="Bits of an entry of a secure sum.")] = 20,
    survivors: Annotated[int | None, typer.Option(help="The fewest that open a round; else 80% of them.")] = None,
    colluding: Annotated[int, typer.Option(help="Survivors whose noise others may know.")] = 0,
    dropping: Annotated[float, typer.Option(help="The chance that a client drops out of a round.")] = 0.0,
    model: Annotated[str | None, typer.Option(help="linear, mlp, cnn.")] = None,
    local_epochs: Annotated[int, typer.Option(help="Passes of a client over its rows.")] = 3,
    learning_rate: Annotated[float | None, typer.Option(help="Of the local steps.")] = None,
    server: Annotated[str, typer.Option(help="fedavg or fedadam.")] = "fedavg",
    server_learning_rate: Annotated[float | None, typer.Option(help="Learning rate of the server.")] = None,
    classes_per_client: Annotated[int | None, typer.Option(help="Deal rows by class; else at random.")] = None,
    audit: Annotated[int | None, typer.Option(help="Clients left to coins for the audit; 0: none.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Without masks: the same sums, faster.")] = False,
    weak_guarantee: Weak = False,
    ledger: LedgerUrl = None,
    account: AccountName = None,
    by: By = None,
    purpose: Purpose = None,
    seed: Annotated[int | None, typer.Option(help="For tests only: seeded noise, NOT private.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train on clients' data at a certified epsilon; the folder holds model, claim, report and audit."""
    from terrine.federated import simulation
    from terrine.pipeline import Folder

    settings = simulation.SimulationSettings(
        data=data, clients=clients, rounds=rounds, epsilon=epsilon, per_round=per_round, delta=delta, clip=clip,
        adaptive_clip=adaptive_clip, sums=sums, bits=bits, survivors=survivors, colluding=colluding, dropping=dropping,
        model=model, local_epochs=local_epochs, learning_rate=learning_rate, server=server,
        server_learning_rate=server_learning_rate,
        classes_per_client=classes_per_client, audit=audit, quick=quick, weak_guarantee=weak_guarantee,
        seed=seed,
    )  # fmt: skip
    finished = Folder(out).done
    with (
        charging(ledger, account, by=by, purpose=purpose, usual="terrine federated simulate") as charged,
        counted("rounds", quiet=as_json) as shown,
    ):
        folder = simulation.simulate(
            settings, out, **charged.told, head=charged.head(quiet=as_json),
            after=lambda done: None if shown is None else shown(done, rounds),
        )  # fmt: skip
    if not finished or not folder.has("report.html"):
        write_report(folder)
    summarise(folder, finished, as_json)
    if not as_json:
        _tell_dropouts(folder.read("privacy.json"))


def _tell_dropouts(privacy: dict[str, object]) -> None:
    from terrine.rounding import down, up

    found = privacy["dropouts"]
    assert isinstance(found, dict)
    if len(found) > 1:
        typer.echo("epsilon by how many survive in every round (lower and upper bound):")
        for survivors, (lower, upper) in found.items():
            typer.echo(f"  {survivors:>4}  {down(lower)}  {up(upper)}")
    insiders = privacy["epsilon_for_insiders"]
    assert isinstance(insiders, float)
    typer.echo(f"for those who know who took part in which round, such as the server: epsilon {up(insiders)}")
