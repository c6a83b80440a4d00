"""The demo model in ComfyUI's own classes: loaders that stand in for Load Diffusion Model and Load CLIP.

The stock loaders take every Wan transformer for one with heads of 128 and a 4096 wide text encoder; the demo has 32
and 128. Only the numbers differ: the classes, the sampler and the latent format are ComfyUI's.
"""

import json

import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import comfy.utils
import folder_paths
import torch

TOKENS = 512


class NativeDemoModel:
    CATEGORY = "test"
    FUNCTION = "load"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {"unet_name": (folder_paths.get_filename_list("diffusion_models"),)}}

    def load(self, unet_name):
        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        weights, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
        told = {name: json.loads(value) for name, value in metadata.items()}
        found = comfy.model_detection.detect_unet_config(weights, "")
        config = comfy.supported_models.WAN21_T2V(
            {**found, "num_heads": told["num_heads"], "text_dim": told["text_dim"]}
        )
        config.set_inference_dtype(torch.float32, None)
        model = config.get_model(weights, "")
        model.load_model_weights(weights, "")
        for name in ("latents_mean", "latents_std"):
            setattr(model.latent_format, name, torch.tensor(told[name]).view(1, -1, 1, 1, 1))
        device = comfy.model_management.get_torch_device()
        return (comfy.model_patcher.ModelPatcher(model, device, comfy.model_management.unet_offload_device()),)


class NativeDemoText:
    """The demo's text encoder on ordinary PyTorch, as transformers has it, behind the methods of a CLIP."""

    CATEGORY = "test"
    FUNCTION = "load"
    RETURN_TYPES = ("CLIP",)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"directory": ("STRING", {"default": ""})}}

    def load(self, directory):
        return (DemoText(directory),)


class DemoText:
    def __init__(self, directory):
        from transformers import AutoTokenizer, UMT5EncoderModel

        self.tokenizer = AutoTokenizer.from_pretrained(f"{directory}/tokenizer")
        self.model = UMT5EncoderModel.from_pretrained(f"{directory}/text_encoder", dtype=torch.float32)

    @property
    def cond_stage_model(self):
        return self.model

    def clone(self):
        return self

    def tokenize(self, text):
        return self.tokenizer(
            text, padding="max_length", max_length=TOKENS, truncation=True, add_special_tokens=True, return_tensors="pt"
        )

    def encode_from_tokens_scheduled(self, tokens):
        mask = tokens["attention_mask"]
        states = self.model(tokens["input_ids"], attention_mask=mask).last_hidden_state
        return [[states * mask[..., None], {}]]


class NativeStepPatch:
    """A block patch that looks at the sampler's step, which no compiled program can."""

    CATEGORY = "test"
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"model": ("MODEL",), "reads_sigmas": ("BOOLEAN", {"default": True})}}

    def patch(self, model, reads_sigmas):
        def scale_by_step(args, extra):
            sigma = float(args["transformer_options"]["sigmas"][0]) if reads_sigmas else 0.0
            out = extra["original_block"](args)
            return {"img": out["img"] * (1 - 0.01 * sigma)}

        patched = model.clone()
        patched.set_model_patch_replace(scale_by_step, "dit", "double_block", 0)
        return (patched,)


NODE_CLASS_MAPPINGS = {
    "NativeDemoModel": NativeDemoModel,
    "NativeDemoText": NativeDemoText,
    "NativeStepPatch": NativeStepPatch,
}
