"""The cases that the ordinary run leaves to `make test-slow`, beside those marked where they are written.

Each is here because other cases run all of its parts in every run: the reason above a group or beside a pattern says
which. Cases of backends in the contract suites are in `tests/contract/backends.py`, those of the compile gate in
`tests/aot/cases.py`.
"""

SLOW = (
    # Programs: what the flag changes has every-run tests of engines in tests/models, and wrong values of it in
    # test_run_decode_refusals.py. Each of these compiles a model for one run.
    r"scripts/test_run_decode.py::test_without_chunks_and_cache",
    r"scripts/test_run_decode.py::test_keys_and_values_are_cached_in_the_dtype",  # that of windows has int8, too
    r"scripts/test_run_decode.py::test_latents_are_cached_in_8_bits",
    r"scripts/test_run_decode.py::test_tokens_attend_to_as_many_keys",
    r"scripts/test_run_decode.py::test_batch_invariant_tokens",
    r"scripts/test_run_decode.py::test_sizes_that_steps_are_padded_to",
    r"scripts/test_run_decode.py::test_results_that_cannot.*\[and logits",
    r"scripts/test_run_decode.py::test_two_devices_decode",  # tests/models/test_mesh.py has goldens on two devices
    r"scripts/test_calibrate.py::test_run_decode_takes_the_file",
    # Reports of other operations and measurements are made by the same code.
    r"scripts/test_bench_ops.py::test_a_report_adds_up\[(paged_(decode|prefill)-int8-head|mla_decode-f32)-xla",
    r"scripts/test_bench_serving.py::test_all_decode_side_by_side",
    r"scripts/test_bench_peers.py::test_latent_attention_comes_to_ours\[(1-decode|2-)|test_paged_attention_comes_to_ours\[3",
    # Prompt logits of every golden family are in every run, and greedy tokens of one of each kind of attention.
    r"models/test_parity.py::test_greedy_tokens\[(v2-|v3-fp8|v32|glm-|qwen3-|gpt-oss-mxfp4)",
    r"models/test_parity.py::test_(prompt_logits|cached_latents|cached_index_keys)\[glm-dsa",  # glm-shared has all
    r"models/test_parity.py::test_cached_keys_and_values\[gpt-oss",
    # Engines: a scenario of each kind of cache stays, which has chunks, hits, preemptions and drawn tokens together.
    r"models/test_gqa.py::test_tokens_are_those_of_transformers\[(llama|qwen3)",  # gpt-oss has windows and sinks, too
    r"models/test_latents_8bit.py::test_what_the_dtype_of_latents_costs",
    r"models/test_gqa.py::test_with_a_quantised_cache",  # that of test_speculation.py has rejected drafts, too
    r"models/test_head_windows.py::test_tokens_depend",  # test_engine_windows.py, of the same windows
    r"models/test_sparse.py::test_many_keys_make_a_dense_model",  # tests/contract/test_mla_sparse.py has all keys
    # Variations of one computation: others of the test stay.
    r"models/test_model.py::test_chunks_and_decode_rows.*\[(absorb|expand)|test_computes_what_the_oracle_does\[(dense|v3)",
    r"models/test_model.py::test_caches_are_written_in_place",  # test_runner.py looks at whole steps
    r"models/test_calibration.py::test_scales_are_those.*-(axes2|axes3)-",
    r"models/test_calibration.py::test_tokens_over_an_int8_cache",  # the scales themselves are compared
    r"models/test_moe.py::test_hopper_multiplies_the_same_groups\[swapped, one warp",
    r"ops/test_plan_decode.py::test_one_window_for_all_heads\[(16|100)-",
    r"ops/test_plan_decode_mosaic.py::test_interpreted_(without_cuts|in_groups)",  # uneven rows are in groups, too
    r"ops/test_plan_decode_mosaic.py::test_interpreted_with_programs_for_each_row\[",  # chunks, and rows not sorted
    r"ops/test_paged_prefill_mosaic.py::test_heads_that_share_a_block.*-7\]",  # the contract's G 7 packs them so
    r"ops/test_paged_prefill_mosaic.py::test_keys_cut_among.*an int window",
    r"ops/test_paged_prefill_mosaic.py::test_quantised_caches.*(int8 per channel|fp8 per group)",  # the contract's
    r"ops/test_ragged_attention_mosaic.py::test_keys_cut_among.*(causal-a program|full-drawn)",
    r"ops/test_paged_prefill_mosaic.py::test_keys_of_8_bits_cut",  # the contract's 8 bits, and cuts without
    r"ops/test_ragged_attention_mosaic.py::test_scores_near_5e5",
    r"ops/test_mla_decode_seesaw.py::test_shapes",  # the contract's pages of 128, odd heads and drafts
    r"ops/test_mla_decode_swap_ab.py::test_widths_and_pages.*256 \+ 32",
    r"ops/test_flash_schedule.py::test_blocks_are_listed.*full-interpreted",
    r"ops/test_paged_decode_mosaic.py::test_a_row_cut_among",  # pieces of few rows are of such a row
    r"ops/test_rope.py::test_write_turns.*\[(8-None-neox|1-before_rope-interleaved)-mosaic",
    r"ops/test_write_kv.py::test_dynamic_scales.*(1-float8_e4m3fn-2|2-int8-1)-mosaic",
    r"ops/test_paged_decode_mosaic.py::test_pieces_of_few_rows.*16-1",
    r"ops/test_mla_decode_programs.py::test_as_many.*\[(32-1|64-1|128-8)",
    r"ops/test_mla_prefill.py::test_(?!bad).*\[reference(?!-all)",  # it is made of operations that have contracts
    r"test_parallel.py::test_decode_over_contexts\[(f32-1|bf16, float32 exchanged-2|latents, drafts-1)",
    r"test_parallel.py::test_heads_over_devices\[int8-head",
    r"contract/test_surroundings.py::test_kernels_are_traced.*-(decode of heads|decode, int8|latents, few heads)\]",
    # Long traffic, and whole models beside what other tests show of their parts.
    r"models/test_sparse.py::test_an_engine_gives",  # parity has prompt logits of both, test_cached_pages.py its engine
    r"models/test_latents_8bit.py::test_tokens_depend_on_no_way",
    r"models/test_parity.py::test_a_right_model_passes.*gpt-oss",  # v3 stays; mistakes of the table are made in all
    r"models/test_parity.py::test_prompt_logits\[v2-g",  # v3 chooses by groups, too
    r"models/test_weights.py::test_(prediction_modules_may|without_being_asked|models_without|loads_shards|fp8_loads)",
    r"models/test_weights.py::test_misfits_among.*changes[1-3]",
    r"models/test_weights.py::test_every_parameter.*\[(v2|glm)",
    r"scripts/test_run_decode.py::test_(heads_see|a_draw_depends|the_implementation_and_mla)",  # engines' own tests
    r"scripts/test_startup.py::test_each_mode",
    r"scripts/test_bench_serving.py::test_the_report_adds_up",
    r"ops/test_plan_decode_mosaic.py::test_interpreted_(in_chunks|with_one_window)",  # uneven rows, and those of fixed
    r"runtime/test_dispatch.py::test_deleting_any",
    r"aot/test_latent.py::test_prefill_gathers",  # the gate has the call
    r"contract/test_ragged_paged_attention.py::test_quantised_tokens\[xla-(int8-an array|float8_e4m3fn-(heads|a n))",
    # Both plugins drive one compiler; each case of test_gate.py has it once.
    r"aot/test_gate.py::test_spoilt.*cuda12-(leaves|does-not-fit|has-temp)",
)
