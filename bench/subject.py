"""The model that is measured: core's own FLUX classes with random weights when ComfyUI is there, the reference transformer otherwise."""

import dataclasses

import torch

from ..fusion import table
from . import reference_flux
from .progress import say
from .reference_flux import SIZES, randomise
from .reference_patcher import ReferenceModel, ReferencePatcher

GIB = 2**30
WORDS = {"dev": "FLUX.1-dev's size (19 + 38 blocks)", "small": "blocks of FLUX.1-dev's size, but 4 + 8 of them", "tiny": "tiny (2 + 3 blocks, width 256)"}


def size_for(device: torch.device) -> str:
    """FLUX.1-dev needs 24 GB for its weights alone."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return "dev" if memory >= 38 * GIB else "small" if memory >= 11 * GIB else "tiny"  # a "40 GB" card reports 39.4 GiB


class Subject:
    """`transformer` is called with reference_flux.example_inputs; `patcher` is the MODEL that nodes and samplers take."""

    def __init__(self, size, dtype, device, core, why_no_core, checkpoint=None):
        self.size, self.dtype, self.device, self.core, self.checkpoint = size, dtype, device, core, checkpoint
        say(f"loading {checkpoint.name}" if checkpoint else f"building {WORDS[size]} with random weights on {device}")
        with torch.no_grad():
            self.patcher = self._from_file() if checkpoint else self._from_core() if core else self._reference()
        self.transformer = self.patcher.model.diffusion_model
        table.register_comfy_kitchen()
        table.register_rope(reference_flux.apply_rope, True)
        if checkpoint:
            self.dtype = self.patcher.model.manual_cast_dtype or self.patcher.model.get_dtype()
            self.words = f"{checkpoint.name} through ComfyUI {core.version_text}'s UNETLoader, {str(self.dtype)[6:]}, on {device}"
            return
        origin = f"ComfyUI {core.version_text}'s own Flux class" if core else f"the reference transformer of bench/reference_flux.py ({why_no_core})"
        self.words = f"{origin}, {WORDS[size]}, {str(dtype)[6:]}, random weights, on {device}"

    def _from_core(self):
        """Core's BaseModel and classic ModelPatcher, as its loader would build them; the weights never touch the disk."""
        comfy = self.core.comfy
        known = {f.name for f in dataclasses.fields(comfy.ldm.flux.model.FluxParams)}
        params = {**reference_flux._COMMON, **reference_flux._SINCE_0_20, **SIZES[self.size]}
        config = comfy.supported_models.Flux({"image_model": "flux", **{k: v for k, v in params.items() if k in known}})
        config.set_inference_dtype(self.dtype, None)
        config.custom_operations = comfy.ops.disable_weight_init  # what core picks for a half-width file
        base = comfy.model_base.Flux(config, device=self.device)
        base.diffusion_model.requires_grad_(False).train(False)
        randomise(base.diffusion_model)
        return comfy.model_patcher.ModelPatcher(base, load_device=self.device, offload_device=torch.device("cpu"))

    def _from_file(self):
        """What a user's graph has: the file through core's own loader node."""
        folder, name = str(self.checkpoint.resolve().parent), self.checkpoint.name
        self.core.folder_paths.add_model_folder_path("diffusion_models", folder, is_default=True)
        return self.core.nodes.UNETLoader().load_unet(name, "default")[0]

    def _reference(self):
        return ReferencePatcher(ReferenceModel(reference_flux.reference_flux(self.size, self.dtype, self.device)))

    def inputs(self, pixels: int, text: int, batch: int) -> dict:
        return reference_flux.example_inputs(self.transformer, pixels, pixels, text, batch, seed=7)


def left_behind(transformer) -> list:
    """Names of modules that still carry an instance `forward`: none, after any call."""
    return [name for name, module in transformer.named_modules() if "forward" in module.__dict__]
