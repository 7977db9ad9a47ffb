"""What a checkpoint's configuration allows to check, before a weight is read."""

from jattn.backend import backend_class
from jattn.checkpoint import Checkpoint
from jattn.device_mesh import mesh_of
from jattn.model import model_without_weights
from jattn.serving.config import EngineConfig
from jattn.serving.executor.mixing import mixed_rows
from jattn.serving.executor.pool_memory import check_pool_fits
from jattn.serving.resolved_config import computing_dtype, parallel_of, resolved
from jattn.serving.steps.draft_model import DraftModel, TargetAndDraft


def check_fits(config: EngineConfig, checkpoint: Checkpoint, *, num_eos_ids: int) -> None:
    """Says whether an engine of this configuration can serve the checkpoint; nothing is said of unknown models' sizes.

    Raises:
        ValueError, NotImplementedError: It cannot.
    """
    facts = {"dtype": computing_dtype(config), "parallel": parallel_of(config)}
    if facts["parallel"].axis is not None:
        mesh_of(facts["parallel"])
    served = model_without_weights(checkpoint, **facts)
    draft = None
    if isinstance(config.speculative, DraftModel):
        draft = model_without_weights(config.speculative.checkpoint_beside(checkpoint), **facts)
    if served is None or (draft is None and isinstance(config.speculative, DraftModel)):
        return
    sizes = resolved(config, served, draft_model=draft, num_eos_ids=num_eos_ids)
    if draft is not None:
        served = TargetAndDraft(served, draft, max_context_len=sizes.max_context_len)
    check_pool_fits(served.kv_groups, sizes)
    mixed_rows(sizes, backend_class(config.backend).for_model(served.attention_layers, sizes.backend_options))
