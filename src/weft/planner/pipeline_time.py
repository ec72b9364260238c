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
from dataclasses import dataclass, replace

from weft.parallel.pipeline.player import MAX_SENDS
from weft.planner.link_replay import Carried, LinkMessage, whole_ticks
from weft.planner.played_actions import ActionKey, action_keys
from weft.planner.region_costs import Link, RegionCosts
from weft.planner.region_time import RegionTime, replay
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
    acts = transfer_order(table)
    places = {act: place for place, act in enumerate(acts)}
    source_of = [-1] * len(acts)
    peers: dict[Act, int] = {}
    for place, act in enumerate(acts):
        source = table.source(act)
        if source is not None and table.rank_of(source) != table.rank_of(act):
            source_of[place] = places[source]
            peers[source] = table.rank_of(act)
    class_of = [0] * len(acts)
    classes: list[ActionClass] = []
    for row in range(table.num_ranks):
        numbers: dict[int, int] = {}
        for act, key in action_keys(table, row).items():
            if id(key) not in numbers:  # equal keys of a row are one object
                numbers[id(key)] = len(classes)
                classes.append(
                    ActionClass(
                        row,
                        key,
                        act.stage,
                        peers.get(act),
                    )
                )
            class_of[places[act]] = numbers[id(key)]
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

    def __init__(self, costs: Sequence[ClassCosts], begin: float) -> None:
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
            self.messages = [entry for entry in self.messages if entry[1] + entry[2] > first_use]
        finds_messages = self.messages and region.ops
        if not self.carried and not finds_messages:
            return on_free_lanes
        gap = start - last_end
        blocked = tuple(
            [LinkMessage(link, begin - last_end, seconds) for link, begin, seconds in self.messages]
        )
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
    num_ranks = order.table.num_ranks
    on_free_lanes = [replay(cost.region) for cost in costs]
    ranks = [action_class.rank for action_class in order.classes]
    peers = [-1 if entry.peer is None else entry.peer for entry in order.classes]
    links = [_RankLinks(costs, begin) for _ in range(num_ranks)]
    now = [begin] * num_ranks
    sent: list[list[float]] = [[] for _ in range(num_ranks)]
    pair_free: dict[tuple[int, int], float] = {}
    num_actions = len(order.acts)
    starts = [0.0] * num_actions
    ends = [0.0] * num_actions
    message_starts = [0.0] * num_actions
    arrivals = [0.0] * num_actions
    times: list[RegionTime] = []
    for place, (number, source) in enumerate(zip(order.class_of, order.source_of, strict=True)):
        rank = ranks[number]
        start = now[rank]
        if source >= 0 and arrivals[source] > start:
            start = arrivals[source]
        time = on_free_lanes[number]
        rank_links = links[rank]
        if rank_links.carried or rank_links.messages:
            time = rank_links.time(number, start, time)
        end = start + time.total
        rank_links.carried = time.carried
        rank_links.last_end = end
        now[rank] = end
        starts[place] = start
        ends[place] = end
        times.append(time)
        peer = peers[number]
        if peer < 0:
            continue
        message = costs[number].message
        assert message is not None, f"no costs of the message of {order.acts[place]}"
        message_start = max(end, now[peer], pair_free.get((rank, peer), begin))
        arrival = message_start + message.seconds
        pair_free[rank, peer] = arrival
        message_starts[place] = message_start
        arrivals[place] = arrival
        rank_links.messages.append(LinkMessage(message.link, message_start, message.seconds))
        own_sent = sent[rank]
        own_sent.append(arrival)
        if len(own_sent) > MAX_SENDS and own_sent[-1 - MAX_SENDS] > end:
            now[rank] = own_sent[-1 - MAX_SENDS]
    return PlayedActions(
        order=order,
        starts=starts,
        ends=ends,
        times=times,
        message_starts=message_starts,
        arrivals=arrivals,
        ready_at=[max([now[rank], *sent[rank]]) for rank in range(num_ranks)],
        last_end=[rank_links.last_end for rank_links in links],
        carried=[rank_links.carried for rank_links in links],
    )
