"""The Lease against an API server that is a dictionary: who leads, when no more, and what is given back."""

from rljob_operator.kube.client import ApiError
from rljob_operator.kube.lease import Lease


class Server:
    """One Lease, with optimistic locking."""

    def __init__(self):
        self.lease = None
        self.requests = []

    async def request(self, method, path, body=None):
        self.requests.append(method)
        if method == "GET":
            if self.lease is None:
                raise ApiError(404, "NotFound", "no such lease")
            return self.lease
        version = 0 if self.lease is None else int(self.lease["metadata"]["resourceVersion"])
        if method == "PUT" and body["metadata"]["resourceVersion"] != str(version):
            raise ApiError(409, "Conflict", "it has changed")
        self.lease = body | {"metadata": body["metadata"] | {"resourceVersion": str(version + 1)}}
        return self.lease

    @property
    def holder(self):
        return self.lease["spec"]["holderIdentity"]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def build(server, clock, identity):
    return Lease(server, "ns", "rljob-operator", identity, 15, clock)


async def test_a_lease_is_taken_over_only_after_its_time_as_the_taker_has_seen_it():
    server, clock = Server(), Clock()
    first, second = (build(server, clock, name) for name in ("a", "b"))
    await first.acquire()
    assert first.is_held
    assert not await second._try()
    clock.now += 14
    assert not await second._try()
    clock.now += 2
    assert not first.is_held, "it must have stopped before another may begin"
    assert await second._try()
    assert server.holder == "b"


async def test_a_lease_is_given_back_although_the_work_took_long_to_end():
    server, clock = Server(), Clock()
    first, second = (build(server, clock, name) for name in ("a", "b"))
    await first.acquire()
    clock.now += 12  # no renewal meanwhile
    assert not first.is_held
    await first.release()
    assert server.holder == ""
    assert await second._try(), "at once"


async def test_nobody_gives_back_what_another_has_taken():
    server, clock = Server(), Clock()
    first, second = (build(server, clock, name) for name in ("a", "b"))
    await first.acquire()
    assert not await second._try()
    clock.now += 16
    await second.acquire()
    clock.now += 16
    await first.release()
    assert server.holder == "b"


async def test_who_never_led_gives_nothing_back():
    server, clock = Server(), Clock()
    await build(server, clock, "a").release()
    assert server.requests == []
