"""PageFingerprints: digests of page groups, on the device and in records on the Host.  (C7.4, C8.3, C12.4)

    fingerprints = fingerprint(pool, page_ids, columns)       (n, planes) uint64
                                                              row i: page i; column j: plane j, in ordinal order (C4.2)

A digest covers the first columns[i] rows of every KV head of a page in one plane.  So the digests of a page and its
copy agree if those bytes agree, wherever the copy lies; provisional bytes behind them do not count (C13.2).  The bytes
are copied to the host first, which is slow: sanitizer mode and tests use digests, a step never does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pagedkv.devices.protocol import Array, Device, Stream
from pagedkv.errors import Corruption
from pagedkv.values.planes import PageRecord, PlaneGeometry
from pagedkv.values.quantities import PAGE_TOKENS

Fingerprints = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int32]

DIGEST_BYTES = 8


class PageFingerprints:
    """Computes digests of the pools of one store.

    Args:
        device, stream: of the planes, and of everything that writes them.
        planes: per pool, every plane with its geometry, in ordinal order.
        latch: called with the first difference, to stop the store.
    """

    def __init__(
        self, device: Device, stream: Stream, planes: Mapping[str, Sequence[tuple[Array, PlaneGeometry]]], *,
        latch: Callable[[Corruption], None] | None = None,
    ) -> None:
        self._device = device
        self._stream = stream
        self._planes = planes
        self._latch = latch

    def fingerprint(self, pool: str, page_ids: Ids, columns: Ids) -> Fingerprints:
        """Return the digests of page groups on the device; waits for the stream.

        page_ids: (n,) int32, 0 <= id < N.  columns: (n,) int32, 0 to 64, how many rows of each page count.
        """
        digests = []
        for plane, geometry in self._planes[pool]:
            host = [self._to_host(list(_heads(plane, geometry, page))) for page in page_ids.tolist()]
            self._stream.synchronize()
            digests.append([_digest(heads, count) for heads, count in zip(host, columns.tolist(), strict=True)])
        return _by_page(digests, page_ids.size)

    def fingerprint_records(
        self, pool: str, arena: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], columns: Ids
    ) -> Fingerprints:
        """Return the digests of records that no copy writes now; no call to the device.  (C8.1)

        arena: (bytes,) uint8.  offsets: (n,) int64, where each record begins, in bytes.
        columns: (n,) int32, 0 to 64, how many rows of each page count.
        """
        record = PageRecord(tuple(geometry for _, geometry in self._planes[pool]))
        digests = []
        for geometry, inside in zip(record.planes, record.offsets_bytes, strict=True):
            payloads = [arena[at + inside : at + inside + geometry.page_bytes] for at in offsets.tolist()]
            heads = (geometry.kv_heads, PAGE_TOKENS, geometry.extent)
            digests.append([
                _digest(payload.view(geometry.dtype).reshape(heads), count)
                for payload, count in zip(payloads, columns.tolist(), strict=True)
            ])
        return _by_page(digests, offsets.size)

    def require_same(self, what: str, pool: str, page_ids: Ids, expected: Fingerprints, got: Fingerprints) -> None:
        """Raise Corruption at the first page and plane whose digests differ, and latch; `what` names it.  (C7.4)"""
        different = np.argwhere(expected != got)
        if not different.size:
            return
        index, plane = different[0].tolist()
        geometry = self._planes[pool][plane][1]
        error = Corruption(
            f"{what} of page {int(page_ids[index])} of pool {pool}",
            expected=f"the committed bytes of plane {geometry.role} of layer {geometry.layer} as they were",
            got=f"others; {len(np.unique(different[:, 0]))} of {len(expected)} pages differ",
            remedy="use nothing of it; find who wrote there", clause="C7.4",
            pool=pool, page_id=int(page_ids[index]), role=geometry.role, layer=geometry.layer,
        )
        if self._latch is not None:
            self._latch(error)
        raise error

    def _to_host(self, heads: list[Array]) -> list[npt.NDArray[np.generic]]:
        host = [np.empty(head.shape, head.dtype) for head in heads]
        for target, head in zip(host, heads, strict=True):
            self._device.copy(target, head, self._stream)
        return host


def _heads(plane: Array, geometry: PlaneGeometry, page: int) -> Iterator[Array]:
    """Yield the rows (64, X) of each KV head of a page; each is contiguous in both page orders."""
    for head in range(geometry.kv_heads):
        yield plane[page, head] if geometry.order == "page-major" else plane[head, page]


def _digest(heads: Array | Sequence[Array] | Iterator[Array], columns: int) -> int:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for rows in heads:
        digest.update(np.ascontiguousarray(rows[:columns]).view(np.uint8).data)
    return int.from_bytes(digest.digest(), "little")


def _by_page(by_plane: list[list[int]], pages: int) -> Fingerprints:
    return np.array(by_plane, np.uint64).reshape(len(by_plane), pages).T
