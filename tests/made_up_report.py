"""One report of a fused run with something in every entry, for the tests of what shows it: the report node and the panel."""

FUSED = {
    "schema": 1,
    "version": "0.1.0",
    "run": 1003,  # no server of these tests counts that far, so that its own runs are others
    "started": "2026-09-01T12:00:00",
    "seconds": 2.7,
    "outcome": "finished",
    "state": "fused",
    "reason": None,
    "model": "Flux",
    "gpu": "Test GPU",  # a picture of the panel must not look as if it were measured
    "dtype": "bfloat16",
    "core": "0.29.0",
    "torch": "2.11.0",
    "tier": "lossless",
    "high": None,
    "blocks": {"double": 19, "single": 38},
    "steps": 20,
    "ops": [
        {"op": "residual_gate", "label": "residual gates", "sites": 114, "launches": 2280, "state": "proven", "saved_ms_per_step": 3.0},
        {"op": "qk_norm_rope", "label": "QK norm and RoPE", "sites": 76, "launches": 1520, "state": "proven", "saved_ms_per_step": 12.0},
        {"op": "gelu_concat", "label": "GELU and join", "sites": 38, "launches": 0, "state": "disabled", "saved_ms_per_step": None},
        {"op": "linear_gelu", "label": "GELU in the GEMM", "sites": 0, "launches": 0, "state": "idle", "saved_ms_per_step": None},
    ],
    "saved_ms_per_step": 15.04,
    "ms_per_step": 134.3,
    "disabled": [{"op": "gelu_concat", "signature": "bf16 4608x15360", "reason": "3 values differ"}],
    "notes": ["double_blocks.3.img_mlp: another pack replaced its forward"],
    "text": "57/57 blocks · 114 gates · proven on Test GPU · −15 ms/step",
}
