"""accept_greedy: the accepted columns of a verify unit.  (C13.1)"""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.devices.protocol import Device
from pagedkv.errors import MisuseError
from pagedkv.ops.ops import Ops
from tests.kernels.arrays import Rng, to_device, to_host


@pytest.mark.parametrize(("batch", "width"), [(1, 1), (1, 5), (70, 16), (300, 2)])
def test_columns_up_to_the_first_wrong_draft_are_accepted(device: Device, rng: Rng, batch: int, width: int) -> None:
    """0 where no column is live; a dead column that happens to be right counts for nothing."""
    stream = device.stream()
    next_tokens = rng.integers(0, 3, (batch, width), dtype=np.int32)
    tokens = np.concatenate([np.full((batch, 1), 9, np.int32), next_tokens[:, :-1]], axis=1)
    tokens[rng.random((batch, width)) < 0.15] = 9
    valid = rng.integers(0, width + 1, batch, dtype=np.int32)
    valid[0] = width
    expected = []
    for row, chosen, live in zip(tokens.tolist(), next_tokens.tolist(), valid.tolist(), strict=True):
        right = [j + 1 < live and row[j + 1] == chosen[j] for j in range(width - 1)]
        expected.append(0 if live == 0 else 1 + [*right, False].index(False))
    accepted = to_device(device, stream, np.full(batch, -1, np.int32))

    Ops(device).accept_greedy(
        to_device(device, stream, tokens), to_device(device, stream, next_tokens), to_device(device, stream, valid),
        accepted, stream=stream,
    )

    assert to_host(device, stream, accepted).tolist() == expected


@pytest.mark.parametrize(("name", "shape", "dtype"), [
    ("tokens", (2, 3), np.int64), ("tokens", (6,), np.int32), ("next_tokens", (2, 2), np.int32),
    ("valid_columns", (3,), np.int32), ("accepted", (2, 1), np.int32), ("accepted", (2,), np.uint32),
])
def test_arrays_of_another_form_are_refused(
    device: Device, name: str, shape: tuple[int, ...], dtype: type[np.generic]
) -> None:
    """C14.2: the message names the array; and what is written lies beside what is read."""
    arrays = {part: device.zeros((2, 3) if "tokens" in part else (2,), np.int32)
              for part in ("tokens", "next_tokens", "valid_columns", "accepted")}
    with pytest.raises(MisuseError, match=f"{name} was refused"):
        Ops(device).accept_greedy(**{**arrays, name: device.zeros(shape, dtype)}, stream=device.stream())
    with pytest.raises(MisuseError, match="share no byte"):
        Ops(device).accept_greedy(**{**arrays, "accepted": arrays["valid_columns"]}, stream=device.stream())
