"""An ordinary server of Flower's with a private strategy."""

import json
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from private_app.task import accuracy, model, plan_of
from terrine.federated.flower import SecureSumStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds of the plan."""
    plan = plan_of(context.run_config)
    strategy = SecureSumStrategy(plan)
    result = strategy.start(grid, initial_arrays=ArrayRecord(model().state_dict()), num_rounds=plan.rounds)
    found = {"epsilon": plan.epsilon, "closed": strategy.closed, "rounds": plan.rounds}
    if result.arrays:
        found["accuracy"] = accuracy(result.arrays.to_torch_state_dict())
    print(f"terrine: {json.dumps(found)}")
    if context.run_config["out"]:
        Path(str(context.run_config["out"])).write_text(json.dumps(found))
