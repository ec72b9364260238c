"""DeepSeek: latent attention from the formula, YaRN, multi-token prediction, the released shapes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from weft.models import PRESETS
from weft.models.common.attention import Attend
from weft.models.common.batch import IGNORE, Batch, chain, forward, token_batch, with_later_targets
from weft.models.common.init import init_params, named_parameters, tie
from weft.models.common.moe import rebalance
from weft.models.common.rope import Rope, YarnScaling, rotate
from weft.models.deepseek import config as deepseek
from weft.models.deepseek.model import LatentAttention
from weft.models.deepseek.model import blocks as deepseek_blocks

EXACT = {"rtol": 1e-12, "atol": 1e-12}
"""Sums of some 100 terms near 1 in float64, where one operation rounds by 1e-16."""

TINY = deepseek.Config(
    layers=3, dim=24, heads=4, vocab=29, ffn=20, expert_ffn=8, n_group=4, topk_group=2
)


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_attention(
    *, q_lora_rank: int = 10, v_head_dim: int = 5, heads: int = 4
) -> LatentAttention:
    return LatentAttention(
        24,
        heads=heads,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=9,
        qk_nope_head_dim=7,
        v_head_dim=v_head_dim,
        rope=Rope(6, theta=100.0),
        scale=0.3,
    )


def zeros_batch(num: int, seq: int) -> Batch:
    return token_batch(*[torch.zeros(num, seq, dtype=torch.int64)] * 2)


def turned_pairs(x: Tensor, rope: Rope, position: int) -> Tensor:
    """Neighbours (2i, 2i + 1) turned by the angle of frequency i, as DeepSeek's paper has it."""
    cos, sin = rope(torch.tensor([[position]]))
    cos = cos.double().flatten()
    sin = sin.double().flatten()
    left = x[0::2]
    right = x[1::2]
    out = torch.empty_like(x)
    out[0::2] = left * cos - right * sin
    out[1::2] = right * cos + left * sin
    return out


def written_out(attn: LatentAttention, x_SD: Tensor) -> Tensor:
    """DeepSeek-V2, equations 37 to 47, token by token and head by head."""
    num_heads = attn.o.weight.shape[1] // attn.v_size
    outputs = []
    for s, x in enumerate(x_SD):
        if attn.q_lora_rank:
            latent = attn.q_a_norm(attn.q_a(x))
            query = attn.q_b(latent)
        else:
            query = attn.q(x)
        heads = []
        for h, q in enumerate(query.chunk(num_heads)):
            q_nope = q[:7]
            q_rope = turned_pairs(q[7:], attn.rope, s)
            scores = []
            values = []
            for t in range(s + 1):
                latent, k_rope = attn.kv_a(x_SD[t]).split((9, 6))
                keys_and_values = attn.kv_b(attn.kv_a_norm(latent))
                of_head = keys_and_values.chunk(num_heads)[h]
                k_nope, v = of_head.split((7, attn.v_size))
                dot = q_nope @ k_nope + q_rope @ turned_pairs(k_rope, attn.rope, t)
                scores.append(0.3 * dot)
                values.append(v)
            weights = torch.stack(scores).softmax(0)
            heads.append(weights @ torch.stack(values))
        outputs.append(attn.o(torch.cat(heads)))
    return torch.stack(outputs)


@pytest.mark.parametrize(("q_lora_rank", "v_head_dim"), [(10, 5), (0, 5), (10, 13), (10, 16)])
def test_latent_attention_is_the_papers_written_out(q_lora_rank: int, v_head_dim: int):
    """Heads of v are narrower than those of q and k, as wide, or wider."""
    attn = make_attention(q_lora_rank=q_lora_rank, v_head_dim=v_head_dim)
    x = torch.randn(2, 5, 24)
    out = attn(x, zeros_batch(2, 5))
    for b in range(2):
        expected = written_out(attn, x[b])
        torch.testing.assert_close(out[b], expected, **EXACT)


def test_latent_attention_whose_heads_are_cut_sums_to_the_whole():
    whole = make_attention()
    x = torch.randn(2, 5, 24)
    batch = zeros_batch(2, 5)
    total = torch.zeros_like(x)
    for half in (0, 1):
        # built whole, like a rank's: only the weights that belong to heads are cut
        cut = make_attention()
        cut.load_state_dict(whole.state_dict())
        for name, dim in (("q_b", 0), ("kv_b", 0), ("o", 1)):
            weight = getattr(whole, name).weight.detach()
            own_half = weight.chunk(2, dim)[half]
            getattr(cut, name).weight = torch.nn.Parameter(own_half)
        total = total + cut(x, batch)
    torch.testing.assert_close(total, whole(x, batch), **EXACT)


@pytest.mark.parametrize("documents", [None, [[0, 0, 1, 1, 1]]])
@pytest.mark.parametrize("v_size", [3, 4, 6])
def test_heads_of_v_may_have_another_size_and_scores_another_scale(v_size: int, documents):
    q = torch.randn(1, 5, 4, 4)
    k = torch.randn(1, 5, 2, 4)
    v = torch.randn(1, 5, 2, v_size)
    batch = zeros_batch(1, 5)
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    if documents is not None:
        numbers = torch.tensor(documents)
        batch = replace(batch, documents=numbers)
        allowed &= numbers[0, :, None] == numbers[0, None, :]
    attend = Attend(scale=0.7)
    out = attend(q, k, v, batch)
    for head in range(4):
        own_q = q[0, :, head]
        own_k = k[0, :, head // 2]
        own_v = v[0, :, head // 2]
        scores = 0.7 * (own_q @ own_k.T)
        visible = scores.masked_fill(~allowed, -math.inf)
        expected = visible.softmax(-1) @ own_v
        torch.testing.assert_close(out[0, :, head], expected, **EXACT)


def test_pairs_of_neighbours_give_the_products_of_pairs_of_halves_in_another_order():
    rope = Rope(8, theta=100.0)
    turn = rope(torch.arange(5)[None])
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    x = torch.randn(1, 5, 2, 8)
    ordered = x[..., order]
    assert torch.equal(rotate(x, turn, pairs="neighbours"), rotate(ordered, turn))


# ── YaRN ──


def test_yarn_keeps_fast_features_and_slows_down_slow_ones():
    scaling = YarnScaling(factor=40.0, theta=10_000.0, original_context=4096)
    plain = Rope(64, theta=10_000.0).frequencies(torch.device("cpu"))
    ratio = scaling(plain) / plain
    turns = 4096 * plain / (2 * math.pi)
    assert (ratio[turns > 32 * 1.34] == 1.0).all()  # features are a factor of 1.33 apart
    torch.testing.assert_close(
        ratio[turns < 1 / 1.34] * 40, torch.ones_like(ratio[turns < 1 / 1.34])
    )
    assert (ratio.diff() < 1e-8).all()  # rounding of the quotient by the slowest: 0.025 x 6e-8
    assert ((ratio > 0.03) & (ratio < 0.99)).sum() == 12


def test_yarn_scales_scores_and_rotated_parts_with_the_logarithm_of_the_factor():
    scaling = YarnScaling(
        factor=math.e**5, theta=1e4, original_context=64, mscale=2.0, mscale_all_dim=1.0
    )
    gain_of_scores = 0.1 * 2 * 5 + 1
    gain_of_all = 0.1 * 1 * 5 + 1
    assert scaling.gain == pytest.approx(gain_of_scores / gain_of_all, rel=1e-12)
    assert scaling.sharpness == pytest.approx(1.5**2, rel=1e-12)
    rope = Rope(8, theta=1e4, scaling=scaling)
    turn = rope(torch.tensor([[0]]))
    torch.testing.assert_close(
        turn[0].flatten(), torch.full((4,), scaling.gain, dtype=torch.float32)
    )


def test_attention_is_sharpened_and_only_where_the_context_is_stretched():
    plain, stretched = (
        TINY.model_copy(update={"rope_scaling_factor": factor}) for factor in (1.0, 40.0)
    )
    attentions = [deepseek_blocks(cfg)["layer0"].attn.attend for cfg in (plain, stretched)]
    scales = [attention.scale for attention in attentions]
    assert scales[0] == 48**-0.5
    gain = 0.1 * math.log(40) + 1
    assert scales[1] == pytest.approx(48**-0.5 * gain**2, rel=1e-12)


# ── the second next token ──


def model_and_batch(**fields) -> tuple[deepseek.Config, dict[str, torch.nn.Module], Batch]:
    cfg = TINY.model_copy(update={"mtp_depth": 1, **fields})
    blocks = deepseek_blocks(cfg)
    ties = deepseek.ties(cfg)
    table = deepseek.init(cfg)
    init_params(named_parameters(blocks), table, seed=0, ties=ties)
    tie(blocks, ties)
    tokens = torch.randint(cfg.vocab, (2, 9))
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:].clone()
    targets[0, :4] = IGNORE
    batch = token_batch(inputs, targets)
    return cfg, blocks, with_later_targets(batch)


def test_side_block_hands_on_x_and_adds_the_weighted_loss_of_the_token_after_the_next():
    _, blocks, batch = model_and_batch(balance_loss=0.0, mtp_loss=0.25)
    side = blocks["mtp0"]
    head = blocks["head"]
    x = torch.randn(2, 8, 24)
    out = side(x, batch)
    assert out.x is x
    next_tokens = blocks["embed"].tok(batch.next_inputs)
    next_embedded = side.next_norm(next_tokens)
    hidden = side.x_norm(head.norm(x))
    joined = side.join(torch.cat((next_embedded, hidden), -1))
    of_layer = side.layer(joined, batch).x
    log_probs = head.proj(side.norm(of_layer)).log_softmax(-1)
    expected = 0.0
    for b in range(2):
        for s in range(7):
            target = batch.targets[b, s + 1]
            if target != IGNORE:
                expected = expected - log_probs[b, s, target]
    torch.testing.assert_close(out.loss, 0.25 * expected, **EXACT)
    assert out.load.sum() == 2 * 8 * 2


def test_side_block_adds_the_balance_loss_of_its_layer():
    _, blocks, batch = model_and_batch(balance_loss=3.0, mtp_loss=0.0)
    side = blocks["mtp0"]
    x = torch.randn(2, 8, 24)
    seen = []
    side.layer.register_forward_hook(lambda module, args, out: seen.append(out.loss))
    assert torch.equal(side(x, batch).loss, seen[0])
    assert seen[0] > 0


def test_no_token_sees_what_it_is_to_predict():
    """Logits at s may depend on tokens up to s + 1, and on no target."""
    _, blocks, batch = model_and_batch()
    side = blocks["mtp0"]
    seen = []
    side.proj.register_forward_hook(lambda module, args, out: seen.append(out))
    x = torch.randn(2, 8, 24)
    side(x, batch)
    kept_tokens = batch.inputs[:, :5]
    other_tokens = (batch.inputs[:, 5:] + 1) % TINY.vocab
    tokens = torch.cat((kept_tokens, other_tokens), dim=1)
    other_batch = with_later_targets(token_batch(tokens, batch.targets))
    other_end = torch.randn(2, 4, 24)
    other_x = torch.cat((x[:, :4], other_end), dim=1)
    side(other_x, other_batch)
    logits, other_logits = seen
    first = logits[:, :4]
    other_first = other_logits[:, :4]
    assert torch.equal(first, other_first)
    assert not torch.equal(logits[:, 4], other_logits[:, 4])


def test_embedding_last_norm_and_head_are_the_models_own():
    cfg, blocks, batch = model_and_batch()
    parameters = named_parameters(blocks)
    for alias, owner in deepseek.ties(cfg).items():
        assert parameters[alias] is parameters[owner]
    assert deepseek.ties(TINY) == {}
    forward(blocks, batch).backward()
    for p in parameters.values():
        if p.requires_grad:
            assert p.grad is not None


def test_the_main_loss_is_the_same_with_and_without_the_side_block():
    _, blocks, batch = model_and_batch(balance_loss=0.0)
    main = {name: block for name, block in blocks.items() if name != "mtp0"}
    x = chain(blocks, batch.inputs, batch).x
    assert torch.equal(x, forward(main, batch))


def test_a_batch_without_later_targets_is_rejected_with_what_to_do():
    _, blocks, batch = model_and_batch()
    with pytest.raises(AssertionError, match="with_later_targets"):
        forward(blocks, token_batch(batch.inputs, batch.targets))


# ── the model ──


def test_it_learns_a_sequence_by_heart_while_its_routers_are_rebalanced():
    cfg, blocks, batch = model_and_batch(balance_rate=0.01)
    parameters = named_parameters(blocks)
    optimizer = torch.optim.AdamW(
        {id(p): p for p in parameters.values() if p.requires_grad}.values(), lr=1e-2
    )
    for _ in range(60):
        optimizer.zero_grad()
        out = chain(blocks, batch.inputs, batch)
        loss = (out.x + out.loss) / batch.num_targets()
        loss.backward()
        optimizer.step()
        for name, load in out.loads.items():
            bias = parameters[f"{name}.{'layer.' * (name == 'mtp0')}mlp.router.bias"]
            bias.data = rebalance(bias, load, rate=cfg.balance_rate)
    assert out.x.item() / batch.num_targets().item() < 0.05
    assert set(out.loads) == {"layer1", "layer2", "mtp0"}


def test_layers_are_dense_first_and_mixed_then():
    blocks = deepseek_blocks(TINY.model_copy(update={"first_k_dense": 2, "mtp_depth": 1}))
    assert list(blocks) == ["embed", "layer0", "layer1", "layer2", "mtp0", "head", "loss"]
    actual = [hasattr(blocks[f"layer{i}"].mlp, "router") for i in range(3)]
    assert actual == [False, False, True]
    assert blocks["layer2"].mlp.router.rate == TINY.balance_rate
    every = deepseek_blocks(TINY.model_copy(update={"first_k_dense": 3}))
    for name in named_parameters(every):
        assert "router" not in name
    assert not any(
        ".shared." in name
        for name in named_parameters(deepseek_blocks(deepseek.Config(shared_experts=0)))
    )


def test_units_of_the_feed_forward_axis_divide_every_width_that_is_there():
    fields = {"ffn": 36, "expert_ffn": 24, "shared_experts": 2}
    assert deepseek.Config(**fields).axis_sizes()["ffn"] == 12
    assert deepseek.Config(**fields, first_k_dense=0).axis_sizes()["ffn"] == 24
    assert deepseek.Config(**fields, first_k_dense=4).axis_sizes()["ffn"] == 36
    assert deepseek.Config(**fields, first_k_dense=4, mtp_depth=1).axis_sizes()["ffn"] == 12


def test_v3_preset_is_the_released_config():
    cfg = PRESETS["deepseek-v3-671b"]
    assert isinstance(cfg, deepseek.Config)
    assert cfg.layers == 61
    assert cfg.first_k_dense == 3
    assert cfg.dim == 7168
    assert cfg.heads == 128
    assert cfg.ffn == 18432
    assert cfg.expert_ffn == 2048
    assert cfg.q_lora_rank == 1536
    assert cfg.kv_lora_rank == 512
    assert cfg.qk_head_dim == 192
    assert cfg.qk_rope_head_dim == 64
    assert cfg.v_head_dim == 128
    assert cfg.experts == 256
    assert cfg.top_k == 8
    assert cfg.n_group == 8
    assert cfg.topk_group == 4
    assert cfg.shared_experts == 1
    assert cfg.routed_scaling_factor == 2.5
    assert cfg.norm_topk_prob is True
    assert cfg.scoring == "sigmoid"
    assert cfg.vocab == 129_280
    assert cfg.max_seq_len == 163_840
    assert cfg.rope_scaling_factor == 40.0
    assert cfg.rope_scaling_original_context == 4096
    assert cfg.rope_theta == 1e4
    assert (cfg.balance_loss, cfg.balance_rate) == (1e-4, 1e-3)  # technical report, section 4.2


def test_37_billion_parameters_of_v3_meet_each_token():
    cfg = PRESETS["deepseek-v3-671b"]
    per_token = sum(spec.flops for spec in cfg.block_specs(1)) / 2
    head_sizes = cfg.qk_head_dim + cfg.v_head_dim
    attention = cfg.layers * cfg.heads * head_sizes / 2
    assert (
        36.0e9 < per_token - attention < 37.6e9
    )  # "37B activated"; the embedding's 0.9B are looked up
