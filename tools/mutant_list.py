"""The listed mutants, by clause: what is broken, where, and which tests must notice.

Each is the smallest mistake against its clause that still runs.  Read next: `mutants.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One planted mistake: in `file`, the only `old` becomes `new`; `tests` are pytest arguments."""

    clause: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


HOST = "tests/host/"
SANITIZER = "tests/test_sanitizer.py"
TOUR = "tests/test_tour.py"
LOOP = "tests/graphs/test_decode_loop.py"
SHAPES = "tests/graphs/test_shapes.py"
APPEND = "tests/kernels/test_append.py"
COPIES = "tests/kernels/test_copy_columns.py"
ATTENTION = "tests/kernels/test_causal_attention.py"
INVARIANCE = "tests/kernels/test_attention_invariance.py"

MUTANTS: tuple[Mutant, ...] = (
    # ---- granularity and planes
    Mutant("C2.1", "a trim rounds the frontier's page away", "pagedkv/address_space.py",
           "keep_ends = (np.maximum(self.frontier, provisional) + PAGE_MASK) & ~PAGE_MASK",
           "keep_ends = np.maximum(self.frontier, provisional) & ~PAGE_MASK", (HOST + "test_address_space.py", TOUR)),
    Mutant("C2.3", "pages of 64 tokens are counted as 65 would be", "pagedkv/quantities.py",
           "return (tokens + PAGE_MASK) >> PAGE_SHIFT", "return (tokens >> PAGE_SHIFT) + 1",
           (HOST + "test_quantities.py",)),
    Mutant("C3.1", "the MTP pool has the planes of Main", "pagedkv/config.py",
           "draft = KVGeometry(backend.layers,", "draft = KVGeometry(self.geometry.layers,",
           (HOST + "test_config.py", HOST + "test_layout.py")),
    Mutant("C3.3", "the MTP pool is named main", "pagedkv/config.py",
           'PoolConfig("mtp", self.resolved_profile, draft', 'PoolConfig("main", self.resolved_profile, draft',
           (HOST + "test_config.py",)),
    Mutant("C3.4", "Draft Full is page-major", "pagedkv/config.py",
           'backend.geometry, "head-major", pages', 'backend.geometry, "page-major", pages',
           (HOST + "test_config.py",)),
    Mutant("C3.5", "an append takes the page of the next block", "cuda_src/append.cu",
           "* table_width + (position >> kPageShift)]", "* table_width + ((position + 1) >> kPageShift)]", (APPEND,)),
    Mutant("C3.6", "a freed run is not merged with its left neighbour", "pagedkv/free_runs.py",
           "joins_left = index > 0 and self._ends[index - 1] == start", "joins_left = False",
           (HOST + "test_free_runs.py",)),
    Mutant("C3.7", "page-major heads stand a row apart", "pagedkv/planes.py",
           'return block_bytes if self.order == "page-major" else self.pages * block_bytes',
           'return self.row_bytes if self.order == "page-major" else self.pages * block_bytes',
           (HOST + "test_planes.py",)),
    Mutant("C3.8", "head-major pages stand a plane apart", "pagedkv/planes.py",
           'return self.kv_heads * block_bytes if self.order == "page-major" else block_bytes',
           "return self.kv_heads * block_bytes", (HOST + "test_planes.py",)),
    Mutant("C3.9", "the offset is taken modulo 32", "cuda_src/append.cu",
           "place.offset = position & kPageMask;", "place.offset = position & 31;", (APPEND,)),
    Mutant("C3.10", "page offsets are 32-bit", "cuda_src/page_address.cuh",
           "return plane.base + page * plane.page_bytes",
           "return plane.base + static_cast<int32_t>(page * plane.page_bytes)",
           ("tests/kernels/test_scenarios.py", "-k", "4_gib")),
    Mutant("C3.11", "the scale planes are left out of PageBytes", "pagedkv/config.py",
           "return sum(plane.page_bytes for plane in self.planes)",
           'return sum(plane.page_bytes for plane in self.planes if "code" in plane.role)',
           (HOST + "test_config.py", HOST + "test_planes.py", HOST + "test_layout.py")),
    # ---- profiles
    Mutant("C4.1", "an unknown profile is bf16", "pagedkv/profiles.py",
           "found = PROFILES.get(_ALIASES.get(name, name))",
           'found = PROFILES.get(_ALIASES.get(name, name), PROFILES["bf16"])', (HOST + "test_profiles.py",)),
    Mutant("C4.2", "V code comes after K scale", "pagedkv/profiles.py",
           "return tuple(planes)", "return tuple(sorted(planes, key=lambda plane: plane.role))",
           (HOST + "test_profiles.py",)),
    Mutant("C4.4", "E2M1 nibbles are swapped", "pagedkv/codecs.py",
           "def pack_pairs(codes: BytesArray) -> BytesArray:",
           "def pack_pairs(codes: BytesArray) -> BytesArray:\n    codes = codes.reshape(*codes.shape[:-1], -1, 2)"
           "[..., ::-1].reshape(codes.shape)\n    return _pack(codes)\n\n\ndef _pack(codes: BytesArray) -> BytesArray:",
           (HOST + "test_codecs.py",)),
    Mutant("C4.5", "quantized profiles take any head_dim", "pagedkv/profiles.py",
           "allowed = HEAD_DIMS_QUANTIZED if profile.is_quantized else HEAD_DIMS_BF16", "allowed = HEAD_DIMS_BF16",
           (HOST + "test_profiles.py",)),
    # ---- capacity
    Mutant("C5.1", "M_min forgets that every lane needs a page", "pagedkv/config.py",
           "return max(self.blocks, self.max_concurrency)", "return self.blocks", (HOST + "test_config.py",)),
    Mutant("C5.2", "a capacity below S is accepted", "pagedkv/config.py",
           "if tokens < self.max_context:", "if tokens < 0:", (HOST + "test_config.py",)),
    Mutant("C5.4", "a slab is charged without its alignment", "pagedkv/layout.py",
           "return self.span_bytes + ALIGNMENT_BYTES", "return self.span_bytes", (HOST + "test_layout.py",)),
    Mutant("C5.3", "the headroom is not kept free", "pagedkv/planner.py",
           "curve.choose(budget_bytes=free_bytes - headroom_bytes(config),",
           "curve.choose(budget_bytes=free_bytes,", (HOST + "test_planner.py",)),
    Mutant("C5.5", "capacity is counted in bytes of 63 tokens", "pagedkv/planner.py",
           "return self.pages * PAGE_TOKENS", "return self.pages * (PAGE_TOKENS - 1)", (HOST + "test_planner.py",)),
    Mutant("C5.6", "the MTP lead is forgotten", "pagedkv/config.py",
           "mtp_pages = pages + self.max_concurrency * ceil_div(lead, PAGE_TOKENS)", "mtp_pages = pages",
           (HOST + "test_config.py",)),
    Mutant("C5.7", "packed parts are not rounded to 256 bytes", "pagedkv/packed_planes.py",
           "end += align_up(plane.span_bytes, SLAB_ALIGN_BYTES)", "end += plane.span_bytes",
           (HOST + "test_planner.py", HOST + "test_transfers.py", "tests/kernels/test_page_mover.py")),
    # ---- leases and reservations
    Mutant("C6.1", "a released page keeps its serial", "pagedkv/pool.py",
           "        self.serials[ids] = 0\n", "", (HOST + "test_pool.py", HOST + "test_address_space.py")),
    Mutant("C6.2", "dematerialize gives to available", "pagedkv/pool.py",
           "        self.bound += ids.size\n        self.reserved += ids.size\n", "        self.bound += ids.size\n",
           (HOST + "test_pool.py",)),
    Mutant("C6.3", "a bundle takes before it has looked everywhere", "pagedkv/pool.py",
           "        if pages > pool.available:\n            return pool\n    for pool, pages in requests:\n",
           "        if pages > pool.available:\n            return pool\n", (HOST + "test_pool.py",)),
    Mutant("C6.4", "availability ignores reservations", "pagedkv/pool.py",
           "return self.capacity - self.allocated - self.reserved", "return self.capacity - self.allocated",
           (HOST + "test_pool.py",)),
    Mutant("C6.5", "a bound block has a lease", "pagedkv/address_space.py",
           "if not 0 <= block < self.membership_pages(row):",
           "if not 0 <= block < int(self.bound_end[row]) >> PAGE_SHIFT:",
           (HOST + "test_address_space.py",)),
    # ---- logical pages
    Mutant("C7.3", "a recycled descriptor keeps its serial", "pagedkv/logical_pages.py",
           "        self.serial[logical] = 0\n", "", (HOST + "test_address_space.py", HOST + "test_check.py",
                                                      HOST + "test_fuzz.py")),
    Mutant("C7.4", "a transfer is published whatever became of its content", "pagedkv/transfers.py",
           "if contents is not None and not np.array_equal(contents, transfer.contents):", "if False:",
           (HOST + "test_transfers.py",)),
    Mutant("C7.5", "a page is described with two references", "pagedkv/logical_pages.py",
           "        self.references[logical] = 1\n        self.active[logical] = 1\n",
           "        self.references[logical] = 2\n        self.active[logical] = 1\n",
           (HOST + "test_address_space.py",)),
    Mutant("C7.6", "a truncate inside a page keeps the content epoch", "pagedkv/address_space.py",
           "            self.pages.renew_content(self.members[row,", "            (lambda _: None)(self.members[row,",
           (HOST + "test_address_space.py",)),
    Mutant("C7.4", "a copy is published unseen", "pagedkv/transfer_engine.py",
           "        if transfer.number in self._seen:\n            self._compare(transfer)\n", "", (SANITIZER,)),
    Mutant("C7.4", "a fingerprint leaves the last plane out", "pagedkv/page_fingerprints.py",
           "        different = np.argwhere(expected != found)\n",
           "        different = np.argwhere(expected[:, :-1] != found[:, :-1])\n", (SANITIZER,)),
    Mutant("C8.3", "adjacent pages are copied one by one", "pagedkv/page_runs.py",
           "breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(destinations) != 1)) + 1",
           "breaks = np.arange(1, sources.size)", (HOST + "test_transfers.py",)),
    # ---- address spaces
    Mutant("C9.1", "membership counts bound pages", "pagedkv/address_space.py",
           "return int(self.mapped_end[row]) >> PAGE_SHIFT", "return int(self.bound_end[row]) >> PAGE_SHIFT",
           (HOST + "test_address_space.py",)),
    Mutant("C9.2", "prompt and output beyond S are activated", "pagedkv/activation.py",
           "if total > self.config.max_context:", "if total > 1 << 40:",
           (HOST + "test_sequence.py",)),
    Mutant("C9.3", "a mapping beyond the entitlement is not refused", "pagedkv/address_space.py",
           "        self.require_entitled(ends)\n        rows", "        rows", (HOST + "test_address_space.py",)),
    Mutant("C9.4", "a unit maps one column too few", "pagedkv/ledgers.py",
           "ends[pool] = pool_ends = spaces.frontier + entry.span",
           "ends[pool] = pool_ends = spaces.frontier + entry.span - (entry.span > 0)",
           (HOST + "test_unit_guard.py", TOUR)),
    Mutant("C9.5", "a failed unit commits", "pagedkv/ledgers.py",
           '        self.guard.require_open(unit, "fail")\n',
           '        self.guard.require_open(unit, "fail")\n        for pool, entry in unit.written.items():\n'
           "            self.spaces[pool].commit(entry.span)\n", (HOST + "test_unit_guard.py",)),
    Mutant("C9.6", "a trim keeps the trailing page", "pagedkv/address_space.py",
           "        self.mapped_end[rows] = keep_ends[rows]\n", "", (HOST + "test_address_space.py",)),
    Mutant("C9.7", "a finished row is not returned", "pagedkv/sequence.py",
           "        self._free_rows.append(row)\n", "", (HOST + "test_sequence.py",)),
    Mutant("C9.8", "finish keeps the second pool", "pagedkv/ledgers.py",
           "for spaces in self.spaces.values():\n            spaces.close(sequence.row)",
           "for spaces in list(self.spaces.values())[:1]:\n            spaces.close(sequence.row)",
           (HOST + "test_sequence.py",)),
    Mutant("C9.9", "a commit moves every pool", "pagedkv/ledgers.py",
           "            self.spaces[pool].commit(span)\n        self._end(unit)",
           "            for spaces in self.spaces.values():\n                spaces.commit(span)\n"
           "        self._end(unit)",
           (HOST + "test_unit_guard.py", HOST + "test_address_space.py")),
    Mutant("C9.10", "truncate may raise a frontier", "pagedkv/address_space.py",
           "if not 0 <= tokens <= committed:", "if not 0 <= tokens:", (HOST + "test_address_space.py",)),
    # ---- sequences
    Mutant("C10.1", "a stale handle is accepted", "pagedkv/sequence.py",
           "self.serials[sequence.row] != sequence.serial", "False", (HOST + "test_sequence.py",)),
    Mutant("C10.2", "a refused activation keeps its row", "pagedkv/activation.py",
           "        if isinstance(plan, Refusal):\n            return plan\n        if target.source",
           "        if isinstance(plan, Refusal):\n            self.sequences._free_rows[-1:] = []\n"
           "            return plan\n        if target.source", (HOST + "test_sequence.py",)),
    Mutant("C10.9", "a refusal that waiting cannot mend says it can", "pagedkv/activation.py",
           "self.config.blocks, forever=True,", "self.config.blocks, forever=False,",
           (HOST + "test_sequence.py", TOUR)),
    # ---- tables
    Mutant("C11.1", "ids beyond membership stay in the mirror", "pagedkv/address_space.py",
           "        self.table.mirror[row, :bound] = UNMAPPED\n", "", (HOST + "test_address_space.py",
           HOST + "test_check.py")),
    Mutant("C11.1", "entries that were left keep their pages", "pagedkv/sanitizer.py",
           "                self._device.copy(self._tables[pool][row, first:end], guard, self._stream)\n", "",
           (SANITIZER,)),
    Mutant("C11.1", "a fresh page keeps what it held", "pagedkv/sanitizer.py",
           "            self._ops.fill_pages(planes, table[row, first:end], words, stream=self._stream)\n",
           "            del row, first, end\n", (SANITIZER,)),
    Mutant("C11.1", "a finished sequence's entries stay", "pagedkv/store.py",
           "retain=retain, state=state)\n        self._withdraw()\n",
           "retain=retain, state=state)\n", (SANITIZER,)),
    Mutant("C11.1", "a write into the guard page goes unseen", "pagedkv/sanitizer.py",
           "if (host.view(np.uint8) != GUARD_BYTE).any():", "if False:", (SANITIZER,)),
    Mutant("C11.2", "new slices are not published", "pagedkv/store.py",
           "        self._publish(slices)\n        return unit", "        return unit", (TOUR, LOOP)),
    Mutant("C11.3", "batch order is taken for row order", "graphs/control_buffers.py",
           "self.ingress_host[:count] = rows", "self.ingress_host[:count] = np.arange(count)", (SHAPES,)),
    # ---- units
    Mutant("C12.1", "a unit freezes nothing", "pagedkv/unit_guard.py",
           "        self.rows_in_flight |= rows_mask\n", "", (HOST + "test_unit_guard.py",)),
    Mutant("C12.2", "finish does not ask the guard", "pagedkv/ledgers.py",
           "        self.guard.require_thawed(1 << sequence.row, operation)\n", "",
           (HOST + "test_unit_guard.py", TOUR)),
    Mutant("C12.3", "a unit is committed before it completed", "pagedkv/store.py",
           "        if unit.number not in self._completed:\n            raise",
           "        if False:\n            raise", ("tests/test_store.py",)),
    Mutant("C12.4", "a device error does not latch the store", "pagedkv/store_life.py",
           "        if isinstance(error, DeviceFault):\n            self._store.latch(error)\n",
           "        del error\n", ("tests/test_store.py",)),
    Mutant("C12.4", "corruption is reported and the store goes on", "pagedkv/sanitizer.py",
           "        self._latch(error)\n", "", (SANITIZER,)),
    # ---- speculation
    Mutant("C13.1", "more columns are accepted than were written", "pagedkv/ledgers.py",
           "if (counts > limits).any():", "if False:", (HOST + "test_unit_guard.py",)),
    Mutant("C13.2", "rejected columns are committed too", "pagedkv/ledgers.py",
           "return self.spaces[pool].spread(unit.rows, counts)", "return unit.written[pool].span",
           (HOST + "test_unit_guard.py", TOUR)),
    # ---- ops
    Mutant("C14.1", "a plane of any form is accepted", "pagedkv/views.py",
           '        check_array(name, plane, geometry.dtype, shape, "C14.2")\n', "",
           ("tests/kernels/test_views.py",)),
    Mutant("C14.2", "a workspace that is too small is accepted", "pagedkv/ops.py",
           "if given_bytes < needed_bytes:", "if False:", (ATTENTION,)),
    Mutant("C14.4", "inert columns are written", "cuda_src/append.cu",
           "if (live_columns != nullptr && column >= live_columns[entry]) return place;", "", (APPEND,)),
    Mutant("C10.5", "the last committed column of a tail is left behind", "pagedkv/ops.py",
           "np.int32(columns * geometry.row_bytes)", "np.int32((columns - 1) * geometry.row_bytes)", (COPIES,)),
    Mutant("C10.5", "a tail's copy takes what lies behind the frontier", "cuda_src/page_moves.cu",
           "at < word_bytes;", "at < head_bytes;", (COPIES,)),
    Mutant("C14.5", "a query does not see its own key", "cuda_src/causal_attention.cu",
           "if (page_begin + key > row_positions[r]) scores[half][r] = -infinity();",
           "if (page_begin + key >= row_positions[r]) scores[half][r] = -infinity();", (ATTENTION,)),
    Mutant("C14.6", "masked keys weigh zero instead of being left out", "cuda_src/causal_attention.cu",
           "if (page_begin + key <= row_positions[r]) o[r] = fused(weights[key * kRows + r], value, o[r]);",
           "o[r] = fused(weights[key * kRows + r], value, o[r]);", (INVARIANCE, ATTENTION)),
    # ---- graphs
    Mutant("C15.1", "capture allocates anew", "graphs/unit.py",
           "        self._buffer_next = 0\n        self.device.copy",
           "        self._buffers = []\n        self._buffer_next = 0\n"
           "        self.device.copy", (SHAPES, LOOP)),
    Mutant("C15.2", "the width is not in the key", "graphs/key.py",
           "batch=batch, width=width, is_masked=True", "batch=batch, width=1, is_masked=True", (SHAPES, LOOP)),
    Mutant("C15.3", "lengths are frozen at capture", "graphs/capture.py",
           "            self._store.launch_graph(self.graph)\n",
           "            if not self.replays:\n                self._store.launch_graph(self.graph)\n", (LOOP,)),
    # ---- invariants: each check of C16 is left out
    *(
        Mutant(f"C16.{number}", "a check that nobody calls", "pagedkv/check.py", f"    {call}\n", "    pass\n",
               (HOST + "test_check.py",))
        for number, call in (
            (2, "check_2_planes_share_one_frontier(pool)"),
            (1, "check_1_one_replica_per_lease(spaces)"),
            (3, "check_3_one_id_for_all_planes(pool, spaces)"),
            (4, "check_4_occupancy(spaces)"),
            (5, "check_5_identities_are_independent(spaces)"),
            (6, "check_6_frontiers(spaces)"),
            (7, "check_7_one_writer(spaces, retained)"),
            (8, "check_8_shared_pages_are_immutable(spaces, retained)"),
            (10, "check_10_entitlement_is_reserved(spaces)"),
            (12, "check_12_rows(ledgers, spaces)"),
            (11, "check_11_units_are_covered(ledgers)"),
            (13, "check_13_pools_are_separate(ledgers)"),
            (17, "check_17_launches_are_covered(ledgers)"),
        )
    ),
)
