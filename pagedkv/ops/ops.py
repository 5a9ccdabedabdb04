"""The ops: checked launches of the kernels on one explicit stream.  (C14.2, C14.4)

    append, append_prefix                     write K and V rows through the codec
    causal_attention, causal_attention_cached append then attend; attend only
    context_attention                         a draft block attends to the whole context and to itself
    zero_pages, fill_pages                    clear whole page groups, or fill them with a word
    plane_table, pack_pages, unpack_pages     gather and scatter whole page groups, for copies to and from the Host
    copy_columns                              copy a page group's committed columns to another (C10.5)
    accept_greedy                             count the columns of a verify unit that are right (C13.1)
    bf16_from_f32, f32_from_bf16              conversions (NumPy and CuPy have no BF16)
    encode_unrotated                          codec edges, for tests (codecs 6)

Every op allocates nothing, synchronizes nothing and takes its stream.  Before the first launch it refuses an array of
another dtype, shape, layout or alignment, arrays that overlap, and a plane that is not of its geometry (MisuseError); a
refusal changes nothing.  Arrays are device arrays in NumPy order, C-contiguous; BF16 is uint16 bits:

    q, out (B, W, Hq, D)   k, v (B, W, Hkv, D)   lse (B, W, Hq) float32   workspace uint8, at least `workspace_bytes`
    first_positions, context_lengths, valid_columns, counts, table_rows (B,) int32

What cannot be checked without reading the device stays with the caller: mapped blocks, distinct table rows, positions
below max_context, -1 rows only where no column is live (C14.2, C14.4).
"""

from __future__ import annotations

from pagedkv.devices.protocol import Device
from pagedkv.ops import append as append_ops
from pagedkv.ops import attention, page_moves, verify
from pagedkv.ops.modules import Kernels
from pagedkv.values.planes import PageOrder
from pagedkv.values.profiles import Profile, resolve_profile


class Ops:
    """The ops of one device; modules load at first use, or all at once by `prepare`."""

    def __init__(self, device: Device) -> None:
        self.kernels = Kernels(device)

    def prepare(
        self, profile: str | Profile, head_dim: int, *, order: PageOrder = "page-major", counts_events: bool = False
    ) -> None:
        """Compile and load every kernel of one (profile, head_dim), so that a capture need not.

        Args:
            order: "head-major" adds context attention, which the BF16 planes of a draft have.
            counts_events: adds the appends that count codec events, which a view with `codec_counts` needs.

        Raises:
            ConfigError: a profile or head_dim outside C4.5, or a head-major one outside context attention's (C14.4).
        """
        self.kernels.attention(resolve_profile(profile), head_dim)
        if counts_events:
            self.kernels.encoding(resolve_profile(profile), head_dim, counts_events=True)
        if order == "head-major":
            self.kernels.context(head_dim)
        self.kernels.page_moves()

    append = append_ops.append
    append_prefix = append_ops.append_prefix
    encode_unrotated = append_ops.encode_unrotated
    causal_attention = attention.causal_attention
    causal_attention_cached = attention.causal_attention_cached
    context_attention = attention.context_attention
    zero_pages = page_moves.zero_pages
    fill_pages = page_moves.fill_pages
    plane_table = page_moves.plane_table
    pack_pages = page_moves.pack_pages
    unpack_pages = page_moves.unpack_pages
    copy_columns = page_moves.copy_columns
    accept_greedy = verify.accept_greedy
    bf16_from_f32 = page_moves.bf16_from_f32
    f32_from_bf16 = page_moves.f32_from_bf16
