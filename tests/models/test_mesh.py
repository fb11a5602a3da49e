"""The engine on a mesh of several devices: tokens equal one device, and a device holds and receives only its shards."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from pallas_attn import FULL, PagedKV, PagedLatent
from pallas_attn.models.checkpoints import files, load_model, random_model
from pallas_attn.models.cli.mesh import parse_mesh
from pallas_attn.models.config import GQA_PRESETS, HeadWindows, ModelConfig
from pallas_attn.models.decoder import Decoder, KVScales, make_mesh, mesh
from pallas_attn.models.engine import Decoded, Engine, EngineConfig, SamplingParams
from pallas_attn.models.engine.config import Bucket
from pallas_attn.models.engine.verify import verify
from tests.kit.slow_cases import slow_cases
from tests.models import engine_case
from tests.models.engine_case import DRAWN, GREEDY, PROMPTS, compile_events
from tests.models.step_case import Pages, step
from tests.models.test_parity import GOLDENS, LOGIT_TOLERANCE, MARGIN, NAMES, golden

LATENT = dataclasses.replace(engine_case.CONFIG, num_attention_heads=4)
HEADS = HeadWindows((FULL, 6), (0, 3))
WINDOWED = dataclasses.replace(GQA_PRESETS["gpt-oss-tiny"], num_hidden_layers=2, vocab_size=64, windows=(HEADS, 5))
PARAMS = [GREEDY, DRAWN] * (len(PROMPTS) // 2)


type Sizes = int | str
"""Size of the mesh axis `tensor` if an integer, else a value of the option --mesh, such as "data=2,tensor=2"."""


def devices_of(sizes: Sizes) -> Mesh:
    axes = {"tensor": sizes} if isinstance(sizes, int) else parse_mesh(sizes) or {}
    try:
        return make_mesh(axes)
    except ValueError as error:
        if "devices that are here" not in str(error):
            raise
        pytest.skip(f"needs more devices than there are: {error}")


@functools.cache
def model(config: ModelConfig, devices: Sizes | None = None) -> Decoder:
    return random_model(config, seed=3, mesh=None if devices is None else devices_of(devices))


def make(config: ModelConfig, sizes: EngineConfig, devices: Sizes) -> Engine:
    """Make an engine with one decode bucket and one prefill bucket, which limits the time for compilation."""
    return Engine(model(config, devices), engine_case.padded(dataclasses.replace(sizes, mesh=devices_of(devices))))


def expect_plain(config: ModelConfig, outputs: list[Any], **cache: Any) -> None:
    """Check that tokens equal one forward pass on one device, without pages, chunks or a cache."""
    decoded = [Decoded(p, o.output_ids, params) for p, o, params in zip(PROMPTS, outputs, PARAMS, strict=True)]
    verification = verify(model(config), decoded, max_len=96, **cache)
    assert verification.passed, verification
    assert verification.equal == sum(len(output.output_ids) for output in outputs)


# --- goldens

SPLITTABLE = {
    2: {*NAMES} - {"v2-group", "v3", "v3-fp8", "v32", "v32-fp8", "qwen3-yarn"},
    4: {"v2-greedy", "glm-dsa", "glm-shared", "qwen3-window", "llama"},
}
"""Names of the goldens whose heads can be split over 2 and over 4 devices."""


@slow_cases("llama-context=2", "gpt-oss-2", "v2-greedy-data=2,expert=4", "v2-greedy-context=2,tensor=2")
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("gpt-oss", 2),  # the model has biases, sinks, windows and experts
        # The requests and the 12 experts are split over both data ranks (the indices along the axis `data`).
        ("v2-greedy", "data=2,expert=4"),
        ("v2-greedy", "context=2,tensor=2"),  # the tokens of each page are split over two devices
        ("llama", "context=2"),
        ("llama", "data=2,tensor=4"),  # eight devices; the four devices of a data rank have two copies of each KV head
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in NAMES),
        *(
            pytest.param(name, devices, marks=pytest.mark.slow)
            for name, devices in (
                ("v2-greedy", "tensor=4,expert=2"),  # each device has half of the columns of six experts
                ("glm-shared", "expert=4"),
                ("glm-shared", "data=2,tensor=2"),
                # Requests and experts are split over both devices. All other weights are copied to both devices.
                *((name, "data=2") for name in NAMES),
                *((name, "expert=2") for name in ("v2-greedy", "glm-dsa", "glm-shared", "gpt-oss", "gpt-oss-mxfp4")),
                ("v3", "data=3"),  # 16 experts are split over three devices, so the last device has padding
                ("gpt-oss", "data=3"),
                ("qwen3-window", "data=2,tensor=2"),
                ("llama", "data=4"),
                ("v2-greedy", "context=2"),
                ("v2-greedy", "context=4"),
                ("v2-greedy", "data=2,context=2"),
                ("v2-greedy", "expert=2,context=2"),
                ("v2-group", "context=3"),
                ("qwen3", "context=2"),
                ("llama", "context=2,tensor=2"),
                ("llama", "context=4"),  # the model has two KV heads, fewer than devices
                ("llama", "data=2,context=2"),
                ("llama", "tensor=8"),
                ("llama", "data=2,tensor=2,context=2"),
                ("v2-greedy", "data=2,expert=8"),  # heads are split over four devices, experts over eight
                ("v2-greedy", "data=2,tensor=4"),
                ("v2-greedy", "data=4,context=2"),
                ("glm-dsa", "data=2,tensor=4"),
                ("qwen3-window", "data=2,tensor=4"),
                *((name, "data=4,tensor=2") for name in ("gpt-oss", "gpt-oss-mxfp4", "qwen3", "qwen3-window")),
                *((name, "data=8") for name in NAMES),  # includes v2-greedy, whose 12 experts do not divide evenly
            )
        ),
        *(
            pytest.param(name, devices, marks=pytest.mark.slow)
            for devices, names in SPLITTABLE.items()
            for name in sorted(names)
            if (name, devices) != ("gpt-oss", 2)
        ),
    ],
)
def test_goldens(name: str, devices: Sizes):
    """Tokens and prompt logits equal the results of Hugging Face transformers."""
    split, expected = load_model(GOLDENS / name, jnp.float32, mesh=devices_of(devices)), golden(name)
    sizes = EngineConfig(
        num_pages=160,
        page_size=12 if "context=3" in str(devices) else 4,
        max_batched_tokens=32,
        max_num_seqs=4,
        max_model_len=min(320, split.config.max_position_embeddings),
        decode_buckets=(4,),
        prefill_buckets=(32,),
        mesh=split.mesh,
    )
    engine = Engine(split, sizes, capture_logits=True)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    ids = [engine.add_request(prompt, params) for prompt in expected.prompts]
    while engine.has_unfinished:
        engine.step()
    for i, wanted, margins, logits in zip(
        ids, expected["tokens"], expected["margins"], expected["logits"], strict=True
    ):
        output, sure = engine.output(i), int(np.argmax(np.append(margins, 0) < MARGIN))
        assert output.output_ids[:sure] == wanted[:sure].tolist()
        computed = engine.prompt_logits(i)[output.cached_tokens :]
        np.testing.assert_allclose(computed, logits[output.cached_tokens :], atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize(
    ("name", "devices", "message"),
    [
        ("v3", 2, "mesh: tensor: devices: expected a divisor of 3 query heads, got 2"),
        ("qwen3", 4, "mesh: tensor: devices: expected a divisor of 6 query heads, got 4"),
        ("gpt-oss", 3, "mesh: tensor: devices: expected a divisor or a multiple of 2 KV heads, got 3"),
    ],
)
def test_indivisible_heads_are_rejected_before_a_weight_is_read(name, devices, message, monkeypatch):
    monkeypatch.setattr(files.Checkpoint, "read", lambda *args: pytest.fail("a weight was read"))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_model(GOLDENS / name, mesh=devices_of(devices))


# --- traffic

SHORT = engine_case.ENGINES["short of pages"]


@functools.cache
def latent_engine(devices: Sizes = 2) -> Engine:
    return make(LATENT, SHORT, devices)


@pytest.mark.slow  # slow, because every run has test_goldens and a test of recycled pages on a mesh
@pytest.mark.parametrize("devices", [2, "data=2", "data=2,expert=4", "context=2", "context=2,data=2"])
def test_traffic_of_a_latent_model(devices: Sizes):
    """Tokens equal one device for an MLA model with experts, low-rank queries and a dense layer.

    The traffic has chunked prefill, prefix hits, preemptions, and greedy and sampled tokens.
    """
    engine = latent_engine(devices)
    outputs = engine.generate(PROMPTS, PARAMS)
    expect_plain(LATENT, outputs)
    assert engine.stats().preemptions > 0
    again = engine.generate(PROMPTS, PARAMS)
    assert [o.output_ids for o in again] == [o.output_ids for o in outputs]
    assert sum(o.cached_tokens for o in again) > 0
    pages, sizes = engine._runner._caches[0], devices_of(devices).shape
    assert isinstance(pages, PagedLatent)
    of_device = (SHORT.num_pages, SHORT.page_size // sizes["context"])
    assert {shard.data.shape[:2] for shard in pages.pages.addressable_shards} == {of_device}
    assert engine.stats().num_pages == sizes["data"] * SHORT.num_pages


FULL_HEADS = dataclasses.replace(GQA_PRESETS["qwen3-tiny"], num_hidden_layers=2, vocab_size=64)


@pytest.mark.slow
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_traffic_over_split_contexts(batch_invariant: bool):
    """Tokens equal one device if the cached tokens of each page are split over two devices.

    Heads are split or not. The traffic has chunked prefill, prefix hits and preemptions.
    """
    sizes = EngineConfig(
        num_pages=24, page_size=4, max_batched_tokens=16, max_num_seqs=4, batch_invariant=batch_invariant
    )
    engine = make(FULL_HEADS, sizes, "context=2,tensor=2")
    outputs = engine.generate(PROMPTS, PARAMS)
    expect_plain(FULL_HEADS, outputs)
    assert engine.stats().preemptions > 0


def test_contexts_that_cannot_be_split_are_rejected():
    for name, message in (
        ("glm-dsa", "selects among keys of all devices"),
        ("qwen3-window", "windows hide different numbers"),
    ):
        with pytest.raises(NotImplementedError, match=f"mesh: context: .*{message}"):
            load_model(GOLDENS / name, mesh=devices_of("context=2"))
    with pytest.raises(ValueError, match="mesh: context: devices: expected a divisor of 3 query heads, got 2"):
        load_model(GOLDENS / "v3", mesh=devices_of("context=2"))
    with pytest.raises(ValueError, match="mesh: tensor x context: expected a divisor of moe_inter.*=32, got 3"):
        load_model(GOLDENS / "v3", mesh=devices_of("context=3"))
    llama = load_model(GOLDENS / "llama", mesh=devices_of("context=2"))
    with pytest.raises(ValueError, match="page_size: expected a multiple of context=2, got 5"):
        Engine(llama, EngineConfig(page_size=5, mesh=llama.mesh))
    with pytest.raises(NotImplementedError, match="cache_dtype: quantised keys and values are not supported"):
        Engine(llama, EngineConfig(cache_dtype=jnp.int8, mesh=llama.mesh))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "cache"),
    [
        (2, {"cache_dtype": jnp.int8}),
        (4, {}),  # two devices have copies of each KV head
        (4, {"cache_dtype": jnp.float8_e4m3fn, "kv_scales": "head"}),
        (2, {"cache_dtype": jnp.int8, "kv_scales": "channel"}),
    ],
)
def test_traffic_of_windowed_heads(devices: int, cache: dict[str, Any]):
    """Tokens equal one device for a model with attention windows per head and per layer, sinks and biased experts.

    Pages outside the windows are recycled. All devices recycle the same page ids, although heads without a window and
    heads with a window are on different devices.
    """
    if "kv_scales" in cache:
        rng, channels = np.random.default_rng(0), (WINDOWED.head_dim,) if cache["kv_scales"] == "channel" else ()
        scales = (tuple(0.02 + 0.02 * rng.random((2, 2, *channels), np.float32)) for _ in range(2))
        cache = cache | {"kv_scales": KVScales(*scales)}
    engine = make(
        WINDOWED, EngineConfig(num_pages=30, page_size=2, max_batched_tokens=16, max_num_seqs=4, **cache), devices
    )
    outputs = engine.generate(PROMPTS, PARAMS)
    expect_plain(WINDOWED, outputs, **cache)
    assert engine.stats().preemptions > 0
    assert [group.num_heads for group in engine.stats().groups] == [1, 1]
    caches = engine._runner._caches
    assert isinstance(caches[0], PagedKV)
    assert (caches[0].k.addressable_data(0).shape[1], caches[0].k.shape[1]) == (1, devices)


def test_recycled_pages_of_split_heads_cover_all_devices():
    """Head i of every device keeps the pages that head i of at least one device attends to.

    Page ids are the same on all devices, so a page can be recycled only if no device needs the page.
    """
    heads = HeadWindows((7, FULL, 6, 9), (2, 0, 3, 1))
    config = dataclasses.replace(WINDOWED, num_key_value_heads=4, windows=(heads, 5))
    split, five = mesh.device_part(config, devices_of(2)).windows or ()
    assert isinstance(split, mesh.SplitHeadWindows)
    assert (split.window, split.sink_tokens, five) == ((7, FULL), (3, 1), 5)
    assert split.devices == (HeadWindows((7, FULL), (2, 0)), HeadWindows((6, 9), (3, 1)))


@pytest.mark.slow  # slow, because test_engine.py tests recovery on one device, and other tests allocate on a mesh
@pytest.mark.parametrize("devices", [2, "data=2"])
def test_failed_step_loses_no_token(devices: Sizes):
    engine = latent_engine(devices)
    ids = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS[:3], PARAMS, strict=False)]
    while not engine.output(ids[0]).output_ids:
        engine.step()
    before = engine.output(ids[0]).output_ids
    jax.tree.map(lambda pages: pages.delete(), engine._runner._caches)
    with pytest.raises((RuntimeError, ValueError), match="deleted|donated"):
        engine.step()
    assert engine.output(ids[0]).output_ids == before
    assert engine.abort(ids[1])
    while engine.has_unfinished:
        engine.step()
    wanted = engine.generate(PROMPTS, PARAMS)
    assert [engine.output(ids[i]).output_ids for i in (0, 2)] == [wanted[i].output_ids for i in (0, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, pytest.param("data=2,expert=4", marks=pytest.mark.slow)])
def test_no_compilation_after_warmup_and_one_array_per_step(devices: Sizes, monkeypatch):
    engine = latent_engine(devices)
    engine.warmup()
    engine.generate(PROMPTS[:2], PARAMS[:2])  # NumPy and JAX initialise some parts at the first call
    sent, put = [], jax.device_put

    def send(array: Any, *args: Any) -> Any:
        sent.append(array.shape)
        with jax.transfer_guard_host_to_device("allow"):
            return put(array, *args)

    before = engine.stats().num_steps
    monkeypatch.setattr(jax, "device_put", send)
    with compile_events() as events, jax.transfer_guard_host_to_device("disallow_explicit"):
        engine.generate(PROMPTS, PARAMS)
    assert len(sent) == engine.stats().num_steps - before > 0
    assert events == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "exchanged"),
    [
        (2, {}),
        # One all-gather of the logits and, in the layer with experts, two all-gathers (hidden states; expert ids with
        # weights) and one reduce-scatter of the results.
        pytest.param("data=2,expert=4", {"all-gather": 1 + 2, "reduce-scatter": 1}, marks=pytest.mark.slow),
        # One all-to-all of the outputs of heads per layer.
        pytest.param("context=2", {"all-to-all": LATENT.num_hidden_layers}, marks=pytest.mark.slow),
    ],
)
def test_step_has_two_sums_per_layer_and_gathers_no_cache(devices: Sizes, exchanged: dict[str, int]):
    """A compiled step has one all-reduce for the embedding, two per layer, and one all-gather of the logits.

    `exchanged` has other numbers of collectives by mesh: data ranks exchange tokens in the layer with experts.
    """
    engine = latent_engine(devices)
    engine._runner.compile([bucket := Bucket(4, 0)])
    text = engine._runner._programs.forward[bucket].as_text()
    collective = r" (all-[a-z-]+|reduce-scatter|collective-[a-z-]+|ragged-all-to-all)(?:-start)?\("
    found = re.findall(collective, text)
    assert collections.Counter(found) == {"all-reduce": 1 + 2 * LATENT.num_hidden_layers, "all-gather": 1, **exchanged}
    sample = engine._runner._programs.shared[engine._runner._programs.shared_program("sample", bucket)]
    assert re.findall(collective, sample.as_text()) == []
    gathered = [shape.split("{")[0] for shape in re.findall(r"= (\S+) all-gather(?:-start)?\(", text)]
    assert gathered.count(f"f32[4,{LATENT.vocab_size}]") == 1
    # The other gathered arrays have 8 rows, the tokens of both data ranks.
    assert all(re.match(r"\w+\[8[,\]]", shape) for shape in gathered if not shape.startswith("f32[4,"))


# --- weights


def test_devices_hold_shards_and_files_are_read_in_slices(monkeypatch):
    """Split 8 query heads and 2 KV heads over 4 devices.

    Each device has 2 query heads and 1 KV head. Two adjacent devices have copies of the same KV head.
    """
    read, right = [], files.StoredTensor.read

    def recording(tensor: files.StoredTensor, part: files.Slices = ()) -> np.ndarray:
        piece = right(tensor, part)
        read.append((tensor.shape, piece.shape))
        return piece

    monkeypatch.setattr(files.StoredTensor, "read", recording)
    split = load_model(GOLDENS / "llama", mesh=devices_of(4))
    monkeypatch.undo()
    layer: Any = split.layers[0]
    config: Any = split.config
    assert {whole for whole, piece in read if whole == piece} == {(config.hidden_size,)}  # only norms are not split
    own = [
        (layer.self_attn.qkv_proj.weight, (config.hidden_size, (2 + 2) * config.head_dim)),
        (layer.self_attn.o_proj.weight, (2 * config.head_dim, config.hidden_size)),
        (layer.mlp.gate_up_proj.weight, (config.hidden_size, 2 * config.intermediate_size // 4)),
        (split.embed_tokens, (config.vocab_size // 4, config.hidden_size)),
    ]
    for weight, shape in own:
        assert [shard.data.shape for shard in weight[...].addressable_shards] == [shape] * 4
    whole: Any = load_model(GOLDENS / "llama").layers[0]
    q, k, v = np.split(
        np.asarray(whole.self_attn.qkv_proj.weight[...]), [8 * config.head_dim, 10 * config.head_dim], axis=1
    )
    for device, shard in enumerate(layer.self_attn.qkv_proj.weight[...].addressable_shards):
        first, kv = 2 * device * config.head_dim, device // 2 * config.head_dim
        pieces = [q[:, first : first + 2 * config.head_dim], *(x[:, kv : kv + config.head_dim] for x in (k, v))]
        np.testing.assert_array_equal(shard.data, np.concatenate(pieces, axis=1))


@pytest.mark.parametrize(("name", "ending"), [("v3-fp8", "_proj.weight"), ("gpt-oss-mxfp4", "experts.gate_up_proj")])
def test_slices_of_quantised_tensors_equal_the_whole(name: str, ending: str, rng: np.random.Generator):
    """A slice of a quantised tensor equals the same slice of the whole dequantised tensor.

    The slices begin and end within quantisation blocks.
    """
    checkpoint = files.open_checkpoint(GOLDENS / name)
    names = {tensor.removesuffix("_blocks").removesuffix("_scales") for tensor in checkpoint.tensors}
    for tensor in sorted(n for n in names if n.endswith(ending)):
        whole = checkpoint.read(tensor)
        ends = [sorted(rng.choice(size + 1, 2, replace=False)) for size in whole.shape]
        part = tuple(slice(int(start), int(stop)) for start, stop in ends)
        np.testing.assert_array_equal(checkpoint.read(tensor, part), whole[part])


# --- invalid meshes


def test_mesh_axes_of_any_order_and_type():
    devices = np.array(jax.devices()[:2])
    given = Mesh(devices.reshape(2, 1), ("tensor", "data"), axis_types=(AxisType.Explicit,) * 2)
    normal = mesh.normal_mesh(given)
    assert dict(normal.shape) == {"data": 1, "tensor": 2, "context": 1, "expert": 1}
    assert normal == devices_of(2) == mesh.normal_mesh(normal)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"heads": 2}, ValueError, "mesh: expected axes among data, tensor, context, expert, got 'heads'"),
        ({"tensor": 0}, ValueError, "mesh: expected at least 1 device along tensor, got 0"),
        ({"tensor": 10**6}, ValueError, r"mesh: expected at most the \d+ devices that are here, got 1000000"),
        ({"expert": 2, "tensor": 3}, ValueError, "mesh: expert: expected a divisor of data x tensor = 3, got 2"),
        (
            {"data": 2, "expert": 1},
            ValueError,
            "mesh: expert: expected a multiple of data=2 that divides data x tensor = 2, got 1",
        ),
        ({"data": 2, "expert": 3}, ValueError, "expected a multiple of data=2"),
        ({"data": 2, "tensor": 3, "expert": 4}, ValueError, "that divides data x tensor = 6, got 4"),
    ],
)
def test_invalid_meshes_are_rejected(sizes, error, message):
    with pytest.raises(error, match=message):
        make_mesh(sizes)


@pytest.mark.usefixtures("unchecked_shapes")
def test_engine_rejects_a_mesh_that_differs_from_the_model():
    other: Any = "tensor=2"
    with pytest.raises(ValueError, match=r"mesh: expected a jax.sharding.Mesh or None, got 'tensor=2'"):
        EngineConfig(mesh=other)
    with pytest.raises(ValueError, match="mesh: expected axes among data, tensor, context, expert, got 'x'"):
        EngineConfig(mesh=jax.make_mesh((2,), ("x",)))
    with pytest.raises(
        ValueError, match=r"mesh: expected the mesh that the model was loaded for, one device; got data=1"
    ):
        Engine(model(LATENT), EngineConfig(mesh=devices_of(2)))
    with pytest.raises(ValueError, match=r"loaded for, data=1,tensor=2,.* of devices \[0, 1\]; got one device"):
        Engine(model(LATENT, 2), EngineConfig())
    split, pages = model(LATENT, 2), Pages.scatter(1, 1)
    with pytest.raises(ValueError, match="mesh: expected a call inside jax.shard_map over the model's mesh"):
        split(jnp.zeros(1, jnp.int32), pages.allocate(split), step(pages, [(0, 0)]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 66}, "mesh: tensor: expected a divisor of intermediate_size=66, got 4 devices"),
        ({"moe_intermediate_size": 18}, "mesh: tensor: expected a divisor of moe_intermediate_size=18, got 4 devices"),
    ],
)
def test_indivisible_widths_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        random_model(dataclasses.replace(LATENT, **changes), mesh=devices_of(4))


def test_indivisible_experts_are_rejected():
    dense = dataclasses.replace(LATENT, first_k_dense_replace=LATENT.num_hidden_layers)
    with pytest.raises(ValueError, match="mesh: expert: expected 1, a deepseek_v3 without experts has none to split"):
        random_model(dense, mesh=devices_of("expert=2"))
    narrow = dataclasses.replace(LATENT, moe_intermediate_size=18)
    with pytest.raises(ValueError, match="mesh: tensor: expected a divisor of 18 shared columns, got 4 devices"):
        random_model(narrow, mesh=devices_of("expert=4"))


def test_devices_hold_whole_experts():
    """Five experts on four devices: each device has two experts, and the last three of the eight are zeros."""
    config = dataclasses.replace(LATENT, n_routed_experts=5, n_group=1, topk_group=1)
    layer: Any = random_model(config, seed=3).layers[1]
    split: Any = random_model(config, seed=3, mesh=devices_of("data=2,expert=4")).layers[1]
    for name in ("gate_up_proj", "down_proj"):
        whole = np.asarray(getattr(layer.mlp, name)[...])
        padded = np.pad(whole, [(0, 3), (0, 0), (0, 0)])
        shards = getattr(split.mlp, name)[...].addressable_shards
        np.testing.assert_array_equal(np.concatenate([shard.data for shard in shards]), padded)
    shared = split.mlp.shared_experts.gate_up_proj.weight[...]
    # A device has half of the 16 gate columns and half of the 16 up columns of the shared expert.
    assert [shard.data.shape for shard in shared.addressable_shards] == [(32, 16)] * 4
    assert split.mlp.gate.weight[...].is_fully_replicated


def test_indivisible_vocabulary_is_replicated():
    config = dataclasses.replace(LATENT, vocab_size=63)
    split = random_model(config, mesh=devices_of(2))
    assert split.part.vocab_size == 63
    assert split.embed_tokens[...].is_fully_replicated
