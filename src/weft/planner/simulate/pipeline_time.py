"""Times of the actions of a lowered schedule, from costs of each kind of action, with the player's asynchronous messages.

Note [Messages between stages]
    A rank starts to send a tensor when the action that produces it has ended, and posts a receive
    at the place that the lowered row gives it. The message begins when both ends have reached it
    and the earlier messages of this pair of ranks have ended; the action that uses the tensor waits
    for its end. A rank has at most MAX_SENDS messages under way: before one more it waits for the
    oldest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Generic

from weft.parallel.pipeline.player import MAX_SENDS
from weft.planner.measure.played_actions import ActionKey, action_keys
from weft.planner.simulate.link_replay import Carried, LinkMessage, whole_ticks
from weft.planner.simulate.region_costs import RegionCosts
from weft.planner.simulate.region_time import RegionTime, replay
from weft.planner.simulate.speeds import Link
from weft.schedule import engine
from weft.schedule.actions import Table
from weft.schedule.engine import PlayOrder, Time
from weft.schedule.lower import transfer_order


@dataclass(frozen=True)
class ActionClass:
    """Actions of equal cost: of one pipeline rank, with one key.

    Attributes:
        peer: pipeline rank that receives its tensor; None if it stays on the rank.
    """

    rank: int
    key: ActionKey
    stage: int
    peer: int | None


@dataclass(frozen=True)
class PipelineOrder(PlayOrder):
    """The actions of a table in the order of its lowered program, with their classes.

    Attributes:
        classes: every class of actions.
        class_of: place of the action's class in `classes`, by place of the action.
    """

    classes: tuple[ActionClass, ...]
    class_of: tuple[int, ...]


def pipeline_order(table: Table, *, whole: Table | None = None) -> PipelineOrder:
    """The order of a table's actions. It depends on the table alone: compute it once for many
    costs.

    Args:
        whole: of which the table has some actions, which cost as much as there; default: the table.

    Raises:
        ScheduleError: the table deadlocks.
    """
    order = transfer_order(table)
    places = {act: place for place, act in enumerate(order.acts)}
    class_of = [0] * len(places)
    classes: list[ActionClass] = []
    for row in range(table.num_ranks):
        numbers: dict[int, int] = {}
        keys = action_keys(whole or table, row)
        for act in table.rows[row]:
            key, place = keys[act], places[act]
            identity = id(key)  # equal keys of a row are one object
            if identity not in numbers:
                numbers[identity] = len(classes)
                consumer = order.consumer_of[place]
                peer = order.ranks[consumer] if consumer >= 0 else None
                classes.append(ActionClass(row, key, act.stage, peer))
            class_of[place] = numbers[identity]
    return PipelineOrder(
        table=table,
        acts=order.acts,
        ranks=order.ranks,
        source_of=order.source_of,
        consumer_of=order.consumer_of,
        classes=tuple(classes),
        class_of=tuple(class_of),
    )


@dataclass(frozen=True)
class StageMessage:
    """A message to the next or the last stage: the sender's link, and seconds alone on it."""

    link: Link
    seconds: float

    @staticmethod
    def of(link: Link, seconds: float) -> StageMessage:
        """A message of the nearest whole tick, see TICKS_A_SECOND."""
        return StageMessage(link, whole_ticks(seconds))


@dataclass(frozen=True)
class ClassCosts:
    """Costs of a class of actions.

    Attributes:
        region: work of an action.
        message: that sends its tensor; None if it stays on the rank.
    """

    region: RegionCosts
    message: StageMessage | None = None


@dataclass(frozen=True)
class PlayedActions:
    """When the actions of a step ran; lists by the place in the pipeline's order.

    Attributes:
        starts, ends: of each action.
        times: of each action, with its operations.
        message_starts, arrivals: of the message that an action sends; 0 without one.
        ready_at: by rank, when its actions have ended and its messages have been sent.
        last_end: by rank, of its last action.
        carried: by rank, operations that no action has waited for.
    """

    order: PipelineOrder
    starts: list[float]
    ends: list[float]
    times: list[RegionTime]
    message_starts: list[float]
    arrivals: list[float]
    ready_at: list[float]
    last_end: list[float]
    carried: list[tuple[Carried, ...]]

    @property
    def first_start(self) -> list[float]:
        """When the first action of each rank begins, by rank."""
        found = list(self.last_end)
        for rank, start in zip(self.order.ranks, self.starts, strict=True):
            found[rank] = min(found[rank], start)
        return found


class _RankLinks:
    """Operations and messages under way on the links of a rank, and times of its regions by what
    they find: most of them repeat.
    """

    def __init__(self, costs: Sequence[ClassCosts], begin: float) -> None:
        self.costs = costs
        self.last_end = begin
        self.carried: tuple[Carried, ...] = ()
        self.messages: list[LinkMessage] = []
        self._known: dict[object, RegionTime] = {}
        self._equal: dict[tuple[Carried, ...], tuple[Carried, ...]] = {}

    def time(self, number: int, start: float, on_free_lanes: RegionTime) -> RegionTime:
        """The time of an action of this class that starts now."""
        region = self.costs[number].region
        last_end = self.last_end
        if self.messages:
            first_use = last_end if self.carried else start + region.before_first_op
            self.messages = [each for each in self.messages if each.end > first_use]
        finds_messages = self.messages and region.ops
        if not self.carried and not finds_messages:
            return on_free_lanes
        gap = start - last_end
        blocked = tuple([each.after(last_end) for each in self.messages])
        key = (number, gap, id(self.carried), blocked)
        found = self._known.get(key)
        if found is None:
            replayed = replay(region, gap=gap, carried=self.carried, blocked=blocked)
            equal = self._equal.setdefault(replayed.carried, replayed.carried)
            found = replace(replayed, carried=equal)
            self._known[key] = found
        return found


class StageMessages(Generic[Time]):
    """Messages of a play, see Note [Messages between stages]; times are numbers, or columns of draws.

    Attributes:
        free_at: by rank, that of the play.
        under_way: by rank, arrivals of what it has sent and not waited for, the oldest first.
    """

    def __init__(
        self, order: PlayOrder, free_at: MutableSequence[Time], latest: Callable[[Time, Time], Time]
    ) -> None:
        self.order = order
        self.free_at = free_at
        self.latest = latest
        self.pair_free: dict[tuple[int, int], Time] = {}
        self.under_way: list[deque[Time]] = [deque() for _ in free_at]

    def send(self, place: int, end: Time, seconds: Any) -> tuple[Time, Time]:
        """Begin and arrival of the message of an action that has just ended.

        Its rank is kept in `free_at` until the oldest of too many messages has arrived.
        """
        rank = self.order.ranks[place]
        peer = self.order.ranks[self.order.consumer_of[place]]
        start = self.latest(end, self.free_at[peer])
        if (rank, peer) in self.pair_free:
            start = self.latest(start, self.pair_free[rank, peer])
        arrival: Time = start + seconds
        self.pair_free[rank, peer] = arrival
        under_way = self.under_way[rank]
        under_way.append(arrival)
        if len(under_way) > MAX_SENDS:
            self.free_at[rank] = self.latest(end, under_way.popleft())
        return start, arrival

    @property
    def ready_at(self) -> list[Time]:
        """By rank, when it is free and its messages have been sent."""
        ranks = zip(self.free_at, self.under_way, strict=True)
        return [reduce(self.latest, under_way, free) for free, under_way in ranks]


def play(order: PipelineOrder, costs: Sequence[ClassCosts], *, begin: float = 0.0) -> PlayedActions:
    """When each action runs; see Note [Messages between stages] and Note [Lanes].

    Args:
        costs: by class, as in `order.classes`.
        begin: time at which every rank starts.
    """
    on_free_lanes = [replay(cost.region) for cost in costs]
    links_of = [_RankLinks(costs, begin) for _ in range(order.table.num_ranks)]
    free_at = [begin] * order.table.num_ranks
    messages = StageMessages(order, free_at, max)
    starts: list[float] = []
    ends: list[float] = []
    times: list[RegionTime] = []
    message_starts = [0.0] * len(order.acts)
    arrivals = [0.0] * len(order.acts)

    def run(place: int, start: float) -> float:
        number = order.class_of[place]
        links = links_of[order.ranks[place]]
        time = on_free_lanes[number]
        if links.carried or links.messages:
            time = links.time(number, start, time)
        links.carried = time.carried
        links.last_end = start + time.total
        starts.append(start)
        ends.append(links.last_end)
        times.append(time)
        return links.last_end

    def send(place: int, end: float) -> float:
        message = costs[order.class_of[place]].message
        assert message is not None, f"no costs of the message of {order.acts[place]}"
        start, arrival = messages.send(place, end, message.seconds)
        links_of[order.ranks[place]].messages.append(
            LinkMessage(message.link, start, message.seconds)
        )
        message_starts[place] = start
        arrivals[place] = arrival
        return arrival

    engine.play(order, run, send, free_at=free_at, latest=max)
    return PlayedActions(
        order=order,
        starts=starts,
        ends=ends,
        times=times,
        message_starts=message_starts,
        arrivals=arrivals,
        ready_at=messages.ready_at,
        last_end=[links.last_end for links in links_of],
        carried=[links.carried for links in links_of],
    )
