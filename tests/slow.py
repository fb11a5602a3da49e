"""The cases that the ordinary run leaves to `make test-slow`, beside those marked where they are written.

Each is here because other cases run all of its parts in every run: the reason above a group or beside a pattern says
which. Cases of backends in the contract suites are in `tests/contract/backends.py`, those of the compile gate in
`tests/aot/cases.py`.
"""

SLOW = (
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
    r"contract/test_surroundings.py::test_kernels_are_traced.*-(decode of heads|decode, int8|latents, few heads)\]",
    # Long traffic, and whole models beside what other tests show of their parts.
    r"models/test_sparse.py::test_an_engine_gives",  # parity has prompt logits of both, test_cached_pages.py its engine
    r"models/test_latents_8bit.py::test_tokens_depend_on_no_way",
    r"models/test_parity.py::test_a_right_model_passes.*gpt-oss",  # v3 stays; mistakes of the table are made in all
    r"models/test_parity.py::test_prompt_logits\[v2-g",  # v3 chooses by groups, too
    r"models/test_weights.py::test_(prediction_modules_may|without_being_asked|models_without|loads_shards|fp8_loads)",
    r"models/test_weights.py::test_misfits_among.*changes[1-3]",
    r"models/test_weights.py::test_every_parameter.*\[(v2|glm)",
    r"contract/test_ragged_paged_attention.py::test_quantised_tokens\[xla-(int8-an array|float8_e4m3fn-(heads|a n))",
    # Both plugins drive one compiler; each case of test_gate.py has it once.
    r"aot/test_gate.py::test_spoilt.*cuda12-(leaves|does-not-fit|has-temp)",
)
