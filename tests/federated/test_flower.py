"""Terrine on Flower: the mod and the strategy over a grid in this process; and, slowly, Flower's own runtimes."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `federated` is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from terrine import federated
from terrine.errors import BudgetExceeded, InvalidArgument, OutOfOrder
from terrine.federated import flower
from tests.federated.runtime import Runtime, free_ports

NODES = 6
ALONE = "--disable-runtime-dependency-installation"


def a_plan(**changes):
    asked = {"clients": NODES, "per_round": NODES, "rounds": 2, "clip": 1.0, "noise": 0.06, "delta": 1e-2}
    return federated.Plan(**asked | {"sums": federated.Skellam(survivors=4)} | changes)


@pytest.fixture(autouse=True)
def in_a_task(monkeypatch):
    """Messages may be made only inside of a task of Flower's; here there is none."""
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    monkeypatch.setattr(identity, "_task_id", 1)
    monkeypatch.setattr(identity, "_run_id", 1)
    monkeypatch.setattr(identity, "_node_id", 1)


class Grid:
    """Nodes that answer at once; `silent` ones fail from a stage on."""

    def __init__(self, plan, silent=(), nodes=NODES):
        self.silent, self.asked = set(silent), []
        self.nodes = {11 * (place + 1): self._context(11 * (place + 1)) for place in range(nodes)}
        self.app = ClientApp(mods=[flower.private_mod(plan)])

        @self.app.train()
        def train(message, context):
            arrays = {name: Array(one.numpy() + 0.1) for name, one in message.content["arrays"].items()}
            return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

    def _context(self, node):
        return Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})

    def get_node_ids(self):
        return list(self.nodes)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node, stage = message.metadata.dst_node_id, message.content["terrine"]["stage"]
            self.asked.append(stage)
            if not (node in self.silent and stage == "mask"):
                replies.append(self._delivered(message, node))
        return replies

    def _delivered(self, message, node):
        return self.app(message, self.nodes[node])


def started(strategy, grid, rounds=2):
    arrays = ArrayRecord({"w": Array(np.zeros((3, 2))), "b": Array(np.zeros(5, dtype=np.float32))})
    return strategy.start(grid, initial_arrays=arrays, num_rounds=rounds)


@pytest.mark.parametrize("silent", [(), (11,), (22, 66)])
def test_an_app_becomes_private_by_a_mod_and_a_strategy(silent):
    plan = a_plan()
    strategy = flower.SecureSumStrategy(plan)
    found = started(strategy, Grid(plan, silent)).arrays
    wanted = 2 * 0.1 * (NODES - len(silent)) / NODES  # divided by those expected, whoever dropped out
    assert found["w"].numpy().shape == (3, 2)
    assert found["b"].numpy().dtype == np.float32
    assert abs(np.concatenate([one.numpy().ravel() for one in found.values()]).mean() - wanted) < 0.05
    assert strategy.closed == 0


def test_too_few_survivors_change_nothing():
    plan = a_plan()
    strategy, grid = flower.SecureSumStrategy(plan), Grid(plan, silent=(11, 22, 33))
    assert not started(strategy, grid).arrays
    assert strategy.closed == 2
    assert "unmask" not in grid.asked


def test_rounds_are_charged_before_anyone_is_asked():
    class Empty:
        def charge(self, event, *, purpose, by):
            raise BudgetExceeded("nothing is left")

    plan = a_plan()
    grid = Grid(plan)
    with pytest.raises(BudgetExceeded):
        started(flower.SecureSumStrategy(plan, account=Empty()), grid)
    assert grid.asked == []


def test_every_round_is_charged():
    charged = []

    class Account:
        def charge(self, event, *, purpose, by):
            charged.append(event)

    plan = a_plan()
    started(flower.SecureSumStrategy(plan, account=Account()), Grid(plan))
    assert charged == [plan.round_event] * 2


def test_more_rounds_than_planned_are_refused():
    plan = a_plan()
    with pytest.raises(OutOfOrder, match="2 rounds"):
        started(flower.SecureSumStrategy(plan), Grid(plan), rounds=3)


def test_another_number_of_nodes_is_refused_not_logged():
    plan = a_plan()
    with pytest.raises(InvalidArgument, match="5 nodes"):
        started(flower.SecureSumStrategy(plan, timeout=0.0), Grid(plan, nodes=5))


def test_a_plain_strategy_gets_no_weights_out_of_a_private_client():
    plan = a_plan()
    grid = Grid(plan)
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(3))}), "config": ConfigRecord()})
    reply = grid.app(Message(content, message_type="train", dst_node_id=11), grid.nodes[11])
    assert reply.has_error()
    assert "SecureSumStrategy" in reply.error.reason


def test_a_server_with_another_plan_is_refused_by_the_clients():
    theirs = a_plan(sums=federated.Skellam(survivors=2))
    strategy = flower.SecureSumStrategy(theirs)
    assert not started(strategy, Grid(a_plan())).arrays
    assert strategy.closed == 2


def test_nothing_but_masked_numbers_leaves_a_client():
    plan, seen = a_plan(), []
    grid = Grid(plan)
    deliver = grid._delivered

    def watched(message, node):
        reply = deliver(message, node)
        seen.append(reply.content)
        return reply

    grid._delivered = watched
    started(flower.SecureSumStrategy(plan), grid)
    assert all(not one.metric_records for one in seen)
    assert {name for one in seen for name in one.array_records} == {"masked"}


@pytest.mark.slow
def test_deployed_on_loopback(tmp_path):
    """A SuperLink and three SuperNodes, each message in a process of its own."""
    link, *nodes = free_ports(4)
    with Runtime(tmp_path) as runtime:
        runtime.start(
            "flower-superlink", "--insecure", "--port", str(link), "--disable-runtime-dependency-installation"
        )
        runtime.connect(link)
        for place, port in enumerate(nodes):
            parts = f"partition-id={place} num-partitions=3"
            address = ["--superlink", f"127.0.0.1:{link}", "--port", str(port)]
            runtime.start("flower-supernode", "--insecure", *address, "--node-config", parts)
        found = runtime.run(500, clients=3, per_round=3, survivors=2, rounds=1)
    assert found["closed"] == 0
    assert found["epsilon"] <= 8
    assert "accuracy" in found


@pytest.mark.slow
def test_simulated_by_ray(tmp_path):
    """Flower's simulation: virtual nodes, Ray's processes."""
    pytest.importorskip("ray")
    (link,) = free_ports(1)
    with Runtime(tmp_path) as runtime:
        runtime.start(
            "flower-superlink", "--insecure", "--port", str(link), "--simulation",
            ALONE,
        )  # fmt: skip
        runtime.connect(link, "\n[superlink.here.options]\nnum-supernodes = 4\nbackend.client-resources.num-cpus = 1\n")
        found = runtime.run(500, clients=4, per_round=4, survivors=3, rounds=2)
    assert found["closed"] == 0
    assert "accuracy" in found


# -- clients that lie, and servers that ask for more -----------------------------------------------------------------


class Lying(Grid):
    """Node 11 answers one stage with something else."""

    def __init__(self, plan, stage, said):
        super().__init__(plan)
        self.stage, self.said = stage, said

    def _delivered(self, message, node):
        stage, reply = message.content["terrine"]["stage"], super()._delivered(message, node)
        if node == 11 and stage == self.stage:
            if stage == "mask":
                reply.content["masked"] = ArrayRecord({"masked": Array(self.said)})
            else:
                reply.content["terrine"] = ConfigRecord({"said": self.said})
        return reply


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("advertise", "nonsense"), ("advertise", '{"client": 3}'), ("share", '{"2": "zz"}'), ("share", "[]"),
        ("mask", np.zeros(3)), ("mask", np.array(["a"] * 16)),
    ],
)  # fmt: skip
def test_a_client_that_answers_nonsense_counts_as_gone(stage, said):
    plan = a_plan(rounds=1)
    strategy = flower.SecureSumStrategy(plan)
    found = started(strategy, Lying(plan, stage, said), rounds=1).arrays
    assert strategy.closed == 0
    mean = np.concatenate([one.numpy().ravel() for one in found.values()]).mean()
    assert abs(mean - 0.1 * (NODES - 1) / NODES) < 0.05


def test_a_client_that_says_it_has_many_rows_weighs_no_more():
    plan = a_plan(rounds=1)
    grid = Grid(plan)
    honest = grid.app

    def boasting(message, context):
        reply = honest(message, context)
        reply.content["metrics"] = MetricRecord({"num-examples": 10**9})
        return reply

    grid.app = boasting
    found = started(flower.SecureSumStrategy(plan), grid, rounds=1).arrays
    assert abs(found["w"].numpy().mean() - 0.1) < 0.05


def test_a_server_that_goes_on_after_the_plan_gets_nothing():
    """Two strategies, each with rounds of its own: clients count their turns themselves."""
    plan = a_plan()
    grid = Grid(plan)
    assert started(flower.SecureSumStrategy(plan), grid).arrays
    again = flower.SecureSumStrategy(plan)
    assert not started(again, grid).arrays
    assert again.closed == 2


def test_a_plan_whose_rounds_have_no_price_is_charged_whole():
    charged = []

    class Account:
        def charge(self, event, *, purpose, by):
            charged.append(event)

    plan = a_plan(sampling=federated.MinimumSeparation(1))
    strategy = flower.SecureSumStrategy(plan, account=Account())
    assert started(strategy, Grid(plan)).arrays
    assert charged == [plan.event]
