"""Host-side checks of values."""

import numpy as np
import pytest

from jattn_kernels.validate import validate

TABLE = np.array([[1, 2], [3, -1], [-1, 99]], np.int32)
LENS = np.array([8, 4, 0], np.int32)


def test_validate_accepts_padding_of_any_value():
    validate(TABLE, LENS, num_pages=4, page_size=4, cu_q_lens=np.array([0, 2, 3, 3]), num_tokens=5)
    validate(TABLE, LENS, num_pages=4, page_size=4, num_tokens=5, custom_mask=np.ones(60, bool))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"page_table": TABLE[0]}, r"`page_table` must be \[B, max_pages\]"),
        ({"seq_lens": np.array([8, -1, 0])}, r"`seq_lens` must be in 0 \.\. 8.*Got seq_lens\[1\]=-1"),
        ({"seq_lens": np.array([9, 4, 0])}, r"Got seq_lens\[0\]=9"),
        ({"seq_lens": np.array([8, 5, 0])}, r"pages in 0 \.\. 3\. Got page_table\[1, 1\]=-1"),
        ({"num_pages": 3}, r"pages in 0 \.\. 2\. Got page_table\[1, 0\]=3"),
        ({"seq_lens": np.array([8, np.nan, 0])}, r"`seq_lens` must be integers\. Got seq_lens.dtype=float64"),
        ({"page_table": TABLE.astype(np.float32)}, "`page_table` must be integers"),
        ({"cu_q_lens": np.array([0, 2, 3, 4.0])}, "`cu_q_lens` must be integers"),
        ({"custom_mask": np.ones(12 * 5 - 1, bool)}, r"`custom_mask` must be bool \[M\] with M at least 60"),
        ({"custom_mask": np.ones(19, bool), "cu_q_lens": np.array([0, 2, 3, 3])}, "M at least 20"),
        ({"custom_mask": np.ones(60)}, "Got custom_mask.dtype=float64"),
        ({"cu_q_lens": np.array([0, 2])}, r"`cu_q_lens` must be \[B \+ 1\] = \[4\]"),
        ({"cu_q_lens": np.array([1, 2, 3, 3])}, "must start at 0 and never fall"),
        ({"cu_q_lens": np.array([0, 2, 1, 3])}, "must start at 0 and never fall"),
        ({"cu_q_lens": np.array([0, 2, 3, 6])}, r"must end at 5 at most\. Got cu_q_lens\[-1\]=6"),
    ],
)
def test_validate_names_what_is_out_of_range(change, sentence):
    arguments = {"page_table": TABLE, "seq_lens": LENS, "num_pages": 4, "page_size": 4, "num_tokens": 5}
    with pytest.raises(ValueError, match=sentence):
        validate(**(arguments | change))
