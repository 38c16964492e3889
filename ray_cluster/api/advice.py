"""What to change about a wrong parameter: the one table of the advice that errors give."""

from __future__ import annotations

from ray_cluster.errors import InvalidRequest

# OpenAI's parameters that this service has no counterpart for -> what to do instead
REFUSED: dict[str, str] = {
    "complexity": "Set the effort with 'num_inference_steps'.",
    "svg": "Images are pixels here; leave it out.",
    "frame_count": "Animations are not made here; ask for several images with 'n'.",
    "frame_duration_ms": "Animations are not made here; leave it out.",
    "markup": "Say in the prompt what is to change, and where with a mask.",
}
# those that only edits have
REFUSED_WITHOUT_IMAGE: dict[str, str] = dict.fromkeys(
    ("image", "images", "mask", "input_fidelity", "strength", "feather_px", "paste_back", "crop"),
    "It belongs to edits: send it with an 'image' to /v1/images/edits, or in a job.",
)
REFUSED_OF_UPLOADS = {
    "expires_after": "Files are kept for as long as the service says (storage.inputs_grace_s)."
}
REFUSED_MASK = "Variations have none; an edit of a part goes to /v1/images/edits."

# what to do about a value that is not offered
INSTEAD = {
    "quality": "Set the effort with 'num_inference_steps' instead.",
    "background": "Images have no alpha channel.",
    "output_format": "Pixels only: no vector images and no animations.",
    "seed": "For a random seed leave it out, or send null.",
    "num_inference_steps": "For the model's own number leave it out, or send null.",
    "controlnets": 'Write [{"name": "...", "image": "..."}]; GET /v1/controlnets lists names.',
}
# what to say in a field that is required
REQUIRED = {
    "prompt": "say what the image shall show",
    "name": "say how calls are to choose it",
    "base": "say for which model it is made",
    "source": "say where its file is",
    "preprocess": "say which detector makes the map",
    "purpose": "send 'vision'",
}
# what other servers call a field
ELSEWHERE = {
    "batch_size": "n",
    "cfg": "guidance_scale",
    "cfg_scale": "guidance_scale",
    "format": "output_format",
    "guidance": "guidance_scale",
    "height": "size",
    "negative": "negative_prompt",
    "num_images": "n",
    "num_images_per_prompt": "n",
    "num_outputs": "n",
    "num_steps": "num_inference_steps",
    "sampler_name": "sampler",
    "scheduler": "sampler",
    "width": "size",
    "denoising_strength": "strength",
    "image_strength": "strength",
    "init_image": "image",
    "mask_blur": "feather_px",
    "mask_image": "mask",
    "lora": "loras",
    "controlnet": "controlnets",
    "control": "controlnets",
    "control_image": "controlnets",
    "conditioning_scale": "scale",
    "controlnet_conditioning_scale": "scale",
    "control_guidance_start": "start",
    "control_guidance_end": "end",
    "strength": "scale",
    "weight": "scale",
    "lora_weights": "loras",
}
# how a value is written
FORMS = {
    "size": "'auto' or WIDTHxHEIGHT in pixels, like '64x64'",
    "name": "1 to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit",
    "sha256": "the 64 hexadecimal digits of the file's SHA-256, in lower case",
}
# what to change, by what is wrong: see :func:`wrong`
CHANGES = {
    "ask for less": "Make several calls.",
    "leave out": "Leave it out.",
    "leave one out": "Leave one of them out.",
    "lower steps": "Lower it, or raise num_inference_steps.",
    "once": "Give it once.",
    "remove": "Remove it.",
    "shorten": "Shorten it.",
    "stream": "Set stream to true.",
    "steps of allow": "Give min_inference_steps, or leave 'steps' out.",
    "steps in allow": "Add it, or leave one of them out.",
    "too large": "Send a smaller one.",
    "job urls": "Leave it out, or set it to 'url'.",
    "job events": "Leave it out and get /v1/jobs/{id}/events.",
    "no url": "Leave it out, or leave 'stream' out.",
    "inline": "Set 'response_format' to 'url', send a job, or ask for fewer images.",
    "guidance": "Leave it out, or set guidance_scale above 1.",
    "lossless": "Leave it out, or set output_format to jpeg or webp.",
    "recipe": "Leave it out, or set output_format to png.",
    "container": "Ask for 'png', or send a smaller image.",
    "mask": "Send a mask, or leave it out.",
    "pastes back": "Set it to true, or leave it out.",
    "paste back": "Set paste_back to true, or leave it out.",
    "any edits": "Leave the image out, or choose another model.",
    "other model": "Leave it out, or choose a model whose engine is 'steps' (GET /v1/models).",
    "text alone": "Send an image and a mask to /v1/images/edits, or choose another model.",
    "pictures": "Send one or several to /v1/images/edits, or choose another model.",
    "the image": "Send base64 or 'data:image/png;base64,...'.",
    "part": "Send the image in base64, or the id of an uploaded file.",
    "file": "Upload it again to /v1/files, or send the image itself.",
    "names loras": "Name some in 'loras', or leave it out.",
    "start": "Lower it, or leave the LoRAs out.",
    "file of lora": "Leave it out, or have it registered anew from a file that can be.",
    "for unets": "ControlNets are offered for UNets alone: leave it out, or choose another model.",
    "each lora": "Name each LoRA once, with the scale that it is to have.",
    "of steps": "Choose a model whose engine is 'steps' (GET /v1/models).",
    "part of cascade": "Register the LoRA for one of its models.",
    "source": "Give a path, a URL, 'builtin:NAME' or 'hf:OWNER/NAME'.",
    "credentials": "Leave them out: the nodes' own settings give access to their storage.",
    "smaller size": "Give a smaller 'size'.",
}


def wrong(
    param: str, what: str, change: str = "", *, code: str = "invalid_value", more: str = ""
) -> InvalidRequest:
    """Return the error for a parameter.

    Args:
        what: the end of a sentence that begins with the parameter: what was given, and what is
            allowed.
        change: key of :data:`CHANGES`.
        more: advice that depends on the call.
    """
    advice = CHANGES[change] if change else more
    return InvalidRequest(f"The parameter {param!r} {what}. {advice}".rstrip(), param, code)


def refused(name: str, instead: str) -> InvalidRequest:
    """Return the error for a parameter that is not offered, with what to do instead."""
    return wrong(name, "is not offered here", more=instead, code="unsupported_parameter")


def missing(name: str, what: str) -> InvalidRequest:
    """Return the error for a parameter that is required, with what to send."""
    return wrong(name, f"is required; {what}", code="missing_required_parameter")
