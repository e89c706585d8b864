"""An ordinary client of Flower's; what makes it private is its mod."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from private_app.task import model, plan_of, rows
from terrine.federated.flower import private_mod


def private(message: Message, context: Context, call_next) -> Message:
    """The plan comes from the run's configuration."""
    return private_mod(plan_of(context.run_config))(message, context, call_next)


app = ClientApp(mods=[private])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Three passes over the client's rows."""
    import torch
    from torch import nn

    trained = model()
    trained.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = rows(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
    optimizer = torch.optim.SGD(trained.parameters(), lr=4.0)
    for _ in range(3):
        for part in torch.split(torch.randperm(len(y)), 50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(x[part]), y[part]).backward()
            optimizer.step()
    metrics = MetricRecord({"num-examples": len(y), "train-loss": 0.0})  # stays here: the mod sends none of it
    content = RecordDict({"arrays": ArrayRecord(trained.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
