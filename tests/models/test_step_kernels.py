"""The decode step of a model as it is lowered for Hopper: which kernels a layer has, and what is left to XLA."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from bench.step_workload import DEEPSEEK_V2_LITE, GPT_OSS_20B, LLAMA_3_8B, QWEN3_30B_A3B
from jattn.backend import BackendOptions, backend_class
from jattn.experts import routed_experts_of_sum
from jattn.kv_pool import make_pool
from jattn.matmul import Unattended, matmul
from jattn.serving.config import EngineConfig
from jattn.serving.steps.loop_state import empty_rows
from jattn.serving.steps.passes import decode_pass
from jattn.serving.steps.plain import Steps
from jattn_kernels.call import Device
from jattn_kernels.mosaic import entry
from jattn_kernels.traced_once import traced_once
from jattn_kernels.triton import implementation, launch
from jattn_models.deepseek import DeepseekV2ForCausalLM
from jattn_models.few_bits import hold_mixtures, hold_projections
from jattn_models.gpt_oss import GptOssForCausalLM
from jattn_models.llama import LlamaForCausalLM
from jattn_models.quantization import Mxfp4
from jattn_models.qwen3_moe import Qwen3MoeForCausalLM
from tests.often import slow

PAGE, PAGES = 16, 80


@pytest.fixture(scope="module")
def hopper():
    """Dispatch believes in an H200."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
        yield


def lowered(function, *arguments):
    """Its text for CUDA."""
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def step_of(variant):
    """The text of a step of one row, two layers of Qwen3-30B-A3B's shapes."""
    return step_of_model(two_layers(Qwen3MoeForCausalLM, QWEN3_30B_A3B), variant)


def two_layers(model_class, shapes, *, layers=2):
    config = model_class.config_class.from_dict(shapes | {"num_hidden_layers": layers})
    return nnx.eval_shape(lambda: model_class(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


def step_of_model(model, variant, *, rows=1):
    """The text of a step of a model of shapes."""
    graph, weights = nnx.split(model)
    options = BackendOptions(max_context_len=PAGE * PAGES, page_size=PAGE, max_num_seqs=rows, dtype="bfloat16")
    backend = backend_class(EngineConfig().backend).for_model(model.attention_layers, options)
    pool = jax.eval_shape(lambda: make_pool(model.kv_groups, num_pages=PAGES + 1, page_size=PAGE, dtype=jnp.bfloat16))
    state = jax.eval_shape(lambda: empty_rows(rows, max_pages=PAGES, max_stop_ids=1))
    decode = functools.partial(Steps(graph, backend).decode, variant=variant)
    return lowered(decode, weights, state, pool, jax.ShapeDtypeStruct((rows, 3), jnp.int32))


@functools.cache
def step_in_few_bits(weights, *, in_one=True):
    """The text of a step of one row, two layers of Llama-3-8B's shapes.

    Args:
        in_one: Whether one kernel may take a layer's products.
    """
    model = two_layers(LlamaForCausalLM, LLAMA_3_8B)
    hold_projections(model, weights)
    with pytest.MonkeyPatch.context() as patch:
        if not in_one:
            patch.setattr("jattn_models.mlp.is_one_kernel", lambda *args, **options: False)
        return step_of_model(model, "greedy")


@pytest.fixture(scope="module")
def step(hopper):
    """The step where nobody draws."""
    return step_of("greedy")


def num_kernels(text):
    return len(re.findall(r"custom_call @mosaic_gpu_v2", text))


def sums_of_splits(text):
    """Reductions of what a product's kernel leaves to be added up."""
    return re.findall(r"stablehlo\.reduce.*\(tensor<\d+x\d+x(?:128|2048|5120)xf32>", text)


def test_a_layer_is_one_kernel(step):
    """Of rotation, attention, o, router, experts, and the next layer's q/k/v.

    Each of the two layers stands in the text, the first one's q/k/v before them and the last norm behind: there is no
    loop.
    """
    assert num_kernels(step) == 2 + 2
    assert "stablehlo.while" not in step


def test_a_layer_is_traced_once(hopper, monkeypatch):
    """Its kernel, though the decoder asks what shapes the loop's body leaves; and a mixture alone for its shape."""
    traced, operation = [], entry.OPERATIONS["mixture_of_experts"]

    def noted(call, operands):
        traced.append(call)
        return operation(call, operands)

    monkeypatch.setitem(entry.OPERATIONS, "mixture_of_experts", noted)
    with traced_once():
        step_of("greedy")
    assert len(traced) == len(set(traced)) == 2


def test_a_first_product_of_too_many_columns_is_left_to_its_layer(hopper):
    """64 heads: cuBLAS takes q/k/v, whose rows are added up and normed by a kernel before."""
    text = step_of_model(two_layers(Qwen3MoeForCausalLM, QWEN3_30B_A3B | {"num_attention_heads": 64}), "greedy")
    assert num_kernels(text) == 2 * 5 + 1


def test_a_token_of_gpt_oss_takes_four_kernels_a_layer(hopper):
    """Turning, attention and its merge, and one for all else; the first layer's product stands before them."""
    fewer, more = (
        num_kernels(step_of_model(hold_in_mxfp4(two_layers(GptOssForCausalLM, GPT_OSS_20B, layers=layers)), "greedy"))
        for layers in (4, 6)
    )
    assert more - fewer == 2 * 4


def hold_in_mxfp4(model):
    hold_mixtures(model, Mxfp4())
    return model


@pytest.mark.parametrize(
    ("model_class", "shapes", "attended", "columns", "experts"),
    [
        # Attention is left too, and the next layer's first product.
        (Qwen3MoeForCausalLM, QWEN3_30B_A3B | {"attention_bias": True}, Unattended, 5120, None),
        # Attention is not where it has sinks.
        (GptOssForCausalLM, GPT_OSS_20B, jax.Array, 5120, 32),
    ],
    ids=["qwen3_moe", "gpt_oss"],
)
def test_products_are_left_to_a_mixture_with_their_biases(
    hopper, monkeypatch, model_class, shapes, attended, columns, experts
):
    given = []

    def noted(x, *weights, router_bias, following, **options):
        given.append((x.additions[-1], router_bias, following))
        return routed_experts_of_sum(x, *weights, router_bias=router_bias, following=following, **options)

    monkeypatch.setattr("jattn_models.experts.routed_experts_of_sum", noted)
    model = two_layers(model_class, shapes)
    step_of_model(model, "greedy")
    layers, width = model.layers[0].attention.o_proj.bias.get_value().shape
    assert given
    for product, router_bias, following in given:
        assert isinstance(product.rows, attended)
        assert product.bias.shape == (layers, width)
        assert (None if router_bias is None else router_bias.shape) == (experts and (layers, experts))
        assert (None if following is None else following.bias.shape) == (columns and (layers, columns))


def test_layers_of_a_mixture_stay_in_a_loop_for_more_tokens(hopper):
    text = step_of_model(two_layers(Qwen3MoeForCausalLM, QWEN3_30B_A3B), "greedy", rows=2)
    assert "stablehlo.while" in text


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_products_in_few_bits_add_up_norm_and_round_one_row(hopper, weights):
    """A layer has four products, attention that turns its heads, its merge."""
    assert num_kernels(step_in_few_bits(weights, in_one=False)) == 2 * 6 + 1


def test_products_in_int4_of_one_row_are_one_kernel(hopper):
    """With the next layer's first; a layer has attention and its merge beside it. The first one's product and its norm
    come before them, the last norm behind."""
    assert num_kernels(step_in_few_bits("int4")) == 2 * 3 + 3


def test_products_in_int4_take_rows_as_they_are_and_the_activation(hopper):
    """Of 64 rows: no kernel puts them in an order, and none takes the activation of what gate and up left."""
    model = two_layers(LlamaForCausalLM, LLAMA_3_8B)
    hold_projections(model, "int4")
    text = step_of_model(model, "greedy", rows=64)
    assert not re.search(r"stablehlo\.transpose.*tensor<64x\d+x4x4x2x", text)
    assert not re.search(r"tensor<64x28672x", text)
    assert re.search(r"tensor<1x64x14336xbf16>", text)


def test_the_activation_of_one_row_is_of_its_product_in_int4(hopper):
    text = step_in_few_bits("int4", in_one=False)
    assert not re.search(r"tensor<(?:\d+x)?[14]x28672x", text)
    assert re.search(r"tensor<1x1x14336xbf16>", text)


def test_xla_adds_up_no_splits(step):
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 2048), (2048, 5120)))
    assert sums_of_splits(lowered(matmul, x, kernel))
    assert not sums_of_splits(step)


def test_a_step_that_draws_asks_nothing_of_the_device(hopper, monkeypatch):
    """A branch that hangs on data, or a loop whose end does, is one that the host waits for: it launches nothing."""
    pytest.importorskip("triton", reason="the group `dev` has it")

    def in_place_of_triton(*operands, kernel, out_type, **_):
        return jax.ffi.ffi_call(kernel.__name__, out_type)(*operands)

    monkeypatch.setattr(launch, "_triton_call", lambda: in_place_of_triton)
    monkeypatch.setattr(implementation, "missing", lambda: None)
    step = step_of("plain")
    assert len(re.findall(r"custom_call @keep_tokens", step)) == 1
    assert not re.search(r"stablehlo\.(case|if|while)\b", step)


@pytest.mark.parametrize(("rows", "kernels"), [(1, 6 + 3 + 2 + 1), slow(8, 6 + 10 + 1)])
def test_kernels_of_latent_layers_and_shared_experts(hopper, rows, kernels):
    """Of a dense layer and two sparse ones of DeepSeek-V2-Lite, which are a loop's body where there are several tokens.

    A layer has its first product, queries with the write, decode, its merge; a dense one o's product and a norm. Then
    all that follows queries is one kernel for one token, its attention among it, and has the first product of the layer
    after it. Eight tokens take six: o, norm, router, routing and the experts' two products, shared ones among them.
    """
    text = step_of_model(two_layers(DeepseekV2ForCausalLM, DEEPSEEK_V2_LITE, layers=3), "greedy", rows=rows)
    assert num_kernels(text) == kernels


def test_layers_that_leave_room_for_latents_go_round_a_loop(hopper, monkeypatch):
    """As a draft model's do: behind the dense one a body of three, as above, and the last norm."""
    monkeypatch.setattr("jattn.serving.steps.plain.decode_pass", lambda *given, unrolled: decode_pass(*given))
    text = step_of_model(two_layers(DeepseekV2ForCausalLM, DEEPSEEK_V2_LITE, layers=4), "greedy")
    assert num_kernels(text) == 6 + 3 + 1
