"""Presence of ranks in a store: who is missing from a call, with one key per group and rank."""

import pytest

from weft.comm.transport import Call
from weft.comm.world_store import PresenceStore
from weft.errors import CommTimeout

RANKS = (0, 2, 5)
GROUP = "group 0-2-5"


class DictStore:
    """A store in memory."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)

    def add(self, key, amount):
        total = int(self.values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total


class CountingStore(DictStore):
    """A store that counts requests."""

    num_requests = 0

    def set(self, key, value):
        self.num_requests += 1
        super().set(key, value)

    def check(self, keys):
        self.num_requests += 1
        return super().check(keys)

    def add(self, key, amount):
        self.num_requests += 1
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        return total


class LostStore(DictStore):
    """A store whose server is gone."""

    def check(self, keys):
        raise RuntimeError("Connection reset by peer")


def missing(presence, *, num_started):
    return presence.missing(GROUP, RANKS, num_started=num_started, within_s=0.0)


def test_ranks_that_started_fewer_calls_are_missing():
    presence = PresenceStore(DictStore())
    presence.announce(GROUP, 0, 3)
    presence.announce(GROUP, 2, 2)
    assert missing(presence, num_started=1) == (5,)
    assert missing(presence, num_started=3) == (2, 5)
    presence.announce(GROUP, 2, 3)
    presence.announce(GROUP, 5, 4)
    assert missing(presence, num_started=3) == ()


def test_a_rank_takes_one_key_however_many_calls_it_announces():
    store = DictStore()
    presence = PresenceStore(store)
    for num_started in range(1, 1000):
        presence.announce(GROUP, 2, num_started)
    assert len(store.values) == 1


def test_no_rank_is_missing_if_the_store_is_lost():
    assert missing(PresenceStore(LostStore()), num_started=1) == ()


def test_waiting_for_members_names_those_that_did_not_arrive():
    presence = PresenceStore(DictStore())
    presence.announce(GROUP, 0, 1)
    call = Call("barrier", "dp", RANKS, 1, "barrier")
    with pytest.raises(
        CommTimeout, match=r"barrier over dp, ranks 0 2 5: rank 5 did not arrive within 0\.05 s"
    ):
        presence.wait_for_members(GROUP, call, timeout_s=0.05)


def test_the_requests_of_a_member_that_finds_its_group_complete_do_not_grow_with_the_group():
    num_requests = []
    for num_members in (4, 4096):
        store = CountingStore()
        ranks = tuple(range(num_members))
        store.add(f"{GROUP}/arrived", num_members - 1)  # all others have come
        before = store.num_requests
        call = Call("barrier", "dp", ranks, 0, "barrier")
        PresenceStore(store).wait_for_members(GROUP, call, timeout_s=60.0)
        num_requests.append(store.num_requests - before)
    assert num_requests == [4, 4]


def test_only_the_first_rank_claims_a_key():
    presence = PresenceStore(DictStore())
    claims = [presence.is_first("reported") for _ in range(3)]
    assert claims == [True, False, False]
