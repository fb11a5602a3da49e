import jax, jax.numpy as jnp, numpy as np, pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from models.decoder import all_experts, moe
from models.decoder.layers import MLP
from tests.models.test_moe import draw_experts

@pytest.mark.parametrize("trial", ["b,e", "b,m"])
def test_b(rng, monkeypatch, trial):
    monkeypatch.setattr(all_experts, "PROGRAMS", 2)
    experts = moe.Experts(*draw_experts(rng, 128, 64, jnp.bfloat16))
    shared = MLP(128, 128, jnp.bfloat16)
    shared.gate_up_proj.weight[...] = jnp.asarray(rng.standard_normal((128, 256)) * 128**-.5, jnp.bfloat16)
    shared.down_proj.weight[...] = jnp.asarray(rng.standard_normal((128, 128)) * 128**-.5, jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((20, 128)), jnp.bfloat16)
    chosen = jnp.asarray(np.stack([rng.permutation([0, 1, 3])[:2] for _ in range(20)]), jnp.int32)
    weights = jnp.asarray(rng.uniform(0.1, 1, (20, 2)), jnp.float32)
    want = moe.routed_experts(x, chosen, weights, experts).astype(jnp.float32) + shared(x).astype(jnp.float32)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out = moe.experts_together(x, chosen, weights, experts, shared, set((trial + ",s3").split(",")))
    np.testing.assert_allclose(out.astype(jnp.float32), want, atol=0.06)
