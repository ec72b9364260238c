"""deepseek, qwen3 and qwen3-moe against Hugging Face's models.

EXACT claims are made with the casts to float32 taken out of Hugging Face's norms and routers (the
code is otherwise theirs), the loose one with the models as they are shipped.

UNMODIFIED = 1.1e-5: float32 rounds at 2^-24 = 6e-8. A norm rounds about five times forward and as
often backward; a router's scores some 8 times (64 products, added pairwise: 6; the sigmoid or
softmax; its sum), as often backward. Here are at most 3 layers with 4 norms and a router each, and
the last norm: 13 x 10 x 6e-8 + 3 x 16 x 6e-8 = 1.1e-5 if all errors point one way (4e-7 to 9e-7
comes out).

V2 is compared as it is shipped only: its rotations are complex64 products with a table by
torch.polar, of which each entry may differ by 6e-8 from the sine or cosine that its float32 angle
has elsewhere. Four such errors in q and in k, forward and backward, in 3 layers add 3 x 16 x 6e-8 =
3e-6 (1.2e-6 comes out in all).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle.hugging_face import (
    EXACT,
    Views,
    compare,
    compare_gradients,
    copy_into,
    gradients_of,
    make_batch,
    near,
    our_blocks,
    shaken,
    tensors_of,
)
from weft.core.model_config import ModelConfig
from weft.models import PRESETS
from weft.models.common.batch import IGNORE, forward, with_later_targets
from weft.models.common.decoder_config import DecoderConfig
from weft.models.common.init import named_parameters
from weft.models.deepseek import config as deepseek
from weft.models.deepseek.model import blocks as deepseek_blocks
from weft.models.qwen3 import config as qwen3
from weft.models.qwen3_moe import config as qwen3_moe
from weft.prove.against.float64 import widened

transformers = pytest.importorskip(
    "transformers", reason="the oracle is Hugging Face's transformers (extra `oracle`)"
)

UNMODIFIED, V2 = 1.1e-5, 1.4e-5

ATTENTION = {
    **{
        f"attn.{name}.weight": f"self_attn.{name}_proj.weight"
        for name in ("q", "k", "v", "o", "q_a", "q_b", "kv_b")
    },
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "attn.q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn.kv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn.kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
}
MLP = {
    **{f"mlp.{name}.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{
        f"mlp.shared.{name}.weight": f"mlp.shared_experts.{name}_proj.weight"
        for name in ("gate", "up", "down")
    },
    "mlp.router.proj.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    "mlp.experts.down": "mlp.experts.down_proj",
}


def layer_views(tensors: dict[str, Tensor], ours: str, theirs: str) -> Views:
    """One layer, whatever it holds; experts' gate and up stand one on the other."""
    views: Views = {}
    for our, their in (ATTENTION | MLP).items():
        tensor = tensors.get(f"{theirs}.{their}")
        if tensor is not None:
            views[f"{ours}.{our}"] = tensor
    gate_up = tensors.get(f"{theirs}.mlp.experts.gate_up_proj")
    if gate_up is not None:
        gate, up = gate_up.chunk(2, dim=1)
        views[f"{ours}.mlp.experts.gate"] = gate
        views[f"{ours}.mlp.experts.up"] = up
    return views


def views(tensors: dict[str, Tensor], cfg: ModelConfig) -> Views:
    """All three families; with tied weights Hugging Face's parameters have no lm_head."""
    embedding = tensors["model.embed_tokens.weight"]
    whole = {
        "embed.tok.weight": embedding,
        "head.norm.weight": tensors["model.norm.weight"],
        "head.proj.weight": tensors.get("lm_head.weight", embedding),
    }
    for i in range(cfg.layers):
        whole |= layer_views(tensors, f"layer{i}", f"model.layers.{i}")
    return whole


QWEN3 = qwen3.Config(
    layers=2, dim=64, heads=4, kv_heads=2, head_size=24, ffn=88, vocab=101, rope_theta=10_000.0
)
QWEN3_MOE = qwen3_moe.Config(
    layers=2,
    dim=64,
    heads=4,
    kv_heads=2,
    head_size=24,
    vocab=101,
    experts=6,
    top_k=2,
    expert_ffn=40,
)
DEEPSEEK = deepseek.Config(
    layers=3,
    dim=64,
    heads=4,
    q_lora_rank=40,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=16,
    v_head_dim=20,
    ffn=72,
    experts=12,
    top_k=3,
    expert_ffn=24,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    balance_loss=0.0,
    vocab=101,
)
YARN = {
    # of 8 frequencies the first stays, three lie on the ramp, four slow down
    "rope_scaling_factor": 40.0,
    "rope_scaling_original_context": 512,
    "rope_scaling_mscale": 1.0,
    "rope_scaling_mscale_all_dim": 0.707,
    "max_seq_len": 20_480,
}
CASES: dict[str, ModelConfig] = {
    "qwen3": QWEN3,
    "qwen3 tied": QWEN3.model_copy(update={"tied": True}),
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe, weights as they come": QWEN3_MOE.model_copy(
        update={"norm_topk_prob": False, "tied": True}
    ),
    "v3": DEEPSEEK,
    "v3 yarn": DEEPSEEK.model_copy(update=YARN),
    "v3, no groups, q whole, v wide": DEEPSEEK.model_copy(
        update={
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 0,
            "v_head_dim": 32,
            "norm_topk_prob": False,
        }
    ),
}
DEEPSEEK_V2 = DEEPSEEK.model_copy(
    update={
        "scoring": "softmax",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "shared_experts": 2,
        **YARN,
    }
)


def shared_fields(cfg: ModelConfig) -> dict[str, Any]:
    """Fields whose names Hugging Face's configs share."""
    return {
        "num_hidden_layers": cfg.layers,
        "hidden_size": cfg.dim,
        "num_attention_heads": cfg.heads,
        "vocab_size": cfg.vocab,
        "max_position_embeddings": cfg.max_seq_len,
        "rms_norm_eps": cfg.norm_eps,
        "pad_token_id": None,
        "attn_implementation": "sdpa",
        "experts_implementation": "eager",
    }


def qwen3_config(cfg: DecoderConfig):
    fields = {
        **shared_fields(cfg),
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_size,
        "tie_word_embeddings": cfg.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
    }
    if isinstance(cfg, qwen3.Config):
        return transformers.Qwen3Config(**fields, intermediate_size=cfg.ffn)
    return transformers.Qwen3MoeConfig(
        **fields,
        num_experts=cfg.experts,
        num_experts_per_tok=cfg.top_k,
        moe_intermediate_size=cfg.expert_ffn,
        norm_topk_prob=cfg.norm_topk_prob,
    )


def deepseek_config(cfg: deepseek.Config):
    rope = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if cfg.rope_scaling_factor > 1:
        names = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        rope |= {name: getattr(cfg, f"rope_scaling_{name}") for name in names}
        rope |= {
            "rope_type": "yarn",
            "original_max_position_embeddings": cfg.rope_scaling_original_context,
        }
    fields = {
        **shared_fields(cfg),
        "num_key_value_heads": cfg.heads,
        "intermediate_size": cfg.ffn,
        "first_k_dense_replace": cfg.first_k_dense,
        "moe_intermediate_size": cfg.expert_ffn,
        "n_routed_experts": cfg.experts,
        "n_shared_experts": cfg.shared_experts,
        "num_experts_per_tok": cfg.top_k,
        "routed_scaling_factor": cfg.routed_scaling_factor,
        "q_lora_rank": cfg.q_lora_rank or None,
        "kv_lora_rank": cfg.kv_lora_rank,
        "qk_nope_head_dim": cfg.qk_nope_head_dim,
        "qk_rope_head_dim": cfg.qk_rope_head_dim,
        "v_head_dim": cfg.v_head_dim,
        "rope_parameters": rope,
    }
    if cfg.scoring == "softmax":
        return transformers.DeepseekV2Config(**fields)
    groups = {
        "n_group": cfg.n_group,
        "topk_group": cfg.topk_group,
        "norm_topk_prob": cfg.norm_topk_prob,
    }
    return transformers.DeepseekV3Config(**fields, **groups)


def their_model(cfg: ModelConfig) -> nn.Module:
    config = deepseek_config(cfg) if isinstance(cfg, deepseek.Config) else qwen3_config(cfg)
    return transformers.AutoModelForCausalLM.from_config(config)


def take_casts_out(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    """Let norms and routers of this model compute in float64."""
    kinds = {
        type(module)
        for module in model.modules()
        if type(module).__name__.endswith(("RMSNorm", "Router"))
    }
    assert kinds
    for kind in kinds:
        monkeypatch.setattr(kind, "forward", widened(kind.forward))


@pytest.mark.parametrize("name", CASES)
def test_model_equals_hugging_face_but_for_its_float32_parts(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    theirs = their_model(CASES[name])
    take_casts_out(monkeypatch, theirs)
    compare(CASES[name], theirs, views=views, tolerance=EXACT)


@pytest.mark.parametrize("name", ["qwen3-moe", "v3 yarn"])
def test_model_equals_hugging_face_as_it_is_shipped(name: str):
    theirs = their_model(CASES[name])
    compare(CASES[name], theirs, views=views, tolerance=UNMODIFIED)


def test_deepseek_v2_equals_hugging_face_as_it_is_shipped():
    compare(DEEPSEEK_V2, their_model(DEEPSEEK_V2), views=views, tolerance=V2)


def test_second_next_token_is_predicted_as_by_hugging_faces_layer(monkeypatch: pytest.MonkeyPatch):
    """Loss and every gradient, tied ones summed over both uses."""
    mtp = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(mtp, "MtpLayer"):
        pytest.skip("this transformers has no multi-token prediction")
    cfg = DEEPSEEK.model_copy(update={"mtp_depth": 1, "mtp_loss": 0.7})
    main = their_model(cfg)
    mixed = main.model.layers[-1]
    norm = type(mixed.input_layernorm)
    side = mtp.MtpLayer(main.config, type(mixed), norm, cfg.layers - 1)
    side.apply(main._init_weights)
    theirs = shaken(nn.ModuleDict({"main": main, "side": side}).double())
    take_casts_out(monkeypatch, theirs)
    batch = with_later_targets(make_batch(cfg.vocab))

    blocks = our_blocks(cfg)
    ours = named_parameters(blocks)
    copy_into(ours, mtp_views(tensors_of(theirs), cfg))
    our_loss = forward(blocks, batch)
    our_loss.backward()

    hidden = main.model(input_ids=batch.inputs, use_cache=False).last_hidden_state
    embedded = main.model.embed_tokens(batch.next_inputs)
    turns = main.model.rotary_emb(hidden, batch.positions)
    joined = side(embedded, hidden, turns, None, batch.positions, None)
    loss = summed(main.lm_head(hidden), batch.targets) + 0.7 * summed(
        main.lm_head(joined), batch.later_targets
    )
    loss.backward()
    near(our_loss, loss, "loss", EXACT)
    compare_gradients(ours, mtp_views(gradients_of(theirs), cfg), EXACT)


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def mtp_views(tensors: dict[str, Tensor], cfg: deepseek.Config) -> Views:
    main = {
        name.removeprefix("main."): tensor
        for name, tensor in tensors.items()
        if name.startswith("main.")
    }
    owners = {"tok": "model.embed_tokens", "last_norm": "model.norm", "proj": "lm_head"}
    own = {"x_norm": "hnorm", "next_norm": "enorm", "join": "eh_proj", "norm": "post_norm"}
    return {
        **views(main, cfg),
        **{f"mtp0.{name}.weight": main[f"{owner}.weight"] for name, owner in owners.items()},
        **{f"mtp0.{name}.weight": tensors[f"side.{their}.weight"] for name, their in own.items()},
        **layer_views(tensors, "mtp0.layer", "side.mtp_block"),
    }


@pytest.mark.parametrize("preset", ["deepseek-16b", "deepseek-v3-671b"])
def test_rotation_of_each_preset_is_hugging_faces_bit_for_bit_along_its_whole_context(preset: str):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3RotaryEmbedding,
    )  # late: may be missing

    cfg = PRESETS[preset].model_copy(update={"layers": 1, "scoring": "sigmoid"})
    with torch.device("meta"):
        attn = deepseek_blocks(cfg)["layer0"].attn
    positions = torch.tensor([[0, 1, 257, 4095, 4096], [16_387, 32_771, 65_537, 163_838, 163_839]])
    deepseek_v3_rotary_embedding = DeepseekV3RotaryEmbedding(deepseek_config(cfg))
    theirs = deepseek_v3_rotary_embedding(torch.empty(0), positions)
    for ours, both_halves in zip(attn.rope(positions), theirs, strict=True):
        assert torch.equal(ours.squeeze(-2).repeat(1, 1, 2), both_halves)
