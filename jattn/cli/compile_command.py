"""`jattn compile`: all that a server would compile, kept on disk for it."""

from typing import Any

import typer

from jattn.cli.inputs import CheckpointArgument, default_checkpoint, model_folder
from jattn.cli.knob_flags import takes_knobs
from jattn.cli.output import check_output, logged, print_steps, starting, writing
from jattn.cli.sentences import sentences_for_errors


@takes_knobs(without=["compile_in_background"], max_num_seqs=None, prefill_tokens=None)
def compile_checkpoint(
    checkpoint: CheckpointArgument = None,
    **knobs: Any,
) -> None:
    """Compile the steps that serve a model, and keep them on disk, as for a container image.

    With the flags of `jattn serve`, whose starts then compile nothing, on the same GPU, versions and settings.
    They lie in JAX's compilation cache if it has a folder (JAX_COMPILATION_CACHE_DIR), else in ~/.cache/jattn/xla.
    """
    with sentences_for_errors():
        check_output()
        with starting():
            from jattn.devices import start_early

            start_early()
        path = default_checkpoint() if checkpoint is None else model_folder("CHECKPOINT", checkpoint)
        with logged():
            from jattn.server.device_sizes import sizes_for_device
            from jattn.serving.frontend.llm import LLM

            llm = LLM(path, compile_in_background=False, **sizes_for_device(knobs))
        import jax
        from rich.console import Console

        with writing():
            print_steps(llm.engine.executor.compiled_steps.records, Console())
            typer.echo(f"Memory: {llm.engine.executor.memory_use()}")
            typer.echo(f"Kept in {jax.config.jax_compilation_cache_dir}.")
