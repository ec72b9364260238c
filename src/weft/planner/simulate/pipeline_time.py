"""Times of the actions of a lowered schedule, from costs of each kind of action, with the player's asynchronous messages.

Note [Messages between stages]
    A rank starts to send a tensor when the action that produces it has ended, and posts a receive
    at the place that the lowered row gives it. The message begins when both ends have reached it
    and the earlier messages of this pair of ranks have ended; the action that uses the tensor waits
    for its end. A rank has at most MAX_SENDS messages under way: before one more it waits for the
    oldest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weft.parallel.pipeline.player import MAX_SENDS
from weft.planner.measure.played_actions import ActionKey, action_keys
from weft.planner.simulate.link_replay import Carried, LinkMessage, whole_ticks
from weft.planner.simulate.region_costs import Link, RegionCosts
from weft.planner.simulate.region_time import RegionTime, replay
from weft.schedule.actions import Act, Table
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
class PipelineOrder:
    """The actions of a table in the order of its lowered program; lists by the place in this order.

    Attributes:
        classes: every class of actions.
        class_of: place of the action's class in `classes`.
        source_of: place of the action of another rank whose tensor it uses, or -1.
    """

    table: Table
    acts: tuple[Act, ...]
    classes: tuple[ActionClass, ...]
    class_of: tuple[int, ...]
    source_of: tuple[int, ...]


def pipeline_order(table: Table) -> PipelineOrder:
    """The order of a table's actions. It depends on the table alone: compute it once for many
    costs.

    Raises:
        ScheduleError: the table deadlocks.
    """
    acts = transfer_order(table).acts
    places = {act: place for place, act in enumerate(acts)}
    source_of = [-1] * len(acts)
    peers: dict[Act, int] = {}
    for place, act in enumerate(acts):
        source = table.source(act)
        if source is None:
            continue
        rank = table.rank_of(act)
        if table.rank_of(source) != rank:
            source_of[place] = places[source]
            peers[source] = rank
    class_of = [0] * len(acts)
    classes: list[ActionClass] = []
    for row in range(table.num_ranks):
        numbers: dict[int, int] = {}
        for act, key in action_keys(table, row).items():
            identity = id(key)  # equal keys of a row are one object
            if identity not in numbers:
                numbers[identity] = len(classes)
                action_class = ActionClass(
                    row,
                    key,
                    act.stage,
                    peers.get(act),
                )
                classes.append(action_class)
            place = places[act]
            class_of[place] = numbers[identity]
    return PipelineOrder(
        table=table,
        acts=acts,
        classes=tuple(classes),
        class_of=tuple(class_of),
        source_of=tuple(source_of),
    )


@dataclass(frozen=True)
class StageMessage:
    """A message to the next or the last stage: the sender's link, and seconds alone on it."""

    link: Link
    seconds: float

    @staticmethod
    def of(
        link: Link,
        seconds: float,
    ) -> StageMessage:
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
        """By rank, when its first action begins."""
        found = list(self.last_end)
        for number, start in zip(self.order.class_of, self.starts, strict=True):
            rank = self.order.classes[number].rank
            found[rank] = min(found[rank], start)
        return found


class _RankLinks:
    """Operations and messages under way on the links of a rank, and times of its regions by what
    they find: most of them repeat.
    """

    def __init__(
        self,
        costs: Sequence[ClassCosts],
        begin: float,
    ) -> None:
        self.costs = costs
        self.last_end = begin
        self.carried: tuple[Carried, ...] = ()
        self.messages: list[LinkMessage] = []
        self._known: dict[object, RegionTime] = {}
        self._equal: dict[tuple[Carried, ...], tuple[Carried, ...]] = {}

    def time(
        self,
        number: int,
        start: float,
        on_free_lanes: RegionTime,
    ) -> RegionTime:
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
            replayed = replay(
                region,
                gap=gap,
                carried=self.carried,
                blocked=blocked,
            )
            equal = self._equal.setdefault(replayed.carried, replayed.carried)
            found = replace(replayed, carried=equal)
            self._known[key] = found
        return found


@dataclass
class _PlayedRank:
    """Progress of a pipeline rank.

    Attributes:
        free_at: when its next action may start.
        arrivals: of the messages that it has sent, in order.
    """

    links: _RankLinks
    free_at: float
    arrivals: list[float] = field(default_factory=list)

    @property
    def ready_at(self) -> float:
        """When its actions have ended and its messages have been sent."""
        return max([self.free_at, *self.arrivals])


def play(
    order: PipelineOrder,
    costs: Sequence[ClassCosts],
    *,
    begin: float = 0.0,
) -> PlayedActions:
    """When each action runs; see Note [Messages between stages] and Note [Lanes].

    Args:
        costs: by class, as in `order.classes`.
        begin: time at which every rank starts.
    """
    on_free_lanes = [replay(cost.region) for cost in costs]
    ranks = [
        _PlayedRank(_RankLinks(costs, begin), free_at=begin) for _ in range(order.table.num_ranks)
    ]
    pair_free: dict[tuple[int, int], float] = {}
    num_actions = len(order.acts)
    starts = [0.0] * num_actions
    ends = [0.0] * num_actions
    message_starts = [0.0] * num_actions
    arrivals = [0.0] * num_actions
    times: list[RegionTime] = []
    for place, (number, source) in enumerate(zip(order.class_of, order.source_of, strict=True)):
        action_class = order.classes[number]
        rank = ranks[action_class.rank]
        links = rank.links
        start = rank.free_at
        if source >= 0 and arrivals[source] > start:
            start = arrivals[source]
        time = on_free_lanes[number]
        if links.carried or links.messages:
            time = links.time(number, start, time)
        end = start + time.total
        links.carried = time.carried
        links.last_end = end
        rank.free_at = end
        starts[place] = start
        ends[place] = end
        times.append(time)
        peer = action_class.peer
        if peer is None:
            continue
        of_message = costs[number].message
        assert of_message is not None, f"no costs of the message of {order.acts[place]}"
        pair = (action_class.rank, peer)
        message_start = max(
            end,
            ranks[peer].free_at,
            pair_free.get(pair, begin),
        )
        arrival = message_start + of_message.seconds
        pair_free[pair] = arrival
        message_starts[place] = message_start
        arrivals[place] = arrival
        links.messages.append(LinkMessage(of_message.link, message_start, of_message.seconds))
        rank.arrivals.append(arrival)
        if len(rank.arrivals) > MAX_SENDS:
            oldest = rank.arrivals[-1 - MAX_SENDS]
            rank.free_at = max(end, oldest)
    return PlayedActions(
        order=order,
        starts=starts,
        ends=ends,
        times=times,
        message_starts=message_starts,
        arrivals=arrivals,
        ready_at=[rank.ready_at for rank in ranks],
        last_end=[rank.links.last_end for rank in ranks],
        carried=[rank.links.carried for rank in ranks],
    )
