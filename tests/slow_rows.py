"""Rows of parametrised tests that run in `make slow` and `make matrix` alone, and the marking of them.

A row is here if the rows that stay take the same paths through the code, on fewer ranks or in less
time. The only row that finds a fault stays in `make test`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SLOW_ROWS: dict[str, tuple[str, ...]] = {
    "checkpoint/test_bit_flips.py::test_a_thousand_of_a_thousand_flipped_bits_of_every_kind_are_found": (),
    "checkpoint/test_digests.py::test_a_proof_saves_pieces_that_replicas_share": (),
    "checkpoint/test_digests.py::test_a_wrong_share_of_a_replica_is_rejected_by_every_layout": (
        "tp2",
    ),
    "checkpoint/test_layouts.py::test_what_one_of_four_layouts_saved_this_one_loads_to_the_last_bit": (
        "deepseek-one-1f1b-m1",
        "deepseek-zero3-dp2_tp2-1f1b-m1",
    ),
    "checkpoint/test_optimizer_states.py::test_a_resume_on_the_same_layout_is_exact_and_on_another_one_equal": (
        "lion",
        "adafactor",
        "muon",
    ),
    "checkpoint/test_restore.py::test_every_entry_is_written_by_one_rank": (
        "deepseek-zero2-ring-l2-dp2_cp2-1f1b-m4",
    ),
    "checkpoint/test_restore.py::test_masters_are_stored_and_compute_copies_follow_them": ("1",),
    "checkpoint/test_resume.py::test_ten_steps_are_five_and_five_to_the_last_bit": (
        "float16",
        "dp3",
        "dp4 zero 3",
        "sgd",
    ),
    "checkpoint/test_transfer.py::test_every_host_gets_a_copy_to_resume_from": (
        "0-dp4",
        "3-pp2 tp2",
    ),
    "checkpoint/test_transfer.py::test_one_checkpoint_of_two_hosts_is_on_the_host_of_rank_0": (
        "4194304",
    ),
    "comm/test_compiled_calls.py::test_compiled_code_makes_the_calls_of_code_as_written": (
        "two_branches-tp2",
        "sequence_region-tp2",
        "uneven-tp2",
    ),
    "comm/test_run_ranks.py::test_no_process_is_left_behind": ("time out",),
    "commands/test_doctor.py::test_a_command_without_torch_says_how_to_install_it": ("prove",),
    "commands/test_memory_before.py::test_the_bound_is_below_what_ranks_hold": (
        "pp2,dp2-0",
        "pp2,dp2-1",
        "pp2,dp2-2",
        "dp2,tp2-0",
        "dp2,tp2-1",
        "dp2,tp2-2",
        "dp4-1",
        "dp4-2",
        "dp4-0",
    ),
    "commands/test_moved_runs.py::test_a_moved_run_is_resumed_where_it_is_now": (
        "run.toml --resume auto",
    ),
    "commands/test_sweep.py::test_a_stop_ends_the_run_under_way_and_starts_no_further_one": (
        "15-75",
    ),
    "data/test_packing.py::test_packed_documents_train_alike_on_one_device_and_on_many": (
        "--mesh cp2 --parallel.context allgather",
    ),
    "device/test_gpu_plan.py::test_the_rehearsal_passes_and_prints_a_report": (),
    "device/test_profiled_step.py::test_nvtx_ranges_nest_and_name_steps_actions_blocks_and_calls": (
        "pp2 --pipeline.schedule zero_bubble",
    ),
    "device/test_profiled_step.py::test_times_are_those_of_events_for_which_no_step_waits": (
        "pp2 --pipeline.schedule zero_bubble",
    ),
    "docs/test_api.py::test_the_documentation_builds_offline_without_warnings": (),
    "docs/test_extend.py::test_an_extension_is_one_file_or_folder_and_its_commands_succeed": (
        "A schedule",
    ),
    "examples/test_examples.py::test_example_shows_its_lesson_and_equals_one_process": (
        "tensor_parallel_mlp.py",
        "ring_attention.py",
    ),
    "generate/test_after_training.py::test_a_model_on_its_training_layout_generates_the_plain_models_text": (
        "llama3-cp2 tp2-ring",
        "gpt2-cp2 tp2-allgather True",
    ),
    "generate/test_after_training.py::test_texts_between_steps_do_not_change_the_training_by_a_bit": (
        "dp2",
        "cp2 tp2 with ring attention",
        "adapters",
        "experts",
        "ZeRO 3",
    ),
    "generate/test_cached.py::test_every_layout_generates_the_tokens_of_one_device": (
        "qwen3-moe-tp2 ep4",
        "qwen2-pp2 tp2",
        "gemma3-pp2 tp2",
    ),
    "generate/test_command.py::test_every_layout_prints_the_same": ("qwen3-moe-ep2",),
    "generate/test_conversation.py::test_an_answer_is_what_generate_makes_of_the_rendered_conversation": (
        "tp2-sampling1",
    ),
    "generate/test_load_model.py::test_every_rank_reads_its_own_shards_only": ("deepseek-ep2 tp2",),
    "gloo/test_conformance.py::test_processes_conform_without_a_warning": ("dp2",),
    "gloo/test_failures.py::test_a_missing_rank_is_named_within_the_time_out": ("4",),
    "gloo/test_late_ranks.py::test_a_late_rank_is_reported_once_with_collective_group_and_coordinates": (
        "unchecked_all_reduce-False",
    ),
    "gloo/test_layouts.py::test_layout_in_processes_computes_what_one_device_computes": (
        "llama3-sp-gqa-pp2_dp2_tp2-1f1b-m4",
        "llama3-pp2_dp2_tp2-interleaved2-m4",
        "gpt2-dp3-1f1b-m4",
    ),
    "gloo/test_memory.py::test_a_layer_saves_activations_of_its_sequence_shard_under_cp_and_recompute": (
        "cp4-selective",
        "cp4-none",
        "cp2-full",
        "cp2-none",
        "-selective",
        "-full",
    ),
    "gloo/test_memory.py::test_the_memory_of_a_rank_between_steps_equals_the_formula": (
        "mixed-1",
        "mixed-2",
        "mixed-0",
    ),
    "gloo/test_recovery.py::test_a_rank_killed_at_the_start_is_started_again": (),
    "gloo/test_recovery.py::test_a_run_with_a_fault_ends_with_the_bits_of_one_without": (
        "dp3-zero3-killed-memory",
        "dp3-zero3-stopped-memory",
    ),
    "gloo/test_shared_memory.py::test_reductions_have_the_bits_of_rank_threads": ("dp2",),
    "gloo/test_signals.py::test_a_signal_to_the_launcher_leaves_nothing_behind": (
        "SIGQUIT-save",
        "SIGHUP-step",
    ),
    "hf/test_adapters.py::test_peft_computes_the_same_with_the_adapters": (
        "gemma3-()",
        "qwen2-()",
        "mistral-()",
        "llama3-()",
    ),
    "hf/test_folders_of_transformers.py::test_advice_of_transformers_on_a_config_is_not_shown": (),
    "hf/test_lora_runs.py::test_commands_from_a_base_to_both_exports": (),
    "hf/test_lora_runs.py::test_it_continues_on_any_layout": (
        "llama3-zero1-l2-dp3_tp2-1f1b-m1",
        "llama3-sp-l2-pp2_tp2-1f1b-m3",
    ),
    "hf/test_lora_runs.py::test_the_base_is_stored_in_the_type_of_compute": ("0",),
    "hf/test_text_part.py::test_the_text_part_is_imported_and_exported": ("gemma4",),
    "hf/test_training.py::test_three_steps_on_a_layout_are_three_steps_of_transformers": (
        "qwen2",
        "llama3 tied",
        "gemma3",
        "gpt2",
    ),
    "matrix/test_bfloat16.py::test_losses_of_a_layout_lie_within_the_spread_of_orders_on_one_device": (
        "float32-bfloat16-float32-llama3-zero2-pp2_dp2_tp2-1f1b-m4",
    ),
    "matrix/test_compile.py::test_compiled_blocks_compute_what_one_device_computes": (
        "llama3-zero3-docs-l2-dp2-1f1b-m1",
        "llama3-ring-l2-cp2-1f1b-m1",
    ),
    "matrix/test_dropout.py::test_drop_out_is_that_of_one_device": (
        "gpt2-full-ring-l2-drop0.2-dp2_cp2-1f1b-m4",
        "gpt2-sp-ring-l2-drop0.2-cp2_tp2-1f1b-m4",
        "gpt2-l2-drop0.2-pp2_dp2_tp2-1f1b-m4",
        "gpt2-allgather-docs-l2-drop0.2-cp2-1f1b-m4",
        "deepseek-zero3-ring-drop0.3-ep2_cp2-1f1b-m4",
        "gpt2-l2-drop0.2-tp2-1f1b-m4",
        "gpt2-l2-drop0.2-dp2-1f1b-m4",
        "gpt2-l2-drop0.2-pp2-1f1b-m4",
        "gpt2-selective-l2-drop0.2-dp2_tp2-1f1b-m4",
        "gpt2-ring-l2-drop0.2-cp2-1f1b-m4",
        "gpt2-full-l2-drop0.2-pp2-zero_bubble-m4",
        "gpt2-l2-drop0.2-dp2-1f1b-m1x4",
        "gpt2-ulysses-l2-drop0.2-cp2-1f1b-m4",
        "gpt2-l4-drop0.2-pp2-zbv2-m4",
    ),
    "matrix/test_dropout.py::test_noise_on_embeddings_is_that_of_one_device": (
        "gpt2-sp-allgather-docs-l2-drop0.2-noise5-cp2_tp2-1f1b-m4",
        "gemma3-docs-l2-noise5-tp2-1f1b-m4",
    ),
    "matrix/test_experts.py::test_mixture_computes_what_one_device_computes": (
        "deepseek-sp-ring-l2-ep2_cp2_tp2-1f1b-m2",
        "deepseek-zero1-l2-pp2_dp2_ep2-1f1b-m4",
        "deepseek-ring-l2-cp2-1f1b-m4",
        "deepseek-l2-one-1f1b-m4",
    ),
    "matrix/test_families.py::test_family_computes_what_one_device_computes": (
        "mistral-zero2-full-dp2-1f1b-m4",
        "qwen2-zero1-selective-dp2-1f1b-m4",
        "gemma3-tp2-1f1b-m4",
    ),
    "matrix/test_matrix.py::test_layout_computes_what_one_device_computes": (
        "gpt2-pp2_dp2_tp2-interleaved2-m4",
        "llama3-sp-tp8-1f1b-m4",
        "gpt2-sp-tp2-1f1b-m4",
        "llama3-dp3-1f1b-m4",
        "gpt2-one-1f1b-m4",
        "llama3-sp-gqa-tp4-1f1b-m4",
    ),
    "matrix/test_matrix.py::test_sampled_layout_computes_what_one_device_computes": (),
    "matrix/test_mutants.py::test_every_mutant_has_a_run_of_a_user_which_is_reduced": (),
    "matrix/test_mutants.py::test_proof_reports_the_mutant_with_its_block_and_axis": (
        "targets_are_shifted_twice",
    ),
    "matrix/test_recompute.py::test_recomputation_computes_what_one_device_computes": (
        "qwen3-moe-zero3-full-ring-l2-ep2_cp2-1f1b-m4",
        "llama3-full-ring-docs-l2-cp2_tp2-1f1b-m4",
        "qwen3-zero3-full-l2-dp2-1f1b-m4",
        "llama3-gqa-zero2-selective-l2-pp2_tp2-1f1b-m4",
        "gpt2-zero3-selective-l2-pp2_dp2-zero_bubble-m4",
        "llama3-zero3-full-l4-pp2_dp2-interleaved2-m4",
        "llama3-sp-full-l4-pp2_tp2-zbv2-m4",
        "deepseek-zero1-selective-l2-ep2_tp2-1f1b-m4",
        "llama3-zero3-selective-ulysses-l2-cp2_dp2-1f1b-m4",
    ),
    "matrix/test_zero.py::test_zero_computes_what_one_device_computes": (
        "llama3-zero2-ring-docs-l2-dp2_fsdp2_cp2-1f1b-m4",
        "llama3-sp-zero3-l4-pp2_dp2_tp2-interleaved2-m4",
        "llama3-sp-zero2-l2-tp2-1f1b-m4",
        "gpt2-sp-zero1-l2-dp2_tp2-1f1b-m4",
        "llama3-gqa-zero1-l2-pp2_dp3-gpipe-m4",
        "gpt2-zero1-pp2_dp2-zbv2-m2",
        "qwen3-moe-zero3-l2-dp2_fsdp2_ep2-1f1b-m2",
        "llama3-sp-zero1-l4-pp2_dp2_tp2-interleaved2-m4",
        "llama3-gqa-zero1-l2-dp3-1f1b-m4",
        "gpt2-zero2-l2-pp2_dp2-1f1b-m4",
        "llama3-gqa-zero2-l2-pp2_dp3-gpipe-m4",
        "llama3-zero1-l2-dp2_fsdp2-1f1b-m4",
        "gpt2-sp-zero2-l2-dp2_tp2-1f1b-m4",
        "llama3-sp-zero3-l2-tp2-1f1b-m4",
        "llama3-gqa-zero3-l2-dp3-1f1b-m4",
        "llama3-gqa-zero1-l2-pp2_dp2_fsdp2-1f1b-m4",
    ),
    "models/test_transformers.py::test_a_layout_computes_what_one_device_does": (
        "phi-keys7",
        "llama-keys4",
        "gpt2-keys3",
        "gpt2-keys8",
        "bert-keys9",
        "mixtral-keys10",
        "phi3-keys11",
        "axk2-keys12",
        "codegen-keys13",
        "qwen2-keys14",
        "camembert-keys18",
        "mamba2-keys19",
        "lfm2_moe-keys21",
        "camembert-keys22",
        "mpt-keys24",
        "mixtral-keys2",
        "qwen2_moe-keys17",
        "qwen3_moe-keys6",
        "gpt_neo-keys16",
        "bart-keys23",
        "gemma4_text-keys26",
        "zamba2-keys28",
        "phimoe-keys31",
        "llama-keys0",
        "gpt2-keys5",
        "bloom-keys20",
        "mamba2-keys15",
        "nemotron_h-keys30",
        "gpt_neox-keys41",
        "granitemoehybrid-keys43",
        "gpt2-keys44",
    ),
    "models/test_transformers.py::test_blocks_gather_no_sequence_of_which_tp_ranks_hold_parts": (),
    "models/test_transformers.py::test_clipped_parameters_are_said_and_kept_in_the_config": (),
    "models/test_transformers.py::test_loss_and_gradients_are_those_of_transformers": (
        "deepseek_v4",
    ),
    "models/test_transformers.py::test_the_types_of_a_step_are_known": (
        "qwen3_next-cp2",
        "mixtral-tp2 --parallel.sequence True",
        "mixtral-cp2",
        "falcon_h1-cp2",
        "mixtral-tp2",
        "llama4_text-dp2",
    ),
    "oracle/test_finetuning.py::test_conversations_are_trained_on_as_transformers_with_trl_masks": (
        '--mesh "dp2 tp2"',
        "",
    ),
    "oracle/test_finetuning.py::test_dpo_equals_a_plain_program": (
        '--mesh "cp2 tp2" --parallel.sequence True',
        '--mesh "dp2 tp2"',
        "--mesh dp2 --deterministic True",
        "--mesh cp2",
        "--mesh dp2 --parallel.zero 3",
    ),
    "oracle/test_finetuning.py::test_kto_equals_a_plain_program": (
        "--mesh dp2",
        "--mesh dp2 --deterministic True",
        "--mesh pp2 --pipeline.schedule 1f1b",
        "--mesh tp2 --parallel.sequence True",
        "--mesh cp2",
        "--mesh dp2 --parallel.zero 3",
    ),
    "oracle/test_finetuning.py::test_kto_resumes_on_another_layout_and_is_evaluated": (),
    "oracle/test_finetuning.py::test_other_losses_of_pairs_equal_a_plain_program": (
        "sigmoid-dp2 cp2",
        "hinge-dp2 cp2",
        "orpo-dp2 cp2",
        "simpo-dp2 cp2",
        "sigmoid-tp2",
        "hinge-tp2",
        "ipo-tp2",
        "simpo-tp2",
        "sigmoid-pp2",
        "ipo-pp2",
        "orpo-pp2",
        "hinge-pp2",
        "orpo-tp2",
        "ipo-dp2 cp2",
    ),
    "oracle/test_huggingface_generate.py::test_greedy_text_is_hugging_faces": ("llama3 tied-tp2",),
    "oracle/test_scores.py::test_scores_are_trained_as_with_transformers": (
        'classify---mesh "dp2 tp2" --parallel.sequence True',
        "classify---mesh cp2",
        "reward---mesh dp2 --parallel.zero 3",
        "reward---mesh pp2",
        "reward---mesh cp2",
        "classify---mesh pp2",
        'classify---model.name hf:llama --mesh "tp2 pp2" --parallel.sequence True',
        "classify---model.name hf:llama --mesh cp2",
        "reward---model.name hf:llama --mesh cp2",
        'reward---model.name hf:llama --mesh "tp2 pp2" --parallel.sequence True',
    ),
    "oracle/test_trl.py::test_losses_are_those_of_trl": (
        "sft---mesh dp2",
        "sft_packed---mesh dp2",
        "sft_texts---mesh dp2",
        "sft_texts---mesh 'cp2 tp2'",
        "dpo---mesh dp2",
        "dpo_texts---mesh dp2",
        "dpo_texts---mesh 'cp2 tp2'",
        "ipo---mesh dp2",
        "ipo---mesh 'cp2 tp2'",
        "kto---mesh 'cp2 tp2'",
        "dpo---mesh 'cp2 tp2'",
        "dpo_texts-",
        "ipo-",
        "sft---mesh 'cp2 tp2'",
        "kto---mesh dp2",
    ),
    "parallel/test_attention_layouts.py::test_layout_trains_a_model_with_attention_features_as_one_device_does": (
        "llama3-ring-docs-l2-pp2_cp2-1f1b-m4",
        "llama3-l2-tp2-1f1b-m2",
        "llama3-ulysses-docs-l2-cp4-1f1b-m2",
        "llama3-allgather-l2-cp2-1f1b-m2",
        "llama3-sp-l2-tp2-1f1b-m2",
        "llama3-l2-pp2-1f1b-m4",
        "llama3-zero3-l2-dp2-1f1b-m2",
    ),
    "parallel/test_chunked_losses.py::test_layouts_equal_one_device": (
        "--mesh dp2 --model.name hf:qwen2",
        "--mesh tp2 --lora.rank 2 --lora.targets proj",
        "--mesh tp2 --model.name deepseek --model.mtp_depth 1",
        "--mesh tp2 --parallel.sequence True",
    ),
    "parallel/test_cp.py::test_layout_with_cp_computes_what_one_device_computes": (
        "gemma3-sp-ring-cp2_tp2-1f1b-m4",
        "mistral-allgather-cp4-1f1b-m4",
        "llama3-ring-l4-pp2_cp2-zbv2-m4",
        "llama3-sp-ring-docs-l4-pp2_dp2_cp2_tp2-interleaved2-m2",
        "mistral-ring-docs-cp2-1f1b-m4",
    ),
    "parallel/test_equal_blocks.py::test_findings_are_those_of_a_trace_of_every_block": (
        "mistral-False",
        "llama3-True",
    ),
    "parallel/test_fixed_order.py::test_a_tied_weight_of_two_stages_of_a_rank_has_the_same_bits": (
        "4-0",
        "2-0",
        "1-2",
    ),
    "parallel/test_fixed_order.py::test_copies_of_states_that_other_axes_shard_have_the_same_bits": (
        "cp2-llama3-1",
    ),
    "parallel/test_fixed_order.py::test_data_ranks_and_zero_stages_do_not_change_a_bit": (
        "8-0",
        "2-0",
    ),
    "parallel/test_fixed_order.py::test_other_axes_keep_the_bits_of_each_other": ("pp2-llama3-1",),
    "parallel/test_fp8.py::test_a_layout_with_linears_in_fp8_is_equal_in_float64": (
        '--mesh "dp2 tp2" --parallel.zero 3 --parallel.sequence True --parallel.recompute full',
    ),
    "parallel/test_lazy_blocks.py::test_a_rank_holds_the_same_as_from_all_blocks": (
        "qwen3-lora",
        "mistral-lora",
        "qwen3-plain",
        "mistral-plain",
        "deepseek-plain",
        "deepseek-lora",
        "qwen2-lora",
        "qwen3-moe-plain",
    ),
    "parallel/test_lora.py::test_layout_computes_what_one_device_computes": (
        "llama3-sp-gqa-zero1-l2-pp2_dp2_tp2-1f1b-m2",
        "llama3-zero3-selective-l2-pp2_dp2-zero_bubble-m2",
        "gpt2-zero3-l2-pp2_dp2-1f1b-m2",
        "deepseek-l2-ep2-1f1b-m2",
    ),
    "parallel/test_lora.py::test_magnitudes_are_those_of_one_device": (
        "llama3-sp-gqa-zero1-l2-pp2_dp2_tp2-1f1b-m2",
        "qwen2-ring-l2-cp2_tp2-1f1b-m2",
        "deepseek-l2-ep2-1f1b-m2",
    ),
    "parallel/test_lora.py::test_mixed_precision_holds_the_base_in_the_type_of_compute": (
        "float32",
    ),
    "parallel/test_lora.py::test_some_linears_alone_and_stages_where_nothing_is_trained": (
        "gpt2-l2-tp2-1f1b-m2-('attn.o', 'down')",
    ),
    "parallel/test_offload.py::test_offloaded_steps_have_the_bits_of_plain_ones": (
        "llama3-pp2-interleaved2-m4",
        "deepseek-ep2-1f1b-m4",
        "llama3-pp2-zero_bubble-m4",
        "llama3-sp-zero1-pp2_tp2-1f1b-m4",
    ),
    "parallel/test_player.py::test_a_tied_parameter_is_reduced_when_the_later_of_its_two_stages_is_done": (
        "1",
    ),
    "parallel/test_player.py::test_any_table_computes_what_one_device_computes": ("2", "3"),
    "parallel/test_player.py::test_split_schedules_compute_what_one_device_computes": (
        "llama3-sp-ring-docs-l4-pp2_cp2_tp2-zbv2-m3",
        "gpt2-l4-pp2-zbv2-m5",
        "llama3-zero2-l2-dp3-zero_bubble-m4",
    ),
    "parallel/test_quantized.py::test_a_fault_of_the_blocks_is_a_difference": (
        "levels_of_a_quantized_matrix_are_off_by_one",
    ),
    "parallel/test_quantized.py::test_a_run_continues_on_any_layout": (
        "llama3-zero1-l2-dp3_tp2-1f1b-m1",
    ),
    "parallel/test_quantized.py::test_layout_computes_what_one_device_computes": (
        "llama3-zero3-l2-dp2-1f1b-m2",
        "llama3-ring-l2-cp2-1f1b-m2",
    ),
    "parallel/test_quantized.py::test_scales_in_8_bits_are_those_of_one_device": (
        "llama3-gqa-zero3-l2-dp3_tp2-1f1b-m2",
    ),
    "parallel/test_quantized_transformers.py::test_tensor_parallelism_computes_what_one_device_does": (
        "hf:phi3",
        "hf:llama",
    ),
    "parallel/test_sharding_trace.py::test_entries_are_right_under_recomputation": (
        "layer used twice-full",
        "parallel block-selective",
    ),
    "parallel/test_sharding_trace.py::test_entries_are_right_with_a_split_backward_and_several_micro_batches_in_flight": (
        "fused qkv",
        "inline MLP",
    ),
    "parallel/test_shared_heads.py::test_layouts_with_more_ranks_than_heads_of_keys_equal_one_device": (
        "qwen2-sp-ring-tp4_cp2-1f1b-m2",
        "mistral-pp2_tp4-zero_bubble-m2",
    ),
    "parallel/test_sites.py::test_sites_equal_a_plain_program_of_the_same_algorithm": (
        "bfloat16 delayed",
    ),
    "parallel/test_traffic.py::test_bytes_of_a_step_are_those_of_the_formulas": (
        "llama3-zero3-ulysses-docs-cp2_tp2_dp2-1f1b-m1",
        "llama3-sp-zero1-pp2_dp2_tp2-1f1b-m2",
        "llama3-sp-gqa-ring-cp2_tp2-1f1b-m2",
        "llama3-tp2-1f1b-m3",
    ),
    "parallel/test_traffic.py::test_mixed_precision_gathers_in_compute_and_reduces_in_reduce": (
        "1",
        "2",
        "0",
    ),
    "parallel/test_zero.py::test_a_zero_3_model_is_initialised_group_by_group": ("dp4",),
    "plan/test_search.py::test_layers_gather_two_of_them_whatever_the_vocabulary_is": ("512",),
    "plan/test_search.py::test_on_many_nodes_states_are_sharded_inside_of_each": (),
    "planner/test_certificate.py::test_a_healthy_layout_has_no_finding": (
        "qwen2-l2-dp2_tp2-1f1b-m1x2",
        "llama3-l2-dp2_tp2-1f1b-m4",
        "qwen3-moe-zero1-l2-dp2_ep2-1f1b-m2",
        "llama3-sp-ring-l2-dp2_cp2_tp2-1f1b-m4",
        "llama3-selective-l2-pp2_tp2-zero_bubble_h2-m4",
        "gemma3-l2-tp2-1f1b-m1",
        "llama3-allgather-l2-cp4-1f1b-m4",
        "llama3-gqa-zero2-full-l2-dp4-1f1b-m4",
        "gpt2-ulysses-l2-pp2_cp2-1f1b-m2",
        "deepseek-sp-ring-docs-l2-cp2_tp2-1f1b-m1",
    ),
    "planner/test_certificate.py::test_a_model_of_a_user_has_no_finding": (
        "latents.py-dp2",
        "shared_layer.py-dp2 tp2",
        "diffusion.py-dp2 tp2",
        "encoder_decoder.py-pp2 dp2 tp2",
    ),
    "planner/test_certificate.py::test_code_of_transformers_has_no_finding": (
        "hf:kimi_linear",
        "hf:qwen3_next",
    ),
    "planner/test_certificate.py::test_losses_of_pairs_have_no_finding": (
        "hinge",
        "simpo",
        "ipo",
        "orpo",
        "kto",
    ),
    "planner/test_certificate.py::test_what_has_no_type_is_the_only_finding": (
        "dp2-loss.proj: not typed: aten.index of a sharded dim (axis dp)",
    ),
    "planner/test_certificate_sweep.py::test_generated_layouts_have_no_finding": ("101-2",),
    "planner/test_order_costs.py::test_all_permutations_are_tried": (),
    "planner/test_order_costs.py::test_another_order_costs_what_a_run_with_that_order_does": (
        "tp2 pp2 dp2-pp2 dp2 tp2",
        "cp2 dp2 tp2-tp2 cp2 dp2",
    ),
    "planner/test_order_costs.py::test_explain_says_what_a_bad_order_costs": (),
    "planner/test_recompute_choice.py::test_a_run_records_its_choice_and_a_resume_keeps_it_while_it_fits": (),
    "planner/test_recompute_choice.py::test_compiled_blocks_recompute_as_others_do": (),
    "planner/test_recompute_choice.py::test_early_ranks_of_1f1b_recompute_more": (),
    "planner/test_repeated.py::test_buckets_of_several_blocks_are_measured_with_all_blocks": (
        "zero_bubble",
    ),
    "planner/test_site_costs.py::test_bytes_equal_those_of_a_real_run": ("float32",),
    "planner/test_step_costs.py::test_the_meta_device_shows_what_a_real_step_does": (
        "pp2 dp2 zero1",
        "one rank",
        "dp2 zero3 selective bfloat16",
        "pp2 zbv",
        "window in blocks",
    ),
    "planner/test_step_costs.py::test_the_peak_is_that_of_the_allocator": ("one rank",),
    "planner/test_step_costs.py::test_three_micro_batches_stand_for_all": (
        "pp2 dp2 zero2 interleaved",
    ),
    "profiler/test_profiled_runs.py::test_a_profiler_of_torch_sees_named_ranges": (),
    "profiler/test_profiled_runs.py::test_records_cover_the_steps_in_order_and_sum_to_what_they_took": (
        "tp2 cp2",
        "pp2 --pipeline.schedule zero_bubble",
        "dp2 --parallel.zero 3",
    ),
    "programs_of_others/test_programs.py::test_a_program_is_rejected_in_one_line": (
        "word_language_model_transformer-cp2",
        "mamba_minimal-cp2",
        "mingpt-cp2",
        "x_transformers-tp2 sequence",
        "word_language_model_transformer-tp2 sequence",
    ),
    "programs_of_others/test_programs.py::test_some_programs_equal_one_device": (
        "diffusion_unet-dp2 zero 3",
        "mingpt-tp2",
        "t5-pp2 zero_bubble",
        "nanochat-cp2",
        "x_transformers-generation",
        "resnet-dp2 zero 3",
        "bert-dp2 zero 3",
        "nanogpt-tp2 sequence",
    ),
    "prove/live_step/test_kept_graphs.py::test_a_block_that_recomputes_parts_in_its_backward_is_compared": (
        "dp2",
    ),
    "prove/live_step/test_kept_graphs.py::test_a_step_is_equal_with_any_room_for_graphs": (
        "1000000000",
    ),
    "prove/live_step/test_live_step.py::test_a_gradient_that_is_wrong_on_one_rank_names_rank_and_axis": (
        "words2",
    ),
    "prove/live_step/test_live_step.py::test_a_healthy_step_is_equal": (
        '--mesh "pp2 tp2" --parallel.zero 1',
        '--mesh "site2 dp2" --data.packing documents',
        '--mesh "dp2 tp2" --model.name gpt2 --model.layers 2 --model.vocab 257 --deterministic True',
        "--mesh dp2 --parallel.zero 3 --parallel.recompute full --batch.micro_size 2",
    ),
    "prove/live_step/test_live_step.py::test_a_step_on_pairs_is_equal": ("ipo",),
    "prove/live_step/test_live_step.py::test_steps_on_labelled_answers_are_equal": (
        "words3",
        "words2",
        "words0",
    ),
    "prove/live_step/test_live_step.py::test_updates_are_compared_by_formula": (
        '--mesh "pp2 dp2" --parallel.zero 1 --optim.name sgd --optim.warmup 0-21',
        "--mesh dp2 --parallel.zero 2 --optim.name lion-21",
    ),
    "prove/parts/test_generation.py::test_a_model_without_caches_reads_whole_texts": (
        "two_streams",
    ),
    "prove/test_against_transformers.py::test_a_fault_on_both_sides_of_the_proof_is_named": (
        "gemma3, starting values",
        "gpt2, starting values",
        "qwen2, scale",
    ),
    "prove/test_against_transformers.py::test_a_healthy_layout_is_equal_to_transformers": (
        "mistral",
        "qwen3",
        "deepseek",
    ),
    "prove/test_against_transformers.py::test_stored_weights_are_read_by_transformers_itself": (
        "--data.seq_len 16 --batch.global_size 4 --full",
    ),
    "prove/test_inner_precision.py::test_a_float32_cast_inside_float64_is_no_difference": ("dp2",),
    "prove/test_preferences.py::test_layouts_of_other_losses_are_equal": (
        "ipo-pp2",
        "hinge-tp2",
        "hinge-pp2",
        "ipo-tp2",
        "ipo-dp2 cp2",
        "orpo-pp2",
        "orpo-tp2",
        "sigmoid-pp2",
        "sigmoid-dp2 cp2",
        "sigmoid-tp2",
        "hinge-dp2 cp2",
        "simpo-dp2 cp2",
        "simpo-tp2",
        "kto-tp2",
        "kto-dp2 cp2",
        "orpo-dp2 cp2",
    ),
    "prove/test_preferences.py::test_layouts_of_preference_pairs_are_equal": ("cp2 tp2",),
    "prove/test_preferences.py::test_layouts_of_scored_texts_are_equal": (
        "--loss reward --mesh 'cp2 tp2'",
    ),
    "prove/test_preferences.py::test_losses_without_a_reference_model_evaluate_none": ("simpo",),
    "prove/test_preferences.py::test_means_over_this_ranks_targets_are_found": (
        "simpo-loss",
        "hinge-",
        "ipo-backward",
    ),
    "prove/test_preferences.py::test_models_with_batch_norm_are_equal": ("ipo",),
    "prove/test_preferences.py::test_rounding_of_large_margins_is_no_difference": (),
    "prove/test_rows.py::test_a_user_model_keeps_its_vocabulary_and_the_length_of_the_run": (),
    "report/test_report.py::test_a_page_of_100_000_steps_stays_below_a_megabyte": (),
    "run/test_double_launch.py::test_jobs_on_one_port_neither_mix_nor_hang": ("2",),
    "run/test_folder_lock.py::test_one_of_several_processes_takes_a_stale_lock": ("no flock",),
    "run/test_launch.py::test_a_signal_to_the_command_leaves_no_process": ("sigterm", "ctrl-c"),
    "run/test_rank_status.py::test_a_reported_run_computes_the_same_bits_and_reports_where_it_is": (
        "pp2 tp2",
    ),
    "schedule/test_lower.py::test_no_receive_is_posted_late_a_program_takes_no_longer_than_the_table_itself": (
        "0.25",
    ),
    "schedule/test_simulate.py::test_the_bubble_is_exactly_the_formula": ("interleaved-some",),
    "selftest/test_rerouting.py::test_a_flipped_bias_is_no_difference_in_16_bits": (),
    "selftest/test_sweep.py::test_a_layout_is_proved_and_its_steps_are_compared": (),
    "test_bad_input.py::test_invalid_input_ends_a_process_before_torch_is_imported": (
        "output below a file-env3",
        "port taken-env2",
        "token beyond vocabulary-env1",
    ),
    "test_python_api.py::test_a_proof_is_a_record_with_its_bounds_and_the_first_difference": (),
    "train/test_best.py::test_eval_finds_the_loss_of_the_run_on_any_layout": ("--mesh dp2",),
    "train/test_block_stats.py::test_every_layout_measures_what_one_device_measures": (
        "tp2",
        "pp2",
        "ZeRO 1",
        "ZeRO 2",
        "tp2, in a fixed order",
        "recomputed",
    ),
    "train/test_block_stats.py::test_the_norms_of_the_blocks_make_the_norm_of_the_step": (
        "tied",
        "adapters",
    ),
    "train/test_block_stats.py::test_tied_parameters_experts_and_adapters_count_once": (
        "tied-tp2",
        "experts-pp2 ep2",
    ),
    "train/test_digest.py::test_a_replica_that_differs_is_named_or_both_of_two": (
        "dp3 tp2, zero 1-compute/layer0.attn.q-ranks5",
        "dp2 tp2-model/layer0.attn.q-ranks3",
    ),
    "train/test_digest.py::test_replicas_of_a_correct_run_agree_and_nothing_changes_between_updates": (
        "dp3 tp2, zero 1",
        "dp2 cp2, zero 2",
    ),
    "train/test_evaluate.py::test_a_checkpoint_has_the_validation_loss_of_its_run": ("fp8",),
    "train/test_evaluate.py::test_the_loss_is_the_same_under_any_layout": (
        "words4",
        "--mesh tp2 --parallel.sequence True",
        "--mesh cp2 --parallel.zero 3",
    ),
    "train/test_event_log.py::test_a_run_killed_while_it_replaces_its_config_has_a_whole_one": (
        "False",
    ),
    "train/test_guard.py::test_a_rolled_back_run_equals_one_device_without_the_samples_also_after_a_resume": (
        "dp2 tp2, ZeRO 1",
        "one rank",
    ),
    "train/test_guard.py::test_a_run_that_fails_again_and_again_stops_and_saves_nothing_bad": (
        "skip",
    ),
    "train/test_loss_scale.py::test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale": (
        "gpt2-pp2_tp2-1f1b-m4",
    ),
    "train/test_loss_scale.py::test_every_zero_stage_trains_the_same_masters": (
        "float32-float16-float32",
        "float32-bfloat16-bfloat16",
    ),
    "train/test_loss_scale.py::test_float16_logs_the_norm_and_loss_of_the_model_not_of_its_scaled_gradients": (
        "llama3-zero3-dp2_tp2-1f1b-m2",
    ),
    "train/test_optimizer_contract.py::test_a_users_class_of_matrices_is_exact_on_layouts": (
        "Scaled",
    ),
    "train/test_optimizer_contract.py::test_a_users_elementwise_class_is_exact_on_layouts": (
        "pp2 tp2",
    ),
    "train/test_optimizer_layouts.py::test_layout_updates_as_one_device_does": (
        "dp2 ep2 tp2 zero2-muon",
        "pp2 dp2 tp2-muon",
        "dp2 tp2 zero3-lion",
        "tp2-muon",
        "dp2 tp2 zero3-adafactor",
        "tp2 sp-muon",
        "ep2-adafactor",
        "tp2-adafactor",
        "dp2 zero3-muon",
        "dp2 zero2-muon",
        "cp2-muon",
        "pp2-adamw 8bit",
        "tp2-adamw 8bit",
        "ep2-adamw 8bit",
        "ep2-muon",
        "dp2 tp2 zero3-muon 8bit",
        "dp2 zero1-adamw 8bit",
        "dp2 zero2-adamw 8bit",
        "dp2 zero1-muon",
    ),
    "train/test_rewards.py::test_rewards_do_not_depend_on_the_layout": ("orpo", "kto"),
    "train/test_statistics_size.py::test_predicted_traffic_is_that_of_a_real_step": ("dp4",),
    "user_models/test_deceiving.py::test_a_deceiving_model_is_stopped_by_name": (
        "segments of ids",
        "the length, in values",
    ),
    "user_models/test_deceiving.py::test_the_sound_model_is_accepted": ("large",),
    "user_models/test_hugging_face.py::test_adapters_of_a_users_model_equal_one_device": (),
    "user_models/test_models.py::test_a_model_is_rejected_in_one_line": ("torch_encoder-cp2",),
    "user_models/test_models.py::test_some_models_equal_one_device_after_one_step": (
        "fused_block-tp2 sp",
        "torch_attention-dp2 zero3",
        "dropout-cp2",
        "encoder_decoder-tp2",
        "diffusion-dp2 zero3",
        "dropout-tp2 sp",
        "shared_layer-tp2",
        "mobilenet-dp2 zero3",
        "frozen_norm-pp2",
        "resnet-pp2",
    ),
}
"""Test -> the ids of its rows; without ids, the whole test."""


def mark_slow_rows(items: Sequence[pytest.Item], *, are_whole_files: bool) -> None:
    """Mark what `SLOW_ROWS` lists as slow.

    Raises:
        pytest.UsageError: a row of a collected file, or its file, is not there; asked only if files
            were collected whole.
    """
    rows = {f"{test}[{row}]" for test, rows in SLOW_ROWS.items() for row in rows}
    whole = {test for test, rows in SLOW_ROWS.items() if not rows}
    missing = rows | whole
    files = set()
    for item in items:
        file = item.path.relative_to(FOLDER).as_posix()
        files.add(file)
        name = f"{file}::{item.name}"
        test = name.partition("[")[0]
        if name in rows or test in whole:
            item.add_marker(pytest.mark.slow)
            missing -= {name, test}
    lost = sorted(name for name in missing if _is_expected(name.partition("::")[0], files))
    if lost and are_whole_files:
        raise pytest.UsageError(f"tests/slow_rows.py: no such tests: {lost}")


def _is_expected(file: str, collected: Set[str]) -> bool:
    """Whether the tests of a file should be there: it was collected, or has moved elsewhere."""
    return file in collected or not (FOLDER / file).exists()
