"""Which calls the kernel of one token's mixture serves, and the phases that it then has."""

from jattn_kernels.call import AttentionCall, ExpertsCall, NextCall, RouterCall
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.row_pieces import LEAST
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts import one_token_attention, one_token_latents
from jattn_kernels.mosaic.sm90.experts.choice import chooses
from jattn_kernels.mosaic.sm90.experts.one_token_attention import AttentionPhase
from jattn_kernels.mosaic.sm90.experts.one_token_latents import LatentPhase
from jattn_kernels.mosaic.sm90.experts.one_token_next import NextPhase
from jattn_kernels.mosaic.sm90.experts.one_token_products import (
    MOST_DEPTH,
    ROWS_LEFT,
    ROWS_OF_EXPERTS,
    ExpertPhases,
)
from jattn_kernels.mosaic.sm90.experts.one_token_router import RouterPhases
from jattn_kernels.mosaic.sm90.experts.one_token_sizes import OneTokenSizes, one_token_sizes
from jattn_kernels.mosaic.sm90.experts.one_token_split import SplitProduct
from jattn_kernels.mosaic.sm90.experts.one_token_stages import DEPTH
from jattn_kernels.mosaic.sm90.experts.one_token_units import HALVES, OneTokenUnits
from jattn_kernels.mosaic.sm90.experts.one_token_values import ValuePhase
from jattn_kernels.mosaic.sm90.experts.warp_choice import LANES
from jattn_kernels.mosaic.sm90.skinny_matmul import MOST_WEIGHTS, num_splits
from jattn_kernels.mxfp4 import GROUP
from jattn_kernels.routing_spec import Routing

_MOST_WITH_ATTENTION = 2304  # of those before the choice, beside what attention has in shared memory
_MOST_EXPERTS = 512
# Stages for weights of what follows, asked for while experts are not known: those of shared experts are too.
_KEPT, _KEPT_BESIDE_SHARED = 5, 3
_LEAST_PARTS = 2  # of what is left to be added: for a product, and logits


def fits(call: ExpertsCall, *, is_biased: bool) -> bool:
    """Whether the kernel serves a call.

    Args:
        is_biased: Whether there is a bias on the choice.
    """
    routing = call.routing
    if call.num_tokens != 1 or call.scales is not None or call.weighs_inputs or call.features or routing is None:
        return False
    if routing.num_experts % LANES or routing.num_experts > _MOST_EXPERTS or routing.all_experts != call.num_experts:
        return False
    if call.per_token > TILED_ROWS or call.device.num_sms is None:  # blocks wait for each other: all must run
        return False
    depths = call.hidden_size, call.units
    if not chooses(routing, is_biased=is_biased) or max(depths) > MOST_DEPTH or any(d % DEPTH for d in depths):
        return False
    if call.router is None:
        return True
    if routing.num_experts % WGMMA_ROWS or call.hidden_size % routing.num_experts:
        return False
    told, num_parts = ExpertPhases.of(call).told_width, routing.choices
    if call.units > call.hidden_size or told > MOST_DEPTH:
        return False
    if not _begins_earlier(call.router, routing, num_parts=num_parts):
        return False
    most = MOST_DEPTH if call.router.attention is None else _MOST_WITH_ATTENTION
    return router_phases(call.router, routing.num_experts).row <= most


def few_bits_sizes(call: ExpertsCall) -> OneTokenSizes | None:
    """Of the kernel of weights in mxfp4, which serves a call if `fits_few_bits`."""
    assert call.routing is not None
    return one_token_sizes(call, 0 if call.router is None else router_phases(call.router, call.routing.num_experts).row)


def fits_few_bits(call: ExpertsCall, *, is_biased: bool) -> bool:
    """As `fits`, of weights in mxfp4."""
    routing = call.routing
    if call.num_tokens != 1 or call.weighs_inputs or routing is None or call.hidden_size != call.units or is_biased:
        return False
    if call.scales != "group" or call.device.num_sms is None or call.per_token > TILED_ROWS:
        return False
    if routing.num_experts % LANES or routing.num_experts > _MOST_EXPERTS or routing.all_experts != call.num_experts:
        return False
    if routing.shared or not chooses(routing, is_biased=False):
        return False
    if call.router is not None:
        if call.router.attention is not None or call.dtype != "bfloat16":
            return False
        units = OneTokenUnits(per_token=call.per_token, hidden=call.units, steps=1)
        if not _begins_earlier(call.router, routing, num_parts=max(units.num_parts, call.per_token)):
            return False
    sizes = few_bits_sizes(call)
    return sizes is not None and call.units // (sizes.groups * GROUP) >= HALVES


def _begins_earlier(call: RouterCall, routing: Routing, *, num_parts: int) -> bool:
    """Whether it also serves what comes before the choice.

    Args:
        num_parts: Of what experts return.
    """
    (left_parts, left_rows), norm, sms = call.left, call.norm, tiles.num_sms()
    if norm.scale_dtype != norm.dtype or norm.columns < LEAST or left_rows < ROWS_OF_EXPERTS or call.depth % DEPTH:
        return False
    if norm.columns % WGMMA_ROWS or left_parts < max(_LEAST_PARTS, num_parts):
        return False
    if max(norm.columns, routing.num_experts) > sms * WGMMA_ROWS:
        return False
    if call.next is not None and not _goes_on(call.next):
        return False
    return call.attention is None or _attends(call, call.attention)


def _attends(call: RouterCall, attention: AttentionCall) -> bool:
    """Whether attention that its rows are made by is among what it serves."""
    (left_parts, left_rows), columns = call.left, call.norm.columns
    if attention.operation != "mla_decode":
        fits = one_token_attention.fits(attention, call.depth)
        return fits and _attention(attention).fits_in(left_parts, left_rows - ROWS_OF_EXPERTS, columns)
    fits = _attends_latents(attention, left_parts, columns) and call.depth == ValuePhase(_latents(attention)).depth
    return fits and left_rows >= rows_left(attention, left_parts, columns)


def _attends_latents(attention: AttentionCall, parts: int, columns: int) -> bool:
    """Whether it serves attention over latent rows where so many parts of a row have room enough."""
    if not one_token_latents.fits(attention):
        return False
    values = ValuePhase(_latents(attention))
    return values.depth <= columns and values.units <= tiles.num_sms() and values.chunks <= parts


def rows_left(attention: AttentionCall | None, parts: int, columns: int) -> int:
    """Rows of each part of a result, with those in which blocks of the kernel that reads it leave each other things.

    Args:
        attention: That the kernel may begin with.
    """
    if attention is None or attention.operation != "mla_decode" or not _attends_latents(attention, parts, columns):
        return ROWS_LEFT
    return ROWS_LEFT + 1 + _latents(attention).rows_in(parts, columns)


def router_phases(call: RouterCall, num_experts: int) -> RouterPhases:
    """The phases before the choice."""
    attention, values = None, None
    if call.attention is not None and call.attention.operation == "mla_decode":
        attention = _latents(call.attention)
        values = ValuePhase(attention)
    elif call.attention is not None:
        attention = _attention(call.attention)
    return RouterPhases(call.norm, call.depth, num_experts, call.left[0], attention, values)


def _latents(call: AttentionCall) -> LatentPhase:
    assert call.page_size is not None
    return LatentPhase(call.spec, call.page_size)


def _attention(call: AttentionCall) -> AttentionPhase:
    assert call.page_size is not None
    return AttentionPhase(call.spec, call.page_size)


def _goes_on(call: NextCall) -> bool:
    """Whether it also serves what follows, which `skinny_matmul` takes before the first layer."""
    norm, columns = call.norm, call.columns
    return norm.scale_dtype == norm.dtype and columns % WGMMA_ROWS == 0 and norm.columns * columns <= MOST_WEIGHTS


def next_phase(call: NextCall, *, has_shared: bool) -> NextPhase:
    """What follows the experts.

    Args:
        has_shared: Whether there are weights of experts to ask for while those chosen are not known.
    """
    depth = call.norm.columns
    product = SplitProduct(depth, call.columns, num_splits(depth, call.columns))
    return NextPhase(call.norm, product, kept=_KEPT_BESIDE_SHARED if has_shared else _KEPT)
