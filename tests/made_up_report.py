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
    "blocks_mounted": 57,
    "steps": 20,
    "ops": [
        {"op": "residual_gate", "label": "residual gates", "sites": 114, "launches": 2280, "state": "proven", "saved_ms_per_step": 3.0},
        {"op": "layer_norm_modulate", "label": "modulated LayerNorms", "sites": 115, "launches": 2280, "state": "proven", "saved_ms_per_step": 4.8},
        {"op": "qk_norm_rope", "label": "q/k norms + RoPE", "sites": 57, "launches": 1140, "state": "proven", "saved_ms_per_step": 6.0},
        {"op": "head_concat", "label": "concats of v", "sites": 19, "launches": 380, "state": "proven", "saved_ms_per_step": 1.24},
        {"op": "gelu_concat", "label": "GELU + concat", "sites": 38, "launches": 0, "state": "disabled", "saved_ms_per_step": None},
        {"op": "linear_gelu", "label": "GELUs in the GEMM", "sites": 0, "launches": 0, "state": "idle", "saved_ms_per_step": None},
    ],
    "saved_ms_per_step": 15.04,
    "ms_per_step": 134.3,
    "disabled": [
        {
            "op": "gelu_concat",
            "signature": "bfloat16 (3072, 12288) on Test GPU",
            "reason": "its bits differ from core's on this GPU",
        }
    ],
    "notes": ["a LayerNorm has a forward or hooks of another pack and stays as it is"],
    "text": "57/57 blocks · 114 gates · proven on Test GPU · −15.0 ms/step · 1 operation off: its bits differ from core's on this GPU; image unaffected",
}
