"""Attacks on federated learning by Flower: exceptions that carry rows to the server, answers that stop it."""

import io

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `federated` is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from terrine.errors import InvalidArgument
from terrine.federated import flower
from tests.federated.test_flower import Grid, a_plan, in_a_task, started

__all__ = ["in_a_task"]  # a fixture


class Watched(Grid):
    """Keeps what clients answer."""

    def __init__(self, plan):
        super().__init__(plan)
        self.replies = []

    def _delivered(self, message, node):
        self.replies.append(super()._delivered(message, node))
        return self.replies[-1]


@pytest.mark.parametrize("kind", [ValueError, InvalidArgument])
def test_what_an_app_raises_stays_with_the_client(kind):
    plan = a_plan()
    mod, grid = flower.private_mod(plan), Watched(plan)

    def failing(message, context):
        raise kind("a row: Ann Smith, 123456")

    grid.app = lambda message, context: mod(message, context, failing)
    assert not started(flower.SecureSumStrategy(plan), grid).arrays
    reasons = {reply.error.reason for reply in grid.replies if reply.has_error()}
    assert reasons == {"terrine: the app failed: nothing is sent"}


@pytest.mark.parametrize("told", ["{{", "null", "[]", '{"round": {}}', "[" * 10_000])
def test_messages_of_no_protocol_are_refused(told):
    plan = a_plan()
    grid = Grid(plan)
    content = RecordDict({"terrine": ConfigRecord({"stage": "advertise", "told": told})})
    reply = grid._delivered(Message(content=content, message_type="train", dst_node_id=11), 11)
    assert reply.has_error()
    assert reply.error.reason.startswith("terrine: a message that cannot be answered")


@pytest.mark.parametrize("stage", ["advertise", "share", "agree", "unmask"])
def test_nested_answers_do_not_stop_the_server(stage):
    class Nested(Grid):
        def _delivered(self, message, node):
            at = message.content["terrine"]["stage"]
            reply = super()._delivered(message, node)
            deep = RecordDict({"terrine": ConfigRecord({"said": "[" * 100_000})})
            return Message(deep, reply_to=message) if node == 11 and at == stage else reply

    plan = a_plan()
    strategy = flower.SecureSumStrategy(plan)
    started(strategy, Nested(plan))
    assert strategy.closed == 0


def archive():
    buffer = io.BytesIO()
    np.savez(buffer, np.zeros(1))
    return buffer.getvalue()


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", archive()], ids=["none", "cut", "an archive"])
def test_arrays_that_cannot_be_read_do_not_stop_the_server(data):
    class Broken(Grid):
        def _delivered(self, message, node):
            at = message.content["terrine"]["stage"]
            reply = super()._delivered(message, node)
            if node == 11 and at == "mask":
                array = Array(dtype="uint32", shape=(16,), stype="numpy.ndarray", data=data)
                reply.content["masked"] = ArrayRecord({"masked": array})
            return reply

    plan = a_plan()
    strategy = flower.SecureSumStrategy(plan)
    started(strategy, Broken(plan))
    assert strategy.closed == 0
