"""out.copy_(rows), where `out` is columns of a wider buffer: at copy speed, which torch's strided copy does not reach. Bit-exact by nature.

    out   [B, L, W]  columns of a contiguous buffer, 16-byte aligned, W divisible by 8; written and returned
    rows  [B, L, W]  bfloat16 or float16, rows uniform over B · L
"""

from __future__ import annotations

import ctypes

from . import build
from .nvrtc import Launch
from .proof import FusedOp
from .slices import ceil_div, layout, why_not_plain, why_not_vectors

ROWS, BLOCK = 4, 128  # ROWS as COPY_ROWS in cu/column_copy.cu


def column_copy_reference(out, rows):
    return out.copy_(rows)


class ColumnCopy(FusedOp):
    name, label = "column_copy", "copies of attention"

    reference = staticmethod(column_copy_reference)

    def key(self, out, rows):
        return layout(out), layout(rows)

    def why_not(self, out, rows) -> str | None:
        reason = why_not_plain("out", out, 3) or why_not_plain("rows", rows, 3)
        if reason:
            return reason
        if out.shape != rows.shape or out.dtype != rows.dtype or out.device != rows.device:
            return f"out is {tuple(out.shape)} {out.dtype} on {out.device}, rows are {tuple(rows.shape)} {rows.dtype} on {rows.device}"
        reason = why_not_vectors("out", out, out.data_ptr()) or why_not_vectors("rows", rows, rows.data_ptr())
        if reason:
            return reason
        if ceil_div(out.shape[0] * out.shape[1], ROWS) > 65535:
            return f"{out.shape[0] * out.shape[1]} rows are more than one launch takes"
        return None

    def proof_key(self, out, rows):
        return (out.shape[2],)

    def shadow(self, out, rows):
        return out.new_empty_strided(out.shape, out.stride()), rows

    def prepare(self, variant, out, rows):
        batch, tokens, width = out.shape
        launch = Launch(
            build.module(out.device.index, out.dtype), "column_copy", (ceil_div(width, 8 * BLOCK), ceil_div(batch * tokens, ROWS), 1), BLOCK, 2,
            (*(ctypes.c_int64(v) for v in (out.stride(1), rows.stride(1), batch * tokens)), ctypes.c_int(width)),
        )

        def run(out, rows):
            launch(out.data_ptr(), rows.data_ptr())
            return out

        return run


column_copy = ColumnCopy()
