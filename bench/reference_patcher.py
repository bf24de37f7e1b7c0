"""The part of core's MODEL contract that our nodes and wrappers use, over the reference transformer: nodes run and are tested without ComfyUI.

Same call shapes as core: `fn(executor, *args, **kwargs)`, `executor.class_obj` the live model (or the guider for "outer_sample"), a patcher's
wrappers merged into a copy of `transformer_options` when sampling starts, sampling under `torch.inference_mode()`.
"""
import torch
from torch import nn

from .reference_flux import example_inputs, reference_flux

OUTER_SAMPLE, APPLY_MODEL = "outer_sample", "apply_model"


def copy_containers(value):
    """Dicts and lists are copied, what they hold is shared: how core clones model_options since 0.20."""
    if isinstance(value, dict):
        return {k: copy_containers(v) for k, v in value.items()}
    return list(value) if isinstance(value, list) else value


class Executor:
    """A call with wrappers around it; calling an executor runs the next wrapper, or the call itself after the last."""
    def __init__(self, original, class_obj, wrappers, idx=0):
        self.original, self.class_obj, self.wrappers, self.idx = original, class_obj, list(wrappers), idx

    def execute(self, *args, **kwargs):
        if self.idx == len(self.wrappers):
            return self.original(*args, **kwargs)
        return self.wrappers[self.idx](self, *args, **kwargs)

    def __call__(self, *args, **kwargs):
        return Executor(self.original, self.class_obj, self.wrappers, self.idx + 1).execute(*args, **kwargs)


def wrappers_of(transformer_options, kind):
    return [fn for fns in transformer_options.get("wrappers", {}).get(kind, {}).values() for fn in fns]


class OldReferenceModel(nn.Module):
    """Core's BaseModel: latents in float32, the transformer in its own dtype, a flow-matching prediction turned into a denoised latent.

    As of 0.3.64, where BaseModel has no `get_dtype_inference`.
    """
    def __init__(self, diffusion_model, manual_cast_dtype=None):
        super().__init__()
        self.diffusion_model, self.manual_cast_dtype, self.current_patcher = diffusion_model, manual_cast_dtype, None

    def get_dtype(self):
        return self.diffusion_model.dtype

    def apply_model(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        options = transformer_options or {}
        executor = Executor(self._apply_model, self, wrappers_of(options, APPLY_MODEL))
        return executor.execute(x, t, c_concat, c_crossattn, control, options, **kwargs)

    def _apply_model(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        dtype = self.manual_cast_dtype or self.get_dtype()
        x_in = x if c_concat is None else torch.cat([x, c_concat.to(x)], dim=1)
        extra = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in kwargs.items()}
        out = self.diffusion_model(x_in.to(dtype), t.float(), context=c_crossattn.to(dtype), control=control,
                                   transformer_options=dict(transformer_options or {}), **extra)
        return x - out.float() * t.view(-1, 1, 1, 1)


class ReferenceModel(OldReferenceModel):
    def get_dtype_inference(self):
        return self.manual_cast_dtype or self.get_dtype()


class ReferenceGuider:
    """What an OUTER_SAMPLE wrapper sees as `executor.class_obj`."""
    def __init__(self, patcher, conditions):
        self.model_patcher, self.conds = patcher, conditions
        self.model_options = copy_containers(patcher.model_options)
        merged = self.model_options.setdefault("transformer_options", {}).setdefault("wrappers", {})
        for kind, keyed in patcher.wrappers.items():
            for key, fns in keyed.items():
                merged.setdefault(kind, {}).setdefault(key, []).extend(fns)

    def sample(self, noise, latent_image, sigmas, callback, seed):
        executor = Executor(self.outer_sample, self, wrappers_of(self.model_options["transformer_options"], OUTER_SAMPLE))
        return executor.execute(noise, latent_image, None, sigmas, None, callback, True, seed, latent_shapes=[latent_image.shape])

    def outer_sample(self, noise, latent_image, sampler, sigmas, denoise_mask=None, callback=None, disable_pbar=False, seed=None, latent_shapes=None):
        self.inner_model = self.model_patcher.model
        options = dict(copy_containers(self.model_options["transformer_options"]), sample_sigmas=sigmas, cond_or_uncond=[0])
        x = sigmas[0] * noise + (1.0 - sigmas[0]) * latent_image
        try:
            for i in range(len(sigmas) - 1):
                sigma = sigmas[i].repeat(x.shape[0])
                denoised = self.inner_model.apply_model(x, sigma, transformer_options=dict(options, sigmas=sigma), **self.conds)
                if callback is not None:
                    callback(i, denoised, x, len(sigmas) - 1)
                x = x + (x - denoised) / sigmas[i] * (sigmas[i + 1] - sigmas[i])
        finally:
            del self.inner_model
        return x


class ReferencePatcher:
    def __init__(self, model, load_device=None):
        self.model, self.load_device = model, torch.device(load_device or next(model.parameters()).device)
        self.model_options, self.wrappers, self.attachments, self.object_patches = {"transformer_options": {}}, {}, {}, {}

    def clone(self):
        other = type(self)(self.model, self.load_device)
        other.model_options, other.wrappers = copy_containers(self.model_options), copy_containers(self.wrappers)
        other.attachments, other.object_patches = dict(self.attachments), dict(self.object_patches)
        return other

    def add_wrapper_with_key(self, wrapper_type, key, wrapper):
        self.wrappers.setdefault(wrapper_type, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, wrapper_type, key):
        self.wrappers.get(wrapper_type, {}).pop(key, None)

    def get_wrappers(self, wrapper_type, key):
        return self.wrappers.get(wrapper_type, {}).get(key, [])

    def set_attachments(self, key, attachment):
        self.attachments[key] = attachment

    def get_attachment(self, key):
        return self.attachments.get(key)

    def get_model_object(self, name):
        if name in self.object_patches:
            return self.object_patches[name]
        found = self.model
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def model_dtype(self):
        return self.model.get_dtype()

    def is_dynamic(self):
        return False

    def sample(self, latent, steps, conditions=None, seed=0, callback=None):
        """Euler steps over evenly spaced sigmas. `conditions`: c_crossattn, y, guidance; random ones from `seed` when absent.

        `callback(step, denoised, x, total)` runs after each step; what it raises leaves the sampler as an interrupt would.
        """
        with torch.inference_mode():
            conditions = conditions or self.random_conditions(latent.shape[0], seed=seed)
            noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(self.load_device)
            sigmas = torch.linspace(1.0, 0.0, steps + 1, device=self.load_device)
            return ReferenceGuider(self, conditions).sample(noise, latent.to(self.load_device, torch.float32), sigmas, callback, seed)

    def random_conditions(self, batch=1, text_tokens=16, seed=0):
        inputs = example_inputs(self.model.diffusion_model, text_tokens=text_tokens, batch=batch, seed=seed)
        return dict(c_crossattn=inputs["context"], y=inputs["y"], guidance=inputs["guidance"])


def reference_patcher(size="tiny", dtype=torch.bfloat16, device="cpu", seed=0, **options):
    model_class = OldReferenceModel if options.get("old_core") else ReferenceModel
    return ReferencePatcher(model_class(reference_flux(size, dtype, device, seed, **options)))
