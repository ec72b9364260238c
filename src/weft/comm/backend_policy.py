"""How each torch.distributed backend carries calls: a table of facts about gloo and NCCL, by device type.

Note [Calls on NCCL]
    A kernel of NCCL runs until all members have launched theirs. Two communicators whose kernels
    are launched in different orders on two ranks can wait for each other, and so can the making of
    a communicator, which synchronises the device. So on GPUs all communicators are made at start,
    in one order (`comm/planned_groups.py`), and calls are launched from the thread that computes,
    in program order, never from a worker thread. The host does not wait: `Work.wait` orders the
    caller's stream. A signature is compared by an all-reduce of its digest on the device, launched
    before the call, and read by the host in `wait`. Messages are not compared: a check in both
    directions would wait for itself.

Note [Messages on NCCL]
    Messages travel on the communicator of their axis, whose kernels run one after the other on each
    rank: a message waits for those before it. Messages in one block of `Comm.grouped_messages` are
    one kernel, in which all make progress. Programs that cannot deadlock when every message blocks
    (lowered schedules: Note [Order of transfers] in schedule/lower.py) cannot deadlock here,
    whatever consecutive messages are grouped: take the first message of the line that is not
    complete; all before it are, so both of its ranks have launched the groups that hold it.
    A receive begins when the actions before it have ended, and a lowered schedule has it directly
    before the action in whose time the tensor arrives: it occupies the device for no longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BackendPolicy:
    """How calls on tensors of one device type are carried.

    Attributes:
        native_reduce: all_reduce and reduce_scatter by the backend's own algorithm, in its order of
            summation; else every member reduces in rank order, to the same bits in every run.
        native_gather: all_gather of equal pieces by the backend's own algorithm, at any size.
        exchanges_of_two: groups of two exchange their data directly.
        is_stream_ordered: `wait` orders a stream and does not block the host.
        launches_from_caller: calls are launched by the thread that starts them, never by a worker.
        checks_on_device: signatures are compared by digests that travel with the call.
        messages_on_axis_group: messages travel on the group of their axis, several in one launch;
            else every ordered pair of ranks has a group of its own.
        connects_at_start: groups are connected before the first call, in the order of the plan.
        totals_along_axes: totals over many ranks go along the groups of axes, which exist anyway;
            else through groups of few ranks that are made for them.
    """

    native_reduce: bool
    native_gather: bool
    exchanges_of_two: bool
    is_stream_ordered: bool
    launches_from_caller: bool
    checks_on_device: bool
    messages_on_axis_group: bool
    connects_at_start: bool
    totals_along_axes: bool


GLOO = BackendPolicy(
    native_reduce=False,
    native_gather=False,
    exchanges_of_two=True,
    is_stream_ordered=False,
    launches_from_caller=False,
    checks_on_device=False,
    messages_on_axis_group=False,
    connects_at_start=False,
    totals_along_axes=False,
)
NCCL = BackendPolicy(
    native_reduce=True,
    native_gather=True,
    exchanges_of_two=False,
    is_stream_ordered=True,
    launches_from_caller=True,
    checks_on_device=True,
    messages_on_axis_group=True,
    connects_at_start=True,
    totals_along_axes=True,
)

POLICIES = {"cpu": GLOO, "cuda": NCCL}


def policy_of(device_type: str, *, deterministic: bool = False) -> BackendPolicy:
    """The policy for tensors on a device type.

    Args:
        deterministic: reduce in rank order on every backend.
    """
    policy = POLICIES.get(device_type, GLOO)
    if deterministic:
        return replace(policy, native_reduce=False)
    return policy
