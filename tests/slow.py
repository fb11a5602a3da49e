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
    # Engines: a scenario of each kind of cache stays, which has chunks, hits, preemptions and drawn tokens together.
    r"models/test_cached_pages.py::.*\[(latents|latents in 8 bits|windows of heads)\]",  # others have index keys, int8
    r"models/test_engine.py::test_the_first_to_come",  # tests/models/test_scheduler.py has order under preemption
    r"models/test_engine.py::test_nothing_compiles_after_warmup",  # that of windows stays, with latents' mesh
    r"models/test_engine_windows.py::test_requests_that_come_and_go.*nothing recycled",
    r"models/test_speculation.py::test_ngrams_are_found",  # run_decode's drafts are n-grams
    r"models/test_batch_invariance.py::test_bits_are_the_same_alone.*\[windows of heads",
    # Variations of one computation: others of the test stay.
    r"models/test_verify.py::test_transformers_tokens",  # run_decode verifies them
    r"models/test_runner.py::test_a_step_without_rows.*rows=1",
    r"models/test_drafts.py::test_tokens_with_drafts_are_distributed.*\[(wrong|likeliest)",
    r"models/test_step_plans.py::test_a_step_has_one_plan.*\[expand",
    r"models/test_scheduler_traffic.py::test_long_traffic.*\[1\]",
    r"models/test_verify.py::test_bfloat16_has_a_tolerance",
    r"models/test_runner.py::test_a_compiled_step_copies_no_cache.*(rows=0|tokens=0)",  # the mixed step does both
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
    r"models/test_speculation.py::test_windows_of_heads_and_quantised",  # test_engine_windows.py, and drafts of latents
    r"models/test_speculation.py::test_right_wrong_and_random.*\[drawn",  # test_drafts.py compares distributions
    r"models/test_speculation.py::test_an_aborted_request",  # test_engine.py aborts, here in midst of drafts
    r"models/test_scheduler_traffic.py::test_long_traffic",  # any traffic is a shorter one
    r"models/test_engine_mtp.py::test_alternatives_are_accepted",  # test_speculation.py has trees
    r"models/test_hand_over.py::test_a_decode_process_that_dies_half_way",  # that of the other side stays
    r"models/test_written_pages.py::test_copies_keep",  # the contents told of are compared in the test of all pages
    r"models/test_mesh.py::test_traffic_of_a_latent_model",  # recycled pages of split heads stay, and goldens
    r"models/test_cached_pages.py::test_a_second_engine.*latents and index keys",
    r"models/test_step_plans.py::test_a_step_has_one_plan.*auto-1",
    r"models/test_engine_mtp.py::test_output_is_that_of_plain",  # run_decode's, and drafts that follow from tokens
    r"models/test_verify.py::test_sampled_tokens_are_found",
    r"scripts/test_run_decode.py::test_(heads_see|a_draw_depends|the_implementation_and_mla)",  # engines' own tests
    r"scripts/test_startup.py::test_each_mode",
    r"scripts/test_bench_serving.py::test_the_report_adds_up",
    r"ops/test_plan_decode_mosaic.py::test_interpreted_(in_chunks|with_one_window)",  # uneven rows, and those of fixed
    r"runtime/test_dispatch.py::test_deleting_any",
    r"aot/test_latent.py::test_prefill_gathers",  # the gate has the call
    r"contract/test_ragged_paged_attention.py::test_quantised_tokens\[xla-(int8-an array|float8_e4m3fn-(heads|a n))",
    # Both plugins drive one compiler; each case of test_gate.py has it once.
    r"aot/test_gate.py::test_spoilt.*cuda12-(leaves|does-not-fit|has-temp)",
    r"aot/test_several_cards.py",  # compiles for eight cards; tests/contract/test_surroundings.py traces for several
)
