"""The Lease with an API server in memory: acquiring, expiry and release."""

from rljob_core.kube.client import ApiError
from rljob_operator.operator import Lease


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


async def test_lease_is_taken_over_after_its_duration_on_the_clock_of_the_new_leader():
    server, clock = Server(), Clock()
    first, second = (build(server, clock, name) for name in ("a", "b"))
    await first.acquire()
    assert first.is_held
    assert not await second._try_renew()
    clock.now += 14
    assert not await second._try_renew()
    clock.now += 2
    assert not first.is_held, "it must stop before another may lead"
    assert await second._try_renew()
    assert server.holder == "b"


async def test_lease_is_released_after_a_long_shutdown():
    server, clock = Server(), Clock()
    first, second = (build(server, clock, name) for name in ("a", "b"))
    await first.acquire()
    clock.now += 12  # no renewal meanwhile
    assert not first.is_held
    await first.release()
    assert server.holder == ""
    assert await second._try_renew(), "immediately"


async def test_lease_of_another_replica_is_not_released():
    server, clock = Server(), Clock()
    first, second = (build(server, clock, name) for name in ("a", "b"))
    await first.acquire()
    assert not await second._try_renew()
    clock.now += 16
    await second.acquire()
    clock.now += 16
    await first.release()
    assert server.holder == "b"


async def test_standby_releases_nothing():
    server, clock = Server(), Clock()
    await build(server, clock, "a").release()
    assert server.requests == []


async def test_first_leader_creates_the_lease_and_holds_it():
    server = Server()
    assert await build(server, Clock(), "a")._try_renew()
    assert server.requests == ["GET", "POST"]
