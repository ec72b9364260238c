"""Ring attention, step by step: queries stay on their rank, keys and values are sent around a ring.

    .venv/bin/python examples/ring_attention.py

Four ranks, one sequence, each holds a quarter of the positions. At turn t rank i has the keys and
values of rank i - t, attends to them, and sends them to the next rank meanwhile:

              turn 0        turn 1        turn 2        turn 3
    rank 0    q0 x kv0      q0 x kv3      q0 x kv2      q0 x kv1           kv0 ──> kv1
    rank 1    q1 x kv1      q1 x kv0      q1 x kv3      q1 x kv2            ^       │     one hop a turn
    rank 2    q2 x kv2      q2 x kv1      q2 x kv0      q2 x kv3            │       v
    rank 3    q3 x kv3      q3 x kv2      q3 x kv1      q3 x kv0           kv3 <── kv2

A softmax needs all scores of a row, but they can come a quarter at a time. Keep the largest score m
so far, the sum l of exp(score - m) and the sum o of exp(score - m) v; when m grows, multiply both
sums by exp(old m - new m). At the end o / l is the output, and m + log l is all that a backward
needs: gradients of k and v are sent along with them.

Under a causal mask tokens attend to earlier ones only. To balance the work, rank i of c holds
chunks i and 2c-1-i of
2c: a cheap one and an expensive one. Source: Liu et al. 2023, Ring Attention with Blockwise
    Transformers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from example_tools import gradient, same, say, table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import weft
from weft import Comm
from weft.core.sequence import zigzag

RANKS, B, S, H, K = 4, 2, 32, 2, 8
SCALE = K**-0.5


def start_hop(x: Tensor, comm: Comm) -> Callable[[], Tensor]:
    """Send x to the rank after, receive from the rank before; call the result to wait for the
    received tensor.
    """
    me = comm.index("cp")
    send = comm.start_send(x, "cp", to=(me + 1) % RANKS)
    recv = comm.start_recv(torch.empty_like(x), "cp", source=(me - 1) % RANKS)

    def wait() -> Tensor:
        send.wait()
        return recv.wait()

    return wait


def positions_of(rank: int) -> Tensor:
    """Positions of the sequence that `rank` holds."""
    return torch.tensor([position for chunk in zigzag(S, RANKS, rank) for position in chunk])


def scores(q_BHSK: Tensor, k_BHSK: Tensor, comm: Comm, turn: int) -> Tensor:
    """Scores of own queries and the keys of this turn; -inf where a key is later than the query."""
    queries, keys = positions_of(comm.index("cp")), positions_of((comm.index("cp") - turn) % RANKS)
    s: Tensor = SCALE * q_BHSK @ k_BHSK.mT
    return s.masked_fill(keys > queries[:, None], float("-inf"))


def forward(q: Tensor, kv: Tensor, comm: Comm, log: list[str]) -> tuple[Tensor, Tensor]:
    """q_BHSK and kv (k and v stacked), own positions -> out_BHSK and lse_BHS, the log of the sum of
    exp(scores).
    """
    m = torch.full(q.shape[:3], float("-inf"), dtype=q.dtype)
    total, out = torch.zeros_like(m), torch.zeros_like(q)
    for turn in range(RANKS):
        hop = start_hop(kv, comm) if turn < RANKS - 1 else None
        s = scores(q, kv[0], comm, turn)
        new_m = torch.maximum(m, s.amax(-1))
        shrink, weights = torch.exp(m - new_m), torch.exp(s - new_m[..., None])
        total = total * shrink + weights.sum(-1)
        out = out * shrink[..., None] + weights @ kv[1]
        m = new_m
        log.append(
            f"{m[0, 0, -1]:7.4f} {total[0, 0, -1]:8.4f} {(out / total[..., None])[0, 0, -1, 0]:8.4f}"
        )
        kv = kv if hop is None else hop()
    return out / total[..., None], m + total.log()


def backward(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, comm: Comm
) -> tuple[Tensor, Tensor]:
    """Gradients of own q and own kv. Those of k and v follow one turn behind; the last hop returns
    them to their rank.
    """
    dq, dkv = torch.zeros_like(q), torch.zeros_like(kv)
    delta = (grad * out).sum(
        -1, keepdim=True
    )  # what the softmax's backward subtracts, the same for every block
    gradients: Callable[[], Tensor] | None = None
    for turn in range(RANKS):
        hop = start_hop(kv, comm) if turn < RANKS - 1 else None
        p = torch.exp(
            scores(q, kv[0], comm, turn) - lse[..., None]
        )  # the softmax itself: lse is over all blocks
        ds = SCALE * p * (grad @ kv[1].mT - delta)
        dq += ds @ kv[0]
        block_dkv = torch.stack([ds.mT @ q, p.mT @ grad])
        dkv = block_dkv if gradients is None else gradients() + block_dkv
        gradients = start_hop(dkv, comm)
        kv = kv if hop is None else hop()
    assert gradients is not None, "there is at least one turn"
    return dq, gradients()


def main() -> None:
    comm = weft.init(f"cp{RANKS}", device="cpu")
    mine = positions_of(comm.index("cp"))
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, B, H, S, K, dtype=torch.float64)

    whole = tuple(x.clone().requires_grad_() for x in (q, k, v))  # one process, the whole sequence
    want = scaled_dot_product_attention(whole[0], whole[1], whole[2], is_causal=True)
    want.backward(grad)
    want_own = {"output": want.detach()[:, :, mine]}
    want_own |= {
        f"gradient of {name}": gradient(x)[:, :, mine] for name, x in zip("qkv", whole, strict=True)
    }

    own_q, own_k, own_v, own_grad = (x[:, :, mine] for x in (q, k, v, grad))
    log: list[str] = []
    own_kv = torch.stack([own_k, own_v])
    out, lse = forward(own_q, own_kv, comm, log)
    dq, dkv = backward(own_grad, own_q, own_kv, out, lse, comm)
    for (name, right), got in zip(want_own.items(), (out, dq, dkv[0], dkv[1]), strict=True):
        same(f"by hand: {name}", got, right)
    say(comm, "the last token of rank 0 attends to all tokens; its softmax after each turn")
    say(
        comm,
        f"  turn   keys of       m        l     o / l   (first number; one process: {want[0, 0, -1, 0]:.4f})",
    )
    for turn, line in enumerate(log):
        say(comm, f"  {turn}      rank {-turn % RANKS}  {line}")
    say(comm, "\npositions of each rank")
    table(
        comm,
        ("positions",),
        (", ".join(f"{r.start}-{r.stop - 1}" for r in zigzag(S, RANKS, comm.index("cp"))),),
    )

    leaves = tuple(
        x.transpose(1, 2).clone().requires_grad_() for x in (own_q, own_k, own_v)
    )  # weft: B S H K
    result = weft.ring_attention(leaves[0], leaves[1], leaves[2], comm, "cp")
    result.backward(own_grad.transpose(1, 2))
    for (name, right), got in zip(
        want_own.items(), (result.detach(), *map(gradient, leaves)), strict=True
    ):
        same(f"weft: {name}", got.transpose(1, 2), right)

    comm.barrier("cp")
    say(
        comm,
        f"\nequal: attention and 3 gradients on {RANKS} ranks are those of one process, by hand and by weft",
    )


if __name__ == "__main__":
    main()
