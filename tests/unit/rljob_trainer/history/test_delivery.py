"""Delivery: what a tracker's server does never reaches the caller, and no record disappears without being counted."""

import logging
import threading
import time

from rljob_api.run.summaries import DeliveryCounts
from rljob_trainer.history.delivery import Delivery, DeliveryLimits, RefusedError, UnsentError
from tests.support.waiting import DEADLINE_SECONDS, wait_for

QUICK = DeliveryLimits(first_retry_seconds=0.001)


class Server:
    """A tracker's server, and the client that `connect` returns."""

    def __init__(self, answer=lambda number: None):
        self.answer, self.received, self.num_connections, self.num_closed = answer, [], 0, 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def connect(self):
        self.num_connections += 1
        return self

    def log(self, number):
        assert self.may_answer.wait(DEADLINE_SECONDS)
        self.answer(number)
        self.received.append(number)

    def close(self):
        self.num_closed += 1


def submit(delivery, *numbers):
    for number in numbers:
        delivery.submit(lambda client, number=number: client.log(number))


def close(delivery, seconds=DEADLINE_SECONDS):
    delivery.close(time.monotonic() + seconds)


def settle(delivery):
    wait_for(lambda: not delivery.counts().waiting, "the end of what waits")
    return delivery.counts()


def test_records_arrive_in_order_and_the_client_is_closed():
    server = Server()
    delivery = Delivery("t", server.connect)
    submit(delivery, *range(100))
    close(delivery)
    assert server.received == list(range(100))
    assert (server.num_connections, server.num_closed) == (1, 1)
    assert delivery.counts() == DeliveryCounts(sent=100)


def test_submitting_does_not_wait_for_a_server_that_hangs():
    server = Server()
    server.may_answer.clear()
    delivery = Delivery("t", server.connect)
    submit(delivery, 1, 2, 3)  # would wait forever
    assert delivery.counts() == DeliveryCounts(waiting=3)
    server.may_answer.set()
    assert settle(delivery) == DeliveryCounts(sent=3)


def test_an_outage_loses_nothing_and_is_reported_once(caplog):
    failures = iter(range(5))

    def answer(number):
        if next(failures, None) is not None:
            raise ConnectionError("503")

    server = Server(answer)
    delivery = Delivery("t", server.connect, QUICK)
    with caplog.at_level(logging.INFO):
        submit(delivery, 1, 2)
        assert settle(delivery) == DeliveryCounts(sent=2)
    assert server.received == [1, 2]
    assert server.num_connections == 6, "a client may be broken by a failure"
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["t does not answer, and is tried again: ConnectionError: 503", "t answers again"]


def test_a_server_that_is_absent_at_the_start_gets_everything_later():
    attempts = iter([OSError("refused"), RefusedError("401"), None])
    server = Server()

    def connect():
        if error := next(attempts):
            raise error
        return server.connect()

    delivery = Delivery("t", connect, QUICK)
    submit(delivery, 1, 2)
    assert settle(delivery) == DeliveryCounts(sent=2)


def test_a_refused_record_is_lost_alone():
    def answer(number):
        if number == 2:
            raise RefusedError("invalid name")

    server = Server(answer)
    delivery = Delivery("t", server.connect)
    submit(delivery, 1, 2, 3)
    assert settle(delivery) == DeliveryCounts(sent=2, lost=1)
    assert server.received == [1, 3]


def test_a_full_queue_loses_the_oldest_records(caplog):
    server = Server()
    server.may_answer.clear()
    delivery = Delivery("t", server.connect, DeliveryLimits(max_waiting=3))
    submit(delivery, 0)
    wait_for(lambda: delivery._sending is not None, "the first record")
    submit(delivery, *range(1, 11))
    assert delivery.counts() == DeliveryCounts(lost=7, waiting=4)
    server.may_answer.set()
    close(delivery)
    assert server.received == [0, 8, 9, 10]
    assert "a record is lost, because 3 records wait; metrics.jsonl has it" in caplog.text
    assert "t: 4 records were sent, 7 are lost" in caplog.text


def test_an_outage_of_hours_loses_records():
    def answer(number):
        raise ConnectionError

    delivery = Delivery("t", Server(answer).connect, DeliveryLimits(give_up_seconds=-1.0))
    submit(delivery, 1, 2)
    assert settle(delivery) == DeliveryCounts(lost=2)


def test_the_end_does_not_wait_for_a_server_that_is_down():
    def answer(number):
        raise ConnectionError

    delivery = Delivery("t", Server(answer).connect)  # retries take longer than the test
    submit(delivery, 1, 2)
    wait_for(lambda: delivery._num_failures, "an attempt")
    close(delivery, seconds=0.2)
    assert delivery.counts() == DeliveryCounts(lost=2)


def test_the_end_does_not_wait_for_a_server_that_hangs():
    server = Server()
    server.may_answer.clear()
    delivery = Delivery("t", server.connect)
    submit(delivery, 1, 2)
    close(delivery, seconds=0.05)
    assert delivery.counts() == DeliveryCounts(lost=2)
    server.may_answer.set()
    delivery._thread.join(DEADLINE_SECONDS)
    assert delivery.counts() == DeliveryCounts(lost=2), "a late answer does not change what was reported"


def test_what_a_client_took_is_lost_if_it_still_closes_at_the_end():
    """Such as one with its own queue, whose server is slow: it is killed."""
    server, may_close = Server(), threading.Event()
    server.close = lambda: may_close.wait(DEADLINE_SECONDS)
    delivery = Delivery("t", server.connect)
    submit(delivery, 1, 2)
    settle(delivery)
    close(delivery, 0)
    assert delivery.counts() == DeliveryCounts(lost=2)
    may_close.set()
    close(delivery)
    assert delivery.counts() == DeliveryCounts(lost=2)


def test_an_unused_delivery_connects_to_nothing():
    server = Server()
    delivery = Delivery("t", server.connect)
    close(delivery)
    assert server.num_connections == 0
    submit(delivery, 1)
    assert delivery.counts() == DeliveryCounts(lost=1)


def test_a_client_that_cannot_close_ends_in_the_log(caplog):
    server = Server()
    server.close = lambda: 1 / 0
    delivery = Delivery("t", server.connect)
    submit(delivery, 1)
    close(delivery)
    assert "t: cannot close: ZeroDivisionError" in caplog.text
    assert delivery.counts() == DeliveryCounts(sent=1)


def test_what_a_client_took_and_did_not_send_is_not_counted_as_sent(caplog):
    """W&B's client takes records without a server, and sends them later, or not."""
    server = Server()

    def end():
        raise UnsentError("no upload in 15 s")

    delivery = Delivery("t", server.connect)
    for key in ("step 1", "step 2"):
        delivery.submit(lambda client: client.log(1), key)
    assert settle(delivery) == DeliveryCounts(sent=2)
    server.close = end
    close(delivery)
    assert delivery.counts() == DeliveryCounts(lost=2)
    assert delivery.missed == ["step 1", "step 2"]
    assert "t: 2 records may not have arrived: no upload in 15 s" in caplog.text


def test_a_client_that_is_replaced_keeps_what_it_sent():
    failures = iter([None, ConnectionError("503"), None])

    def answer(number):
        if error := next(failures, None):
            raise error

    delivery = Delivery("t", Server(answer).connect, QUICK)
    submit(delivery, 1, 2)
    close(delivery)
    assert delivery.counts() == DeliveryCounts(sent=2)
