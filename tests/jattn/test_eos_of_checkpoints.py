"""Which tokens end a text, as the files of a checkpoint say it."""

import json
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import jattn
from jattn.checkpoint import Checkpoint
from jattn.serving.frontend import llm as llm_module


def checkpoint_with_eos(folder, **eos_of_files):
    """The bundled checkpoint with other end tokens; a file without any if None."""
    (point,) = entry_points(group="jattn.checkpoints", name="default")
    for file in Path(point.load()()).iterdir():
        (folder / file.name).symlink_to(file)
    for name, eos in eos_of_files.items():
        path = folder / f"{name}.json"
        content = json.loads(path.read_text()) | {"eos_token_id": eos}
        path.unlink()
        path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("eos", [2**40, -1, 1.0, "2", [None], [1, "2"], True])
def test_eos_that_is_no_token_is_refused(tmp_path, eos):
    folder = checkpoint_with_eos(tmp_path, generation_config=eos)
    with pytest.raises(ValueError, match=r"`eos_token_id` of .*generation_config.json must be whole numbers"):
        jattn.LLM(folder, progress=False)


def test_eos_of_null_leaves_the_one_of_the_configuration(tmp_path):
    checkpoint = Checkpoint(checkpoint_with_eos(tmp_path, generation_config=None, config=[3, 4]))
    assert llm_module._eos_token_ids(checkpoint) == (3, 4)


def test_stop_ids_of_a_request_add_to_many_eos_of_the_checkpoint(tmp_path):
    folder = checkpoint_with_eos(tmp_path, generation_config=list(range(20)))
    llm = jattn.LLM(folder, max_num_seqs=1, max_context_len=32, prefill_tokens=64, full_sampling=False, progress=False)
    params = jattn.SamplingParams(max_tokens=2, stop_token_ids=tuple(range(100, 108)))
    assert len(llm.generate("import", params)) == 1
