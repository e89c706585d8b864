"""One example for every command, shown at the end of its `--help`; the tests parse each of them."""

from __future__ import annotations

import typer

EXAMPLES = {
    "demo": "terrine demo --out demo",
    "schema": "terrine schema adult.csv --label income",
    "train": "terrine train adult.csv --label income --epsilon 2 --out run",
    "predict": "terrine predict run new.csv",
    "report": "terrine report run",
    "verify": "terrine verify run --ledger sqlite:///budget.db",
    "query": (
        'terrine query visits.parquet --person patient_id --epsilon 0.5 --sql "SELECT COUNT(*) AS n FROM visits"'
    ),
    "keys new": "terrine keys new officer",
    "ledger create": "terrine ledger create budget.db --account patients --epsilon 2 --delta 1e-6 --unit person",
    "ledger show": "terrine ledger show budget.db",
    "ledger charge": "terrine ledger charge budget.db --account patients --noise 20 --purpose 'mean age' --by ann",
    "ledger head": "terrine ledger head budget.db",
    "ledger verify": "terrine ledger verify budget.db",
    "ledger export": "terrine ledger export budget.db",
    "ledger import": "terrine ledger import other.db statement.json",
    "ledger key": "terrine ledger key",
    "pate split": "terrine pate split --run run --data digits --teachers 50",
    "pate train": "terrine pate train --run run --data digits",
    "pate vote": "terrine pate vote --run run --data digits --public unlabelled.npz",
    "pate label": "terrine pate label --run run --aggregator gaussian --noise 40 --queries 500",
    "pate bill": "terrine pate bill --run run --delta 1e-5",
    "pate student": "terrine pate student --run run --public unlabelled.npz",
    "pate run": "terrine pate run pate.toml",
    "audit scores": "terrine audit scores members.npy non_members.npy --claim-epsilon 2 --delta 1e-5",
    "audit run": "terrine audit run run",
    "prompt tune": "terrine prompt tune --model smollm2 --data reviews.csv --epsilon 3 --out prompt.safetensors",
    "prompt label": (
        "terrine prompt label --model smollm2 --private reviews.csv --public texts.txt --epsilon 1 "
        "--words ' bad, good' --out labelled.jsonl"
    ),
    "prompt eval": "terrine prompt eval --model smollm2 --data test.csv --prompt prompt.safetensors",
    "federated simulate": ("terrine federated simulate --data digits --clients 100 --rounds 20 --epsilon 8 --out run"),
    "sums": "terrine sums",
    "serve": "terrine serve gateway.toml",
    "remote datasets": "terrine remote datasets --url http://127.0.0.1:8000",
    "remote price": "terrine remote price --sql 'SELECT COUNT(*) AS n FROM visits' --epsilon 0.5",
    "remote ask": "terrine remote ask --sql 'SELECT COUNT(*) AS n FROM visits' --epsilon 0.5",
    "remote collect": "terrine remote collect REQUEST",
    "remote requests": "terrine remote requests",
    "remote show": "terrine remote show REQUEST",
    "remote approve": "terrine remote approve REQUEST --reason 'agreed with the board'",
    "remote deny": "terrine remote deny REQUEST --reason 'ask for the mean instead'",
    "remote spending": "terrine remote spending --export visits.jsonl",
    "remote train": "terrine remote train --label readmitted --epsilon 2 --out run",
    "remote download": "terrine remote download REQUEST --out run",
    "remote cancel": "terrine remote cancel REQUEST",
    "remote resume": "terrine remote resume REQUEST",
    "epsilon": "terrine epsilon --noise 4 --rate 0.01 --steps 10000 --delta 1e-5",
    "noise": "terrine noise --epsilon 2 --delta 1e-5 --rate 0.01 --steps 10000",
    "steps": "terrine steps --epsilon 2 --delta 1e-5 --noise 4 --rate 0.01",
    "compare": "terrine compare --noise 4 --rate 0.01 --delta 1e-5 --epochs 400 --plot figure.png",
}


def show_examples(app: typer.Typer, path: tuple[str, ...] = ()) -> None:
    """Put every command's example at the end of its help."""
    for command in app.registered_commands:
        called = command.name or (command.callback.__name__ if command.callback else "")
        example = EXAMPLES.get(" ".join((*path, called)))
        command.epilog = command.epilog or (example and f"Example: {example}")
    for group in app.registered_groups:
        inner = group.typer_instance
        name = group.name or (inner.info.name if inner is not None else None)
        if inner is not None and isinstance(name, str):
            show_examples(inner, (*path, name))
